// Pinned host memory, which devices transfer to and from at full speed.
#pragma once

#include "storage.h"

namespace claystone_torch {

// The allocator behind Tensor.pin_memory.
c10::Allocator* pinned_allocator();
// The pinned storage that contains a host address, and the address's offset in bytes; null if the address is not in pinned memory.
std::pair<StorageHandle, size_t> pinned_storage(const void* address);

} // namespace claystone_torch
