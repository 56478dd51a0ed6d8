//! Concatenation of many tensors of one element, such as norms, on OpenCL. Larger tensors are copied one by one.

use smallvec::SmallVec;

use crate::backend::opencl::{map, sequence};
use crate::backend::problem::map::{Formulas, Params};
use crate::backend::problem::sequence::Sequence;
use crate::layout::Layout;
use crate::{DType, Expr, Result, Shape, Tensor};

/// The numbers that a launch writes: on every device a kernel can have that many arguments.
const AT_ONCE: usize = 24;
/// The fewest numbers for which two launches are faster than copies.
const FEWEST: usize = 4;

/// Writes tensors of one element to `out`, which is new and contiguous; declines larger ones.
pub(crate) fn join(out: &Tensor, tensors: &[&Tensor]) -> Result<bool> {
    let is_number = |t: &&Tensor| t.numel() == 1 && t.dtype == out.dtype;
    if tensors.len() < FEWEST || !out.dtype.is_float() || !tensors.iter().all(is_number) {
        return Ok(false);
    }
    let positions = Tensor::empty_like_shape(&[AT_ONCE], DType::F32, out.device())?;
    if !sequence::run(Sequence::Int { start: 0, step: 1 }, &positions)? {
        return Ok(false);
    }
    let number = |t: &Tensor| {
        let mut layout = Layout::contiguous(Shape::default());
        layout.offset = t.layout.offset;
        t.with_layout(layout)
    };
    let stretch = |t: &Tensor, start: usize, n: usize| {
        let mut layout = Layout::contiguous(Shape::from(n));
        layout.offset = t.layout.offset + start;
        t.with_layout(layout)
    };
    for (i, some) in tensors.chunks(AT_ONCE).enumerate() {
        // The last launch uses the same kernel, so its missing inputs are the first number again.
        let padding = std::iter::repeat_n(&some[0], AT_ONCE - some.len());
        let numbers: SmallVec<[Tensor; AT_ONCE]> = some.iter().chain(padding).map(|t| number(t)).collect();
        let (positions, target) = (stretch(&positions, 0, some.len()), stretch(out, i * AT_ONCE, some.len()));
        let inputs: SmallVec<[&Tensor; AT_ONCE]> = std::iter::once(&positions).chain(&numbers).collect();
        let pick = (1..AT_ONCE)
            .rev()
            .fold(Expr::input(AT_ONCE), |rest, at| Expr::input(0).eq((at - 1) as f64).select(Expr::input(at), rest));
        let params = Params::default();
        map::run(&Formulas { op: "cat", inputs: &inputs, params, exprs: &[pick], outputs: &[&target] })?;
    }
    Ok(true)
}
