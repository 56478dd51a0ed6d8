// The device guard and the hooks: which device is current, its streams, its generators.
#include "storage.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>


#include "generator.h"

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
        claystone_device(device.index()); // throws where there is no such device
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

    // Everything runs on the default stream of its device, in order: events are done once the device is.
    c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
    c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
    void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    void synchronizeStream(const c10::Stream& stream) const override { synchronizeDevice(stream.device_index()); }
    void synchronizeDevice(const c10::DeviceIndex index) const override {
        check(claystone_device_synchronize(claystone_device(index)));
    }
    bool queryStream(const c10::Stream& stream) const override {
        ClaystoneStream* line = nullptr;
        bool done = false;
        check(claystone_stream_default(claystone_device(stream.device_index()), &line));
        const auto status = claystone_stream_query(line, &done);
        claystone_stream_release(line);
        check(status);
        return done;
    }
    bool queryEvent(void*) const override { return queryStream(getStream(getDevice())); }
    void synchronizeEvent(void*) const override { synchronizeDevice(current); }
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
