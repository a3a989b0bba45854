#include "dispatch.h"

#include <algorithm>
#include <cstring>

namespace ubep {

Dispatch::Dispatch(Layer& layer, int lane, uint32_t epoch, int64_t deadline_ns, const std::string* refusal,
                   const DispatchCall& call, Routing& routing)
    : Operation(layer, lane, epoch, deadline_ns, refusal), call_(call), routing_(routing), sent_(routing.sent.get()) {
    keep_ = call.keep_quantised && plan_.quantise != Quantisation::none;
    out_bytes_ = keep_ ? plan_.dispatch.row_bytes : plan_.row_bytes();
    in_place_ = plan_.direct && plan_.quantise == Quantisation::none && call.x == lane_.input && call.x;
    if (!refusal) stream_ = sent_->records() * plan_.world * plan_.dispatch.nbytes >= layer_.streaming_bytes;
}

int64_t Dispatch::outgoing(int peer, int edge) const {
    return sent_->bounds[int64_t{peer} * (plan_.sending + 1) + edge];
}

void Dispatch::write_counts(int peer, int32_t* out) const {
    if (plan_.counts_everywhere) {
        std::copy_n(sent_->counts.data(), plan_.counted(), out);
        return;
    }
    for (int g = 0; g < plan_.groups(peer); g++) out[g] = sent_->counts[plan_.column(peer, g)];
}

// ---- sending

void Dispatch::quantise_row(int64_t token, char* out) const {
    const char* row = call_.x + token * plan_.row_bytes();
    auto* scales = reinterpret_cast<float*>(out + plan_.dispatch.scale_offset);
    quantise(plan_.quantise, plan_.dtype, out, scales, row, plan_.hidden);
}

void Dispatch::prepare(int worker) {
    const Record& format = plan_.dispatch;
    const auto [first, last] = share(call_.tokens, worker, plan_.workers);
    if (!plan_.direct) {
        if (plan_.quantise == Quantisation::none) return;
        for (int64_t t = first; t < last; t++) quantise_row(t, layer_.quantised.data() + t * format.meta_offset);
        return;
    }
    char* rows = own(plan_.rows_at(parity_));
    for (int64_t t = first; t < last && !in_place_; t++) {
        if (plan_.quantise == Quantisation::none) {
            copy_row(rows + t * format.nbytes, call_.x + t * format.row_bytes, format.row_bytes, false);
        } else {
            quantise_row(t, rows + t * format.nbytes);
        }
    }
    const auto [begin, end] = share(sent_->records() * plan_.list_bytes, worker, plan_.workers);
    const auto* lists = reinterpret_cast<const char*>(sent_->meta.data());
    if (begin < end) std::memcpy(own(plan_.lists_at(parity_)) + begin, lists + begin, end - begin);
}

void Dispatch::pack(int peer, int64_t lo, int64_t hi) {
    const Record& format = plan_.dispatch;
    const int words = plan_.meta_words();
    const bool plain = plan_.quantise == Quantisation::none;
    const char* from = plain ? call_.x : layer_.quantised.data();
    const int64_t stride = plain ? format.row_bytes : format.meta_offset;
    char* out = at(peer, plan_.slot(parity_, plan_.rank)) + lo * format.nbytes;
    const int32_t* meta = sent_->meta.data() + (sent_->start[peer] + lo) * words;
    for (int64_t i = lo; i < hi; i++, out += format.nbytes, meta += words) {
        copy_row(out, from + meta[0] * stride, stride, stream_);
        std::memcpy(out + format.meta_offset, meta, sizeof *meta * words);
    }
}

// ---- receiving

bool Dispatch::fits() const {
    if (plan_.capacity < 0 || plan_.drop) return true;
    const Received& got = routing_.received;
    const int width = plan_.heard_counts();
    for (int column = 0; column < width; column++) {
        int64_t total = 0;
        for (int s = 0; s < plan_.world; s++) total += got.counts[int64_t{s} * width + column];
        if (total > plan_.capacity) return false;
    }
    return true;
}

bool Dispatch::settle() {
    Received& got = routing_.received;
    const int width = plan_.heard_counts();
    int32_t* counts = got.counts.resize(int64_t{plan_.world} * width);
    int64_t* start = got.start.resize(plan_.world + 1);
    start[0] = 0;
    for (int s = 0; s < plan_.world; s++) {
        std::copy_n(heard(s).words + kHeaderWords + plan_.sending - 1, width, counts + int64_t{s} * width);
        start[s + 1] = start[s] + heard(s).records();
    }
    if (!fits()) return false;
    lay_out(plan_, got);
    limit_ = got.rows();
    if (limit_ > plan_.max_rows) {
        corrupt(plan_.rank);
        return false;
    }
    const int64_t n = start[plan_.world];
    got.meta.resize(n * plan_.meta_words());
    got.row.resize(n * plan_.row_entries());
    got.dropped = 0;
    const size_t nbytes = limit_ * out_bytes_;
    stream_ = static_cast<int64_t>(nbytes) * plan_.world >= layer_.streaming_bytes;
    rows = Lease::from(lane_.region, nbytes);
    if (!rows) rows = Lease(layer_.pool, nbytes);
    if (keep_) scales = Lease(layer_.pool, limit_ * plan_.dispatch.scales * sizeof(float));
    return true;
}

void Dispatch::store(const char* from, int64_t row) {
    char* out = rows.data() + row * out_bytes_;
    if (plan_.quantise == Quantisation::none || keep_) {
        copy_row(out, from, out_bytes_, stream_);
    } else {
        const auto* scale = reinterpret_cast<const float*>(from + plan_.dispatch.scale_offset);
        dequantise(plan_.quantise, plan_.dtype, out, from, scale, plan_.hidden);
    }
    if (keep_) {
        const size_t size = plan_.dispatch.scales * sizeof(float);
        std::memcpy(scales.data() + row * size, from + plan_.dispatch.scale_offset, size);
    }
}

bool Dispatch::deliver(int source, int64_t number, const char* row) {
    Received& got = routing_.received;
    const int entries = plan_.entries, groups = plan_.groups(plan_.rank);
    const int32_t* meta = got.meta.data() + number * plan_.meta_words();
    int32_t* where = got.row.data() + number * plan_.row_entries();
    const int64_t* first = got.first.data() + int64_t{source} * groups;
    for (int m = 0; m < plan_.row_entries(); m++) {
        const int32_t expert = plan_.per_rank ? 0 : meta[1 + m];
        if (expert < 0) {
            where[m] = -1;
            continue;
        }
        if (expert >= groups) return false;
        const int64_t target = first[expert] + meta[1 + entries + m];
#ifndef UBEP_FAULT_BOUNDS
        if (plan_.capacity >= 0 && target - got.offset[expert] >= plan_.capacity) {
            where[m] = -1;
            dropped_.fetch_add(1, std::memory_order_relaxed);
            continue;
        }
        if (target < 0 || target >= limit_) return false;
#endif
        where[m] = static_cast<int32_t>(target);
        store(row, target);
    }
    return true;
}

void Dispatch::place(int source, int64_t lo, int64_t hi) {
    Received& got = routing_.received;
    const Record& format = plan_.dispatch;
    const int words = plan_.meta_words();
    const char* from = own(plan_.slot(parity_, source)) + lo * format.nbytes;
    for (int64_t i = lo; i < hi; i++, from += format.nbytes) {
        const int64_t number = got.start[source] + i;
        std::memcpy(got.meta.data() + number * words, from + format.meta_offset, sizeof(int32_t) * words);
        if (!deliver(source, number, from)) return corrupt(source);
    }
}

void Dispatch::claim_row(int source, const int32_t* meta) const {
    if (plan_.per_rank || stream_ || meta[1] < 0 || meta[1] >= plan_.groups(plan_.rank)) return;
    const int64_t row = routing_.received.first[int64_t{source} * plan_.groups(plan_.rank) + meta[1]] + meta[2];
    if (row < limit_) claim(rows.data() + row * out_bytes_, out_bytes_);
}

void Dispatch::fetch(int worker) {
    Received& got = routing_.received;
    const Record& format = plan_.dispatch;
    const int words = plan_.meta_words();
    for (int i = 0; i < plan_.world; i++) {
        // Workers share each source's records, so that one large source keeps all of them busy.
        const int source = plan_.receive_order[i];
        const auto [lo, hi] = share(heard(source).records(), worker, plan_.workers);
        if (lo >= hi) continue;
        int32_t* meta = got.meta.data() + (got.start[source] + lo) * words;
        const bool in_place = heard(source).base() & kInputInPlace;
        const int64_t base = heard(source).base() & ~kInputInPlace;
        const int64_t list = plan_.lists_at(parity_) + (base + lo) * plan_.list_bytes;
        std::memcpy(meta, at(source, list), (hi - lo) * plan_.list_bytes);
        const char* rows_there = at(source, plan_.rows_at(parity_));
        int64_t stride = format.nbytes;
        if (in_place) {
            rows_there = lane_.side.base[source] + (lane_.input - lane_.side.base[plan_.rank]);
            stride = format.row_bytes;
        }
        for (int64_t r = lo; r < hi; r++, meta += words) {
            if (r + 1 < hi) claim_row(source, meta + words);
            const bool known = meta[0] >= 0 && meta[0] < plan_.max_tokens;
            if (!known || !deliver(source, got.start[source] + r, rows_there + meta[0] * stride)) {
                return corrupt(source);
            }
        }
    }
    if (stream_) fence_streams();
}

void Dispatch::finish(int worker) {
    if (worker != 0) return;
    if (stream_) fence_streams();
    Received& got = routing_.received;
    got.dropped = dropped_.load(std::memory_order_relaxed);
    if (plan_.alignment == 1) return;
    for (int g = 0; g < plan_.groups(plan_.rank); g++) {
        const int64_t filled = got.offset[g] + got.count[g];
        std::memset(rows.data() + filled * out_bytes_, 0, (got.offset[g + 1] - filled) * out_bytes_);
        if (!keep_) continue;
        const int64_t size = plan_.dispatch.scales * static_cast<int64_t>(sizeof(float));
        std::memset(scales.data() + filled * size, 0, (got.offset[g + 1] - filled) * size);
    }
}

}  // namespace ubep
