//! Formulas over tensors that are computed in one launch.

use smallvec::SmallVec;

use crate::expr::philox::Seed;
use crate::expr::program::Program;
use crate::layout::collapse::StridedDims;
use crate::{Compute, DType, Error, Result, Scalar, Tensor};

/// One elementwise launch, checked and ready to run on any device.
pub(crate) struct Launch<'a> {
    pub(crate) op: &'static str,
    pub(crate) inputs: &'a [Tensor],
    pub(crate) outputs: &'a [&'a Tensor],
    pub(crate) scalars: &'a [Scalar],
    pub(crate) seeds: &'a [Seed],
    pub(crate) base: Option<&'a Tensor>,
    pub(crate) program: &'a Program,
    pub(crate) compute: Compute,
    /// The dims and strides of all operands: the inputs, then the outputs.
    pub(crate) strided: StridedDims,
}

/// The inputs of an expression besides the elementwise tensors.
#[derive(Clone, Copy, Default)]
pub(crate) struct Params<'a> {
    pub(crate) scalars: &'a [Scalar],
    pub(crate) seeds: &'a [Seed],
    /// A key and a stream number in device memory that are added to every seed. They let each replay of an OpenCL graph draw new random numbers.
    pub(crate) base: Option<&'a Tensor>,
}

impl<'a> Params<'a> {
    /// Returns parameters that consist of scalars only.
    pub(crate) fn from_scalars(scalars: &'a [Scalar]) -> Params<'a> {
        Params { scalars, ..Params::default() }
    }
}

/// Returns the type in which a program computes: the widest compute type of the inputs. If all inputs are integers, or there are no inputs,
/// the outputs decide. If a primitive needs floats, the type is at least f32.
pub(crate) fn compute_type(program: &Program, inputs: &[&Tensor], outputs: &[&Tensor]) -> Compute {
    compute_type_of_dtypes(program, inputs.iter().map(|t| t.dtype), outputs.iter().map(|t| t.dtype))
}

/// Like [`compute_type`], for operands of these dtypes.
pub(crate) fn compute_type_of_dtypes(
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

/// True if an output shares its storage with an input.
pub(crate) fn in_place<'a>(mut inputs: impl Iterator<Item = &'a Tensor>, outputs: &[&Tensor]) -> bool {
    inputs.any(|t| outputs.iter().any(|out| t.shares_storage(out)))
}

/// An elementwise operation: a program that reads `inputs`, broadcast to the shape of the outputs, and writes `outputs`.
pub(crate) struct Formulas<'a> {
    pub(crate) op: &'static str,
    pub(crate) inputs: &'a [&'a Tensor],
    pub(crate) params: Params<'a>,
    pub(crate) program: &'a Program,
    pub(crate) outputs: &'a [&'a Tensor],
}

impl Formulas<'_> {
    /// Checks devices and shapes, and calls `launch` unless the outputs are empty. An input that overlaps an output is copied first; the second
    /// argument of `launch` is true if any input was copied. With `by_parts`, only ranges of bytes can overlap; otherwise any two tensors with the same
    /// storage overlap.
    pub(crate) fn checked(&self, by_parts: bool, launch: impl FnOnce(&Launch, bool) -> Result<()>) -> Result<()> {
        let Formulas { op, inputs, params: Params { scalars, seeds, base }, program, outputs } = *self;
        let (shape, device) = (outputs[0].shape(), outputs[0].device());
        for t in inputs {
            if t.device() != device {
                return Err(Error::DeviceMismatch { op, lhs: device, rhs: t.device() });
            }
            if &shape.broadcast(op, t.shape())? != shape {
                let hint = "the result does not fit the output tensor";
                return Err(Error::ShapeMismatch { op, lhs: shape.clone(), rhs: t.shape().clone(), hint });
            }
        }
        for out in outputs {
            if out.layout.may_alias_itself() {
                let reason = format!(
                    "the output has strides {:?}, so several of its elements share memory: write to a clone()",
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
                let copy = t.deep_copy(false)?;
                *view = copy.with_layout(copy.layout.broadcast_to(shape));
            }
        }
        let strides = views.iter().map(Tensor::strides).chain(outputs.iter().map(|t| t.strides()));
        let strided = StridedDims::new(shape, strides);
        launch(&Launch { op, inputs: &views, outputs, scalars, seeds, base, program, compute, strided }, copied)
    }
}

/// True if outputs may be written elementwise while `input` is read: `input` has no storage in common with any output, or is exactly the same view.
pub(crate) fn can_overwrite_elementwise(input: &Tensor, outputs: &[&Tensor]) -> bool {
    let same = |out: &Tensor| input.layout == out.layout && input.dtype == out.dtype;
    outputs.iter().all(|out| !input.shares_storage(out) || same(out))
}

/// True if writing `out` element by element could change elements of `input` before they are read.
fn overlaps(input: &Tensor, out: &Tensor, by_parts: bool) -> bool {
    if can_overwrite_elementwise(input, &[out]) {
        return false;
    }
    let bytes = |t: &Tensor| t.layout.bounds().map(|(lo, hi)| (lo * t.dtype.size(), (hi + 1) * t.dtype.size()));
    match (bytes(input), bytes(out)) {
        _ if !by_parts => true,
        (Some((a, b)), Some((c, d))) => a < d && c < b,
        _ => false,
    }
}
