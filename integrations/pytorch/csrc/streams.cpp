// Streams: each device has a default stream and, as with CUDA, a pool for each priority.
#include "streams.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>
#include <mutex>

namespace claystone_torch {
namespace {

constexpr size_t STREAMS_PER_PRIORITY = 32; // streams of one priority per device

struct Streams {
    std::map<int64_t, ClaystoneStream*> by_id;
    std::vector<int64_t> pools[3];
    size_t next[3] = {};
};

std::mutex mutex;

Streams& streams_of(c10::DeviceIndex index) {
    static auto* const all = new std::map<c10::DeviceIndex, Streams>; // never destroyed: threads may outlive static objects
    return (*all)[index];
}

int64_t add(Streams& streams, ClaystoneStream* stream) {
    int64_t id = 0;
    check(claystone_stream_id(stream, nullptr, &id));
    streams.by_id[id] = stream;
    return id;
}

c10::Stream stream_of(c10::DeviceIndex index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, index), id);
}

// This thread's current stream on each device; claystone's current streams are kept equal.
int64_t& current_id(c10::DeviceIndex index) {
    thread_local std::vector<int64_t> ids(device_count());
    TORCH_CHECK(index >= 0 && index < ids.size(), "there is no device claystone:", int(index));
    return ids[index];
}

} // namespace

ClaystoneStream* stream_handle(const c10::Stream& stream) {
    std::lock_guard lock(mutex);
    auto& streams = streams_of(stream.device_index());
    if (const auto found = streams.by_id.find(stream.id()); found != streams.by_id.end()) {
        return found->second;
    }
    TORCH_CHECK(stream.id() == 0, "claystone:", int(stream.device_index()), " has no stream ", stream.id());
    ClaystoneStream* made = nullptr;
    check(claystone_stream_default(claystone_device(stream.device_index()), &made));
    add(streams, made);
    return made;
}

c10::Stream current_stream(c10::DeviceIndex index) {
    return stream_of(index, current_id(index));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
    const auto before = current_stream(stream.device_index());
    if (before != stream) {
        check(claystone_stream_set_current(stream_handle(stream)));
        current_id(stream.device_index()) = stream.id();
    }
    return before;
}

std::optional<c10::Stream>& captured_stream() {
    thread_local std::optional<c10::Stream> captured;
    return captured;
}

c10::Stream new_stream(c10::DeviceIndex index, int priority) {
    std::lock_guard lock(mutex);
    auto& streams = streams_of(index);
    const size_t kind = priority < 0 ? 0 : priority == 0 ? 1 : 2;
    auto& pool = streams.pools[kind];
    if (pool.size() < STREAMS_PER_PRIORITY) {
        ClaystoneStream* made = nullptr;
        check(claystone_stream_with_priority(claystone_device(index), priority, &made));
        pool.push_back(add(streams, made));
        return stream_of(index, pool.back());
    }
    return stream_of(index, pool[streams.next[kind]++ % STREAMS_PER_PRIORITY]);
}

namespace {

void record_tensor(at::Tensor& self, at::Stream stream) {
    record_stream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("record_stream", &record_tensor);
}

} // namespace
} // namespace claystone_torch
