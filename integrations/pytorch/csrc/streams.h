// Streams and events. A stream of PyTorch's is a number: streams are kept as long as the process, and given again in turn.
#pragma once

#include "storage.h"

#include <c10/core/Stream.h>

namespace claystone_torch {

// The stream of this number. It throws where there is none.
ClaystoneStream* stream_handle(const c10::Stream& stream);
// That of this thread's work on a device.
c10::Stream current_stream(c10::DeviceIndex index);
// Makes it that one, and gives the one before.
c10::Stream exchange_stream(const c10::Stream& stream);
// A stream for new work. Below 0 it is urgent, above 0 it has time.
c10::Stream new_stream(c10::DeviceIndex index, int priority);
// The memory that a data pointer stands for is used on the stream, too: it goes to others after what was submitted there.
void record_stream(const c10::DataPtr& pointer, const c10::Stream& stream);

} // namespace claystone_torch
