// The Python module claystone_torch._C.
#include "compiled.h"
#include "dispatch.h"
#include "fallback.h"
#include "generator.h"
#include "graph.h"
#include "pinned.h"
#include "storage.h"
#include "streams.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;
using namespace claystone_torch;

namespace {

// A scope whose most memory in use is measured.
struct PeakScope {
    explicit PeakScope(int index) { check(claystone_peak_scope_begin(claystone_device(index), &handle)); }
    PeakScope(const PeakScope&) = delete;
    PeakScope& operator=(const PeakScope&) = delete;
    ~PeakScope() { end(); }
    void end() { claystone_peak_scope_release(std::exchange(handle, nullptr)); }

    ClaystonePeakScope* handle = nullptr;
};

// A user of a pool, whose thread allocates from the pool between `begin` and `end`.
struct PoolScope {
    explicit PoolScope(std::shared_ptr<Pool> pool) : pool(std::move(pool)) {}
    void begin() { check(claystone_pool_begin(pool->handle)); }
    void end() { check(claystone_pool_end(pool->handle)); }

    std::shared_ptr<Pool> pool;
};

// Calls a Python function for failed allocations as torch._C._cuda_attach_out_of_memory_observer does, until the process ends.
void attach_oom_observer(int index, const py::function& observer) {
    struct Attached {
        PyObject* function;
        int index;
    };
    const auto observe = [](void* data, const ClaystoneOutOfMemory* failed) {
        const auto& attached = *static_cast<const Attached*>(data);
        const py::gil_scoped_acquire acquire;
        try {
            py::handle(attached.function)(attached.index, failed->requested, failed->allowed, failed->device_free);
        } catch (py::error_already_set& error) { // an exception must not pass through C
            error.discard_as_unraisable("an observer of failed allocations");
        }
    };
    ClaystoneObserver* registered = nullptr;
    auto* const attached = new Attached{py::function(observer).release().ptr(), index};
    check(claystone_memory_observe_oom(claystone_device(index), observe, attached, &registered));
}

// Takes a device's memory from functions at these addresses, with the types of torch.cuda.memory.CUDAPluggableAllocator's.
void set_allocator(int index, uintptr_t allocate, uintptr_t free) {
    struct Plugged {
        void* (*allocate)(ssize_t nbytes, int index, void* stream);
        void (*free)(void* memory, ssize_t nbytes, int index, void* stream);
        int index;
    };
    // Used until the process ends.
    auto* const plugged = new Plugged{reinterpret_cast<decltype(Plugged::allocate)>(allocate), reinterpret_cast<decltype(Plugged::free)>(free), index};
    const ClaystoneAllocator functions{
        [](void* data, size_t nbytes) {
            const auto& plugged = *static_cast<const Plugged*>(data);
            return plugged.allocate(nbytes, plugged.index, nullptr);
        },
        [](void* data, void* memory, size_t nbytes) {
            const auto& plugged = *static_cast<const Plugged*>(data);
            plugged.free(memory, nbytes, plugged.index, nullptr);
        },
        plugged};
    check(claystone_memory_set_allocator(claystone_device(index), &functions));
}

} // namespace

