//! Workloads that measure the tuning parameters of OpenCL kernels. The table of parameters is in `device::opencl::tuning`.

use std::io;
use std::path::PathBuf;

use crate::DType;
use crate::backend::opencl::geometry::default_group_size;
use crate::backend::problem::tuning::{Choice, Level, Parameter, Tuning, Workload};
use crate::device::opencl::{ClDevice, PARAMETERS, ParameterRow, TuningParameter};

fn family_parameters(cl: &ClDevice) -> impl Iterator<Item = &'static ParameterRow> {
    let family = cl.family();
    PARAMETERS.iter().filter(move |row| row.families.contains(&family))
}

fn parameter_knob(cl: &ClDevice, parameter: usize) -> TuningParameter {
    family_parameters(cl).nth(parameter).expect("the index of a parameter").knob
}

impl Tuning for &'static ClDevice {
    fn parameters(&self) -> Vec<Parameter> {
        let parameter = |row: &'static ParameterRow| {
            let ParameterRow { knob, name, doc, choices, .. } = *row;
            Parameter { name, doc, choices, default: row.default(self.family()), value: self.tuned(knob) }
        };
        family_parameters(self).map(parameter).collect()
    }

    fn set(&self, parameter: usize, value: usize) {
        self.set_tuned(parameter_knob(self, parameter), value);
    }

    fn workload(&self, parameter: usize) -> Workload {
        timing_workload(parameter_knob(self, parameter))
    }

    fn edge_workloads(&self, parameter: usize) -> Vec<Workload> {
        edge_workloads(self, parameter_knob(self, parameter))
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

    fn usual_workloads(&self) -> Vec<Workload> {
        let counts = || (10..=24).step_by(2).map(|log| 1usize << log);
        let sides = || [64, 256, 1024, 4096];
        let squares = || [64, 128, 256, 512, 1024];
        let thin = [[1, 1024, 1024], [32, 1024, 1024], [1024, 32, 1024], [1024, 1024, 32], [2048, 2048, 64]];
        let products = squares().map(|n| [n; 3]).into_iter().chain(thin);
        let transposed = [[false, false], [false, true], [true, false]];
        let multiplied = products.flat_map(|size| transposed.map(|t| Workload::MatMul(size, t, DType::F32)));
        let moved = sides().into_iter().map(|side| Workload::CopyTransposed(side, side, DType::F32));
        counts().map(Workload::Add).chain(counts().map(Workload::AddUnaligned)).chain(moved).chain(multiplied).collect()
    }

    fn save(&self) -> io::Result<Option<PathBuf>> {
        self.save_tuning()
    }
}

/// Returns the workload that times a parameter's choices.
fn timing_workload(knob: TuningParameter) -> Workload {
    match knob {
        TuningParameter::MapGroup => Workload::Add(1 << 22),
        TuningParameter::MapLoads => Workload::AddUnaligned(1 << 22),
        TuningParameter::TransposeTile | TuningParameter::TransposeLine => {
            Workload::CopyTransposed(4096, 4096, DType::F32)
        }
        TuningParameter::PanelRows
        | TuningParameter::PanelVectors
        | TuningParameter::PanelDepth
        | TuningParameter::PanelBlock => Workload::MatMul([1024; 3], [false; 2], DType::F32),
        TuningParameter::DotSide => Workload::MatMul([512; 3], [false, true], DType::F32),
        TuningParameter::ConvolutionImages => Workload::Convolution([16, 32, 64, 32], 3),
        TuningParameter::PoolingImages => Workload::Pooling([16, 32, 64]),
        TuningParameter::ProductImages => Workload::MatMul([512; 3], [false; 2], DType::F32),
        TuningParameter::ElementwiseImages => Workload::AddImages([16, 32, 64]),
        // k is too small for tensor cores.
        TuningParameter::Tile => Workload::MatMul([2048, 2048, 64], [false; 2], DType::F32),
        TuningParameter::MmaColumns => Workload::MatMul([1024, 2048, 1024], [false; 2], DType::F16),
        TuningParameter::ThinGroups => Workload::MatMul([1, 4096, 4096], [false, true], DType::F32),
        TuningParameter::AttentionRows => Workload::Attention([64, 512, 64]),
        TuningParameter::DepthwiseColumns => Workload::Depthwise([32, 64, 56], 3),
        TuningParameter::SortItems => Workload::Sort([1024, 4096], DType::F32),
    }
}

