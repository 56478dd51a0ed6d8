//! Sums of a profile's events by name, as in `torch.profiler`'s `key_averages`.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::report::{format_micros, summary_text};
use super::{Category, Event, Lane, Profile};
use crate::error::Excerpt;
use crate::{Device, Error, Result};

/// The column that rows of [`Averages`] are sorted by, the largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SortBy {
    /// Time on devices; on the CPU device, the time of its operations without nested events.
    #[default]
    DeviceTime,
    /// The host's time without nested events.
    HostTime,
    /// The number of events.
    Calls,
    /// Bytes read and written.
    Bytes,
    /// The name, in alphabetical order.
    Name,
}

impl FromStr for SortBy {
    type Err = Error;

    /// Reads `device`, `host`, `calls`, `bytes` or `name`.
    fn from_str(s: &str) -> Result<SortBy> {
        Ok(match s {
            "device" => SortBy::DeviceTime,
            "host" => SortBy::HostTime,
            "calls" => SortBy::Calls,
            "bytes" => SortBy::Bytes,
            "name" => SortBy::Name,
            other => {
                let reason = format!("'{}' is not a column: use device, host, calls, bytes or name", Excerpt(other));
                return Err(Error::invalid("profile", reason));
            }
        })
    }
}

/// The sums of all events of one name in a profile. Times are in microseconds.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Average {
    /// The category of the events. Operations and the kernels they launch have separate rows, as in PyTorch's table.
    pub category: Category,
    /// The events' name.
    pub name: Arc<str>,
    /// The device that ran the work, or for which the host worked.
    pub device: Option<Device>,
    /// Shapes of the operands, if rows are grouped by shape; otherwise empty.
    pub shapes: Vec<Vec<usize>>,
    /// The number of events.
    pub calls: u64,
    /// The host's time without nested events.
    pub host_self_us: f64,
    /// The host's time, including nested events.
    pub host_total_us: f64,
    /// Time on devices: a command's own time; for an operation, the sum over its commands.
    pub device_us: f64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Floating-point operations; 0 if unknown.
    pub flops: u64,
    /// The copy rate of the device in bytes per second; `None` if the rate was not measured.
    pub copy_bytes_per_s: Option<f64>,
}

impl Average {
    /// Returns the bytes read and written per second of device time; `None` if either is 0.
    pub fn bytes_per_s(&self) -> Option<f64> {
        (self.bytes > 0 && self.device_us > 0.0).then(|| self.bytes as f64 / self.device_us * 1e6)
    }

    /// Returns [`bytes_per_s`](Self::bytes_per_s) divided by the device's own copy rate. A value near 1 means that the kernel is
    /// bound by memory bandwidth: only less memory traffic would make it faster.
    pub fn share_of_copy_rate(&self) -> Option<f64> {
        Some(self.bytes_per_s()? / self.copy_bytes_per_s?)
    }

    /// Returns the floating-point operations per second of device time; `None` if either is 0.
    pub fn flops_per_s(&self) -> Option<f64> {
        (self.flops > 0 && self.device_us > 0.0).then(|| self.flops as f64 / self.device_us * 1e6)
    }
}

/// The sums of a profile's events by name. Display prints a table, with a summary of each device below.
#[derive(Debug, Clone, PartialEq)]
pub struct Averages {
    rows: Vec<Average>,
    device_us: f64,
    limit: usize,
    summary: String,
}

/// The properties that all events of a row share.
type Key = (Category, Arc<str>, Option<Device>, Vec<Vec<usize>>);

impl Profile {
    /// Sums up events by name (PyTorch's `key_averages()`), sorted by time on devices.
    pub fn key_averages(&self) -> Averages {
        self.averages(false)
    }

    /// Like [`key_averages`](Self::key_averages), with a row for each combination of shapes (PyTorch's `group_by_input_shape`).
    pub fn key_averages_by_shape(&self) -> Averages {
        self.averages(true)
    }

    fn averages(&self, by_shape: bool) -> Averages {
        let self_times = self.host_self_times();
        let mut rows: Vec<Average> = Vec::new();
        let mut known: HashMap<Key, usize> = HashMap::new();
        let mut row_of = |rows: &mut Vec<Average>, category, name: &Arc<str>, event: &Event| {
            let shapes = event.operation.as_ref().filter(|_| by_shape).map(|o| o.shapes.clone()).unwrap_or_default();
            let key = (category, Arc::clone(name), event.device, shapes);
            *known.entry(key).or_insert_with_key(|(_, _, device, shapes)| {
                rows.push(Average {
                    category,
                    name: Arc::clone(name),
                    device: *device,
                    shapes: shapes.clone(),
                    calls: 0,
                    host_self_us: 0.0,
                    host_total_us: 0.0,
                    device_us: 0.0,
                    bytes: 0,
                    flops: 0,
                    copy_bytes_per_s: device.and_then(|device| self.copy_rate(device)),
                });
                rows.len() - 1
            })
        };
        let mut device_us = 0.0;
        for (event, &host_self) in self.events.iter().zip(&self_times) {
            let on_host = matches!(event.lane, Lane::Thread(_));
            let on_cpu_device = on_host && event.device.is_some_and(|device| !device.has_queues());
            let is_operation = event.category == Category::Operation;
            let computes = event.category.is_command() || is_operation && on_cpu_device;
            let device_time = match computes {
                true if on_host => host_self,
                true => event.duration_us,
                false => 0.0,
            };
            device_us += device_time;
            let at = row_of(&mut rows, event.category, &event.name, event);
            let row = &mut rows[at];
            row.calls += 1;
            row.bytes += event.bytes;
            row.flops += event.flops;
            row.device_us += device_time;
            if on_host {
                row.host_self_us += host_self;
                row.host_total_us += event.duration_us;
            }
            let Some(operation) = &event.operation else { continue };
            if event.category.is_command() && !on_host {
                let at = row_of(&mut rows, Category::Operation, &operation.name, event);
                rows[at].device_us += device_time;
            }
        }
        let averages = Averages { rows, device_us, limit: usize::MAX, summary: summary_text(self) };
        averages.sorted_by(SortBy::DeviceTime)
    }

