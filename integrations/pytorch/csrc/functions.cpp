// The functions and infix operators of programs.
#include "functions.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/accumulate.h>

#include <cmath>
#include <limits>
#include <map>

namespace claystone_torch {
namespace {

const TensorHandle& tensor(const Value& value) {
    const auto* found = value.as<TensorHandle>();
    if (!found) {
        throw Refused("a tensor was expected");
    }
    return *found;
}

ClaystoneDtype dtype(const Value& value) {
    if (const auto* given = value.as<Dtype>()) {
        return given->number;
    }
    if (const auto* given = value.as<TensorHandle>()) {
        return static_cast<ClaystoneDtype>(info(*given).tensor.dtype);
    }
    const auto found = claystone_dtype(static_cast<at::ScalarType>(value.integer()));
    if (!found) {
        throw Refused("claystone has no such dtype");
    }
    return *found;
}

bool is_half(ClaystoneDtype dtype) {
    return dtype == CLAYSTONE_DTYPE_F16 || dtype == CLAYSTONE_DTYPE_BF16;
}

bool is_float(ClaystoneDtype dtype) {
    return dtype == CLAYSTONE_DTYPE_F32 || dtype == CLAYSTONE_DTYPE_F64 || is_half(dtype);
}

const std::map<std::string, Function> FUNCTIONS = {
    {"rank", [](const Arguments& a) -> Value { return int64_t(a[0].is_number() ? 0 : info(tensor(a[0])).tensor.rank); }},
    {"numel", [](const Arguments& a) -> Value { return int64_t(a[0].is_number() ? 1 : info(tensor(a[0])).tensor.numel); }},
    {"sizes", [](const Arguments& a) -> Value {
         const auto sizes = info(tensor(a[0])).sizes;
         return std::vector<int64_t>(sizes.begin(), sizes.end());
     }},
    {"size", [](const Arguments& a) -> Value {
         const auto sizes = info(tensor(a[0])).sizes;
         const int64_t dim = a[1].integer();
         const int64_t at = dim < 0 ? dim + int64_t(sizes.size()) : dim;
         if (at < 0 || at >= int64_t(sizes.size())) {
             throw Refused("a dim is out of range");
         }
         return sizes[at];
     }},
    {"is_none", [](const Arguments& a) -> Value { return a[0].is_none(); }},
    // Reshapes a zero-dimensional tensor to one dim.
    {"row", [](const Arguments& a) -> Value {
         const auto* given = a[0].as<TensorHandle>();
         return given && info(*given).tensor.rank == 0 ? Value(reshaped(*given, {1})) : a[0];
     }},
    // Reshapes a tensor to a matrix whose rows run along the tensor's last dim.
    {"matrix", [](const Arguments& a) -> Value {
         const auto& given = tensor(a[0]);
         const auto sizes = info(given).sizes;
         if (sizes.empty()) {
             throw Refused("a zero-dimensional tensor is not a matrix");
         }
         return sizes.size() == 2 ? a[0] : Value(reshaped(given, {c10::multiply_integers(sizes.begin(), sizes.end() - 1), sizes.back()}));
     }},
    {"is_tensor", [](const Arguments& a) -> Value { return a[0].as<TensorHandle>() != nullptr; }},
    {"is_float", [](const Arguments& a) -> Value { return a[0].is_number() ? a[0].as<double>() != nullptr : is_float(dtype(a[0])); }},
    {"is_bool", [](const Arguments& a) -> Value { return a[0].is_number() ? a[0].as<bool>() != nullptr : dtype(a[0]) == CLAYSTONE_DTYPE_BOOL; }},
    {"dtype", [](const Arguments& a) -> Value { return Dtype{dtype(a[0])}; }},
    // Converts the tensor to a dtype; none leaves it unchanged.
    {"cast", [](const Arguments& a) -> Value { return a[1].is_none() ? a[0] : Value(converted(tensor(a[0]), dtype(a[1]))); }},
    // Converts integers and bools to i64, the dtype of their sums.
    {"whole", [](const Arguments& a) -> Value {
         const auto given = dtype(a[0]);
         return is_float(given) ? a[0] : Value(converted(tensor(a[0]), CLAYSTONE_DTYPE_I64));
     }},
    // Converts f16 and bf16 to f32 for computations of several steps.
    {"wide", [](const Arguments& a) -> Value {
         return is_half(dtype(a[0])) ? Value(converted(tensor(a[0]), CLAYSTONE_DTYPE_F32)) : a[0];
     }},
    {"is_half", [](const Arguments& a) -> Value { return is_half(dtype(a[0])); }},
    // Rounds a number to f16 or bf16.
    {"rounded", [](const Arguments& a) -> Value {
         switch (dtype(a[1])) {
             case CLAYSTONE_DTYPE_F16: return double(c10::Half(float(a[0].number())));
             case CLAYSTONE_DTYPE_BF16: return double(c10::BFloat16(float(a[0].number())));
             default: return a[0];
         }
     }},
    // The greatest finite number of a floating-point dtype.
    {"greatest", [](const Arguments& a) -> Value {
         switch (dtype(a[0])) {
             case CLAYSTONE_DTYPE_F16: return double(std::numeric_limits<c10::Half>::max());
             case CLAYSTONE_DTYPE_BF16: return double(std::numeric_limits<c10::BFloat16>::max());
             case CLAYSTONE_DTYPE_F32: return double(std::numeric_limits<float>::max());
             default: return std::numeric_limits<double>::max();
         }
     }},
    // The first value that is not none.
    {"either", [](const Arguments& a) -> Value { return a[0].is_none() ? a[1] : a[0]; }},
    // A list, or none if it is empty: all dims of a reduction, or a stride that defaults to the window's size.
    {"unless_empty", [](const Arguments& a) -> Value {
         const auto* given = a[0].as<std::vector<int64_t>>();
         return given && given->empty() ? Value() : a[0];
     }},
    // The name of a loss reduction that PyTorch gives as a number.
    {"reduction", [](const Arguments& a) -> Value {
         static const char* const names[] = {"none", "mean", "sum"};
         const int64_t given = a[0].integer();
         if (given < 0 || given > 2) {
             throw Refused("a reduction is out of range");
         }
         return std::string(names[given]);
     }},
    {"length", [](const Arguments& a) -> Value {
         const auto* integers = a[0].as<std::vector<int64_t>>();
         return int64_t(integers ? integers->size() : a[0].as<Values>() ? a[0].as<Values>()->size() : 0);
     }},
    // All dims of a tensor except one.
    {"dims_but", [](const Arguments& a) -> Value {
         const int64_t rank = info(tensor(a[0])).tensor.rank;
         std::vector<int64_t> dims;
         for (int64_t dim = 0; dim < rank; dim++) {
             if (dim != a[1].integer()) {
                 dims.push_back(dim);
             }
         }
         return dims;
     }},
    // The last dims of a tensor; the second argument is their number.
    {"last_dims", [](const Arguments& a) -> Value {
         const int64_t rank = info(tensor(a[0])).tensor.rank;
         std::vector<int64_t> dims;
         for (int64_t dim = rank - a[1].integer(); dim < rank; dim++) {
             dims.push_back(dim);
         }
         return dims;
     }},
    // All dims of a tensor before its last ones, whose number is the second argument.
    {"first_dims", [](const Arguments& a) -> Value {
         const int64_t rank = info(tensor(a[0])).tensor.rank;
         std::vector<int64_t> dims;
         for (int64_t dim = 0; dim < rank - a[1].integer(); dim++) {
             dims.push_back(dim);
         }
         return dims;
     }},
    // The indices of a list that are not none, and the dims of the indexed tensor that they apply to.
    {"given", [](const Arguments& a) -> Value {
         Values values;
         for (const Value& value : std::get<Values>(a[0])) {
             if (!value.is_none()) {
                 values.push_back(value);
             }
         }
         return values;
     }},
    {"given_dims", [](const Arguments& a) -> Value {
         std::vector<int64_t> dims;
         const auto& values = std::get<Values>(a[0]);
         for (size_t i = 0; i < values.size(); i++) {
             if (!values[i].is_none()) {
                 dims.push_back(i);
             }
         }
         return dims;
     }},
    // Distributes values to the positions whose switch is on; the other positions are none.
    {"spread", [](const Arguments& a) -> Value {
         const Values found = a[0].as<Values>() ? *a[0].as<Values>() : Values{a[0]};
         Values spread;
         size_t next = 0;
         for (const int64_t wanted : std::get<std::vector<int64_t>>(a[1])) {
             spread.push_back(wanted && next < found.size() ? found[next++] : Value());
         }
         return spread;
     }},
    {"root", [](const Arguments& a) -> Value { return std::sqrt(a[0].number()); }},
    {"same_sizes", [](const Arguments& a) -> Value { return info(tensor(a[0])).sizes == info(tensor(a[1])).sizes; }},
    // Removes tensors of shape [0], which PyTorch's `cat` ignores whatever the shape of the other tensors.
    {"not_empty", [](const Arguments& a) -> Value {
         Values values;
         for (const Value& value : std::get<Values>(a[0])) {
             if (info(tensor(value)).sizes != c10::SmallVector<int64_t, 5>{0}) {
                 values.push_back(value);
             }
         }
         return values.empty() ? a[0] : Value(values);
     }},
    // Makes indices apply to one dim each: replaces each mask by the indices of its true elements, one tensor per dim.
    {"plain_indices", [](const Arguments& a) -> Value {
         Values values;
         for (const Value& value : std::get<Values>(a[0])) {
             if (value.is_none() || dtype(value) != CLAYSTONE_DTYPE_BOOL) {
                 values.push_back(value);
                 continue;
             }
             const size_t rank = info(tensor(value)).tensor.rank;
             if (rank == 0) {
                 throw Refused("an index is a zero-dimensional mask");
             }
             const auto positions = nonzero(tensor(value));
             for (size_t dim = 0; dim < rank; dim++) {
                 values.push_back(column(positions, dim));
             }
         }
         return values;
     }},
    // Refuses the call with a reason, so that the CPU takes it.
    {"refuse", [](const Arguments& a) -> Value { throw Refused(a[0].as<std::string>() ? *a[0].as<std::string>() : "refused"); }},
};

} // namespace

Function find_function(const std::string& name) {
    const auto found = FUNCTIONS.find(name);
    TORCH_CHECK(found != FUNCTIONS.end(), "operators.toml: claystone has no operation ", name, ", nor is it a function");
    return found->second;
}

Value infix(const Node& node, Scope& scope) {
    Value left_room, right_room;
    const Value& left = evaluate(*node.children[0], scope, left_room);
    const std::string& sign = node.text;
    if (sign == "and" || sign == "or") {
        return left.truth() == (sign == "or") ? left.truth() : evaluate(*node.children[1], scope, right_room).truth();
    }
    const Value& right = evaluate(*node.children[1], scope, right_room);
    if (sign == "==" || sign == "!=") {
        const auto *a = left.as<std::string>(), *b = right.as<std::string>();
        const bool same = a || b ? a && b && *a == *b
            : left.is_none() || right.is_none() ? left.is_none() && right.is_none()
                                                 : left.number() == right.number();
        return same == (sign == "==");
    }
    if (sign == "<" || sign == ">") {
        return sign == "<" ? left.number() < right.number() : left.number() > right.number();
    }
    if (left.as<int64_t>() && right.as<int64_t>() && sign != "/") {
        const int64_t a = left.integer(), b = right.integer();
        return sign == "+" ? a + b : sign == "-" ? a - b : a * b;
    }
    if (left.as<int64_t>() && right.as<int64_t>() && right.integer() != 0 && left.integer() % right.integer() == 0) {
        return left.integer() / right.integer();
    }
    const double a = left.number(), b = right.number();
    return sign == "+" ? a + b : sign == "-" ? a - b : sign == "*" ? a * b : a / b;
}

} // namespace claystone_torch
