#include "routing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ubep {

namespace {

template <class Id>
bool ids_in_range(const Id* idx, int64_t n, int experts) {
    bool good = true;
    for (int64_t i = 0; i < n; i++) good &= idx[i] >= -1 && idx[i] < experts;
    return good;
}

int32_t bits(float value) {
    int32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
}

}  // namespace

bool acceptable(const Plan& plan, const Choice& choice) {
    const int64_t n = int64_t{choice.tokens} * plan.topk;
    const bool known = choice.wide ? ids_in_range(static_cast<const int64_t*>(choice.idx), n, plan.experts)
                                   : ids_in_range(static_cast<const int32_t*>(choice.idx), n, plan.experts);
    if (!known || choice.weights == nullptr || !plan.checked) return known;
    bool finite = true;
    for (int64_t i = 0; i < n; i++) finite &= std::fabs(choice.weights[i]) <= __FLT_MAX__;
    return finite;
}

void slice_bounds(const Plan& plan, const std::vector<int>& item_peer, const int64_t* item_count,
                  int64_t* bounds) {
    const int edges = plan.sending + 1;
    std::fill_n(bounds, int64_t{plan.world} * edges, 0);
    int64_t total = 0;
    for (size_t i = 0; i < item_peer.size(); i++) total += item_count[i];
    int64_t before = 0;
    for (size_t i = 0; i < item_peer.size(); i++) {
        int64_t* own = bounds + int64_t{item_peer[i]} * edges;
        for (int w = 1; w < edges; w++) {
            own[w] += std::clamp<int64_t>(w * total / plan.sending - before, 0, item_count[i]);
        }
        before += item_count[i];
    }
}

void Router::route(const Choice& choice, Sent& out) {
    out.tokens = choice.tokens;
    out.counts.resize(plan_.counted());
    out.start.resize(plan_.world + 1);
    out.bounds.resize(int64_t{plan_.world} * (plan_.sending + 1));
    if (plan_.deduplicate) {
        choice.wide ? one_per_rank<int64_t>(choice, out) : one_per_rank<int32_t>(choice, out);
    } else {
        choice.wide ? one_per_expert<int64_t>(choice, out) : one_per_expert<int32_t>(choice, out);
    }
}

template <class Id>
void Router::one_per_expert(const Choice& choice, Sent& out) {
    const int experts = plan_.experts, topk = plan_.topk;
    const Id* idx = static_cast<const Id*>(choice.idx);
    const int64_t pairs = int64_t{choice.valid} * topk;
    int32_t* counts = out.counts.data();
    std::fill_n(counts, experts, 0);
    for (int64_t i = 0; i < pairs; i++) {
        if (idx[i] >= 0) counts[idx[i]]++;
    }
    // Records lie by destination, then by the place of the expert in the sending order, then by token.
    int64_t* next = next_.resize(experts);
    int64_t total = 0;
    std::fill_n(out.start.data(), plan_.world + 1, 0);
    for (int e = 0; e < experts; e++) out.start[plan_.owner[e] + 1] += counts[e];
    for (int r = 0; r < plan_.world; r++) out.start[r + 1] += out.start[r];
    for (int i = 0; i < experts; i++) {
        const int e = plan_.place[i];
        next[e] = total;
        total += counts[e];
    }
    int32_t* first = place_.resize(experts);
    for (int e = 0; e < experts; e++) first[e] = static_cast<int32_t>(next[e]);
    int32_t* meta = out.meta.resize(total * 4);
    int32_t* slot = out.slot.resize(total);
    for (int64_t i = 0; i < pairs; i++) {
        if (idx[i] < 0) continue;
        const int e = static_cast<int>(idx[i]);
        const int64_t at = next[e]++;
        slot[at] = static_cast<int32_t>(i);
        int32_t* words = meta + at * 4;
        words[0] = static_cast<int32_t>(i / topk);
        words[1] = plan_.local_index[e];
        words[2] = static_cast<int32_t>(at) - first[e];
        words[3] = bits(choice.weights ? choice.weights[i] : 1.0f);
    }
    out.has_slot_weight = plan_.weighted;
    if (plan_.weighted) {
        float* weight = out.slot_weight.resize(int64_t{choice.tokens} * topk);
        if (choice.weights) {
            std::copy_n(choice.weights, out.slot_weight.size(), weight);
        } else {
            std::fill_n(weight, out.slot_weight.size(), 1.0f);
        }
    }
    if (plan_.sending == 1) {
        for (int r = 0; r < plan_.world; r++) {
            out.bounds[2 * r] = 0;
            out.bounds[2 * r + 1] = out.start[r + 1] - out.start[r];
        }
        return;
    }
    int64_t* item_count = cut_.resize(experts);
    std::vector<int> item_peer(experts);
    for (int i = 0; i < experts; i++) {
        item_count[i] = counts[plan_.items[i]];
        item_peer[i] = plan_.owner[plan_.items[i]];
    }
    slice_bounds(plan_, item_peer, item_count, out.bounds.data());
}

