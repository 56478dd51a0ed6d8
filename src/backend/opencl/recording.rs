//! Records the commands that a thread submits to an OpenCL device, for graph capture.

use crate::backend::opencl::fuse::{Changes, FormulaRecorder};
use crate::backend::problem::recording;
use crate::device::StreamId;
use crate::device::capture::{self, ReplayMode};
use crate::device::opencl::capture::Recorder;
use crate::device::opencl::replay::Replayer;
use crate::device::opencl::{self, ClDevice};
use crate::storage::StorageUses;
use crate::{Device, Result};

/// A device, with its recorders during a capture and its replayer afterwards.
struct DeviceRecording<T> {
    device: &'static ClDevice,
    work: T,
}

/// Begins to record this thread's commands.
pub(crate) fn start_recording(device: Device) -> Result<Box<dyn recording::Recorder>> {
    let device = opencl::open_device(device)?;
    Ok(Box::new(DeviceRecording { device, work: (Recorder::start(device)?, FormulaRecorder::start()) }))
}

impl recording::Recorder for DeviceRecording<(Recorder, FormulaRecorder)> {
    fn finish(self: Box<Self>, uses: StorageUses) -> Box<dyn recording::Recording> {
        let DeviceRecording { device, work: (recorder, formulas) } = *self;
        let Changes { removed_commands, replaced_commands } = formulas.changes(&recorder, &uses);
        let mut recording = recorder.finish();
        recording.replace(&removed_commands, replaced_commands);
        Box::new(DeviceRecording { device, work: Replayer::new(device, recording) })
    }
}

impl recording::Recording for DeviceRecording<Replayer> {
    fn len(&self) -> usize {
        self.work.len()
    }

    fn replay(&self) -> Result<()> {
        capture::refuse_while_capturing(
            self.device.device(),
            "Graph::replay",
            "a capture cannot contain the replay of another graph",
        )?;
        self.work.replay(self.device)
    }

    fn mode(&self) -> ReplayMode {
        self.work.mode()
    }

    fn set_mode(&mut self, mode: ReplayMode) -> Result<()> {
        self.work.set_mode(self.device, mode)
    }

    fn drain(&self, stream: StreamId) {
        let _ = self.device.drain_stream(stream); // an error means that the device is lost, and a lost device runs nothing
    }
}
