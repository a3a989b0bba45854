// Ranks as threads of one process, over the same headers and sources as the extension.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "combine.h"

namespace ubep::test {

struct Shape {
    int world = 3, experts = 8, hidden = 16, topk = 3, max_tokens = 8;
    Quantisation quantise = Quantisation::none;
    bool direct = false, deduplicate = false, checked = true, in_place = true;
    int counting = 1, sending = 1, workers = 1;
    int64_t chunk = 2, capacity = -1, alignment = 1;
};

inline int64_t align_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

inline Record record(int64_t row_bytes, int scales, int words) {
    Record r;
    r.row_bytes = row_bytes;
    r.scales = scales;
    r.scale_offset = align_to(row_bytes, 4);
    r.meta_offset = r.scale_offset + 4 * scales;
    r.meta_words = words;
    r.nbytes = align_to(r.meta_offset + 4 * words, 16);
    return r;
}

// The plan of one rank, as ubep.protocol.plan would lay it out: experts in turn, all ranks equally far.
inline std::shared_ptr<Plan> make_plan(const Shape& shape, int rank) {
    auto plan = std::make_shared<Plan>();
    Plan& p = *plan;
    p.world = shape.world;
    p.rank = rank;
    p.experts = shape.experts;
    p.hidden = shape.hidden;
    p.topk = shape.topk;
    p.max_tokens = shape.max_tokens;
    p.dtype = Dtype::fp32;
    p.deduplicate = shape.deduplicate;
    p.direct = shape.direct;
    p.checked = shape.checked;
    p.drop = shape.capacity >= 0;
    p.capacity = shape.capacity;
    p.alignment = shape.alignment;
    p.counts_everywhere = shape.direct;
    p.entries = shape.deduplicate ? shape.topk : 1;
    p.workers = shape.workers;
    p.counting = shape.counting;
    p.sending = shape.sending;
    p.max_records = int64_t{shape.max_tokens} * (shape.deduplicate ? 1 : shape.topk);
    p.quantise = shape.quantise;
    const bool plain = shape.quantise == Quantisation::none;
    p.dispatch = record(plain ? p.row_bytes() : shape.hidden, plain ? 0 : 1, 1 + 3 * p.entries);
    p.combine = record(p.row_bytes(), 0, p.entries);
    p.list_bytes = 4 * (1 + 3 * p.entries);
    p.local_start.push_back(0);
    for (int r = 0; r < shape.world; r++) {
        for (int e = r; e < shape.experts; e += shape.world) p.local_experts.push_back(e);
        p.local_start.push_back(static_cast<int>(p.local_experts.size()));
    }
    for (int e = 0; e < shape.experts; e++) {
        p.owner.push_back(e % shape.world);
        p.local_index.push_back(e / shape.world);
    }
    for (int i = 0; i < shape.world; i++) {
        p.send_order.push_back((rank + 1 + i) % shape.world);
        p.receive_order.push_back((rank + 2 * shape.world - 1 - i) % shape.world);
        p.chunk_to.push_back(shape.chunk);
        p.tier.push_back(i == rank ? 0 : 1);
    }
    p.chunk_from = p.chunk_to;
    p.smallest_chunk = shape.chunk;
    p.peers = p.send_order;
    for (int peer : p.peers) {
        for (int i = p.local_start[peer]; i < p.local_start[peer + 1]; i++) p.items.push_back(p.local_experts[i]);
    }
    p.place = p.local_experts;
    const int groups = (shape.experts + shape.world - 1) / shape.world;
    p.max_rows = int64_t{shape.world} * shape.max_tokens * shape.topk + groups * (shape.alignment - 1);
    p.header_bytes = align_to(std::max(256, 4 * (kHeaderWords + shape.sending - 1 + shape.experts)), 16);
    p.flag_block = align_to(8 * (1 + shape.sending), 64);
    p.headers = align_to(shape.world * p.flag_block, 64);
    p.slots = p.headers + align_to(shape.world * p.header_bytes, 64);
    p.slot_stride = shape.direct ? 0 : align_to(p.max_records * std::max(p.dispatch.nbytes, p.combine.nbytes), 64);
    p.rows = p.slots + shape.world * p.slot_stride;
    const int64_t published = std::max(p.max_tokens * p.dispatch.nbytes, p.max_rows * p.combine.nbytes);
    p.lists = p.rows + (shape.direct ? align_to(published, 64) : 0);
    p.parity_bytes = p.lists + (shape.direct ? align_to(shape.world * p.max_records * p.list_bytes, 64) : 0);
    return plan;
}

// The memory of all ranks.
class Ranks {
  public:
    explicit Ranks(const Shape& shape) : shape_(shape), controls_(shape.world) {
        const auto plan = make_plan(shape, 0);
        const SideLayout side(*plan, shape.direct && shape.in_place, false);
        region_ = side.region;
        region_bytes_ = side.input - side.region;
        input_ = side.input;
        window_.nbytes = kParities * plan->parity_bytes;
        side_.nbytes = side.nbytes;
        for (int r = 0; r < shape.world; r++) {
            window_.base.push_back(zeroed(window_.nbytes));
            side_.base.push_back(zeroed(side_.nbytes));
            worlds_.emplace_back();
        }
        for (int r = 0; r < shape.world; r++) {
            World& world = worlds_[r];
            world.rank = r;
            world.size = shape.world;
            for (Control& control : controls_) world.control.push_back(&control);
            world.rule.yields = 5;
        }
    }

    ~Ranks() {
        for (char* base : window_.base) std::free(base);
        for (char* base : side_.base) std::free(base);
    }

    World& world(int rank) { return worlds_[rank]; }

    std::unique_ptr<Layer> layer(int rank) {
        Lane lane{window_, side_, nullptr, nullptr};
        if (region_bytes_ > 0) {
            lane.region = std::make_shared<Region>();
            lane.region->data = side_.base[rank] + region_;
            lane.region->size = region_bytes_;
            lane.input = side_.base[rank] + input_;
        }
        std::vector<Lane> lanes;
        lanes.push_back(std::move(lane));
        return std::make_unique<Layer>(make_plan(shape_, rank), worlds_[rank], std::move(lanes), nullptr, INT64_MAX);
    }

  private:
    static char* zeroed(size_t nbytes) {
        char* data = static_cast<char*>(std::aligned_alloc(64, align_to(nbytes, 64)));
        std::memset(data, 0, nbytes);
        return data;
    }

    Shape shape_;
    std::vector<Control> controls_;
    std::vector<World> worlds_;
    Window window_, side_;
    int64_t region_ = 0, region_bytes_ = 0, input_ = 0;
};

}  // namespace ubep::test
