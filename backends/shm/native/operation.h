// One operation of one rank: announce, send, hear, place, finish, as in ubep.protocol.streams. Dispatch
// and combine fill in what is packed and where it is placed.
#pragma once
#include <atomic>
#include <string>
#include <vector>

#include "layer.h"

namespace ubep {

// How an operation ended.
struct Outcome {
    enum Kind { done, ended, deadline, failed, interrupted, corrupt };
    Kind kind = done;
    int waiting = -1;  // the peer that was waited for
    int peer = -1;     // the one that failed, or whose record made no sense
    std::vector<int> heard;       // sources whose announcement is in the window
    std::vector<int64_t> placed;  // records of each source
};

class Operation {
  public:
    // deadline_ns: on the clock of now_ns.  refusal: why this rank takes no part, as peers will read it.
    Operation(Layer& layer, int lane, uint32_t epoch, int64_t deadline_ns, const std::string* refusal);
    virtual ~Operation() = default;
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    Outcome run();

  protected:
    struct Heard {
        const int32_t* words = nullptr;
        bool refused = false;
        int64_t records() const { return words[1]; }
        int32_t base() const { return words[2]; }
        int32_t tag() const { return words[3]; }
    };

    // ---- what dispatch and combine fill in
    virtual int32_t tag() const = 0;
    virtual int32_t base(int peer) const = 0;
    virtual int64_t outgoing(int peer, int edge) const = 0;  // records before an edge of the slices
    virtual void write_counts(int peer, int32_t* out) const = 0;
    virtual void prepare(int worker) = 0;                    // before anything is announced
    virtual bool settle() = 0;                               // false: ended, on every rank alike
    virtual void pack(int peer, int64_t lo, int64_t hi) = 0; // straight into the peer's slot
    virtual void place(int source, int64_t lo, int64_t hi) = 0;
    virtual void fetch(int worker) = 0;                      // direct: read what peers have published
    virtual void finish(int worker) = 0;
    virtual const Record& record() const = 0;

    // ---- what they use
    char* own(int64_t offset) const { return window_.base[plan_.rank] + offset; }
    char* at(int peer, int64_t offset) const { return window_.base[peer] + offset; }
    const Heard& heard(int source) const { return heard_[source]; }
    int64_t incoming(int source, int edge) const;
    // Worker's share [first, last) of n things.
    static std::pair<int64_t, int64_t> share(int64_t n, int worker, int workers) {
        return {n * worker / workers, n * (worker + 1) / workers};
    }
    void corrupt(int source) { stop(Outcome::corrupt, source, source); }

    Layer& layer_;
    const Plan& plan_;
    World& world_;
    Lane& lane_;
    const Window& window_;
    const uint32_t epoch_;
    const int parity_;
    const std::string* refusal_;
    bool stream_ = false;  // stores bypass the caches

  private:
    struct Run;  // what one sending worker of one source sends

    void work(int worker);
    void announce(int peer, int worker);
    void send(int sender, int worker);
    void signal(int worker, int peer, int index, uint32_t payload, int64_t message, int64_t nbytes);
    bool hear_all();
    void receive(int worker);
    bool receive_bulk(std::vector<Run>& runs, Patience& patience);
    int64_t available(const Run& run) const;
    bool await_flag(int source);
    bool await_workers(std::atomic<int>& count, int target);
    bool healthy(int waiting);  // false: the operation must stop
    void stop(Outcome::Kind kind, int waiting, int peer);
    bool stopped() const { return stopped_.load(std::memory_order_relaxed) != 0; }
    void trace(int worker, int peer, bool is_signal, int64_t offset, int64_t amount);
    Stamp* stamps(int at_rank, int source) const;
    bool barrier(Patience& patience);

    const int64_t deadline_ns_;
    std::vector<Heard> heard_;
    std::vector<int64_t> placed_;
    std::atomic<int> stopped_{0};
    std::atomic<int> prepared_{0}, settled_{0}, received_{0}, finished_{0};
    bool ended_ = false;
    Outcome outcome_;
    std::mutex outcome_mutex_;
};

}  // namespace ubep
