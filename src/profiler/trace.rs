//! Reads and writes profiles as traces in Chrome's format, which Perfetto and `chrome://tracing` open.
//!
//! The host is process 0 with its threads, and each OpenCL device is a process with its streams. The format is described in
//! "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMh4h6I0nSsKchNAySU).

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::build::Interner;
use super::{Category, Event, Lane, MemorySample, OperationInfo, Profile, ProfiledDevice};
use crate::file::{self, NewFile};
use crate::{Device, Error, Result};

impl Profile {
    /// Writes a trace in Chrome's format, which Perfetto (ui.perfetto.dev), `chrome://tracing` and [`load`](Self::load) open. The
    /// trace has tracks for the host's threads and the devices' streams, arrows from launches to their commands, and counters of
    /// allocated and reserved bytes. An existing file is replaced as a whole.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file's name if the file cannot be written.
    ///
    /// ```
    /// use claystone::profiler::{Profile, profile};
    /// use claystone::{Device, Tensor};
    /// let folder = tempfile::tempdir()?;
    /// let (_, profile) = profile(|| Tensor::ones(&[8, 8], Device::Cpu)?.exp())?;
    /// profile.save(folder.path().join("trace.json"))?;
    /// let again = Profile::load(folder.path().join("trace.json"))?;
    /// assert_eq!(again.events().len(), profile.events().len());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let write = || {
            let mut file = BufWriter::new(NewFile::create(path)?);
            self.write(&mut file)?;
            file.into_inner()?.commit()
        };
        write().map_err(|e: io::Error| Error::invalid("save", format!("{}: {e}", path.display())))
    }

    /// Writes the same trace as [`save`](Self::save) to a writer.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let devices = self.devices.iter().map(|of| {
            let (device, pid) = (of.device.to_string(), self.process_number(of.device));
            json!({ "device": device, "name": of.name, "pid": pid, "copy_bytes_per_s": of.copy_bytes_per_s })
        });
        let about = json!({
            "claystone": env!("CARGO_PKG_VERSION"), "duration_us": self.duration_us,
            "dropped_events": self.dropped_events, "devices": devices.collect::<Vec<Value>>(),
        });
        write!(to, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{about},\"traceEvents\":[")?;
        let mut first = true;
        let mut put = |event: Value| {
            let comma = if std::mem::take(&mut first) { "\n" } else { ",\n" };
            to.write_all(comma.as_bytes())?;
            serde_json::to_writer(&mut *to, &event).map_err(io::Error::from)
        };
        self.metadata_events().into_iter().try_for_each(&mut put)?;
        for event in &self.events {
            let (pid, tid) = self.track(event.lane);
            put(json!({
                "ph": "X", "cat": event.category.name(), "name": &*event.name, "pid": pid, "tid": tid,
                "ts": event.start_us, "dur": event.duration_us, "args": event_arguments(event),
            }))?;
            if event.launch > 0 {
                // The arrow starts inside the launch and ends at the start of the command.
                let ph = if event.category == Category::Launch { "s" } else { "f" };
                put(json!({
                    "ph": ph, "bp": "e", "id": event.launch, "cat": "launch", "name": "launch", "pid": pid, "tid": tid,
                    "ts": event.start_us,
                }))?;
            }
        }
        for sample in &self.memory {
            put(json!({
                "ph": "C", "name": format!("memory {}", sample.device), "pid": self.process_number(sample.device),
                "ts": sample.time_us, "args": { "allocated": sample.allocated, "reserved": sample.reserved },
            }))?;
        }
        to.write_all(b"\n]}\n")
    }

    /// Returns the metadata events that name processes and threads.
    fn metadata_events(&self) -> Vec<Value> {
        let name = |what: &str, pid: u64, tid: u64, name: &str| json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": { "name": name } });
        let mut names = vec![name("process_name", 0, 0, "host")];
        names.extend(self.threads.iter().map(|(number, of)| name("thread_name", 0, u64::from(*number), of)));
        for of in self.devices.iter().filter(|of| of.device.has_queues()) {
            let pid = self.process_number(of.device);
            names.push(name("process_name", pid, 0, &format!("{} {}", of.device, of.name)));
            let stream = |event: &Event| match event.lane {
                Lane::Stream(device, stream) if device == of.device => Some(stream),
                _ => None,
            };
            let streams: BTreeSet<u32> = self.events.iter().filter_map(stream).collect();
            names.extend(streams.into_iter().map(|s| name("thread_name", pid, s.into(), &format!("stream {s}"))));
        }
        names
    }

    /// Returns the process number of a device in the trace: 0 for the CPU.
    fn process_number(&self, device: Device) -> u64 {
        let opencl = self.devices.iter().filter(|of| of.device.has_queues());
        opencl.zip(1..).find(|(of, _)| of.device == device).map_or(0, |(_, number)| number)
    }

    /// Returns the process and thread numbers of a lane in the trace.
    fn track(&self, lane: Lane) -> (u64, u64) {
        match lane {
            Lane::Thread(number) => (0, number.into()),
            Lane::Stream(device, stream) => (self.process_number(device), stream.into()),
        }
    }

    /// Reads a trace that [`save`](Self::save) or another program, such as PyTorch's profiler, wrote in this format. From another
    /// program's trace, only events with a start and a duration are kept.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file's name if the file cannot be read or is not such a trace.
    pub fn load(path: impl AsRef<Path>) -> Result<Profile> {
        let path = path.as_ref();
        let unread = |e: &dyn fmt::Display| Error::invalid("load", format!("{}: {e}", path.display()));
        let bytes = file::read(path).map_err(|e| unread(&e))?;
        Profile::from_bytes(&bytes).map_err(|e| unread(&e))
    }

    /// Reads a trace from the bytes of a file, like [`load`](Self::load).
    ///
    /// # Errors
    /// [`Error::Invalid`] if the bytes are not a trace.
    pub fn from_bytes(bytes: &[u8]) -> Result<Profile> {
        let unread = |e: serde_json::Error| Error::invalid("load", format!("not a trace in Chrome's format: {e}"));
        let trace = match bytes.trim_ascii_start() {
            [b'[', ..] => Trace { events: serde_json::from_slice(bytes).map_err(unread)?, about: Value::Null },
            _ => serde_json::from_slice(bytes).map_err(unread)?,
        };
        let mut reader = TraceReader::default();
        reader.read_metadata(&trace.about);
        for event in trace.events {
            reader.read_event(&serde_json::from_str(event.get()).map_err(unread)?);
        }
        Ok(reader.into_profile())
    }
}