template <class Id>
void Router::one_per_rank(const Choice& choice, Sent& out) {
    const int world = plan_.world, topk = plan_.topk, words = plan_.meta_words();
    const Id* idx = static_cast<const Id*>(choice.idx);
    const int64_t pairs = int64_t{choice.valid} * topk;
    std::fill_n(out.start.data(), world + 1, 0);
    // reach[t][i]: the i-th of the ranks of a token, ascending; -1: no more.
    int32_t* reach = reach_.resize(pairs);
    std::vector<char> here(world);
    for (int t = 0; t < choice.valid; t++) {
        std::fill(here.begin(), here.end(), 0);
        for (int k = 0; k < topk; k++) {
            const Id e = idx[int64_t{t} * topk + k];
            if (e >= 0) here[plan_.owner[e]] = 1;
        }
        int found = 0;
        for (int r = 0; r < world; r++) {
            if (!here[r]) continue;
            reach[int64_t{t} * topk + found++] = r;
            out.start[r + 1]++;
        }
        std::fill(reach + int64_t{t} * topk + found, reach + int64_t{t + 1} * topk, -1);
    }
    for (int r = 0; r < world; r++) out.start[r + 1] += out.start[r];
    int32_t* position = nullptr;
    int32_t* counts = out.counts.data();
    std::fill_n(counts, plan_.counted(), 0);
    if (plan_.per_rank) {
        for (int r = 0; r < world; r++) counts[r] = static_cast<int32_t>(out.start[r + 1] - out.start[r]);
    } else {
        position = place_.resize(pairs);
        for (int64_t i = 0; i < pairs; i++) position[i] = idx[i] >= 0 ? counts[idx[i]]++ : 0;
    }
    const int64_t n = out.records();
    int32_t* meta = out.meta.resize(n * words);
    int32_t* slot = out.slot.resize(n);
    int64_t* next = next_.resize(world);
    std::copy_n(out.start.data(), world, next);
    out.has_slot_weight = plan_.per_rank && plan_.weighted;
    float* slot_weight = nullptr;
    if (out.has_slot_weight) {
        slot_weight = out.slot_weight.resize(int64_t{choice.tokens} * topk);
        std::fill_n(slot_weight, out.slot_weight.size(), 0.0f);
    }
    for (int t = 0; t < choice.valid; t++) {
        const int64_t pair = int64_t{t} * topk;
        for (int i = 0; i < topk && reach[pair + i] >= 0; i++) {
            const int r = reach[pair + i];
            const int64_t at = next[r]++;
            slot[at] = static_cast<int32_t>(pair + i);
            int32_t* record = meta + at * words;
            record[0] = t;
            float sum = 0;  // in ascending k; zeros elsewhere change nothing
            for (int k = 0; k < topk; k++) {
                const Id e = idx[pair + k];
                const bool mine = e >= 0 && plan_.owner[e] == r;
                const float weight = mine ? (choice.weights ? choice.weights[pair + k] : 1.0f) : 0.0f;
                record[1 + k] = mine ? plan_.local_index[e] : -1;
                record[1 + topk + k] = position ? position[pair + k] : static_cast<int32_t>(at - out.start[r]);
                record[1 + 2 * topk + k] = bits(weight);
                sum += weight;
            }
            if (slot_weight) slot_weight[pair + i] = sum;
        }
    }
    int64_t* item_count = cut_.resize(world);
    for (int i = 0; i < world; i++) {
        item_count[i] = out.start[plan_.peers[i] + 1] - out.start[plan_.peers[i]];
    }
    slice_bounds(plan_, plan_.peers, item_count, out.bounds.data());
}

void lay_out(const Plan& plan, Received& got) {
    const int groups = plan.groups(plan.rank), width = plan.heard_counts();
    const auto padded = [&](int64_t rows) {
        if (plan.capacity >= 0) rows = std::min(rows, plan.capacity);
        return (rows + plan.alignment - 1) / plan.alignment * plan.alignment;
    };
    const auto count = [&](int source, int column) -> int64_t {
        return got.counts[int64_t{source} * width + column];
    };
    got.offset.resize(groups + 1)[0] = 0;
    got.count.resize(groups);
    got.first.resize(int64_t{plan.world} * groups);
    for (int g = 0; g < groups; g++) {
        const int column = plan.counts_everywhere ? plan.column(plan.rank, g) : g;
        int64_t total = 0;
        for (int s = 0; s < plan.world; s++) {
            got.first[int64_t{s} * groups + g] = got.offset[g] + total;
            total += count(s, column);
        }
        got.count[g] = plan.capacity >= 0 ? std::min(total, plan.capacity) : total;
        got.offset[g + 1] = got.offset[g] + padded(total);
    }
    if (!plan.direct) return;
    const int columns = plan.counted();
    int64_t* first = got.remote_first.resize(columns);
    for (int r = 0; r < plan.world; r++) {
        int64_t offset = 0;
        for (int g = 0; g < plan.groups(r); g++) {
            const int column = plan.column(r, g);
            int64_t total = 0, before = 0;
            for (int s = 0; s < plan.world; s++) {
                if (s == plan.rank) before = total;
                total += count(s, column);
            }
            first[column] = offset + before;
            offset += padded(total);
        }
    }
}

}  // namespace ubep
