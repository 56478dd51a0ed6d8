// The allocator. Data pointers are addresses in a reserved range without access, so pointer arithmetic works and host reads fault at
// once. Each pointer stands for a block: one claystone storage, allocated at its first use. An operation that writes a whole tensor
// can therefore give the block the storage in which claystone computed the result, without a copy.
#include "graph.h"
#include "memory.h"
#include "storage.h"
#include "streams.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <atomic>
#include <bit>
#include <map>
#include <mutex>
#include <vector>

namespace claystone_torch {
namespace {

constexpr size_t MIN_RANGE_BYTES = 512; // bytes of the smallest range, and so the alignment of data pointers
constexpr size_t STORAGE_MULTIPLE_BYTES = 16; // bytes: makes every storage a whole number of elements of every dtype

struct Block;

// The address ranges, whose sizes are powers of two, and the block that owns each; null for free ranges.
class Addresses {
public:
    using Range = std::pair<char* const, Block*>;

    Range* take(size_t nbytes, Block* owner) {
        std::lock_guard lock(mutex);
        Range* range = find(nbytes);
        range->second = owner;
        return range;
    }

    void give(Range* range, size_t nbytes) {
        std::lock_guard lock(mutex);
        range->second = nullptr;
        free_ranges[std::countr_zero(std::bit_ceil(std::max(nbytes, MIN_RANGE_BYTES)))].push_back(range);
    }

    // The block of the range that starts at or before this address.
    Block* owner(const void* address) {
        std::lock_guard lock(mutex);
        auto above = owners.upper_bound(static_cast<char*>(const_cast<void*>(address)));
        return above == owners.begin() ? nullptr : std::prev(above)->second;
    }

private:
    Range* find(size_t nbytes) {
        const size_t size = std::bit_ceil(std::max(nbytes, MIN_RANGE_BYTES));
        auto& free = free_ranges[std::countr_zero(size)];
        if (!free.empty()) {
            Range* range = free.back();
            free.pop_back();
            return range;
        }
        if (next == nullptr || size > size_t(end - next)) {
            reserve(size);
        }
        return &*owners.emplace(std::exchange(next, next + size), nullptr).first;
    }

    // Reserves address space. Reservations are free unless the system limits address space, so smaller sizes are tried after a failure.
    void reserve(size_t at_least) {
        for (size_t size = std::max(size_t(1) << 44, at_least); size >= at_least; size /= 2) {
            void* range = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (range != MAP_FAILED) {
                next = static_cast<char*>(range);
                end = next + size;
                return;
            }
        }
        TORCH_CHECK(false, "claystone: no range of ", at_least, " addresses is free in this process");
    }

    std::mutex mutex;
    char *next = nullptr, *end = nullptr;
    std::vector<Range*> free_ranges[64];
    std::map<char*, Block*> owners;
};

Addresses& addresses() {
    static auto* const all = new Addresses; // never destroyed: storages may outlive static objects
    return *all;
}

StorageHandle new_storage(int device, size_t nbytes) {
    ClaystoneStorage* made = nullptr;
    const size_t rounded = (std::max(nbytes, size_t(1)) + STORAGE_MULTIPLE_BYTES - 1) / STORAGE_MULTIPLE_BYTES * STORAGE_MULTIPLE_BYTES;
    check(claystone_storage_new(device, rounded, &made));
    return StorageHandle(made, ReleaseStorage());
}

// The memory that a data pointer stands for.
struct Block {
    Block(int device, size_t nbytes) : device(device), nbytes(nbytes), range(addresses().take(nbytes, this)), address(range->first) {}
    ~Block() {
        if (held) {
            report(-int64_t(nbytes));
        }
        addresses().give(range, nbytes);
    }

    StorageHandle storage() {
        StorageHandle made; // released after the lock if another thread's storage was first
        std::unique_lock lock(mutex);
        if (!held) {
            lock.unlock(); // observers of a failed allocation may use this block
            made = new_storage(device, nbytes);
            lock.lock();
        }
        const auto now = current_stream(index());
        if (held) {
            record_locked(now);
        } else {
            held.swap(made);
            stream = recorded = now.id();
            report(nbytes);
        }
        is_captured |= is_capturing();
        return held;
    }

