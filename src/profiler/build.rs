//! Builds a [`Profile`] from recorded events.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::{Category, Event, Lane, MemorySample, OperationInfo, Profile, ProfiledDevice};
use crate::Device;
use crate::device::profiler::{self as recorder, MAPPED, MemoryChange, Operation, Record, Ring};

/// Builds the profile of the events recorded between two times of the host's clock.
pub(super) fn build_profile(recorded: Ring, began: u64, ended: u64) -> Profile {
    let micros = |ns: i128| (ns - i128::from(began)) as f64 / 1000.0;
    let offsets = clock_offsets(&recorded.records);
    let mut shared = Interner::default();
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
        let time_us = micros(record.time.into());
        profile.memory.push(MemorySample { device: record.device, time_us, allocated, reserved });
    }
    let mut devices: Vec<Device> = Vec::new();
    let mut launches = 0;
    let mut kernels: HashMap<u32, u32> = HashMap::new();
    let of_kernels = recorded.records.iter().filter(|record| record.kind == Category::Kernel);
    // If records were dropped, the oldest kernel's operation may have had more kernels: count one more for the operation.
    let oldest = of_kernels.clone().take(usize::from(recorded.dropped > 0));
    for execution in of_kernels.chain(oldest).filter_map(|record| record.operation.as_ref()) {
        *kernels.entry(execution.number).or_default() += 1;
    }
    for record in recorded.records {
        let [start, end] = record.host.map(|ns| micros(ns.into()));
        if let Some(device) = record.device.filter(|device| !devices.contains(device)) {
            devices.push(device);
        }
        let category = record.kind;
        let annotation = shared.annotation(record.annotation);
        let (name, annotation) = match category {
            Category::Annotation => (Some(Arc::clone(&annotation.innermost)), Arc::clone(&annotation.outer)),
            _ => (None, Arc::clone(&annotation.path)),
        };
        let operation = record.operation.as_ref().map(|execution| shared.intern_operation(&execution.operation));
        let host = Event {
            category,
            name: name.unwrap_or_else(|| shared.intern_text(record.name)),
            device: record.device,
            lane: Lane::Thread(record.thread),
            start_us: start,
            duration_us: end - start,
            queued_us: None,
            bytes: record.bytes,
            flops: record
                .operation
                .as_ref()
                .filter(|_| category == Category::Operation)
                .map_or(0, |o| o.operation.flops),
            annotation,
            operation,
            launch: 0,
        };
        let on_opencl = record.device.filter(|device| device.has_queues() && category.is_command());
        let Some(device) = on_opencl else {
            profile.events.push(host);
            continue;
        };
        let Some(times) = record.device_times else {
            // The host itself reads or writes mapped memory.
            let category = if record.name == MAPPED { category } else { Category::Launch };
            profile.events.push(Event { category, ..host });
            continue;
        };
        launches += 1;
        let offset = offsets.get(&device).copied().unwrap_or(0);
        let [queued, submitted, started, ended] = times.map(|ns| micros(i128::from(ns) + offset));
        let sole = record.operation.as_ref().filter(|of| kernels.get(&of.number) == Some(&1));
        let [bytes, flops] = match category {
            Category::Kernel => sole.map_or([0, 0], |execution| [execution.operation.bytes, execution.operation.flops]),
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
    // Enclosing events come before the events that they contain.
    profile.events.sort_by(|a, b| a.start_us.total_cmp(&b.start_us).then(b.duration_us.total_cmp(&a.duration_us)));
    profile.memory.sort_by(|a, b| a.time_us.total_cmp(&b.time_us));
    devices.sort_by_key(|device| (!device.has_queues(), device.to_string()));
    let described = devices.into_iter().map(|device| ProfiledDevice {
        device,
        name: device.info().map(|info| info.name).unwrap_or_default(),
        copy_bytes_per_s: None,
    });
    profile.devices = described.collect();
    profile
}

/// Returns for each device the offset that converts its times to the host's clock. A command is queued while the host enqueues it,
/// which bounds the offset from both sides. If the clocks drift, so that no offset fits all commands, the median is used.
fn clock_offsets(records: &VecDeque<Record>) -> HashMap<Device, i128> {
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
    /// The names of all active annotations, outermost first, joined by slashes.
    path: Arc<str>,
    /// The path without the innermost name.
    outer: Arc<str>,
}

/// Makes events share equal texts and operations.
#[derive(Default)]
pub(super) struct Interner {
    texts: HashSet<Arc<str>>,
    annotations: HashMap<u32, Annotation>,
    operations: HashMap<usize, (Arc<Operation>, Arc<OperationInfo>)>,
}

impl Interner {
    pub(super) fn intern_text(&mut self, text: &str) -> Arc<str> {
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
            names.reverse();
            let (outer, innermost) = names.split_at(names.len().saturating_sub(1));
            Annotation {
                innermost: innermost.concat().into(),
                path: names.join("/").into(),
                outer: outer.join("/").into(),
            }
        })
    }

    fn intern_operation(&mut self, operation: &Arc<Operation>) -> Arc<OperationInfo> {
        let key = Arc::as_ptr(operation).addr();
        if let Some((_, known)) = self.operations.get(&key) {
            return Arc::clone(known);
        }
        let info = Arc::new(OperationInfo {
            name: self.intern_text(operation.name),
            shapes: operation.shapes.iter().map(|shape| shape.to_vec()).collect(),
            dtype: operation.dtype,
        });
        // The operation is kept alive so that its address, the key, is not reused.
        self.operations.insert(key, (Arc::clone(operation), Arc::clone(&info)));
        info
    }
}
