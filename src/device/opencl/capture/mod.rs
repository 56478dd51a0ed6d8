//! Recording of a thread's commands on a device, to be submitted repeatedly.
//!
//! While a [`Recorder`] exists on a thread, the thread's kernels, fills and copies on its device are recorded instead of
//! enqueued. Each recorded kernel is a kernel object of its own, whose arguments are set once. [`replay`] enqueues all commands
//! under one lock, from the host, as a [`command_buffer`] or with a [`recordable_queue`].

mod command_buffer;
mod recordable_queue;
pub(crate) mod replay;

use std::cell::RefCell;

use opencl3::types::cl_mem;

use super::ClDevice;
use super::driver::{ClKernel, send_and_sync};
use super::fault::FaultSlot;
use super::launch::{Arg, records_faults, set_arg};
use crate::Result;
use crate::device::{Device, StreamId, capture};

/// The recorded commands. The owner of a recording must keep the commands' buffers alive.
pub(crate) struct Recording {
    device: &'static ClDevice,
    stream: StreamId,
    commands: Vec<Command>,
    /// The number of commands that count as launches.
    launches: u64,
    /// The slot in which the kernels record faults; `None` if no kernel can record a fault.
    faults: Option<&'static FaultSlot>,
}

/// Changes to recorded commands, each given by its index in the recording.
#[derive(Default)]
pub(crate) struct Changes {
    pub(crate) removed_commands: Vec<usize>,
    /// Kernel launches to replace, by index, and the launches that replace them.
    pub(crate) replaced_commands: Vec<(usize, Command)>,
}

/// A recorded command with its arguments.
pub(crate) enum Command {
    Kernel { kernel: ClKernel, dims: usize, global: [usize; 3], local: [usize; 3] },
    Fill { to: cl_mem, offset: usize, bytes: usize, pattern: [u8; 16], length: usize },
    Copy { from: (cl_mem, usize), to: (cl_mem, usize), bytes: usize },
}

send_and_sync!(Recording);

impl Command {
    fn is_kernel(&self) -> bool {
        matches!(self, Command::Kernel { .. })
    }
}

thread_local! {
    static RECORDER: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Records this thread's commands until dropped.
pub(crate) struct Recorder(());

impl Recorder {
    /// Starts to record the commands that this thread submits to the device.
    pub(crate) fn start(device: &'static ClDevice) -> Result<Recorder> {
        capture::begin(device.device())?;
        let stream = device.current_stream();
        RECORDER.set(Some(Recording { device, stream, commands: Vec::new(), launches: 0, faults: None }));
        Ok(Recorder(()))
    }

    /// Runs `f` and removes its commands from the recording. Returns the command if `f` made exactly one.
    pub(crate) fn capture_single(&self, f: impl FnOnce() -> Result<()>) -> Option<Command> {
        let (before, launches) = RECORDER.with_borrow(|r| r.as_ref().map(|r| (r.commands.len(), r.launches)))?;
        let made = f();
        RECORDER.with_borrow_mut(|recorder| {
            let recording = recorder.as_mut()?;
            recording.launches = launches;
            let mut made = made.is_ok().then(|| recording.commands.split_off(before));
            recording.commands.truncate(before);
            made.take_if(|commands| commands.len() == 1)?.pop()
        })
    }

    pub(crate) fn finish(self) -> Recording {
        RECORDER.take().expect("there as long as the recorder is")
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        capture::end();
        drop(RECORDER.take());
    }
}

impl Recording {
    pub(crate) fn with_changes(mut self, Changes { removed_commands, replaced_commands }: Changes) -> Recording {
        let mut commands: Vec<Option<Command>> = self.commands.into_iter().map(Some).collect();
        removed_commands.iter().for_each(|&at| commands[at] = None);
        replaced_commands.into_iter().for_each(|(at, command)| commands[at] = Some(command));
        self.commands = commands.into_iter().flatten().collect();
        self.launches -= removed_commands.len() as u64;
        self
    }
}

/// Makes every replay count one more launch; returns false if this thread is not recording.
pub(super) fn count_launch(device: Device) -> bool {
    let recording = capture::is_capturing(device);
    if recording {
        RECORDER.with_borrow_mut(|recorder| recorder.iter_mut().for_each(|recording| recording.launches += 1));
    }
    recording
}

/// Records a command with the arguments that `command` returns.
pub(super) fn record_command(device: &ClDevice, command: impl FnOnce(&mut Recording) -> Result<Command>) -> Result<()> {
    RECORDER.with_borrow_mut(|recorder| {
        let recording = recorder.as_mut().expect("asked before");
        let is_other = recording.stream != device.current_stream();
        invalid!("Graph::capture" if is_other, "work on another stream cannot be captured");
        let command = command(recording)?;
        recording.commands.push(command);
        capture::count_command();
        Ok(())
    })
}

/// Records a kernel launch. `global` is a multiple of `local` in each dimension.
pub(super) fn record_kernel(
    device: &ClDevice,
    kernel: &ClKernel,
    args: &[Arg<'_>],
    global: &[usize],
    local: &[usize],
) -> Result<()> {
    record_command(device, |recording| {
        if records_faults(args) {
            recording.faults = Some(device.slot());
        }
        let kernel = kernel.duplicate().map_err(|e| device.error(e))?;
        for (i, arg) in args.iter().enumerate() {
            set_arg(&kernel, i as u32, arg).map_err(|e| device.error(e))?;
        }
        let whole = |sizes: &[usize]| std::array::from_fn(|d| sizes.get(d).copied().unwrap_or(1));
        Ok(Command::Kernel { kernel, dims: global.len(), global: whole(global), local: whole(local) })
    })
}
