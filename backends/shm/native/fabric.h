// One rank's view of all ranks' memory: windows, put, signal, wait, and who is still alive.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "doorbell.h"
#include "exchange.h"
#include "flags.h"
#include "heap.h"

namespace ubep {

// What an operation needs of a window: where it lies for every rank.
struct Window {
    std::vector<char*> base;
    size_t nbytes = 0;
};

// What an operation needs of its peers. Native tests make one for ranks that are threads.
struct World {
    int rank = 0;
    int size = 1;
    std::vector<Control*> control;
    WaitRule rule;
    std::function<bool(int peer)> dead = [](int) { return false; };    // its process ended without closing
    std::function<bool(int peer)> closed = [](int) { return false; };  // it will take no part any more
    std::function<bool()> interrupted = [] { return false; };  // a signal that Python should see
};

class Fabric {
  public:
    Fabric(int rank, int world);

    const std::string& address() const { return exchange_->address(); }
    const std::string& secret() const { return exchange_->secret(); }
    void join(const std::vector<std::string>& addresses, const std::vector<std::string>& secrets,
              double timeout_s);

    // A window comes into being in three steps, with a meeting of all ranks after each.
    void reserve(size_t nbytes);             // the own heap grows
    int map_window(bool prefault);           // every rank's new piece is mapped, the own one made present
    void populate_peers(int window) const;   // page tables for the peers' pieces

    void put(int window, int peer, size_t offset, const char* data, size_t nbytes);
    void get(int window, int peer, size_t offset, char* data, size_t nbytes) const;
    void signal(int window, int peer, size_t offset, uint64_t word);
    // Payload, or -1 after the timeout or when a peer has failed.
    int64_t wait(int window, size_t offset, uint32_t epoch, uint32_t minimum, double timeout_s);
    void progress(double timeout_s);

    bool dead(int peer) const;
    bool closed(int peer) const;
    int pid(int peer) const { return static_cast<int>(peers_[peer].pid); }
    void close();
    void check_open() const;

    World& world() { return world_; }
    const Window& window(int number) const { return windows_.at(number).view; }
    MappingPtr own_mapping(int number) const { return windows_.at(number).mappings.at(world_.rank); }
    const std::vector<MappingPtr>& mappings(int number) const { return windows_.at(number).mappings; }

  private:
    struct Entry {
        Window view;
        std::vector<MappingPtr> mappings;
    };

    char* at(int window, int peer, size_t offset, size_t nbytes) const;

    World world_;
    std::unique_ptr<Exchange> exchange_;
    Fd own_heap_;
    std::vector<Peer> peers_;
    std::vector<MappingPtr> controls_;
    std::vector<Entry> windows_;
    int64_t heap_size_ = 0;
    size_t reserved_ = 0;
    int idle_calls_ = 0;
    unsigned generation_;
    bool closed_ = false;
};

// Thrown for any use after close, or in a forked child.
struct Closed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// How often this process was forked off; tells a child from the process that opened a fabric.
unsigned fork_generation();

}  // namespace ubep
