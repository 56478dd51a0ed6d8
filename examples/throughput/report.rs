//! The table, the plot and the summary of the results of a device.

use claystone::Device;
use plotters::prelude::*;

use crate::common::{self, measure::Line};

/// Formats a number of bytes, for example 4096 as `4 KiB`.
pub fn bytes(n: usize) -> String {
    match n.ilog2() / 10 {
        0 => format!("{n} B"),
        i => format!("{} {}iB", n >> (10 * i.min(3)), ["K", "M", "G"][i.min(3) as usize - 1]),
    }
}

/// The columns of the table: heading, library, case.
const HOST: &[(&str, &str, &str)] = &[
    ("clone", "claystone", "clone"),
    ("copy_", "claystone", "clone_into"),
    ("strided", "claystone", "transpose_copy"),
    ("memcpy", "host", "memcpy"),
];
const OPENCL: &[(&str, &str, &str)] = &[
    ("clone", "claystone", "clone"),
    ("copy_", "claystone", "clone_into"),
    ("driver", "driver", "clone_raw"),
    ("strided", "claystone", "transpose_copy"),
    ("to dev", "claystone", "h2d"),
    ("driver", "driver", "h2d"),
    ("pinned", "driver", "h2d_pinned"),
    ("to host", "claystone", "d2h"),
    ("driver", "driver", "d2h"),
    ("pinned", "driver", "d2h_pinned"),
    ("memcpy", "host", "memcpy"),
];

fn columns(device: Device) -> &'static [(&'static str, &'static str, &'static str)] {
    if device == Device::Cpu { HOST } else { OPENCL }
}

fn find<'a>(lines: &'a [(usize, Line)], peer: &str, case: &str, size: usize) -> Option<&'a Line> {
    let found = |(n, l): &&(usize, Line)| (*n, l.case.name) == (size, case) && l.case.peer == peer;
    lines.iter().find(found).map(|(_, line)| line)
}

/// Returns the rate of a clone divided by the rate of the driver's copy (clEnqueueCopyBuffer and clFinish on two existing buffers).
fn ratio(lines: &[(usize, Line)], size: usize) -> Option<f64> {
    Some(find(lines, "claystone", "clone", size)?.rate() / find(lines, "driver", "clone_raw", size)?.rate())
}

/// Prints a table of rates in GB/s, with one row for each size.
pub fn table(device: Device, sizes: &[usize], lines: &[(usize, Line)]) {
    println!("GB/s (clone, copy_, strided and memcpy: bytes read + written; transfers: bytes moved), medians");
    print!("{:>8}", "size");
    columns(device).iter().for_each(|(heading, ..)| print!(" {heading:>8}"));
    println!("{}", if device == Device::Cpu { "" } else { "  clone/driver" });
    for &size in sizes {
        print!("{:>8}", bytes(size));
        for (_, peer, case) in columns(device) {
            match find(lines, peer, case, size).map(Line::rate) {
                Some(rate) if rate < 10.0 => print!(" {rate:>8.2}"),
                Some(rate) => print!(" {rate:>8.1}"),
                None => print!(" {:>8}", "-"),
            }
        }
        println!("{}", ratio(lines, size).map_or(String::new(), |r| format!("  {r:>12.2}")));
    }
}

/// Prints a one-line summary for the device.
pub fn summary(sizes: &[usize], lines: &[(usize, Line)]) {
    let Some(&size) = sizes.last() else { return };
    let Some(clone) = find(lines, "claystone", "clone", size) else { return };
    let beside = match (ratio(lines, size), find(lines, "host", "memcpy", size)) {
        (Some(ratio), _) => format!(", {ratio:.2} of the driver's own copy"),
        (None, Some(memcpy)) => format!(", {:.2} of memcpy on one thread", clone.rate() / memcpy.rate()),
        (None, None) => String::new(),
    };
    println!("clone of {}: {:.1} GB/s{beside}\n", bytes(size), clone.rate());
}

/// Draws the curves and writes them to `target/throughput-DEVICE.svg`.
pub fn draw(device: Device, name: &str, sizes: &[usize], lines: &[(usize, Line)]) -> common::Outcome {
    /// The curves of the plot: legend, library, case.
    const CURVES: [(&str, &str, &str); 6] = [
        ("clone", "claystone", "clone"),
        ("driver's copy", "driver", "clone_raw"),
        ("strided copy", "claystone", "transpose_copy"),
        ("to device", "claystone", "h2d"),
        ("to host", "claystone", "d2h"),
        ("host's memcpy", "host", "memcpy"),
    ];
    let (Some(&least), Some(&most)) = (sizes.first(), sizes.last()) else { return Ok(()) };
    let path = common::figure(&format!("throughput-{}.svg", device.to_string().replace(':', "")))?;
    let (area, legend) = common::canvas(&path, (900, 460))?.split_horizontally(740);
    let rates = common::span(lines.iter().map(|(_, line)| line.rate()));
    let exponent = |size: usize| f64::from(size.ilog2());
    let mut chart = ChartBuilder::on(&area)
        .caption(format!("copies and transfers on {name}"), ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(
            exponent(least)..exponent(most).max(exponent(least) + 1.0),
            (rates.start * 0.8..rates.end * 1.3).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_labels(sizes.len())
        .x_desc("size of the tensor")
        .y_desc("GB/s")
        .x_label_formatter(&|x| bytes(1 << *x as u32))
        .light_line_style(WHITE)
        .draw()?;
    let mut height = 60;
    for (i, (name, peer, case)) in CURVES.iter().enumerate() {
        let rate = |&size: &usize| Some((exponent(size), find(lines, peer, case, size)?.rate()));
        let points: Vec<_> = sizes.iter().filter_map(rate).collect();
        if !points.is_empty() {
            let style = common::colour(i).stroke_width(if i < 2 { 3 } else { 2 });
            chart.draw_series(LineSeries::new(points, style))?;
            legend.draw(&PathElement::new([(4, height + 8), (26, height + 8)], style))?;
            legend.draw(&Text::new(*name, (34, height), ("sans-serif", 16)))?;
            height += 24;
        }
    }
    area.present()?;
    println!("plot in {}", path.display());
    Ok(())
}