    // Replaces the storage by one that was made on this thread's current stream. Returns whether it did: a graph's commands refer to the
    // storages that the capture used, so these stay.
    bool replace(StorageHandle storage) {
        std::lock_guard lock(mutex);
        if (held && (is_captured || is_capturing())) {
            return false;
        }
        is_captured = is_capturing();
        held.swap(storage); // the old one is released after the lock
        if (!storage) {
            report(nbytes);
        }
        stream = recorded = current_stream(index()).id();
        return true;
    }

    // Replaces the storage, also if a graph's commands refer to it.
    void move(StorageHandle storage, bool captured) {
        std::lock_guard lock(mutex);
        if (!held) {
            report(nbytes);
        }
        held.swap(storage);
        stream = recorded = current_stream(index()).id();
        is_captured = captured;
    }

    // The storage, which is null before its first use, and whether a graph's commands refer to it.
    std::pair<StorageHandle, bool> peek() {
        std::lock_guard lock(mutex);
        return {held, is_captured};
    }

    // Declares that the memory is used on this stream.
    void record(const c10::Stream& user) {
        std::lock_guard lock(mutex);
        if (held) {
            record_locked(user);
        }
    }

    c10::DeviceIndex index() const { return device == CLAYSTONE_CPU ? 0 : device; }

    const int device;
    const size_t nbytes;
    Addresses::Range* const range;
    void* const address;

private:
    // Reports allocated and freed bytes, as PyTorch's tensors count them, to PyTorch's profiler.
    void report(int64_t bytes) const {
        static std::atomic<int64_t> total = 0;
        const int64_t now = total += bytes;
        c10::reportMemoryUsageToProfiler(address, bytes, now, now, c10::Device(c10::DeviceType::PrivateUse1, index()));
    }

    // Memory belongs to the stream of its first use. A use on any other stream is recorded even if the user does not call record_stream.
    void record_locked(const c10::Stream& user) {
        if (user.id() != stream && user.id() != recorded) {
            check(claystone_storage_record_stream(held.get(), stream_handle(user)));
            recorded = user.id();
        }
    }

