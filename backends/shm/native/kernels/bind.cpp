#include "bind.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "table.h"

namespace py = pybind11;

namespace ubep {
namespace {

const Kernels& named(const std::string& name) {
    if (const Kernels* set = find_kernels(name.c_str())) return *set;
    throw std::invalid_argument("no kernels for " + name + " on this processor");
}

Dtype dtype_of(const std::string& name) {
    if (name == "bfloat16") return Dtype::bf16;
    if (name == "float16") return Dtype::fp16;
    if (name == "float32") return Dtype::fp32;
    throw std::invalid_argument("dtype " + name);
}

Quantisation kind_of(const std::string& name) {
    if (name == "fp8") return Quantisation::fp8;
    if (name == "int8") return Quantisation::int8;
    throw std::invalid_argument("quantisation " + name);
}

template <class T>
T* at(uintptr_t address) { return reinterpret_cast<T*>(address); }

std::vector<std::string> available() {
    std::vector<std::string> names;
    for (const char* name : {"scalar", "avx2", "avx512"}) {
        if (find_kernels(name)) names.emplace_back(name);
    }
    return names;
}

}  // namespace

void bind_kernels(py::module_& module) {
    kernels();  // a bad UBEP_SHM_ISA is refused on import
    py::module_ sub = module.def_submodule("kernels", "Kernels on raw addresses, by instruction set.");
    sub.def("available", available);
    sub.def("isa", isa);
    sub.def("copy", [](const std::string& isa, uintptr_t out, uintptr_t from, int64_t nbytes) {
        named(isa).copy_streaming(at<char>(out), at<char>(from), nbytes);
        fence_streams();
    });
    sub.def("reduce_rows", [](const std::string& isa, const std::string& dtype, uintptr_t out,
                              const std::vector<uintptr_t>& rows, uintptr_t weights, int hidden, bool stream) {
        std::vector<const char*> from;
        for (uintptr_t row : rows) from.push_back(at<char>(row));
        named(isa).reduce_rows(dtype_of(dtype), at<char>(out), from.data(), at<float>(weights),
                               static_cast<int>(from.size()), hidden, stream);
        fence_streams();
    });
    sub.def("quantise", [](const std::string& isa, const std::string& kind, const std::string& dtype, uintptr_t q,
                           uintptr_t scales, uintptr_t row, int hidden) {
        named(isa).quantise(kind_of(kind), dtype_of(dtype), at<char>(q), at<float>(scales), at<char>(row), hidden);
    });
    sub.def("dequantise", [](const std::string& isa, const std::string& kind, const std::string& dtype,
                             uintptr_t out, uintptr_t q, uintptr_t scales, int hidden) {
        named(isa).dequantise(kind_of(kind), dtype_of(dtype), at<char>(out), at<char>(q), at<float>(scales), hidden);
    });
}

}  // namespace ubep
