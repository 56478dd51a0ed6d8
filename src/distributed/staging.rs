//! Staging buffers in host memory for the slices of a collective, and the pipeline that reads, exchanges and writes the slices.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::Builder;

use super::engine::recv_spinning;
use crate::internal::lock;
use crate::{DType, Device, Error, HostArray, Result, Stream, Tensor, with_stream};

/// The number of slices in flight: one is read, one is exchanged, and one is written.
const SLICES_IN_FLIGHT: usize = 3;

/// A buffer in host memory. It is pinned if the device is an OpenCL device.
pub(super) struct Staging {
    /// The memory. `None` during a copy, which owns it.
    host: Option<HostArray<u8>>,
    device: Device,
}

impl Staging {
    fn new(bytes: usize, device: Device) -> Result<Staging> {
        let host = Tensor::zeros(bytes, (DType::U8, Device::HOST))?;
        let host = if device.is_host() { host } else { host.pin_memory(device)? };
        Ok(Staging { host: Some(host.into_host()?), device })
    }

    fn len(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.len())
    }

    fn bytes(&mut self) -> &mut [u8] {
        self.host.as_mut().expect("whole between copies")
    }

    /// Copies a range of `from` to offset `at` of the buffer.
    pub(super) fn read(&mut self, at: usize, from: &Tensor, range: Range<usize>) -> Result<()> {
        self.copy(|host| byte_range(host, at..at + range.len())?.copy_(&byte_range(from, range)?).map(|_| ()))
    }

    /// Copies from offset `at` of the buffer to a range of `to`.
    pub(super) fn write(&mut self, at: usize, to: &Tensor, range: Range<usize>) -> Result<()> {
        self.copy(|host| byte_range(to, range.clone())?.copy_(&byte_range(host, at..at + range.len())?).map(|_| ()))
    }

    /// Does the same as [`read`](Self::read); the range is in the concatenation of all tensors in `from`.
    pub(super) fn read_all(&mut self, from: &[Tensor], range: Range<usize>) -> Result<()> {
        each_part(from, range, |at, tensor, range| self.read(at, tensor, range))
    }

    /// Does the same as [`write`](Self::write); the range is in the concatenation of all tensors in `to`.
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

/// Cuts a range of concatenated tensors at tensor boundaries. Calls `f` with each part's offset in the range, tensor, and range in the tensor.
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

fn byte_range(bytes: &Tensor, range: Range<usize>) -> Result<Tensor> {
    bytes.narrow(0, range.start, range.len())
}

/// A thread that runs functions in order. It ends when this handle is dropped.
struct Worker(Sender<Box<dyn FnOnce() + Send>>);

impl Worker {
    fn start(name: &str) -> Result<Worker> {
        let (jobs, todo) = channel::<Box<dyn FnOnce() + Send>>();
        let body = move || {
            while let Ok(job) = recv_spinning(&todo) {
                job();
            }
        };
        let thread = Builder::new().name(name.into()).spawn(body);
        thread.map_err(|e| Error::invalid("distributed", format!("no thread can be started: {e}")))?;
        Ok(Worker(jobs))
    }

    /// Runs `job` and returns a channel that gets its result. If `job` panics, the thread ends and the channel is closed without a result.
    fn submit(&self, job: impl FnOnce() -> Result<()> + Send + 'static) -> Receiver<Result<()>> {
        let (done, result) = channel();
        let _ = self.0.send(Box::new(move || drop(done.send(job())))); // fails and drops `done` if the thread has ended
        result
    }
}

/// The threads that copy slices while another slice is exchanged.
struct Copiers {
    device: Device,
    reader: Worker,
    writer: Worker,
    /// A separate stream for writes, so that they overlap reads.
    writing: Stream,
}

impl Copiers {
    fn start(device: Device) -> Result<Copiers> {
        let (reader, writer) = (Worker::start("claystone-read")?, Worker::start("claystone-write")?);
        Ok(Copiers { device, reader, writer, writing: Stream::new(device)? })
    }
}

/// A group's staging buffers and copying threads. They are kept between collectives, because pinning memory and starting threads is slow.
#[derive(Default)]
pub(super) struct SlicePipeline {
    pool: Arc<Pool>,
    copiers: Mutex<Option<Copiers>>,
}

