//! Recording what a thread submits to an OpenCL device.

use crate::backend::opencl::fuse::{Changes, FormulaRecorder};
use crate::backend::problem::recording;
use crate::device::StreamId;
use crate::device::capture::{self, ReplayMode};
use crate::device::opencl::capture::Recorder;
use crate::device::opencl::replay::Replayer;
use crate::device::opencl::{self, ClDevice};
use crate::storage::Uses;
use crate::{Device, Result};

struct Recorded<T> {
    device: &'static ClDevice,
    work: T,
}

/// Begins to record.
pub(crate) fn start(device: Device) -> Result<Box<dyn recording::Recorder>> {
    let device = opencl::open_device(device)?;
    Ok(Box::new(Recorded { device, work: (Recorder::start(device)?, FormulaRecorder::start()) }))
}

impl recording::Recorder for Recorded<(Recorder, FormulaRecorder)> {
    fn finish(self: Box<Self>, uses: Uses) -> Box<dyn recording::Recording> {
        let Recorded { device, work: (recorder, formulas) } = *self;
        let Changes { left_out, others } = formulas.changes(&recorder, &uses);
        let mut recording = recorder.finish();
        recording.replace(&left_out, others);
        Box::new(Recorded { device, work: Replayer::new(device, recording) })
    }
}

impl recording::Recording for Recorded<Replayer> {
    fn len(&self) -> usize {
        self.work.len()
    }

    fn replay(&self) -> Result<()> {
        capture::refuse(self.device.device(), "Graph::replay", "graphs are not made of graphs")?;
        self.work.replay(self.device)
    }

    fn mode(&self) -> ReplayMode {
        self.work.mode()
    }

    fn set_mode(&mut self, mode: ReplayMode) -> Result<()> {
        self.work.set_mode(self.device, mode)
    }

    fn drain(&self, stream: StreamId) {
        let _ = self.device.drain_stream(stream); // an error is a lost device, which runs nothing any more
    }
}
