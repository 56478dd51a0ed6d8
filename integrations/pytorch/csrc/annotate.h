// The names of PyTorch's operators in what claystone records.
#pragma once

#include "storage.h"

#include <exception>

namespace claystone_torch {

// Calls `compute`: what claystone records of memory and time meanwhile carries the operator's name.
template <typename Compute>
void annotated(const std::string& name, Compute compute) {
    struct Call {
        Compute& compute;
        std::exception_ptr thrown;
    } call{compute, nullptr};
    check(claystone_annotate(name.c_str(), [](void* data) {
        auto& call = *static_cast<Call*>(data);
        try {
            call.compute();
        } catch (...) { // which C would not let through
            call.thrown = std::current_exception();
        }
    }, &call));
    if (call.thrown) {
        std::rethrow_exception(call.thrown);
    }
}

} // namespace claystone_torch
