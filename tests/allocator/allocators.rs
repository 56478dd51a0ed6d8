//! The three built-in allocators, a user-defined allocator, and the environment variable that selects an allocator. Allocators
//! belong to the whole process, so each test runs in its own child process.

use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use claystone::device::StreamId;
use claystone::quantized::{QuantFormat, QuantizedTensor};
use claystone::storage::{
    self, Allocator, Block, Config, DeviceStats, LoggingAllocator, MemPool, MemPoolOptions, OutOfMemoryEvent, Storage,
    use_mem_pool,
};
use claystone::{DType, Device, Error, Result, Tensor};

use crate::common;

/// Runs a test in a child process with the given environment variables.
fn child(test: &str, vars: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env_remove("CLAYSTONE_ALLOC_CONF")
        .env_remove("CLAYSTONE_NO_CACHING")
        .env("CLAYSTONE_CHILD", "1")
        .envs(vars.iter().copied())
        .output()
        .unwrap()
}

#[track_caller]
fn run_child_test(test: &str, vars: &[(&str, &str)]) -> String {
    let output = child(test, vars);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{vars:?}\n{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

fn is_child() -> bool {
    std::env::var_os("CLAYSTONE_CHILD").is_some()
}

/// Computes sums with several intermediate results, and frees them all.
fn work(device: Device) {
    let x = common::iota(&[64, 64], device);
    for _ in 0..3 {
        let y = x.mul(&x).unwrap().add(&x).unwrap().sum((), false).unwrap();
        let n = 4096.0f64;
        let expected = (n - 1.0) * n * (2.0 * n - 1.0) / 6.0 + n * (n - 1.0) / 2.0;
        let got = f64::from(common::vec(&y)[0]);
        assert!((got / expected - 1.0).abs() < 1e-5, "{got} is not {expected}");
    }
}

/// Checks the statistics of an allocator that has no live blocks, and returns them.
fn check_idle(device: Device) -> DeviceStats {
    let stats = device.memory_stats().unwrap();
    assert_eq!(stats.allocated_bytes.current, 0, "{stats}");
    assert_eq!(stats.allocation.allocated, stats.allocation.freed);
    assert_eq!(stats.num_device_alloc - stats.num_device_free, stats.segment.current);
    assert_eq!(stats.reserved_bytes.allocated - stats.reserved_bytes.freed, stats.reserved_bytes.current);
    assert!(stats.requested_bytes.peak >= 2 * 64 * 64 * 4 && stats.requested_bytes.peak <= stats.reserved_bytes.peak);
    stats
}

/// Runs in a child process: computes on every device and prints the allocator's name and the numbers of created and held segments.
#[test]
fn tensors_work_with_every_allocator() {
    if !is_child() {
        run_child_test("allocators::tensors_work_with_every_allocator", &[]);
        return;
    }
    common::each_device(|device| {
        work(device);
        let stats = check_idle(device);
        println!("allocator= {:?}", storage::allocator(device).unwrap());
        println!("segments= {} {}", stats.num_device_alloc, stats.segment.current);
        device.empty_cache().unwrap();
        assert_eq!(device.memory_stats().unwrap().reserved_bytes.current, 0);
    });
}

/// Runs in a child process: a weight of 4 bits takes half a byte an element and its scales, in buffers that serve only static requests.
#[test]
fn weights_of_four_bits_take_half_a_byte_an_element_in_the_static_pool() -> Result<()> {
    if !is_child() {
        let test = "allocators::weights_of_four_bits_take_half_a_byte_an_element_in_the_static_pool";
        run_child_test(test, &[("CLAYSTONE_ALLOC_CONF", "backend:pool")]);
        return Ok(());
    }
    for device in common::devices() {
        let elements = 64 * 4096;
        let bytes = elements / 2 + elements / 32 * 2;
        let requested = || device.memory_stats().map(|stats| stats.requested_bytes.current);
        let reserved = || device.memory_stats().map(|stats| stats.reserved_bytes.current);
        let before = requested()?;
        let weight = QuantizedTensor::quantize(&Tensor::ones([64, 4096], device)?, QuantFormat::Q4_0)?;
        assert_eq!((weight.nbytes() as u64, requested()? - before), (bytes, bytes), "on {device}");
        device.empty_cache()?;
        drop(weight);
        let (held, freed) = (reserved()?, requested()?);
        let dynamic = Tensor::zeros([bytes as usize], (DType::U8, device))?;
        assert_eq!((reserved()?, requested()?), (held + bytes, freed + bytes), "dynamic requests take another buffer");
        let storage = Storage::alloc_static(device, bytes as usize)?;
        assert_eq!((storage.nbytes() as u64, reserved()?), (bytes, held + bytes), "static requests reuse it");
        drop(dynamic);
    }
    Ok(())
}

#[test]
fn the_environment_selects_the_allocator() {
    if is_child() {
        return;
    }
    for (name, vars) in [
        ("caching", &[][..]),
        ("caching", &[("CLAYSTONE_ALLOC_CONF", ""), ("CLAYSTONE_NO_CACHING", "0")]),
        ("caching", &[("CLAYSTONE_ALLOC_CONF", "backend:caching")]),
        ("pool", &[("CLAYSTONE_ALLOC_CONF", "backend:pool, pool_overfit:1.5")]),
        ("direct", &[("CLAYSTONE_ALLOC_CONF", "backend:direct")]),
        ("direct", &[("CLAYSTONE_ALLOC_CONF", "backend:pool"), ("CLAYSTONE_NO_CACHING", "1")]),
    ] {
        let text = run_child_test("allocators::tensors_work_with_every_allocator", vars);
        let said = |what: &str| {
            text.lines().filter_map(|l| l.split_once(what).map(|(_, rest)| rest.to_owned())).collect::<Vec<_>>()
        };
        let allocators = said("allocator= ");
        assert_eq!(allocators.len(), common::devices().len());
        assert!(allocators.iter().all(|a| a.starts_with(&format!("the {name} allocator of "))), "{text}");
        for counts in said("segments= ") {
            let (made, held) =
                counts.split_once(' ').map(|(m, h)| (m.parse::<u64>().unwrap(), h.parse::<u64>().unwrap())).unwrap();
            match name {
                "direct" => assert!(made >= 9 && held == 0, "{counts}"),
                _ => assert!(made < 9 && held > 0, "{counts}"),
            }
        }
    }
}

/// Runs in a child process with invalid settings: prints the error of each device's first use.
#[test]
fn first_uses_report_invalid_settings() {
    if !is_child() {
        return;
    }
    for device in common::devices() {
        for error in [
            Tensor::zeros(&[3], device).err(),
            device.memory_stats().err(),
            device.empty_cache().err(),
            storage::allocator(device).err(),
        ] {
            assert!(matches!(&error, Some(Error::Invalid { .. })), "{error:?}");
            println!("error= {}", error.unwrap());
        }
        assert!(Tensor::zeros(&[0], device).is_ok(), "an empty tensor needs no allocator");
    }
}

#[test]
fn invalid_settings_are_errors_at_the_first_use() {
    if is_child() {
        return;
    }
    for (vars, part) in [
        (("CLAYSTONE_ALLOC_CONF", "backend:mallocs"), "mallocs"),
        (("CLAYSTONE_ALLOC_CONF", "no_such_key:1"), "no_such_key"),
        (("CLAYSTONE_ALLOC_CONF", "backend"), "key:value"),
        (("CLAYSTONE_ALLOC_CONF", "pool_overfit:0.5"), "pool_overfit"),
        (("CLAYSTONE_NO_CACHING", "yes"), "CLAYSTONE_NO_CACHING"),
    ] {
        let text = run_child_test("allocators::first_uses_report_invalid_settings", &[vars]);
        let errors: Vec<&str> = text.lines().filter_map(|l| l.split_once("error= ").map(|(_, e)| e)).collect();
        assert_eq!(errors.len(), 4 * common::devices().len(), "{text}");
        assert!(errors.iter().all(|error| error.contains(part)), "{text}");
    }
}

/// An allocator that logs allocations and frees, and forwards them to another allocator.
#[derive(Debug)]
struct LogsAllocations {
    inner: Arc<dyn Allocator>,
    log: Arc<Mutex<Vec<(char, usize)>>>,
}

impl Allocator for LogsAllocations {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        Some(&self.inner)
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let block = self.inner.allocate(bytes, stream)?;
        self.log.lock().unwrap().push(('a', bytes));
        Ok(block)
    }

    fn deallocate(&self, block: Block) {
        self.log.lock().unwrap().push(('f', block.requested()));
        self.inner.deallocate(block);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        self.inner.record_stream(block, stream);
    }

    fn stats(&self) -> DeviceStats {
        self.inner.stats()
    }

    fn reset_peak_stats(&self) {
        self.inner.reset_peak_stats();
    }

    fn reset_accumulated_stats(&self) {
        self.inner.reset_accumulated_stats();
    }

    fn empty_cache(&self) -> Result<()> {
        self.inner.empty_cache()
    }
}

/// Runs in a child process: replaces each device's allocator several times while tensors are live.
#[test]
fn allocators_can_be_replaced() {
    if !is_child() {
        run_child_test("allocators::allocators_can_be_replaced", &[]);
        return;
    }
    common::each_device(|device| {
        let first = common::iota(&[100], device); // allocated by the default allocator
        for backend in ["direct", "pool", "caching"] {
            let config: Config = format!("backend:{backend}").parse().unwrap();
            let inner = storage::build_allocator(storage::driver(device).unwrap(), config).unwrap();
            let log = Arc::<Mutex<Vec<(char, usize)>>>::default();
            let logging = LogsAllocations { inner: Arc::clone(&inner), log: Arc::clone(&log) };
            storage::set_allocator(device, Arc::new(logging)).unwrap();
            let kept = first.mul(&first).unwrap();
            work(device);
            assert_eq!(common::vec(&kept)[99], 9801.0);
            drop(kept);
            check_idle(device);
            let log = log.lock().unwrap();
            let (taken, freed): (Vec<_>, Vec<_>) = log.iter().partition(|(what, _)| *what == 'a');
            let sum = |list: &[(char, usize)]| list.iter().map(|(_, bytes)| bytes).sum::<usize>();
            assert!(taken.contains(&('a', 400)) && taken.len() == freed.len() && sum(&taken) == sum(&freed));
            assert_eq!(inner.stats().allocation.allocated, taken.len() as u64);
        }
        assert_eq!(common::vec(&first)[99], 99.0);
    });
}

#[test]
fn allocators_of_other_devices_are_refused() {
    for device in common::devices() {
        let theirs = match device {
            Device::Cpu => Device::OpenCL(99),
            _ => Device::Cpu,
        };
        let Ok(driver) = storage::driver(theirs) else { continue };
        let allocator = storage::build_allocator(driver, Config::default()).unwrap();
        let error = storage::set_allocator(device, allocator).unwrap_err().to_string();
        assert!(error.contains(&theirs.to_string()) && error.contains(&device.to_string()), "{error}");
    }
    // The allocator of a simulated device is refused for a device that does not exist, and for the CPU.
    let sim = Arc::new(storage::Sim::new(storage::SimOptions::default()));
    let allocator = storage::build_allocator(sim, Config::default()).unwrap();
    assert!(matches!(storage::set_allocator(Device::OpenCL(99), allocator.clone()), Err(Error::NoDevice { .. })));
    assert!(matches!(storage::set_allocator(Device::Cpu, allocator), Err(Error::Invalid { .. })));
}

/// Runs in a child process: checks that uninitialized tensors contain the configured fill value.
#[test]
fn new_tensors_hold_the_fill_value() {
    if !is_child() {
        return;
    }
    let zero = std::env::var("CLAYSTONE_ALLOC_CONF").unwrap() == "zero_fill:True";
    let expected = if zero { 0 } else { 0xFF };
    common::each_device(|device| {
        for n in [1, 7, 1000, 3 << 20] {
            for _ in 0..2 {
                let bytes = Tensor::empty(&[n], (DType::U8, device)).unwrap().to_vec::<u8>().unwrap();
                assert!(bytes.iter().all(|byte| *byte == expected), "{n} on {device}");
                let dirty = Tensor::ones(&[n], (DType::U8, device)).unwrap();
                assert_eq!(dirty.to_vec::<u8>().unwrap()[n - 1], 1); // frees these bytes, which the next tensor may reuse
            }
        }
        let floats = Tensor::empty(&[5], (DType::F64, device)).unwrap().to_vec::<f64>().unwrap();
        assert!(floats.iter().all(|x| if zero { *x == 0.0 } else { x.is_nan() }), "{floats:?}");
        assert!(Tensor::zeros(&[5], device).unwrap().to_vec::<f32>().unwrap().iter().all(|x| *x == 0.0));
    });
}

#[test]
fn new_tensors_can_be_filled_with_zeros_or_junk() {
    if is_child() {
        return;
    }
    for conf in ["zero_fill:True", "junk_fill:True"] {
        run_child_test("allocators::new_tensors_hold_the_fill_value", &[("CLAYSTONE_ALLOC_CONF", conf)]);
    }
}

/// Runs in a child process with guard bytes: checks that operations do not write beyond their blocks.
#[test]
fn operations_keep_guards_intact() {
    if !is_child() {
        return;
    }
    common::each_device(|device| {
        work(device);
        for n in [1, 3, 5, 17, 1001] {
            let x = common::iota(&[n], device);
            for dtype in [DType::U8, DType::F16, DType::F64, DType::I64] {
                let y = x.to_dtype(dtype).unwrap();
                let y = Tensor::cat(&[y.clone(), Tensor::ones(&[n], (dtype, device)).unwrap()], 0).unwrap();
                assert_eq!(y.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap()[2 * n - 1], 1.0);
            }
            let outer = x.reshape(&[n, 1]).unwrap().matmul(&x.reshape(&[1, n]).unwrap()).unwrap();
            assert_eq!(common::vec(&outer)[n * n - 1], ((n - 1) * (n - 1)) as f32);
        }
        assert_eq!(device.guard_violations().unwrap(), 0, "on {device}");
        // Writes beyond a block on purpose, which the guard check must report.
        let allocator = storage::allocator(device).unwrap();
        let block = allocator.allocate(100, StreamId::DEFAULT).unwrap();
        let place = block.location();
        let driver = storage::driver(device).unwrap();
        // SAFETY: only this test uses the block and its guards.
        unsafe { driver.write(&[0], (place.segment().memory(), place.offset() + 112)) }.unwrap();
        drop(place);
        allocator.deallocate(block);
        assert_eq!(device.guard_violations().unwrap(), 1);
    });
}

#[test]
fn guards_find_writes_beyond_a_block() {
    if is_child() {
        return;
    }
    for backend in ["direct", "pool", "caching"] {
        let conf = format!("guard_bytes:True,backend:{backend}");
        run_child_test("allocators::operations_keep_guards_intact", &[("CLAYSTONE_ALLOC_CONF", &conf)]);
    }
}

/// Runs in a child process: features of the caching allocator can be used through the device, even if another allocator wraps it.
#[test]
fn callbacks_observers_and_pools_are_available_by_device() {
    if !is_child() {
        run_child_test("allocators::callbacks_observers_and_pools_are_available_by_device", &[]);
        return;
    }
    const MIB: usize = 1 << 20;
    let plain = |conf: &str| {
        let driver = storage::driver(Device::Cpu).unwrap();
        storage::build_allocator(driver, conf.parse().unwrap()).unwrap()
    };
    let zeros = |bytes: usize| Tensor::zeros(&[bytes], (DType::U8, Device::Cpu));
    type Wrap = fn(Arc<dyn Allocator>) -> Arc<dyn Allocator>;
    let wrapped: [Wrap; 3] = [
        |inner| inner,
        |inner| Arc::new(LogsAllocations { inner, log: Arc::default() }),
        |inner| Arc::new(LoggingAllocator::new(inner, std::io::sink()).unwrap()),
    ];
    for (wrap, conf) in wrapped.into_iter().zip(["", "", "guard_bytes:True"]) {
        let allocator = plain(conf);
        allocator.set_memory_limit(16 * MIB as u64).unwrap();
        storage::set_allocator(Device::Cpu, wrap(allocator)).unwrap();

        let pool = MemPool::of_device(Device::Cpu, MemPoolOptions::default()).unwrap();
        let inside = use_mem_pool(&pool, || zeros(100)).unwrap();
        assert_eq!(pool.stats().allocations, 1);
        drop((inside, pool));

        let spare = Arc::new(Mutex::new(Some(zeros(10 * MIB).unwrap())));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let free = {
            let spare = Arc::clone(&spare);
            move || spare.lock().unwrap().take().is_some()
        };
        let observe = {
            let seen = Arc::clone(&seen);
            move |event: &OutOfMemoryEvent| seen.lock().unwrap().push((event.device, event.allowed))
        };
        let kept = Device::Cpu.add_free_memory_callback(Box::new(free)).unwrap();
        let watching = Device::Cpu.add_oom_observer(Box::new(observe)).unwrap();
        let x = zeros(12 * MIB).unwrap();
        assert!(spare.lock().unwrap().is_none() && seen.lock().unwrap().is_empty());
        assert!(matches!(zeros(12 * MIB), Err(Error::OutOfMemory { .. })));
        assert_eq!(*seen.lock().unwrap(), [(Device::Cpu, 16 * MIB as u64)]);
        drop((kept, watching));
        assert!(zeros(12 * MIB).is_err() && seen.lock().unwrap().len() == 1, "removed");
        drop(x);
    }
    for conf in ["backend:direct", "backend:pool"] {
        storage::set_allocator(Device::Cpu, plain(conf)).unwrap();
        assert!(matches!(Device::Cpu.add_free_memory_callback(Box::new(|| false)), Err(Error::Invalid { .. })));
        assert!(matches!(Device::Cpu.add_oom_observer(Box::new(|_| {})), Err(Error::Invalid { .. })));
        assert!(MemPool::of_device(Device::Cpu, MemPoolOptions::default()).is_err());
    }
}
