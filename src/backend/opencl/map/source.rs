//! Generates the source in front of the template of an elementwise kernel: formulas, parameters, loads and stores.

use std::fmt::Write;

use crate::backend::opencl::map::{Form, MapConfig, MapOperand, MemoryAccess};
use crate::backend::opencl::prelude::*;
use crate::backend::opencl::source::draw_type;
use crate::device::opencl::FAST_DIVISION;

const TEMPLATE: &str = include_str!("../../../../kernels/elementwise.cl");

/// The template that converts f32 to bf16 with a single instruction, which devices with tensor cores have.
const BF16_ROUNDING: &str = include_str!("../../../../kernels/rounded.cl");

/// The template that computes the random numbers of [`RANDOM_BLOCK_LEN`](super::RANDOM_BLOCK_LEN) elements at once.
const RANDOM_BLOCKS: &str = include_str!("../../../../kernels/random.cl");

/// The template of functions that CPU compilers vectorise, unlike the built-in functions.
const BRANCHLESS_FUNCTIONS: &str = include_str!("../../../../kernels/branchless.cl");

/// Defines a macro that stores without filling the cache, if the compiler has such a store; otherwise it is a plain store.
const STORE_NONTEMPORAL: &str = "#ifdef __has_builtin
#if __has_builtin(__builtin_nontemporal_store)
#define STORE_PAST(value, to) __builtin_nontemporal_store(value, to)
#endif
#endif
#ifndef STORE_PAST
#define STORE_PAST(value, to) *(to) = value
#endif
";

