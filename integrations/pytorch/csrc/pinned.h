// Pinned host memory, which devices transfer to and from at full speed.
#pragma once

#include "storage.h"

#include <map>
#include <tuple>
#include <vector>

namespace claystone_torch {

// The allocator behind Tensor.pin_memory.
c10::Allocator* pinned_allocator();
// Returns pinned memory that nothing uses to the driver.
void empty_pinned_cache();
// Starts to record the latest events of pinned memory, or stops with 0. Events recorded before are discarded if `clear`.
void record_pinned_history(size_t max_entries, bool clear);
// The recorded events, the oldest first: whether memory was allocated or else released, its address and bytes, and microseconds since 1970.
std::vector<std::tuple<bool, uintptr_t, size_t, int64_t>> pinned_history();
// The addresses and sizes of the pinned memory in use.
std::vector<std::pair<uintptr_t, size_t>> pinned_blocks();
// The statistics of claystone_pinned_memory_stats, summed over the devices.
std::map<std::string, int64_t> pinned_statistics();
void reset_peak_pinned_statistics();
void reset_accumulated_pinned_statistics();
// The pinned storage that contains a host address, and the address's offset in bytes; null if the address is not in pinned memory.
std::pair<StorageHandle, size_t> pinned_storage(const void* address);

} // namespace claystone_torch
