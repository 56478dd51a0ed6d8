// Programs: what a row of operators.toml says is to be computed, as a tree. The language is in operators.toml.
#pragma once

#include "value.h"

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace claystone_torch {

// A parameter of an operation of claystone.
struct Parameter {
    std::string name;
    bool is_tensor;
    bool is_list; // of tensors, by position after all others
};

// The parameters of all operations, by name.
const std::vector<Parameter>* parameters(const std::string& operation);

// What programs can call besides operations of claystone. There are two arguments at least, none where they are left out.
using Arguments = c10::SmallVector<Value, 3>;
using Function = Value (*)(const Arguments&);

struct Node {
    enum Kind {
        Constant, List,
        Variable,  // `slot`: an argument of the PyTorch operator, or a value assigned before
        Device,    // that of the call
        OutDtype,  // that of the tensor which the result is written into
        Operation, // `text` with `children` in the order of its parameters; null for one that is left out
        Gradient,  // of the operation `children[0]`, for the gradients `children[1]` of its results, where `children[2]` says so
        Call,      // `function`
        Index,     // `children[0]` at `children[1]`
        Infix,     // `text` between two children
        Not,
        Choice,    // `children[0]` ? `children[1]` : `children[2]`
    };
    Kind kind;
    Value constant;
    size_t slot = 0;
    std::string text;
    Function function = nullptr;
    std::vector<std::unique_ptr<Node>> children;
    const std::vector<Parameter>* parameters = nullptr; // of an operation
    // The operation whose second operand is a number, if there is one, and its parameters.
    std::string with_scalar;
    const std::vector<Parameter>* scalar_parameters = nullptr;
};

struct Program {
    std::vector<std::pair<size_t, std::unique_ptr<Node>>> assignments; // a slot and its value
    std::vector<std::unique_ptr<Node>> results;
    size_t slots = 0; // arguments and assigned values
};

// A program, or a condition, over arguments of these names. Throws a sentence where it makes no sense.
Program parse(const std::string& source, const std::vector<std::string>& arguments);

} // namespace claystone_torch
