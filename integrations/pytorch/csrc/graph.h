// Graphs: work that is captured once and replayed.
#pragma once

#include "memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <optional>

struct _object; // a Python object

namespace claystone_torch {

// Whether this thread is capturing a graph.
bool is_capturing();

// A graph of one device's commands, on the stream and thread of its capture.
class C10_HIDDEN Graph {
public:
    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph();

    // Records this thread's work on the current stream of the current device, with memory from a pool or else a new pool. Meanwhile
    // backward passes run on this thread, because only its work is recorded.
    void capture_begin(std::optional<c10::MempoolId_t> pool);
    void capture_end();
    // Ends a capture without a graph.
    void capture_abandon();
    // Runs the graph in the order of the current stream.
    void replay();
    // Releases the graph and its memory. Another capture may follow.
    void reset();
    // The id of the memory pool of the latest capture.
    c10::MempoolId_t pool() const;
    // The number of commands of a replay.
    size_t commands() const;
    // Writes a few lines about the graph to a file.
    void debug_dump(const std::string& path) const;

private:
    static uint64_t next_number();
    void end(bool keep);
    // Ends the capture of this thread, in this library only.
    static void end_here();
    std::shared_ptr<ClaystoneGraph> get() const;
    void set(ClaystoneGraph* made);

    const uint64_t number = next_number(); // an address could be that of an earlier graph
    std::shared_ptr<Pool> memory;
    std::optional<c10::Stream> stream;
    mutable std::mutex mutex; // of `graph`: replays run without Python's lock
    std::shared_ptr<ClaystoneGraph> graph;
};

// Makes this device's graphs those of torch.accelerator.Graph, where PyTorch has it. The device must have its final name. On the CPU
// device graphs are objects that the Python function `make_host_graph` returns, with the methods of this class.
void register_graphs(_object* make_host_graph);
// Gives the memory of a tensor's storage to another tensor's storage of the same size.
void move_storage(const at::Tensor& target, const at::Tensor& source);

} // namespace claystone_torch
