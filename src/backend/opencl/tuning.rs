//! The workloads that tuning parameters of OpenCL kernels are measured with. The table of parameters is in `device::opencl::tuning`.

use std::io;
use std::path::PathBuf;

use crate::DType;
use crate::backend::opencl::geometry::group_size;
use crate::backend::problem::tuning::{Choice, Level, Parameter, Tuning, Workload};
use crate::device::opencl::{ClDevice, Knob, PARAMETERS, Tunable};

/// The rows of the table for the device's family.
fn rows(cl: &ClDevice) -> impl Iterator<Item = &'static Tunable> {
    let family = cl.family();
    PARAMETERS.iter().filter(move |row| row.families.contains(&family))
}

fn knob(cl: &ClDevice, parameter: usize) -> Knob {
    rows(cl).nth(parameter).expect("the index of a parameter").knob
}

impl Tuning for &'static ClDevice {
    fn parameters(&self) -> Vec<Parameter> {
        let parameter = |row: &'static Tunable| {
            let Tunable { knob, name, doc, choices, .. } = *row;
            Parameter { name, doc, choices, default: row.default(self.family()), value: self.tuned(knob) }
        };
        rows(self).map(parameter).collect()
    }

    fn set(&self, parameter: usize, value: usize) {
        self.set_tuned(knob(self, parameter), value);
    }

    fn workload(&self, parameter: usize) -> Workload {
        large(knob(self, parameter))
    }

    fn edges(&self, parameter: usize) -> Vec<Workload> {
        edges(self, knob(self, parameter))
    }

    fn level(&self) -> Level {
        ClDevice::level(self)
    }

    fn set_level(&self, level: Level) {
        ClDevice::set_level(self, level);
    }

    fn choices(&self) -> Vec<Choice> {
        self.chosen().into_iter().map(|(name, sizes, value)| Choice { name, sizes, value }).collect()
    }

    fn use_choices(&self, on: bool) -> bool {
        ClDevice::use_choices(self, on)
    }

    fn forget_choices(&self) {
        ClDevice::forget_choices(self);
    }

    fn on_trial(&self) -> usize {
        ClDevice::on_trial(self)
    }

    fn ordinary(&self) -> Vec<Workload> {
        let counts = || (10..=24).step_by(2).map(|log| 1usize << log);
        let sides = || [64, 256, 1024, 4096];
        let squares = || [64, 128, 256, 512, 1024];
        let thin = [[1, 1024, 1024], [32, 1024, 1024], [1024, 32, 1024], [1024, 1024, 32], [2048, 2048, 64]];
        let products = squares().map(|n| [n; 3]).into_iter().chain(thin);
        let transposed = [[false, false], [false, true], [true, false]];
        let multiplied = products.flat_map(|size| transposed.map(|t| Workload::Product(size, t, DType::F32)));
        let moved = sides().into_iter().map(|side| Workload::Transposed(side, side, DType::F32));
        counts().map(Workload::Sum).chain(counts().map(Workload::Shifted)).chain(moved).chain(multiplied).collect()
    }

    fn save(&self) -> io::Result<Option<PathBuf>> {
        self.save_tuning()
    }
}

/// The workload that a parameter's choices are timed with.
fn large(knob: Knob) -> Workload {
    match knob {
        Knob::MapGroup => Workload::Sum(1 << 22),
        Knob::MapLoads => Workload::Shifted(1 << 22),
        Knob::TransposeTile | Knob::TransposeLine => Workload::Transposed(4096, 4096, DType::F32),
        Knob::PanelRows | Knob::PanelVectors | Knob::PanelDepth | Knob::PanelBlock => {
            Workload::Product([1024; 3], [false; 2], DType::F32)
        }
        Knob::DotSide => Workload::Product([512; 3], [false, true], DType::F32),
        Knob::ConvolutionImages => Workload::Convolution([16, 32, 64, 32], 3),
        Knob::PoolingImages => Workload::Pooling([16, 32, 64]),
        Knob::ProductImages => Workload::Product([512; 3], [false; 2], DType::F32),
        Knob::ElementwiseImages => Workload::Added([16, 32, 64]),
        // With so small a k that tensor cores are not used.
        Knob::Tile => Workload::Product([2048, 2048, 64], [false; 2], DType::F32),
        Knob::MmaColumns => Workload::Product([1024, 2048, 1024], [false; 2], DType::F16),
        Knob::ThinGroups => Workload::Product([1, 4096, 4096], [false, true], DType::F32),
        Knob::AttentionRows => Workload::Attention([64, 512, 64]),
        Knob::DepthwiseColumns => Workload::Depthwise([32, 64, 56], 3),
        Knob::SortItems => Workload::Sorted([1024, 4096], DType::F32),
    }
}

