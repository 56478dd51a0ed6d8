//! A profile of what was recorded.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::{Category, Event, Lane, MemorySample, OperationInfo, Profile, ProfiledDevice};
use crate::Device;
use crate::device::profiler::{self as recorder, Kind, MAPPED, MemoryChange, Operation, Record, Recorded};

/// The profile of what was recorded from one time of the host's clock to another.
pub(super) fn profile(recorded: Recorded, began: u64, ended: u64) -> Profile {
    let micros = |ns: i128| (ns - i128::from(began)) as f64 / 1000.0;
    let offsets = clock_offsets(&recorded.records);
    let mut shared = Shared::default();
    let mut profile = Profile {
        threads: recorded.threads,
        duration_us: ended.saturating_sub(began) as f64 / 1000.0,
        dropped_events: recorded.dropped,
        ..Profile::default()
    };
    let mut memory: HashMap<Device, [u64; 2]> =
        recorded.devices.iter().map(|before| (before.device, [before.allocated, before.reserved])).collect();
    for record in recorded.memory {
        let now = memory.entry(record.device).or_default();
        match record.change {
            MemoryChange::Allocated(bytes) => now[0] = now[0].saturating_add_signed(bytes),
            MemoryChange::Reserved(bytes) => now[1] = bytes,
        }
        let [allocated, reserved] = *now;
        profile.memory.push(MemorySample {
            device: record.device,
            time_us: micros(record.time.into()),
            allocated,
            reserved,
        });
    }
    let mut devices: Vec<Device> = Vec::new();
    let mut launches = 0;
    let mut kernels: HashMap<u32, u32> = HashMap::new();
    let of_kernels = recorded.records.iter().filter(|record| record.kind == Kind::Kernel);
    of_kernels
        .filter_map(|record| record.operation.as_ref())
        .for_each(|execution| *kernels.entry(execution.number).or_default() += 1);
    // Others of the oldest kernel's operation may be lost.
    let oldest = recorded.records.iter().find(|record| record.kind == Kind::Kernel);
    if let (Some(execution), true) = (oldest.and_then(|record| record.operation.as_ref()), recorded.dropped > 0) {
        *kernels.entry(execution.number).or_default() += 1;
    }
    for record in recorded.records {
        let [start, end] = record.host.map(|ns| micros(ns.into()));
        if let Some(device) = record.device.filter(|device| !devices.contains(device)) {
            devices.push(device);
        }
        let category = category(record.kind);
        let operation = record.operation.as_ref().map(|execution| shared.operation(&execution.of));
        let host = Event {
            category,
            name: match record.kind {
                Kind::Annotation(number) => shared.annotation(number).innermost.clone(),
                _ => shared.text(record.name),
            },
            device: record.device,
            lane: Lane::Thread(record.thread),
            start_us: start,
            duration_us: end - start,
            queued_us: None,
            bytes: record.bytes,
            flops: record.operation.as_ref().filter(|_| category == Category::Operation).map_or(0, |o| o.of.flops),
            annotation: shared.annotation(record.annotation).path.clone(),
            operation,
            launch: 0,
        };
        let on_opencl = record.device.filter(|device| !device.is_cpu() && category.is_command());
        let Some(device) = on_opencl else {
            profile.events.push(host);
            continue;
        };
        let Some(times) = record.device_times else {
            // Mapped bytes are read or written by the host itself.
            let category = if record.name == MAPPED { category } else { Category::Launch };
            profile.events.push(Event { category, ..host });
            continue;
        };
        launches += 1;
        let offset = offsets.get(&device).copied().unwrap_or(0);
        let [queued, submitted, started, ended] = times.map(|ns| micros(i128::from(ns) + offset));
        let sole = record.operation.as_ref().filter(|of| kernels.get(&of.number) == Some(&1));
        let [bytes, flops] = match category {
            Category::Kernel => sole.map_or([0, 0], |execution| [execution.of.bytes, execution.of.flops]),
            _ => [host.bytes, 0],
        };
        let command = Event {
            lane: Lane::Stream(device, record.stream),
            start_us: started,
            duration_us: (ended - started).max(0.0),
            queued_us: Some([queued, submitted]),
            bytes,
            flops,
            launch: launches,
            ..host.clone()
        };
        profile.events.push(Event { category: Category::Launch, launch: launches, ..host });
        profile.events.push(command);
    }
    // What contains others comes before them.
    profile.events.sort_by(|a, b| a.start_us.total_cmp(&b.start_us).then(b.duration_us.total_cmp(&a.duration_us)));
    profile.memory.sort_by(|a, b| a.time_us.total_cmp(&b.time_us));
    devices.sort_by_key(|device| (device.is_cpu(), device.to_string()));
    let described = devices.into_iter().map(|device| ProfiledDevice {
        device,
        name: device.info().map(|info| info.name).unwrap_or_default(),
        copy_bytes_per_s: None,
    });
    profile.devices = described.collect();
    profile
}

