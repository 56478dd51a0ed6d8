// Runs the graphs that torch.compile captured: a list of instructions over numbered slots. An instruction calls an operator, computes a
// formula in one launch, or calls Python. claystone_torch/compile builds the list and says after which instruction a slot is emptied.
#include "compiled.h"
#include "annotate.h"
#include "capture.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

namespace claystone_torch {
namespace {

namespace py = pybind11;
using Slots = Values;

// An argument: a constant, the value of a slot, or a list of such entries.
struct Argument {
    enum Kind { Constant, Slot, List } kind = Constant;
    c10::IValue constant;
    size_t slot = 0;
    std::vector<Argument> entries;
    c10::TypePtr element; // of a list
    bool is_tensor = false; // numbers become tensors
};

// A tensor of a number, as PyTorch makes it for operators that take tensors only.
c10::IValue wrapped(const c10::IValue& value) {
    if (!value.isScalar()) {
        return value;
    }
    auto tensor = c10::scalar_to_tensor(value.toScalar());
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
}

// Converts an argument's description: ("constant", value), ("slot", index) or ("list", descriptions).
Argument argument_of(const py::tuple& described, const c10::TypePtr& type) {
    const auto kind = described[0].cast<std::string>();
    Argument made;
    made.is_tensor = type->kind() == c10::TypeKind::TensorType;
    if (kind == "slot") {
        made.kind = Argument::Slot;
        made.slot = described[1].cast<size_t>();
    } else if (kind == "list") {
        made.kind = Argument::List;
        auto list = type;
        if (const auto optional = list->cast<c10::OptionalType>()) {
            list = optional->getElementType();
        }
        made.element = list->expectRef<c10::ListType>().getElementType();
        if (made.element->kind() == c10::TypeKind::SymIntType) {
            made.element = c10::IntType::get();
        }
        for (const auto& entry : described[1]) {
            made.entries.push_back(argument_of(entry.cast<py::tuple>(), made.element));
        }
    } else if (made.is_tensor && !described[1].is_none() && !THPVariable_Check(py::object(described[1]).ptr())) {
        made.constant = wrapped(torch::jit::toIValue(described[1], c10::NumberType::get()));
    } else {
        made.constant = torch::jit::toIValue(described[1], type);
    }
    return made;
}

c10::IValue value_of(const Argument& argument, const Slots& slots) {
    switch (argument.kind) {
        case Argument::Constant: return argument.constant;
        case Argument::Slot: return argument.is_tensor ? wrapped(slots[argument.slot]) : slots[argument.slot];
        case Argument::List: break;
    }
    if (argument.element->kind() == c10::TypeKind::IntType) {
        c10::List<int64_t> list;
        for (const auto& entry : argument.entries) {
            list.push_back(value_of(entry, slots).toInt());
        }
        return list;
    }
    if (argument.element->kind() == c10::TypeKind::TensorType) {
        c10::List<at::Tensor> list;
        for (const auto& entry : argument.entries) {
            list.push_back(value_of(entry, slots).toTensor());
        }
        return list;
    }
    c10::impl::GenericList list(argument.element);
    for (const auto& entry : argument.entries) {
        list.push_back(value_of(entry, slots));
    }
    return list;
}

// A number that may change from call to call: a constant or a slot.
struct Number {
    int64_t constant = 0;
    std::optional<size_t> slot;

