// PyTorch's device guard and hooks: the current device, its streams and its generators.
#include "storage.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "generator.h"
#include "pinned.h"
#include "streams.h"

namespace claystone_torch {
namespace {

thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
    c10::Device getDevice() const override { return {type(), current}; }
    c10::Device exchangeDevice(c10::Device device) const override {
        const auto before = getDevice();
        setDevice(device);
        return before;
    }
    void setDevice(c10::Device device) const override {
        claystone_device(device.index()); // throws if there is no such device
        current = device.index();
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
    c10::DeviceIndex deviceCount() const noexcept override {
        try {
            return device_count();
        } catch (...) {
            return 0;
        }
    }

    c10::Stream getStream(c10::Device device) const override { return current_stream(device.index() < 0 ? current : device.index()); }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return c10::Stream(c10::Stream::DEFAULT, {type(), device.index() < 0 ? current : device.index()});
    }
    c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool urgent) const override { return getNewStream(device, urgent ? -1 : 0); }
    c10::Stream getNewStream(c10::Device device, int priority) const override {
        return new_stream(device.index() < 0 ? current : device.index(), priority);
    }
    // No `override`: PyTorch 2.9 does not have this method.
    void* getStreamNativeHandle(const c10::Stream stream) const { return stream_handle(stream); }
    // No `override`: PyTorch 2.9 does not have these methods.
    bool isStreamCapturing(const c10::Stream& stream) const { return captured_stream() == stream; }
#if __has_include(<c10/core/DeviceCapability.h>)
    c10::DeviceCapability getDeviceCapability(c10::Device) const {
        static_assert(c10::kIndex_BFloat16 == int(at::kBFloat16), "the bits have the numbers of the dtypes");
        c10::DeviceCapability capability;
        capability.capability_data.capability_bits = 0;
        for (int dtype = 0; dtype < int(at::ScalarType::NumOptions); dtype++) {
            if (claystone_dtype(at::ScalarType(dtype))) {
                capability.capability_data.capability_bits |= uint64_t(1) << dtype;
            }
        }
        return capability;
    }
#endif
    bool queryStream(const c10::Stream& stream) const override {
        bool done = false;
        check(claystone_stream_query(stream_handle(stream), &done));
        return done;
    }
    void synchronizeStream(const c10::Stream& stream) const override { check(claystone_stream_synchronize(stream_handle(stream))); }
    void synchronizeDevice(const c10::DeviceIndex index) const override { check(claystone_device_synchronize(claystone_device(index))); }
    void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override { record_stream(pointer, stream); }

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index, const c10::EventFlag flag) const override {
        TORCH_CHECK(index < 0 || index == stream.device_index(), "an event of claystone:", int(index), " is not recorded on ", stream);
        const auto make = flag == c10::EventFlag::BACKEND_DEFAULT ? claystone_stream_record_timed_event : claystone_stream_record_event;
        ClaystoneEvent* made = nullptr;
        check(make(stream_handle(stream), &made));
        destroyEvent(std::exchange(*event, made), index);
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        if (!is_forked()) {
            claystone_event_release(static_cast<ClaystoneEvent*>(event));
        }
    }
    void block(void* event, const c10::Stream& stream) const override {
        check(claystone_stream_wait_event(stream_handle(stream), static_cast<ClaystoneEvent*>(event)));
    }
    bool queryEvent(void* event) const override {
        bool done = true;
        if (event != nullptr) {
            check(claystone_event_query(static_cast<ClaystoneEvent*>(event), &done));
        }
        return done;
    }
    void synchronizeEvent(void* event) const override {
        if (event != nullptr) {
            check(claystone_event_synchronize(static_cast<ClaystoneEvent*>(event)));
        }
    }
    double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
        double milliseconds = 0;
        check(claystone_event_elapsed_time(static_cast<ClaystoneEvent*>(start), static_cast<ClaystoneEvent*>(end), &milliseconds));
        return milliseconds;
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return device_count(); }
    void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({c10::DeviceType::PrivateUse1, index}); }
    c10::DeviceIndex getCurrentDevice() const override { return current; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        return Guard().exchangeDevice({c10::DeviceType::PrivateUse1, index}).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
        return index < 0 ? current : exchangeDevice(index);
    }
    bool isPinnedPtr(const void* data) const override { return pinned_storage(data).first != nullptr; }
    at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override { resize_storage(storage, nbytes); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool registered = [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::SetAllocator(c10::DeviceType::PrivateUse1, allocator());
    return true;
}();

} // namespace

c10::DeviceIndex current_device() {
    return current;
}

} // namespace claystone_torch