fn category(kind: Kind) -> Category {
    match kind {
        Kind::Operation => Category::Operation,
        Kind::Backward => Category::Backward,
        Kind::Annotation(_) => Category::Annotation,
        Kind::Kernel => Category::Kernel,
        Kind::Copy => Category::Copy,
        Kind::Fill => Category::Fill,
        Kind::Read => Category::Read,
        Kind::Write => Category::Write,
        Kind::Wait => Category::Wait,
        Kind::Open => Category::Open,
        Kind::Segment => Category::Segment,
        Kind::Compile => Category::Compile,
        Kind::Load => Category::Load,
    }
}

/// What is to be added to each device's times to have the host's. A command is queued while the host enqueues it, which
/// bounds the offset from both sides; where the clocks drift so that no offset fits all commands, it is the median of them.
fn clock_offsets(records: &[Record]) -> HashMap<Device, i128> {
    let mut bounds: HashMap<Device, Vec<[i128; 2]>> = HashMap::new();
    for record in records {
        if let (Some(device), Some(&[queued, ..])) = (record.device, record.device_times.as_deref()) {
            bounds.entry(device).or_default().push(record.host.map(|host| i128::from(host) - i128::from(queued)));
        }
    }
    let offset = |mut bounds: Vec<[i128; 2]>| {
        let lowest = bounds.iter().map(|b| b[0]).max().unwrap_or(0);
        let highest = bounds.iter().map(|b| b[1]).min().unwrap_or(0);
        if lowest <= highest {
            return (lowest + highest) / 2;
        }
        bounds.sort_by_key(|b| b[0] + b[1]);
        let [from, to] = bounds[bounds.len() / 2];
        (from + to) / 2
    };
    bounds.into_iter().map(|(device, bounds)| (device, offset(bounds))).collect()
}

/// The names of an annotation.
struct Annotation {
    innermost: Arc<str>,
    /// All of them, the outermost first, joined by slashes.
    path: Arc<str>,
}

/// Texts and operations that events share.
#[derive(Default)]
pub(super) struct Shared {
    texts: HashSet<Arc<str>>,
    annotations: HashMap<u32, Annotation>,
    operations: HashMap<usize, (Arc<Operation>, Arc<OperationInfo>)>,
}

impl Shared {
    pub(super) fn text(&mut self, text: &str) -> Arc<str> {
        match self.texts.get(text) {
            Some(known) => Arc::clone(known),
            None => {
                let new: Arc<str> = text.into();
                self.texts.insert(Arc::clone(&new));
                new
            }
        }
    }

    fn annotation(&mut self, number: u32) -> &Annotation {
        self.annotations.entry(number).or_insert_with(|| {
            let mut names = recorder::annotation_names(number);
            let innermost = names.first().map_or("", |name| name).into();
            names.reverse();
            Annotation { innermost, path: names.join("/").into() }
        })
    }

    fn operation(&mut self, operation: &Arc<Operation>) -> Arc<OperationInfo> {
        let key = Arc::as_ptr(operation).addr();
        if let Some((_, known)) = self.operations.get(&key) {
            return Arc::clone(known);
        }
        let info = Arc::new(OperationInfo {
            name: self.text(operation.name),
            shapes: operation.shapes.iter().map(|shape| shape.to_vec()).collect(),
            dtype: operation.dtype,
        });
        // Kept, so that its address is nobody else's.
        self.operations.insert(key, (Arc::clone(operation), Arc::clone(&info)));
        info
    }
}
