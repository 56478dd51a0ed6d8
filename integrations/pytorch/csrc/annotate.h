// Labels claystone's recordings with the names of PyTorch's operators.
#pragma once

#include "storage.h"

#include <exception>

namespace claystone_torch {

// Calls `compute` under an operator's name, which claystone's profiles and memory histories then show.
template <typename Compute>
void with_annotation(const std::string& name, Compute compute) {
    struct Call {
        Compute& compute;
        std::exception_ptr thrown;
    } call{compute, nullptr};
    check(claystone_annotate(name.c_str(), [](void* data) {
        auto& call = *static_cast<Call*>(data);
        try {
            call.compute();
        } catch (...) { // an exception must not pass through C
            call.thrown = std::current_exception();
        }
    }, &call));
    if (call.thrown) {
        std::rethrow_exception(call.thrown);
    }
}

} // namespace claystone_torch
