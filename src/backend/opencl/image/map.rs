//! Elementwise formulas that read images.

use std::fmt::Write;

use super::*;
use crate::storage::Image;

/// The number of image arguments that every device supports.
const MAX_IMAGE_ARGS: usize = 8;

/// Computes a formula of inputs of up to four dims into one output, with f32 arithmetic. Returns false if buffers should be read.
pub(crate) fn elementwise(formulas: &Formulas) -> Result<bool> {
    if formulas.outputs.len() != 1 || image_device(formulas.outputs[0], TuningParameter::ElementwiseImages).is_none() {
        return Ok(false);
    }
    let mut launched = true; // remains true if there is nothing to compute and therefore no launch
    formulas.checked(true, |launch, _| {
        launched = launch_on_images(launch)?;
        Ok(())
    })?;
    Ok(launched)
}

fn launch_on_images(launch: &Launch) -> Result<bool> {
    let (out, program) = (launch.outputs[0], launch.program);
    let cl = out.cl_device()?;
    let used: SmallVec<[(usize, &Tensor); 4]> =
        launch.inputs.iter().enumerate().filter(|(k, _)| program.exprs().iter().any(|e| e.uses_input(*k))).collect();
    let operands = || used.iter().map(|(_, t)| *t).chain([out]);
    let fits = |t: &Tensor| {
        exact_format(t.dtype).is_some() && Tensor4::new(&t.layout).is_some_and(|four| four.fits(Blocks::Across, cl))
    };
    // Formulas that only copy read buffers, because images would change the bits of NaNs.
    let moves = program.exprs().iter().all(|expr| (0..launch.inputs.len()).any(|k| *expr == crate::Expr::input(k)));
    let plain = program.seeds() == 0 && launch.compute == Compute::F32 && !program.can_fault(launch.compute);
    if used.is_empty() || used.len() > MAX_IMAGE_ARGS || moves || !plain || !operands().all(fits) {
        return Ok(false);
    }
    let images = used.iter().map(|(_, t)| single_use_image(cl, t)).collect::<Result<SmallVec<[Image; 4]>>>();
    let Some(images) = none_if_out_of_memory(images)? else { return Ok(false) };
    let config = ImageFormula { dtype: out.dtype, used: used.iter().map(|(k, _)| *k).collect() };
    let key = KernelKey::new("elementwise of images", &config, program.exprs());
    let kernel = get_or_build_kernel(cl, key, "image", || config.source(program))?;
    let four = Tensor4::new(&out.layout).expect("it fits");
    let (words, to, [width, height]) = (four.words(), out.device_view()?, four.size(Blocks::Across));
    let mut args: SmallVec<[Arg; 12]> = images.iter().map(image_arg).collect::<Result<_>>()?;
    args.extend(args![to; &words[..]]);
    args.extend((0..program.scalars()).map(|i| scalar_arg(launch.compute, launch.scalars[i])));
    launch_tuned(cl, &kernel, &args, width * height)?;
    Ok(true)
}

/// The configuration of the kernel for a formula: the dtype of the output, and the inputs that the formula reads.
#[derive(Hash)]
struct ImageFormula {
    dtype: DType,
    used: SmallVec<[usize; 4]>,
}

impl ImageFormula {
    fn source(&self, program: &Program) -> String {
        let (mut images, mut read) = (String::new(), String::new());
        for k in &self.used {
            let _ = write!(images, "__read_only image2d_t i{k}, ");
            let _ = write!(read, "const float4 x{k} = read_imagef(i{k}, PIXEL, at); ");
        }
        let inputs =
            (0..program.inputs()).map(|k| if self.used.contains(&k) { format!("get(x{k}, q)") } else { "0".into() });
        let scalars: String = (0..program.scalars()).map(|i| format!(", const float s{i}")).collect();
        let call: Vec<String> =
            inputs.chain((0..program.scalars()).map(|i| format!("s{i}"))).chain(["&o".into()]).collect();
        format!(
            "#define ELEMENTWISE\n#define A {}\n#define IMAGES {images}\n#define READ {read}\n#define SCALARS {scalars}\n\
         #define CALL(q) formula({})\n{}\n{TEMPLATE}",
            self.dtype,
            call.join(", "),
            program.emit(Compute::F32, "formula"),
        )
    }
}
