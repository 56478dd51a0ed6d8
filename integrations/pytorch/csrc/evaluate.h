// Evaluates programs.
#pragma once

#include "program.h"
#include "value.h"

#include <ATen/core/stack.h>

namespace claystone_torch {

// The state of a running program: the value of each slot, and what the whole call shares.
struct Scope {
    c10::SmallVector<Value, 8> values;
    int device = CLAYSTONE_CPU;
    std::optional<GeneratorPointer> generator;
    Value out_dtype; // the dtype of the first output tensor
    bool floats_are_f64 = false; // true if floating-point numbers become f64 tensors instead of f32
};

// Throws failures that a CPU could not have, such as a lost device. For other failures throws Refused, so that the CPU takes the call.
void check_call(ClaystoneStatus status);
// Evaluates a node. The result is a reference to an existing value where possible; otherwise it is stored in `room`.
const Value& evaluate(const Node& node, Scope& scope, Value& room);
Value evaluate(const Node& node, Scope& scope);
// Runs the operation of a program with a single result and writes the result into `out`.
void evaluate_into(const Node& operation, Scope& scope, const TensorHandle& out);

} // namespace claystone_torch
