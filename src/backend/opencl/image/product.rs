//! Matrix products that read the right matrix, a weight, as an image.

use std::fmt::Write;

use super::*;

/// Multiplies `[.., k]` by a weight `[k, n]`. The weight's image is cached until the weight changes. Returns false if buffers should be read.
pub(crate) fn product(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
    let Some(cl) = image_device(g.a, TuningParameter::ProductImages) else { return Ok(false) };
    let program = Program::shared(g.epilogue);
    let floats = |t: &Tensor| exact_format(t.dtype).is_some();
    let plain = outs.len() == 1 && g.sums.is_none() && program.seeds() == 0 && !program.can_fault(Compute::F32);
    let operands = [g.a, g.b].into_iter().chain(outs).chain(g.extras.iter().copied());
    if !plain || g.compute() != Compute::F32 || g.b.rank() != 2 || !operands.clone().all(floats) {
        return Ok(false);
    }
    let others: SmallVec<[Layout; 4]> = operands.skip(2).map(|t| t.layout.broadcast_to(shape)).collect();
    let plan = GemmPlan::new(&g.a.layout, &g.b.layout, shape, &others.iter().collect::<SmallVec<[&Layout; 4]>>());
    let [k, n] = [g.b.shape().dims()[0], g.b.shape().dims()[1]];
    let same = plan.batch.is_empty() && (plan.k, plan.n) == (k, n) && plan.b.batch.is_empty();
    let strides = g.b.strides();
    let four = Tensor4 { dims: [1, n, k, 1], strides: [0, strides[1], strides[0], 0] };
    let items = plan.m.div_ceil(4) * n.div_ceil(4);
    if !same || plan.m * n * k == 0 || items >= 1 << 30 || plan.m >= 1 << 30 || !four.fits(Blocks::Across, cl) {
        return Ok(false);
    }
    let Some(image) = none_if_out_of_memory(cached_image(cl, g.b, &four, Blocks::Across))? else { return Ok(false) };

    let extras = g.extras.iter().map(|t| t.dtype).collect();
    let config = ImageProduct { matrix: g.a.dtype, out: outs[0].dtype, extras };
    let key = KernelKey::new("product with an image", &config, program.exprs());
    let kernel = get_or_build_kernel(cl, key, "image", || config.source(&program))?;
    let views = g.extras.iter().map(|t| t.device_view()).collect::<Result<SmallVec<[BufferView; 4]>>>()?;
    let (a, y) = (g.a.device_view()?, outs[0].device_view()?);
    let mut args: SmallVec<[Arg; 24]> = SmallVec::from_slice(&args![a; image_arg(&image)?, y.buffer(), y.offset()]);
    args.extend(args![; plan.m as u32, n as u32, k as u32]);
    args.extend(args![; plan.a.row, plan.a.col, plan.others[0].row, plan.others[0].col]);
    for (view, at) in views.iter().zip(&plan.others[1..]) {
        args.extend(args![view; at.row, at.col]);
    }
    args.extend((0..program.scalars()).map(|i| scalar_arg(Compute::F32, g.scalars[i])));
    launch_tuned(cl, &kernel, &args, items)?;
    Ok(true)
}

/// The configuration of the kernel: the dtypes of the left matrix, the result and the extras.
#[derive(Hash)]
struct ImageProduct {
    matrix: DType,
    out: DType,
    extras: SmallVec<[DType; 4]>,
}

impl ImageProduct {
    fn source(&self, program: &Program) -> String {
        let (mut extras, mut values) = (String::new(), String::new());
        for (e, dtype) in self.extras.iter().enumerate() {
            let _ = write!(extras, ", __global const {dtype}_t *e{e}, ulong e{e}_at, long e{e}_row, long e{e}_col");
            let _ = write!(values, ", load_{dtype}(e{e}, e{e}_at + (i) * e{e}_row + (j) * e{e}_col)");
        }
        let scalars: String = (0..program.scalars()).map(|i| format!(", const float s{i}")).collect();
        let given: String = (0..program.scalars()).map(|i| format!(", s{i}")).collect();
        format!(
            "#define PRODUCT\n#define A {}\n#define Y {}\n#define EXTRAS {extras}\n#define SCALARS {scalars}\n\
         #define CALL(value, i, j) epilogue(value{values}{given}, &o)\n{}\n{TEMPLATE}",
            self.matrix,
            self.out,
            program.emit(Compute::F32, "epilogue"),
        )
    }
}
