// Evaluates programs: operations are calls of claystone, everything else is computed here.
#include "evaluate.h"
#include "functions.h"

#include <c10/util/Exception.h>

#include <cstring>

namespace claystone_torch {
namespace {

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

// A call in the form of the C API, and the owner of everything its pointers refer to.
class Call {
public:
    Call(const Node& node, Scope& scope) : rooms(node.children.size()) {
        c10::SmallVector<const Value*, 8> values;
        for (size_t i = 0; i < rooms.size(); i++) {
            values.push_back(node.children[i] ? &evaluate(*node.children[i], scope, rooms[i]) : &rooms[i]);
        }
        name = node.text.c_str();
        const auto* parameters = node.parameters;
        // The second operand of `add` may be a number. Bools and numbers with a dtype become tensors, because they affect the result's dtype.
        if (node.scalar_parameters && values.size() >= 2 && values[1]->is_number() && !values[1]->as<bool>() && !values[1]->dtype && values[0]->as<TensorHandle>()) {
            name = node.with_scalar.c_str();
            parameters = node.scalar_parameters;
        }
        for (size_t i = 0; i < values.size(); i++) {
            if ((*parameters)[i].is_tensor) {
                add_tensors(*values[i], scope);
            } else {
                add_argument(*values[i]);
            }
        }
        if (scope.generator) {
            arguments.push_back(argument(CLAYSTONE_TAG_GENERATOR, {.generator = scope.generator->pointer}));
        }
        call = {name, tensors.data(), tensors.size(), arguments.data(), arguments.size()};
    }
    Call(const Call&) = delete;

    ClaystoneCall call;
    c10::SmallVector<const ClaystoneTensor*, 8> tensors;

private:
    void add_tensors(const Value& value, Scope& scope) {
        if (const auto* tensor = value.as<TensorHandle>()) {
            tensors.push_back(tensor->get());
        } else if (const auto* list = value.as<Values>()) {
            for (const auto& entry : *list) {
                add_tensors(entry, scope);
            }
        } else if (value.is_number()) {
            made.push_back(tensor_of(value, scope));
            tensors.push_back(made.back().get());
        } else {
            tensors.push_back(nullptr);
        }
    }

    void add_argument(const Value& value) {
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
            throw Refused(std::string("an argument of ") + name + " has a type that it does not take");
        }
    }

    const char* name;
    c10::SmallVector<ClaystoneArgument, 8> arguments;
    c10::SmallVector<TensorHandle, 2> made; // tensors made of numbers
    c10::SmallVector<Value, 8> rooms;       // operands that are not variables
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

// The gradients of an operation for its tensors: a list, with none for gradients that were not requested.
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
    if (const auto* switches = mask.as<std::vector<int64_t>>()) {
        wanted.assign(switches->begin(), switches->end());
    } else {
        for (const Value& value : std::get<Values>(mask)) {
            wanted.push_back(value.truth());
        }
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

Value function(const Node& node, Scope& scope) {
    Arguments arguments;
    for (const auto& child : node.children) {
        arguments.push_back(evaluate(*child, scope));
    }
    arguments.resize(std::max(arguments.size(), size_t(2)));
    return node.function(arguments);
}

Value index(const Node& node, Scope& scope) {
    Value room;
    const Value& list = evaluate(*node.children[0], scope, room);
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
    throw Refused("the indexed value is not a list");
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

void check_call(ClaystoneStatus status) {
    switch (status) {
        case CLAYSTONE_STATUS_OK:
        case CLAYSTONE_STATUS_OUT_OF_MEMORY:
        case CLAYSTONE_STATUS_DEVICE_LOST:
        case CLAYSTONE_STATUS_DRIVER:
        case CLAYSTONE_STATUS_PARTIAL:
        case CLAYSTONE_STATUS_KERNEL: // may come from an earlier operation, which the CPU would not run again
        case CLAYSTONE_STATUS_PANIC:
            return check(status);
        default:
            throw Refused(claystone_last_error());
    }
}

// Makes a zero-dimensional tensor of a number.
TensorHandle tensor_of(const Value& value, const Scope& scope) {
    const ClaystoneDtype floats = scope.floats_are_f64 ? CLAYSTONE_DTYPE_F64 : CLAYSTONE_DTYPE_F32;
    const ClaystoneDtype natural = value.as<double>() ? floats : value.as<bool>() ? CLAYSTONE_DTYPE_BOOL : CLAYSTONE_DTYPE_I64;
    const int64_t dtype = value.dtype.value_or(natural);
    static const int64_t nothing = 0;
    return run_one(
        "full", {argument(CLAYSTONE_TAG_INTS, {.integers = &nothing}, 0), number(value), argument(CLAYSTONE_TAG_DTYPE, {.integer = dtype}),
                 argument(CLAYSTONE_TAG_DEVICE, {.integer = scope.device})});
}

TensorHandle reshaped(const TensorHandle& tensor, const std::vector<int64_t>& sizes) {
    return run_one(
        "reshape", {argument(CLAYSTONE_TAG_TENSOR, {.tensor = tensor.get()}),
                    argument(CLAYSTONE_TAG_INTS, {.integers = sizes.data()}, sizes.size())});
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

const Value& evaluate(const Node& node, Scope& scope, Value& room) {
    switch (node.kind) {
        case Node::Constant: return node.constant;
        case Node::Variable: return scope.values[node.slot];
        case Node::List: return room = list(node, scope);
        case Node::Device: return room = DeviceNumber{scope.device};
        case Node::OutDtype: return scope.out_dtype;
        case Node::Operation: return room = call(node, scope);
        case Node::Gradient: return room = gradient(node, scope);
        case Node::Call: return room = function(node, scope);
        case Node::Index: return room = index(node, scope);
        case Node::Infix: return room = infix(node, scope);
        case Node::Not: return room = !evaluate(*node.children[0], scope).truth();
        case Node::Choice: return evaluate(*node.children[evaluate(*node.children[0], scope).truth() ? 1 : 2], scope, room);
    }
    return room;
}

Value evaluate(const Node& node, Scope& scope) {
    Value room;
    const Value& value = evaluate(node, scope, room);
    return &value == &room ? std::move(room) : value;
}

void evaluate_into(const Node& operation, Scope& scope, const TensorHandle& out) {
    const Call call(operation, scope);
    const ClaystoneTensor* const targets[] = {out.get()};
    check_call(claystone_call_out(&call.call, targets, 1));
}

} // namespace claystone_torch
