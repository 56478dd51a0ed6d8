// Pinned host memory, which devices transfer to and from at full speed.
#pragma once

#include "storage.h"

#include <map>

namespace claystone_torch {

// The allocator behind Tensor.pin_memory.
c10::Allocator* pinned_allocator();
// Returns pinned memory that nothing uses to the driver.
void empty_pinned_cache();
// The statistics of PyTorch's host allocators by name, summed over the devices.
std::map<std::string, int64_t> pinned_statistics();
void reset_peak_pinned_statistics();
void reset_accumulated_pinned_statistics();
// The pinned storage that contains a host address, and the address's offset in bytes; null if the address is not in pinned memory.
std::pair<StorageHandle, size_t> pinned_storage(const void* address);

} // namespace claystone_torch
