#include "heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace ubep {

namespace {

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Fd::~Fd() {
    if (fd_ >= 0) ::close(fd_);
}

size_t page_size() {
    static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return size;
}

size_t page_align(size_t bytes) { return (bytes + page_size() - 1) / page_size() * page_size(); }

Fd make_heap() {
    Fd fd(memfd_create("ubep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd) fail("memfd_create");
    // Nobody can cut off pages that others have mapped, which would kill them by SIGBUS.
    if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) fail("F_SEAL_SHRINK");
    return fd;
}

void grow_heap(int fd, int64_t size) {
    if (ftruncate(fd, size) != 0) fail("ftruncate");
}

Mapping::Mapping(int fd, int64_t offset, size_t size) : size_(size) {
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    if (data == MAP_FAILED) fail("mmap");
    data_ = static_cast<char*>(data);
}

Mapping::~Mapping() { munmap(data_, size_); }

void Mapping::prefault() const {
#ifdef MADV_POPULATE_WRITE
    if (madvise(data_, size_, MADV_POPULATE_WRITE) == 0) return;
#endif
    for (size_t at = 0; at < size_; at += page_size()) {
        auto& byte = *reinterpret_cast<volatile char*>(data_ + at);
        byte = byte;  // NOLINT: the write is what brings the page in
    }
}

}  // namespace ubep
