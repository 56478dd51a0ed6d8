//! Bytes of the host that tensors' slices are copied to and from, and how the slices of a collective follow each other.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use super::engine::receive_soon;
use crate::{DType, Device, Error, HostArray, Result, Stream, Tensor, with_stream};

/// Slices under way at a time: one each that is read, exchanged and written.
const UNDER_WAY: usize = 3;

/// A buffer of the host: pinned where the device is one of OpenCL's.
pub(super) struct Staging {
    /// None while it is copied to or from.
    host: Option<HostArray<u8>>,
    device: Device,
}

impl Staging {
    fn new(bytes: usize, device: Device) -> Result<Staging> {
        let host = Tensor::zeros(bytes, (DType::U8, Device::Cpu))?;
        let host = if device.is_cpu() { host } else { host.pin_memory(device)? };
        Ok(Staging { host: Some(host.into_host()?), device })
    }

    fn len(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.len())
    }

    fn bytes(&mut self) -> &mut [u8] {
        self.host.as_mut().expect("whole between copies")
    }

    /// Copies from these bytes of `from` to those from `at` on.
    pub(super) fn read(&mut self, at: usize, from: &Tensor, range: Range<usize>) -> Result<()> {
        self.copy(|host| part(host, at..at + range.len())?.copy_(&part(from, range)?).map(|_| ()))
    }

    /// Copies to these bytes of `to` from those from `at` on.
    pub(super) fn write(&mut self, at: usize, to: &Tensor, range: Range<usize>) -> Result<()> {
        self.copy(|host| part(to, range.clone())?.copy_(&part(host, at..at + range.len())?).map(|_| ()))
    }

    /// [`read`](Self::read) from tensors that are one after another.
    pub(super) fn read_all(&mut self, from: &[Tensor], range: Range<usize>) -> Result<()> {
        each_part(from, range, |at, tensor, range| self.read(at, tensor, range))
    }

    /// [`write`](Self::write) to tensors that are one after another.
    pub(super) fn write_all(&mut self, to: &[Tensor], range: Range<usize>) -> Result<()> {
        each_part(to, range, |at, tensor, range| self.write(at, tensor, range))
    }

    fn copy(&mut self, f: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
        let host = self.host.take().expect("whole between copies").into_tensor();
        let copied = f(&host);
        self.host = Some(host.into_host()?);
        copied
    }
}

/// Calls `f` with what each of the tensors, one after another, has of a range: where that begins in the range, the tensor, and
/// its own bytes.
fn each_part(
    tensors: &[Tensor],
    range: Range<usize>,
    mut f: impl FnMut(usize, &Tensor, Range<usize>) -> Result<()>,
) -> Result<()> {
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.numel();
        let (from, to) = (range.start.max(start), range.end.min(end));
        if from < to {
            f(from - range.start, tensor, from - start..to - start)?;
        }
        start = end;
    }
    Ok(())
}

fn part(bytes: &Tensor, range: Range<usize>) -> Result<Tensor> {
    bytes.narrow(0, range.start, range.len())
}

/// What a collective does with each slice.
pub(super) struct Steps<R, E, W> {
    /// Brings it from the device to the host.
    pub read: R,
    /// Exchanges it with the other ranks.
    pub exchange: E,
    /// Brings what came of it back to the device.
    pub write: W,
}

/// A thread that does one job after another, and ends with its handle.
struct Worker(Sender<Box<dyn FnOnce() + Send>>);

impl Worker {
    fn start(name: &str) -> Result<Worker> {
        let (jobs, todo) = channel::<Box<dyn FnOnce() + Send>>();
        let body = move || {
            while let Ok(job) = receive_soon(&todo) {
                job();
            }
        };
        let thread = Builder::new().name(name.into()).spawn(body);
        thread.map_err(|e| Error::invalid("distributed", format!("no thread can be started: {e}")))?;
        Ok(Worker(jobs))
    }

    /// What comes of a job. Where it panics the thread has ended, and there is none.
    fn run(&self, job: impl FnOnce() -> Result<()> + Send + 'static) -> Receiver<Result<()>> {
        let (done, result) = channel();
        let _ = self.0.send(Box::new(move || drop(done.send(job())))); // where the thread has ended, nothing is received
        result
    }
}

/// What copies slices beside their exchange.
struct Copiers {
    device: Device,
    reader: Worker,
    writer: Worker,
    /// What is written, beside what is read.
    writing: Stream,
}

impl Copiers {
    fn start(device: Device) -> Result<Copiers> {
        let (reader, writer) = (Worker::start("claystone-read")?, Worker::start("claystone-write")?);
        Ok(Copiers { device, reader, writer, writing: Stream::new(device)? })
    }
}

