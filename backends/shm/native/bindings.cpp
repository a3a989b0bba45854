// The extension module: what Python sees of the native parts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "fabric.h"
#include "fused.h"
#include "kernels/bind.h"
#include "kernels/bind.h"

namespace py = pybind11;
using namespace ubep;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Memory of a mapping, kept alive by whoever holds the buffer.
struct Memory {
    MappingPtr mapping;
};

const char* pointer(uintptr_t address) { return reinterpret_cast<const char*>(address); }

bool interrupted() {
    py::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
}

void bind_fabric(py::module_& module) {
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const Closed& error) {
            py::set_error(py::module_::import("ubep.backend").attr("ClosedError"), error.what());
        }
    });
    py::class_<Memory>(module, "Memory", py::buffer_protocol()).def_buffer([](Memory& memory) {
        return py::buffer_info(memory.mapping->data(), 1, "B", static_cast<py::ssize_t>(memory.mapping->size()));
    });
    py::class_<Fabric, std::shared_ptr<Fabric>>(module, "Fabric")
        .def(py::init([](int rank, int world) {
            auto fabric = std::make_shared<Fabric>(rank, world);
            fabric->world().interrupted = interrupted;
            return fabric;
        }))
        .def_property_readonly("address", &Fabric::address)
        .def_property_readonly("secret", &Fabric::secret)
        .def("join", &Fabric::join, NoGil())
        .def("set_wait_rule", [](Fabric& fabric, int spins, int yields) {
            fabric.world().rule.spins = spins;
            fabric.world().rule.yields = yields;
        })
        .def("reserve", &Fabric::reserve)
        .def("map_window", &Fabric::map_window, NoGil())
        .def("populate_peers", &Fabric::populate_peers, NoGil())
        .def("memory", [](Fabric& fabric, int window) { return Memory{fabric.own_mapping(window)}; })
        .def("put", [](Fabric& fabric, int window, int peer, size_t offset, uintptr_t data, size_t nbytes) {
            fabric.put(window, peer, offset, pointer(data), nbytes);
        }, NoGil())
        .def("get", [](Fabric& fabric, int window, int peer, size_t offset, uintptr_t data, size_t nbytes) {
            fabric.get(window, peer, offset, const_cast<char*>(pointer(data)), nbytes);
        }, NoGil())
        .def("signal", [](Fabric& fabric, int window, int peer, size_t offset, int64_t word) {
            fabric.signal(window, peer, offset, static_cast<uint64_t>(word));
        })
        .def("wait", [](Fabric& fabric, int window, size_t offset, uint32_t epoch, uint32_t minimum, double timeout_s) {
            int64_t payload;
            {
                py::gil_scoped_release release;
                payload = fabric.wait(window, offset, epoch, minimum, timeout_s);
            }
            if (PyErr_Occurred()) throw py::error_already_set();
            return payload;
        })
        .def("progress", &Fabric::progress, NoGil())
        .def("dead", &Fabric::dead)
        .def("closed", &Fabric::closed)
        .def("pid", &Fabric::pid)
        .def("close", &Fabric::close);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native parts of the shared-memory backend.";
    bind_fabric(module);
    bind_fused(module);
    bind_kernels(module);
    module.def("isa", isa);
}
