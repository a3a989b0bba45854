#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

namespace ubep {

namespace {

constexpr size_t kAlign = 64;
constexpr size_t kKept = 8;

}  // namespace

Pool::~Pool() {
    for (const Block& block : free_) std::free(block.data);
}

Pool::Block Pool::take(size_t size) {
    {
        std::lock_guard lock(mutex_);
        // The smallest that fits, unless it would waste most of itself.
        size_t best = free_.size();
        for (size_t i = 0; i < free_.size(); i++) {
            if (free_[i].size < size || free_[i].size > 4 * size + (size_t{1} << 16)) continue;
            if (best == free_.size() || free_[i].size < free_[best].size) best = i;
        }
        if (best < free_.size()) {
            Block found = free_[best];
            free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
            return found;
        }
    }
    const size_t rounded = (std::max<size_t>(size, 1) + kAlign - 1) / kAlign * kAlign;
    char* data = static_cast<char*>(std::aligned_alloc(kAlign, rounded));
    if (data == nullptr) throw std::bad_alloc();
    return {data, rounded};
}

void Pool::give(Block block) {
    Block dropped = block;
    {
        std::lock_guard lock(mutex_);
        free_.push_back(block);
        if (free_.size() <= kKept) return;
        dropped = free_.front();
        free_.erase(free_.begin());
    }
    std::free(dropped.data);
}

Lease::Lease(std::shared_ptr<Pool> pool, size_t size) : pool_(std::move(pool)), block_(pool_->take(size)) {}

Lease::Lease(MappingPtr mapping, char* data) : block_{data, 0}, mapping_(std::move(mapping)) {}

Lease Lease::from(const std::shared_ptr<Region>& region, size_t size) {
    Lease lease;
    if (region && size <= region->size && !region->busy.exchange(true, std::memory_order_acquire)) {
        lease.region_ = region;
    }
    return lease;
}

Lease::Lease(Lease&& other) noexcept
    : pool_(std::move(other.pool_)),
      block_(std::exchange(other.block_, {})),
      region_(std::move(other.region_)),
      mapping_(std::move(other.mapping_)) {}

Lease& Lease::operator=(Lease&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(block_, other.block_);
    std::swap(region_, other.region_);
    std::swap(mapping_, other.mapping_);
    return *this;
}

Lease::~Lease() {
    if (pool_ && block_.data) pool_->give(block_);
    if (region_) region_->busy.store(false, std::memory_order_release);
}

}  // namespace ubep