/// Returns the `args` of an event in the trace.
fn event_arguments(event: &Event) -> Value {
    let nonzero = |n: u64| (n > 0).then(|| Value::from(n));
    let operation = event.operation.as_deref();
    let [queued, submitted] = event.queued_us.map_or([None; 2], |times| times.map(Some));
    let arguments = [
        ("device", event.device.map(|device| device.to_string().into())),
        ("bytes", nonzero(event.bytes)),
        ("flops", nonzero(event.flops)),
        ("annotation", (!event.annotation.is_empty()).then(|| (*event.annotation).into())),
        ("kernel", (event.category == Category::Kernel).then(|| (*event.name).into())),
        ("operation", operation.map(|of| (*of.name).into())),
        ("shapes", operation.map(|of| of.shapes.clone().into())),
        ("dtype", operation.and_then(|of| of.dtype).map(|dtype| dtype.to_string().into())),
        ("queued_us", queued.map(Value::from)),
        ("submitted_us", submitted.map(Value::from)),
        ("launch", nonzero(event.launch)),
    ];
    arguments.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
}

/// A trace whose events are still JSON text, so that at most one event is in memory as a value.
#[derive(Deserialize)]
#[serde(expecting = "a list of events, or an object with traceEvents")]
struct Trace<'a> {
    #[serde(borrow, rename = "traceEvents")]
    events: Vec<&'a RawValue>,
    #[serde(default, rename = "otherData")]
    about: Value,
}

/// The profile built so far while a trace is read.
#[derive(Default)]
struct TraceReader {
    profile: Profile,
    /// Devices by their process numbers in the trace.
    processes: Vec<(u64, Device)>,
    shared: Interner,
    operations: Vec<Arc<OperationInfo>>,
}

impl TraceReader {
    fn read_metadata(&mut self, about: &Value) {
        self.profile.duration_us = about["duration_us"].as_f64().unwrap_or(0.0);
        self.profile.dropped_events = about["dropped_events"].as_u64().unwrap_or(0);
        for of in about["devices"].as_array().into_iter().flatten() {
            let Some(device) = of["device"].as_str().and_then(|name| name.parse().ok()) else { continue };
            let name = of["name"].as_str().unwrap_or_default().to_owned();
            self.profile.devices.push(ProfiledDevice {
                device,
                name,
                copy_bytes_per_s: of["copy_bytes_per_s"].as_f64(),
            });
            self.processes.extend(of["pid"].as_u64().filter(|_| device.has_queues()).map(|pid| (pid, device)));
        }
    }

