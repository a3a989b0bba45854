#include "operation.h"

#include <algorithm>
#include <cstring>

namespace ubep {

Operation::Operation(Layer& layer, int lane, uint32_t epoch, int64_t deadline_ns, const std::string* refusal)
    : layer_(layer),
      plan_(layer.plan),
      world_(layer.world),
      lane_(layer.lanes[lane]),
      window_(lane_.window),
      epoch_(epoch),
#ifdef UBEP_FAULT_PARITY
      parity_(0),
#else
      parity_(parity_of(epoch)),
#endif
      refusal_(refusal),
      deadline_ns_(deadline_ns),
      heard_(layer.plan.world),
      placed_(layer.plan.world, 0) {
}

Outcome Operation::run() {
    if (layer_.link) layer_.link->begin();
    layer_.team.run([this](int worker) { work(worker); });
    if (!stopped()) {
        if (ended_) outcome_.kind = Outcome::ended;
        store_word(lane_.side.base[plan_.rank] + SideLayout::finished, pack_word(epoch_, 1));
        if (outcome_.kind == Outcome::done) return {};
    }
    for (int source = 0; source < plan_.world; source++) {
        if (heard_[source].words) outcome_.heard.push_back(source);
    }
    outcome_.placed = placed_;
    return outcome_;
}

void Operation::work(int worker) {
    const int sender = plan_.workers == 1 ? worker : worker - plan_.counting;
    if (!refusal_) prepare(worker);
    // Peers may read what was prepared as soon as they have heard from any of us.
    if (!await_workers(prepared_, plan_.workers)) return;
    if (worker < plan_.counting) {
        for (int i = worker; i < plan_.world; i += plan_.counting) announce(plan_.send_order[i], worker);
    }
    // Rows may leave before anything is heard only where they need no offsets and nobody may refuse.
    const bool sends = !plan_.direct && sender >= 0 && !refusal_;
    const bool early = sends && !plan_.checked;
    if (early) send(sender, worker);
    if (worker == 0) {
        if (!hear_all()) return;
        settled_.store(1, std::memory_order_release);
    } else if (!await_workers(settled_, -1)) {
        return;
    }
    if (ended_ && (plan_.checked || plan_.direct)) return;  // on every rank alike, before any row moved
    if (sends && !early) send(sender, worker);
    if (plan_.direct) {
        fetch(worker);
    } else {
        receive(worker);
    }
    if (stopped() || !await_workers(received_, plan_.workers)) return;
    if (!ended_) finish(worker);
}

// ---- sending

void Operation::announce(int peer, int worker) {
    const int64_t offset = plan_.header(parity_, plan_.rank);
    char* bytes = at(peer, offset);
    auto* words = reinterpret_cast<int32_t*>(bytes);
    if (refusal_) {
        words[0] = kRefused;
        const auto room = static_cast<size_t>(plan_.header_bytes) - sizeof *words;
        const size_t length = std::min(refusal_->size(), room);
        std::memcpy(bytes + sizeof *words, refusal_->data(), length);
        std::memset(bytes + sizeof *words + length, 0, room - length);
    } else {
        words[0] = kOk;
        words[1] = static_cast<int32_t>(outgoing(peer, plan_.sending));
        words[2] = base(peer);
        words[3] = tag();
        for (int w = 1; w < plan_.sending; w++) {
            words[kHeaderWords + w - 1] = static_cast<int32_t>(outgoing(peer, w));
        }
        write_counts(peer, words + kHeaderWords + plan_.sending - 1);
    }
    trace(worker, peer, false, offset, plan_.header_bytes);
    signal(worker, peer, kHeaderFlag, 1, 0, plan_.header_bytes);
}

void Operation::signal(int worker, int peer, int index, uint32_t payload, int64_t message, int64_t nbytes) {
    const int64_t offset = plan_.flag(parity_, plan_.rank, index);
    if (layer_.link) stamps(peer, plan_.rank)[message] = layer_.link->depart(peer, nbytes + 8);
    trace(worker, peer, true, offset, payload);
    store_word(at(peer, offset), pack_word(epoch_, payload));
    ring(*world_.control[peer]);
}

void Operation::send(int sender, int worker) {
    std::vector<int> mine;
    for (int peer : plan_.sending > 1 ? plan_.peers : plan_.send_order) {
        if (outgoing(peer, sender) < outgoing(peer, sender + 1)) mine.push_back(peer);
    }
    if (plan_.size_aware) {
        std::stable_sort(mine.begin(), mine.end(), [this](int a, int b) {
            return outgoing(a, plan_.sending) > outgoing(b, plan_.sending);
        });
    }
    for (int peer : mine) {
        const int64_t end = outgoing(peer, sender + 1), step = plan_.chunk_to[peer];
        int64_t chunk = 0;
        for (int64_t lo = outgoing(peer, sender); lo < end; lo += step, chunk++) {
            const int64_t hi = std::min(lo + step, end), nbytes = (hi - lo) * record().nbytes;
            pack(peer, lo, hi);
            if (stream_) fence_streams();
            trace(worker, peer, false, plan_.slot(parity_, plan_.rank) + lo * record().nbytes, nbytes);
            const int64_t message = layer_.link ? Link::message(plan_, sender, chunk) : 0;
            signal(worker, peer, 1 + sender, static_cast<uint32_t>(hi), message, nbytes);
        }
    }
}

// ---- stopping

bool Operation::await_workers(std::atomic<int>& count, int target) {
    if (plan_.workers == 1) return true;
    if (target > 0) count.fetch_add(1, std::memory_order_acq_rel);
    for (int look = 0; count.load(std::memory_order_acquire) < std::max(target, 1); look++) {
        if (stopped()) return false;
        look < world_.rule.spins ? pause_cpu() : static_cast<void>(sched_yield());
    }
    return true;
}

bool Operation::healthy(int waiting) {
    if (stopped()) return false;
    // The dead before the closed: those may have left because of these.
    for (const auto* gone : {&world_.dead, &world_.closed}) {
        for (int peer = 0; peer < plan_.world; peer++) {
            if (!(*gone)(peer)) continue;
            // Whoever finished this operation has delivered everything, and may go.
            const uint64_t word = load_word(lane_.side.base[peer] + SideLayout::finished);
            if (word_epoch(word) == epoch_) continue;
            stop(Outcome::failed, waiting, peer);
            return false;
        }
    }
    if (now_ns() >= deadline_ns_) {
        stop(Outcome::deadline, waiting, -1);
        return false;
    }
    if (world_.interrupted()) {
        stop(Outcome::interrupted, waiting, -1);
        return false;
    }
    return true;
}

void Operation::stop(Outcome::Kind kind, int waiting, int peer) {
    std::lock_guard lock(outcome_mutex_);
    if (stopped()) return;
    outcome_.kind = kind;
    outcome_.waiting = waiting;
    outcome_.peer = peer;
    stopped_.store(1, std::memory_order_release);
}

void Operation::trace(int worker, int peer, bool is_signal, int64_t offset, int64_t amount) {
    if (!layer_.tracing) return;
    std::lock_guard lock(layer_.trace_mutex);
    layer_.trace.push_back({worker, peer, is_signal, offset, amount});
}

}  // namespace ubep
