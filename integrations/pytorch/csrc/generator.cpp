// Random number generators. Their state is a seed and the number of draws.
#include "generator.h"
#include "storage.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <random>

namespace claystone_torch {
namespace {

struct Generator final : c10::GeneratorImpl {
    // A null handle is the process's default generator.
    Generator(c10::DeviceIndex index, ClaystoneGenerator* given)
        : c10::GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          handle(given) {}
    ~Generator() override { claystone_generator_release(handle); }

    std::pair<uint64_t, uint64_t> state() const {
        uint64_t seed = 0, draws = 0;
        check(claystone_generator_state(handle, &seed, &draws));
        return {seed, draws};
    }
    void set(uint64_t seed, uint64_t draws) { check(claystone_generator_set_state(handle, seed, draws)); }

    void set_current_seed(uint64_t seed) override { set(seed, 0); }
    void set_offset(uint64_t offset) override { set(state().first, offset); }
    uint64_t get_offset() const override { return state().second; }
    uint64_t current_seed() const override { return state().first; }
    uint64_t seed() override {
        std::random_device random;
        const uint64_t chosen = (uint64_t(random()) << 32 | random()) & 0x1FFFFFFFFFFFFF;
        set_current_seed(chosen);
        return chosen;
    }
    void set_state(const c10::TensorImpl& given) override {
        uint64_t numbers[2];
        TORCH_CHECK(
            given.numel() == sizeof numbers && given.dtype() == caffe2::TypeMeta::Make<uint8_t>() && given.is_contiguous() && given.is_cpu(),
            "the state of a generator of claystone is a contiguous ByteTensor of 16 elements on the CPU");
        std::memcpy(numbers, given.data(), sizeof numbers);
        set(numbers[0], numbers[1]);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        const auto [seed, draws] = state();
        const uint64_t numbers[2] = {seed, draws};
        auto result = at::empty({int64_t(sizeof numbers)}, at::TensorOptions().dtype(at::kByte));
        std::memcpy(result.mutable_data_ptr(), numbers, sizeof numbers);
        return result.getIntrusivePtr();
    }
    Generator* clone_impl() const override {
        const auto [seed, draws] = state();
        ClaystoneGenerator* made = nullptr;
        check(claystone_generator_new(seed, &made));
        auto* copy = new Generator(device().index(), made);
        copy->set(seed, draws);
        return copy;
    }

    ClaystoneGenerator* const handle;
};

} // namespace

const at::Generator& default_generator() {
    static const auto* const one = new at::Generator(c10::make_intrusive<Generator>(c10::DeviceIndex(0), nullptr));
    return *one;
}

at::Generator new_generator(c10::DeviceIndex index) {
    ClaystoneGenerator* made = nullptr;
    check(claystone_generator_new(c10::detail::getNonDeterministicRandom(), &made));
    return at::Generator(c10::make_intrusive<Generator>(index < 0 ? current_device() : index, made));
}

const ClaystoneGenerator* generator_handle(const at::Generator& generator) {
    if (!generator.defined()) {
        return nullptr;
    }
    TORCH_CHECK(generator.device().is_privateuseone(), "expected a generator of claystone, found one of ", generator.device());
    return static_cast<const Generator*>(generator.unsafeGetGeneratorImpl())->handle;
}

} // namespace claystone_torch
