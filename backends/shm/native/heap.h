// Shared memory of one rank: an anonymous file that grows by windows and vanishes with its last user.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace ubep {

// A file descriptor that closes itself.
class Fd {
  public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Fd();
    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

  private:
    int fd_ = -1;
};

// A mapped piece of a heap; unmapped when its last holder lets go, tensors included.
class Mapping {
  public:
    Mapping(int fd, int64_t offset, size_t size);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    char* data() const { return data_; }
    size_t size() const { return size_; }
    void prefault() const;

  private:
    char* data_;
    size_t size_;
};

using MappingPtr = std::shared_ptr<Mapping>;

size_t page_size();
size_t page_align(size_t bytes);

Fd make_heap();
// Raises std::system_error when the file cannot grow.
void grow_heap(int fd, int64_t size);

}  // namespace ubep