    fn copy_rate(&self, device: Device) -> Option<f64> {
        self.devices.iter().find(|of| of.device == device)?.copy_bytes_per_s
    }

    /// Returns the time of each event on a thread without nested events; 0 for other events.
    fn host_self_times(&self) -> Vec<f64> {
        let mut self_times: Vec<f64> = vec![0.0; self.events.len()];
        let mut open: HashMap<Lane, Vec<usize>> = HashMap::new();
        for (i, event) in self.events.iter().enumerate() {
            if !matches!(event.lane, Lane::Thread(_)) {
                continue;
            }
            self_times[i] = event.duration_us;
            let open = open.entry(event.lane).or_default();
            while open.last().is_some_and(|&outer| end_us(&self.events[outer]) <= event.start_us) {
                open.pop();
            }
            if let Some(&outer) = open.last() {
                self_times[outer] -= event.duration_us.min(end_us(&self.events[outer]) - event.start_us);
            }
            open.push(i);
        }
        self_times.iter_mut().for_each(|time| *time = time.max(0.0));
        self_times
    }
}

fn end_us(event: &Event) -> f64 {
    event.start_us + event.duration_us
}

impl Averages {
    /// Returns the rows, in the current order.
    pub fn rows(&self) -> &[Average] {
        &self.rows
    }

    /// Returns the total time on devices, in microseconds.
    pub fn device_us(&self) -> f64 {
        self.device_us
    }

    /// Sorts the rows by a column: the largest first, or names in alphabetical order.
    pub fn sorted_by(mut self, by: SortBy) -> Averages {
        match by {
            SortBy::DeviceTime => self.rows.sort_by(|a, b| b.device_us.total_cmp(&a.device_us)),
            SortBy::HostTime => self.rows.sort_by(|a, b| b.host_self_us.total_cmp(&a.host_self_us)),
            SortBy::Calls => self.rows.sort_by_key(|row| Reverse(row.calls)),
            SortBy::Bytes => self.rows.sort_by_key(|row| Reverse(row.bytes)),
            SortBy::Name => self.rows.sort_by(|a, b| a.name.cmp(&b.name).then(a.category.cmp(&b.category))),
        }
        self
    }

    /// Limits [`Display`](fmt::Display) to the first `limit` rows.
    pub fn limited_to(mut self, limit: usize) -> Averages {
        self.limit = limit;
        self
    }
}

impl fmt::Display for Averages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = &self.rows[..self.limit.min(self.rows.len())];
        let name = |row: &Average| match row.shapes.is_empty() {
            true => row.name.to_string(),
            false => format!("{} {:?}", row.name, row.shapes),
        };
        let width = shown.iter().map(|row| name(row).chars().count()).max().unwrap_or(0).clamp(4, 60);
        let mut line = |cells: [&str; 12]| {
            let [name, category, on, numbers @ ..] = cells;
            let [calls, host_self, host, device, share, average, rate, copy, flops] = numbers;
            writeln!(
                f,
                "{name:width$}  {category:10} {on:8} {calls:>8} {host_self:>10} {host:>10} {device:>10} {share:>6} \
                 {average:>10} {rate:>8} {copy:>5} {flops:>9}"
            )
        };
        let own = "host self";
        line([
            "name", "category", "on", "calls", own, "host", "device", "share", "average", "GB/s", "copy", "GFLOP/s",
        ])?;
        let billions = |rate: Option<f64>| rate.map(|rate| format!("{:.1}", rate / 1e9)).unwrap_or_default();
        for row in shown {
            let on_device = row.device_us > 0.0;
            let share =
                if on_device { format!("{:.1}%", 100.0 * row.device_us / self.device_us) } else { String::new() };
            let of_a_call = if on_device { row.device_us } else { row.host_total_us } / row.calls.max(1) as f64;
            let copy = row.share_of_copy_rate().map(|share| format!("{:.0}%", 100.0 * share));
            line([
                &name(row),
                row.category.name(),
                &row.device.map(|device| device.to_string()).unwrap_or_default(),
                &row.calls.to_string(),
                &format_micros(row.host_self_us),
                &format_micros(row.host_total_us),
                &format_micros(row.device_us),
                &share,
                &format_micros(of_a_call),
                &billions(row.bytes_per_s()),
                &copy.unwrap_or_default(),
                &billions(row.flops_per_s()),
            ])?;
        }
        if shown.len() < self.rows.len() {
            writeln!(f, "... and {} more", self.rows.len() - shown.len())?;
        }
        f.write_str(&self.summary)
    }
}
