// Pinned memory: claystone allocates it, and PyTorch's CPU tensors use it. Copies look up the storage by its address.
#include "pinned.h"

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

struct Allocator final : c10::Allocator {
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
};

} // namespace

c10::Allocator* pinned_allocator() {
    static auto* const one = new Allocator;
    return one;
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