/// The staging buffers that are not in use.
#[derive(Default)]
struct Pool(Mutex<Vec<Staging>>);

impl Pool {
    /// Takes a buffer of at least `bytes` bytes from the pool, or creates one.
    fn take(&self, bytes: usize, device: Device) -> Result<Staging> {
        let mut kept = lock(&self.0);
        match kept.iter().position(|one| one.device == device && one.len() >= bytes) {
            Some(at) => Ok(kept.swap_remove(at)),
            None => Staging::new(bytes.next_power_of_two(), device),
        }
    }

    /// Returns a buffer to the pool. The pool keeps the [`SLICES_IN_FLIGHT`] largest buffers.
    fn return_buffer(&self, staging: Staging) {
        let mut kept = lock(&self.0);
        kept.push(staging);
        if kept.len() > SLICES_IN_FLIGHT {
            kept.sort_by_key(|one| std::cmp::Reverse(one.len()));
            kept.truncate(SLICES_IN_FLIGHT);
        }
    }
}

impl SlicePipeline {
    /// Runs a collective slice by slice, through staging buffers of `buffer` bytes: reads a slice from the device, exchanges it with the other
    /// ranks, and writes the result to the device. On an OpenCL device, these steps of three consecutive slices overlap, on two streams.
    pub(super) fn run_in_slices<R, E, W>(
        &self,
        device: Device,
        buffer: usize,
        slices: impl ExactSizeIterator<Item = Range<usize>> + Send + 'static,
        (read, mut exchange, write): (R, E, W),
    ) -> Result<()>
    where
        R: Fn(&mut Staging, Range<usize>) -> Result<()> + Send + 'static,
        E: FnMut(&mut [u8], Range<usize>) -> Result<()>,
        W: Fn(&mut Staging, Range<usize>) -> Result<()> + Send + 'static,
    {
        if !device.has_queues() || slices.len() < 2 {
            let mut staging = self.pool.take(buffer, device)?;
            for slice in slices {
                read(&mut staging, slice.clone())?;
                exchange(&mut staging.bytes()[..buffer], slice.clone())?;
                write(&mut staging, slice)?;
            }
            self.pool.return_buffer(staging);
            return Ok(());
        }
        let mut copiers = lock(&self.copiers);
        let Copiers { reader, writer, writing, .. } = match copiers.take().filter(|one| one.device == device) {
            Some(started) => copiers.insert(started),
            None => copiers.insert(Copiers::start(device)?),
        };
        let (reading, writing) = (Stream::current(device)?, writing.clone());
        // Writes wait for this event: commands enqueued earlier may still read the tensors that the collective writes.
        let submitted = reading.record_event()?;
        let (return_buffer, free) = channel();
        for _ in 0..SLICES_IN_FLIGHT {
            let _ = return_buffer.send(self.pool.take(buffer, device)?);
        }
        let (to_exchange, to_be_exchanged) = channel();
        let (to_write, to_be_written) = channel::<(Staging, Range<usize>)>();
        let pool = Arc::clone(&self.pool);
        // A failing step drops its channels, which ends the other two steps.
        let read = reader.submit(move || {
            with_stream(&reading, || {
                for slice in slices {
                    let Ok(mut staging) = recv_spinning(&free) else { break };
                    read(&mut staging, slice.clone())?;
                    if to_exchange.send((staging, slice)).is_err() {
                        break;
                    }
                }
                drop(to_exchange);
                free.into_iter().for_each(|staging| pool.return_buffer(staging));
                Ok(())
            })
        });
        let written = writer.submit(move || {
            with_stream(&writing, || {
                writing.wait_event(&submitted)?;
                while let Ok((mut staging, slice)) = recv_spinning(&to_be_written) {
                    write(&mut staging, slice)?;
                    let _ = return_buffer.send(staging); // fails if the reader has failed
                }
                writing.synchronize()
            })
        });
        let mut exchange_all = || {
            while let Ok((mut staging, slice)) = recv_spinning(&to_be_exchanged) {
                exchange(&mut staging.bytes()[..buffer], slice.clone())?;
                let _ = to_write.send((staging, slice)); // fails if the writer has failed; then the reader ends too
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
            *copiers = None; // a thread that has panicked cannot be used again, so new threads are started next time
        }
        read.and(written).and(exchanged)
    }
}
