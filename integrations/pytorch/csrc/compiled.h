// Graphs of operators that torch.compile captured, run by one call.
#pragma once

#include <pybind11/pybind11.h>

namespace claystone_torch {

void define_compiled(pybind11::module_& module);

} // namespace claystone_torch
