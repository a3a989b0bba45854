// Python's view of fused operations, and the plan as it comes from Python.
#include <pybind11/stl.h>

#include "fused.h"

namespace ubep {

namespace {

// One for the process; lives until its end, as it may outlast the interpreter's modules.
const Tensors& tensors() {
    static const Tensors* const instance = new Tensors();
    return *instance;
}

Record read_record(const py::dict& from) {
    Record record;
    record.row_bytes = from["row_bytes"].cast<int64_t>();
    record.scales = from["scales"].cast<int>();
    record.scale_offset = from["scale_offset"].cast<int64_t>();
    record.meta_words = from["meta_words"].cast<int>();
    record.meta_offset = from["meta_offset"].cast<int64_t>();
    record.nbytes = from["nbytes"].cast<int64_t>();
    return record;
}

std::shared_ptr<Plan> read_plan(const py::dict& from) {
    auto plan = std::make_shared<Plan>();
    const auto read = [&](const char* name, auto& field) {
        field = from[name].cast<std::remove_reference_t<decltype(field)>>();
    };
    read("world", plan->world);
    read("rank", plan->rank);
    read("experts", plan->experts);
    read("hidden", plan->hidden);
    read("topk", plan->topk);
    read("max_tokens", plan->max_tokens);
    plan->dtype = static_cast<Dtype>(from["dtype"].cast<int>());
    plan->quantise = static_cast<Quantisation>(from["quantise"].cast<int>());
    read("per_rank", plan->per_rank);
    read("deduplicate", plan->deduplicate);
    read("direct", plan->direct);
    read("weighted", plan->weighted);
    read("checked", plan->checked);
    read("counts_everywhere", plan->counts_everywhere);
    read("drop", plan->drop);
    read("size_aware", plan->size_aware);
    read("alignment", plan->alignment);
    read("capacity", plan->capacity);
    read("entries", plan->entries);
    read("workers", plan->workers);
    read("counting", plan->counting);
    read("sending", plan->sending);
    read("max_records", plan->max_records);
    read("max_rows", plan->max_rows);
    plan->dispatch = read_record(from["dispatch"]);
    plan->combine = read_record(from["combine"]);
    read("list_bytes", plan->list_bytes);
    read("parity_bytes", plan->parity_bytes);
    read("flag_block", plan->flag_block);
    read("headers", plan->headers);
    read("header_bytes", plan->header_bytes);
    read("slots", plan->slots);
    read("slot_stride", plan->slot_stride);
    read("rows", plan->rows);
    read("lists", plan->lists);
    read("send_order", plan->send_order);
    read("receive_order", plan->receive_order);
    read("peers", plan->peers);
    read("chunk_to", plan->chunk_to);
    read("chunk_from", plan->chunk_from);
    read("smallest_chunk", plan->smallest_chunk);
    read("tier", plan->tier);
    read("owner", plan->owner);
    read("local_index", plan->local_index);
    read("place", plan->place);
    read("items", plan->items);
    read("local_experts", plan->local_experts);
    read("local_start", plan->local_start);
    return plan;
}

std::unique_ptr<Link> read_link(const Plan& plan, const py::object& from) {
    if (from.is_none()) return nullptr;
    std::vector<Tier> tiers;
    for (const auto& [ns_per_byte, latency_ns] : from["tiers"].cast<std::vector<std::pair<double, int64_t>>>()) {
        tiers.push_back({ns_per_byte, latency_ns});
    }
    return std::make_unique<Link>(plan, std::move(tiers), from["bulk_synchronous"].cast<bool>());
}

const char* kind_name(Outcome::Kind kind) {
    switch (kind) {
        case Outcome::ended: return "ended";
        case Outcome::deadline: return "deadline";
        case Outcome::failed: return "failed";
        default: return "corrupt";
    }
}

}  // namespace

void bind_fused(py::module_& module) {
    py::class_<LeasedBuffer>(module, "LeasedBuffer", py::buffer_protocol()).def_buffer([](LeasedBuffer& buffer) {
        return py::buffer_info(buffer.lease.data(), 1, "B", static_cast<py::ssize_t>(buffer.nbytes));
    });
    py::class_<Outcome>(module, "Stopped")
        .def_property_readonly("kind", [](const Outcome& outcome) { return kind_name(outcome.kind); })
        .def_readonly("waiting", &Outcome::waiting)
        .def_readonly("peer", &Outcome::peer)
        .def_readonly("heard", &Outcome::heard)
        .def_readonly("placed", &Outcome::placed);
    py::class_<PyRouting>(module, "Routing")
        .def_property_readonly("num_rows", &PyRouting::num_rows)
        .def("sent", [](const PyRouting& routing) { return routing.sent(tensors()); })
        .def("received", [](const PyRouting& routing) { return routing.received(tensors()); })
        .def("row_weights", [](const PyRouting& routing) { return routing.row_weights(tensors()); })
        .def("expert_counts", [](const PyRouting& routing) { return routing.expert_counts(tensors()); });
    py::class_<Fused>(module, "Fused")
        .def(py::init([](std::shared_ptr<Fabric> fabric, const py::dict& plan,
                         const std::vector<std::pair<int, int>>& windows, bool in_place, const py::object& link,
                         int64_t streaming_bytes) {
            std::shared_ptr<const Plan> native = read_plan(plan);
            auto emulated = read_link(*native, link);
            return std::make_unique<Fused>(std::move(fabric), std::move(native), windows, in_place,
                                           std::move(emulated), streaming_bytes);
        }))
        .def("dispatch", &Fused::dispatch)
        .def("combine", &Fused::combine)
        .def("input", &Fused::input)
        .def("refuse", &Fused::refuse)
        .def("trace", &Fused::trace)
        .def("traced", &Fused::traced);
    module.def("side_bytes", [](const py::dict& plan, bool in_place, bool emulated) {
        return SideLayout(*read_plan(plan), in_place, emulated).nbytes;
    });
}

}  // namespace ubep
