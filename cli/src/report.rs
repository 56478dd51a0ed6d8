//! Prints results: a table for people, JSON for programs.

use std::io::{self, Write};
use std::path::Path;

use claystone::storage::Backend;
use serde::Serialize;

use crate::measure::Measured;
use crate::trace::Trace;

/// The results of one trace under one allocator; sizes in bytes. The names of the fields are the JSON keys.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    trace: String,
    backend: &'static str,
    peak_requested: u64,
    peak_reserved: u64,
    utilisation: f64,
    segments: u64,
    driver_calls: u64,
    /// Nanoseconds of one allocation and its release. Measured after all other figures, one trace at a time.
    pub ns_per_pair: Option<f64>,
    planned: Option<u64>,
    min_capacity: Option<u64>,
    #[serde(skip)]
    served: Option<u64>,
}

/// Memory of a plan, in bytes.
pub struct Planned {
    /// The size of the arena of the offline placement.
    pub arena: u64,
    /// The peak of reserved bytes while the allocator served from a plan.
    pub served: u64,
}

pub fn backend_name(backend: Backend) -> &'static str {
    match backend {
        Backend::Caching => "caching",
        Backend::Pool => "pool",
        Backend::Direct => "direct",
        _ => "other",
    }
}

impl Row {
    pub fn new(
        trace: &Trace,
        backend: Backend,
        measured: &Measured,
        planned: Option<Planned>,
        min_capacity: Option<u64>,
    ) -> Row {
        Row {
            trace: trace.name.clone(),
            backend: backend_name(backend),
            peak_requested: trace.peak_requested,
            peak_reserved: measured.peak_reserved,
            utilisation: trace.peak_requested as f64 / measured.peak_reserved as f64,
            segments: measured.segments,
            driver_calls: measured.driver_calls,
            ns_per_pair: None,
            planned: planned.as_ref().map(|planned| planned.arena),
            min_capacity,
            served: planned.as_ref().map(|planned| planned.served),
        }
    }

    fn plan_utilisation(&self) -> Option<f64> {
        self.planned.map(|arena| self.peak_requested as f64 / arena as f64)
    }

    fn capacity_ratio(&self) -> Option<f64> {
        self.min_capacity.map(|capacity| capacity as f64 / self.peak_requested as f64)
    }

    /// Returns the cells of the table; cells of figures that were not requested are empty.
    fn cells(&self) -> Vec<String> {
        let file = Path::new(&self.trace).file_name().map_or(self.trace.clone(), |f| f.to_string_lossy().into_owned());
        vec![
            file,
            self.backend.to_owned(),
            mib(self.peak_requested),
            mib(self.peak_reserved),
            percent(self.utilisation),
            self.segments.to_string(),
            self.driver_calls.to_string(),
            self.ns_per_pair.map_or("-".to_owned(), |ns| format!("{ns:.0}")),
            self.planned.map(mib).unwrap_or_default(),
            self.plan_utilisation().map(percent).unwrap_or_default(),
            self.served.map(mib).unwrap_or_default(),
            self.min_capacity.map(mib).unwrap_or_default(),
            self.capacity_ratio().map(|times| format!("{times:.3}x")).unwrap_or_default(),
        ]
    }
}

/// The headings of the columns. The last column belongs to the capacity and has no heading.
const HEADER: &str = "trace,backend,requested,reserved,used,segments,calls,ns/pair,planned,used,served,capacity,";

/// Formats a size in MiB, or in bytes if it is small.
fn mib(bytes: u64) -> String {
    if bytes < 10 << 10 {
        return format!("{bytes} B");
    }
    format!("{:.2}", bytes as f64 / f64::from(1 << 20))
}

fn percent(part: f64) -> String {
    format!("{:.1}%", 100.0 * part)
}

/// Prints an aligned table, with a line of means for each backend that ran several traces.
///
/// # Errors
/// Errors of writing to `out`.
pub fn table(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    let mut lines = vec![HEADER.split(',').map(str::to_owned).collect::<Vec<_>>()];
    lines.extend(rows.iter().map(Row::cells));
    let mut backends: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| !backends.contains(&row.backend)).collect::<Vec<_>>() {
        if !backends.contains(&row.backend) {
            backends.push(row.backend);
            lines.extend(means(rows, row.backend));
        }
    }
    // Columns without a cell are hidden: they were not requested.
    let shown: Vec<usize> =
        (0..lines[0].len()).filter(|&i| lines[1..].iter().any(|line| !line[i].is_empty())).collect();
    let width = |i: usize| lines.iter().map(|line| line[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
    for line in &lines {
        let cells = shown.iter().map(|&i| match i {
            0 | 1 => format!("{:<1$}", line[i], widths[i]),
            _ => format!("{:>1$}", line[i], widths[i]),
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

/// Returns the means of the columns that are ratios.
fn means(rows: &[Row], backend: &str) -> Option<Vec<String>> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.backend == backend).collect();
    if rows.len() < 2 {
        return None;
    }
    let mean = |of: &dyn Fn(&Row) -> Option<f64>| {
        let values: Vec<f64> = rows.iter().filter_map(|row| of(row)).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let mut cells = vec![String::new(); HEADER.split(',').count()];
    cells[0] = "mean".to_owned();
    cells[1] = backend.to_owned();
    cells[4] = mean(&|row| Some(row.utilisation)).map(percent).unwrap_or_default();
    cells[9] = mean(&Row::plan_utilisation).map(percent).unwrap_or_default();
    cells[12] = mean(&Row::capacity_ratio).map(|times| format!("{times:.3}x")).unwrap_or_default();
    Some(cells)
}
