// One expert-parallel layer on one rank: its plan, its windows, and what its operations reuse.
#pragma once
#include <memory>
#include <vector>

#include "fabric.h"
#include "link.h"
#include "memory.h"
#include "plan.h"
#include "routing.h"
#include "team.h"

namespace ubep {

// A put or a flag, for comparison with what the driver does.
struct Traced {
    int worker, peer;
    bool is_signal;
    int64_t offset, amount;  // bytes of a put, payload of a flag
};

struct Lane {
    Window window;  // as the plan lays it out
    Window side;    // what only fused operations have: see SideLayout
    std::shared_ptr<Region> region;
    char* input = nullptr;  // where a caller may lay its rows for peers to read in place
};

// The side window of a lane: how far its rank is, stamps of the emulated link, then rows that are read in
// place: a region for what was received, and the caller's input.
struct SideLayout {
    static constexpr int64_t finished = 0;
    int64_t stamps = 64, region = 64, input = 64, nbytes = 64;
    SideLayout(const Plan& plan, bool in_place, bool emulated);
};

struct Layer {
    Layer(std::shared_ptr<const Plan> plan, World& world, std::vector<Lane> lanes, std::unique_ptr<Link> link, int64_t streaming_bytes);

    const std::shared_ptr<const Plan> shared_plan;
    const Plan& plan;
    World& world;
    std::vector<Lane> lanes;
    std::unique_ptr<Link> link;
    int64_t streaming_bytes;
    std::shared_ptr<Pool> pool = std::make_shared<Pool>();
    Team team;
    Router router;
    Scratch<char> quantised;           // this rank's rows, as they travel
    Scratch<const char*> inputs;       // of the last reduction, [T, K]
    std::unique_ptr<std::atomic<int32_t>[]> missing;  // of each token: rows still to come
    bool tracing = false;
    std::mutex trace_mutex;
    std::vector<Traced> trace;
};

}  // namespace ubep
