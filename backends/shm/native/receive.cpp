// The receiving half of an operation: announcements, then rows as their flags come.
#include <algorithm>

#include "operation.h"

namespace ubep {

struct Operation::Run {
    int source, sender;
    int64_t done, end, chunk;
    char* flag;
};

bool Operation::hear_all() {
    bool refused = false;
    const int32_t* other_tag = nullptr;
    for (int source : plan_.receive_order) {
        if (!await_flag(source)) return false;
        Heard& from = heard_[source];
        from.words = reinterpret_cast<const int32_t*>(own(plan_.header(parity_, source)));
        from.refused = from.words[0] != kOk;
        refused |= from.refused;
        if (from.refused) continue;
        if (from.records() < 0 || from.records() > plan_.max_records) {
            corrupt(source);
            return false;
        }
        if (other_tag && *other_tag != from.tag()) refused = true;
        other_tag = from.words + 3;
    }
    ended_ = refused || refusal_ || !settle();
    return !stopped();
}

int64_t Operation::incoming(int source, int edge) const {
    const Heard& from = heard_[source];
    if (from.refused || edge == 0) return 0;
    return edge == plan_.sending ? from.records() : from.words[kHeaderWords + edge - 1];
}

bool Operation::await_flag(int source) {
    char* flag = own(plan_.flag(parity_, source, kHeaderFlag));
    Patience patience(*world_.control[plan_.rank], world_.rule);
    for (;;) {
        if (word_epoch(load_word(flag)) == epoch_) {
            if (!layer_.link) return true;
            const int stream = source * (plan_.sending + 1);
            if (layer_.link->arrived(stream, source, stamps(plan_.rank, source), 1, now_ns()) > 0) return true;
        }
        if (patience.wait() && !healthy(source)) return false;
    }
}

int64_t Operation::available(const Run& run) const {
    const uint64_t word = load_word(run.flag);
    if (word_epoch(word) != epoch_) return run.done;
    const int64_t set = std::min<int64_t>(word_payload(word), run.end);
    if (!layer_.link || set <= run.done) return set;
    const int64_t lo = plan_.sending == 1 ? 0 : incoming(run.source, run.sender);
    const int64_t visible = (set - lo + run.chunk - 1) / run.chunk;
    const int64_t number = layer_.link->arrived(
        run.source * (plan_.sending + 1) + 1 + run.sender, run.source,
        stamps(plan_.rank, run.source) + Link::message(plan_, run.sender, 0), visible, now_ns());
    return std::min(lo + number * run.chunk, set);
}

void Operation::receive(int worker) {
    std::vector<Run> runs;
    for (int i = worker; i < plan_.world; i += plan_.workers) {
        const int source = plan_.receive_order[i];
        for (int sender = 0; sender < plan_.sending; sender++) {
            const int64_t lo = incoming(source, sender), hi = incoming(source, sender + 1);
            if (lo >= hi) continue;
            runs.push_back({source, sender, lo, hi, plan_.chunk_from[source],
                            own(plan_.flag(parity_, source, 1 + sender))});
        }
    }
    Patience patience(*world_.control[plan_.rank], world_.rule);
    if (layer_.link && layer_.link->bulk_synchronous && !receive_bulk(runs, patience)) return;
    while (!runs.empty()) {
        bool moved = false;
        for (size_t i = 0; i < runs.size();) {
            Run& run = runs[i];
            const int64_t now = available(run);
            if (now > run.done) {
                if (!ended_) place(run.source, run.done, now);
                placed_[run.source] += now - run.done;
                run.done = now;
                moved = true;
                if (stopped()) return;
            }
            if (run.done < run.end) {
                i++;
            } else {
                runs.erase(runs.begin() + static_cast<std::ptrdiff_t>(i));
            }
        }
        if (moved) {
            patience.reset();
        } else if (!runs.empty() && patience.wait() && !healthy(runs.front().source)) {
            return;
        }
    }
}

// For comparison: everything arrives, then all ranks meet, and only then is anything placed.
bool Operation::receive_bulk(std::vector<Run>& runs, Patience& patience) {
    for (const Run& run : runs) {
        while (available(run) < run.end) {
            if (patience.wait() && !healthy(run.source)) return false;
        }
    }
    return barrier(patience);
}

bool Operation::barrier(Patience& patience) {
    // The word after `finished`; every rank writes its epoch into everybody's line.
    store_word(lane_.side.base[plan_.rank] + SideLayout::finished + 8, pack_word(epoch_, 1));
    for (Control* control : world_.control) ring(*control);
    for (int peer = 0; peer < plan_.world; peer++) {
        while (word_epoch(load_word(lane_.side.base[peer] + SideLayout::finished + 8)) != epoch_) {
            if (patience.wait() && !healthy(peer)) return false;
        }
    }
    return true;
}

Stamp* Operation::stamps(int at_rank, int source) const {
    char* begin = lane_.side.base[at_rank] + 64;
    return reinterpret_cast<Stamp*>(begin) + (int64_t{parity_} * plan_.world + source) * Link::messages(plan_);
}

}  // namespace ubep
