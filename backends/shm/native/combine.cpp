#include "combine.h"

#include <algorithm>
#include <cstring>

namespace ubep {

namespace {

const float* as_floats(const int32_t* words) { return reinterpret_cast<const float*>(words); }

}  // namespace

Combine::Combine(Layer& layer, int lane, uint32_t epoch, int64_t deadline_ns, const std::string* refusal,
                 const CombineCall& call, const Routing& routing)
    : Operation(layer, lane, epoch, deadline_ns, refusal),
      call_(call),
      routing_(routing),
      sent_(*routing.sent),
      received_(routing.received) {
    if (refusal) return;
    const Region* region = lane_.region.get();
    in_place_ = plan_.direct && region && call.y == region->data && !call.row_weights;
    const auto records = [&](int peer) { return received_.start[peer + 1] - received_.start[peer]; };
    bounds_.resize(static_cast<size_t>(plan_.world) * (plan_.sending + 1));
    if (plan_.sending == 1) {
        for (int r = 0; r < plan_.world; r++) bounds_[2 * r + 1] = records(r);
    } else {
        std::vector<int64_t> count;
        for (int peer : plan_.peers) count.push_back(records(peer));
        slice_bounds(plan_, plan_.peers, count.data(), bounds_.data());
    }
    const int64_t nbytes = received_.start[plan_.world] * plan_.combine.nbytes;
    stream_ = nbytes * plan_.world >= layer_.streaming_bytes;
}

int64_t Combine::outgoing(int peer, int edge) const { return bounds_[peer * (plan_.sending + 1) + edge]; }

// ---- sending

void Combine::prepare(int worker) {
    if (!plan_.direct || in_place_) return;
    const Record& format = plan_.combine;
    const auto [first, last] = share(received_.rows(), worker, plan_.workers);
    char* out = own(plan_.rows_at(parity_)) + first * format.nbytes;
    for (int64_t row = first; row < last; row++, out += format.nbytes) {
        copy_row(out, call_.y + row * format.row_bytes, format.row_bytes, stream_);
        auto* aux = reinterpret_cast<float*>(out + format.meta_offset);
        if (call_.row_weights) {
            std::copy_n(call_.row_weights + row * plan_.entries, plan_.entries, aux);
        } else {
            std::fill_n(aux, plan_.entries, 0.0f);
        }
    }
    if (stream_) fence_streams();
}

void Combine::pack_row(const int32_t* where, const int32_t* meta, char* out) const {
    const int64_t row_bytes = plan_.combine.row_bytes;
    if (!plan_.deduplicate || plan_.per_rank) {
        if (where[0] < 0) {
            std::memset(out, 0, row_bytes);
        } else {
            copy_row(out, call_.y + where[0] * row_bytes, row_bytes, stream_);
        }
        return;
    }
    const char* rows[kMaxTopk];
    float weights[kMaxTopk];
    const float* weight = as_floats(meta + 1 + 2 * plan_.entries);
    int n = 0;
    for (int k = 0; k < plan_.entries; k++) {
        if (where[k] < 0) continue;
        rows[n] = call_.y + where[k] * row_bytes;
        weights[n++] = weight[k];
    }
    const bool weigh = call_.weighted && plan_.weighted;
    reduce_rows(plan_.dtype, out, rows, weigh ? weights : nullptr, n, plan_.hidden, stream_);
}

void Combine::pack_aux(const int32_t* where, float* out) const {
    for (int m = 0; m < plan_.entries; m++) {
        const int32_t row = where[plan_.per_rank ? 0 : m];
        const bool known = call_.row_weights && row >= 0;
        out[m] = known ? call_.row_weights[plan_.per_rank ? int64_t{row} * plan_.entries + m : row] : 0.0f;
    }
}

void Combine::pack(int peer, int64_t lo, int64_t hi) {
    const Record& format = plan_.combine;
    const int words = plan_.meta_words(), entries = plan_.row_entries();
    char* out = at(peer, plan_.slot(parity_, plan_.rank)) + lo * format.nbytes;
    for (int64_t i = received_.start[peer] + lo; i < received_.start[peer] + hi; i++, out += format.nbytes) {
        const int32_t* where = received_.row.data() + i * entries;
        pack_row(where, received_.meta.data() + i * words, out);
        pack_aux(where, reinterpret_cast<float*>(out + format.meta_offset));
    }
}

// ---- receiving

bool Combine::settle() {
    for (int s = 0; s < plan_.world; s++) {
        if (heard(s).records() != sent_.start[s + 1] - sent_.start[s]) return false;
    }
    const int64_t slots = int64_t{sent_.tokens} * plan_.topk;
    const char** inputs = layer_.inputs.resize(slots);
    std::fill_n(inputs, slots, nullptr);
    if (call_.weights) std::fill_n(call_.weights, slots, 0.0f);
    for (int t = 0; t < sent_.tokens; t++) layer_.missing[t].store(0, std::memory_order_relaxed);
    const int words = plan_.meta_words();
    for (int s = 0; s < plan_.world; s++) {
        const bool there = plan_.direct && heard(s).base() == kInPlace;
        const int64_t stride = there ? plan_.row_bytes() : plan_.combine.nbytes;
        const char* base = !plan_.direct ? own(plan_.slot(parity_, s))
                           : there       ? lane_.side.base[s] + (lane_.region->data - lane_.side.base[plan_.rank])
                                         : at(s, plan_.rows_at(parity_));
        for (int64_t i = sent_.start[s]; i < sent_.start[s + 1]; i++) {
            const int32_t* meta = sent_.meta.data() + i * words;
            int64_t row = i - sent_.start[s];
            if (plan_.direct) {
                const int column = plan_.column(s, plan_.per_rank ? 0 : meta[1]);
                row = received_.remote_first[column] + meta[1 + plan_.entries];
            }
            inputs[sent_.slot[i]] = base + row * stride;
            if (!plan_.direct) {
                auto& missing = layer_.missing[meta[0]];
                missing.store(missing.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
            } else if (call_.weights && !there) {
                take_aux(i, reinterpret_cast<const float*>(base + row * stride + plan_.combine.meta_offset));
            }
        }
    }
    return true;
}

void Combine::take_aux(int64_t i, const float* aux) const {
    if (!plan_.deduplicate) {
        call_.weights[sent_.slot[i]] = aux[0];
        return;
    }
    const int32_t* meta = sent_.meta.data() + i * plan_.meta_words();
    for (int k = 0; k < plan_.entries; k++) {
        if (meta[1 + k] >= 0) call_.weights[int64_t{meta[0]} * plan_.topk + k] = aux[k];
    }
}

void Combine::reduce_token(int64_t token) const {
    const char* rows[kMaxTopk];
    float weights[kMaxTopk];
    const bool weigh = sent_.has_slot_weight && call_.weighted && plan_.weighted;
    const char* const* inputs = layer_.inputs.data() + token * plan_.topk;
    const float* weight = weigh ? sent_.slot_weight.data() + token * plan_.topk : nullptr;
    int n = 0;
    for (int k = 0; k < plan_.topk; k++) {
        if (inputs[k] == nullptr) continue;
        rows[n] = inputs[k];
        if (weigh) weights[n] = weight[k];
        n++;
    }
    char* out = call_.out + token * plan_.row_bytes();
    reduce_rows(plan_.dtype, out, rows, weigh ? weights : nullptr, n, plan_.hidden, false);
}

void Combine::place(int source, int64_t lo, int64_t hi) {
    const Record& format = plan_.combine;
    const int words = plan_.meta_words();
    const char* slot = own(plan_.slot(parity_, source));
    for (int64_t i = lo; i < hi; i++) {
        const int64_t number = sent_.start[source] + i;
        if (call_.weights) take_aux(number, reinterpret_cast<const float*>(slot + i * format.nbytes + format.meta_offset));
        // A token is summed as soon as all of its rows are here, while they are still in the cache.
        const int32_t token = sent_.meta[number * words];
        auto& missing = layer_.missing[token];
        if (plan_.workers == 1) {
            const int32_t left = missing.load(std::memory_order_relaxed) - 1;
            missing.store(left, std::memory_order_relaxed);
            if (left == 0) reduce_token(token);
        } else if (missing.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            reduce_token(token);
        }
    }
}

void Combine::fetch(int worker) {
    const auto [first, last] = share(sent_.tokens, worker, plan_.workers);
    for (int64_t t = first; t < last; t++) reduce_token(t);
}

void Combine::finish(int worker) {
    if (worker != 0 || plan_.direct) return;
    for (int t = 0; t < sent_.tokens; t++) {  // tokens for which nothing was to come
        const char* const* inputs = layer_.inputs.data() + int64_t{t} * plan_.topk;
        const bool empty = std::all_of(inputs, inputs + plan_.topk, [](const char* p) { return p == nullptr; });
        if (empty) std::memset(call_.out + t * plan_.row_bytes(), 0, plan_.row_bytes());
    }
}

}  // namespace ubep
