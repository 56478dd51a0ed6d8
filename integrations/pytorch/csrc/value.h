// Values of programs.
#pragma once

#include "storage.h"

#include <ATen/core/ivalue.h>

#include <stdexcept>
#include <variant>

namespace claystone_torch {

// Thrown if claystone cannot run a call. The call then goes to the CPU, whose result or error the caller gets.
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

    // Set for numbers that were zero-dimensional CPU tensors: their dtype takes part in type promotion, unlike that of Python's numbers.
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

// Converts an argument of an operator. Zero-dimensional CPU tensors, which PyTorch makes of numbers, become numbers again.
Value value_of(const c10::IValue& argument);

} // namespace claystone_torch
