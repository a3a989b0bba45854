// Fused operations as Python calls them.
#pragma once
#include <pybind11/pybind11.h>

#include "combine.h"
#include "tensors.h"

namespace ubep {

// The routing of one dispatch, as tensors on demand; recycled when its last holder lets go.
class PyRouting {
  public:
    PyRouting(std::shared_ptr<Pool> pool, std::shared_ptr<const Plan> plan)
        : pool_(std::move(pool)), shared_plan_(std::move(plan)), plan_(*shared_plan_) {}
    Routing routing;

    int64_t num_rows() const { return routing.received.rows(); }
    py::dict sent(const Tensors& tensors) const;
    py::dict received(const Tensors& tensors) const;
    py::object row_weights(const Tensors& tensors) const;
    py::object expert_counts(const Tensors& tensors) const;

  private:
    std::shared_ptr<Pool> pool_;
    std::shared_ptr<const Plan> shared_plan_;
    const Plan& plan_;
};

class Fused {
  public:
    Fused(std::shared_ptr<Fabric> fabric, std::shared_ptr<const Plan> plan, std::vector<std::pair<int, int>> windows, bool in_place,
          std::unique_ptr<Link> link, int64_t streaming_bytes);

    // Either (rows, scales or None, PyRouting), or None when the input is not acceptable here, or how it ended.
    py::object dispatch(int lane, uint32_t epoch, double timeout_s, py::handle x, py::handle idx,
                        py::handle weights, const PyRouting* previous, int32_t tag, int64_t valid,
                        bool keep_quantised);
    // Either the output [T, H], or ([T, H], [T, K]) with row_weights; else as dispatch.
    py::object combine(int lane, uint32_t epoch, double timeout_s, py::handle y, const PyRouting& routing,
                       int32_t tag, bool weighted, py::handle row_weights);
    // Memory of this rank for `tokens` rows that peers read in place, or None.
    py::object input(int lane, int64_t tokens) const;
    py::object refuse(int lane, uint32_t epoch, double timeout_s, bool is_dispatch, const std::string& reason);

    void trace(bool on);
    py::list traced();

  private:
    int64_t deadline(double timeout_s) const { return now_ns() + static_cast<int64_t>(timeout_s * 1e9); }
    Outcome run(Operation& operation);

    std::shared_ptr<Fabric> fabric_;
    Layer layer_;
    Tensors tensors_;
    dlpack::DataType dtype_;
};

void bind_fused(py::module_& module);

}  // namespace ubep
