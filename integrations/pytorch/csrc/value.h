// Values of programs, and what they are made of.
#pragma once

#include "storage.h"

#include <ATen/core/ivalue.h>

#include <stdexcept>
#include <variant>

namespace claystone_torch {

// Thrown where claystone has no way: the call goes to the CPU, whose result or error is the caller's.
struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Value;
using Values = std::vector<Value>;
struct Dtype {
    ClaystoneDtype number;
};
struct DeviceNumber {
    int number;
};
struct GeneratorPointer {
    const ClaystoneGenerator* pointer;
};

struct Value : std::variant<
                   std::monostate, bool, int64_t, double, std::string, Dtype, DeviceNumber, GeneratorPointer, TensorHandle, std::vector<int64_t>,
                   std::vector<double>, Values> {
    using variant::variant;

    // Of a number that is a tensor without dims on PyTorch's CPU: its dtype has a say in that of results, as Python's numbers have not.
    std::optional<ClaystoneDtype> dtype;

    template <typename T>
    const T* as() const {
        return std::get_if<T>(this);
    }
    bool is_none() const { return as<std::monostate>() != nullptr; }
    bool is_number() const { return as<bool>() || as<int64_t>() || as<double>(); }
    double number() const;
    int64_t integer() const;
    bool truth() const;
};

// An argument of an operator. Tensors of one element on the CPU, which PyTorch makes of numbers, are numbers again.
Value value_of(const c10::IValue& argument);

} // namespace claystone_torch
