//! Problems: plain descriptions of work, checked by the operations, that backends compute.

pub(crate) mod attention;
pub(crate) mod conv;
pub(crate) mod cross_entropy;
pub(crate) mod gemm;
pub(crate) mod index;
pub(crate) mod interpolation;
pub(crate) mod lines;
pub(crate) mod map;
pub(crate) mod norm;
pub(crate) mod operand;
pub(crate) mod precision;
pub(crate) mod reduction;
pub(crate) mod scan;
pub(crate) mod select;
pub(crate) mod sequence;
pub(crate) mod softmax;
pub(crate) mod windows;

pub(crate) use attention::{AttentionBackward, Blocking, FusedAttention};
pub(crate) use conv::{Conv2d, Convolution};
pub(crate) use cross_entropy::LabelEntropy;
pub(crate) use gemm::Gemm;
pub(crate) use index::{IndexTerm, Indexed, Scatter};
pub(crate) use interpolation::Interpolate;
pub(crate) use map::Formulas;
pub(crate) use norm::{Channels, NormForward, Normalisation, Variance};
pub(crate) use reduction::Reduction;
pub(crate) use scan::RunningReduction;
pub(crate) use select::{RankedElement, Search, Selected, Sorting, TopK};
pub(crate) use sequence::Sequence;
pub(crate) use softmax::Softmax;
pub(crate) use windows::{Im2col, Pooling, Windows};
