//! Draws docs/speed.svg and docs/memory.svg from the measurements in docs/notebook/data: `cargo bench --bench charts`.

use std::error::Error;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::{
    BLACK, Color, DrawingArea, IntoDrawingArea, PathElement, RGBColor, Rectangle, SVGBackend, Text, WHITE,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{IntoFont, TextStyle};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Outcome = Result<(), Box<dyn Error>>;

/// Returns the records of a table in docs/notebook/data, without comments and header.
fn records(name: &str) -> Result<Vec<csv::StringRecord>, csv::Error> {
    let path = docs().join("notebook/data").join(name);
    csv::ReaderBuilder::new().comment(Some(b'#')).from_path(path)?.into_records().collect()
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// Returns a white picture of `size` pixels. Its method `present` writes it to `path`.
fn canvas(path: &Path, size: (u32, u32)) -> Result<Area<'_>, Box<dyn Error>> {
    let area = SVGBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE)?;
    Ok(area)
}

fn text(size: i32, horizontal: HPos) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&BLACK).pos(Pos::new(horizontal, VPos::Center))
}

/// Draws one bar per case: the speed relative to PyTorch on a logarithmic axis.
fn speed_panel(area: &Area, title: &str, cases: &[(String, f64)]) -> Outcome {
    let (width, _) = area.dim_in_pixel();
    let (left, right, top, step) = (330, width as i32 - 70, 66, 25);
    let bottom = top + step * cases.len() as i32;
    let x = |ratio: f64| left + (f64::from(right - left) * (ratio / 0.17).ln() / (12.0f64 / 0.17).ln()) as i32;
    area.draw(&Text::new(title, (16, 20), text(21, HPos::Left)))?;
    for (tick, name) in [(0.25, "a quarter"), (0.5, "half"), (1.0, "PyTorch"), (2.0, "2x"), (4.0, "4x"), (8.0, "8x")] {
        let line = if tick == 1.0 { BLACK.stroke_width(2) } else { BLACK.mix(0.15).stroke_width(1) };
        area.draw(&PathElement::new([(x(tick), top - 8), (x(tick), bottom)], line))?;
        area.draw(&Text::new(name, (x(tick), top - 18), text(15, HPos::Center)))?;
    }
    for (i, (case, ratio)) in cases.iter().enumerate() {
        let middle = top + step * i as i32 + step / 2;
        let (from, to) = (x(ratio.min(1.0)), x(ratio.max(1.0)));
        let fill = if *ratio < 1.0 { ORANGE } else { BLUE }.filled();
        area.draw(&Text::new(&case[..], (left - 10, middle), text(15, HPos::Right)))?;
        area.draw(&Rectangle::new([(from, middle - 8), (to, middle + 8)], fill))?;
        let (at, anchor) = if *ratio < 1.0 { (from - 6, HPos::Right) } else { (to + 6, HPos::Left) };
        area.draw(&Text::new(format!("{ratio:.2}"), (at, middle), text(15, anchor)))?;
    }
    Ok(())
}

/// Draws the speed of each case relative to PyTorch, the fastest first. Each device has its own panel.
fn speed() -> Outcome {
    let mut panels: Vec<(String, Vec<(String, f64)>)> = Vec::new();
    for record in records("speed.csv")? {
        let ratio = record[3].parse::<f64>()? / record[2].parse::<f64>()?;
        if panels.last().is_none_or(|(device, _)| *device != record[0]) {
            panels.push((record[0].into(), Vec::new()));
        }
        panels.last_mut().expect("just pushed").1.push((record[1].into(), ratio));
    }
    panels.iter_mut().for_each(|(_, cases)| cases.sort_by(|a, b| b.1.total_cmp(&a.1)));
    let height = |cases: &[(String, f64)]| 66 + 25 * cases.len() as u32 + 24;
    let total: u32 = panels.iter().map(|(_, cases)| height(cases)).sum();
    let path = docs().join("speed.svg");
    let mut rest = canvas(&path, (900, total))?;
    for (device, cases) in &panels {
        let (panel, below) = rest.split_vertically(height(cases));
        let title = match &device[..] {
            "CPU" => "Two cores of an AMD EPYC (Zen 5): times as fast as PyTorch 2.15 (right of the line: faster)",
            _ => "NVIDIA H200, OpenCL: times as fast as PyTorch 2.11 on CUDA (right of the line: faster)",
        };
        speed_panel(&panel, title, cases)?;
        rest = below;
    }
    rest.present()?;
    println!("{}", path.display());
    Ok(())
}