/// Returns workloads with sizes around multiples of the parameter's current value.
fn edge_workloads(cl: &ClDevice, knob: TuningParameter) -> Vec<Workload> {
    let value = cl.tuned(knob);
    match knob {
        // A work-item computes four elements.
        TuningParameter::MapGroup => [1, value, 4 * value - 1, 4 * value, 4 * value + 1].map(Workload::Add).into(),
        TuningParameter::MapLoads => [1, 255 * value, 256 * value, 256 * value + 1].map(Workload::AddUnaligned).into(),
        TuningParameter::TransposeTile | TuningParameter::TransposeLine => {
            let side = value;
            let sizes = [(side, side), (side - 1, side + 1), (2 * side, side), (2 * side + 1, 3 * side - 1)];
            let all = sizes.into_iter().flat_map(|(r, c)| [DType::F32, DType::BF16].map(|t| (r, c, t)));
            all.map(|(rows, cols, dtype)| Workload::CopyTransposed(rows, cols, dtype)).collect()
        }
        TuningParameter::PanelRows
        | TuningParameter::PanelVectors
        | TuningParameter::PanelDepth
        | TuningParameter::PanelBlock => {
            let [r, v, d, b] = [
                TuningParameter::PanelRows,
                TuningParameter::PanelVectors,
                TuningParameter::PanelDepth,
                TuningParameter::PanelBlock,
            ]
            .map(|knob| cl.tuned(knob));
            let w = 16 * v;
            let sizes = [[1, w, d], [r, w, d + 1], [r + 1, w + 1, d - 1], [b + 1, 2 * w - 1, 2 * d + 1], [b, 3, 9]];
            let transposed = [false, true].map(|a| sizes.map(|size| Workload::MatMul(size, [a, false], DType::F32)));
            let half = Workload::MatMul([b - 1, 8 * w + 3, d], [false; 2], DType::F16);
            transposed.into_iter().flatten().chain([half]).collect()
        }
        TuningParameter::DotSide => [[1, value + 1, 17], [value, value, 16], [2 * value - 1, value + 1, 33]]
            .map(|size| Workload::MatMul(size, [false, true], DType::F32))
            .into(),
        TuningParameter::ConvolutionImages => {
            let sizes = [[1, 1, 1, 3], [2, 3, 5, 4], [1, 4, 4, 5], [3, 9, 8, 7]];
            sizes.into_iter().flat_map(|size| [1, 3].map(|k| Workload::Convolution(size, k))).collect()
        }
        TuningParameter::PoolingImages => [[1, 1, 2], [2, 3, 5], [1, 4, 4], [3, 9, 7]].map(Workload::Pooling).into(),
        TuningParameter::ProductImages => {
            [[1, 1, 1], [3, 5, 7], [4, 4, 4], [9, 6, 17]].map(|s| Workload::MatMul(s, [false; 2], DType::F32)).into()
        }
        TuningParameter::ElementwiseImages => {
            [[1, 1, 1], [2, 3, 5], [1, 4, 4], [3, 9, 7]].map(Workload::AddImages).into()
        }
        TuningParameter::Tile => {
            let sizes = [[value, value, 32], [value - 1, value + 1, 33], [2 * value + 1, value, 65]];
            let transposed = [[false, false], [true, true]];
            sizes.into_iter().flat_map(|s| transposed.map(|t| Workload::MatMul(s, t, DType::F32))).collect()
        }
        TuningParameter::MmaColumns => {
            let sizes = [[128, value, 64], [127, value + 1, 72], [65, 2 * value - 1, 1024]];
            let products = sizes.map(|s| [DType::F16, DType::F32].map(|dtype| Workload::MatMul(s, [false; 2], dtype)));
            products.into_iter().flatten().collect()
        }
        TuningParameter::ThinGroups => {
            let sizes = [[1, 1, 1], [1, 33, 4096], [7, 64, 4097], [3, 255, 2048]];
            sizes.into_iter().flat_map(|s| [false, true].map(|t| Workload::MatMul(s, [false, t], DType::F32))).collect()
        }
        TuningParameter::AttentionRows => {
            // Heads of more than 128 elements do not use tensor cores.
            let sizes = [[1, value - 1, 32], [2, value, 160], [3, value + 1, 33], [1, 2 * value + 1, 256]];
            sizes.map(Workload::Attention).into()
        }
        TuningParameter::DepthwiseColumns => {
            let sides = [3, value.max(3), value + 3, 2 * value + 3];
            sides.into_iter().flat_map(|side| [1, 3].map(|k| Workload::Depthwise([2, 3, side], k))).collect()
        }
        TuningParameter::SortItems => {
            let tile = value * default_group_size(cl);
            let lengths = [1, tile - 1, tile, tile + 1, 2 * tile + 1, 4 * tile + 1];
            lengths.into_iter().flat_map(|n| [DType::F32, DType::I64].map(|t| Workload::Sort([2, n], t))).collect()
        }
    }
}
