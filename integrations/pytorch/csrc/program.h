// Syntax trees of the programs in operators.toml, which describes their language.
#pragma once

#include "value.h"

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace claystone_torch {

// A parameter of a claystone operation.
struct Parameter {
    std::string name;
    bool is_tensor;
    bool is_list; // a list of tensors; all following arguments by position belong to the list
};

// The parameters of an operation; null if claystone has no operation of this name.
const std::vector<Parameter>* parameters(const std::string& operation);

// A function of programs. Omitted arguments are none, and there are always at least two.
using Arguments = c10::SmallVector<Value, 3>;
using Function = Value (*)(const Arguments&);

struct Node {
    enum Kind {
        Constant, List,
        Variable,  // `slot`: an argument of the PyTorch operator, or an assigned value
        Device,    // the device of the call
        OutDtype,  // the dtype of the tensor that the result is written to
        Operation, // `text` with `children` in the order of its parameters; null for an omitted one
        Gradient,  // of operation `children[0]`, given its results' gradients `children[1]`, for the tensors that `children[2]` selects
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
    const std::vector<Parameter>* parameters = nullptr; // of `Operation`
    // The variant of the operation whose second operand is a number, if there is one, and its parameters.
    std::string with_scalar;
    const std::vector<Parameter>* scalar_parameters = nullptr;
};

struct Program {
    std::vector<std::pair<size_t, std::unique_ptr<Node>>> assignments; // slots and their values
    std::vector<std::unique_ptr<Node>> results;
    size_t slots = 0; // the number of arguments and assigned values
};

// Parses a program or a condition over arguments of these names. Throws a message if the source is invalid.
Program parse(const std::string& source, const std::vector<std::string>& arguments);

} // namespace claystone_torch
