// Calls that PyTorch's CPU takes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>

namespace claystone_torch {

// An operator's name with its overload: `add.Tensor`.
std::string name_of(const c10::OperatorHandle& handle);

// Calls the operator's kernel of the CPU, and counts and says why, the first time by a warning.
void fall_back(const c10::OperatorHandle& handle, torch::jit::Stack* stack, const std::string& reason);

struct Fallback {
    int64_t count = 0;
    std::string reason; // the latest
};
// What ran on the CPU so far.
std::map<std::string, Fallback> fallbacks();
void reset_fallbacks();

} // namespace claystone_torch
