#pragma once
#include <pybind11/pybind11.h>

namespace ubep {

// The submodule `kernels`: every kernel by the name of its instruction set, on raw addresses. For tests.
void bind_kernels(pybind11::module_& module);

}  // namespace ubep