/// The name of a series, its colour, and its size in MiB for each trace.
type Series = (&'static str, RGBColor, Vec<f64>);

const GREY: RGBColor = RGBColor(170, 170, 170);
const BLUE: RGBColor = RGBColor(0, 90, 160);
const LIGHT_BLUE: RGBColor = RGBColor(90, 180, 230);
const ORANGE: RGBColor = RGBColor(230, 130, 0);

/// Draws bars of sizes in MiB: a group of bars for each trace, and a colour for each series.
fn memory_panel(area: &Area, title: &str, traces: &[String], series: &[Series], most: f64) -> Outcome {
    let (width, height) = area.dim_in_pixel();
    let (left, right, top, bottom) = (70, width as i32 - 16, 66, height as i32 - 34);
    let y = |mib: f64| bottom - (f64::from(bottom - top) * mib / most) as i32;
    area.draw(&Text::new(title, (16, 20), text(21, HPos::Left)))?;
    for gib in 0..=(most / 1024.0) as i32 {
        let at = y(f64::from(gib) * 1024.0);
        area.draw(&PathElement::new([(left, at), (right, at)], BLACK.mix(0.2)))?;
        area.draw(&Text::new(format!("{gib} GiB"), (left - 8, at), text(15, HPos::Right)))?;
    }
    let group = (right - left) / traces.len() as i32;
    let bar = (group - 20) / series.len() as i32;
    for (t, trace) in traces.iter().enumerate() {
        let from = left + group * t as i32 + 10;
        let middle = from + (group - 20) / 2;
        area.draw(&Text::new(&trace[..], (middle, bottom + 16), text(15, HPos::Center)))?;
        for (s, (_, _, values)) in series.iter().enumerate() {
            let x = from + bar * s as i32;
            area.draw(&Rectangle::new([(x, y(values[t])), (x + bar - 2, bottom)], series[s].1.filled()))?;
        }
    }
    for (s, (name, ..)) in series.iter().enumerate() {
        let x = left + s as i32 * (right - left) / series.len() as i32;
        area.draw(&Rectangle::new([(x, 40), (x + 14, 54)], series[s].1.filled()))?;
        area.draw(&Text::new(*name, (x + 20, 47), text(15, HPos::Left)))?;
    }
    Ok(())
}

/// Draws, for each trace, the reserved memory and the memory of the smallest device on which the trace runs.
fn memory() -> Outcome {
    let records = records("memory.csv")?;
    let traces: Vec<String> = records.iter().map(|record| record[0].into()).collect();
    let column = |i: usize| records.iter().map(|record| record[i].parse()).collect::<Result<Vec<f64>, _>>();
    let path = docs().join("memory.svg");
    let area = canvas(&path, (900, 620))?;
    let (upper, lower) = area.split_vertically(330);
    let reserved = [
        ("needed at the peak", GREY, column(1)?),
        ("claystone", BLUE, column(2)?),
        ("claystone, growing segments", LIGHT_BLUE, column(3)?),
        ("PyTorch 2.0's policy", ORANGE, column(4)?),
    ];
    memory_panel(
        &upper,
        "Memory taken from the driver in one pass of each trace (less is better)",
        &traces,
        &reserved,
        4200.0,
    )?;
    let capacity = [
        ("needed at the peak", GREY, column(1)?),
        ("claystone", BLUE, column(5)?),
        ("PyTorch 2.0's policy", ORANGE, column(6)?),
    ];
    memory_panel(&lower, "The smallest device on which three passes run (less is better)", &traces, &capacity, 2200.0)?;
    area.present()?;
    println!("{}", path.display());
    Ok(())
}

fn main() -> Outcome {
    speed()?;
    memory()
}
