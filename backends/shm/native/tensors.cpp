#include "tensors.h"

namespace ubep {

namespace {

struct Owned {
    dlpack::ManagedTensor managed;
    int64_t shape[2], strides[2];
    Lease lease;
};

void destroy(dlpack::ManagedTensor* managed) { delete static_cast<Owned*>(managed->context); }

}  // namespace

Tensors::Tensors() : torch_(py::module_::import("torch")), type_(torch_.attr("Tensor")) {
    py::object capsule = py::getattr(type_, "__dlpack_c_exchange_api__", py::none());
    if (capsule.is_none() || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
    const auto* api =
        static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api->header.version.major == dlpack::kMajor && api->borrow && api->to_object) api_ = api;
}

bool Tensors::view(py::handle tensor, View& out) const {
    dlpack::Tensor raw;
    // Exactly torch.Tensor: what a subclass means by its data is its own affair.
    if (api_ == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())) != type_.ptr()) {
        return view_slowly(tensor, out);
    }
    if (api_->borrow(tensor.ptr(), &raw) != 0) {
        PyErr_Clear();
        return view_slowly(tensor, out);
    }
    out.data = static_cast<char*>(raw.data) + raw.byte_offset;
    out.ndim = raw.ndim;
    out.dtype = raw.dtype;
    out.on_cpu = raw.device.type == dlpack::kCpu;
    out.contiguous = true;
    int64_t step = 1;
    for (int d = raw.ndim - 1; d >= 0; d--) {
        if (d < 2) out.shape[d] = raw.shape[d];
        if (raw.strides && raw.shape[d] > 1 && raw.strides[d] != step) out.contiguous = false;
        step *= raw.shape[d];
    }
    if (step == 0) out.contiguous = true;
    return true;
}

bool Tensors::view_slowly(py::handle tensor, View& out) const {
    if (!py::isinstance(tensor, type_)) return false;
    const auto shape = py::tuple(tensor.attr("shape"));
    out.ndim = static_cast<int>(shape.size());
    for (int d = 0; d < out.ndim && d < 2; d++) out.shape[d] = shape[d].cast<int64_t>();
    out.on_cpu = tensor.attr("device").attr("type").cast<std::string>() == "cpu";
    out.contiguous = tensor.attr("is_contiguous")().cast<bool>();
    out.data = reinterpret_cast<char*>(tensor.attr("data_ptr")().cast<uintptr_t>());
    const py::object dtype = tensor.attr("dtype");
    const auto bits = static_cast<uint8_t>(dtype.attr("itemsize").cast<int>() * 8);
    const bool bfloat = dtype.is(torch_.attr("bfloat16"));
    const bool is_float = dtype.attr("is_floating_point").cast<bool>();
    out.dtype = {bfloat ? dlpack::kBfloat : is_float ? dlpack::kFloat : dlpack::kInt, bits, 1};
    return true;
}

py::object Tensors::make(Lease lease, const dlpack::DataType& dtype, int64_t rows, int64_t columns) const {
    if (api_ == nullptr) return make_slowly(std::move(lease), dtype, rows, columns);
    auto* owned = new Owned{};
    owned->lease = std::move(lease);
    owned->shape[0] = rows;
    owned->shape[1] = columns;
    owned->strides[0] = columns < 0 ? 1 : columns;
    owned->strides[1] = 1;
    const dlpack::Tensor tensor{owned->lease.data(), {dlpack::kCpu, 0}, columns < 0 ? 1 : 2, dtype,
                                owned->shape,        owned->strides,    0};
    owned->managed = {{dlpack::kMajor, 0}, owned, destroy, 0, tensor};
    void* object = nullptr;
    if (api_->to_object(&owned->managed, &object) != 0) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

py::object Tensors::make_slowly(Lease lease, const dlpack::DataType& dtype, int64_t rows, int64_t columns) const {
    const char* name = dtype.code == dlpack::kBfloat  ? "bfloat16"
                       : dtype.code == dlpack::kFloat ? (dtype.bits == 16 ? "float16" : "float32")
                       : dtype.code == dlpack::kUInt  ? "uint8"
                       : dtype.bits == 32             ? "int32"
                                                      : "int64";
    const int64_t size = columns < 0 ? rows : rows * columns;
    py::object type = torch_.attr(name);
    py::object flat;
    if (size == 0) {
        flat = torch_.attr("empty")(0, py::arg("dtype") = type);
    } else {
        py::object buffer = py::cast(new LeasedBuffer{std::move(lease), static_cast<size_t>(size) * dtype.bits / 8},
                                     py::return_value_policy::take_ownership);
        flat = torch_.attr("frombuffer")(buffer, py::arg("dtype") = type, py::arg("count") = size);
    }
    return columns < 0 ? flat : flat.attr("view")(rows, columns);
}

}  // namespace ubep