/// Returns the source of the kernel for a device, without the prelude.
pub(super) fn generate_source(device: &ClDevice, launch: &Launch, config: &MapConfig) -> String {
    let &MapConfig { rank, wide, form, tile_group: local, .. } = config;
    let operands = &config.operands[..];
    let index = index_type(wide);
    let (params, names): (Vec<_>, Vec<_>) = parameters(launch, operands, rank).into_iter().unzip();
    let mut s = format!(
        "#define INDEX {index}\n#define PARAMETERS {}\n#define ARGUMENTS {}\n",
        params.join(", "),
        names.join(", ")
    );
    let w = &mut s;
    // Copies must keep the bits of NaNs, so they do not round with the instruction. The query may build a kernel, so it comes last.
    let rounds = |o: &MapOperand| o.dtype == DType::BF16 && o.access == MemoryAccess::Vector;
    if launch.program.computes()
        && launch.compute == Compute::F32
        && operands[launch.inputs.len()..].iter().any(rounds)
        && device.tensor_cores().local > 0
    {
        w.push_str(BF16_ROUNDING);
    }
    // `write!` to a `String` cannot fail, so its results are ignored below.
    if rank > 0 {
        let n = operands.len();
        // All strides are in one array, because Mesa counts only the outermost dimension of an array of arrays in an argument's size.
        let _ = writeln!(w, "typedef struct {{ ulong dims[{rank}]; long strides[{}]; }} layout_t;", n * rank);
        let _ = writeln!(w, "#define STRIDE(k, d) layout.strides[(k) * {rank} + (d)]");
    }
    let drawn = form == Form::Drawn;
    let formula = match drawn {
        true => launch.program.emit_with_drawn_numbers(launch.compute, "compute"),
        false => launch.program.emit(launch.compute, "compute"),
    };
    let info = device.info();
    let vectorised = info.kind == DeviceKind::Cpu && info.fp64 && launch.compute == Compute::F32;
    if vectorised && ["pow(", "log1p("].iter().any(|call| formula.contains(call)) {
        w.push_str(BRANCHLESS_FUNCTIONS);
    }
    w.push_str(&formula);
    let are_halves = operands[launch.inputs.len()..].iter().all(|o| matches!(o.dtype, DType::F16 | DType::BF16));
    // If a quotient is rounded to an integer, its last bit matters, so fast division is not allowed.
    if are_halves && !["floor", "ceil", "trunc", "rint", "round", "mod"].iter().any(|name| formula.contains(name)) {
        w.push_str(FAST_DIVISION);
    }
    let writer =
        SourceWriter { launch, operands, nontemporal: matches!(form, Form::Vector { nontemporal: true, .. }), drawn };
    let dims: Vec<usize> = (0..rank).collect();
    match form {
        Form::Scalar { per_item } => {
            let _ = writeln!(w, "#define PER_ITEM {per_item}");
            writer.write_function(w, "element", &dims, 1);
        }
        Form::Drawn => {
            w.push_str(RANDOM_BLOCKS);
            let (mut draw, mut numbers) = (String::new(), String::new());
            let [key, stream] = writer.replay_terms();
            for (kind, i) in launch.program.draws() {
                let _ = write!(draw, "{} {kind}{i}[4][DRAWN / 4]; ", draw_type(kind));
                let _ = write!(draw, "draw_{kind}(key{i}{key}, stream{i}{stream}, e / 4, {kind}{i}); ");
                let _ = write!(numbers, ", {kind}{i}[k % 4][k / 4]");
            }
            let _ = writeln!(w, "#define DRAW {draw}\n#define ELEMENT element(e + k, ARGUMENTS{numbers});");
            writer.write_function(w, "element", &dims, 1);
        }
        Form::Vector { width, nontemporal } => {
            w.push_str(if nontemporal { STORE_NONTEMPORAL } else { "" });
            let _ = writeln!(w, "#define VEC {width}");
            let wide = DType::ALL
                .iter()
                .filter(|t| operands.iter().any(|o| o.access == MemoryAccess::Vector && o.dtype == **t));
            wide.for_each(|&t| w.push_str(&VectorWords::for_elements(t, width).define(t, width)));
            writer.write_function(w, "elements", &dims, width);
            if rank <= 1 {
                let _ = writeln!(w, "#define TAIL");
                writer.write_function(w, "element", &dims, 1);
            }
        }
        Form::Tiled { side, across, dim, lines } => {
            let inner = rank - 1;
            // With this padding, the columns of a tile are in different banks of local memory.
            let pad = if lines.is_some() { 1 } else { (32 / across).max(1) };
            let _ =
                writeln!(w, "#define TILE {side}\n#define ACROSS {across}\n#define PAD {pad}\n#define GROUP {local}");
            let _ = writeln!(w, "#define COLUMNS (INDEX)layout.dims[{inner}]\n#define ROWS (INDEX)layout.dims[{dim}]");
            let batch: Vec<usize> = dims.iter().copied().filter(|&d| d != inner && d != dim).collect();
            let _ = writeln!(w, "#define POSITIONS(b) {}", writer.position_statements("b", &batch));
            let (mut transposed, mut fetch, mut fetch_line) = (String::new(), String::new(), String::new());
            for (k, o) in operands.iter().enumerate().filter(|(_, o)| o.used && o.access == MemoryAccess::Tile) {
                let space = if local > 1 { "__local " } else { "" };
                let _ = write!(transposed, "{space}{}_t tile{k}[ACROSS][TILE + PAD]; ", o.dtype);
                let line = format!("at{k} + (long)(column + c) * STRIDE({k}, {inner}) + row");
                let _ = write!(fetch, "tile{k}[c][r] = p{k}[{line} + r]; ");
                let _ = write!(fetch_line, "LOAD_LINE(p{k} + {line}, tile{k}[c]); ");
            }
            let _ = writeln!(w, "#define TRANSPOSED {transposed}\n#define FETCH {fetch}");
            if let Some(nontemporal) = lines {
                let nontemporal = if nontemporal { "#define STREAMED\n" } else { "" };
                let line = writer.line_statements(side, dim, inner);
                let _ = writeln!(w, "#define LINE {side}\n{nontemporal}#define FETCH_LINE {fetch_line}");
                let _ = writeln!(w, "#define ELEMENT_LINE {line}");
            }
            let mut element = String::new();
            for (k, _) in operands.iter().enumerate().filter(|(_, o)| o.used && is_global(o)) {
                let _ = write!(
                    element,
                    "const ulong i{k} = at{k} + (long)(row + r) * STRIDE({k}, {dim}) \
                     + (long)(column + c) * STRIDE({k}, {inner}); "
                );
            }
            writer.write_body(
                &mut element,
                1,
                |k| {
                    let o = &operands[k];
                    match o.access {
                        MemoryAccess::Tile => format!("from_{}(tile{k}[c][r])", o.dtype),
                        _ if is_global(o) => format!("load_{}(p{k}, i{k})", o.dtype),
                        _ => format!("load_{}(p{k}, at{k})", o.dtype),
                    }
                },
                "i",
            );
            let _ = writeln!(w, "#define ELEMENT {}", element.replace('\n', " "));
        }
    }
    s.push_str(TEMPLATE);
    s
}

