//! An endurance test: networks train for a given time. The memory, file descriptors and program cache of the process must not grow.
//!
//! Runs for ten seconds unless `CLAYSTONE_SOAK_SECONDS` is set. `CLAYSTONE_SOAK_SECONDS=3600 cargo test --release --test soak --
//! --nocapture` prints a line of measurements after each hundredth of the time.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use claystone::device::ProgramCache;
use claystone::nn::{Activation, Conv2d, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use claystone::storage::HistoryOptions;
use claystone::{ConvOptions, DType, Device, Result, Stream, Tensor, with_stream};
use common::{devices, in_child_with};

const THREADS: usize = 4;
/// The number of measurements in a run.
const SAMPLES: u32 = 100;

/// The resources that the process holds at one moment.
#[derive(Debug, Clone, Copy, Default)]
struct Sample {
    resident: u64,
    /// The bytes that the allocators of all devices have reserved.
    reserved: u64,
    descriptors: u64,
    /// The size of the program cache on disk, in bytes.
    cache: u64,
}

impl Sample {
    fn take_sample() -> Sample {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split_whitespace().nth(1).unwrap().parse().unwrap();
        let reserved = devices().iter().map(|d| d.memory_stats().unwrap().reserved_bytes.current).sum::<u64>();
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        let cache = ProgramCache::of_process().unwrap().map_or(0, |cache| cache.bytes);
        Sample { resident: pages * 4096, reserved, descriptors, cache }
    }

    /// Returns the larger of both values for each field.
    fn max(self, other: Sample) -> Sample {
        Sample {
            resident: self.resident.max(other.resident),
            reserved: self.reserved.max(other.reserved),
            descriptors: self.descriptors.max(other.descriptors),
            cache: self.cache.max(other.cache),
        }
    }
}

/// A program cache used by this test only, because other tests change the user's cache meanwhile.
const CACHE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/soak-cache");
/// The largest batch size. In 48 consecutive steps each size from 1 to 48 is used once.
const SIZES: usize = 48;

/// Trains two networks in turns on two streams, until `more(step)` is false: convolutions with AdamW, and linear layers with SGD.
fn train(device: Device, first: usize, more: impl Fn(usize) -> bool, steps: &AtomicU64) -> Result<()> {
    let streams = [Stream::new(device)?, Stream::new(device)?];
    let mut images = Sequential::new()
        .push(Conv2d::new(1, 4, [3, 3], ConvOptions::default(), device)?)
        .push(claystone::nn::func(|x: &Tensor| x.relu()?.flatten(1, -1)))
        .push(Linear::new(4 * 10 * 10, 10, device)?);
    let mut rows = Sequential::new()
        .push(Linear::new(64, 96, device)?.with_activation(Activation::Relu))
        .push(Linear::new(96, 10, device)?);
    let mut adamw = AdamW::new(images.parameters_mut(), AdamWConfig::default())?;
    let mut sgd = Sgd::new(rows.parameters_mut(), SgdConfig { lr: 0.05, momentum: 0.9, ..Default::default() })?;
    device.synchronize()?;
    let mut step = first;
    while more(step) {
        let batch = 1 + step * 29 % SIZES;
        let labels = Tensor::randint(0, 10, &[batch], (DType::I64, device))?;
        streams[step % 2].wait_stream(&Stream::current(device)?)?;
        let loss = with_stream(&streams[step % 2], || -> Result<Tensor> {
            // From now on the labels are used on another stream, so their memory must not be reused early.
            labels.storage().record_stream(&streams[step % 2])?;
            let (net, optimizer, shape): (&Sequential, &mut dyn Optimizer, Vec<usize>) = match step / 2 % 2 {
                0 => (&rows, &mut sgd, vec![batch, 64]),
                _ => (&images, &mut adamw, vec![batch, 1, 12, 12]),
            };
            optimizer.zero_grad();
            let loss = net.forward(&Tensor::rand(shape, device)?)?.cross_entropy(&labels)?;
            loss.backward()?;
            optimizer.step()?;
            streams[step % 2].synchronize()?; // the next step of this network may use the other stream, so this one must be finished
            Ok(loss)
        })?;
        assert!(loss.item::<f32>()?.is_finite());
        if step.is_multiple_of(64) {
            device.memory_snapshot()?.to_pickle()?;
        }
        step += 1;
        steps.fetch_add(1, Relaxed);
    }
    Ok(())
}

#[test]
fn memory_descriptors_and_cache_do_not_grow() {
    if !in_child_with("memory_descriptors_and_cache_do_not_grow", "CLAYSTONE_CACHE_DIR", CACHE) {
        return;
    }
    let seconds = std::env::var("CLAYSTONE_SOAK_SECONDS").map_or(10, |s| s.parse().expect("a number of seconds"));
    let (stop, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    let options = HistoryOptions::default().max_entries(10_000);
    for device in devices() {
        device.record_memory_history(options).unwrap();
        train(device, 0, |step| step < SIZES, &AtomicU64::new(0)).unwrap(); // compiles all kernels that the training threads need
    }
    let mut samples = Vec::new();
    thread::scope(|scope| {
        for t in 0..THREADS {
            let (stop, steps, all) = (&stop, &steps, devices());
            let device = all[t % all.len()];
            scope.spawn(move || {
                train(device, t, |_| !stop.load(Relaxed), steps)
                    .unwrap_or_else(|e| panic!("thread {t} on {device}: {e}"))
            });
        }
        let begin = Instant::now();
        for i in 1..=SAMPLES {
            let at = Duration::from_secs(seconds) * i / SAMPLES;
            thread::sleep((begin + at).saturating_duration_since(Instant::now()));
            let sample = Sample::take_sample();
            println!("{:6.1} s, {} steps: {sample:?}", at.as_secs_f64(), steps.load(Relaxed));
            samples.push(sample);
        }
        stop.store(true, Relaxed);
    });
    // The allocators may still grow during the first half, so the second half is compared with the maximum of the first.
    let most = |part: &[Sample]| part.iter().fold(Sample::default(), |most, &s| most.max(s));
    let (early, late) = samples.split_at(samples.len() / 2);
    let (before, after) = (most(early), most(late));
    println!("at most {before:?} in the first half, {after:?} in the second");
    assert!(steps.load(Relaxed) > 0);
    let slack = 16 << 20; // bytes that the system allocator and the varying overlap of threads may add
    assert!(after.resident <= before.resident + before.resident / 20 + slack, "resident memory grows");
    assert!(after.reserved <= before.reserved + before.reserved / 20 + slack, "reserved memory grows");
    assert!(after.descriptors <= before.descriptors + 2, "descriptors are not closed");
    assert!(after.cache <= before.cache + (64 << 10), "the cache of programs grows");
}
