//! Code used by several examples: arguments, progress bars, and plots as PNG files.
#![allow(dead_code)] // each example uses only a part of this module

pub mod images;
pub mod measure;

use std::error::Error;
use std::fmt::Display;
use std::ops::Range;
use std::path::{Path, PathBuf};

use claystone::distributed::Group;
use claystone::profiler::{Profiler, SortBy};
use claystone::storage::{HistoryOptions, annotate, with_context};
use claystone::{DType, Device, Tensor, io, manual_seed};
use indicatif::{ProgressBar, ProgressStyle};
use plotters::prelude::*;

/// The result of `main`.
pub type Outcome = Result<(), Box<dyn Error>>;

/// Parses `cpu`, `opencl:N` or `best`.
pub fn device(name: &str) -> Result<Device, claystone::Error> {
    if name == "best" { Ok(Device::best()) } else { name.parse() }
}

/// Prints the device that will be used.
pub fn announce(device: Device) -> claystone::Result<()> {
    let info = device.info()?;
    println!("device {device}: {} ({} compute units)", info.name.trim(), info.compute_units);
    Ok(())
}

/// The common arguments of examples: device, dtype, seed, and recordings.
#[derive(Debug, clap::Args)]
pub struct Run {
    /// Where to run: cpu, opencl:N or best
    #[arg(long, default_value = "best", value_parser = device)]
    pub device: Device,
    /// Dtype that networks compute in: f32, f16 or bf16
    #[arg(long, default_value = "f32")]
    pub dtype: DType,
    /// Seed of weights and all other random numbers
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Record a profile to FILE (for ui.perfetto.dev, claystone profile and claystone view) and print its table
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Record the memory history and save a snapshot to FILE (.pickle or .json, for claystone snapshot and view)
    #[arg(long, value_name = "FILE")]
    snapshot: Option<PathBuf>,
    /// This process's rank in the job; only rank 0 prints
    #[arg(skip)]
    rank: usize,
}

/// The argument of examples that can train on several devices and machines.
#[derive(Debug, clap::Args)]
pub struct Ranks {
    /// Be one rank of a job that mpirun has started: each rank trains on its own batches (needs --features mpi)
    #[arg(long)]
    distributed: bool,
}

impl Ranks {
    /// Joins the job as one of its ranks, each with its own device. Without `--distributed`, returns a group of this process alone.
    pub fn join(&self, run: &mut Run) -> Result<Group, Box<dyn Error>> {
        if !self.distributed {
            return Ok(Group::threads(&[run.device])?.remove(0));
        }
        #[cfg(not(feature = "mpi"))]
        return Err("--distributed needs MPI: build this example with --features mpi".into());
        #[cfg(feature = "mpi")]
        {
            let group = Group::world()?;
            if run.device != Device::Cpu {
                run.device = group.device();
            }
            run.rank = group.rank();
            Ok(group)
        }
    }
}

/// The recordings in progress. [`finish`](Self::finish) ends them.
pub struct Recording<'a> {
    profile: Option<(Profiler, &'a Path)>,
    snapshot: Option<(Device, &'a Path)>,
}

impl Run {
    /// Prints the device, seeds the random generator, and starts the requested recordings.
    pub fn start(&self) -> claystone::Result<Recording<'_>> {
        if self.rank == 0 {
            announce(self.device)?;
        }
        manual_seed(self.seed);
        // Only rank 0 records, because otherwise all ranks would write the same file.
        let (profile, snapshot) = match self.rank {
            0 => (self.profile.as_deref(), self.snapshot.as_deref()),
            _ => (None, None),
        };
        if snapshot.is_some() {
            self.device.record_memory_history(HistoryOptions::default().max_entries(1_000_000))?;
        }
        let profile = profile.map(|file| Ok((Profiler::start()?, file))).transpose()?;
        Ok(Recording { profile, snapshot: snapshot.map(|file| (self.device, file)) })
    }

    /// Prints a line on rank 0 only.
    pub fn print(&self, line: impl Display) {
        if self.rank == 0 {
            println!("{line}");
        }
    }

    /// Returns a [`progress`] bar on rank 0, and a hidden bar on other ranks.
    pub fn progress(&self, steps: usize) -> ProgressBar {
        if self.rank == 0 { progress(steps) } else { ProgressBar::hidden() }
    }

    /// Returns the dtype and the device with which to create tensors.
    pub fn options(&self) -> (DType, Device) {
        (self.dtype, self.device)
    }
}

impl Recording<'_> {
    pub fn finish(self) -> claystone::Result<()> {
        if let Some((device, file)) = self.snapshot {
            device.memory_snapshot()?.save(file)?;
            println!("snapshot in {}", file.display());
        }
        let Some((profiler, file)) = self.profile else { return Ok(()) };
        let profile = profiler.stop();
        profile.save(file)?;
        println!(
            "{}profile in {}",
            profile.key_averages().sorted_by(SortBy::DeviceTime).limited_to(20),
            file.display()
        );
        Ok(())
    }
}

