// Pinned memory: claystone allocates it, and PyTorch's CPU tensors use it. Copies look up the storage by its address.
#include "pinned.h"
#include "memory.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winterference-size" // of PyTorch's header
#include <ATen/core/CachingHostAllocator.h>
#pragma GCC diagnostic pop

#include <c10/util/Exception.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace claystone_torch {
namespace {

struct Pinned {
    StorageHandle storage;
    char* start;
    size_t nbytes;
};

std::mutex mutex;

std::map<const char*, Pinned*>& all() {
    static auto* const blocks = new std::map<const char*, Pinned*>; // never destroyed: storages may outlive static objects
    return *blocks;
}

// The latest events, and the number to keep; guarded by `mutex`.
struct History {
    std::deque<std::tuple<bool, uintptr_t, size_t, int64_t>> events;
    size_t max_entries = 0;

    void add(bool allocates, const Pinned& pinned) {
        if (max_entries == 0) {
            return;
        }
        const auto now = std::chrono::system_clock::now().time_since_epoch();
        events.emplace_back(
            allocates, reinterpret_cast<uintptr_t>(pinned.start), pinned.nbytes, std::chrono::duration_cast<std::chrono::microseconds>(now).count());
        shrink();
    }
    void shrink() {
        while (events.size() > max_entries) {
            events.pop_front();
        }
    }
};

History& history() {
    static auto* const one = new History; // never destroyed, as `all`
    return *one;
}

void delete_pinned(void* context) {
    if (is_forked()) {
        return;
    }
    auto* pinned = static_cast<Pinned*>(context);
    {
        std::lock_guard lock(mutex);
        all().erase(pinned->start);
        history().add(false, *pinned);
    }
    delete pinned;
}

using c10::CachingAllocator::DurationStat;

template <typename F>
void each_device(F f) {
    for (c10::DeviceIndex index = 0; index < device_count(); index++) {
        check(f(claystone_device(index)));
    }
}

// Converts statistics to PyTorch's, whose names PyTorch 2.10 changed.
template <typename Stats>
Stats to_host_stats(const std::map<std::string, int64_t>& values) {
    const auto stat = [&](const std::string& name) { return to_stat(values, name); };
    const auto time = [&](const std::string& name) {
        DurationStat result;
        result.total = values.at(name + ".total");
        result.max = values.at(name + ".max");
        result.min = values.at(name + ".min");
        result.count = values.at(name + ".count");
        return result;
    };
    Stats stats;
    if constexpr (requires { stats.active_requests; }) {
        stats.active_requests = stat("active_requests");
        stats.active_bytes = stat("active_bytes");
        stats.allocations = stat("allocations");
        stats.allocated_bytes = stat("allocated_bytes");
    } else {
        stats.allocation = stat("active_requests");
        stats.allocated_bytes = stat("active_bytes");
        stats.segment = stat("allocations");
        stats.reserved_bytes = stat("allocated_bytes");
    }
    stats.host_alloc_time = time("host_alloc_time");
    stats.host_free_time = time("host_free_time");
    stats.num_host_alloc = values.at("num_host_alloc");
    stats.num_host_free = values.at("num_host_free");
    return stats;
}

struct Allocator final : at::HostAllocator {
    c10::DataPtr allocate(size_t nbytes) override {
        if (nbytes == 0) {
            return {nullptr, nullptr, &delete_pinned, c10::DeviceType::CPU};
        }
        TORCH_CHECK(!is_forked(), "claystone: a process that was forked after claystone was loaded has no pinned memory");
        ClaystoneStorage* storage = nullptr;
        void* data = nullptr;
        check(claystone_storage_new_pinned(claystone_device(current_device()), nbytes, &storage, &data));
        auto* pinned = new Pinned{StorageHandle(storage, ReleaseStorage()), static_cast<char*>(data), nbytes};
        std::lock_guard lock(mutex);
        all()[pinned->start] = pinned;
        history().add(true, *pinned);
        return {data, pinned, &delete_pinned, c10::DeviceType::CPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* target, const void* source, std::size_t count) const override { std::memcpy(target, source, count); }

    // Copies keep their pinned memory until they are complete, so that there is no event to record.
    bool record_event(void* data, void*, c10::Stream) override { return pinned_storage(data).first != nullptr; }
    void empty_cache() override { each_device(claystone_pinned_memory_empty_cache); }
    void reset_accumulated_stats() override { each_device(claystone_pinned_memory_reset_accumulated); }
    void reset_peak_stats() override { each_device(claystone_pinned_memory_reset_peak); }
    at::HostStats get_stats() override { return to_host_stats<at::HostStats>(pinned_statistics()); }
};

} // namespace

namespace {

Allocator& host_allocator() {
    static auto* const one = new Allocator;
    return *one;
}

const bool registered = [] {
    at::setHostAllocator(c10::DeviceType::PrivateUse1, &host_allocator());
    return true;
}();

} // namespace

c10::Allocator* pinned_allocator() {
    return &host_allocator();
}

void record_pinned_history(size_t max_entries, bool clear) {
    std::lock_guard lock(mutex);
    history().max_entries = max_entries;
    if (clear) {
        history().events.clear();
    } else if (max_entries > 0) {
        history().shrink();
    }
}

std::vector<std::tuple<bool, uintptr_t, size_t, int64_t>> pinned_history() {
    std::lock_guard lock(mutex);
    return {history().events.begin(), history().events.end()};
}

std::vector<std::pair<uintptr_t, size_t>> pinned_blocks() {
    std::lock_guard lock(mutex);
    std::vector<std::pair<uintptr_t, size_t>> blocks;
    for (const auto& [start, pinned] : all()) {
        blocks.emplace_back(reinterpret_cast<uintptr_t>(start), pinned->nbytes);
    }
    return blocks;
}

void empty_pinned_cache() {
    host_allocator().empty_cache();
}

void reset_peak_pinned_statistics() {
    host_allocator().reset_peak_stats();
}

void reset_accumulated_pinned_statistics() {
    host_allocator().reset_accumulated_stats();
}

std::map<std::string, int64_t> pinned_statistics() {
    std::map<std::string, int64_t> sum;
    each_device([&](int device) {
        ClaystoneBytes json;
        const auto status = claystone_pinned_memory_stats(device, &json);
        if (status != CLAYSTONE_STATUS_OK) {
            return status;
        }
        const auto values = numbers(json);
        for (const auto& [name, value] : values) {
            int64_t& total = sum[name];
            if (name.ends_with(".max")) {
                total = std::max(total, value);
            } else if (name.ends_with(".min")) {
                total = total == 0 || value == 0 ? std::max(total, value) : std::min(total, value);
            } else {
                total += value;
            }
        }
        return status;
    });
    for (const std::string name : {"host_alloc_time", "host_free_time"}) {
        sum[name + ".avg"] = sum[name + ".total"] / std::max<int64_t>(1, sum[name + ".count"]);
    }
    return sum;
}

std::pair<StorageHandle, size_t> pinned_storage(const void* address) {
    const auto* at = static_cast<const char*>(address);
    std::lock_guard lock(mutex);
    const auto above = all().upper_bound(at);
    if (above == all().begin()) {
        return {};
    }
    const Pinned& pinned = *std::prev(above)->second;
    const size_t before = at - pinned.start;
    return before < pinned.nbytes ? std::pair(pinned.storage, before) : std::pair(StorageHandle(), size_t(0));
}

} // namespace claystone_torch
