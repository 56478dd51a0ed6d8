// The Python module claystone_torch._C.
#include "compiled.h"
#include "dispatch.h"
#include "fallback.h"
#include "generator.h"
#include "storage.h"

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
    module.def("device_memory", [](int index) {
        uint64_t bytes = 0;
        check(claystone_device_memory(claystone_device(index), &bytes));
        return bytes;
    });
    module.def("synchronize", [](int index) {
        const py::gil_scoped_release release;
        check(claystone_device_synchronize(claystone_device(index)));
    });

    module.def("memory_stats", [](int index) {
        ClaystoneBytes json;
        check(claystone_memory_stats(claystone_device(index), &json));
        return take(json);
    });
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
    module.def("memory_record_history", [](int index, size_t entries, bool stacks) {
        check(claystone_memory_record_history(claystone_device(index), entries, stacks));
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
