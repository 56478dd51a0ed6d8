//! Formulas over tensors, computed in one launch.

use smallvec::SmallVec;

use crate::expr::philox::Seed;
use crate::expr::program::Program;
use crate::layout::collapse::StridedDims;
use crate::{Compute, DType, Error, Result, Scalar, Tensor};

/// One launch, checked and ready to run on any device.
pub(crate) struct Launch<'a> {
    pub(crate) op: &'static str,
    pub(crate) inputs: &'a [Tensor],
    pub(crate) outputs: &'a [&'a Tensor],
    pub(crate) scalars: &'a [Scalar],
    pub(crate) seeds: &'a [Seed],
    pub(crate) base: Option<&'a Tensor>,
    pub(crate) program: &'a Program,
    pub(crate) compute: Compute,
    /// Operands are the inputs, then the outputs.
    pub(crate) strided: StridedDims,
}

/// What an expression reads besides tensors.
#[derive(Clone, Copy, Default)]
pub(crate) struct Params<'a> {
    pub(crate) scalars: &'a [Scalar],
    pub(crate) seeds: &'a [Seed],
    /// A key and a stream in device memory, which are added to every seed, for the replays of graphs on OpenCL.
    pub(crate) base: Option<&'a Tensor>,
}

impl<'a> Params<'a> {
    /// Scalars alone.
    pub(crate) fn of(scalars: &'a [Scalar]) -> Params<'a> {
        Params { scalars, ..Params::default() }
    }
}

/// The type to compute in: the widest compute type of an input, or of an output where all inputs are integers or there are none;
/// at least f32 where a primitive needs floats.
pub(crate) fn compute_type(program: &Program, inputs: &[&Tensor], outputs: &[&Tensor]) -> Compute {
    compute_type_of(program, inputs.iter().map(|t| t.dtype), outputs.iter().map(|t| t.dtype))
}

/// [`compute_type`] of operands of these dtypes.
pub(crate) fn compute_type_of(
    program: &Program,
    inputs: impl Iterator<Item = DType>,
    outputs: impl Iterator<Item = DType>,
) -> Compute {
    let widest = match inputs.map(DType::compute).max().unwrap_or(Compute::I64) {
        Compute::I64 => outputs.map(DType::compute).max().unwrap_or(Compute::I64),
        float => float,
    };
    if program.uses_bits() {
        Compute::I64
    } else if program.needs_float() {
        widest.max(Compute::F32)
    } else {
        widest
    }
}

/// Whether an output shares its storage with an input.
pub(crate) fn in_place<'a>(mut inputs: impl Iterator<Item = &'a Tensor>, outputs: &[&Tensor]) -> bool {
    inputs.any(|t| outputs.iter().any(|out| t.shares_storage(out)))
}

/// An elementwise operation: a program over `inputs`, which are broadcast to the shape of the outputs, written to `outputs`.
pub(crate) struct Formulas<'a> {
    pub(crate) op: &'static str,
    pub(crate) inputs: &'a [&'a Tensor],
    pub(crate) params: Params<'a>,
    pub(crate) program: &'a Program,
    pub(crate) outputs: &'a [&'a Tensor],
}

impl Formulas<'_> {
    /// Checks devices and shapes, and calls `launch` unless the outputs are empty. Inputs that overlap an output are copied first,
    /// which the second argument of `launch` says. `by_parts` says that disjoint parts of one storage do not count as an overlap.
    pub(crate) fn checked(&self, by_parts: bool, launch: impl FnOnce(&Launch, bool) -> Result<()>) -> Result<()> {
        let Formulas { op, inputs, params: Params { scalars, seeds, base }, program, outputs } = *self;
        let (shape, device) = (outputs[0].shape(), outputs[0].device());
        for t in inputs {
            if t.device() != device {
                return Err(Error::DeviceMismatch { op, lhs: device, rhs: t.device() });
            }
            if &shape.broadcast(op, t.shape())? != shape {
                let hint = "the result does not fit the tensor written to";
                return Err(Error::ShapeMismatch { op, lhs: shape.clone(), rhs: t.shape().clone(), hint });
            }
        }
        for out in outputs {
            if out.layout.may_alias_itself() {
                let reason = format!(
                    "the tensor written to has strides {:?}, so several of its elements are one: write to a clone()",
                    out.strides()
                );
                return Err(Error::invalid(op, reason));
            }
        }
        if shape.numel() == 0 {
            return Ok(());
        }
        let compute = compute_type(program, inputs, outputs);
        let mut copied = false;
        let mut views: SmallVec<[Tensor; 4]> = SmallVec::new();
        for t in inputs {
            views.push(t.with_layout(t.layout.broadcast_to(shape)));
            let view = views.last_mut().expect("it was pushed");
            if outputs.iter().any(|out| overlaps(view, out, by_parts)) {
                copied = true;
                let copy = t.copied(false)?;
                *view = copy.with_layout(copy.layout.broadcast_to(shape));
            }
        }
        let strides = views.iter().map(Tensor::strides).chain(outputs.iter().map(|t| t.strides()));
        let strided = StridedDims::new(shape, strides);
        launch(&Launch { op, inputs: &views, outputs, scalars, seeds, base, program, compute, strided }, copied)
    }
}

/// Whether an input shares no storage with an output, or is the same view of it, so that it can be overwritten elementwise.
pub(crate) fn is_clear_of(input: &Tensor, outputs: &[&Tensor]) -> bool {
    let same = |out: &Tensor| input.layout == out.layout && input.dtype == out.dtype;
    outputs.iter().all(|out| !input.shares_storage(out) || same(out))
}

/// Whether writing `out` element by element could change elements of `input` that are still to be read.
fn overlaps(input: &Tensor, out: &Tensor, by_parts: bool) -> bool {
    if is_clear_of(input, &[out]) {
        return false;
    }
    let bytes = |t: &Tensor| t.layout.bounds().map(|(lo, hi)| (lo * t.dtype.size(), (hi + 1) * t.dtype.size()));
    match (bytes(input), bytes(out)) {
        _ if !by_parts => true,
        (Some((a, b)), Some((c, d))) => a < d && c < b,
        _ => false,
    }
}
