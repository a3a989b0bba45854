// Combine: expert outputs back to their tokens, summed in the stated order.
#pragma once
#include "dispatch.h"

namespace ubep {

struct CombineCall {
    const char* y = nullptr;              // [rows, hidden], contiguous
    const float* row_weights = nullptr;   // [rows] (token-rank: [rows, K]), or null
    int32_t tag = 0;
    bool weighted = true;                 // multiply by the weights of the dispatch, if the plan does
    char* out = nullptr;                  // [tokens, hidden]
    float* weights = nullptr;             // [tokens, K], where row_weights come back
};

class Combine final : public Operation {
  public:
    Combine(Layer& layer, int lane, uint32_t epoch, int64_t deadline_ns, const std::string* refusal,
            const CombineCall& call, const Routing& routing);

  private:
    // Header field `base`: where a rank's rows are to be read.
    enum Source : int32_t { kPublished = 0, kInPlace = 1 };

    int32_t tag() const override { return call_.tag; }
    int32_t base(int) const override { return in_place_ ? kInPlace : kPublished; }
    int64_t outgoing(int peer, int edge) const override;
    void write_counts(int, int32_t*) const override {}
    void prepare(int worker) override;
    bool settle() override;
    void pack(int peer, int64_t lo, int64_t hi) override;
    void place(int source, int64_t lo, int64_t hi) override;
    void fetch(int worker) override;
    void finish(int worker) override;
    const Record& record() const override { return plan_.combine; }

    void pack_row(const int32_t* where, const int32_t* meta, char* out) const;
    void pack_aux(const int32_t* where, float* out) const;
    void take_aux(int64_t sent_record, const float* aux) const;
    void reduce_token(int64_t token) const;

    const CombineCall call_;
    const Routing& routing_;
    const Sent& sent_;
    const Received& received_;
    bool in_place_ = false;
    std::vector<int64_t> bounds_;  // [R, sending + 1]
};

}  // namespace ubep
