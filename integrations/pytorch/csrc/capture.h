// Runs of a compiled graph that are captured once and then replayed.
#pragma once

#include "graph.h"
#include "storage.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

namespace claystone_torch {

using Values = std::vector<c10::IValue>;

// Captures the commands of a compiled graph at its second call, and replays them afterwards.
//
// Commands refer to the memory of the capture's arguments. Arguments that keep their memory from call to call, such as parameters and the
// results of other captured graphs, are read where they are. All others are copied to buffers before each replay. A call whose arguments
// have moved runs without the graph, and the next call captures again. Results are tensors on the memory that the replay wrote. Those that
// still have users at the next replay are first moved to memory of their own.
class C10_HIDDEN Capture {
public:
    using Execute = std::function<Values(Values)>;

    // `written` are the indices of the arguments that the graph changes.
    explicit Capture(std::vector<size_t> written) : written(std::move(written)) {}

    // Runs the graph on the inputs: by a replay, or by `execute`, which runs instruction by instruction.
    Values run(Values inputs, const Execute& execute);

private:
    // An input's memory and layout, for comparisons between calls. Numbers of the host are part of the commands, so their value counts.
    struct Place {
        StorageHandle storage; // of arguments that the graph reads in place
        c10::weak_intrusive_ptr<c10::StorageImpl> owner;
        bool is_ours;
        std::array<char, 16> value{}; // of a tensor of the host
        std::vector<int64_t> sizes, strides;
        int64_t offset = 0;

        explicit Place(const at::Tensor& tensor);
        bool is_same_memory(const at::Tensor& tensor) const;
        bool is_same_layout(const at::Tensor& tensor) const;
    };

    // A result of a replay: a value, an input, or a tensor on the memory of an input or of the graph.
    struct Result {
        enum Kind { Value, Input, OfInput, OfGraph } kind;
        c10::IValue value;
        size_t index = 0; // of the input, or of `memory`
        at::ScalarType dtype{};
        std::vector<int64_t> sizes, strides;
        int64_t offset = 0; // on an input's memory: from the input's own offset
    };

    // Whether commands can read the inputs: tensors of the device, and tensors of the host with one element that the graph does not change.
    bool takes(const Values& inputs) const;
    // Sets `last`, without keeping memory alive.
    void remember(const Values& inputs);
    // Whether the graph can be replayed on the inputs. Drops the graph if arguments that it reads in place have moved.
    bool fits(const Values& inputs);
    // Captures the graph. Returns whether it did.
    bool capture(const Values& inputs, const Execute& execute);
    Result described(const c10::IValue& value, const Values& inputs);
    Values replay(const Values& inputs);
    void clear();

    const std::vector<size_t> written;
    std::mutex mutex;
    int captures_left = 4; // of this graph, whose arguments may move between calls
    std::vector<Place> last; // of the previous call or, after a capture, of the capture
    std::set<size_t> moving; // the arguments that are copied
    std::vector<at::Tensor> buffers; // for arguments that are copied
    std::unique_ptr<Graph> graph;
    std::optional<c10::Stream> stream;
    std::vector<GraphMemory> memory; // of the results
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> users; // of `memory`: the storages of the latest results
    std::vector<Result> results;
};

// The number of replays of compiled graphs so far.
uint64_t replay_count();

} // namespace claystone_torch
