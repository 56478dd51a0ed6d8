// Calls that run on PyTorch's CPU instead.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>
#include <vector>

namespace claystone_torch {

// An operator's name with its overload, such as `add.Tensor`.
std::string name_of(const c10::OperatorHandle& handle);

// Makes PyTorch's CPU run the operators of these names, in all overloads, without a warning.
void add_host_operators(const std::vector<std::string>& names, const std::string& reason);

// Calls the operator's CPU kernel and counts the call with its reason. The first call of each operator prints a warning, unless
// `add_host_operators` names the operator.
void fall_back(const c10::OperatorHandle& handle, torch::jit::Stack* stack, const std::string& reason);

struct Fallback {
    int64_t count = 0;
    std::string reason; // of the latest call
};
// The operators that ran on the CPU so far, by name.
std::map<std::string, Fallback> fallbacks();
void reset_fallbacks();

} // namespace claystone_torch
