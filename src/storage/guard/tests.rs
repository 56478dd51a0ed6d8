use super::*;
use crate::Device;
use crate::storage::{self, Config, Sim, SimOptions, build_allocator};

const STREAM: StreamId = StreamId::DEFAULT;

fn guarded(driver: &Arc<dyn Driver>, conf: &str) -> GuardAllocator {
    let inner = build_allocator(Arc::clone(driver), conf.parse::<Config>().unwrap()).unwrap();
    GuardAllocator::new(inner, Arc::clone(driver))
}

/// Returns the drivers of the simulated device and of every real device.
fn drivers() -> Vec<Arc<dyn Driver>> {
    let sim: Arc<dyn Driver> = Arc::new(Sim::new(SimOptions { contents: true, ..SimOptions::default() }));
    let all = if cfg!(miri) { vec![Device::Cpu] } else { Device::all() };
    let promised = std::env::var_os("CLAYSTONE_REQUIRE_OPENCL").is_some();
    assert!(all.len() > 1 || !promised, "CLAYSTONE_REQUIRE_OPENCL is set and there is no OpenCL device");
    all.into_iter().map(|device| storage::driver(device).unwrap()).chain([sim]).collect()
}

/// Writes bytes relative to the start of a block.
fn write(driver: &Arc<dyn Driver>, block: &Block, offset: isize, bytes: &[u8]) {
    let place = block.location();
    let at = (place.segment().memory(), place.offset().checked_add_signed(offset).unwrap());
    // SAFETY: this thread is the only one that uses the block.
    unsafe { driver.write(bytes, at) }.unwrap();
}

#[test]
fn blocks_used_within_their_bounds_pass() {
    for driver in drivers() {
        for backend in ["backend:direct", "backend:pool", "backend:caching"] {
            let guarded = guarded(&driver, backend);
            for bytes in [1, 15, 16, 512, 1000, if cfg!(miri) { 5000 } else { 3 << 20 }] {
                let block = guarded.allocate(bytes, STREAM).unwrap();
                assert_eq!((block.requested(), block.location().offset() % driver.alignment()), (bytes, 0));
                assert!(block.size() >= bytes && block.size() < bytes + driver.alignment());
                write(&driver, &block, 0, &vec![1; block.size()]);
                guarded.deallocate(block);
            }
            assert_eq!(guarded.guard_violations(), 0, "{driver:?} {backend}");
            let stats = guarded.stats();
            assert_eq!((stats.allocation.current, stats.allocation.freed), (0, 6));
            guarded.empty_cache().unwrap();
            assert_eq!(guarded.stats().reserved_bytes.current, 0);
        }
    }
}

#[test]
fn writes_before_and_after_a_block_are_detected() {
    for driver in drivers() {
        for backend in ["backend:direct", "backend:pool", "backend:caching"] {
            let guarded = guarded(&driver, backend);
            // The simulated device writes only whole granules.
            let least = if driver.device() == Device::OpenCL(99) { driver.alignment() } else { 1 };
            for (n, bytes) in [16, 2000, 512].into_iter().take(if cfg!(miri) { 1 } else { 3 }).enumerate() {
                let [a, b, c] = [0; 3].map(|_| guarded.allocate(bytes, STREAM).unwrap());
                write(&driver, &a, a.size() as isize, &vec![3; least]);
                write(&driver, &b, -(least as isize), &vec![3; least]);
                guarded.deallocate(c);
                assert_eq!(guarded.guard_violations(), 2 * n as u64, "the neighbours are whole");
                guarded.deallocate(a);
                assert_eq!(guarded.guard_violations(), 2 * n as u64 + 1, "behind");
                guarded.deallocate(b);
                assert_eq!(guarded.guard_violations(), 2 * n as u64 + 2, "before");
            }
        }
    }
}

#[test]
fn freed_bytes_are_poisoned() {
    for driver in drivers() {
        let guarded = guarded(&driver, "backend:pool");
        let block = guarded.allocate(1000, STREAM).unwrap();
        write(&driver, &block, 0, &vec![1; block.size()]);
        guarded.deallocate(block);
        let block = guarded.allocate(1000, STREAM).unwrap(); // reuses the buffer that was just freed
        let mut bytes = vec![0; block.size()];
        let place = block.location();
        // SAFETY: this thread is the only one that uses the block.
        unsafe { driver.read((place.segment().memory(), place.offset()), &mut bytes) }.unwrap();
        assert!(bytes.iter().all(|byte| *byte == JUNK_BYTE));
        drop(place);
        guarded.deallocate(block);
    }
}

#[test]
fn queued_work_is_waited_for() {
    let options = SimOptions { contents: true, asynchronous: true, ..SimOptions::default() };
    let sim = Sim::new(options);
    let driver: Arc<dyn Driver> = Arc::new(sim.clone());
    let guarded = guarded(&driver, "backend:caching");
    let (one, two) = (sim.stream(1), sim.stream(2));
    let block = guarded.allocate(1000, one).unwrap();
    guarded.record_stream(&block, two);
    let place = block.location();
    // The stream that was recorded for the block writes behind the block's end.
    sim.write_tag_at(two, (place.segment().memory(), place.offset() + block.size()), 512, 5).unwrap();
    drop(place);
    sim.write_tag(one, &block, 4).unwrap();
    sim.check_tag(one, &block, 4).unwrap();
    guarded.deallocate(block);
    assert_eq!((guarded.guard_violations(), sim.violations()), (1, Vec::new()));
}

#[test]
fn requests_refused_by_the_inner_allocator_are_refused() {
    let sim = Sim::new(SimOptions { capacity: 8 << 10, ..SimOptions::default() });
    let driver: Arc<dyn Driver> = Arc::new(sim.clone());
    let guarded = guarded(&driver, "backend:direct");
    for bytes in [8 << 10, usize::MAX, usize::MAX - 512] {
        assert!(matches!(guarded.allocate(bytes, STREAM), Err(Error::OutOfMemory { .. })));
    }
    let other = build_allocator(Arc::clone(&driver), Config::default()).unwrap();
    guarded.deallocate(other.allocate(512, STREAM).unwrap());
    assert_eq!((other.stats().allocation.current, guarded.stats().allocation.current), (1, 0));
}
