#include "layer.h"

namespace ubep {

namespace {

constexpr int64_t kLine = 64;

int64_t lines(int64_t nbytes) { return (nbytes + kLine - 1) / kLine * kLine; }

}  // namespace

SideLayout::SideLayout(const Plan& plan, bool in_place, bool emulated) {
    region = stamps;
    if (emulated) {
        region += lines(kParities * plan.world * Link::messages(plan) * static_cast<int64_t>(sizeof(Stamp)));
    }
    input = region + (in_place ? lines(plan.max_rows * plan.row_bytes()) : 0);
    nbytes = input + (in_place ? lines(plan.max_tokens * plan.row_bytes()) : 0);
}

Layer::Layer(std::shared_ptr<const Plan> plan_, World& world_, std::vector<Lane> lanes_, std::unique_ptr<Link> link_,
             int64_t streaming_bytes_)
    : shared_plan(std::move(plan_)),
      plan(*shared_plan),
      world(world_),
      lanes(std::move(lanes_)),
      link(std::move(link_)),
      streaming_bytes(streaming_bytes_),
      team(plan.workers),
      router(plan),
      missing(new std::atomic<int32_t>[plan.max_tokens]) {
    if (plan.quantise != Quantisation::none && !plan.direct) {
        quantised.resize(plan.max_tokens * plan.dispatch.meta_offset);
    }
}

}  // namespace ubep
