// Converts arguments of operators to values.
#include "value.h"
#include "generator.h"

#include <ATen/ops/_local_scalar_dense.h>

namespace claystone_torch {
namespace {

Value value_of_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) {
        return {};
    }
    if (is_ours(tensor)) {
        // PyTorch's kernels report errors for more than 64 dims.
        if (tensor.dim() > 64 || !claystone_dtype(tensor.scalar_type()) || tensor.is_conj() || tensor.is_neg() || tensor.layout() != at::kStrided) {
            throw Refused("claystone does not support tensors such as " + tensor.toString());
        }
        return handle(tensor);
    }
    if (tensor.is_cpu() && tensor.dim() == 0 && claystone_dtype(tensor.scalar_type())) {
        Value value = value_of(c10::IValue(at::_local_scalar_dense(tensor)));
        if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
            value.dtype = claystone_dtype(tensor.scalar_type());
        }
        return value;
    }
    throw Refused("a tensor is on another device");
}

} // namespace

double Value::number() const {
    if (const auto* value = as<double>()) {
        return *value;
    }
    return static_cast<double>(integer());
}

int64_t Value::integer() const {
    if (const auto* value = as<int64_t>()) {
        return *value;
    }
    if (const auto* value = as<bool>()) {
        return *value;
    }
    throw Refused("a number was expected");
}

bool Value::truth() const {
    return is_number() ? number() != 0 : !is_none();
}

Value value_of(const c10::IValue& argument) {
    if (argument.isNone()) {
        return {};
    }
    if (argument.isTensor()) {
        return value_of_tensor(argument.toTensor());
    }
    if (argument.isBool()) {
        return argument.toBool();
    }
    if (argument.isInt()) {
        return argument.toInt();
    }
    if (argument.isDouble()) {
        return argument.toDouble();
    }
    if (argument.isString()) {
        return argument.toStringRef();
    }
    if (argument.isIntList()) {
        return argument.toIntVector();
    }
    if (argument.isDoubleList()) {
        return argument.toDoubleVector();
    }
    if (argument.isBoolList()) {
        const auto given = argument.toBoolList();
        return std::vector<int64_t>(given.begin(), given.end());
    }
    if (argument.isGenerator()) {
        return GeneratorPointer{generator_handle(argument.toGenerator())};
    }
    if (argument.isDevice()) {
        return {};
    }
    if (argument.isSymInt()) {
        return argument.toSymInt().guard_int(__FILE__, __LINE__);
    }
    if (argument.isList()) {
        Values values;
        for (const c10::IValue& entry : argument.toListRef()) {
            values.push_back(value_of(entry));
        }
        return values;
    }
    throw Refused("claystone does not support arguments such as " + argument.tagKind());
}

} // namespace claystone_torch
