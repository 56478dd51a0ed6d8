// Conversions of statuses, dtypes, devices and tensor properties.
#include "storage.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <cstdlib>
#include <cstring>

namespace claystone_torch {
namespace {

constexpr std::pair<ClaystoneDtype, at::ScalarType> DTYPES[] = {
    {CLAYSTONE_DTYPE_F32, at::kFloat}, {CLAYSTONE_DTYPE_F16, at::kHalf},   {CLAYSTONE_DTYPE_BF16, at::kBFloat16},
    {CLAYSTONE_DTYPE_F64, at::kDouble}, {CLAYSTONE_DTYPE_I64, at::kLong},   {CLAYSTONE_DTYPE_I32, at::kInt},
    {CLAYSTONE_DTYPE_U8, at::kByte},    {CLAYSTONE_DTYPE_U32, at::kUInt32}, {CLAYSTONE_DTYPE_BOOL, at::kBool},
    {CLAYSTONE_DTYPE_I8, at::kChar},    {CLAYSTONE_DTYPE_I16, at::kShort},
};

// Lets segments of the CPU device grow in place unless CLAYSTONE_ALLOC_CONF is set, because a training step reserves less that way. The
// variable is read at the first use of a device, here, and is not left to child processes, which may use OpenCL.
void let_segments_grow() {
#ifdef __linux__
    const char* const name = "CLAYSTONE_ALLOC_CONF";
    if (std::getenv(name) == nullptr) {
        setenv(name, "expandable_segments:True", 0);
        const ClaystoneStatus status = claystone_memory_reset_peak(CLAYSTONE_CPU);
        unsetenv(name);
        check(status);
    }
#endif
}

// The number of OpenCL devices to use: 0 if CLAYSTONE_TORCH_DEVICE is `cpu`.
int opencl_devices() {
    static const int count = [] {
        const char* wanted = std::getenv("CLAYSTONE_TORCH_DEVICE");
        int32_t found = 0;
        if (wanted == nullptr || std::strcmp(wanted, "cpu") != 0) {
            check(claystone_device_count(&found));
        }
        if (found == 0) {
            let_segments_grow();
        }
        return found;
    }();
    return count;
}

bool forked = false;
const int noted = pthread_atfork(nullptr, nullptr, [] { forked = true; });

} // namespace

bool is_forked() {
    return forked;
}

void check(ClaystoneStatus status) {
    switch (status) {
        case CLAYSTONE_STATUS_OK:
            return;
        case CLAYSTONE_STATUS_OUT_OF_MEMORY:
            TORCH_CHECK_WITH(OutOfMemoryError, false, claystone_last_error());
        case CLAYSTONE_STATUS_INDEX:
        case CLAYSTONE_STATUS_KERNEL:
            TORCH_CHECK_INDEX(false, claystone_last_error());
        default:
            TORCH_CHECK(false, claystone_last_error());
    }
}

// Without OpenCL devices, the only device is claystone's CPU device.
int claystone_device(c10::DeviceIndex index) {
    TORCH_CHECK(index >= 0 && index < device_count(), "there is no device claystone:", int(index), ", only ", int(device_count()));
    return opencl_devices() == 0 ? CLAYSTONE_CPU : index;
}

c10::DeviceIndex device_count() {
    return static_cast<c10::DeviceIndex>(std::max(1, opencl_devices()));
}

std::optional<ClaystoneDtype> claystone_dtype(at::ScalarType dtype) {
    for (const auto& [ours, torchs] : DTYPES) {
        if (torchs == dtype) {
            return ours;
        }
    }
    return std::nullopt;
}

at::ScalarType torch_dtype(int dtype) {
    for (const auto& [ours, torchs] : DTYPES) {
        if (ours == dtype) {
            return torchs;
        }
    }
    TORCH_CHECK(false, "claystone's dtype ", dtype, " is unknown here");
}

Info info(const TensorHandle& tensor) {
    Info result;
    size_t room = 5;
    while (true) {
        result.sizes.resize(room);
        result.strides.resize(room);
        const auto status = claystone_tensor_info(tensor.get(), room, &result.tensor, result.sizes.data(), result.strides.data());
        if (result.tensor.rank <= room) {
            check(status);
            break;
        }
        room = result.tensor.rank;
    }
    result.sizes.resize(result.tensor.rank);
    result.strides.resize(result.tensor.rank);
    return result;
}

bool Info::is_contiguous() const {
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
        if (sizes[i] != 1 && strides[i] != stride) {
            return false;
        }
        stride *= sizes[i];
    }
    return true;
}

std::string take(ClaystoneBytes bytes) {
    std::string text(reinterpret_cast<const char*>(bytes.data), bytes.length);
    claystone_bytes_free(&bytes);
    return text;
}

} // namespace claystone_torch
