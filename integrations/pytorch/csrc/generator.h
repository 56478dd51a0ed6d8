// Random number generators, and resizing of storages.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>
#include <claystone.h>

namespace claystone_torch {

// The process's default generator, which all devices share.
const at::Generator& default_generator();
at::Generator new_generator(c10::DeviceIndex index);
// claystone's handle of a generator; null is the process's default generator.
const ClaystoneGenerator* generator_handle(const at::Generator& generator);

// Resizes a storage and keeps the bytes that fit.
void resize_storage(const c10::Storage& storage, size_t nbytes);

} // namespace claystone_torch