/// Workloads with sizes around the multiples of the parameter's current value.
fn edges(cl: &ClDevice, knob: Knob) -> Vec<Workload> {
    let value = cl.tuned(knob);
    match knob {
        // A work-item computes four elements.
        Knob::MapGroup => [1, value, 4 * value - 1, 4 * value, 4 * value + 1].map(Workload::Sum).into(),
        Knob::MapLoads => [1, 255 * value, 256 * value, 256 * value + 1].map(Workload::Shifted).into(),
        Knob::TransposeTile | Knob::TransposeLine => {
            let side = value;
            let sizes = [(side, side), (side - 1, side + 1), (2 * side, side), (2 * side + 1, 3 * side - 1)];
            let all = sizes.into_iter().flat_map(|(r, c)| [DType::F32, DType::BF16].map(|t| (r, c, t)));
            all.map(|(rows, cols, dtype)| Workload::Transposed(rows, cols, dtype)).collect()
        }
        Knob::PanelRows | Knob::PanelVectors | Knob::PanelDepth | Knob::PanelBlock => {
            let [r, v, d, b] =
                [Knob::PanelRows, Knob::PanelVectors, Knob::PanelDepth, Knob::PanelBlock].map(|knob| cl.tuned(knob));
            let w = 16 * v;
            let sizes = [[1, w, d], [r, w, d + 1], [r + 1, w + 1, d - 1], [b + 1, 2 * w - 1, 2 * d + 1], [b, 3, 9]];
            let transposed = [false, true].map(|a| sizes.map(|size| Workload::Product(size, [a, false], DType::F32)));
            let half = Workload::Product([b - 1, 8 * w + 3, d], [false; 2], DType::F16);
            transposed.into_iter().flatten().chain([half]).collect()
        }
        Knob::DotSide => [[1, value + 1, 17], [value, value, 16], [2 * value - 1, value + 1, 33]]
            .map(|size| Workload::Product(size, [false, true], DType::F32))
            .into(),
        Knob::ConvolutionImages => {
            let sizes = [[1, 1, 1, 3], [2, 3, 5, 4], [1, 4, 4, 5], [3, 9, 8, 7]];
            sizes.into_iter().flat_map(|size| [1, 3].map(|k| Workload::Convolution(size, k))).collect()
        }
        Knob::PoolingImages => [[1, 1, 2], [2, 3, 5], [1, 4, 4], [3, 9, 7]].map(Workload::Pooling).into(),
        Knob::ProductImages => {
            [[1, 1, 1], [3, 5, 7], [4, 4, 4], [9, 6, 17]].map(|s| Workload::Product(s, [false; 2], DType::F32)).into()
        }
        Knob::ElementwiseImages => [[1, 1, 1], [2, 3, 5], [1, 4, 4], [3, 9, 7]].map(Workload::Added).into(),
        Knob::Tile => {
            let sizes = [[value, value, 32], [value - 1, value + 1, 33], [2 * value + 1, value, 65]];
            let transposed = [[false, false], [true, true]];
            sizes.into_iter().flat_map(|s| transposed.map(|t| Workload::Product(s, t, DType::F32))).collect()
        }
        Knob::MmaColumns => {
            let sizes = [[128, value, 64], [127, value + 1, 72], [65, 2 * value - 1, 1024]];
            let products = sizes.map(|s| [DType::F16, DType::F32].map(|dtype| Workload::Product(s, [false; 2], dtype)));
            products.into_iter().flatten().collect()
        }
        Knob::ThinGroups => {
            let sizes = [[1, 1, 1], [1, 33, 4096], [7, 64, 4097], [3, 255, 2048]];
            sizes
                .into_iter()
                .flat_map(|s| [false, true].map(|t| Workload::Product(s, [false, t], DType::F32)))
                .collect()
        }
        Knob::AttentionRows => {
            // Heads of more than 128 elements are not computed on tensor cores.
            let sizes = [[1, value - 1, 32], [2, value, 160], [3, value + 1, 33], [1, 2 * value + 1, 256]];
            sizes.map(Workload::Attention).into()
        }
        Knob::DepthwiseColumns => {
            let sides = [3, value.max(3), value + 3, 2 * value + 3];
            sides.into_iter().flat_map(|side| [1, 3].map(|k| Workload::Depthwise([2, 3, side], k))).collect()
        }
        Knob::SortItems => {
            let tile = value * group_size(cl);
            let lengths = [1, tile - 1, tile, tile + 1, 2 * tile + 1, 4 * tile + 1];
            lengths.into_iter().flat_map(|n| [DType::F32, DType::I64].map(|t| Workload::Sorted([2, n], t))).collect()
        }
    }
}
