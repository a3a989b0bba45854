// Dispatch and combine between threads, checked against their definition. Built plain, under
// ThreadSanitizer and under AddressSanitizer with UBSan, and with planted faults that must be found.
//
//   shm_test [rounds]        exit status 0: everything was right

#include <cstdio>
#include <random>
#include <string>

#include "shm_world.h"

using namespace ubep;
using namespace ubep::test;

namespace {

std::atomic<int> failures{0};
constexpr int64_t kDeadline = INT64_C(5000000000);

void fail(const std::string& what) {
    if (failures.fetch_add(1) < 5) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

// Every element tells rank, round, token and column; small integers and quarters keep all sums exact.
float element(int rank, int round, int token, int column) {
    return static_cast<float>((rank * 61 + round * 17 + token * 5 + column * 3) % 251);
}

struct Input {
    std::vector<float> x, weights;
    std::vector<int64_t> idx;
    int tokens;

    Input(const Shape& shape, int rank, int round) {
        std::mt19937 random(rank * 1000 + round);
        tokens = static_cast<int>(random() % (shape.max_tokens + 1));
        for (int t = 0; t < tokens; t++) {
            for (int c = 0; c < shape.hidden; c++) x.push_back(element(rank, round, t, c));
            for (int k = 0; k < shape.topk; k++) {
                idx.push_back(static_cast<int64_t>(random() % (shape.experts + 1)) - 1);
                weights.push_back(static_cast<float>(random() % 7 + 1) / 4);
            }
        }
    }
};

// Expert e multiplies by e + 1.
void apply_experts(const Plan& plan, const Received& got, float* rows) {
    for (int g = 0; g < plan.groups(plan.rank); g++) {
        const auto factor = static_cast<float>(plan.column(plan.rank, g) + 1);
        for (int64_t i = got.offset[g] * plan.hidden; i < (got.offset[g] + got.count[g]) * plan.hidden; i++) {
            rows[i] *= factor;
        }
    }
}

void check(const Shape& shape, const Input& input, const std::vector<float>& out, int rank, int round) {
    for (int t = 0; t < input.tokens; t++) {
        float factor = 0;
        for (int k = 0; k < shape.topk; k++) {
            const int i = t * shape.topk + k;
            if (input.idx[i] >= 0) factor += input.weights[i] * static_cast<float>(input.idx[i] + 1);
        }
        for (int c = 0; c < shape.hidden; c++) {
            const float expected = factor * element(rank, round, t, c);
            if (out[t * shape.hidden + c] == expected) continue;
            fail("rank " + std::to_string(rank) + " round " + std::to_string(round) + " token " +
                 std::to_string(t) + ": " + std::to_string(out[t * shape.hidden + c]) + ", not " +
                 std::to_string(expected));
            return;
        }
    }
}

void run_rank(const Shape& shape, Ranks& ranks, int rank, int rounds) {
    auto layer = ranks.layer(rank);
    std::mt19937 random(rank);
    uint32_t epoch = 0xfffffff0;  // the wrap is on the way
    const auto next = [&] { epoch = epoch == 0xffffffff ? 2 : epoch + 1; };
    for (int round = 0; round < rounds; round++) {
        const Input input(shape, rank, round);
        Routing routing;
        routing.sent = std::make_shared<Sent>();
        const Choice choice{input.idx.data(), true, input.weights.data(), input.tokens, input.tokens};
        if (!acceptable(layer->plan, choice)) return fail("good input was refused");
        layer->router.route(choice, *routing.sent);
        const char* x = reinterpret_cast<const char*>(input.x.data());
        if (layer->lanes[0].input && input.tokens > 0 && round % 2) {
            x = static_cast<const char*>(std::memcpy(layer->lanes[0].input, x, input.x.size() * sizeof(float)));
        }
        const DispatchCall call{x, input.tokens, 0, false};
        Dispatch dispatch(*layer, 0, epoch, now_ns() + kDeadline, nullptr, call, routing);
        if (dispatch.run().kind != Outcome::done) return fail("dispatch ended in round " + std::to_string(round));
        next();
        auto* rows = reinterpret_cast<float*>(dispatch.rows.data());
        apply_experts(layer->plan, routing.received, rows);
        if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 50));
        std::vector<float> out(static_cast<size_t>(input.tokens) * shape.hidden);
        CombineCall back;
        back.y = dispatch.rows.data();
        back.out = reinterpret_cast<char*>(out.data());
        Combine combine(*layer, 0, epoch, now_ns() + kDeadline, nullptr, back, routing);
        if (combine.run().kind != Outcome::done) return fail("combine ended in round " + std::to_string(round));
        next();
        const bool exact = shape.capacity < 0 && shape.quantise == Quantisation::none;
        if (exact) check(shape, input, out, rank, round);
        if (random() % 4 == 0) std::this_thread::yield();
    }
}