/// The buffers of a group's collectives, three of the largest slice at most, and the threads that copy to and from them, kept from
/// one to the next: pinned memory takes long to make, and a thread to start.
#[derive(Default)]
pub(super) struct Buffers {
    kept: Arc<Kept>,
    copiers: Mutex<Option<Copiers>>,
}

#[derive(Default)]
struct Kept(Mutex<Vec<Staging>>);

impl Kept {
    fn lock(&self) -> MutexGuard<'_, Vec<Staging>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One of at least so many bytes.
    fn take(&self, bytes: usize, device: Device) -> Result<Staging> {
        let mut kept = self.lock();
        match kept.iter().position(|one| one.device == device && one.len() >= bytes) {
            Some(at) => Ok(kept.swap_remove(at)),
            None => Staging::new(bytes.next_power_of_two(), device),
        }
    }

    /// Keeps the largest.
    fn give_back(&self, staging: Staging) {
        let mut kept = self.lock();
        kept.push(staging);
        if kept.len() > UNDER_WAY {
            kept.sort_by_key(|one| std::cmp::Reverse(one.len()));
            kept.truncate(UNDER_WAY);
        }
    }
}

impl Buffers {
    /// Does the steps of a collective slice by slice, through staging buffers of so many bytes. On an OpenCL device a slice is
    /// exchanged while the next one is read and the last one is written, each on a stream of its own.
    pub(super) fn in_slices<R, E, W>(
        &self,
        device: Device,
        buffer: usize,
        slices: impl ExactSizeIterator<Item = Range<usize>> + Send + 'static,
        steps: Steps<R, E, W>,
    ) -> Result<()>
    where
        R: Fn(&mut Staging, Range<usize>) -> Result<()> + Send + 'static,
        E: FnMut(&mut [u8], Range<usize>) -> Result<()>,
        W: Fn(&mut Staging, Range<usize>) -> Result<()> + Send + 'static,
    {
        let Steps { read, mut exchange, write } = steps;
        if device.is_cpu() || slices.len() < 2 {
            let mut staging = self.kept.take(buffer, device)?;
            for slice in slices {
                read(&mut staging, slice.clone())?;
                exchange(&mut staging.bytes()[..buffer], slice.clone())?;
                write(&mut staging, slice)?;
            }
            self.kept.give_back(staging);
            return Ok(());
        }
        let mut copiers = self.copiers.lock().unwrap_or_else(PoisonError::into_inner);
        let Copiers { reader, writer, writing, .. } = match copiers.take().filter(|one| one.device == device) {
            Some(started) => copiers.insert(started),
            None => copiers.insert(Copiers::start(device)?),
        };
        let (reading, writing) = (Stream::current(device)?, writing.clone());
        // What was submitted before may still read what is written.
        let submitted = reading.record_event()?;
        let (give_back, free) = channel();
        for _ in 0..UNDER_WAY {
            let _ = give_back.send(self.kept.take(buffer, device)?);
        }
        let (to_exchange, to_be_exchanged) = channel();
        let (to_write, to_be_written) = channel::<(Staging, Range<usize>)>();
        let kept = Arc::clone(&self.kept);
        // A step that fails drops its ends of the channels, which ends the others.
        let read = reader.run(move || {
            with_stream(&reading, || {
                for slice in slices {
                    let Ok(mut staging) = receive_soon(&free) else { break };
                    read(&mut staging, slice.clone())?;
                    if to_exchange.send((staging, slice)).is_err() {
                        break;
                    }
                }
                drop(to_exchange);
                free.into_iter().for_each(|staging| kept.give_back(staging));
                Ok(())
            })
        });
        let written = writer.run(move || {
            with_stream(&writing, || {
                writing.wait_event(&submitted)?;
                while let Ok((mut staging, slice)) = receive_soon(&to_be_written) {
                    write(&mut staging, slice)?;
                    let _ = give_back.send(staging); // the reader may have failed
                }
                writing.synchronize()
            })
        });
        let mut exchange_all = || {
            while let Ok((mut staging, slice)) = receive_soon(&to_be_exchanged) {
                exchange(&mut staging.bytes()[..buffer], slice.clone())?;
                let _ = to_write.send((staging, slice)); // where the writer has failed, the reader ends too
            }
            Ok(())
        };
        let exchanged = exchange_all();
        drop((to_be_exchanged, to_write));
        let ended = |result: Receiver<Result<()>>| {
            result.recv().unwrap_or_else(|_| Err(Error::invalid("distributed", "a thread that copies slices panicked")))
        };
        let (read, written) = (ended(read), ended(written));
        if read.is_err() || written.is_err() {
            *copiers = None; // one that has panicked is of no more use
        }
        read.and(written).and(exchanged)
    }
}
