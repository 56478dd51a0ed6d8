// Statistics, limits and private pools of memory.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <claystone.h>

#include <map>
#include <memory>
#include <string>

namespace claystone_torch {

// Parses a JSON object of integers, such as claystone's statistics.
std::map<std::string, int64_t> numbers(ClaystoneBytes json);
// Returns the statistic that is four of these numbers: `name` with ".current", ".peak", ".allocated" and ".freed".
c10::CachingAllocator::Stat to_stat(const std::map<std::string, int64_t>& values, const std::string& name);
// The free and the total bytes of a device. OpenCL does not report free memory, so memory that this process has not reserved counts as free.
std::pair<size_t, size_t> memory_info(c10::DeviceIndex index);

// A private pool of a device's memory. The pool lives as long as a Python object or a graph refers to it.
class C10_HIDDEN Pool {
public:
    Pool(c10::DeviceIndex index, bool use_on_oom, bool no_split);
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool();

    c10::MempoolId_t id() const;
    ClaystonePoolStats stats() const;

    const c10::DeviceIndex index;
    ClaystonePool* handle = nullptr;
};

// Returns an id for a pool that the first capture with this id makes.
c10::MempoolId_t reserve_pool_id();
// Returns the pool with an id, which a capture on the device makes if `reserve_pool_id` returned the id. Throws if there is no such pool.
std::shared_ptr<Pool> find_pool(c10::MempoolId_t id, c10::DeviceIndex index);
// Makes a pool that `find_pool` finds.
std::shared_ptr<Pool> make_pool(c10::DeviceIndex index, bool use_on_oom, bool no_split);
// The live pools of a device.
std::vector<std::shared_ptr<Pool>> pools_of(c10::DeviceIndex index);
// Returns the unused segments of a pool to the driver.
void empty_pool(c10::MempoolId_t id);

} // namespace claystone_torch
