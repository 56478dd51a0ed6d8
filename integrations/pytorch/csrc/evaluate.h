// Runs programs.
#pragma once

#include "program.h"
#include "value.h"

#include <ATen/core/stack.h>

namespace claystone_torch {

// Where a program runs: values by slot, and what they have in common.
struct Scope {
    c10::SmallVector<Value, 8> values;
    int device = CLAYSTONE_CPU;
    std::optional<GeneratorPointer> generator;
    Value out_dtype; // of the first tensor that is written
    bool wide = false; // whether numbers that become tensors are f64
};

// Failures that a CPU would not have are the caller's; a call that claystone refuses throws Refused, and goes to the CPU.
void check_call(ClaystoneStatus status);
// The value of a node: where it is not there already, it is put into `room`.
const Value& evaluate(const Node& node, Scope& scope, Value& room);
Value evaluate(const Node& node, Scope& scope);
// Runs an operation that is one result of a program, into a tensor that is there.
void evaluate_into(const Node& operation, Scope& scope, const TensorHandle& out);

} // namespace claystone_torch
