//! Profiles in files: Chrome's trace format, which Perfetto and `chrome://tracing` open.
//!
//! The host is process 0 with its threads, and each OpenCL device is a process with its streams. The format is described in
//! "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMh4h6I0nSsKchNAySU).

use std::fmt;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use super::build::Shared;
use super::{Category, Event, Lane, MemorySample, OperationInfo, Profile, ProfiledDevice};
use crate::file::{self, NewFile};
use crate::{Device, Error, Result};

impl Profile {
    /// Writes Chrome's trace format, which Perfetto (ui.perfetto.dev), `chrome://tracing` and [`load`](Self::load) open:
    /// tracks of the host's threads and the devices' streams, arrows from launches to their commands, and counters of
    /// allocated and reserved bytes. The file is replaced as a whole.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file's name where it cannot be written.
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

    /// Writes what [`save`](Self::save) does.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let devices: Vec<Value> = self
            .devices
            .iter()
            .map(|of| {
                json!({
                    "device": of.device.to_string(),
                    "name": of.name,
                    "pid": self.process(of.device),
                    "copy_bytes_per_s": of.copy_bytes_per_s,
                })
            })
            .collect();
        let about = json!({
            "claystone": env!("CARGO_PKG_VERSION"),
            "duration_us": self.duration_us,
            "dropped_events": self.dropped_events,
            "devices": devices,
        });
        write!(to, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{about},\"traceEvents\":[")?;
        let mut first = true;
        let mut put = |event: Value| {
            let comma = if std::mem::take(&mut first) { "\n" } else { ",\n" };
            to.write_all(comma.as_bytes())?;
            serde_json::to_writer(&mut *to, &event).map_err(io::Error::from)
        };
        self.names().into_iter().try_for_each(&mut put)?;
        for event in &self.events {
            let (pid, tid) = self.track(event.lane);
            put(json!({
                "ph": "X", "cat": event.category.name(), "name": &*event.name, "pid": pid, "tid": tid,
                "ts": event.start_us, "dur": event.duration_us, "args": arguments(event),
            }))?;
            if event.launch > 0 {
                // The arrow starts inside of the launch and ends where the command begins.
                let at = |ph: &str, ts: f64| json!({ "ph": ph, "bp": "e", "id": event.launch, "cat": "launch", "name": "launch", "pid": pid, "tid": tid, "ts": ts });
                put(match event.category {
                    Category::Launch => at("s", event.start_us),
                    _ => at("f", event.start_us),
                })?;
            }
        }
        for sample in &self.memory {
            put(json!({
                "ph": "C", "name": format!("memory {}", sample.device), "pid": self.process(sample.device),
                "ts": sample.time_us, "args": { "allocated": sample.allocated, "reserved": sample.reserved },
            }))?;
        }
        to.write_all(b"\n]}\n")
    }

    /// The events that name processes and threads.
    fn names(&self) -> Vec<Value> {
        let name = |what: &str, pid: u64, tid: u64, name: &str| json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": { "name": name } });
        let mut names = vec![name("process_name", 0, 0, "host")];
        names.extend(self.threads.iter().map(|(number, of)| name("thread_name", 0, u64::from(*number), of)));
        for of in self.devices.iter().filter(|of| !of.device.is_cpu()) {
            let pid = self.process(of.device);
            names.push(name("process_name", pid, 0, &format!("{} {}", of.device, of.name)));
            let mut streams: Vec<u32> = self
                .events
                .iter()
                .filter_map(|event| match event.lane {
                    Lane::Stream(device, stream) if device == of.device => Some(stream),
                    _ => None,
                })
                .collect();
            streams.sort_unstable();
            streams.dedup();
            names.extend(streams.into_iter().map(|s| name("thread_name", pid, s.into(), &format!("stream {s}"))));
        }
        names
    }

    /// The number of a device's process.
    fn process(&self, device: Device) -> u64 {
        let opencl = self.devices.iter().filter(|of| !of.device.is_cpu());
        opencl.zip(1..).find(|(of, _)| of.device == device).map_or(0, |(_, number)| number)
    }

    /// The process and the thread of a lane.
    fn track(&self, lane: Lane) -> (u64, u64) {
        match lane {
            Lane::Thread(number) => (0, number.into()),
            Lane::Stream(device, stream) => (self.process(device), stream.into()),
        }
    }

    /// Reads a file that [`save`](Self::save) wrote, or another program's trace in this format (PyTorch's profiler writes
    /// them), of which the events with a beginning and a duration are kept.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file's name where it cannot be read or is no such trace.
    pub fn load(path: impl AsRef<Path>) -> Result<Profile> {
        let path = path.as_ref();
        let unread = |e: &dyn fmt::Display| Error::invalid("load", format!("{}: {e}", path.display()));
        let bytes = file::read(path).map_err(|e| unread(&e))?;
        Profile::from_bytes(&bytes).map_err(|e| unread(&e))
    }

    /// [`load`](Self::load) of the bytes of a file.
    ///
    /// # Errors
    /// [`Error::Invalid`] where they are no trace.
    pub fn from_bytes(bytes: &[u8]) -> Result<Profile> {
        let mut reader = Reader::default();
        let mut json = serde_json::Deserializer::from_slice(bytes);
        let read = Trace(&mut reader).deserialize(&mut json).and_then(|()| json.end());
        read.map_err(|e| Error::invalid("load", format!("not a trace in Chrome's format: {e}")))?;
        Ok(reader.finish())
    }
}

