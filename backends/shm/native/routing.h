// From the routing of one call to the records that travel and the rows where they land.
// The native image of ubep.protocol.routing, to the same order.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "plan.h"

namespace ubep {

// A growable array that keeps its memory and does not clear it.
template <class T>
class Scratch {
  public:
    T* resize(size_t size) {
        if (size > capacity_) {
            data_.reset(new T[size]);
            capacity_ = size;
        }
        size_ = size;
        return data_.get();
    }
    T* data() { return data_.get(); }
    const T* data() const { return data_.get(); }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }
    size_t size() const { return size_; }

  private:
    std::unique_ptr<T[]> data_;
    size_t size_ = 0, capacity_ = 0;
};

// What one rank sends in one dispatch; fields as in SentRecords, meta interleaved as it travels.
struct Sent {
    int tokens = 0;
    Scratch<int32_t> meta;      // [n, 1 + 3 M]: token, experts, positions, weights (as bits)
    Scratch<int32_t> slot;      // [n]
    Scratch<float> slot_weight; // [T, K] if the sum at the source is weighted
    bool has_slot_weight = false;
    Scratch<int32_t> counts;    // [E] or [R]
    Scratch<int64_t> start;     // [R + 1]
    Scratch<int64_t> bounds;    // [R, sending + 1]
    int64_t records() const { return start[start.size() - 1]; }
};

// What one rank received; fields as in ReceivedRecords.
struct Received {
    Scratch<int32_t> meta;    // [n, 1 + 3 M], as it travelled
    Scratch<int32_t> row;     // [n, M] (token-rank: [n, 1])
    Scratch<int64_t> start;   // [R + 1]
    Scratch<int32_t> counts;  // [R, heard counts]
    Scratch<int64_t> offset, count;  // [G + 1], [G]
    Scratch<int64_t> first;          // [R, G]: first row of each source's run
    Scratch<int64_t> remote_first;   // direct: by counted column, the first of this rank's rows at its owner
    int64_t dropped = 0;
    int64_t rows() const { return offset[offset.size() - 1]; }
};

// The input of a dispatch. idx is int64 or int32 [T, K]; weights float [T, K] or null (all 1).
struct Choice {
    const void* idx = nullptr;
    bool wide = true;
    const float* weights = nullptr;
    int tokens = 0, valid = 0;  // tokens from `valid` on are padding
};

// False when an id is out of range or, in a checked plan, a weight is not finite.
bool acceptable(const Plan& plan, const Choice& choice);

class Router {
  public:
    explicit Router(const Plan& plan) : plan_(plan) {}
    void route(const Choice& choice, Sent& out);

  private:
    template <class Id>
    void one_per_expert(const Choice& choice, Sent& out);
    template <class Id>
    void one_per_rank(const Choice& choice, Sent& out);

    const Plan& plan_;
    Scratch<int64_t> next_, cut_;
    Scratch<int32_t> place_, reach_;
};

// bounds[peer][w]: records of that peer before the w-th edge of the sending workers' equal slices, for
// items in sending order, each with its peer and its number of records.
void slice_bounds(const Plan& plan, const std::vector<int>& item_peer, const int64_t* item_count,
                  int64_t* bounds);

// Where rows lie on this rank, and where its own rows lie on the others.
void lay_out(const Plan& plan, Received& got);

}  // namespace ubep