/// The arguments of examples whose training can be interrupted and resumed.
#[derive(Debug, clap::Args)]
pub struct Training<const EPOCHS: usize> {
    /// Passes over the training set
    #[arg(long, default_value_t = EPOCHS)]
    pub epochs: usize,
    /// Resume from the checkpoint FILE (.safetensors) if it exists, and save to it after each epoch
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
}

impl<const EPOCHS: usize> Training<EPOCHS> {
    /// Loads the checkpoint of `--resume`, if the file exists.
    pub fn resume(&self, parts: &mut [(&str, &mut dyn io::Stateful)]) -> claystone::Result<()> {
        let Some(file) = self.resume.as_ref().filter(|file| file.exists()) else { return Ok(()) };
        io::load_checkpoint(file, parts)?;
        println!("going on from {}", file.display());
        Ok(())
    }

    /// Saves a checkpoint if `--resume` was given.
    pub fn save(&self, parts: &[(&str, &dyn io::Stateful)]) -> claystone::Result<()> {
        self.resume.as_ref().map_or(Ok(()), |file| io::save_checkpoint(file, parts))
    }
}

/// Returns the mean of losses, computed in f64. Reading the mean waits for the device, so call this function once per epoch.
pub fn mean(losses: &[Tensor]) -> claystone::Result<f64> {
    Tensor::stack(losses, 0)?.to_device(Device::Cpu)?.to_dtype(DType::F64)?.mean((), false)?.item::<f64>()
}

/// Runs `f`. Profiles and snapshots show its operations under `name`.
pub fn phase<R>(name: &str, f: impl FnOnce() -> R) -> R {
    annotate(name, || with_context(name, f))
}

/// Creates a progress bar of `steps` steps on stderr. It is hidden if stderr is not a terminal.
pub fn progress(steps: usize) -> ProgressBar {
    let style = "{elapsed_precise} {bar:40} {pos}/{len} {msg}";
    ProgressBar::new(steps as u64).with_style(ProgressStyle::with_template(style).expect("the template is valid"))
}

/// Returns the path for a figure: `target/NAME` in the repository, or in the current folder if there is no repository.
pub fn figure(name: &str) -> std::io::Result<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = if manifest.is_dir() { manifest.with_file_name("target") } else { PathBuf::from("target") };
    std::fs::create_dir_all(&folder)?;
    Ok(folder.join(name))
}

/// Returns the colour of series `i`. The colours are readable on white and avoid red-green contrasts.
pub fn colour(i: usize) -> RGBColor {
    const COLOURS: [(u8, u8, u8); 6] =
        [(0, 90, 160), (230, 130, 0), (0, 150, 110), (170, 60, 140), (90, 90, 90), (90, 180, 230)];
    let (r, g, b) = COLOURS[i % COLOURS.len()];
    RGBColor(r, g, b)
}

/// Creates a white picture of `size` pixels. Its method `present` writes it to `path`, as SVG.
pub fn canvas(
    path: &Path,
    size: (u32, u32),
) -> Result<DrawingArea<SVGBackend<'_>, plotters::coord::Shift>, Box<dyn Error>> {
    let area = SVGBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE)?;
    Ok(area)
}

/// A curve of a plot.
pub struct Curve {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// Returns the range of some values, for the axis of a plot.
pub fn span(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (lo, hi) = values.fold((f64::MAX, f64::MIN), |(lo, hi), v| (lo.min(v), hi.max(v)));
    if lo < hi { lo..hi } else { lo - 1.0..lo + 1.0 }
}

/// Draws curves with a logarithmic y axis and a legend. `labels` are the title, the x axis and the y axis.
pub fn plot(path: &Path, labels: (&str, &str, &str), curves: &[Curve]) -> Outcome {
    let area = canvas(path, (720, 420))?;
    let points = || curves.iter().flat_map(|c| c.points.iter());
    let heights = span(points().map(|p| p.1).filter(|&y| y > 0.0));
    let floor = heights.start * 0.8; // zeros, which have no logarithm, are drawn at this height
    let mut chart = ChartBuilder::on(&area)
        .caption(labels.0, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(52)
        .build_cartesian_2d(span(points().map(|p| p.0)), (floor..heights.end * 1.3).log_scale())?;
    chart
        .configure_mesh()
        .x_label_formatter(&|x| format!("{x:.0}"))
        .x_desc(labels.1)
        .y_desc(labels.2)
        .light_line_style(WHITE)
        .draw()?;
    for (i, curve) in curves.iter().enumerate() {
        let style = colour(i).stroke_width(2);
        chart
            .draw_series(LineSeries::new(curve.points.iter().map(|&(x, y)| (x, y.max(floor))), style))?
            .label(&curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    Ok(())
}
