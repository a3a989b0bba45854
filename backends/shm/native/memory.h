// Where results lie: blocks that are reused, and shared regions that combine can read in place.
#pragma once
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "heap.h"

namespace ubep {

// Blocks of private memory, kept for reuse so that no result costs page faults twice.
class Pool : public std::enable_shared_from_this<Pool> {
  public:
    struct Block {
        char* data = nullptr;
        size_t size = 0;
    };

    ~Pool();
    Block take(size_t size);
    void give(Block block);

  private:
    std::mutex mutex_;
    std::vector<Block> free_;
};

// A part of the shared heap that holds the rows of at most one dispatch at a time.
struct Region {
    MappingPtr mapping;  // null in native tests, which own the memory themselves
    char* data = nullptr;
    size_t size = 0;
    std::atomic<bool> busy{false};
};

// Memory of one result. Goes back to where it came from when the last tensor on it dies.
class Lease {
  public:
    Lease() = default;
    Lease(std::shared_ptr<Pool> pool, size_t size);
    // Memory that is only kept mapped.
    Lease(MappingPtr mapping, char* data);
    // Takes the region if it is free and large enough.
    static Lease from(const std::shared_ptr<Region>& region, size_t size);
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();
    char* data() const { return region_ ? region_->data : block_.data; }
    explicit operator bool() const { return data() != nullptr; }

  private:
    std::shared_ptr<Pool> pool_;
    Pool::Block block_;
    std::shared_ptr<Region> region_;
    MappingPtr mapping_;
};

}  // namespace ubep
