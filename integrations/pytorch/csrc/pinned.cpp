// Pinned memory: claystone allocates it, and PyTorch's CPU tensors use it. Copies look up the storage by its address.
#include "pinned.h"
#include "memory.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winterference-size" // of PyTorch's header
#include <ATen/core/CachingHostAllocator.h>
#pragma GCC diagnostic pop

#include <c10/util/Exception.h>

#include <cstring>
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

void delete_pinned(void* context) {
    if (is_forked()) {
        return;
    }
    auto* pinned = static_cast<Pinned*>(context);
    {
        std::lock_guard lock(mutex);
        all().erase(pinned->start);
    }
    delete pinned;
}

using c10::CachingAllocator::DurationStat;
using c10::CachingAllocator::Stat;

void add(Stat& sum, const std::map<std::string, int64_t>& values, const std::string& name) {
    sum.current += values.at(name + ".current");
    sum.peak += values.at(name + ".peak");
    sum.allocated += values.at(name + ".allocated");
    sum.freed += values.at(name + ".freed");
}

void add(DurationStat& sum, const std::map<std::string, int64_t>& values, const std::string& name) {
    const int64_t count = values.at(name + ".count"), least = values.at(name + ".min");
    sum.min = sum.count == 0 || (count > 0 && least < sum.min) ? least : sum.min;
    sum.max = std::max<int64_t>(sum.max, values.at(name + ".max"));
    sum.total += values.at(name + ".total");
    sum.count += count;
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
        return {data, pinned, &delete_pinned, c10::DeviceType::CPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* target, const void* source, std::size_t count) const override { std::memcpy(target, source, count); }

    // Copies keep their pinned memory until they are complete, so that there is no event to record.
    bool record_event(void* data, void*, c10::Stream) override { return pinned_storage(data).first != nullptr; }
    void empty_cache() override { each_device(claystone_pinned_memory_empty_cache); }
    void reset_accumulated_stats() override { each_device(claystone_pinned_memory_reset_accumulated); }
    void reset_peak_stats() override { each_device(claystone_pinned_memory_reset_peak); }
    at::HostStats get_stats() override {
        at::HostStats sum;
        each_device([&](int device) {
            ClaystoneBytes json;
            const auto status = claystone_pinned_memory_stats(device, &json);
            if (status == CLAYSTONE_STATUS_OK) {
                const auto values = numbers(json);
                add(sum.active_requests, values, "active_requests");
                add(sum.active_bytes, values, "active_bytes");
                add(sum.allocations, values, "allocations");
                add(sum.allocated_bytes, values, "allocated_bytes");
                add(sum.host_alloc_time, values, "host_alloc_time");
                add(sum.host_free_time, values, "host_free_time");
                sum.num_host_alloc += values.at("num_host_alloc");
                sum.num_host_free += values.at("num_host_free");
            }
            return status;
        });
        return sum;
    }

private:
    template <typename F>
    static void each_device(F f) {
        for (c10::DeviceIndex index = 0; index < device_count(); index++) {
            check(f(claystone_device(index)));
        }
    }
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
    const at::HostStats stats = host_allocator().get_stats();
    std::map<std::string, int64_t> result{{"num_host_alloc", stats.num_host_alloc}, {"num_host_free", stats.num_host_free}};
    const auto add = [&](const std::string& name, const c10::CachingAllocator::Stat& stat) {
        result.insert({{name + ".current", stat.current}, {name + ".peak", stat.peak}, {name + ".allocated", stat.allocated}, {name + ".freed", stat.freed}});
    };
    const auto add_time = [&](const std::string& name, const c10::CachingAllocator::DurationStat& time) {
        const int64_t average = time.count > 0 ? time.total / time.count : 0;
        result.insert({{name + ".total", time.total}, {name + ".max", time.max}, {name + ".min", time.min}, {name + ".count", time.count}, {name + ".avg", average}});
    };
    add("active_requests", stats.active_requests);
    add("active_bytes", stats.active_bytes);
    add("allocations", stats.allocations);
    add("allocated_bytes", stats.allocated_bytes);
    add_time("host_alloc_time", stats.host_alloc_time);
    add_time("host_free_time", stats.host_free_time);
    return result;
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
