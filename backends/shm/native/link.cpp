#include "link.h"

#include <algorithm>
#include <limits>

#include "doorbell.h"

namespace ubep {

Link::Link(const Plan& plan, std::vector<Tier> tiers, bool bulk_synchronous)
    : bulk_synchronous(bulk_synchronous),
      tier_(plan.tier),
      tiers_(std::move(tiers)),
      egress_free_(tiers_.size(), 0),
      ingress_free_(tiers_.size(), 0),
      streams_(static_cast<size_t>(plan.world) * (plan.sending + 1)),
      rank_(plan.rank) {}

int64_t Link::messages(const Plan& plan) {
    return message(plan, plan.sending, 0);
}

int64_t Link::message(const Plan& plan, int sender, int64_t chunk) {
    return 1 + sender * ((plan.max_records + plan.smallest_chunk - 1) / plan.smallest_chunk) + chunk;
}

Stamp Link::depart(int peer, int64_t nbytes) {
    if (peer == rank_) return {0, 0};
    const int tier = tier_[peer];
    const auto duration = static_cast<int64_t>(static_cast<double>(nbytes) * tiers_[tier].ns_per_byte);
    std::lock_guard lock(egress_);
    const int64_t start = std::max(now_ns(), egress_free_[tier]);
    egress_free_[tier] = start + duration;
    return {start, duration};
}

void Link::begin() {
    for (Stream& stream : streams_) {
        stream.visible = 0;
        stream.arrival.clear();
    }
}

int64_t Link::arrived(int stream, int source, const Stamp* stamps, int64_t visible, int64_t now) {
    std::lock_guard lock(ingress_);
    Stream& own = streams_[stream];
    own.source = source;
    own.stamps = stamps;
    own.visible = std::max(own.visible, visible);
    admit(now);
    const auto late = std::upper_bound(own.arrival.begin(), own.arrival.end(), now);
    return late - own.arrival.begin();
}

void Link::admit(int64_t now) {
    for (;;) {
        Stream* next = nullptr;
        int64_t earliest = std::numeric_limits<int64_t>::max();
        for (Stream& stream : streams_) {
            const auto number = static_cast<int64_t>(stream.arrival.size());
            if (number >= stream.visible) continue;
            const int64_t start = stream.stamps[number].start;
            if (start <= now && start < earliest) {
                earliest = start;
                next = &stream;
            }
        }
        if (next == nullptr) return;
        int64_t arrival = 0;
        if (next->source != rank_) {
            const Stamp& stamp = next->stamps[next->arrival.size()];
            const int tier = tier_[next->source];
            ingress_free_[tier] = std::max(ingress_free_[tier], stamp.start) + stamp.duration;
            arrival = ingress_free_[tier] + tiers_[tier].latency_ns;
            if (!next->arrival.empty()) arrival = std::max(arrival, next->arrival.back());
        }
        next->arrival.push_back(arrival);
    }
}

}  // namespace ubep
