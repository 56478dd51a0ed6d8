//! Elementwise launches on OpenCL: `kernels/elementwise.cl` around a generated `element` function.

use std::fmt::Write;

use smallvec::SmallVec;

use super::elementwise::Launch;
use super::kernels::{KernelKey, Placed, kernel};
use crate::device::DeviceKind;
use crate::device::opencl::Arg;
use crate::{Compute, DType, Result, Tensor};

const TEMPLATE: &str = include_str!("../../kernels/elementwise.cl");

/// Work-items a group: a multiple of every GPU's width, and large enough for PoCL to vectorise over.
const LOCAL: usize = 256;

/// How an operand is walked: part of the kernel, so that the common cases cost no index arithmetic.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    /// Element `e` of the walk is element `e` of the operand.
    Contiguous,
    /// One element for all.
    Broadcast,
    /// By the walk's dims and strides.
    Strided,
}

pub(super) fn run(launch: &Launch) -> Result<()> {
    let device = launch.outputs[0].cl_device()?;
    let walk = &launch.walk;
    let operands: SmallVec<[&Tensor; 6]> = launch.inputs.iter().chain(launch.outputs.iter().copied()).collect();
    // An input that the expressions never read is not passed.
    let used: SmallVec<[bool; 6]> = (0..operands.len())
        .map(|k| k >= launch.inputs.len() || launch.program.exprs().iter().any(|e| e.uses_input(k)))
        .collect();
    let access: SmallVec<[Access; 6]> = (0..operands.len())
        .map(|k| match () {
            _ if walk.is_contiguous(k) => Access::Contiguous,
            _ if walk.strides[k].iter().all(|&s| s == 0) => Access::Broadcast,
            _ => Access::Strided,
        })
        .collect();
    let strided = access.contains(&Access::Strided);
    let count = launch.outputs[0].numel();
    // With room for the last group's positions past the end: were they to wrap, an in-place result would be computed twice.
    let wide = count >= u32::MAX as usize - 4 * LOCAL;
    let per_item = if device.info().kind == DeviceKind::Cpu { 1 } else { 4 };

    let mut params: SmallVec<[u64; 8]> = SmallVec::new();
    params.extend([
        launch.compute as u64,
        if strided { walk.dims.len() as u64 } else { 0 },
        wide as u64,
        per_item as u64,
    ]);
    params.extend(
        operands.iter().zip(&access).zip(&used).map(|((t, &a), &u)| (t.dtype as u64) << 8 | (a as u64) << 1 | u as u64),
    );
    let key = KernelKey { template: "elementwise", params, exprs: SmallVec::from(launch.program.exprs()) };
    let kernel = kernel(device, key, "elementwise", || {
        let rank = if strided { walk.dims.len() } else { 0 };
        let dtypes: SmallVec<[DType; 6]> = operands.iter().map(|t| t.dtype).collect();
        write_source(launch, &dtypes, &access, &used, rank, wide, per_item)
    })?;

    // dims, then one row of strides an operand: `layout_t` in the source.
    let mut layout: SmallVec<[i64; 32]> = SmallVec::new();
    if strided {
        layout.extend(walk.dims.iter().map(|&d| d as i64));
        layout.extend(walk.strides.iter().flatten().map(|&s| s as i64));
    }
    let read = operands.iter().zip(&used).filter(|(_, used)| **used);
    let places = read.map(|(t, _)| t.place()).collect::<Result<SmallVec<[Placed; 6]>>>()?;
    let mut args: SmallVec<[Arg; 24]> = places.iter().flat_map(|p| [p.buffer(), p.offset()]).collect();
    if strided {
        args.push(Arg::Bytes(bytemuck::cast_slice(&layout)));
    }
    args.extend(launch.scalars.iter().take(launch.program.scalars()).map(|s| scalar_arg(launch.compute, *s)));
    for seed in launch.seeds.iter().take(launch.program.seeds()) {
        args.extend([Arg::U64(seed.key), Arg::U64(seed.stream)]);
    }
    if launch.program.can_fault(launch.compute) {
        args.push(Arg::Buffer(device.fault_buffer()));
    }
    args.push(if wide { Arg::U64(count as u64) } else { Arg::U32(count as u32) });
    device.launch(&kernel, &args, &[count.div_ceil(per_item)], &[LOCAL])
}

