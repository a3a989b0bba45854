// Torch tensors in and out, without linking to torch.
#pragma once
#include <pybind11/pybind11.h>

#include "dlpack.h"
#include "memory.h"
#include "rows.h"

namespace ubep {

namespace py = pybind11;

// What a tensor is and where it lies.
struct View {
    char* data = nullptr;
    int ndim = 0;
    int64_t shape[2] = {0, 0};
    dlpack::DataType dtype{};
    bool contiguous = false, on_cpu = false;

    bool is(const dlpack::DataType& other, int64_t rows, int64_t columns) const {
        return ndim == 2 && shape[0] == rows && shape[1] == columns && has(other);
    }
    bool has(const dlpack::DataType& other) const {
        return dtype.code == other.code && dtype.bits == other.bits;
    }
};

constexpr dlpack::DataType kInt32{dlpack::kInt, 32, 1}, kInt64{dlpack::kInt, 64, 1};
constexpr dlpack::DataType kFloat32{dlpack::kFloat, 32, 1}, kBytes{dlpack::kUInt, 8, 1};

inline dlpack::DataType dlpack_type(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16: return {dlpack::kBfloat, 16, 1};
        case Dtype::fp16: return {dlpack::kFloat, 16, 1};
        default: return kFloat32;
    }
}

class Tensors {
  public:
    Tensors();
    // False when the object is no tensor that can be read here.
    bool view(py::handle tensor, View& out) const;
    // A new tensor on leased memory, [rows, columns], or [rows] when columns is negative.
    py::object make(Lease lease, const dlpack::DataType& dtype, int64_t rows, int64_t columns) const;
    // A new one-dimensional tensor with a copy of `values`.
    template <class T>
    py::object copy(const std::shared_ptr<Pool>& pool, const T* values, int64_t n, int64_t columns = -1) const;

  private:
    bool view_slowly(py::handle tensor, View& out) const;
    py::object make_slowly(Lease lease, const dlpack::DataType& dtype, int64_t rows, int64_t columns) const;

    py::object torch_;
    py::object type_;
    const dlpack::ExchangeApi* api_ = nullptr;
};

// Leased memory as a buffer, where torch has no exchange interface.
struct LeasedBuffer {
    Lease lease;
    size_t nbytes;
};

template <class T>
constexpr dlpack::DataType type_of() {
    if constexpr (std::is_floating_point_v<T>) return {dlpack::kFloat, sizeof(T) * 8, 1};
    return {dlpack::kInt, sizeof(T) * 8, 1};
}

template <class T>
py::object Tensors::copy(const std::shared_ptr<Pool>& pool, const T* values, int64_t n, int64_t columns) const {
    const int64_t size = columns < 0 ? n : n * columns;
    Lease lease(pool, size * sizeof(T));
    std::copy_n(values, size, reinterpret_cast<T*>(lease.data()));
    return make(std::move(lease), type_of<T>(), n, columns);
}

}  // namespace ubep
