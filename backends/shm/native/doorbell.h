// How a rank waits: spin while that helps, then yield, then sleep until a peer rings.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace ubep {

// One for each rank, at the start of its shared heap.
struct alignas(64) Control {
    std::atomic<uint32_t> rings;    // futex word
    std::atomic<uint32_t> waiting;  // threads asleep, or about to be
    alignas(64) std::atomic<uint32_t> closed;
};

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

// Wake a rank that may be asleep. The fence orders the flag before the look at `waiting`; a sleeper sets
// `waiting` and then looks at its flags once more. A ring that is missed all the same costs one nap.
inline void ring(Control& control) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (control.waiting.load(std::memory_order_relaxed) == 0) return;
    control.rings.fetch_add(1, std::memory_order_relaxed);
    syscall(SYS_futex, &control.rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Spinning pays only while every rank has a core of its own: a spinner on a shared core keeps away the
// very peer it waits for, for a whole time slice.
struct WaitRule {
    int spins = 0;
    int yields = 20;
    int64_t nap_ns = 2000000;
};

// Call after every look that found nothing; each call waits a little longer than the one before.
class Patience {
  public:
    Patience(Control& own, const WaitRule& rule) : own_(own), rule_(rule) {}
    ~Patience() { stand_up(); }
    Patience(const Patience&) = delete;
    Patience& operator=(const Patience&) = delete;

    // True when so much time has passed that deadlines and the health of peers should be looked at.
    bool wait() {
        const int look = looks_++;
        if (look < rule_.spins) {
            pause_cpu();
            return false;
        }
        if (look < rule_.spins + rule_.yields) {
            sched_yield();
            return look == rule_.spins;
        }
        if (!armed_) {
            heard_ = own_.rings.load(std::memory_order_relaxed);
            own_.waiting.fetch_add(1, std::memory_order_seq_cst);
            armed_ = true;
            return false;  // one more look, now that peers ring
        }
        timespec nap{0, static_cast<long>(rule_.nap_ns)};
        syscall(SYS_futex, &own_.rings, FUTEX_WAIT, heard_, &nap, nullptr, 0);
        stand_up();
        looks_ = rule_.spins;
        return true;
    }

    void reset() {
        stand_up();
        looks_ = 0;
    }

  private:
    void stand_up() {
        if (armed_) own_.waiting.fetch_sub(1, std::memory_order_relaxed);
        armed_ = false;
    }

    Control& own_;
    const WaitRule& rule_;
    int looks_ = 0;
    uint32_t heard_ = 0;
    bool armed_ = false;
};

}  // namespace ubep
