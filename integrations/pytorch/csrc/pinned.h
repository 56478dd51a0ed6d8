// The host's memory that devices transfer to and from at full speed.
#pragma once

#include "storage.h"

namespace claystone_torch {

// What Tensor.pin_memory takes memory from.
c10::Allocator* pinned_allocator();
// The storage that an address of the host is in, and the bytes of it before that; null where it is in no pinned memory.
std::pair<StorageHandle, size_t> pinned_storage(const void* address);

} // namespace claystone_torch
