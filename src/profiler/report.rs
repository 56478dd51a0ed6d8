//! Reports of a profile: how busy the devices were, and the times of every command.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use super::{Category, Event, Lane, Profile};
use crate::Device;

/// How busy a device was between its first and its last event. Times are in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Gaps {
    /// The device.
    pub device: Device,
    /// The start of the first event, in microseconds since the profile began.
    pub from_us: f64,
    /// The time from the start of the first event to the end of the last.
    pub span_us: f64,
    /// The time during which the device worked. Events that overlap, on several streams or threads, count once.
    pub busy_us: f64,
    /// The rest of the span: the sum of the gaps between events.
    pub idle_us: f64,
    /// The number of gaps.
    pub count: u64,
    /// The longest gap.
    pub longest_us: f64,
}

impl Gaps {
    /// Returns an empty record that starts with event `first`, which is then [added](Self::add).
    fn starting_at(device: Device, first: &Event) -> Gaps {
        let from_us = first.start_us;
        Gaps { device, from_us, span_us: 0.0, busy_us: 0.0, idle_us: 0.0, count: 0, longest_us: 0.0 }
    }

    /// Adds the next event. Events must be added in order of their start.
    fn add(&mut self, event: &Event) {
        let (until, end) = (self.from_us + self.span_us, event.start_us + event.duration_us);
        let gap = event.start_us - until;
        if gap > 0.0 {
            self.idle_us += gap;
            self.count += 1;
            self.longest_us = self.longest_us.max(gap);
        }
        self.busy_us += (end - event.start_us.max(until)).max(0.0);
        self.span_us = end.max(until) - self.from_us;
    }
}

impl Profile {
    /// Returns for each device how busy the device was, and the gaps between its events.
    pub fn gaps(&self) -> Vec<Gaps> {
        let mut by_device: BTreeMap<String, Gaps> = BTreeMap::new();
        for event in self.events.iter().filter(|event| is_work(event)) {
            let Some(device) = event.device else { continue };
            let gaps = by_device.entry(device.to_string()).or_insert_with(|| Gaps::starting_at(device, event));
            gaps.add(event);
        }
        by_device.into_values().collect()
    }

    /// Returns the times of every command, in the format that MNN's OpenCL backend prints: see [`Timings`].
    pub fn timings(&self) -> Timings<'_> {
        Timings(self)
    }
}

/// True for work of a device: commands, and operations of the CPU device.
fn is_work(event: &Event) -> bool {
    event.category.is_command()
        || event.category == Category::Operation && event.device.is_some_and(|device| !device.has_queues())
}

/// Prints the times of every command of a device, in microseconds: how long the command was queued before it was submitted to the device, how long it
/// waited to start, and how long it ran. The last line has the total time of the devices, with overlapping commands of a device counted once.
#[derive(Debug, Clone, Copy)]
pub struct Timings<'a>(&'a Profile);

impl fmt::Display for Timings<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for event in self.0.events.iter().filter(|event| is_work(event)) {
            let of = event.operation.as_ref().filter(|o| o.name != event.name).map(|o| format!(" ({})", o.name));
            let lane = match event.lane {
                Lane::Stream(device, stream) => format!("{device} stream {stream}"),
                Lane::Thread(_) => event.device.map(|device| device.to_string()).unwrap_or_default(),
            };
            let name = format!("{}{}", event.name, of.unwrap_or_default());
            write!(f, "{lane:20} {name:40}")?;
            if let Some([queued, submitted]) = event.queued_us {
                write!(f, " queued {:9.1}, submitted {:9.1},", submitted - queued, event.start_us - submitted)?;
            }
            writeln!(f, " run {:9.1}", event.duration_us)?;
        }
        let total: f64 = self.0.gaps().iter().map(|gaps| gaps.busy_us).sum();
        writeln!(f, "total time: {total:.1} us")
    }
}

/// Returns the text below the table of averages.
pub(super) fn summary_text(profile: &Profile) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "\n{} from start to stop", format_micros(profile.duration_us));
    for gaps in profile.gaps() {
        let known = profile.devices.iter().find(|of| of.device == gaps.device);
        let name = known.map(|of| of.name.as_str()).unwrap_or_default();
        let rate = known.and_then(|of| of.copy_bytes_per_s).map(|rate| format!("; copies {:.1} GB/s", rate / 1e9));
        let _ = writeln!(
            text,
            "{} ({name}): busy for {} of {} ({:.0}%); {} gaps of {} in all, the longest {}{}",
            gaps.device,
            format_micros(gaps.busy_us),
            format_micros(gaps.span_us),
            if gaps.span_us > 0.0 { 100.0 * gaps.busy_us / gaps.span_us } else { 0.0 },
            gaps.count,
            format_micros(gaps.idle_us),
            format_micros(gaps.longest_us),
            rate.unwrap_or_default(),
        );
    }
    for (number, name) in &profile.threads {
        let mut events = profile.events.iter().filter(|event| event.lane == Lane::Thread(*number)).peekable();
        let Some(first) = events.peek() else { continue };
        let mut thread = Gaps::starting_at(Device::Cpu, first);
        events.for_each(|event| thread.add(event));
        let (inside, between) = (format_micros(thread.busy_us), format_micros(thread.idle_us));
        let _ = writeln!(text, "thread {name}: {inside} in recorded events, {between} between them");
    }
    for (category, what) in [
        (Category::Wait, "waits of the host"),
        (Category::Open, "devices opened"),
        (Category::Compile, "programs compiled"),
        (Category::Load, "programs loaded from the cache"),
        (Category::Segment, "calls of drivers for memory"),
    ] {
        let events = profile.events.iter().filter(|event| event.category == category);
        let (count, total) = events.fold((0u64, 0.0), |(count, total), event| (count + 1, total + event.duration_us));
        if count > 0 {
            let _ = writeln!(text, "{count} {what}: {}", format_micros(total));
        }
    }
    if profile.dropped_events > 0 {
        let _ = writeln!(text, "{} older events did not fit and are left out", profile.dropped_events);
    }
    text
}

/// Formats microseconds as s, ms or us.
pub(super) fn format_micros(us: f64) -> String {
    match us {
        _ if us >= 1e6 => format!("{:.3} s", us / 1e6),
        _ if us >= 1e3 => format!("{:.3} ms", us / 1e3),
        _ => format!("{us:.1} us"),
    }
}
