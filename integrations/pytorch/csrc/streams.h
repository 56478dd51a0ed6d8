// Streams and events. PyTorch identifies a stream by a number: streams live as long as the process and are reused in turn.
#pragma once

#include "storage.h"

#include <c10/core/Stream.h>

namespace claystone_torch {

// Returns the stream of this number. Throws if there is none.
ClaystoneStream* stream_handle(const c10::Stream& stream);
// This thread's current stream on a device.
c10::Stream current_stream(c10::DeviceIndex index);
// Sets this thread's current stream and returns the previous one.
c10::Stream exchange_stream(const c10::Stream& stream);
// The stream whose work this thread is capturing as a graph, if any.
std::optional<c10::Stream>& captured_stream();
// Returns a stream from the pool. A priority below 0 is more urgent, above 0 less.
c10::Stream new_stream(c10::DeviceIndex index, int priority);
// Declares that the memory of a data pointer is used on the stream, so that it is reused only after the work submitted there.
void record_stream(const c10::DataPtr& pointer, const c10::Stream& stream);

} // namespace claystone_torch