/// True if a tiled kernel accesses this operand in global memory, by row and column, instead of through a tile.
fn is_global(o: &MapOperand) -> bool {
    o.access != MemoryAccess::Tile && o.kind != OperandKind::Scalar
}

/// Returns the declaration and the name of each parameter of the kernel.
fn parameters(launch: &Launch, operands: &[MapOperand], rank: usize) -> Vec<(String, String)> {
    let (program, c) = (launch.program, launch.compute.cl_name());
    let mut params: Vec<(String, String)> = Vec::new();
    let mut param = |ty: &str, name: String| params.push((format!("{ty} {name}"), name));
    for (k, o) in operands.iter().enumerate().filter(|(_, o)| o.used) {
        let constant = if k < launch.inputs.len() { "const " } else { "" };
        param(&format!("__global {constant}{}_t*", o.dtype), format!("p{k}"));
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
    if launch.base.is_some() {
        param("__global const ulong*", "base".into());
        param("const ulong", "base_offset".into());
    }
    if program.can_fault(launch.compute) {
        param("__global int*", "fault".into());
    }
    params
}

/// The machine words in which `n` contiguous elements are loaded and stored. Compilers would split vectors of short elements or spill
/// them. Words are extracted one by one, because some compilers would otherwise combine all words into one large integer.
struct VectorWords {
    word: &'static str,
    count: usize,
}

impl VectorWords {
    fn for_elements(dtype: DType, n: usize) -> VectorWords {
        let (word, size) = match dtype.size() * n {
            2 => ("ushort", 2),
            _ if dtype.size() == 8 => ("ulong", 8),
            _ => ("uint", 4),
        };
        VectorWords { word, count: dtype.size() * n / size }
    }

    /// Defines the type `wide_{dtype}`, a union of the words and the elements.
    fn define(&self, dtype: DType, n: usize) -> String {
        format!("typedef union {{ {} word[{}]; {dtype}_t each[{n}]; }} wide_{dtype};\n", self.word, self.count)
    }

    /// Returns the vector type that holds all words.
    fn vector_type(&self) -> String {
        if self.count > 1 { format!("{}{}", self.word, self.count) } else { self.word.into() }
    }

    /// Returns a statement that loads all words of the variable `to` from the address `from`.
    fn load(&self, to: &str, from: &str) -> String {
        let all = self.vector_type();
        let part = |i: usize| if self.count > 1 { format!("{to}_all.s{i}") } else { format!("{to}_all") };
        let each: String = (0..self.count).map(|i| format!(" {to}.word[{i}] = {};", part(i))).collect();
        format!("const {all} {to}_all = *(const __global {all}*)({from});{each}")
    }

    /// Returns an expression for the vector of all words of the variable `from`.
    fn value(&self, from: &str) -> String {
        let each: Vec<String> = (0..self.count).map(|i| format!("{from}.word[{i}]")).collect();
        format!("({})({})", self.vector_type(), each.join(", "))
    }
}

/// Writes the generated functions and statements of one kernel.
struct SourceWriter<'a> {
    launch: &'a Launch<'a>,
    operands: &'a [MapOperand],
    /// Whether vectors are written with non-temporal stores.
    nontemporal: bool,
    /// Whether functions take the random numbers of their element as arguments.
    drawn: bool,
}

