// Dispatch: tokens to their experts.
#pragma once
#include "operation.h"

namespace ubep {

// What one dispatch leaves behind, for combine, for repeated dispatches and for the user.
struct Routing {
    std::shared_ptr<Sent> sent;
    Received received;
};

struct DispatchCall {
    const char* x = nullptr;  // [tokens, hidden], contiguous
    int tokens = 0;
    int32_t tag = 0;
    bool keep_quantised = false;
};

// In the header field `base` of a direct dispatch: the rows lie in the sender's input area, not in its window.
constexpr int32_t kInputInPlace = 1 << 30;

class Dispatch final : public Operation {
  public:
    // routing.sent holds the routing, unless this rank refuses.
    Dispatch(Layer& layer, int lane, uint32_t epoch, int64_t deadline_ns, const std::string* refusal,
             const DispatchCall& call, Routing& routing);

    Lease rows, scales;

  private:
    int32_t tag() const override { return call_.tag; }
    int32_t base(int peer) const override {
        return static_cast<int32_t>(sent_->start[peer]) | (in_place_ ? kInputInPlace : 0);
    }
    int64_t outgoing(int peer, int edge) const override;
    void write_counts(int peer, int32_t* out) const override;
    void prepare(int worker) override;
    bool settle() override;
    void pack(int peer, int64_t lo, int64_t hi) override;
    void place(int source, int64_t lo, int64_t hi) override;
    void fetch(int worker) override;
    void finish(int worker) override;
    const Record& record() const override { return plan_.dispatch; }

    bool fits() const;
    void quantise_row(int64_t token, char* out) const;
    // A record's row, at `row`, to where its metadata says; number: among this rank's received records.
    bool deliver(int source, int64_t number, const char* row);
    void store(const char* from, int64_t row);
    void claim_row(int source, const int32_t* meta) const;

    const DispatchCall call_;
    Routing& routing_;
    const Sent* sent_;
    bool keep_ = false;
    bool in_place_ = false;
    int64_t out_bytes_ = 0, limit_ = 0;
    std::atomic<int64_t> dropped_{0};
};

}  // namespace ubep