/// A host number as a kernel argument of the type computed in.
pub(crate) fn scalar_arg<'a>(compute: Compute, s: crate::Scalar) -> Arg<'a> {
    match compute {
        Compute::F32 => Arg::F32(s.to_f64() as f32),
        Compute::F64 => Arg::F64(s.to_f64()),
        Compute::I64 => Arg::I64(s.to_i64()),
    }
}

/// The generated half of the kernel: the expressions as a function, `element` around it, and the parameter lists.
fn write_source(
    launch: &Launch,
    dtypes: &[DType],
    access: &[Access],
    used: &[bool],
    rank: usize,
    wide: bool,
    per_item: usize,
) -> String {
    let (program, compute) = (launch.program, launch.compute);
    let class = format!("{compute:?}");
    let c = compute.cl_name();
    let index = if wide { "ulong" } else { "uint" };
    let inputs = launch.inputs.len();
    let mut params: Vec<String> = Vec::new();
    let mut names: Vec<String> = Vec::new();
    let mut param = |ty: &str, name: String| {
        params.push(format!("{ty} {name}"));
        names.push(name);
    };
    for (k, t) in dtypes.iter().enumerate().filter(|(k, _)| used[*k]) {
        let constant = if k < inputs { "const " } else { "" };
        param(&format!("__global {constant}{t}_t*"), format!("p{k}"));
        param("const ulong", format!("p{k}_offset"));
    }
    if rank > 0 {
        param("const layout_t", "layout".into());
    }
    (0..program.scalars()).for_each(|i| param(&format!("const {c}"), format!("s{i}")));
    for i in 0..program.seeds() {
        param("const ulong", format!("key{i}"));
        param("const ulong", format!("stream{i}"));
    }
    let fault = program.can_fault(compute);
    if fault {
        param("__global int*", "fault".into());
    }

    let mut s = String::new();
    let w = &mut s;
    // Writing to a String cannot fail.
    let _ = writeln!(w, "#define INDEX {index}\n#define PER_ITEM {per_item}");
    let _ = writeln!(w, "#define PARAMETERS {}\n#define ARGUMENTS {}", params.join(", "), names.join(", "));
    if rank > 0 {
        let _ =
            writeln!(w, "typedef struct {{ ulong dims[{rank}]; long strides[{}][{rank}]; }} layout_t;", dtypes.len());
    }
    w.push_str(&program.emit(compute, "compute"));
    let _ = writeln!(w, "inline void element(const INDEX e, PARAMETERS) {{");
    for (k, a) in access.iter().enumerate().filter(|(k, _)| used[*k]) {
        let at = match a {
            Access::Contiguous => " + e",
            Access::Broadcast | Access::Strided => "",
        };
        let _ = writeln!(w, "    ulong at{k} = p{k}_offset{at};");
    }
    if rank > 0 {
        let _ = writeln!(w, "    INDEX rest = e;");
        for d in (0..rank).rev() {
            if d > 0 {
                let _ = writeln!(w, "    {{ const INDEX n = layout.dims[{d}]; const INDEX i = rest % n; rest /= n;");
            } else {
                let _ = writeln!(w, "    {{ const INDEX i = rest;");
            }
            for (k, _) in access.iter().enumerate().filter(|(k, a)| used[*k] && **a == Access::Strided) {
                let _ = writeln!(w, "      at{k} += (long)i * layout.strides[{k}][{d}];");
            }
            let _ = writeln!(w, "    }}");
        }
    }
    let outputs = dtypes.len() - inputs;
    (0..outputs).for_each(|j| {
        let _ = writeln!(w, "    {c} y{j};");
    });
    let mut call: Vec<String> = (0..program.inputs())
        .map(|k| match dtypes.get(k) {
            Some(t) if used[k] => format!("({c})load_{t}(p{k}, at{k})"),
            _ => "0".into(),
        })
        .collect();
    call.extend((0..program.scalars()).map(|i| format!("s{i}")));
    if program.seeds() > 0 {
        (0..program.seeds()).for_each(|i| call.push(format!("key{i}, stream{i}")));
        call.push("e".into());
    }
    if fault {
        call.push("fault".into());
    }
    call.extend((0..outputs).map(|j| format!("&y{j}")));
    let _ = writeln!(w, "    compute({});", call.join(", "));
    for j in 0..outputs {
        let (k, t) = (inputs + j, dtypes[inputs + j]);
        let _ = writeln!(w, "    store_{t}_{class}(p{k}, at{k}, y{j});");
    }
    let _ = writeln!(w, "}}");
    s.push_str(TEMPLATE);
    s
}