    std::mutex mutex;
    StorageHandle held;
    int64_t stream = 0;   // the stream that the storage was made on
    int64_t recorded = 0; // the stream that was recorded last
    bool is_captured = false; // true if the storage was used while a graph was captured
};

void delete_block(void* block) {
    if (!is_forked()) {
        delete static_cast<Block*>(block);
    }
}

c10::DataPtr data_pointer(Block* block) {
    return {block->address, block, &delete_block, c10::Device(c10::DeviceType::PrivateUse1, block->index())};
}


// The block that contains a data pointer; null if the pointer belongs to another allocator.
Block* block_of(const c10::DataPtr& pointer) {
    return pointer.get_deleter() == &delete_block ? static_cast<Block*>(pointer.get_context()) : addresses().owner(pointer.get());
}

// A tensor's block, and the offset of the tensor's storage in it, in bytes. The offset is not 0 only for tensors made from an address.
std::pair<Block&, size_t> block_and_offset(const at::TensorBase& tensor) {
    const auto& pointer = tensor.storage().data_ptr();
    Block* block = block_of(pointer);
    const size_t before = block ? static_cast<const char*>(pointer.get()) - static_cast<const char*>(block->address) : 0;
    TORCH_CHECK(block && before + tensor.storage().nbytes() <= block->nbytes, "claystone: the address of a tensor does not belong to this device");
    return {*block, before};
}

// Makes a u8 tensor of `length` bytes of a storage.
TensorHandle bytes_of(const StorageHandle& storage, size_t offset, size_t length) {
    ClaystoneTensor* made = nullptr;
    const int64_t size = length, stride = 1;
    check(claystone_tensor_new(storage.get(), CLAYSTONE_DTYPE_U8, &size, &stride, 1, offset, &made));
    return own(made);
}

TensorHandle bytes_at(const void* address, size_t length) {
    Block* const block = addresses().owner(address);
    const size_t before = block ? static_cast<const char*>(address) - static_cast<const char*>(block->address) : 0;
    TORCH_CHECK(block && before + length <= block->nbytes, "claystone: an address does not belong to this device");
    return bytes_of(block->storage(), before, length);
}

// Converts claystone's statistics to PyTorch's. PyTorch versions differ in their members.
template <typename Stats>
Stats to_device_stats(const std::map<std::string, int64_t>& values, c10::DeviceIndex index) {
    Stats stats;
    const auto stat = [&](const std::string& name) { return to_stat(values, name); };
    const auto by_pool = [&](const std::string& name) {
        return c10::CachingAllocator::StatArray{stat(name + ".all"), stat(name + ".small_pool"), stat(name + ".large_pool")};
    };
    stats.allocation = by_pool("allocation");
    stats.segment = by_pool("segment");
    stats.active = by_pool("active");
    stats.inactive_split = by_pool("inactive_split");
    stats.allocated_bytes = by_pool("allocated_bytes");
    stats.reserved_bytes = by_pool("reserved_bytes");
    stats.active_bytes = by_pool("active_bytes");
    stats.inactive_split_bytes = by_pool("inactive_split_bytes");
    stats.requested_bytes = by_pool("requested_bytes");
    stats.oversize_allocations = stat("oversize_allocations");
    stats.oversize_segments = stat("oversize_segments");
    stats.num_alloc_retries = values.at("num_alloc_retries");
    stats.num_ooms = values.at("num_ooms");
    stats.num_sync_all_streams = values.at("num_sync_all_streams");
    stats.num_device_alloc = values.at("num_device_alloc");
    stats.num_device_free = values.at("num_device_free");
    stats.max_split_size = values.at("max_split_size");
    if constexpr (requires { stats.reserved_bytes_by_private_pools; }) {
        for (const auto& pool : pools_of(index)) {
            auto& reserved = stats.reserved_bytes_by_private_pools[pool->id()][0];
            reserved.current = reserved.peak = reserved.allocated = pool->stats().reserved_bytes;
        }
    }
    return stats;
}

struct Allocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t nbytes) override {
        return data_pointer(new Block(claystone_device(current_device()), nbytes));
    }
    // A data pointer's context is its block. The raw form has only the address, from which every use would have to search the block.
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* target, const void* source, std::size_t count) const override {
        if (count > 0) {
            check(claystone_tensor_copy(bytes_at(target, count).get(), bytes_at(source, count).get()));
        }
    }

    bool initialized() override { return !is_forked(); }
    void emptyCache(c10::MempoolId_t pool = {0, 0}) override {
        if (pool != c10::MempoolId_t{0, 0}) {
            return empty_pool(pool);
        }
        for (c10::DeviceIndex index = 0; index < device_count(); index++) {
            check(claystone_memory_empty_cache(claystone_device(index)));
        }
    }
    void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override { record_stream(pointer, stream); }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
        ClaystoneBytes json;
        check(claystone_memory_stats(claystone_device(index), &json));
        return to_device_stats<c10::CachingDeviceAllocator::DeviceStats>(numbers(json), index);
    }
    void resetAccumulatedStats(c10::DeviceIndex index) override { check(claystone_memory_reset_accumulated(claystone_device(index))); }
    void resetPeakStats(c10::DeviceIndex index) override { check(claystone_memory_reset_peak(claystone_device(index))); }
    // No `override`: not every PyTorch version that builds has this method.
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) { return memory_info(index); }
};

c10::Storage storage_over(Block* block) {
    return {c10::Storage::use_byte_size_t(), block->nbytes, data_pointer(block), allocator(), /*resizable=*/true};
}

StorageHandle storage_of(const TensorHandle& tensor) {
    ClaystoneStorage* storage = nullptr;
    check(claystone_tensor_storage(tensor.get(), &storage));
    return StorageHandle(storage, ReleaseStorage());
}

} // namespace

void record_stream(const c10::DataPtr& pointer, const c10::Stream& stream) {
    if (Block* block = block_of(pointer)) {
        block->record(stream);
    }
}

c10::Allocator* allocator() {
    static auto* const one = new Allocator;
    return one;
}

bool is_ours(const at::TensorBase& tensor) {
    return tensor.defined() && tensor.device().is_privateuseone() && tensor.has_storage();
}

