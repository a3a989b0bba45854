// The flag word and the epoch, as in ubep.protocol.flags.
#pragma once
#include <atomic>
#include <cstdint>

namespace ubep {

constexpr int kParities = 2;

inline uint64_t pack_word(uint32_t epoch, uint32_t payload) { return uint64_t{epoch} << 32 | payload; }
inline uint32_t word_epoch(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
inline uint32_t word_payload(uint64_t word) { return static_cast<uint32_t>(word); }
inline int parity_of(uint32_t epoch) { return static_cast<int>(epoch % kParities); }

// Planted faults, for the tests of the tests: see tests/native.
#ifdef UBEP_FAULT_RELAXED
constexpr auto kPublish = std::memory_order_relaxed;
#else
constexpr auto kPublish = std::memory_order_release;
#endif

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

inline void store_word(char* at, uint64_t word) {
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(at)).store(word, kPublish);
}

inline uint64_t load_word(char* at) {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(at)).load(std::memory_order_acquire);
}

}  // namespace ubep