impl SourceWriter<'_> {
    fn used_operands(&self) -> impl Iterator<Item = (usize, &MapOperand)> {
        self.operands.iter().enumerate().filter(|(_, o)| o.used)
    }

    /// Returns the terms that are added to the key and the stream of each seed when a graph is replayed; empty without a base.
    fn replay_terms(&self) -> [&'static str; 2] {
        if self.launch.base.is_some() { [" + base[base_offset]", " + base[base_offset + 1]"] } else { [""; 2] }
    }

    /// Returns statements that declare `at{k}` for each operand k: the offset in operand k of position `e`, an index over `dims`.
    fn position_statements(&self, e: &str, dims: &[usize]) -> String {
        let mut s = String::new();
        for (k, o) in self.used_operands() {
            let at = if o.kind == OperandKind::Contiguous { format!(" + {e}") } else { String::new() };
            let _ = write!(s, "ulong at{k} = p{k}_offset{at}; ");
        }
        if dims.is_empty() {
            return s;
        }
        let _ = write!(s, "INDEX rest = {e}; ");
        for (n, &d) in dims.iter().enumerate().rev() {
            let divide = format!("const INDEX n = layout.dims[{d}]; const INDEX i = rest % n; rest /= n;");
            let _ = write!(s, "{{ {} ", if n > 0 { &divide } else { "const INDEX i = rest;" });
            for (k, _) in self.used_operands().filter(|(_, o)| o.is_strided()) {
                let _ = write!(s, "at{k} += (long)i * STRIDE({k}, {d}); ");
            }
            s.push_str("} ");
        }
        s
    }

    /// Writes a function that computes the results at `width` consecutive positions, starting at position `e`.
    fn write_function(&self, w: &mut String, name: &str, dims: &[usize], width: usize) {
        let draws = self.drawn.then(|| self.launch.program.draws()).into_iter().flatten();
        let numbers: String = draws.map(|(kind, i)| format!(", const {} {kind}{i}", draw_type(kind))).collect();
        let _ = writeln!(
            w,
            "static inline void {name}(const INDEX e, PARAMETERS{numbers}) {{\n    {}",
            self.position_statements("e", dims)
        );
        if width == 1 {
            self.write_body(w, 1, |k| format!("load_{}(p{k}, at{k})", self.operands[k].dtype), "at");
            w.push_str("}\n");
            return;
        }
        let inputs = self.launch.inputs.len();
        for (k, o) in self.used_operands() {
            let t = o.dtype;
            match o.access {
                MemoryAccess::Vector => {
                    let _ = writeln!(w, "    wide_{t} b{k};");
                    if k < inputs {
                        let load = VectorWords::for_elements(t, width).load(&format!("b{k}"), &format!("p{k} + at{k}"));
                        let _ = writeln!(w, "    {load}");
                    }
                }
                _ => _ = writeln!(w, "    const {t}_t b{k} = p{k}[at{k}];"),
            }
        }
        let _ = writeln!(w, "    #pragma unroll\n    for (int k = 0; k < VEC; k++) {{");
        let load = |k: usize| {
            let o = &self.operands[k];
            let at = if o.access == MemoryAccess::Vector { ".each[k]" } else { "" };
            format!("from_{}(b{k}{at})", o.dtype)
        };
        self.write_body(w, width, load, ".each");
        w.push_str("    }\n");
        for (k, o) in self.used_operands().filter(|(k, _)| *k >= inputs) {
            let words = VectorWords::for_elements(o.dtype, width);
            let (to, value) =
                (format!("(__global {}*)(p{k} + at{k})", words.vector_type()), words.value(&format!("b{k}")));
            let _ = match self.nontemporal {
                true => writeln!(w, "    STORE_PAST({value}, {to});"),
                false => writeln!(w, "    *{to} = {value};"),
            };
        }
        w.push_str("}\n");
    }

    /// Returns statements that compute row `r` of a tile and store the row, line by line.
    fn line_statements(&self, side: usize, dim: usize, inner: usize) -> String {
        let (mut s, inputs) = (String::new(), self.launch.inputs.len());
        for (k, _) in self.used_operands().filter(|(_, o)| is_global(o)) {
            let _ = write!(
                s,
                "const ulong i{k} = at{k} + (long)(row + r) * STRIDE({k}, {dim}) \
                 + (long)column * STRIDE({k}, {inner}); "
            );
        }
        let outputs = || self.used_operands().filter(|(k, _)| *k >= inputs);
        for (k, o) in outputs() {
            let _ = write!(s, "{}_t b{k}[TILE]; ", o.dtype);
        }
        s.push_str("_Pragma(\"unroll\") for (uint k = 0; k < TILE; k++) { ");
        let load = |k: usize| {
            let o = &self.operands[k];
            match o.access {
                MemoryAccess::Tile => format!("from_{}(tile{k}[k][r])", o.dtype),
                _ if is_global(o) => format!("load_{}(p{k}, i{k} + (long)k * STRIDE({k}, {inner}))", o.dtype),
                _ => format!("load_{}(p{k}, at{k})", o.dtype),
            }
        };
        self.write_body(&mut s, side, load, "");
        s.push_str("} ");
        for (k, o) in outputs() {
            let _ = write!(s, "STORE_LINE({}, b{k}, p{k} + i{k}) ", o.dtype.cl_storage());
        }
        s.replace('\n', " ")
    }

    /// Writes statements that compute one position and store the results. `load(k)` returns the expression for input k. Results are
    /// stored at offset `{at}{k}`, or, with a `width` above 1, in element k of the array `b{k}{at}`.
    fn write_body(&self, w: &mut String, width: usize, load: impl Fn(usize) -> String, at: &str) {
        let (program, compute) = (self.launch.program, self.launch.compute);
        let (c, class, inputs) = (compute.cl_name(), format!("{compute:?}"), self.launch.inputs.len());
        let outputs = self.operands.len() - inputs;
        (0..outputs).for_each(|j| {
            let _ = writeln!(w, "    {c} y{j};");
        });
        let used = |k: usize| self.operands.get(k).is_some_and(|o| o.used) && k < inputs;
        let mut call: Vec<String> =
            (0..program.inputs()).map(|k| if used(k) { format!("({c}){}", load(k)) } else { "0".into() }).collect();
        call.extend((0..program.scalars()).map(|i| format!("s{i}")));
        if self.drawn {
            call.extend(program.draws().into_iter().map(|(kind, i)| format!("{kind}{i}")));
        } else if program.seeds() > 0 {
            let [key, stream] = self.replay_terms();
            (0..program.seeds()).for_each(|i| call.push(format!("key{i}{key}, stream{i}{stream}")));
            call.push(match width {
                1 => "e".into(),
                // In this form, compilers recognise which positions share a block of four random numbers.
                _ if width.is_multiple_of(4) => "((ulong)(e / 4) + k / 4) << 2 | k % 4".into(),
                _ => "e + k".into(),
            });
        }
        if program.can_fault(compute) {
            call.push("fault".into());
        }
        call.extend((0..outputs).map(|j| format!("&y{j}")));
        let _ = writeln!(w, "    compute({});", call.join(", "));
        for j in 0..outputs {
            let (k, t) = (inputs + j, self.operands[inputs + j].dtype);
            let _ = match width {
                1 => writeln!(w, "    store_{t}_{class}(p{k}, {at}{k}, y{j});"),
                _ => writeln!(w, "        b{k}{at}[k] = to_{t}_{class}(y{j});"),
            };
        }
    }
}