    fn read_event(&mut self, event: &Value) {
        let (arguments, number) = (&event["args"], |key: &str| event[key].as_u64().unwrap_or(0));
        match event["ph"].as_str() {
            Some("M") if event["name"] == "thread_name" && number("pid") == 0 => {
                let name = arguments["name"].as_str().unwrap_or_default().to_owned();
                self.profile.threads.push((number("tid") as u32, name));
            }
            Some("C") => {
                let device = event["name"].as_str().and_then(|name| name.strip_prefix("memory ")?.parse().ok());
                let bytes = [arguments["allocated"].as_u64(), arguments["reserved"].as_u64()];
                if let (Some(device), Some(time_us), [Some(allocated), Some(reserved)]) =
                    (device, event["ts"].as_f64(), bytes)
                {
                    self.profile.memory.push(MemorySample { device, time_us, allocated, reserved });
                }
            }
            Some("X") => self.read_complete_event(event),
            _ => {}
        }
    }

    /// Adds an event with a start and a duration.
    fn read_complete_event(&mut self, event: &Value) {
        let (Some(name), Some(start_us), Some(duration_us)) =
            (event["name"].as_str(), event["ts"].as_f64(), event["dur"].as_f64())
        else {
            return;
        };
        let arguments = &event["args"];
        let category = event["cat"].as_str().map_or(Category::Other, category_from_name);
        let device = arguments["device"].as_str().and_then(|device| device.parse().ok());
        let pid = event["pid"].as_u64().unwrap_or(0);
        let process = self.processes.iter().find(|(number, _)| *number == pid).map(|&(_, device)| device);
        // In another program's trace, a command's device is known by its number only.
        let foreign =
            || category.is_command().then(|| Device::OpenCL(arguments["device"].as_u64().unwrap_or(0) as usize));
        let tid = event["tid"].as_u64().unwrap_or(0) as u32;
        let on_device =
            process.or_else(|| if self.processes.is_empty() && device.is_none() { foreign() } else { None });
        let operation = self.read_operation(arguments);
        let queued = [arguments["queued_us"].as_f64(), arguments["submitted_us"].as_f64()];
        self.profile.events.push(Event {
            category,
            name: self.shared.intern_text(name),
            device: device.or(on_device),
            lane: on_device.map_or(Lane::Thread(tid), |device| Lane::Stream(device, tid)),
            start_us,
            duration_us,
            queued_us: if let [Some(queued), Some(submitted)] = queued { Some([queued, submitted]) } else { None },
            bytes: arguments["bytes"].as_u64().unwrap_or(0),
            flops: arguments["flops"].as_u64().unwrap_or(0),
            annotation: self.shared.intern_text(arguments["annotation"].as_str().unwrap_or_default()),
            operation,
            launch: arguments["launch"].as_u64().unwrap_or(0),
        });
    }

    fn read_operation(&mut self, arguments: &Value) -> Option<Arc<OperationInfo>> {
        let name = self.shared.intern_text(arguments["operation"].as_str()?);
        let size = |n: &Value| n.as_u64().map(|n| n as usize);
        let shapes = arguments["shapes"].as_array().into_iter().flatten();
        let info = OperationInfo {
            name,
            shapes: shapes.filter_map(|shape| shape.as_array()?.iter().map(size).collect()).collect(),
            dtype: arguments["dtype"].as_str().and_then(|dtype| dtype.parse().ok()),
        };
        // An operation's launches and commands are close together in the trace, so the last 32 operations are compared.
        let near = self.operations.iter().rev().take(32).find(|known| ***known == info);
        let shared = near.map_or_else(|| Arc::new(info), Arc::clone);
        if self.operations.last().is_none_or(|last| !Arc::ptr_eq(last, &shared)) {
            self.operations.push(Arc::clone(&shared));
        }
        Some(shared)
    }

    fn into_profile(mut self) -> Profile {
        let events = &mut self.profile.events;
        events.sort_by(|a, b| a.start_us.total_cmp(&b.start_us).then(b.duration_us.total_cmp(&a.duration_us)));
        if self.profile.duration_us <= 0.0 {
            let end = events.iter().map(|event| event.start_us + event.duration_us).fold(0.0, f64::max);
            self.profile.duration_us = end - events.first().map_or(0.0, |first| first.start_us);
        }
        self.profile
    }
}

/// Returns the category for a name, including PyTorch's names.
fn category_from_name(name: &str) -> Category {
    let own = Category::NAMES.into_iter().find(|(_, own)| *own == name);
    own.map(|(category, _)| category).unwrap_or(match name {
        "cpu_op" => Category::Operation,
        "user_annotation" => Category::Annotation,
        "cuda_runtime" | "cuda_driver" => Category::Launch,
        "gpu_memcpy" => Category::Copy,
        "gpu_memset" => Category::Fill,
        _ => Category::Other,
    })
}
