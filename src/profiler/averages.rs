//! A profile summed up by name: `torch.profiler`'s `key_averages`.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::report::{summary, time};
use super::{Category, Event, Lane, Profile};
use crate::{Device, Error, Excerpt, Result};

/// What the rows of [`Averages`] are sorted by, the largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SortBy {
    /// Time on devices: on the CPU device that of the operations themselves.
    #[default]
    DeviceTime,
    /// The host's time, without what is nested inside.
    HostTime,
    /// How often it happened.
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
                let reason = format!("'{}' is no column: write device, host, calls, bytes or name", Excerpt(other));
                return Err(Error::invalid("profile", reason));
            }
        })
    }
}

/// Everything of one name in a profile. Times are in microseconds.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Average {
    /// What it is: operations and the kernels that they launch have rows of their own, as in PyTorch's table.
    pub category: Category,
    /// The events' name.
    pub name: Arc<str>,
    /// The device that it ran on, or was for.
    pub device: Option<Device>,
    /// Shapes of the operands, where rows are told apart by them.
    pub shapes: Vec<Vec<usize>>,
    /// How often it happened.
    pub calls: u64,
    /// The host's time, without that of events nested inside.
    pub host_self_us: f64,
    /// The host's time.
    pub host_total_us: f64,
    /// Time on devices: of kernels and other commands their own, of operations that of their commands.
    pub device_us: f64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Floating-point operations, where they are known.
    pub flops: u64,
    /// How fast the device that it ran on copies, in bytes a second; None where it was not measured.
    pub copy_bytes_per_s: Option<f64>,
}

impl Average {
    /// Bytes read and written a second of device time; None without either.
    pub fn bytes_per_s(&self) -> Option<f64> {
        (self.bytes > 0 && self.device_us > 0.0).then(|| self.bytes as f64 / self.device_us * 1e6)
    }

    /// [`bytes_per_s`](Self::bytes_per_s) as a share of the device's own copy rate: near 1 where only a smaller amount of
    /// memory would help.
    pub fn share_of_copy_rate(&self) -> Option<f64> {
        Some(self.bytes_per_s()? / self.copy_bytes_per_s?)
    }

    /// Floating-point operations a second of device time; None without either.
    pub fn flops_per_s(&self) -> Option<f64> {
        (self.flops > 0 && self.device_us > 0.0).then(|| self.flops as f64 / self.device_us * 1e6)
    }
}

/// A profile summed up by name. It prints as a table with a summary of each device below.
#[derive(Debug, Clone, PartialEq)]
pub struct Averages {
    rows: Vec<Average>,
    device_us: f64,
    limit: usize,
    summary: String,
}

/// What events of one row have in common.
type Key = (Category, Arc<str>, Option<Device>, Vec<Vec<usize>>);

impl Profile {
    /// Sums up events by name (PyTorch's `key_averages()`), sorted by time on devices.
    pub fn key_averages(&self) -> Averages {
        self.averages(false)
    }

    /// [`key_averages`](Self::key_averages) with a row for each combination of shapes (PyTorch's `group_by_input_shape`).
    pub fn key_averages_by_shape(&self) -> Averages {
        self.averages(true)
    }

    fn averages(&self, by_shape: bool) -> Averages {
        let selves = self.host_self_times();
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
        for (event, &host_self) in self.events.iter().zip(&selves) {
            let on_host = matches!(event.lane, Lane::Thread(_));
            let on_cpu_device = on_host && event.device.is_some_and(Device::is_cpu);
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
        let averages = Averages { rows, device_us, limit: usize::MAX, summary: summary(self) };
        averages.sorted_by(SortBy::DeviceTime)
    }

    fn copy_rate(&self, device: Device) -> Option<f64> {
        self.devices.iter().find(|of| of.device == device)?.copy_bytes_per_s
    }

    /// For each event on a thread its time without that of events nested inside; 0 for others.
    fn host_self_times(&self) -> Vec<f64> {
        let mut selves: Vec<f64> = vec![0.0; self.events.len()];
        let mut open: HashMap<Lane, Vec<usize>> = HashMap::new();
        for (i, event) in self.events.iter().enumerate() {
            if !matches!(event.lane, Lane::Thread(_)) {
                continue;
            }
            selves[i] = event.duration_us;
            let open = open.entry(event.lane).or_default();
            while open.last().is_some_and(|&outer| end(&self.events[outer]) <= event.start_us) {
                open.pop();
            }
            if let Some(&outer) = open.last() {
                selves[outer] -= event.duration_us.min(end(&self.events[outer]) - event.start_us);
            }
            open.push(i);
        }
        selves.iter_mut().for_each(|time| *time = time.max(0.0));
        selves
    }
}

fn end(event: &Event) -> f64 {
    event.start_us + event.duration_us
}

impl Averages {
    /// The rows.
    pub fn rows(&self) -> &[Average] {
        &self.rows
    }

    /// All time on devices, in microseconds.
    pub fn device_us(&self) -> f64 {
        self.device_us
    }

    /// The same, sorted.
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

    /// The same, of which only the first `limit` rows are printed.
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
        line([
            "name",
            "category",
            "on",
            "calls",
            "host self",
            "host",
            "device",
            "share",
            "average",
            "GB/s",
            "copy",
            "GFLOP/s",
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
                &time(row.host_self_us),
                &time(row.host_total_us),
                &time(row.device_us),
                &share,
                &time(of_a_call),
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
