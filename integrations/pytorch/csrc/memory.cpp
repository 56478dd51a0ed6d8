// Statistics by name, and the private pools of the process.
#include "memory.h"
#include "storage.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <mutex>
#include <vector>

namespace claystone_torch {
namespace {

// The live pools by their ids. Ids that `reserve_pool_id` returned, of which `reserved` counts, follow RESERVED; claystone's are small.
struct Pools {
    std::mutex mutex;
    std::map<c10::MempoolId_t, std::weak_ptr<Pool>> by_id;
    c10::CaptureId_t reserved = 0;
};

Pools& pools() {
    static auto* const all = new Pools; // never destroyed: pools may outlive static objects
    return *all;
}

constexpr c10::CaptureId_t RESERVED = c10::CaptureId_t(1) << 63;

std::shared_ptr<Pool> add(Pools& all, std::optional<c10::MempoolId_t> id, c10::DeviceIndex index, bool use_on_oom, bool no_split) {
    auto made = std::make_shared<Pool>(index, use_on_oom, no_split);
    std::erase_if(all.by_id, [](const auto& entry) { return entry.second.expired(); });
    all.by_id[made->id()] = made;
    if (id) {
        all.by_id[*id] = made;
    }
    return made;
}

} // namespace

std::map<std::string, int64_t> numbers(ClaystoneBytes json) {
    const std::string text = take(json);
    std::map<std::string, int64_t> result;
    for (size_t start = text.find('"'); start != std::string::npos;) {
        const size_t end = text.find('"', start + 1);
        result.emplace(text.substr(start + 1, end - start - 1), std::strtoll(text.c_str() + end + 2, nullptr, 10));
        start = text.find('"', end + 1);
    }
    return result;
}

c10::CachingAllocator::Stat to_stat(const std::map<std::string, int64_t>& values, const std::string& name) {
    c10::CachingAllocator::Stat stat;
    stat.current = values.at(name + ".current");
    stat.peak = values.at(name + ".peak");
    stat.allocated = values.at(name + ".allocated");
    stat.freed = values.at(name + ".freed");
    return stat;
}

std::pair<size_t, size_t> memory_info(c10::DeviceIndex index) {
    const int device = claystone_device(index);
    uint64_t total = 0;
    ClaystoneBytes json;
    check(claystone_device_memory(device, &total));
    check(claystone_memory_stats(device, &json));
    const uint64_t reserved = numbers(json).at("reserved_bytes.all.current");
    return {total - std::min(total, reserved), total};
}

Pool::Pool(c10::DeviceIndex index, bool use_on_oom, bool no_split) : index(index) {
    check(claystone_pool_new(claystone_device(index), use_on_oom, no_split, &handle));
}

Pool::~Pool() {
    if (!is_forked()) {
        claystone_pool_release(handle);
    }
}

c10::MempoolId_t Pool::id() const {
    uint32_t id = 0;
    check(claystone_pool_id(handle, &id));
    return {0, id};
}

ClaystonePoolStats Pool::stats() const {
    ClaystonePoolStats stats;
    check(claystone_pool_stats(handle, &stats));
    return stats;
}

c10::MempoolId_t reserve_pool_id() {
    auto& all = pools();
    std::lock_guard lock(all.mutex);
    return {0, RESERVED + ++all.reserved};
}

std::shared_ptr<Pool> find_pool(c10::MempoolId_t id, c10::DeviceIndex index) {
    auto& all = pools();
    std::lock_guard lock(all.mutex);
    const auto found = all.by_id.find(id);
    auto pool = found == all.by_id.end() ? nullptr : found->second.lock();
    if (!pool && id.first == 0 && id.second > RESERVED && id.second <= RESERVED + all.reserved) {
        pool = add(all, id, index, false, false);
    }
    TORCH_CHECK(pool, "claystone: there is no memory pool (", id.first, ", ", id.second, ")");
    TORCH_CHECK(pool->index == index, "claystone: the memory pool belongs to claystone:", int(pool->index), ", not to claystone:", int(index));
    return pool;
}

std::shared_ptr<Pool> make_pool(c10::DeviceIndex index, bool use_on_oom, bool no_split) {
    auto& all = pools();
    std::lock_guard lock(all.mutex);
    return add(all, std::nullopt, index, use_on_oom, no_split);
}

std::vector<std::shared_ptr<Pool>> pools_of(c10::DeviceIndex index) {
    auto& all = pools();
    std::lock_guard lock(all.mutex);
    std::vector<std::shared_ptr<Pool>> live;
    for (const auto& [id, pool] : all.by_id) {
        if (auto held = pool.lock(); held && held->index == index && id.second < RESERVED) {
            live.push_back(std::move(held));
        }
    }
    return live;
}

void empty_pool(c10::MempoolId_t id) {
    std::shared_ptr<Pool> pool;
    {
        auto& all = pools();
        std::lock_guard lock(all.mutex);
        if (const auto found = all.by_id.find(id); found != all.by_id.end()) {
            pool = found->second.lock();
        }
    }
    if (pool) {
        check(claystone_pool_empty_cache(pool->handle));
    }
}

} // namespace claystone_torch
