// Runs programs: an operation is a call of claystone, everything else is done here.
#include "evaluate.h"
#include "functions.h"

#include <c10/util/Exception.h>

#include <cstring>

namespace claystone_torch {
namespace {

// Failures that a CPU would not have are the caller's; a call that claystone refuses goes to the CPU.
void check_call(ClaystoneStatus status) {
    switch (status) {
        case CLAYSTONE_STATUS_OK:
        case CLAYSTONE_STATUS_OUT_OF_MEMORY:
        case CLAYSTONE_STATUS_DEVICE_LOST:
        case CLAYSTONE_STATUS_DRIVER:
        case CLAYSTONE_STATUS_PARTIAL:
            return check(status);
        default:
            throw Refused(claystone_last_error());
    }
}

TensorHandle run_one(const char* name, std::vector<ClaystoneArgument> arguments) {
    ClaystoneTensor* result = nullptr;
    const ClaystoneCall call{name, nullptr, 0, arguments.data(), arguments.size()};
    check_call(claystone_call(&call, &result, 1, nullptr));
    return own(result);
}

ClaystoneArgument argument(ClaystoneTag tag, ClaystoneValue value, size_t length = 0) {
    return {nullptr, tag, length, value};
}

ClaystoneArgument number(const Value& value) {
    if (value.as<double>()) {
        return argument(CLAYSTONE_TAG_FLOAT, {.number = value.number()});
    }
    return argument(value.as<bool>() ? CLAYSTONE_TAG_BOOL : CLAYSTONE_TAG_INT, {.integer = value.integer()});
}

// A call as the C API takes it, with what its pointers point to.
class Call {
public:
    Call(const Node& node, Scope& scope) : name(node.text.c_str()) {
        std::vector<Value> values;
        for (const auto& child : node.children) {
            values.push_back(child ? evaluate(*child, scope) : Value());
        }
        const auto* parameters = node.parameters;
        // The second operand of `add` may be a number.
        if (!node.with_scalar.empty() && values.size() >= 2 && values[1].is_number() && values[0].as<TensorHandle>()) {
            name = node.with_scalar.c_str();
            parameters = claystone_torch::parameters(node.with_scalar);
        }
        for (size_t i = 0; i < values.size(); i++) {
            if ((*parameters)[i].is_tensor) {
                add_tensors(std::move(values[i]), scope);
            } else {
                add_argument(std::move(values[i]));
            }
        }
        for (const Value& value : scope.values) {
            if (const auto* generator = value.as<GeneratorPointer>()) {
                arguments.push_back(argument(CLAYSTONE_TAG_GENERATOR, {.generator = generator->pointer}));
            }
        }
        call = {name, tensors.data(), tensors.size(), arguments.data(), arguments.size()};
    }
    Call(const Call&) = delete;

    ClaystoneCall call;
    std::vector<const ClaystoneTensor*> tensors;

private:
    void add_tensors(Value value, Scope& scope) {
        if (const auto* list = value.as<Values>()) {
            for (const auto& entry : *list) {
                add_tensors(entry, scope);
            }
            return;
        }
        if (value.is_number()) {
            value = tensor_of(value, scope);
        }
        if (const auto* tensor = value.as<TensorHandle>()) {
            held.push_back(*tensor);
            tensors.push_back(tensor->get());
        } else {
            tensors.push_back(nullptr);
        }
    }

    void add_argument(Value given) {
        kept.push_back(std::make_unique<Value>(std::move(given)));
        const Value& value = *kept.back();
        if (value.is_none()) {
            arguments.push_back(argument(CLAYSTONE_TAG_NONE, {}));
        } else if (value.is_number()) {
            arguments.push_back(number(value));
        } else if (const auto* text = value.as<std::string>()) {
            arguments.push_back(argument(CLAYSTONE_TAG_TEXT, {.text = text->c_str()}));
        } else if (const auto* dtype = value.as<Dtype>()) {
            arguments.push_back(argument(CLAYSTONE_TAG_DTYPE, {.integer = dtype->number}));
        } else if (const auto* device = value.as<DeviceNumber>()) {
            arguments.push_back(argument(CLAYSTONE_TAG_DEVICE, {.integer = device->number}));
        } else if (const auto* integers = value.as<std::vector<int64_t>>()) {
            arguments.push_back(argument(CLAYSTONE_TAG_INTS, {.integers = integers->data()}, integers->size()));
        } else if (const auto* numbers = value.as<std::vector<double>>()) {
            arguments.push_back(argument(CLAYSTONE_TAG_FLOATS, {.numbers = numbers->data()}, numbers->size()));
        } else {
            throw Refused(std::string("an argument of ") + name + " is of a kind that it does not take");
        }
    }

