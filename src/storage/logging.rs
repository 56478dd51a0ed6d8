//! An allocator that logs every allocation.

use std::collections::HashMap;
use std::fmt;
use std::io::Write;
use std::sync::{Arc, Mutex};

use super::allocator::Allocator;
use super::block::Block;
use super::history::{CsvAction, CsvLog};
use super::registry;
use crate::device::StreamId;
use crate::device::lock;
use crate::{Device, Error, Result};

type Log = CsvLog<Box<dyn Write + Send>>;

/// Wraps another allocator and logs every allocation, free and failure as a line in RMM's format
/// (`logging_resource_adaptor`).
///
/// The pointer in a line identifies the block; the pointer does not change if compaction moves the block. The size in a
/// line is the requested size. [`Device::log_allocations`] installs a log for a device.
pub struct LoggingAllocator {
    inner: Arc<dyn Allocator>,
    state: Mutex<State>,
}

/// The log and its state, guarded by the allocator's lock.
struct State {
    /// `None` after the log was finished, or could not be written.
    log: Option<Log>,
    /// The writer's error, until the error is returned to the caller.
    failed: Result<()>,
    /// For each live block of a stream other than the default stream: the block's pointer in the log, and the stream.
    streams: HashMap<u64, u32>,
}

impl LoggingAllocator {
    /// Logs the allocations of `inner` to `writer`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the writer fails.
    pub fn new(inner: Arc<dyn Allocator>, writer: impl Write + Send + 'static) -> Result<LoggingAllocator> {
        let writer: Box<dyn Write + Send> = Box::new(writer);
        let state = State { log: Some(CsvLog::new(writer)?), failed: Ok(()), streams: HashMap::new() };
        Ok(LoggingAllocator { inner, state: Mutex::new(state) })
    }

    /// Ends the log: writes the buffered lines and drops the writer. Later allocations are not logged.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the writer failed, now or before; the log ends at the failure.
    pub fn finish(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let flushed = state.log.take().map_or(Ok(()), |log| log.flush());
        std::mem::replace(&mut state.failed, Ok(())).and(flushed)
    }

    /// Writes a line. For a free, the line has the stream of the block's allocation.
    fn log_line(&self, action: CsvAction, block: Option<&Block>, bytes: usize, stream: StreamId) {
        let name = block.map_or(0, |block| block.slot_ptr().as_ptr().addr() as u64);
        let mut state = lock(&self.state);
        let stream = match action {
            CsvAction::Free => state.streams.remove(&name).unwrap_or(StreamId::DEFAULT.0),
            CsvAction::Allocate | CsvAction::AllocateFailure => stream.0,
        };
        if let Some(Err(error)) = state.log.as_ref().map(|log| log.log(action, name, bytes as u64, stream)) {
            tracing::error!(allocator = ?self, %error, "the log of allocations ends here");
            (state.log, state.failed) = (None, Err(error));
        }
        if action == CsvAction::Allocate && state.log.is_some() && stream != StreamId::DEFAULT.0 {
            state.streams.insert(name, stream);
        }
    }
}

impl fmt::Debug for LoggingAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a log of {:?}", self.inner)
    }
}

impl Allocator for LoggingAllocator {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        Some(&self.inner)
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let made = self.inner.allocate(bytes, stream);
        match &made {
            Ok(block) => self.log_line(CsvAction::Allocate, Some(block), bytes, stream),
            Err(Error::OutOfMemory { .. }) => self.log_line(CsvAction::AllocateFailure, None, bytes, stream),
            Err(_) => {} // failed for another reason than lack of memory
        }
        made
    }

    fn deallocate(&self, block: Block) {
        // The free is logged before the block is returned, because another thread may get the block right after that.
        self.log_line(CsvAction::Free, Some(&block), block.requested(), StreamId::DEFAULT);
        self.inner.deallocate(block);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        self.inner.record_stream(block, stream);
    }
}

/// The log of a device's allocations. Dropping it ends the log and reinstalls the device's allocator.
#[must_use = "dropping it ends the log"]
#[derive(Debug)]
pub struct AllocationLog(Arc<LoggingAllocator>);

