//! The source of an elementwise kernel before its template: formulas, parameters, loads and stores.

use std::fmt::Write;

use crate::backend::opencl::geometry::index_type;
use crate::backend::opencl::map::{Form, MapOperand, MemoryAccess};
use crate::backend::opencl::source::draw_type;
use crate::backend::problem::map::Launch;
use crate::backend::problem::operand::OperandKind;
use crate::device::opencl::{ClDevice, FAST_DIVISION};
use crate::{Compute, DType};

const TEMPLATE: &str = include_str!("../../../../kernels/elementwise.cl");

/// Conversion to bf16 by an instruction of devices with tensor cores.
const ROUNDED: &str = include_str!("../../../../kernels/rounded.cl");

/// Random numbers of [`DRAWN_LEN`](super::DRAWN_LEN) elements at once.
const RANDOM: &str = include_str!("../../../../kernels/random.cl");

/// A non-temporal store, where the compiler has one.
const STORE_PAST: &str = "#ifdef __has_builtin
#if __has_builtin(__builtin_nontemporal_store)
#define STORE_PAST(value, to) __builtin_nontemporal_store(value, to)
#endif
#endif
#ifndef STORE_PAST
#define STORE_PAST(value, to) *(to) = value
#endif
";

/// The source of the kernel for a device, without the prelude.
pub(crate) fn write(
    device: &ClDevice,
    launch: &Launch,
    operands: &[MapOperand],
    form: Form,
    local: usize,
    rank: usize,
    wide: bool,
) -> String {
    let index = index_type(wide);
    let (params, names): (Vec<_>, Vec<_>) = parameters(launch, operands, rank).into_iter().unzip();
    let mut s = format!(
        "#define INDEX {index}\n#define PARAMETERS {}\n#define ARGUMENTS {}\n",
        params.join(", "),
        names.join(", ")
    );
    let w = &mut s;
    // Not for copies, which keep the bits of NaNs. The device is queried last, because that may build a kernel.
    let rounds = |o: &MapOperand| o.dtype == DType::BF16 && o.access == MemoryAccess::Vector;
    if launch.program.computes()
        && launch.compute == Compute::F32
        && operands[launch.inputs.len()..].iter().any(rounds)
        && device.tensor_cores().local > 0
    {
        w.push_str(ROUNDED);
    }
    // Writing to a String cannot fail.
    if rank > 0 {
        let n = operands.len();
        // One array of strides: Mesa counts only the outermost dimension of an array of arrays in an argument's size.
        let _ = writeln!(w, "typedef struct {{ ulong dims[{rank}]; long strides[{}]; }} layout_t;", n * rank);
        let _ = writeln!(w, "#define STRIDE(k, d) layout.strides[(k) * {rank} + (d)]");
    }
    let drawn = form == Form::Drawn;
    let formula = match drawn {
        true => launch.program.emit_drawn(launch.compute, "compute"),
        false => launch.program.emit(launch.compute, "compute"),
    };
    w.push_str(&formula);
    let are_halves = operands[launch.inputs.len()..].iter().all(|o| matches!(o.dtype, DType::F16 | DType::BF16));
    // A quotient that is rounded to an integer has no last place to lose.
    if are_halves && !["floor", "ceil", "trunc", "rint", "round", "mod"].iter().any(|name| formula.contains(name)) {
        w.push_str(FAST_DIVISION);
    }
    let writer = Writer { launch, operands, streamed: matches!(form, Form::Vector { streamed: true, .. }), drawn };
    let dims: Vec<usize> = (0..rank).collect();
    match form {
        Form::Scalar { per_item } => {
            let _ = writeln!(w, "#define PER_ITEM {per_item}");
            writer.function(w, "element", &dims, 1);
        }
        Form::Drawn => {
            w.push_str(RANDOM);
            let (mut draw, mut numbers) = (String::new(), String::new());
            let [key, stream] = writer.bases();
            for (kind, i) in launch.program.draws() {
                let _ = write!(draw, "{} {kind}{i}[4][DRAWN / 4]; ", draw_type(kind));
                let _ = write!(draw, "draw_{kind}(key{i}{key}, stream{i}{stream}, e / 4, {kind}{i}); ");
                let _ = write!(numbers, ", {kind}{i}[k % 4][k / 4]");
            }
            let _ = writeln!(w, "#define DRAW {draw}\n#define ELEMENT element(e + k, ARGUMENTS{numbers});");
            writer.function(w, "element", &dims, 1);
        }
        Form::Vector { width, streamed } => {
            w.push_str(if streamed { STORE_PAST } else { "" });
            let _ = writeln!(w, "#define VEC {width}");
            let wide = DType::ALL
                .iter()
                .filter(|t| operands.iter().any(|o| o.access == MemoryAccess::Vector && o.dtype == **t));
            wide.for_each(|&t| w.push_str(&Words::of(t, width).define(t, width)));
            writer.function(w, "elements", &dims, width);
            if rank <= 1 {
                let _ = writeln!(w, "#define TAIL");
                writer.function(w, "element", &dims, 1);
            }
        }
        Form::Tiled { side, across, dim, lines } => {
            let inner = rank - 1;
            // Padding puts the columns of a tile into different banks of local memory.
            let pad = if lines.is_some() { 1 } else { (32 / across).max(1) };
            let _ =
                writeln!(w, "#define TILE {side}\n#define ACROSS {across}\n#define PAD {pad}\n#define GROUP {local}");
            let _ = writeln!(w, "#define COLUMNS (INDEX)layout.dims[{inner}]\n#define ROWS (INDEX)layout.dims[{dim}]");
            let batch: Vec<usize> = dims.iter().copied().filter(|&d| d != inner && d != dim).collect();
            let _ = writeln!(w, "#define POSITIONS(b) {}", writer.positions("b", &batch));
            let (mut transposed, mut fetch, mut fetch_line) = (String::new(), String::new(), String::new());
            for (k, o) in operands.iter().enumerate().filter(|(_, o)| o.used && o.access == MemoryAccess::Tile) {
                let space = if local > 1 { "__local " } else { "" };
                let _ = write!(transposed, "{space}{}_t tile{k}[ACROSS][TILE + PAD]; ", o.dtype);
                let line = format!("at{k} + (long)(column + c) * STRIDE({k}, {inner}) + row");
                let _ = write!(fetch, "tile{k}[c][r] = p{k}[{line} + r]; ");
                let _ = write!(fetch_line, "LOAD_LINE(p{k} + {line}, tile{k}[c]); ");
            }
            let _ = writeln!(w, "#define TRANSPOSED {transposed}\n#define FETCH {fetch}");
            if let Some(lines) = lines {
                let streamed = if lines.streamed { "#define STREAMED\n" } else { "" };
                let line = writer.line(side, dim, inner);
                let _ = writeln!(w, "#define LINE {side}\n{streamed}#define FETCH_LINE {fetch_line}");
                let _ = writeln!(w, "#define ELEMENT_LINE {line}");
            }
            let mut element = String::new();
            for (k, _) in operands.iter().enumerate().filter(|(_, o)| o.used && direct(o)) {
                let _ = write!(
                    element,
                    "const ulong i{k} = at{k} + (long)(row + r) * STRIDE({k}, {dim}) \
                     + (long)(column + c) * STRIDE({k}, {inner}); "
                );
            }
            writer.body(
                &mut element,
                1,
                |k| {
                    let o = &operands[k];
                    match o.access {
                        MemoryAccess::Tile => format!("from_{}(tile{k}[c][r])", o.dtype),
                        _ if direct(o) => format!("load_{}(p{k}, i{k})", o.dtype),
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

/// Whether an operand of a tiled kernel is accessed in global memory by row and column.
fn direct(o: &MapOperand) -> bool {
    o.access != MemoryAccess::Tile && o.kind != OperandKind::Scalar
}

/// Declarations and names of the kernel's parameters.
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

/// The words as which `n` contiguous elements are loaded and stored, because compilers split vectors of short elements or spill them.
/// Words are extracted one by one, because some compilers would otherwise combine all into one large integer.
struct Words {
    word: &'static str,
    count: usize,
}

impl Words {
    fn of(dtype: DType, n: usize) -> Words {
        let (word, size) = match dtype.size() * n {
            2 => ("ushort", 2),
            _ if dtype.size() == 8 => ("ulong", 8),
            _ => ("uint", 4),
        };
        Words { word, count: dtype.size() * n / size }
    }

    /// Defines the type `wide_{dtype}`, a union of the words and the elements.
    fn define(&self, dtype: DType, n: usize) -> String {
        format!("typedef union {{ {} word[{}]; {dtype}_t each[{n}]; }} wide_{dtype};\n", self.word, self.count)
    }

    /// The vector type of all words.
    fn all(&self) -> String {
        if self.count > 1 { format!("{}{}", self.word, self.count) } else { self.word.into() }
    }

    /// A statement that loads the words of `to` from the address `from`.
    fn load(&self, to: &str, from: &str) -> String {
        let all = self.all();
        let part = |i: usize| if self.count > 1 { format!("{to}_all.s{i}") } else { format!("{to}_all") };
        let each: String = (0..self.count).map(|i| format!(" {to}.word[{i}] = {};", part(i))).collect();
        format!("const {all} {to}_all = *(const __global {all}*)({from});{each}")
    }

    /// A vector of all words of `from`.
    fn value(&self, from: &str) -> String {
        let each: Vec<String> = (0..self.count).map(|i| format!("{from}.word[{i}]")).collect();
        format!("({})({})", self.all(), each.join(", "))
    }
}

struct Writer<'a> {
    launch: &'a Launch<'a>,
    operands: &'a [MapOperand],
    /// Whether vectors are written with non-temporal stores.
    streamed: bool,
    /// Whether functions are given the random numbers of their element.
    drawn: bool,
}

impl Writer<'_> {
    fn used(&self) -> impl Iterator<Item = (usize, &MapOperand)> {
        self.operands.iter().enumerate().filter(|(_, o)| o.used)
    }

    /// Terms of a graph's replay that are added to each seed's key and stream.
    fn bases(&self) -> [&'static str; 2] {
        if self.launch.base.is_some() { [" + base[base_offset]", " + base[base_offset + 1]"] } else { [""; 2] }
    }

    /// Statements that declare `at{k}`, the offset in operand k of position `e` over `dims`.
    fn positions(&self, e: &str, dims: &[usize]) -> String {
        let mut s = String::new();
        for (k, o) in self.used() {
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
            for (k, _) in self.used().filter(|(_, o)| o.is_strided()) {
                let _ = write!(s, "at{k} += (long)i * STRIDE({k}, {d}); ");
            }
            s.push_str("} ");
        }
        s
    }

    /// A function that computes the results at `width` consecutive positions from e on.
    fn function(&self, w: &mut String, name: &str, dims: &[usize], width: usize) {
        let draws = self.drawn.then(|| self.launch.program.draws()).into_iter().flatten();
        let numbers: String = draws.map(|(kind, i)| format!(", const {} {kind}{i}", draw_type(kind))).collect();
        let _ = writeln!(
            w,
            "static inline void {name}(const INDEX e, PARAMETERS{numbers}) {{\n    {}",
            self.positions("e", dims)
        );
        if width == 1 {
            self.body(w, 1, |k| format!("load_{}(p{k}, at{k})", self.operands[k].dtype), "at");
            w.push_str("}\n");
            return;
        }
        let inputs = self.launch.inputs.len();
        for (k, o) in self.used() {
            let t = o.dtype;
            match o.access {
                MemoryAccess::Vector => {
                    let _ = writeln!(w, "    wide_{t} b{k};");
                    if k < inputs {
                        let load = Words::of(t, width).load(&format!("b{k}"), &format!("p{k} + at{k}"));
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
        self.body(w, width, load, ".each");
        w.push_str("    }\n");
        for (k, o) in self.used().filter(|(k, _)| *k >= inputs) {
            let words = Words::of(o.dtype, width);
            let (to, value) = (format!("(__global {}*)(p{k} + at{k})", words.all()), words.value(&format!("b{k}")));
            let _ = match self.streamed {
                true => writeln!(w, "    STORE_PAST({value}, {to});"),
                false => writeln!(w, "    *{to} = {value};"),
            };
        }
        w.push_str("}\n");
    }

    /// Statements that compute row r of a tile and store it line by line.
    fn line(&self, side: usize, dim: usize, inner: usize) -> String {
        let (mut s, inputs) = (String::new(), self.launch.inputs.len());
        for (k, _) in self.used().filter(|(_, o)| direct(o)) {
            let _ = write!(
                s,
                "const ulong i{k} = at{k} + (long)(row + r) * STRIDE({k}, {dim}) \
                 + (long)column * STRIDE({k}, {inner}); "
            );
        }
        let outputs = || self.used().filter(|(k, _)| *k >= inputs);
        for (k, o) in outputs() {
            let _ = write!(s, "{}_t b{k}[TILE]; ", o.dtype);
        }
        s.push_str("_Pragma(\"unroll\") for (uint k = 0; k < TILE; k++) { ");
        let load = |k: usize| {
            let o = &self.operands[k];
            match o.access {
                MemoryAccess::Tile => format!("from_{}(tile{k}[k][r])", o.dtype),
                _ if direct(o) => format!("load_{}(p{k}, i{k} + (long)k * STRIDE({k}, {inner}))", o.dtype),
                _ => format!("load_{}(p{k}, at{k})", o.dtype),
            }
        };
        self.body(&mut s, side, load, "");
        s.push_str("} ");
        for (k, o) in outputs() {
            let _ = write!(s, "STORE_LINE({}, b{k}, p{k} + i{k}) ", o.dtype.cl_storage());
        }
        s.replace('\n', " ")
    }

    /// Statements that compute one position from the loads that `load` gives, and store the results: at offset `{at}{k}`, or with a
    /// width above 1 in element k of the array `b{k}{at}`.
    fn body(&self, w: &mut String, width: usize, load: impl Fn(usize) -> String, at: &str) {
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
            let [key, stream] = self.bases();
            (0..program.seeds()).for_each(|i| call.push(format!("key{i}{key}, stream{i}{stream}")));
            call.push(match width {
                1 => "e".into(),
                // Written so that compilers see which positions share a block of four random numbers.
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