void run_shape(const Shape& shape, int rounds) {
    Ranks ranks(shape);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < shape.world; rank++) {
        threads.emplace_back([&, rank] { run_rank(shape, ranks, rank, rounds); });
    }
    for (std::thread& thread : threads) thread.join();
}

// A rank that never comes: the other says so, in time.
void test_deadline_and_death(bool dies) {
    Shape shape;
    shape.world = 2;
    Ranks ranks(shape);
    if (dies) ranks.world(0).dead = [](int peer) { return peer == 1; };
    auto layer = ranks.layer(0);
    const Input input(shape, 0, 1);
    Routing routing;
    routing.sent = std::make_shared<Sent>();
    layer->router.route({input.idx.data(), true, input.weights.data(), input.tokens, input.tokens}, *routing.sent);
    const DispatchCall call{reinterpret_cast<const char*>(input.x.data()), input.tokens, 0, false};
    Dispatch dispatch(*layer, 0, 1, now_ns() + (dies ? kDeadline : 20000000), nullptr, call, routing);
    const Outcome outcome = dispatch.run();
    const auto expected = dies ? Outcome::failed : Outcome::deadline;
    if (outcome.kind != expected || outcome.waiting != 1) fail("a missing rank was not noticed");
    if (!outcome.heard.empty()) fail("nobody can have been heard before the rank that is waited for");
}

// Offsets that do not fit 32 bits.
void test_large_offsets() {
    Shape shape;
    shape.world = 64;
    shape.hidden = 7168;
    shape.max_tokens = 4096;
    shape.topk = 8;
    const auto plan = make_plan(shape, 0);
    if (plan->slot(1, 63) != plan->parity_bytes + plan->slots + 63 * plan->slot_stride) fail("slot offset");
    if (plan->slot(1, 63) < (INT64_C(1) << 32)) fail("the window should be larger than 4 GiB");
    for (int source = 1; source < 64; source++) {
        if (plan->slot(0, source) - plan->slot(0, source - 1) < plan->max_records * plan->dispatch.nbytes) {
            fail("slots overlap");
        }
    }
}

std::vector<Shape> shapes() {
    std::vector<Shape> all;
    for (int world : {1, 2, 3}) {
        Shape base;
        base.world = world;
        all.push_back(base);
        Shape direct = base;
        direct.direct = true;
        direct.alignment = 4;
        all.push_back(direct);
        Shape copied = direct;
        copied.in_place = false;
        all.push_back(copied);
        Shape once = base;
        once.deduplicate = true;
        all.push_back(once);
        Shape early = base;
        early.checked = false;
        early.chunk = 5;
        all.push_back(early);
        Shape team = once;
        team.workers = 3;
        team.sending = 2;
        all.push_back(team);
        Shape quantised = team;
        quantised.quantise = Quantisation::int8;
        all.push_back(quantised);
        Shape team_direct = direct;
        team_direct.workers = 2;
        all.push_back(team_direct);
        Shape dropping = base;
        dropping.capacity = 2;
        all.push_back(dropping);
    }
    return all;
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
    for (const Shape& shape : shapes()) {
        if (failures == 0) run_shape(shape, rounds);
    }
    test_deadline_and_death(false);
    test_deadline_and_death(true);
    test_large_offsets();
    if (failures == 0) std::puts("ok");
    return failures == 0 ? 0 : 1;
}