PYBIND11_MODULE(_C, module) {
    module.def("add_row", [](const std::string& name, const std::vector<std::tuple<std::string, std::string, bool, bool>>& alternatives) {
        std::vector<RowText> texts;
        for (const auto& [condition, program, elementwise, apart] : alternatives) {
            texts.push_back({condition, program, elementwise, apart});
        }
        return add_row(name, texts);
    });
    module.def("register_rows", &register_rows);
    module.def("add_host_operators", &add_host_operators);
    module.def("fallbacks", [] {
        std::map<std::string, std::pair<int64_t, std::string>> all;
        for (const auto& [name, fallback] : fallbacks()) {
            all[name] = {fallback.count, fallback.reason};
        }
        return all;
    });
    module.def("reset_fallbacks", &reset_fallbacks);
    define_compiled(module);

    // PyTorch runs backward passes on its own thread, and any thread may wait for them.
    claystone_report_faults_to_any_thread();

    module.def("is_forked", &is_forked);
    module.def("device_count", [] { return int(device_count()); });
    module.def("is_opencl", [](int index) { return claystone_device(index) != CLAYSTONE_CPU; });
    module.def("device_name", [](int index) {
        ClaystoneBytes name;
        check(claystone_device_name(claystone_device(index), &name));
        return take(name);
    });
    module.def("synchronize", [](int index) {
        const py::gil_scoped_release release;
        check(claystone_device_synchronize(claystone_device(index)));
    });

    module.def("memory_stats", [](int index) {
        ClaystoneBytes json;
        check(claystone_memory_stats(claystone_device(index), &json));
        return numbers(json);
    });
    module.def("memory_info", &memory_info);
    module.def("memory_set_context", [](const std::string& name) { check(claystone_memory_set_context(name.c_str())); });
    module.def("check_alloc_conf", [](const std::string& text) { check(claystone_memory_check_config(text.c_str())); });
    module.def("enable_caching", [](int index, bool enable) { check(claystone_memory_enable_caching(claystone_device(index), enable)); });
    module.def("set_allocator", &set_allocator);
    module.def("record_pinned_history", &record_pinned_history);
    module.def("pinned_blocks", &pinned_blocks);
    module.def("pinned_history", &pinned_history);
    module.def("attach_oom_observer", &attach_oom_observer);
    module.def("pinned_memory_stats", &pinned_statistics);
    module.def("empty_pinned_cache", &empty_pinned_cache);
    module.def("reset_peak_pinned_memory_stats", &reset_peak_pinned_statistics);
    module.def("reset_accumulated_pinned_memory_stats", &reset_accumulated_pinned_statistics);

    py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool")
        .def(py::init(&make_pool))
        .def("id", &Pool::id)
        .def("use_count", [](const std::shared_ptr<Pool>& pool) { return pool.use_count() - 1; }) // without the argument
        .def("empty_cache", [](const Pool& pool) { check(claystone_pool_empty_cache(pool.handle)); })
        .def("stats", [](const Pool& pool) {
            const auto stats = pool.stats();
            return std::map<std::string, uint64_t>{
                {"segments", stats.segments}, {"reserved_bytes", stats.reserved_bytes}, {"allocations", stats.allocations},
                {"allocated_bytes", stats.allocated_bytes}, {"active_bytes", stats.active_bytes}};
        });
    py::class_<PoolScope>(module, "PoolScope").def(py::init<std::shared_ptr<Pool>>()).def("begin", &PoolScope::begin).def("end", &PoolScope::end);
    module.def("reserve_pool_id", &reserve_pool_id);
    module.def("find_pool", [](c10::MempoolId_t id) { return find_pool(id, current_device()); });
    module.def("register_graphs", [](const py::object& make_host_graph) { register_graphs(make_host_graph.ptr()); });
    module.def("move_storage", &move_storage);
    module.def("is_capturing", &is_capturing);
    module.def("capture_current_stream", [](bool capture) {
        captured_stream() = capture ? std::optional(current_stream(current_device())) : std::nullopt;
    });
    const py::call_guard<py::gil_scoped_release> without_gil;
    py::class_<Graph>(module, "Graph")
        .def(py::init<>())
        .def("capture_begin", &Graph::capture_begin, without_gil)
        .def("capture_end", &Graph::capture_end, without_gil)
        .def("capture_abandon", &Graph::capture_abandon, without_gil)
        .def("replay", &Graph::replay, without_gil)
        .def("reset", &Graph::reset, without_gil)
        .def("pool", &Graph::pool)
        .def("commands", &Graph::commands)
        .def("debug_dump", &Graph::debug_dump);
    module.def("memory_snapshot", [](int index, bool pickle) {
        ClaystoneBytes snapshot;
        const auto format = pickle ? CLAYSTONE_SNAPSHOT_FORMAT_PICKLE : CLAYSTONE_SNAPSHOT_FORMAT_JSON;
        check(claystone_memory_snapshot(claystone_device(index), format, &snapshot));
        return py::bytes(take(snapshot));
    });
    module.def("memory_snapshot_on_oom", [](int index, const std::optional<std::string>& path) {
        check(claystone_memory_snapshot_on_oom(claystone_device(index), path ? path->c_str() : nullptr));
    });
    py::class_<PeakScope>(module, "PeakScope")
        .def(py::init<int>())
        .def("read", [](const PeakScope& scope) {
            ClaystonePeak peak;
            check(claystone_peak_scope_read(scope.handle, &peak));
            return std::tuple(peak.allocated, peak.reserved, peak.requested);
        })
        .def("end", &PeakScope::end);
    module.def("dry_run_begin", [](uint64_t capacity) { check(claystone_dry_run_begin(capacity)); });
    module.def("dry_run_end", [] {
        ClaystoneBytes json, text;
        check(claystone_dry_run_end(&json, &text));
        return std::pair(take(json), take(text));
    });
    module.def("set_role", [](const at::Tensor& tensor, int role) {
        if (is_ours(tensor) && tensor.storage().nbytes() > 0) {
            check(claystone_tensor_set_role(bytes(tensor, 0, tensor.storage().nbytes()).get(), role));
        }
    });
    module.def("memory_record_history", [](int index, int recording, int context, bool stacks, bool clear, size_t entries) {
        const ClaystoneHistory history{recording, context, stacks, clear, entries};
        check(claystone_memory_record_history(claystone_device(index), &history));
    });
    module.def("empty_cache", [](int index) { check(claystone_memory_empty_cache(claystone_device(index))); });
    module.def("reset_peak_memory_stats", [](int index) { check(claystone_memory_reset_peak(claystone_device(index))); });
    module.def("reset_accumulated_memory_stats", [](int index) { check(claystone_memory_reset_accumulated(claystone_device(index))); });
    module.def("set_memory_fraction", [](int index, double fraction) { check(claystone_memory_set_fraction(claystone_device(index), fraction)); });

    module.def("seed", [](uint64_t seed) { default_generator().unsafeGetGeneratorImpl()->set_current_seed(seed); });
    module.def("initial_seed", [] { return default_generator().unsafeGetGeneratorImpl()->current_seed(); });
    module.def("rng_state", [] {
        auto* generator = default_generator().unsafeGetGeneratorImpl();
        return std::pair(generator->current_seed(), generator->get_offset());
    });
    module.def("set_rng_state", [](uint64_t seed, uint64_t draws) {
        check(claystone_generator_set_state(nullptr, seed, draws));
    });
}
