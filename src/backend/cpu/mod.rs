//! The CPU: loops and vectors over problems.

pub(crate) mod accumulate;
pub(crate) mod conv;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod depthwise;
pub(crate) mod flat;
pub(crate) mod fused_functions;
pub(crate) mod gather;
pub(crate) mod gemm;
pub(crate) mod gemm_epilogue;
pub(crate) mod half;
pub(crate) mod in_place;
pub(crate) mod interpolate;
pub(crate) mod interpreter;
pub(crate) mod join;
pub(crate) mod lines;
pub(crate) mod map;
pub(crate) mod masks;
pub(crate) mod multiply_add;
pub(crate) mod nontemporal;
pub(crate) mod nonzero;
pub(crate) mod norm;
pub(crate) mod norm_channels;
pub(crate) mod partition;
pub(crate) mod pool_taps;
pub(crate) mod reduce;
pub(crate) mod running;
pub(crate) mod scalar;
pub(crate) mod scan;
pub(crate) mod scatter;
pub(crate) mod select;
pub(crate) mod short_rows;
pub(crate) mod softmax;
pub(crate) mod sort;
pub(crate) mod steps;
pub(crate) mod strided_rows;
pub(crate) mod transpose;
pub(crate) mod triangle;
pub(crate) mod window;

use crate::backend::Backend;
use crate::backend::problem::attention::Blocking;
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::cross_entropy::CrossEntropy;
use crate::backend::problem::gemm::Gemm;
use crate::backend::problem::index::{Combine, Indexed};
use crate::backend::problem::interpolation::Resize;
use crate::backend::problem::map::Formulas;
use crate::backend::problem::norm::{Channels, Rows};
use crate::backend::problem::reduction::Reduction;
use crate::backend::problem::scan::Scan;
use crate::backend::problem::select::{Chosen, Nth};
use crate::backend::problem::sequence::Sequence;
use crate::backend::problem::softmax::Softmax;
use crate::backend::problem::windows::{Task, Windows};
use crate::device::cpu::threads;
use crate::layout::Layout;
use crate::{Result, Shape, Tensor};

/// The CPU.
pub(crate) struct Cpu;

impl Backend for Cpu {
    fn map(&self, formulas: &Formulas) -> Result<()> {
        map::formulas(formulas)
    }

    fn sequence(&self, _: Sequence, _: &Tensor) -> Result<bool> {
        Ok(false)
    }

    fn join(&self, out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> {
        join::join(out, tensors, d)
    }

    fn zeroed(&self, x: &Tensor, from: isize, to: isize) -> Result<Option<Tensor>> {
        triangle::zeroed(x, from, to).map(Some)
    }

    fn gemm(&self, product: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
        gemm::run(product, shape, outs)
    }

    fn reduce(&self, reduction: &Reduction) -> Result<()> {
        reduce::run(reduction.rule, reduction.x, &reduction.plan(), reduction.out)
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
        select::first(x, d, k, descending).map(Some)
    }

    fn nth(&self, x: &Tensor, d: usize, nth: Nth) -> Result<Option<Chosen>> {
        select::nth(x, d, nth).map(Some)
    }

    fn gather(&self, g: &Indexed, out: &Tensor) -> Result<()> {
        gather::gather(g, out)
    }

    fn scatter(&self, g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout, _: usize) -> Result<()> {
        scatter::scatter(g, combine, target, layout)
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

    fn nonzero(&self, _: &Tensor, mask: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor> {
        nonzero::indices(&mask()?, dims)
    }

    fn masked_select(&self, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    fn softmax(&self, softmax: &Softmax) -> Result<()> {
        softmax::run(softmax.kind, softmax.x, softmax.z, softmax.out, softmax.d, &softmax.rows())
    }

    fn cross_entropy(
        &self,
        logits: &Tensor,
        labels: &Tensor,
        options: CrossEntropy,
        grad: Option<&Tensor>,
    ) -> Result<Tensor> {
        softmax::cross_entropy(logits, labels, options, grad)
    }

    fn norm(&self, rows: &Rows) -> Result<()> {
        norm::run(rows)
    }

    fn norm_columns(&self, x: &Tensor, rows: usize, n: usize) -> Result<Option<Tensor>> {
        norm::columns(x, rows, n).map(Some)
    }

    fn normalise_channels(&self, x: &Tensor, numbers: Channels, eps: f64) -> Result<Option<Tensor>> {
        norm_channels::normalised(x, numbers, eps)
    }

    fn convolution(
        &self,
        windows: Windows,
        x: &Tensor,
        weight: &Tensor,
        groups: usize,
        single: bool,
    ) -> Option<Box<dyn Convolution>> {
        if let Some(depthwise) = depthwise::Depthwise::new(windows, x, weight, groups) {
            return Some(Box::new(depthwise));
        }
        #[cfg(target_arch = "x86_64")]
        if !single {
            return Some(Box::new(conv::Conv::new(windows, x, weight, groups)?));
        }
        _ = single;
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

    fn blocking(&self, memory: usize, cheap: bool) -> Blocking {
        let whole = if cheap { Blocking::FEW } else { Blocking::share(memory) };
        Blocking { whole, block: Blocking::FEW.min(threads() << 19), queries: 128 }
    }
}
