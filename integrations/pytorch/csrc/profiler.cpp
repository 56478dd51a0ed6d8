// Shows the device in torch.profiler: claystone's kernels and transfers with their times, each under the operator that launched it.
// claystone's profiler records while PyTorch's does, and this file passes its events to Kineto. Needs PyTorch 2.15 or later.
#include "storage.h"

#if __has_include(<torch/csrc/profiler/standalone/privateuse1_profiler.h>)
#define USE_KINETO // the wheel is built with it
#define FMT_HEADER_ONLY
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>

#include <libkineto.h>
#include <time_since_epoch.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>

namespace claystone_torch {
namespace {

using libkineto::ActivityType;
using Clock = std::chrono::steady_clock;

// The time spans of PyTorch's operators on the host while a profile is recorded.
class Operators {
public:
    void clear() {
        std::lock_guard lock(mutex);
        spans.clear();
    }
    void push(uint64_t id) {
        std::lock_guard lock(mutex);
        open().push_back(spans.size());
        spans.push_back({id, libkineto::systemThreadId(), Clock::now(), Clock::time_point::max()});
    }
    void pop() {
        std::lock_guard lock(mutex);
        if (!open().empty()) {
            if (open().back() < spans.size()) {
                spans[open().back()].end = Clock::now();
            }
            open().pop_back();
        }
    }
    struct Span {
        uint64_t id;
        int32_t thread;
        Clock::time_point begin, end;
    };
    // The innermost operator that ran at a moment: of nested spans the one that began last. The id is 0 if none ran.
    Span at(Clock::time_point moment) {
        std::lock_guard lock(mutex);
        auto above = std::upper_bound(spans.begin(), spans.end(), moment, [](auto value, const Span& span) { return value < span.begin; });
        while (above != spans.begin()) {
            --above;
            if (moment <= above->end) {
                return *above;
            }
        }
        return {};
    }

private:
    static std::vector<size_t>& open() {
        thread_local std::vector<size_t> indices;
        return indices;
    }
    std::mutex mutex;
    std::vector<Span> spans; // sorted by their begin
};

Operators& operators() {
    static auto* const all = new Operators;
    return *all;
}

std::optional<ActivityType> activity_type(const ClaystoneProfileEvent& event) {
    switch (event.category) {
        case CLAYSTONE_CATEGORY_KERNEL:
            return ActivityType::CONCURRENT_KERNEL;
        case CLAYSTONE_CATEGORY_COPY:
        case CLAYSTONE_CATEGORY_READ:
        case CLAYSTONE_CATEGORY_WRITE:
            return ActivityType::GPU_MEMCPY;
        case CLAYSTONE_CATEGORY_FILL:
            return ActivityType::GPU_MEMSET;
        case CLAYSTONE_CATEGORY_LAUNCH:
            return ActivityType::PRIVATEUSE1_RUNTIME;
        case CLAYSTONE_CATEGORY_OPERATION: // the CPU device computes within the call
            return event.device == CLAYSTONE_CPU ? std::optional(ActivityType::CONCURRENT_KERNEL) : std::nullopt;
        default:
            return std::nullopt;
    }
}

class Session final : public libkineto::IActivityProfilerSession {
public:
    ~Session() override { claystone_profile_release(profile); }

    void start() override {
        operators().clear();
        note(claystone_profiler_start());
        began = Clock::now();
        epoch = libkineto::timeSinceEpoch(std::chrono::system_clock::now());
        status_ = libkineto::TraceStatus::RECORDING;
    }
    void stop() override {
        note(claystone_profiler_stop(&profile));
        status_ = libkineto::TraceStatus::PROCESSING;
    }
    std::vector<std::string> errors() override { return failures; }