/// The arguments of an event.
fn arguments(event: &Event) -> Value {
    let mut arguments = Map::new();
    let mut set = |key: &str, value: Value| _ = arguments.insert(key.into(), value);
    if let Some(device) = event.device {
        set("device", device.to_string().into());
    }
    if event.bytes > 0 {
        set("bytes", event.bytes.into());
    }
    if event.flops > 0 {
        set("flops", event.flops.into());
    }
    if !event.annotation.is_empty() {
        set("annotation", (*event.annotation).into());
    }
    if event.category == Category::Kernel {
        set("kernel", (*event.name).into());
    }
    if let Some(operation) = &event.operation {
        set("operation", (*operation.name).into());
        set("shapes", operation.shapes.clone().into());
        if let Some(dtype) = operation.dtype {
            set("dtype", dtype.to_string().into());
        }
    }
    if let Some([queued, submitted]) = event.queued_us {
        set("queued_us", queued.into());
        set("submitted_us", submitted.into());
    }
    if event.launch > 0 {
        set("launch", event.launch.into());
    }
    Value::Object(arguments)
}

/// A profile that is being read.
#[derive(Default)]
struct Reader {
    profile: Profile,
    /// Devices by the numbers of their processes.
    processes: Vec<(u64, Device)>,
    shared: Shared,
    operations: Vec<Arc<OperationInfo>>,
}

