// An emulated link: real processes, flags and copies, but a flag counts as set only when its bytes would
// have arrived. The sender clocks its own port, and stamps each message with the time at which it starts
// to leave and how long it takes; the receiver books its port in order of these times, since a sender
// cannot know what else is under way to the same receiver.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "plan.h"

namespace ubep {

struct Tier {
    double ns_per_byte = 0;
    int64_t latency_ns = 0;
};

struct Stamp {
    int64_t start, duration;
};

class Link {
  public:
    Link(const Plan& plan, std::vector<Tier> tiers, bool bulk_synchronous);

    // Messages of one source in one operation: its announcement, then the chunks of each sender.
    static int64_t messages(const Plan& plan);
    static int64_t message(const Plan& plan, int sender, int64_t chunk);

    // Book `nbytes` to a peer on the own port.
    Stamp depart(int peer, int64_t nbytes);

    // Receiving: forget the last operation.
    void begin();
    // Messages first..first + count of this stream may be read at `stamps`; how many have arrived by now.
    // stream: source * (sending + 1) + 1 + sender, or + 0 for the announcement.
    int64_t arrived(int stream, int source, const Stamp* stamps, int64_t visible, int64_t now);

    bool bulk_synchronous;

  private:
    struct Stream {
        int source = 0;
        const Stamp* stamps = nullptr;
        int64_t visible = 0;
        std::vector<int64_t> arrival;
    };
    void admit(int64_t now);

    std::vector<int> tier_;
    std::vector<Tier> tiers_;
    std::mutex egress_, ingress_;
    std::vector<int64_t> egress_free_, ingress_free_;
    std::vector<Stream> streams_;
    int rank_;
};

}  // namespace ubep
