//! Generates the source of a product's kernel: the definitions in front of `kernels/gemm.cl`.

use std::fmt::Write;

use crate::backend::opencl::gemm::GemmKernel;
use crate::backend::opencl::gemm_mma::WindowsOperand;
use crate::backend::opencl::prelude::*;
use crate::backend::opencl::{gemm_mma, gemm_thin, quantized};

const TEMPLATE: &str = include_str!("../../../../kernels/gemm.cl");

/// The configuration of a product's kernel, without the epilogue.
#[derive(Hash)]
pub(super) struct GemmConfig {
    pub(super) variant: GemmKernel,
    pub(super) compute: Compute,
    /// The dtypes of the left and the right matrix.
    pub(super) matrices: [DType; 2],
    /// The dtypes of the results and the extras.
    pub(super) others: SmallVec<[DType; 4]>,
    /// The number of batch dimensions.
    pub(super) batch: usize,
    /// The number of results. The operands after the results are extras.
    pub(super) outs: usize,
    pub(super) sums: bool,
    pub(super) parts: bool,
    /// The number of results that a work-item stores at once.
    pub(super) wide: usize,
}

impl GemmConfig {
    /// Returns the kernel's source: definitions of types, sizes, and the epilogue with its operands, followed by the template.
    pub(super) fn source(&self, program: &Program) -> String {
        let &GemmConfig { variant, compute, matrices: [a, b], ref others, batch, outs, sums, parts, wide } = self;
        let c = compute.cl_name();
        let acc = if compute == Compute::I64 { "ulong" } else { c };
        let (first, step) = (9 + 3 * batch, 3 + batch);
        let as_windows = if let GemmKernel::Mma(mma) = variant { mma.windows } else { None };
        let windows = as_windows.is_some();
        // If a matrix consists of windows, `windows_mma.cl` computes the offsets of results, along rows or along columns.
        let windows_along_rows = as_windows == Some(WindowsOperand::LeftApart);
        let windows_along_columns = as_windows.is_some_and(|windows| {
            matches!(windows, WindowsOperand::Columns | WindowsOperand::ColumnsApart | WindowsOperand::RowsApart)
        });
        let offset = |row: &str, column: &str, i: usize, at: usize| {
            let row =
                if windows_along_rows { format!("RESULT_OFFSET({row})") } else { format!("({row}) * p.v[{}]", at + 1) };
            let column = if windows_along_columns { format!("RESULT_OFFSET({column})") } else { format!("({column})") };
            format!("at{i} + {row} + {column}")
        };
        let mut operands = String::new();
        let mut starts = String::new();
        let mut call: Vec<String> = vec![format!("({c})(value)")];
        let mut stores = String::new();
        // `write!` to a `String` cannot fail, so its results are ignored below.
        for (i, t) in others.iter().enumerate() {
            let at = first + i * step;
            let constant = if i < outs { "" } else { "const " };
            // No result overlaps another operand. `restrict` tells the compiler, which can then start the next loads before a store completes.
            let _ = write!(operands, ", {constant}__global {t}_t* restrict p{i}");
            let _ = write!(starts, "const long at{i} = p.v[{at}] + batch_offset(p, z, {}); ", at + 3);
            let row = format!("at{i} + (i) * p.v[{}]", at + 1);
            if i < outs && windows {
                let offset = offset("i", "j", i, at);
                let _ = write!(stores, "if (IS_STORED(j)) store_{t}_{compute:?}(p{i}, {offset}, y{i}); ");
            } else if i < outs {
                let _ = write!(stores, "store_{t}_{compute:?}(p{i}, {row} + (j) * p.v[{}], y{i}); ", at + 2);
            } else {
                call.push(format!("({c})load_{t}(p{i}, {row} + (j) * p.v[{}])", at + 2));
            }
        }
        call.truncate(program.inputs());
        let mut numbers = first + others.len() * step;
        let mut defines = String::new();
        if sums {
            let _ = write!(operands, ", __global {a}_t* sums");
            let at = format!("p.v[{numbers}] + (i) * p.v[{}]", numbers + 1);
            let _ = writeln!(defines, "#define STORE_SUM(i, sum) store_{a}_{compute:?}(sums, {at}, ({c})(sum));");
            numbers += 2;
        }
        if parts {
            let _ = write!(operands, ", __global {acc}* partial, volatile __global uint* arrived");
            for (i, name) in ["PART_DEPTH", "PARTS", "FIRST_PARTIAL", "FIRST_ARRIVED"].iter().enumerate() {
                let _ = writeln!(defines, "#define {name} p.v[{}]", numbers + i);
            }
            numbers += 4;
        }
        if let GemmKernel::Panel { .. } = variant {
            let convert = if a == DType::F16 { "#define CONVERT_A\n" } else { "" };
            let _ = writeln!(defines, "#define HEIGHT p.v[{numbers}]\n{convert}");
            numbers += 1;
        }
        if let Some(windows) = as_windows {
            let (left, apart) = (windows.is_left() as u8, define_if(windows.are_strided(), "APART"));
            let _ = writeln!(defines, "#define WINDOWS {numbers}\n#define LEFT {left}\n{apart}");
            numbers += gemm_mma::WINDOW_PARAMETERS;
        }
        for i in 0..program.scalars() {
            let _ = write!(operands, ", const {c} s{i}");
            call.push(format!("s{i}"));
        }
        if program.can_fault(compute) {
            operands.push_str(", __global int* fault");
            call.push("fault".into());
        }
        call.extend((0..outs).map(|i| format!("&y{i}")));
        let results: Vec<String> = (0..outs).map(|i| format!("y{i}")).collect();
        if wide > 1 {
            let each = |f: &dyn Fn(usize, DType) -> String| -> String {
                others[..outs].iter().enumerate().map(|(i, &t)| f(i, t)).collect()
            };
            let buffers = each(&|i, t| format!("{t}_t b{i}[WIDE]; "));
            let rounded = each(&|i, t| format!("b{i}[u] = to_{t}_{compute:?}(y{i}); "));
            let stored = each(&|i, t| {
                let (raw, offset) = (t.cl_storage(), offset("row_", "col_", i, first + i * step));
                format!("*(__global {raw}{wide}*)(p{i} + {offset}) = vload{wide}(0, b{i}); ")
            });
            let _ = writeln!(
                defines,
                "#define WIDE {wide}\n#define FINISH_WIDE(row_, col_, values) {{ {buffers}_Pragma(\"unroll\") \
             for (uint u = 0; u < WIDE; u++) {{ const long i = row_, j = (col_) + u; const {c} value = values[u]; \
             {c} {}; epilogue({}); {rounded}}} {stored}}}",
                results.join(", "),
                call.join(", "),
            );
        }
        let halves = matches!(others[0], DType::F16 | DType::BF16);
        if matches!(variant, GemmKernel::Mma(mma) if mma.can_round())
            && wide == 8
            && halves
            && !parts
            && program.exprs() == [Expr::input(0)]
        {
            let offset = offset("row_", "col_", 0, first);
            let _ =
                writeln!(defines, "#define ROUNDED \"{}\"\n#define RESULT_AT(row_, col_) (p0 + {offset})", others[0]);
        }
        format!(
            "#define A {a}\n#define B {b}\n#define ACC {acc}\n#define BATCH {batch}\n#define PARAMS {numbers}\n{}\
         {defines}#define OPERANDS {operands}\n#define OPERAND_OFFSETS(z) {starts}\n\
         #define FINISH(i, j, value) {{ {c} {}; epilogue({}); {stores}}}\n{}\n{TEMPLATE}{}",
            variant.defines(),
            results.join(", "),
            call.join(", "),
            program.emit(compute, "epilogue"),
            match variant {
                #[cfg(test)]
                GemmKernel::Mma(mma)
                    if mma.windows.is_some()
                        && crate::backend::opencl::implicit_gemm::tests::PRETENDED_CORES.get().is_some() =>
                    crate::backend::opencl::implicit_gemm::tests::STAND_IN,
                GemmKernel::Mma(_) => gemm_mma::TEMPLATE,
                GemmKernel::Thin(_) => gemm_thin::TEMPLATE,
                GemmKernel::Quantized(_) => quantized::TEMPLATE,
                _ => "",
            },
        )
    }
}