TensorHandle own(ClaystoneTensor* tensor) {
    return TensorHandle(tensor, ReleaseTensor());
}

TensorHandle handle(const at::TensorBase& tensor) {
    ClaystoneTensor* made = nullptr;
    const auto dtype = claystone_dtype(tensor.scalar_type());
    TORCH_CHECK(dtype, "claystone has no dtype ", tensor.scalar_type());
    const auto [block, before] = block_and_offset(tensor);
    const auto storage = block.storage();
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    // A tensor without elements may have any strides and an offset outside its storage.
    const bool empty = tensor.numel() == 0;
    const int64_t offset = empty ? 0 : before / tensor.itemsize() + tensor.storage_offset();
    const std::vector<int64_t> none(empty ? sizes.size() : 0);
    check(claystone_tensor_new(storage.get(), *dtype, sizes.data(), empty ? none.data() : strides.data(), sizes.size(), offset, &made));
    return own(made);
}

TensorHandle bytes(const at::TensorBase& tensor, size_t offset, size_t length) {
    const auto [block, before] = block_and_offset(tensor);
    return bytes_of(block.storage(), before + offset, length);
}

at::Tensor wrap(const TensorHandle& tensor) {
    return wrap(tensor, info(tensor));
}

at::Tensor wrap(const TensorHandle& tensor, const Info& known) {
    const auto& [what, sizes, strides] = known;
    auto* block = new Block(what.device, what.storage_nbytes);
    block->replace(storage_of(tensor));
    return tensor_of(storage_over(block), torch_dtype(what.dtype), sizes, strides, what.offset);
}

at::Tensor tensor_of(c10::Storage storage, at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dtype));
    result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return result;
}

GraphMemory graph_memory(const at::TensorBase& tensor) {
    const auto [block, before] = block_and_offset(tensor);
    auto [held, is_captured] = block.peek();
    return {std::move(held), block.device, block.nbytes, before == 0 && is_captured};
}

c10::Storage storage_of_graph(const GraphMemory& memory) {
    auto* block = new Block(memory.device, memory.nbytes);
    block->move(memory.storage, true);
    return storage_over(block);
}

void leave_graph(const c10::StorageImpl& storage, const GraphMemory& memory) {
    Block* const block = block_of(storage.data_ptr());
    if (!block || memory.storage == nullptr || block->peek().first != memory.storage) {
        return; // the PyTorch storage was resized
    }
    auto fresh = new_storage(block->device, block->nbytes);
    check(claystone_tensor_copy(bytes_of(fresh, 0, block->nbytes).get(), bytes_of(memory.storage, 0, block->nbytes).get()));
    block->move(std::move(fresh), false);
}

void move_storage(const at::Tensor& target, const at::Tensor& source) {
    const auto [block, before] = block_and_offset(target);
    const auto [other, other_before] = block_and_offset(source);
    TORCH_CHECK(before == 0 && other_before == 0 && block.nbytes == other.nbytes, "claystone: the storages have different sizes");
    TORCH_CHECK(block.replace(other.storage()), "claystone: a graph uses the storage that is to be replaced");
}

bool adopt(const at::TensorBase& target, const TensorHandle& result) {
    const auto [block, before] = block_and_offset(target);
    const auto made = info(result);
    const size_t nbytes = target.nbytes();
    if (before != 0 || target.storage_offset() != 0 || made.tensor.offset != 0 || target.storage().nbytes() > nbytes || block.nbytes > nbytes + STORAGE_MULTIPLE_BYTES ||
        made.tensor.device != block.device || nbytes == 0 || torch_dtype(made.tensor.dtype) != target.scalar_type() ||
        !made.is_contiguous() || !target.is_contiguous()) {
        return false;
    }
    const size_t held = made.tensor.storage_nbytes;
    if (held < nbytes || held > nbytes + STORAGE_MULTIPLE_BYTES) {
        return false;
    }
    return block.replace(storage_of(result));
}

bool share_storage(const TensorHandle& a, const TensorHandle& b) {
    bool same = false;
    check(claystone_tensor_shares_storage(a.get(), b.get(), &same));
    return same;
}

} // namespace claystone_torch