    void processTrace(libkineto::ActivityLogger& logger) override {
        processTrace(logger, [](int32_t) { return nullptr; }, 0, std::numeric_limits<int64_t>::max());
    }
    void processTrace(
        libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, int64_t start, int64_t end) override {
        size_t count = 0;
        if (profile == nullptr || claystone_profile_count(profile, &count) != CLAYSTONE_STATUS_OK) {
            return;
        }
        buffer = std::make_unique<libkineto::CpuTraceBuffer>();
        buffer->span = libkineto::TraceSpan(start, end, "claystone");
        std::vector<ClaystoneProfileEvent> events(count);
        std::map<uint64_t, int64_t> launches; // the start of each launch on the host
        for (size_t i = 0; i < count; i++) {
            note(claystone_profile_event(profile, i, &events[i]));
            if (events[i].category == CLAYSTONE_CATEGORY_LAUNCH) {
                launches[events[i].launch] = events[i].start;
            }
        }
        for (const auto& event : events) {
            const auto type = activity_type(event);
            if (!type || (!event.on_stream && event.device != CLAYSTONE_CPU && event.category != CLAYSTONE_CATEGORY_LAUNCH)) {
                continue;
            }
            const auto submitted = launches.find(event.launch);
            const int64_t called = submitted == launches.end() ? event.start : submitted->second;
            const auto caller = operators().at(began + std::chrono::nanoseconds(called));
            const bool on_host = event.category == CLAYSTONE_CATEGORY_LAUNCH;
            buffer->emplace_activity(buffer->span, *type, event.name);
            auto& activity = *buffer->activities.back();
            activity.startTime = epoch + event.start;
            activity.endTime = activity.startTime + event.duration;
            activity.id = static_cast<int32_t>(caller.id);
            activity.device = on_host ? libkineto::processId() : event.device == CLAYSTONE_CPU ? 0 : event.device;
            activity.resource = on_host ? caller.thread : event.on_stream ? event.lane : 0;
            activity.flow.id = static_cast<uint32_t>(event.launch);
            activity.flow.type = event.launch ? libkineto::kLinkAsyncCpuGpu : 0;
            activity.flow.start = on_host;
            activity.linked = caller.id ? linked(activity.id) : nullptr;
            activity.addMetadata("bytes", event.bytes);
            activity.log(logger);
            if (!on_host) {
                lanes.insert({activity.device, activity.resource});
            }
        }
    }

    std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
    std::vector<libkineto::ResourceInfo> getResourceInfos() override {
        std::vector<libkineto::ResourceInfo> infos;
        for (const auto& [device, lane] : lanes) {
            infos.push_back({lane, lane, device, "claystone:" + std::to_string(device) + " stream " + std::to_string(lane)});
        }
        return infos;
    }
    std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer); }
    void pushCorrelationId(uint64_t id) override { operators().push(id); }
    void popCorrelationId() override { operators().pop(); }

private:
    void note(ClaystoneStatus status) {
        if (status != CLAYSTONE_STATUS_OK) {
            failures.emplace_back(claystone_last_error());
        }
    }

    ClaystoneProfile* profile = nullptr;
    Clock::time_point began;
    int64_t epoch = 0; // `began` in Kineto's nanoseconds
    std::unique_ptr<libkineto::CpuTraceBuffer> buffer;
    std::set<std::pair<int64_t, int64_t>> lanes; // the devices and streams with events
    std::vector<std::string> failures;
};

class Profiler final : public libkineto::IActivityProfiler {
public:
    const std::string& name() const override {
        static const std::string name = "claystone";
        return name;
    }
    const std::set<ActivityType>& availableActivities() const override {
        static const std::set<ActivityType> types = {
            ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY, ActivityType::GPU_MEMSET, ActivityType::PRIVATEUSE1_RUNTIME};
        return types;
    }
    std::unique_ptr<libkineto::IActivityProfilerSession> configure(
        const std::set<ActivityType>& types, const libkineto::Config&) override {
        // A profile of the CPU alone does not start claystone's profiler.
        const bool wanted = std::any_of(types.begin(), types.end(), [this](auto type) { return availableActivities().count(type) > 0; });
        return wanted && !is_forked() ? std::make_unique<Session>() : nullptr;
    }
    std::unique_ptr<libkineto::IActivityProfilerSession> configure(
        int64_t, int64_t, const std::set<ActivityType>& types, const libkineto::Config& config) override {
        return configure(types, config);
    }
};

REGISTER_PRIVATEUSE1_PROFILER(Profiler);

} // namespace
} // namespace claystone_torch

#endif
