#include "fused.h"

#include <pybind11/stl.h>

#include <algorithm>

namespace ubep {

namespace {

std::vector<Lane> make_lanes(Fabric& fabric, const Plan& plan, const std::vector<std::pair<int, int>>& windows,
                             bool in_place, bool emulated) {
    const SideLayout layout(plan, in_place, emulated);
    std::vector<Lane> lanes;
    for (const auto& [window, side] : windows) {
        Lane lane{fabric.window(window), fabric.window(side), nullptr, nullptr};
        if (in_place) {
            lane.region = std::make_shared<Region>();
            lane.region->mapping = fabric.own_mapping(side);
            lane.region->data = lane.region->mapping->data() + layout.region;
            lane.region->size = layout.input - layout.region;
            lane.input = lane.region->mapping->data() + layout.input;
        }
        lanes.push_back(std::move(lane));
    }
    return lanes;
}

float as_float(int32_t word) {
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

}  // namespace

Fused::Fused(std::shared_ptr<Fabric> fabric, std::shared_ptr<const Plan> plan, std::vector<std::pair<int, int>> windows, bool in_place,
             std::unique_ptr<Link> link, int64_t streaming_bytes)
    : fabric_(std::move(fabric)),
      layer_(plan, fabric_->world(), make_lanes(*fabric_, *plan, windows, in_place, link != nullptr),
             std::move(link), streaming_bytes),
      dtype_(dlpack_type(plan->dtype)) {}

Outcome Fused::run(Operation& operation) {
    Outcome outcome;
    {
        py::gil_scoped_release release;
        outcome = operation.run();
    }
    if (outcome.kind == Outcome::interrupted) throw py::error_already_set();
    return outcome;
}

py::object Fused::dispatch(int lane, uint32_t epoch, double timeout_s, py::handle x, py::handle idx,
                           py::handle weights, const PyRouting* previous, int32_t tag, int64_t valid,
                           bool keep_quantised) {
    fabric_->check_open();
    const Plan& plan = layer_.plan;
    View rows;
    if (!tensors_.view(x, rows) || rows.ndim != 2 || !rows.is(dtype_, rows.shape[0], plan.hidden) ||
        rows.shape[0] > plan.max_tokens || !rows.contiguous || !rows.on_cpu) {
        return py::none();
    }
    const auto tokens = static_cast<int>(rows.shape[0]);
    auto result = std::make_unique<PyRouting>(layer_.pool, layer_.shared_plan);
    if (previous) {
        result->routing.sent = previous->routing.sent;
        if (result->routing.sent->tokens != tokens) return py::none();
    } else {
        View ids, factors;
        if (!tensors_.view(idx, ids) || ids.ndim != 2 || ids.shape[0] != tokens || ids.shape[1] != plan.topk ||
            !ids.contiguous || !ids.on_cpu || !(ids.has(kInt64) || ids.has(kInt32))) {
            return py::none();
        }
        Choice choice{ids.data, ids.has(kInt64), nullptr, tokens, valid < 0 ? tokens : static_cast<int>(valid)};
        if (choice.valid > tokens) return py::none();
        if (!weights.is_none()) {
            if (!tensors_.view(weights, factors) || !factors.is(kFloat32, tokens, plan.topk) ||
                !factors.contiguous || !factors.on_cpu) {
                return py::none();
            }
            choice.weights = reinterpret_cast<const float*>(factors.data);
        }
        if (!acceptable(plan, choice)) return py::none();
        result->routing.sent = std::make_shared<Sent>();
        layer_.router.route(choice, *result->routing.sent);
    }
    const DispatchCall call{rows.data, tokens, tag, keep_quantised};
    Dispatch operation(layer_, lane, epoch, deadline(timeout_s), nullptr, call, result->routing);
    Outcome outcome = run(operation);
    if (outcome.kind != Outcome::done) return py::cast(std::move(outcome));
    const bool kept = static_cast<bool>(operation.scales);
    const int64_t n = result->num_rows();
    py::object got = tensors_.make(std::move(operation.rows), kept ? kBytes : dtype_, n, plan.hidden);
    py::object scales = py::none();
    if (kept) scales = tensors_.make(std::move(operation.scales), kFloat32, n, plan.dispatch.scales);
    return py::make_tuple(std::move(got), std::move(scales), py::cast(std::move(result)));
}

py::object Fused::combine(int lane, uint32_t epoch, double timeout_s, py::handle y, const PyRouting& routing,
                          int32_t tag, bool weighted, py::handle row_weights) {
    fabric_->check_open();
    const Plan& plan = layer_.plan;
    const int64_t n = routing.num_rows();
    View rows, numbers;
    if (!tensors_.view(y, rows) || !rows.is(dtype_, n, plan.hidden) || !rows.contiguous || !rows.on_cpu) {
        return py::none();
    }
    CombineCall call;
    call.y = rows.data;
    call.tag = tag;
    call.weighted = weighted;
    const int tokens = routing.routing.sent->tokens;
    Lease out(layer_.pool, int64_t{tokens} * plan.row_bytes()), back;
    call.out = out.data();
    if (!row_weights.is_none()) {
        const bool fits = tensors_.view(row_weights, numbers) && numbers.has(kFloat32) && numbers.contiguous &&
                          numbers.on_cpu && numbers.shape[0] == n &&
                          (plan.per_rank ? numbers.ndim == 2 && numbers.shape[1] == plan.topk : numbers.ndim == 1);
        if (!fits) return py::none();
        // Without rows the pointer may be null, which would say that nothing comes back.
        static const float none = 0;
        call.row_weights = n > 0 ? reinterpret_cast<const float*>(numbers.data) : &none;
        back = Lease(layer_.pool, int64_t{tokens} * plan.topk * sizeof(float));
        call.weights = reinterpret_cast<float*>(back.data());
    }
    Combine operation(layer_, lane, epoch, deadline(timeout_s), nullptr, call, routing.routing);
    Outcome outcome = run(operation);
    if (outcome.kind != Outcome::done) return py::cast(std::move(outcome));
    py::object result = tensors_.make(std::move(out), dtype_, tokens, plan.hidden);
    if (row_weights.is_none()) return result;
    return py::make_tuple(std::move(result), tensors_.make(std::move(back), kFloat32, tokens, plan.topk));
}

py::object Fused::input(int lane, int64_t tokens) const {
    const Lane& own = layer_.lanes.at(lane);
    if (own.input == nullptr || tokens < 1 || tokens > layer_.plan.max_tokens) return py::none();
    return tensors_.make(Lease(own.region->mapping, own.input), dtype_, tokens, layer_.plan.hidden);
}

py::object Fused::refuse(int lane, uint32_t epoch, double timeout_s, bool is_dispatch, const std::string& reason) {
    fabric_->check_open();
    Routing nothing;
    nothing.sent = std::make_shared<Sent>();
    if (is_dispatch) {
        Dispatch operation(layer_, lane, epoch, deadline(timeout_s), &reason, {}, nothing);
        return py::cast(run(operation));
    }
    Combine operation(layer_, lane, epoch, deadline(timeout_s), &reason, {}, nothing);
    return py::cast(run(operation));
}

void Fused::trace(bool on) {
    layer_.tracing = on;
    layer_.trace.clear();
}

py::list Fused::traced() {
    py::list events;
    for (const Traced& event : layer_.trace) {
        events.append(py::make_tuple(event.worker, event.peer, event.is_signal, event.offset, event.amount));
    }
    layer_.trace.clear();
    return events;
}

// ---- the routing as tensors

py::dict PyRouting::sent(const Tensors& tensors) const {
    const Sent& sent = *routing.sent;
    const int64_t n = sent.records(), entries = plan_.entries, words = plan_.meta_words();
    std::vector<int64_t> token(n), expert(n * entries), position(n * entries), slot(n);
    std::vector<float> weight(n * entries);
    for (int64_t i = 0; i < n; i++) {
        const int32_t* meta = sent.meta.data() + i * words;
        token[i] = meta[0];
        slot[i] = sent.slot[i];
        for (int64_t m = 0; m < entries; m++) {
            expert[i * entries + m] = meta[1 + m];
            position[i * entries + m] = meta[1 + entries + m];
            weight[i * entries + m] = as_float(meta[1 + 2 * entries + m]);
        }
    }
    std::vector<int64_t> counts(sent.counts.data(), sent.counts.data() + sent.counts.size());
    std::vector<std::vector<int64_t>> bounds;
    for (int r = 0; r < plan_.world; r++) {
        const int64_t* row = sent.bounds.data() + int64_t{r} * (plan_.sending + 1);
        bounds.emplace_back(row, row + plan_.sending + 1);
    }
    py::dict out;
    out["num_tokens"] = sent.tokens;
    out["token"] = tensors.copy(pool_, token.data(), n);
    out["expert"] = tensors.copy(pool_, expert.data(), n, entries);
    out["position"] = tensors.copy(pool_, position.data(), n, entries);
    out["weight"] = tensors.copy(pool_, weight.data(), n, entries);
    out["slot"] = tensors.copy(pool_, slot.data(), n);
    out["slot_weight"] = py::none();
    if (sent.has_slot_weight) {
        out["slot_weight"] = tensors.copy(pool_, sent.slot_weight.data(), sent.tokens, plan_.topk);
    }
    out["counts"] = tensors.copy(pool_, counts.data(), static_cast<int64_t>(counts.size()));
    out["start"] = std::vector<int64_t>(sent.start.data(), sent.start.data() + plan_.world + 1);
    out["bounds"] = bounds;
    return out;
}

py::dict PyRouting::received(const Tensors& tensors) const {
    const Received& got = routing.received;
    const int64_t n = got.start[plan_.world], entries = plan_.entries, words = plan_.meta_words();
    std::vector<int64_t> token(n), expert(n * entries), row(n * plan_.row_entries());
    std::vector<float> weight(n * entries);
    for (int64_t i = 0; i < n; i++) {
        const int32_t* meta = got.meta.data() + i * words;
        token[i] = meta[0];
        for (int64_t m = 0; m < entries; m++) {
            expert[i * entries + m] = meta[1 + m];
            weight[i * entries + m] = as_float(meta[1 + 2 * entries + m]);
        }
    }
    std::copy_n(got.row.data(), row.size(), row.data());
    std::vector<int64_t> counts(got.counts.data(), got.counts.data() + got.counts.size());
    const int64_t groups = plan_.groups(plan_.rank);
    py::dict out;
    out["offset"] = tensors.copy(pool_, got.offset.data(), groups + 1);
    out["first"] = tensors.copy(pool_, got.first.data(), plan_.world, groups);
    out["count"] = tensors.copy(pool_, got.count.data(), groups);
    out["counts"] = tensors.copy(pool_, counts.data(), plan_.world, plan_.heard_counts());
    out["start"] = std::vector<int64_t>(got.start.data(), got.start.data() + plan_.world + 1);
    out["row"] = tensors.copy(pool_, row.data(), n, plan_.row_entries());
    out["token"] = tensors.copy(pool_, token.data(), n);
    out["expert"] = tensors.copy(pool_, expert.data(), n, entries);
    out["weight"] = tensors.copy(pool_, weight.data(), n, entries);
    out["dropped"] = got.dropped;
    return out;
}

py::object PyRouting::row_weights(const Tensors& tensors) const {
    const Received& got = routing.received;
    const int64_t n = got.rows(), columns = plan_.per_rank ? plan_.entries : 1;
    Lease lease(pool_, n * columns * sizeof(float));
    auto* out = reinterpret_cast<float*>(lease.data());
    std::fill_n(out, n * columns, 0.0f);
    const int words = plan_.meta_words(), entries = plan_.entries;
    for (int64_t i = 0; i < got.start[plan_.world]; i++) {
        const int32_t* weight = got.meta.data() + i * words + 1 + 2 * entries;
        const int32_t* row = got.row.data() + i * plan_.row_entries();
        for (int m = 0; m < entries; m++) {
            const int32_t at = row[plan_.per_rank ? 0 : m];
            if (at >= 0) out[at * columns + (plan_.per_rank ? m : 0)] = as_float(weight[m]);
        }
    }
    return tensors.make(std::move(lease), kFloat32, n, plan_.per_rank ? columns : -1);
}

py::object PyRouting::expert_counts(const Tensors& tensors) const {
    return tensors.copy(pool_, routing.received.count.data(), static_cast<int64_t>(routing.received.count.size()));
}

}  // namespace ubep
