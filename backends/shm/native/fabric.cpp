#include "fabric.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>

namespace ubep {

namespace {

std::atomic<unsigned> forks{0};

void count_fork() { forks.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

unsigned fork_generation() {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, count_fork); });
    return forks.load(std::memory_order_relaxed);
}

Fabric::Fabric(int rank, int world)
    : exchange_(std::make_unique<Exchange>(world + 16)), own_heap_(make_heap()), generation_(fork_generation()) {
    world_.rank = rank;
    world_.size = world;
    world_.dead = [this](int peer) { return dead(peer) && !closed(peer); };
    world_.closed = [this](int peer) { return closed(peer); };
    heap_size_ = static_cast<int64_t>(page_align(sizeof(Control)));
    grow_heap(own_heap_.get(), heap_size_);
    auto own = std::make_shared<Mapping>(own_heap_.get(), 0, heap_size_);
    new (own->data()) Control{};
    controls_.assign(world, nullptr);
    controls_[rank] = std::move(own);
}

void Fabric::join(const std::vector<std::string>& addresses, const std::vector<std::string>& secrets,
                  double timeout_s) {
    check_open();
    peers_ = exchange_->swap(world_.rank, own_heap_.get(), addresses, secrets, timeout_s);
    for (int peer = 0; peer < world_.size; peer++) {
        if (peer != world_.rank) {
            controls_[peer] = std::make_shared<Mapping>(peers_[peer].heap.get(), 0, page_align(sizeof(Control)));
        }
        world_.control.push_back(reinterpret_cast<Control*>(controls_[peer]->data()));
    }
}

void Fabric::reserve(size_t nbytes) {
    check_open();
    exchange_.reset();  // every rank has joined by now
    reserved_ = nbytes;
    grow_heap(own_heap_.get(), heap_size_ + static_cast<int64_t>(page_align(nbytes)));
}

int Fabric::map_window(bool prefault) {
    check_open();
    const size_t size = page_align(reserved_);
    Entry entry;
    entry.view.nbytes = reserved_;
    for (int peer = 0; peer < world_.size; peer++) {
        const int fd = peer == world_.rank ? own_heap_.get() : peers_[peer].heap.get();
        entry.mappings.push_back(std::make_shared<Mapping>(fd, heap_size_, size));
        entry.view.base.push_back(entry.mappings.back()->data());
    }
    if (prefault) entry.mappings[world_.rank]->prefault();
    heap_size_ += static_cast<int64_t>(size);
    windows_.push_back(std::move(entry));
    return static_cast<int>(windows_.size()) - 1;
}

void Fabric::populate_peers(int window) const {
    for (const auto& mapping : windows_.at(window).mappings) mapping->prefault();
}

void Fabric::check_open() const {
    if (generation_ != fork_generation()) {
        throw Closed("a forked child cannot use its parent's communicator; open one after the fork");
    }
    if (closed_) throw Closed("this fabric is closed");
}

char* Fabric::at(int window, int peer, size_t offset, size_t nbytes) const {
    check_open();
    const Window& view = windows_.at(window).view;
    if (offset > view.nbytes || nbytes > view.nbytes - offset) {
        throw std::out_of_range(std::to_string(nbytes) + " bytes at " + std::to_string(offset) +
                                " lie outside the window of " + std::to_string(view.nbytes) + " bytes");
    }
    return view.base.at(peer) + offset;
}

void Fabric::put(int window, int peer, size_t offset, const char* data, size_t nbytes) {
    std::memcpy(at(window, peer, offset, nbytes), data, nbytes);
    idle_calls_ = 0;
}

void Fabric::get(int window, int peer, size_t offset, char* data, size_t nbytes) const {
    std::memcpy(data, at(window, peer, offset, nbytes), nbytes);
}

void Fabric::signal(int window, int peer, size_t offset, uint64_t word) {
    store_word(at(window, peer, offset, sizeof word), word);
    ring(*world_.control[peer]);
    idle_calls_ = 0;
}

int64_t Fabric::wait(int window, size_t offset, uint32_t epoch, uint32_t minimum, double timeout_s) {
    char* flag = at(window, world_.rank, offset, sizeof(uint64_t));
    const int64_t end = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
    Patience patience(*world_.control[world_.rank], world_.rule);
    for (;;) {
        const uint64_t word = load_word(flag);
        if (word_epoch(word) == epoch && word_payload(word) >= minimum) return word_payload(word);
        if (!patience.wait()) continue;
        if (now_ns() >= end || world_.interrupted()) return -1;
        for (int peer = 0; peer < world_.size; peer++) {
            if (world_.dead(peer)) return -1;
        }
    }
}

void Fabric::progress(double timeout_s) {
    check_open();
    if (idle_calls_++ < world_.rule.yields) {
        sched_yield();
        return;
    }
    Control& own = *world_.control[world_.rank];
    const int64_t left = static_cast<int64_t>(timeout_s * 1e9);
    timespec nap{0, static_cast<long>(std::min(left, world_.rule.nap_ns))};
    const uint32_t heard = own.rings.load(std::memory_order_relaxed);
    own.waiting.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &own.rings, FUTEX_WAIT, heard, &nap, nullptr, 0);
    own.waiting.fetch_sub(1, std::memory_order_relaxed);
}

bool Fabric::dead(int peer) const {
    if (peer == world_.rank || peers_.empty()) return false;
    const Peer& other = peers_[peer];
    if (other.process) {
        pollfd ended{other.process.get(), POLLIN, 0};
        return poll(&ended, 1, 0) > 0;
    }
    return other.pid > 0 && kill(other.pid, 0) != 0 && errno == ESRCH;
}

bool Fabric::closed(int peer) const {
    return world_.control[peer]->closed.load(std::memory_order_acquire) != 0;
}

void Fabric::close() {
    if (closed_) return;
    closed_ = true;
    if (generation_ == fork_generation() && !world_.control.empty()) {
        world_.control[world_.rank]->closed.store(1, std::memory_order_release);
        for (Control* control : world_.control) ring(*control);
    }
    windows_.clear();
    world_.control.clear();
    controls_.clear();
    peers_.clear();
    own_heap_ = Fd();
    exchange_.reset();
}

}  // namespace ubep
