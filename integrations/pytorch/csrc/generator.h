// Generators of random numbers, and storages that grow.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>
#include <claystone.h>

namespace claystone_torch {

// The generator of the process, which all devices draw from.
const at::Generator& default_generator();
at::Generator new_generator(c10::DeviceIndex index);
// claystone's handle of a generator; null is the process's own.
const ClaystoneGenerator* generator_handle(const at::Generator& generator);

// Gives a storage another size; what fits of its bytes stays.
void resize_storage(const c10::Storage& storage, size_t nbytes);

} // namespace claystone_torch