impl Reader {
    fn about(&mut self, about: &Value) {
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
            self.processes.extend(of["pid"].as_u64().filter(|_| !device.is_cpu()).map(|pid| (pid, device)));
        }
    }

    fn event(&mut self, event: &Value) {
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
            Some("X") => self.complete(event),
            _ => {}
        }
    }

    /// An event with a beginning and a duration.
    fn complete(&mut self, event: &Value) {
        let (Some(name), Some(start_us), Some(duration_us)) =
            (event["name"].as_str(), event["ts"].as_f64(), event["dur"].as_f64())
        else {
            return;
        };
        let arguments = &event["args"];
        let category = event["cat"].as_str().map_or(Category::Other, category);
        let device = arguments["device"].as_str().and_then(|device| device.parse().ok());
        let pid = event["pid"].as_u64().unwrap_or(0);
        let process = self.processes.iter().find(|(number, _)| *number == pid).map(|&(_, device)| device);
        // Another program's commands are a device's, of which only the number is known.
        let foreign =
            || category.is_command().then(|| Device::OpenCL(arguments["device"].as_u64().unwrap_or(0) as usize));
        let tid = event["tid"].as_u64().unwrap_or(0) as u32;
        let on_device =
            process.or_else(|| if self.processes.is_empty() && device.is_none() { foreign() } else { None });
        let operation = self.operation(arguments);
        let queued = [arguments["queued_us"].as_f64(), arguments["submitted_us"].as_f64()];
        self.profile.events.push(Event {
            category,
            name: self.shared.text(name),
            device: device.or(on_device),
            lane: on_device.map_or(Lane::Thread(tid), |device| Lane::Stream(device, tid)),
            start_us,
            duration_us,
            queued_us: if let [Some(queued), Some(submitted)] = queued { Some([queued, submitted]) } else { None },
            bytes: arguments["bytes"].as_u64().unwrap_or(0),
            flops: arguments["flops"].as_u64().unwrap_or(0),
            annotation: self.shared.text(arguments["annotation"].as_str().unwrap_or_default()),
            operation,
            launch: arguments["launch"].as_u64().unwrap_or(0),
        });
    }

    fn operation(&mut self, arguments: &Value) -> Option<Arc<OperationInfo>> {
        let name = self.shared.text(arguments["operation"].as_str()?);
        let size = |n: &Value| n.as_u64().map(|n| n as usize);
        let shapes = arguments["shapes"].as_array().into_iter().flatten();
        let info = OperationInfo {
            name,
            shapes: shapes.filter_map(|shape| shape.as_array()?.iter().map(size).collect()).collect(),
            dtype: arguments["dtype"].as_str().and_then(|dtype| dtype.parse().ok()),
        };
        // Launches and commands of an operation stand close together.
        let near = self.operations.iter().rev().take(32).find(|known| ***known == info);
        let shared = near.map_or_else(|| Arc::new(info), Arc::clone);
        if self.operations.last().is_none_or(|last| !Arc::ptr_eq(last, &shared)) {
            self.operations.push(Arc::clone(&shared));
        }
        Some(shared)
    }

    fn finish(mut self) -> Profile {
        let events = &mut self.profile.events;
        events.sort_by(|a, b| a.start_us.total_cmp(&b.start_us).then(b.duration_us.total_cmp(&a.duration_us)));
        if self.profile.duration_us <= 0.0 {
            let end = events.iter().map(|event| event.start_us + event.duration_us).fold(0.0, f64::max);
            self.profile.duration_us = end - events.first().map_or(0.0, |first| first.start_us);
        }
        self.profile
    }
}

/// The category of a name, PyTorch's among them.
fn category(name: &str) -> Category {
    let own = [
        Category::Operation,
        Category::Backward,
        Category::Annotation,
        Category::Launch,
        Category::Wait,
        Category::Open,
        Category::Segment,
        Category::Compile,
        Category::Load,
        Category::Kernel,
        Category::Copy,
        Category::Fill,
        Category::Read,
        Category::Write,
    ];
    own.into_iter().find(|category| category.name() == name).unwrap_or(match name {
        "cpu_op" => Category::Operation,
        "user_annotation" => Category::Annotation,
        "cuda_runtime" | "cuda_driver" => Category::Launch,
        "gpu_memcpy" => Category::Copy,
        "gpu_memset" => Category::Fill,
        _ => Category::Other,
    })
}

/// Reads a trace event by event, so that no more than one of them is in memory as JSON.
struct Trace<'a>(&'a mut Reader);

impl<'de> DeserializeSeed<'de> for Trace<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Trace<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of events, or an object with traceEvents")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "traceEvents" => {
                    found = true;
                    map.next_value_seed(Trace(self.0))?;
                }
                "otherData" => self.0.about(&map.next_value()?),
                _ => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        if found { Ok(()) } else { Err(serde::de::Error::custom("there are no traceEvents")) }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> std::result::Result<(), A::Error> {
        while let Some(event) = events.next_element::<Value>()? {
            self.0.event(&event);
        }
        Ok(())
    }
}
