// The kernel of all operators: it runs the program of the operator's row with claystone, or lets the CPU take the call.
#include "dispatch.h"
#include "annotate.h"
#include "copy.h"
#include "evaluate.h"
#include "fallback.h"
#include "foreach.h"
#include "functions.h"

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>

namespace claystone_torch {
namespace {

// A program of a row and its condition.
struct Alternative {
    std::optional<Program> condition;
    Program program;
    bool elementwise, apart;
};

struct Row {
    bool writes_itself; // its operation works in place, so the row is for the operator's in-place form only
    std::vector<Alternative> alternatives;
};

// An operator in the form that its kernel needs.
struct Operator {
    const Row* row = nullptr;
    std::vector<size_t> arguments; // positions on the stack of the row's arguments
    std::vector<size_t> outputs;   // positions on the stack of the tensors to write
    std::string name; // the name in PyTorch's profiler
    bool in_place = false;
    bool each = false; // true for `_foreach_` operators
};

// The key of a row: an operator, its in-place form and its `out` form have the same key.
std::string key_of(const c10::FunctionSchema& schema, std::vector<size_t>* inputs, std::vector<size_t>* outputs, bool* in_place) {
    std::string key = schema.name();
    const auto written = [](const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); };
    const auto& arguments = schema.arguments();
    *in_place = key.ends_with('_') && !arguments.empty() && written(arguments[0]);
    if (*in_place) {
        key.pop_back();
    }
    for (size_t i = 0; i < arguments.size(); i++) {
        if (written(arguments[i])) {
            outputs->push_back(i);
        }
        if (!arguments[i].is_out()) {
            inputs->push_back(i);
            key += " " + arguments[i].name() + ":" + arguments[i].type()->str();
        }
    }
    return key;
}

// Whether a program's operation writes into its first operand, which its name shows.
bool writes_itself(const Program& program) {
    const Node& first = *program.results[0];
    return first.kind == Node::Operation && first.text.ends_with('_');
}

std::unordered_map<std::string, Row> rows;

Operator operator_of(const c10::OperatorHandle& handle) {
    Operator made;
    const std::string key = key_of(handle.schema(), &made.arguments, &made.outputs, &made.in_place);
    made.name = handle.schema().name();
    made.each = handle.schema().name().starts_with("aten::_foreach_");
    const auto row = rows.find(key);
    made.row = row == rows.end() || (row->second.writes_itself && !made.in_place) ? nullptr : &row->second;
    return made;
}

// Makes the scope of a call and finds the device of its tensors.
Scope scope_of(const Operator& op, size_t size, const torch::jit::Stack& stack, size_t base) {
    Scope scope;
    std::optional<c10::Device> device, other;
    const auto look = [&](const at::Tensor& tensor) {
        if (is_ours(tensor)) {
            other = device && *device != tensor.device() ? device : other;
            device = tensor.device();
            scope.floats_are_f64 |= tensor.scalar_type() == at::kDouble;
        } else if (tensor.defined() && tensor.dim() > 0) { // a zero-dimensional tensor counts as a number on any device
            other = tensor.device();
        }
    };
    for (size_t i = base; i < base + size; i++) {
        if (stack[i].isTensor()) {
            look(stack[i].toTensor());
        } else if (stack[i].isTensorList()) {
            for (const c10::IValue& tensor : stack[i].toListRef()) {
                look(tensor.toTensor());
            }
        }
    }
    TORCH_CHECK(!device || !other, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", *other, "!");
    scope.device = claystone_device(device ? device->index() : current_device());
    return scope;
}

// The shape that the call's tensors broadcast to; none if they do not broadcast.
std::optional<c10::SmallVector<int64_t, 5>> common_shape(const Scope& scope) {
    c10::SmallVector<int64_t, 5> shape;
    for (const Value& value : scope.values) {
        const auto* tensor = value.as<TensorHandle>();
        if (!tensor) {
            continue;
        }
        const auto sizes = info(*tensor).sizes;
        shape.insert(shape.begin(), sizes.size() > shape.size() ? sizes.size() - shape.size() : 0, 1);
        for (size_t i = 0; i < sizes.size(); i++) {
            int64_t& size = shape[shape.size() - sizes.size() + i];
            if (size == 1) {
                size = sizes[i];
            } else if (sizes[i] != 1 && sizes[i] != size) {
                return std::nullopt;
            }
        }
    }
    return shape;
}

// The order of dims in memory of an elementwise result: as in PyTorch, that of the first operand with the result's shape.
// Used only if that operand is not row-major.
struct Order {
    std::vector<int64_t> shape, dims, inverse;

    at::Tensor of(const at::Tensor& operand) const { return operand.expand(shape).permute(dims); }
    at::Tensor back(const at::Tensor& result) const { return result.permute(inverse); }
};

std::optional<Order> order_of(const Operator& op, const torch::jit::Stack& stack, size_t base) {
    c10::SmallVector<const at::Tensor*, 4> operands;
    bool plain = true;
    for (const size_t position : op.arguments) {
        const auto& argument = stack[base + position];
        if (argument.isTensor() && is_ours(argument.toTensor())) {
            operands.push_back(&argument.toTensor());
            plain &= argument.toTensor().is_contiguous();
        }
    }
    if (plain) {
        return std::nullopt;
    }
    Order order;
    for (const auto* operand : operands) {
        order.shape = at::infer_size(order.shape, operand->sizes());
    }
    const auto leader = std::find_if(operands.begin(), operands.end(), [&](const auto* operand) { return operand->sizes() == order.shape; });
    if (leader == operands.end() || (*leader)->is_contiguous() || !(*leader)->is_non_overlapping_and_dense()) {
        return std::nullopt;
    }
    const auto strides = (*leader)->strides();
    order.dims.resize(strides.size());
    order.inverse.resize(strides.size());
    std::iota(order.dims.begin(), order.dims.end(), 0);
    std::stable_sort(order.dims.begin(), order.dims.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
    for (size_t i = 0; i < order.dims.size(); i++) {
        order.inverse[order.dims[i]] = i;
    }
    return order;
}

bool shares_with_arguments(const TensorHandle& result, const Scope& scope, size_t arguments) {
    const auto shares = [&](const Value& value) { return value.as<TensorHandle>() && share_storage(*value.as<TensorHandle>(), result); };
    for (size_t i = 0; i < arguments; i++) {
        const auto* list = scope.values[i].as<Values>();
        if (shares(scope.values[i]) || (list && std::any_of(list->begin(), list->end(), shares))) {
            return true;
        }
    }
    return false;
}

void write(const at::Tensor& target, const TensorHandle& result, bool in_place, bool elementwise, const Scope& scope, size_t arguments) {
    const auto made = info(result);
    if (!in_place && !elementwise && torch_dtype(made.tensor.dtype) != target.scalar_type()) {
        throw Refused("the result does not have the dtype of the output tensor");
    }
    if (!at::canCast(torch_dtype(made.tensor.dtype), target.scalar_type())) {
        throw Refused("the result cannot be cast to the dtype of the output tensor");
    }
    if (target.sizes() != made.sizes) {
        if (in_place || target.numel() != 0) {
            throw Refused("the result does not have the shape of the output tensor");
        }
        target.resize_(made.sizes);
    }
    if (!shares_with_arguments(result, scope, arguments) && adopt(target, result)) {
        return;
    }
    check(claystone_tensor_copy(handle(target).get(), result.get()));
}

c10::IValue returned(const Value& value, const c10::Argument& wanted, const Scope& scope, size_t arguments) {
    const auto kind = wanted.type()->kind();
    if (kind == c10::TypeKind::TensorType) {
        if (value.is_none()) {
            return at::Tensor();
        }
        auto result = value.is_number() ? tensor_of(value, scope) : std::get<TensorHandle>(value);
        auto known = info(result);
        // PyTorch has no negative strides, and results of operators that are not views have their own storage.
        const bool turned = std::any_of(known.strides.begin(), known.strides.end(), [](int64_t stride) { return stride < 0; });
        if (turned || shares_with_arguments(result, scope, arguments)) {
            result = turned ? contiguous(result) : cloned(result);
            known = info(result);
        }
        return wrap(result, known);
    }
    if (const auto* tensor = value.as<TensorHandle>()) { // such as `equal`, which returns a bool
        const auto item = to_host(wrap(*tensor)).item();
        return kind == c10::TypeKind::BoolType ? c10::IValue(item.toBool()) : c10::IValue(item);
    }
    return kind == c10::TypeKind::BoolType ? c10::IValue(value.truth()) : c10::IValue(value.integer());
}

// Returns the first program of a row whose condition holds.
const Alternative* choose(const Row& row, Scope& scope) {
    for (const Alternative& alternative : row.alternatives) {
        if (!alternative.condition || evaluate(*alternative.condition->results[0], scope).truth()) {
            return &alternative;
        }
    }
    throw Refused("its row has no program for these arguments");
}

// Runs the row's operation on lists of tensors. If these cannot share launches, PyTorch's kernel calls the operators one by one.
void run_each(const Operator& op, const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
    const auto& schema = handle.schema();
    const size_t base = stack->size() - schema.arguments().size();
    std::vector<c10::IValue> arguments;
    for (const size_t position : op.arguments) {
        arguments.push_back((*stack)[base + position]);
    }
    try {
        Scope scope = scope_of_lists(arguments);
        const Alternative* const chosen = choose(*op.row, scope);
        const auto out = op.outputs.empty() ? std::vector<at::Tensor>() : (*stack)[base + op.outputs[0]].toTensorVector();
        if (const auto written = foreach(*chosen->program.results[0], scope, arguments, out)) {
            stack->resize(base);
            if (!schema.returns().empty()) {
                stack->emplace_back(*written);
            }
            return;
        }
    } catch (const Refused&) {
    }
    handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
}

// Raises if elements of an output tensor share memory, or if an output of an `apart` row shares memory with an argument.
void check_overlap(const Operator& op, const torch::jit::Stack& stack, size_t base, const at::Tensor& output) {
    at::assert_no_internal_overlap(output);
    for (size_t i = 0; op.row->alternatives[0].apart && i < op.arguments.size(); i++) {
        const auto& argument = stack[base + op.arguments[i]];
        const bool one = argument.isTensor(), list = argument.isTensorList();
        for (const auto& tensor : one ? std::vector{argument.toTensor()} : list ? argument.toTensorVector() : std::vector<at::Tensor>()) {
            at::assert_no_overlap(output, tensor);
        }
    }
}

// Runs the row's program. If it throws Refused, nothing was written and the stack is unchanged.
void run(const Operator& op, const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
    const size_t size = schema.arguments().size(), base = stack->size() - size;
    Scope scope = scope_of(op, size, *stack, base);
    const c10::DeviceGuard guard(c10::Device(c10::DeviceType::PrivateUse1, scope.device == CLAYSTONE_CPU ? 0 : scope.device));
    const bool is_elementwise = op.row->alternatives[0].elementwise;
    const auto order = is_elementwise && op.outputs.empty() ? order_of(op, *stack, base) : std::nullopt;
    for (const size_t position : op.arguments) {
        const auto& argument = (*stack)[base + position];
        const bool ordered = order && argument.isTensor() && is_ours(argument.toTensor());
        scope.values.push_back(value_of(ordered ? c10::IValue(order->of(argument.toTensor())) : argument));
        if (const auto* generator = scope.values.back().as<GeneratorPointer>()) {
            scope.generator = *generator;
        }
    }
    const size_t arguments = scope.values.size();
    c10::SmallVector<at::Tensor, 2> outputs;
    for (const size_t position : op.outputs) {
        const auto& output = (*stack)[base + position];
        if (!output.isTensor() || !is_ours(output.toTensor()) || !claystone_dtype(output.toTensor().scalar_type())) {
            throw Refused("claystone does not support the device or dtype of the output tensor");
        }
        outputs.push_back(output.toTensor());
        if (op.in_place && at::has_internal_overlap(outputs.back()) == at::MemOverlap::Yes) {
            throw Refused("elements of the output tensor share memory");
        }
        if (!op.in_place) {
            check_overlap(op, *stack, base, outputs.back());
            const auto overlap = at::get_overlap_status(outputs[0], outputs.back());
            TORCH_CHECK_VALUE(outputs.size() == 1 || (overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial),
                "the out= tensors of ", op.name, " must not overlap");
        }
        scope.floats_are_f64 |= outputs.back().scalar_type() == at::kDouble;
    }
    if (!outputs.empty()) {
        scope.out_dtype = Dtype{*claystone_dtype(outputs[0].scalar_type())};
    }
    const Alternative* const chosen = choose(*op.row, scope);
    const Program& program = chosen->program;
    scope.values.resize(std::max(program.slots, arguments));
    for (const auto& [slot, value] : program.assignments) {
        scope.values[slot] = evaluate(*value, scope);
    }
    const Node& first = *program.results[0];
    if (is_elementwise && outputs.size() == 1 && first.kind == Node::Operation && !op.row->writes_itself &&
        common_shape(scope) == outputs[0].sizes()) {
        evaluate_into(first, scope, handle(outputs[0]));
    } else {
        c10::SmallVector<Value, 3> results;
        for (const auto& result : program.results) {
            auto value = evaluate(*result, scope);
            if (const auto* several = program.results.size() == 1 ? value.as<Values>() : nullptr) {
                results.append(several->begin(), several->end());
            } else {
                results.push_back(std::move(value));
            }
        }
        const size_t wanted = outputs.empty() ? schema.returns().size() : op.row->writes_itself ? 0 : outputs.size();
        TORCH_CHECK(results.size() >= wanted, "operators.toml: the program of ", schema.name(), " has too few results");
        if (outputs.empty()) {
            c10::SmallVector<c10::IValue, 3> returns;
            for (size_t i = 0; i < wanted; i++) {
                returns.push_back(returned(results[i], schema.returns()[i], scope, arguments));
                if (order) {
                    returns.back() = order->back(returns.back().toTensor());
                }
            }
            stack->resize(base);
            std::move(returns.begin(), returns.end(), std::back_inserter(*stack));
            return;
        }
        for (size_t i = 0; i < wanted; i++) {
            if (results[i].is_none()) {
                continue;
            }
            const auto result = results[i].is_number() ? tensor_of(results[i], scope) : std::get<TensorHandle>(results[i]);
            write(outputs[i], result, op.in_place, is_elementwise, scope, arguments);
        }
    }
    stack->resize(base);
    for (size_t i = 0; i < std::min(outputs.size(), schema.returns().size()); i++) {
        stack->emplace_back(outputs[i]);
    }
}

// The kernel of an operator with a row.
struct Kernel final : c10::OperatorKernel {
    explicit Kernel(Operator op) : op(std::move(op)) {}

    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
        with_annotation(op.name, [&] { compute(handle, stack); });
    }

private:
    void compute(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
        if (op.each) {
            return run_each(op, handle, stack);
        }
        std::string reason;
        try {
            return run(op, handle.schema(), stack);
        } catch (const Refused& refused) {
            reason = refused.what();
        } catch (const std::bad_variant_access&) {
            reason = "an argument has a type that its row does not expect";
        }
        fall_back(handle, stack, reason);
    }

    const Operator op;
};

void without_row(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
    with_annotation(handle.schema().name(), [&] { fall_back(handle, stack, "it has no row in operators.toml"); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&without_row>());
}

} // namespace

bool add_row(const std::string& name, const std::vector<RowText>& texts) {
    const size_t dot = name.find('.');
    const c10::OperatorName wanted("aten::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1));
    const auto handle = c10::Dispatcher::singleton().findSchema(wanted);
    if (!handle) {
        return false;
    }
    std::vector<size_t> inputs, outputs;
    bool in_place;
    const std::string key = key_of(handle->schema(), &inputs, &outputs, &in_place);
    Row row{};
    std::vector<std::string> arguments;
    for (const size_t position : inputs) {
        arguments.push_back(handle->schema().arguments()[position].name());
    }
    if (name == "_cdist_backward") {
        arguments[0] = "grad_output"; // named `grad` before PyTorch 2.15
    }
    for (const RowText& text : texts) {
        std::optional<Program> condition;
        if (!text.condition.empty()) {
            condition = parse(text.condition, arguments);
        }
        row.alternatives.push_back({std::move(condition), parse(text.program, arguments), text.elementwise, text.apart});
    }
    row.writes_itself = writes_itself(row.alternatives[0].program);
    TORCH_CHECK(rows.emplace(key, std::move(row)).second, "operators.toml: ", name, " has two rows");
    return true;
}

std::vector<std::string> register_rows() {
    static auto* const library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    std::vector<std::string> names;
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto handle = c10::Dispatcher::singleton().findSchema(name);
        if (!handle) {
            continue;
        }
        auto op = operator_of(*handle);
        if (!op.row) {
            continue;
        }
        names.push_back(name_of(*handle));
        // Composite operators get their gradient from the operators they call, and a kernel here would lose it, unless they have an autograd kernel.
        const auto has = [&](c10::DispatchKey key) { return handle->hasKernelForDispatchKey(key); };
        if ((!has(c10::DispatchKey::CompositeImplicitAutograd) || has(c10::DispatchKey::Autograd)) && !has(c10::DispatchKey::PrivateUse1)) {
            library->impl(names.back().c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(std::move(op))));
        }
    }
    return names;
}

} // namespace claystone_torch