    const char* name;
    std::vector<ClaystoneArgument> arguments;
    std::vector<TensorHandle> held;
    std::vector<std::unique_ptr<Value>> kept;
};

Value call(const Node& node, Scope& scope) {
    const Call call(node, scope);
    ClaystoneTensor* results[16];
    size_t count = 0;
    check_call(claystone_call(&call.call, results, std::size(results), &count));
    if (count == 1) {
        return own(results[0]);
    }
    Values values;
    for (size_t i = 0; i < std::min(count, std::size(results)); i++) {
        values.push_back(own(results[i]));
    }
    return values;
}

// The gradients of an operation for its tensors: a list, with none where none was wanted.
Value gradient(const Node& node, Scope& scope) {
    TORCH_CHECK(
        node.children.size() == 3 && node.children[0]->kind == Node::Operation, "operators.toml: gradient(operation, [gradients], [wanted])");
    const Call call(*node.children[0], scope);
    const Value gradients = evaluate(*node.children[1], scope), mask = evaluate(*node.children[2], scope);
    std::vector<const ClaystoneTensor*> outputs;
    for (const Value& value : std::get<Values>(gradients)) {
        const auto* tensor = value.as<TensorHandle>();
        outputs.push_back(tensor ? tensor->get() : nullptr);
    }
    std::vector<uint8_t> wanted;
    for (const Value& value : std::get<Values>(mask)) {
        wanted.push_back(value.truth());
    }
    wanted.resize(call.tensors.size());
    std::vector<ClaystoneTensor*> found(wanted.size());
    check_call(claystone_call_backward(&call.call, outputs.data(), outputs.size(), wanted.data(), found.data(), found.size()));
    Values values;
    for (ClaystoneTensor* tensor : found) {
        values.push_back(tensor ? Value(own(tensor)) : Value());
    }
    return values;
}

Value index(const Node& node, Scope& scope) {
    const Value list = evaluate(*node.children[0], scope);
    const int64_t at = evaluate(*node.children[1], scope).integer();
    const auto within = [&](size_t size) {
        const int64_t from_start = at < 0 ? at + int64_t(size) : at;
        if (from_start < 0 || from_start >= int64_t(size)) {
            throw Refused("an index is out of range");
        }
        return size_t(from_start);
    };
    if (const auto* values = list.as<Values>()) {
        return (*values)[within(values->size())];
    }
    if (const auto* integers = list.as<std::vector<int64_t>>()) {
        return (*integers)[within(integers->size())];
    }
    throw Refused("what is indexed is no list");
}

Value list(const Node& node, Scope& scope) {
    Values values;
    bool whole = !node.children.empty();
    for (const auto& child : node.children) {
        values.push_back(evaluate(*child, scope));
        whole &= values.back().as<int64_t>() != nullptr;
    }
    if (!whole) {
        return values;
    }
    std::vector<int64_t> integers;
    for (const Value& value : values) {
        integers.push_back(value.integer());
    }
    return integers;
}

} // namespace

// A tensor without dimensions of a number.
TensorHandle tensor_of(const Value& value, const Scope& scope) {
    const ClaystoneDtype floats = scope.wide ? CLAYSTONE_DTYPE_F64 : CLAYSTONE_DTYPE_F32;
    const int64_t dtype = value.as<double>() ? floats : value.as<bool>() ? CLAYSTONE_DTYPE_BOOL : CLAYSTONE_DTYPE_I64;
    static const int64_t nothing = 0;
    return run_one(
        "full", {argument(CLAYSTONE_TAG_INTS, {.integers = &nothing}, 0), number(value), argument(CLAYSTONE_TAG_DTYPE, {.integer = dtype}),
                 argument(CLAYSTONE_TAG_DEVICE, {.integer = scope.device})});
}

TensorHandle as_row(const TensorHandle& number) {
    const int64_t one = 1;
    return run_one("reshape", {argument(CLAYSTONE_TAG_TENSOR, {.tensor = number.get()}), argument(CLAYSTONE_TAG_INTS, {.integers = &one}, 1)});
}

TensorHandle contiguous(const TensorHandle& tensor) {
    return run_one("contiguous", {argument(CLAYSTONE_TAG_TENSOR, {.tensor = tensor.get()})});
}

TensorHandle cloned(const TensorHandle& tensor) {
    return run_one("clone", {argument(CLAYSTONE_TAG_TENSOR, {.tensor = tensor.get()})});
}

TensorHandle nonzero(const TensorHandle& mask) {
    return run_one("nonzero", {argument(CLAYSTONE_TAG_TENSOR, {.tensor = mask.get()})});
}

TensorHandle column(const TensorHandle& matrix, size_t index) {
    return run_one(
        "select", {argument(CLAYSTONE_TAG_TENSOR, {.tensor = matrix.get()}), argument(CLAYSTONE_TAG_INT, {.integer = 1}),
                   argument(CLAYSTONE_TAG_INT, {.integer = int64_t(index)})});
}

TensorHandle converted(const TensorHandle& tensor, ClaystoneDtype dtype) {
    if (info(tensor).tensor.dtype == dtype) {
        return tensor;
    }
    return run_one(
        "to_dtype", {argument(CLAYSTONE_TAG_TENSOR, {.tensor = tensor.get()}), argument(CLAYSTONE_TAG_DTYPE, {.integer = dtype})});
}

Value evaluate(const Node& node, Scope& scope) {
    switch (node.kind) {
        case Node::None: return {};
        case Node::Bool: return node.integer != 0;
        case Node::Int: return node.integer;
        case Node::Float: return node.number;
        case Node::Text: return node.text;
        case Node::List: return list(node, scope);
        case Node::Variable: return scope.values[node.slot];
        case Node::Operation: return call(node, scope);
        case Node::Gradient: return gradient(node, scope);
        case Node::Function: return function(node, scope);
        case Node::Index: return index(node, scope);
        case Node::Infix: return infix(node, scope);
        case Node::Not: return !evaluate(*node.children[0], scope).truth();
        case Node::Choice: return evaluate(*node.children[evaluate(*node.children[0], scope).truth() ? 1 : 2], scope);
    }
    return {};
}

void evaluate_into(const Node& operation, Scope& scope, const TensorHandle& out) {
    const Call call(operation, scope);
    const ClaystoneTensor* const targets[] = {out.get()};
    check_call(claystone_call_out(&call.call, targets, 1));
}

} // namespace claystone_torch