impl AllocationLog {
    /// Ends the log.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the writer failed, now or before; the log ends at the failure.
    pub fn finish(self) -> Result<()> {
        self.0.finish()
    }
}

impl Drop for AllocationLog {
    fn drop(&mut self) {
        if let Err(error) =
            registry::replace_allocator(self.0.device(), &*self.0, &self.0.inner).and_then(|()| self.0.finish())
        {
            tracing::error!(%error, "the log of allocations could not be finished");
        }
    }
}

impl Device {
    /// Logs every allocation and free of the device to `writer` from now on, in the format of RMM's
    /// `logging_resource_adaptor`, until the returned value is dropped.
    /// [`CsvEvent::read_all`](super::CsvEvent::read_all) reads the log.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let path = std::env::temp_dir().join("claystone-log.csv");
    /// let log = Device::Cpu.log_allocations(std::fs::File::create(&path).expect("a file"))?;
    /// let x = Tensor::ones(&[100], Device::Cpu)?;
    /// log.finish()?;
    /// assert!(std::fs::read_to_string(path).expect("it is there").contains(",allocate,0x"));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDevice`] if the device does not exist, [`Error::Invalid`] if the writer fails.
    pub fn log_allocations(&self, writer: impl Write + Send + 'static) -> Result<AllocationLog> {
        let logging = Arc::new(LoggingAllocator::new(registry::allocator(*self)?, writer)?);
        registry::set_allocator(*self, Arc::clone(&logging) as Arc<dyn Allocator>)?;
        Ok(AllocationLog(logging))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::history::tests::SharedWriter;
    use super::super::{Config, CsvEvent, Sim, SimOptions, build_allocator};
    use super::*;

    #[test]
    fn every_allocation_free_and_failure_is_a_line() {
        let sim = Sim::new(SimOptions { capacity: 1 << 20, ..SimOptions::default() });
        let text = SharedWriter::default();
        let inner = build_allocator(Arc::new(sim), Config::default()).unwrap();
        let logging = LoggingAllocator::new(inner, text.clone()).unwrap();
        let blocks: Vec<Block> = (1..=20).map(|n| logging.allocate(n * 100, StreamId(n as u32 % 2)).unwrap()).collect();
        assert!(logging.allocate(2 << 20, StreamId::DEFAULT).is_err());
        blocks.into_iter().rev().for_each(|block| logging.deallocate(block));
        logging.finish().unwrap();
        logging.deallocate(logging.allocate(1, StreamId::DEFAULT).unwrap()); // not logged any more

        let events = CsvEvent::read_all(text.0.lock().unwrap().as_slice()).unwrap();
        let mut live = HashMap::new();
        let (mut sizes, mut failures) = (Vec::new(), 0);
        for event in &events {
            match event.action {
                CsvAction::Allocate => {
                    sizes.push((event.bytes, event.stream));
                    assert_eq!(live.insert(event.addr, (event.bytes, event.stream)), None, "two blocks by one name");
                }
                CsvAction::Free => assert_eq!(live.remove(&event.addr), Some((event.bytes, event.stream))),
                CsvAction::AllocateFailure => failures += 1,
            }
        }
        assert_eq!(sizes, (1..=20).map(|n| (n * 100, n % 2)).collect::<Vec<_>>());
        assert_eq!((live.len(), failures, events.len()), (0, 1, 41));
        assert_eq!(logging.stats().allocation.current, 0);
    }

    #[test]
    fn a_writer_that_fails_stops_the_log_and_nothing_else() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::StorageFull.into())
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let inner = build_allocator(Arc::new(Sim::new(SimOptions::default())), Config::default()).unwrap();
        let logging = LoggingAllocator::new(inner, Full).unwrap();
        for _ in 0..1000 {
            logging.deallocate(logging.allocate(512, StreamId::DEFAULT).unwrap());
        }
        assert!(logging.finish().unwrap_err().to_string().contains("cannot be written"));
        assert!(logging.finish().is_ok(), "told once");
    }
}
