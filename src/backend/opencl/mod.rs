//! OpenCL devices: launches over problems.

pub(crate) mod cross_entropy;
pub(crate) mod gather;
pub(crate) mod gemm;
pub(crate) mod gemm_mma;
pub(crate) mod gemm_panel;
pub(crate) mod gemm_thin;
pub(crate) mod interpolate;
pub(crate) mod kernels;
pub(crate) mod launch_cache;
pub(crate) mod launch_plan;
pub(crate) mod map;
pub(crate) mod nonzero;
pub(crate) mod norm;
pub(crate) mod recording;
pub(crate) mod reduce;
pub(crate) mod scan;
pub(crate) mod scatter;
pub(crate) mod select;
pub(crate) mod sequence;
pub(crate) mod softmax;
pub(crate) mod sort;
pub(crate) mod source;
pub(crate) mod tuning;
pub(crate) mod user_kernel;
pub(crate) mod window;

#[cfg(test)]
mod device_tests;

use crate::backend::Backend;
use crate::backend::problem::attention::Blocking;
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::cross_entropy::CrossEntropy;
use crate::backend::problem::gemm::Gemm;
use crate::backend::problem::index::{Combine, Indexed};
use crate::backend::problem::interpolation::Resize;
use crate::backend::problem::map::Formulas;
use crate::backend::problem::norm::{Channels, Rows};
use crate::backend::problem::recording::Recorder;
use crate::backend::problem::reduction::Reduction;
use crate::backend::problem::scan::Scan;
use crate::backend::problem::select::{Chosen, Nth};
use crate::backend::problem::sequence::Sequence;
use crate::backend::problem::softmax::Softmax;
use crate::backend::problem::tuning::Tuning;
use crate::backend::problem::windows::{Task, Windows};
use crate::device::opencl;
use crate::layout::Layout;
use crate::{Device, Result, Shape, Tensor};

/// Every OpenCL device.
pub(crate) struct OpenCl;

impl Backend for OpenCl {
    fn map(&self, formulas: &Formulas) -> Result<()> {
        map::run(formulas)
    }

    fn sequence(&self, values: Sequence, out: &Tensor) -> Result<bool> {
        sequence::run(values, out)
    }

    fn join(&self, _: &Tensor, _: &[&Tensor], _: usize) -> Result<bool> {
        Ok(false)
    }

    fn zeroed(&self, _: &Tensor, _: isize, _: isize) -> Result<Option<Tensor>> {
        Ok(None)
    }

    fn gemm(&self, product: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
        gemm::run(product, shape, outs)
    }

    fn reduce(&self, reduction: &Reduction) -> Result<()> {
        reduce::run(reduction)
    }

    fn scan(&self, scan: Scan, x: &Tensor, d: usize, values: &Tensor, indices: Option<&Tensor>) -> Result<()> {
        scan::run(scan, x, d, values, indices)
    }

    fn sort(&self, x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> {
        sort::run(x, d, descending, values, indices)
    }

    fn search(&self, x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()> {
        sort::search(x, lines, step, v, right, out)
    }

    fn first(&self, x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Option<Chosen>> {
        if x.numel() == 0 { Ok(None) } else { select::first(x, d, k, descending) }
    }

    fn nth(&self, x: &Tensor, d: usize, nth: Nth) -> Result<Option<Chosen>> {
        if x.numel() == 0 { Ok(None) } else { select::nth(x, d, nth) }
    }

    fn gather(&self, g: &Indexed, out: &Tensor) -> Result<()> {
        gather::gather(g, out)
    }

    fn scatter(&self, g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout, d: usize) -> Result<()> {
        gather::scatter(g, combine, target, layout, d)
    }

    fn linear_index(
        &self,
        op: &'static str,
        index: &Tensor,
        out: &Tensor,
        axis: (usize, isize),
        base: Option<i64>,
    ) -> Result<()> {
        gather::linear(op, index, out, axis, base)
    }

    fn one_hot(&self, op: &'static str, x: &Tensor, out: &Tensor, classes: usize) -> Result<()> {
        gather::one_hot(op, x, out, classes)
    }

    fn nonzero(&self, x: &Tensor, _: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor> {
        nonzero::indices(x, dims)
    }

    fn masked_select(&self, x: &Tensor, mask: &Tensor) -> Result<Option<Tensor>> {
        nonzero::selected(x, mask).map(Some)
    }

    fn softmax(&self, softmax: &Softmax) -> Result<()> {
        softmax::run(softmax)
    }

    fn cross_entropy(
        &self,
        logits: &Tensor,
        labels: &Tensor,
        options: CrossEntropy,
        grad: Option<&Tensor>,
    ) -> Result<Tensor> {
        cross_entropy::cross_entropy(logits, labels, options, grad)
    }

    fn norm(&self, rows: &Rows) -> Result<()> {
        norm::run(rows, rows.x.device())
    }

    fn repeat_norm(&self, given: &Rows, numbers: &[u64; 4]) -> Result<bool> {
        norm::repeat(given, numbers)
    }

    fn norm_of_views(&self, rows: &Rows, given: &Rows, numbers: &[u64; 4]) -> Result<()> {
        norm::run_views(rows, given, numbers)
    }

    fn norm_columns(&self, x: &Tensor, rows: usize, n: usize) -> Result<Option<Tensor>> {
        norm::columns(x, rows, n)
    }

    fn normalise_channels(&self, _: &Tensor, _: Channels, _: f64) -> Result<Option<Tensor>> {
        Ok(None)
    }

    fn has_variance(&self) -> bool {
        true
    }

    fn variance(&self, rows: &Tensor, out: &Tensor, freedom: f64, root: bool) -> Result<bool> {
        norm::variance(rows, out, freedom, root)
    }

    fn convolution(&self, _: Windows, _: &Tensor, _: &Tensor, _: usize, _: bool) -> Option<Box<dyn Convolution>> {
        None
    }

    fn unfold(&self, windows: &Windows, x: &Tensor, out: &Tensor, inside: bool) -> Result<()> {
        window::unfold(windows, x, out, inside)
    }

    fn fold(&self, windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> {
        window::fold(windows, columns, out)
    }

    fn pool(&self, windows: &Windows, task: Task, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<()> {
        window::run(windows, task, x, index, out)
    }

    fn interpolate(&self, resize: &Resize, x: &Tensor, out: &Tensor, transposed: bool) -> Result<()> {
        interpolate::run(resize, x, out, transposed)
    }

    fn record(&self, device: Device) -> Result<Box<dyn Recorder>> {
        recording::start(device)
    }

    fn tuning(&self, device: Device) -> Result<Box<dyn Tuning>> {
        Ok(Box::new(opencl::open_device(device)?))
    }

    fn blocking(&self, memory: usize, _: bool) -> Blocking {
        let whole = Blocking::share(memory);
        Blocking { whole, block: whole / 4, queries: 256 }
    }
}