    int64_t in(const Slots& slots) const { return slot ? slots[*slot].toInt() : constant; }
};

using Numbers = std::vector<Number>;

// Converts numbers, in which ("slot", index) stands for the value of a slot.
Numbers numbers_of(const py::sequence& described) {
    Numbers made;
    for (const auto& one : described) {
        made.push_back(py::isinstance<py::tuple>(one) ? Number{0, one.cast<py::tuple>()[1].cast<size_t>()} : Number{one.cast<int64_t>(), {}});
    }
    return made;
}

c10::SmallVector<int64_t, 5> values_of(const Numbers& numbers, const Slots& slots) {
    c10::SmallVector<int64_t, 5> values;
    for (const Number& number : numbers) {
        values.push_back(number.in(slots));
    }
    return values;
}

struct Instruction {
    std::vector<size_t> results, last_uses;
    virtual ~Instruction() = default;
    virtual void run(Slots& slots) const = 0;
};

// The tensor in the given strides, which the rest of the graph was compiled for. A tensor that an operator left undefined, because no
// operator reads its elements, becomes a zero: autograd saves defined tensors only.
at::Tensor with_strides(const at::Tensor& tensor, c10::IntArrayRef strides) {
    if (!tensor.defined()) {
        return at::zeros({}, at::kLong);
    }
    bool alike = strides.size() == size_t(tensor.dim());
    for (size_t i = 0; alike && i < strides.size(); i++) {
        alike = tensor.size(i) == 1 || tensor.stride(i) == strides[i];
    }
    if (alike || strides.size() != size_t(tensor.dim()) || tensor.numel() == 0) {
        return tensor;
    }
    return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

struct OperatorCall final : Instruction {
    c10::OperatorHandle op;
    std::vector<Argument> arguments;
    std::vector<std::optional<Numbers>> strides; // of the results; none for views and for results that are no tensors

    bool is_random;

    explicit OperatorCall(c10::OperatorHandle op) : op(std::move(op)), is_random(this->op.hasTag(at::Tag::nondeterministic_seeded)) {}

    void run(Slots& slots) const override {
        torch::jit::Stack stack;
        stack.reserve(arguments.size());
        for (const Argument& argument : arguments) {
            stack.push_back(value_of(argument, slots));
        }
        op.callBoxed(stack);
        TORCH_CHECK(
            !is_random || !is_capturing() || stack.empty() || !stack[0].isTensor() || is_ours(stack[0].toTensor()),
            op.schema().name(), " on the CPU: not while a graph is captured, because each replay would use the same random numbers");
        if (op.schema().returns().size() == 1 && stack[0].isTensorList()) {
            const auto list = stack[0].toTensorVector();
            stack.assign(list.begin(), list.end());
        }
        TORCH_INTERNAL_ASSERT(stack.size() >= results.size(), op.schema().name(), " returns too few values");
        for (size_t i = 0; i < results.size(); i++) {
            const bool expected = i < strides.size() && strides[i] && stack[i].isTensor();
            slots[results[i]] = expected ? with_strides(stack[i].toTensor(), values_of(*strides[i], slots)) : std::move(stack[i]);
        }
    }
};

// One result of a formula: a new tensor, or an existing one that is overwritten.
struct Result {
    Numbers sizes, strides;
    at::ScalarType dtype;
    std::optional<size_t> target;
};

struct Formula final : Instruction {
    struct Release {
        void operator()(ClaystoneFormula* formula) const { claystone_formula_release(formula); }
    };
    std::unique_ptr<ClaystoneFormula, Release> formula;
    std::vector<size_t> inputs, scalars;
    std::vector<Result> outputs;
    std::string name;
    c10::DeviceIndex device;

    at::Tensor output(const Result& result, Slots& slots) const {
        if (result.target) {
            return slots[*result.target].toTensor();
        }
        const auto sizes = values_of(result.sizes, slots), strides = values_of(result.strides, slots);
        return at::detail::empty_strided_generic(sizes, strides, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype);
    }

    static double number(const c10::IValue& value) {
        return value.isTensor() ? value.toTensor().item().toDouble() : value.toScalar().toDouble();
    }

    void run(Slots& slots) const override {
        c10::SmallVector<at::Tensor, 4> made;
        c10::SmallVector<TensorHandle, 16> held;
        c10::SmallVector<const ClaystoneTensor*, 16> given;
        c10::SmallVector<double, 4> numbers;
        for (const size_t slot : scalars) {
            numbers.push_back(number(slots[slot]));
        }
        const auto add = [&](const at::Tensor& tensor) {
            held.push_back(handle(tensor));
            given.push_back(held.back().get());
        };
        for (const size_t slot : inputs) {
            add(slots[slot].toTensor());
        }
        const c10::DeviceGuard guard(c10::Device(c10::DeviceType::PrivateUse1, inputs.empty() ? device : slots[inputs[0]].toTensor().device().index()));
        c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 1> copies; // from, to
        for (const Result& result : outputs) {
            made.push_back(output(result, slots));
            const auto shares = [&](const at::Tensor& other) { return other.is_alias_of(made.back()); };
            if (std::any_of(made.begin(), made.end() - 1, shares)) {
                // A launch cannot write two views of one storage.
                copies.emplace_back(at::empty_like(made.back(), at::MemoryFormat::Contiguous), made.back());
                add(copies.back().first);
            } else {
                add(made.back());
            }
        }
        if (made[0].numel() > 0) {
            with_annotation(name, [&] {
                check(claystone_formula_run(
                    formula.get(), {given.data(), inputs.size()}, numbers.data(), numbers.size(), {given.data() + inputs.size(), outputs.size()}));
            });
        }
        for (const auto& [from, to] : copies) {
            to.copy_(from);
        }
        for (size_t i = 0; i < results.size(); i++) {
            slots[results[i]] = std::move(made[i]);
        }
    }
};

// Calls a Python function, for numbers of dynamic shapes and for operators that are no operators of PyTorch's dispatcher.
struct PythonCall final : Instruction {
    py::object function;
    std::vector<size_t> arguments;

    ~PythonCall() override {
        const py::gil_scoped_acquire gil;
        function = {};
    }

    static c10::IValue value(const py::handle& object) {
        if (THPVariable_Check(object.ptr())) {
            return THPVariable_Unpack(object.ptr());
        }
        if (object.is_none()) {
            return {};
        }
        if (py::isinstance<py::bool_>(object)) {
            return object.cast<bool>();
        }
        if (py::isinstance<py::int_>(object)) {
            return object.cast<int64_t>();
        }
        return object.cast<double>();
    }

    void run(Slots& slots) const override {
        TORCH_CHECK(arguments.empty() || !is_capturing(), "a Python function: not while a graph is captured");
        const py::gil_scoped_acquire gil;
        py::tuple given(arguments.size());
        for (size_t i = 0; i < arguments.size(); i++) {
            given[i] = torch::jit::toPyObject(slots[arguments[i]]);
        }
        const py::object returned = function(*given);
        if (results.size() == 1) {
            slots[results[0]] = value(returned);
            return;
        }
        size_t i = 0;
        for (const auto& one : returned) {
            slots.at(results.at(i++)) = value(one);
        }
    }
};

class CompiledGraph {
public:
    // Captures its runs unless `written`, the indices of the inputs that the graph changes, is nothing.
    CompiledGraph(size_t slots, size_t inputs, std::optional<std::vector<size_t>> written) : slots(slots), inputs(inputs) {
        if (written) {
            capture = std::make_unique<Capture>(std::move(*written));
        }
    }

    void add_operator(
        const std::string& name, const std::string& overload, const py::sequence& arguments, const py::sequence& strides, std::vector<size_t> results,
        std::vector<size_t> last_uses) {
        auto call = std::make_unique<OperatorCall>(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
        const auto& parameters = call->op.schema().arguments();
        for (size_t i = 0; i < parameters.size(); i++) {
            call->arguments.push_back(argument_of(arguments[i].cast<py::tuple>(), parameters[i].type()));
        }
        for (const auto& one : strides) {
            call->strides.push_back(one.is_none() ? std::nullopt : std::optional(numbers_of(one.cast<py::sequence>())));
        }
        add(std::move(call), std::move(results), std::move(last_uses));
    }

    void add_formula(
        const std::string& program, std::vector<size_t> tensors, std::vector<size_t> numbers, const py::sequence& outputs, int device,
        std::vector<size_t> results, std::vector<size_t> last_uses) {
        auto made = std::make_unique<Formula>();
        ClaystoneFormula* formula = nullptr;
        check(claystone_formula_new(program.c_str(), tensors.size(), numbers.size(), &formula));
        made->formula.reset(formula);
        made->inputs = std::move(tensors);
        made->scalars = std::move(numbers);
        for (const auto& one : outputs) {
            const auto output = one.cast<py::tuple>();
            made->outputs.push_back({
                numbers_of(output[0]), numbers_of(output[1]), torch::jit::toIValue(output[2], c10::IntType::get()).toScalarType(),
                output[3].cast<std::optional<size_t>>()});
        }
        made->name = "claystone::formula";
        made->device = c10::DeviceIndex(device);
        add(std::move(made), std::move(results), std::move(last_uses));
    }

    void add_python(py::object function, std::vector<size_t> arguments, std::vector<size_t> results, std::vector<size_t> last_uses) {
        auto call = std::make_unique<PythonCall>();
        call->function = std::move(function);
        call->arguments = std::move(arguments);
        add(std::move(call), std::move(results), std::move(last_uses));
    }

    // The results of the graph: slots, or constants.
    void set_outputs(const py::sequence& described) {
        for (const auto& one : described) {
            const auto tuple = one.cast<py::tuple>();
            outputs.push_back(tuple[0].cast<std::string>() == "slot" ? Argument{Argument::Slot, {}, tuple[1].cast<size_t>(), {}, {}, false}
                                                                    : Argument{Argument::Constant, PythonCall::value(tuple[1]), 0, {}, {}, false});
        }
    }

    // Runs the graph. Empties the list of arguments, so that their memory is freed after their last use.
    py::list run(const py::list& arguments) const {
        TORCH_CHECK(arguments.size() == inputs, "the compiled graph takes ", inputs, " arguments");
        Values values;
        for (const auto& argument : arguments) {
            values.push_back(PythonCall::value(argument));
        }
        arguments.attr("clear")();
        {
            const py::gil_scoped_release released;
            const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
                c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
            const auto execute = [this](Values given) { return executed(std::move(given)); };
            values = capture ? capture->run(std::move(values), execute) : executed(std::move(values));
        }
        py::list results;
        for (const auto& value : values) {
            results.append(torch::jit::toPyObject(value));
        }
        return results;
    }

private:
    // Runs instruction by instruction.
    Values executed(Values values) const {
        values.resize(slots);
        for (const auto& instruction : instructions) {
            instruction->run(values);
            for (const size_t slot : instruction->last_uses) {
                values[slot] = {};
            }
        }
        Values results;
        for (const Argument& output : outputs) {
            results.push_back(value_of(output, values));
        }
        return results;
    }

    void add(std::unique_ptr<Instruction> instruction, std::vector<size_t> results, std::vector<size_t> last_uses) {
        instruction->results = std::move(results);
        instruction->last_uses = std::move(last_uses);
        for (const size_t slot : instruction->results) {
            TORCH_CHECK(slot < slots, "there is no slot ", slot);
        }
        instructions.push_back(std::move(instruction));
    }

    const size_t slots, inputs;
    std::vector<std::unique_ptr<Instruction>> instructions;
    std::vector<Argument> outputs;
    std::unique_ptr<Capture> capture;
};

} // namespace

void define_compiled(py::module_& module) {
    py::class_<CompiledGraph>(module, "CompiledGraph")
        .def(py::init<size_t, size_t, std::optional<std::vector<size_t>>>())
        .def("add_operator", &CompiledGraph::add_operator)
        .def("add_formula", &CompiledGraph::add_formula)
        .def("add_python", &CompiledGraph::add_python)
        .def("set_outputs", &CompiledGraph::set_outputs)
        .def("run", &CompiledGraph::run);
    module.def("formula_operations", [] {
        ClaystoneBytes lines;
        check(claystone_formula_operations(&lines));
        return take(lines);
    });
    module.def("replay_count", &replay_count);
    module.def("launch_count", [] {
        uint64_t count = 0;
        check(claystone_launch_count(&count));
        return count;
    });
}

} // namespace claystone_torch
