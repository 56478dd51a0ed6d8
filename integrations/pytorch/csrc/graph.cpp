// Graphs, also as the implementation of torch.accelerator.Graph.
#include "graph.h"
#include "storage.h"
#include "streams.h"

#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <fstream>
#include <utility>

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define HAS_GRAPH_INTERFACE
#endif

namespace py = pybind11;

namespace claystone_torch {
namespace {

// The number of the graph that this thread captures, or 0, and whether its backward passes used other threads before.
thread_local uint64_t capturing = 0;
thread_local bool was_multithreaded = true;

void wait(const c10::Stream& stream, const c10::Stream& other) {
    if (stream != other) {
        check(claystone_stream_wait_stream(stream_handle(stream), stream_handle(other)));
    }
}

} // namespace

bool is_capturing() {
    return capturing != 0;
}

Graph::~Graph() {
    if (is_forked()) {
        return;
    }
    if (capturing == number) {
        end_here();
        claystone_graph_capture_abandon(); // a destructor reports no error
    }
}

uint64_t Graph::next_number() {
    static std::atomic<uint64_t> count = 0;
    return ++count;
}

void Graph::capture_begin(std::optional<c10::MempoolId_t> pool) {
    TORCH_CHECK(!get(), "claystone: this graph has a capture: call reset(), or make another graph");
    const auto index = current_device();
    auto used = pool ? find_pool(*pool, index) : make_pool(index, false, false);
    const auto now = current_stream(index);
    stream_handle(now); // makes the default stream's handle, which replays need
    check(claystone_graph_capture_begin(used->handle));
    memory = std::move(used);
    captured_stream() = stream = now;
    capturing = number;
    auto& autograd = c10::AutogradState::get_tls_state();
    was_multithreaded = autograd.get_multithreading_enabled();
    autograd.set_multithreading_enabled(false);
}

void Graph::end(bool keep) {
    TORCH_CHECK(capturing == number, "claystone: this thread is not capturing this graph");
    end_here();
    ClaystoneGraph* made = nullptr;
    check(keep ? claystone_graph_capture_end(&made) : claystone_graph_capture_abandon());
    set(made);
}

void Graph::end_here() {
    capturing = 0;
    captured_stream().reset();
    c10::AutogradState::get_tls_state().set_multithreading_enabled(was_multithreaded);
}

std::shared_ptr<ClaystoneGraph> Graph::get() const {
    const std::lock_guard lock(mutex);
    return graph;
}

void Graph::set(ClaystoneGraph* made) {
    std::shared_ptr<ClaystoneGraph> old(made, [](ClaystoneGraph* graph) {
        if (!is_forked()) {
            claystone_graph_release(graph);
        }
    });
    const std::lock_guard lock(mutex);
    graph.swap(old);
}

void Graph::capture_end() {
    end(true);
}

void Graph::capture_abandon() {
    end(false);
    memory.reset();
}

void Graph::replay() {
    const auto own = get(); // another thread may reset the graph meanwhile
    TORCH_CHECK(own, "claystone: there is no captured graph to replay");
    const auto now = current_stream(stream->device_index());
    wait(*stream, now);
    check(claystone_graph_replay(own.get()));
    wait(now, *stream);
}

void Graph::reset() {
    TORCH_CHECK(capturing != number, "claystone: a graph cannot be reset during its capture");
    set(nullptr);
    memory.reset();
}

c10::MempoolId_t Graph::pool() const {
    TORCH_CHECK(memory, "claystone: the graph has no memory pool before its capture");
    return memory->id();
}

size_t Graph::commands() const {
    const auto own = get();
    TORCH_CHECK(own, "claystone: there is no captured graph");
    size_t count = 0;
    check(claystone_graph_commands(own.get(), &count));
    return count;
}

void Graph::debug_dump(const std::string& path) const {
    std::ofstream file(path);
    file << "device: claystone:" << int(stream ? stream->device_index() : current_device()) << "\ncommands: " << commands()
         << "\nreserved bytes of the pool: " << memory->stats().reserved_bytes << "\n";
    TORCH_CHECK(file.flush(), "claystone: ", path, " cannot be written");
}

#ifdef HAS_GRAPH_INTERFACE
namespace {

// Every capture mode captures one thread's work only, and a capture ends with all commands ready.
struct OpenClGraph final : at::GraphImplInterface {
    void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
        graph.capture_begin(pool == c10::MempoolId_t{0, 0} ? std::nullopt : std::optional(pool));
    }
    void capture_end() override { graph.capture_end(); }
    void instantiate() override {}
    void replay() override { graph.replay(); }
    void reset() override { graph.reset(); }
    c10::MempoolId_t pool() const override { return graph.pool(); }
    void enable_debug_mode() override {}
    void debug_dump(const std::string& path) override { graph.debug_dump(path); }

    Graph graph;
};

PyObject* make_host_graph = nullptr;

struct HostGraph final : at::GraphImplInterface {
    HostGraph() {
        const py::gil_scoped_acquire gil;
        graph = py::handle(make_host_graph)();
    }
    ~HostGraph() override {
        const py::gil_scoped_acquire gil;
        graph = py::object();
    }
    void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
        const py::gil_scoped_acquire gil;
        graph.attr("capture_begin")(pool == c10::MempoolId_t{0, 0} ? std::nullopt : std::optional(pool));
    }
    void capture_end() override { call("capture_end"); }
    void instantiate() override {}
    void replay() override { call("replay"); }
    void reset() override { call("reset"); }
    c10::MempoolId_t pool() const override {
        const py::gil_scoped_acquire gil;
        return graph.attr("pool")().cast<c10::MempoolId_t>();
    }
    void enable_debug_mode() override {}
    void debug_dump(const std::string& path) override {
        const py::gil_scoped_acquire gil;
        graph.attr("debug_dump")(path);
    }

private:
    void call(const char* method) {
        const py::gil_scoped_acquire gil;
        graph.attr(method)();
    }

    py::object graph;
};

} // namespace
#endif

void register_graphs(PyObject* make) {
#ifdef HAS_GRAPH_INTERFACE
    make_host_graph = py::handle(make).inc_ref().ptr(); // kept until the process ends
    at::GraphImplRegistry()->Register(
        c10::DeviceTypeName(c10::DeviceType::PrivateUse1, /*lower_case=*/false), [](const at::GraphImplArgs&) -> std::unique_ptr<at::GraphImplInterface> {
            if (claystone_device(current_device()) == CLAYSTONE_CPU) {
                return std::make_unique<HostGraph>();
            }
            return std::make_unique<OpenClGraph>();
        });
#endif
}

} // namespace claystone_torch
