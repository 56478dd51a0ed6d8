//! Prints tensors like PyTorch (`torch/_tensor_str.py`): the same columns, line breaks and notation.
//!
//! A tensor of more than 1000 elements is summarised by the first and last three indexes of each dimension. Only these elements
//! are read from the device: they form one strided view ([`Layout::edges`](super::Layout::edges)), gathered in one launch.

use std::fmt::{self, Write};

use crate::{DType, Device, Result, Scalar, Tensor};

/// Tensors with more than this number of elements are summarised.
const SUMMARY_THRESHOLD: usize = 1000;
/// The number of indexes shown at each end of a summarised dimension.
const EDGE_ITEMS: usize = 3;
/// The line width in characters.
const LINE_CHARS: usize = 80;
/// The default number of decimals; a format string such as `{:.2}` overrides it.
const DEFAULT_PRECISION: usize = 4;
const PREFIX: &str = "tensor(";

/// Prints the tensor like PyTorch, with claystone's names of dtypes and devices. The dtypes f32, i64 and bool and the CPU are not named.
/// If the elements cannot be read, prints the error instead.
///
/// ```
/// use claystone::{DType, Device, Tensor};
/// let a = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.5], &[2, 2], Device::Cpu)?;
/// assert_eq!(a.to_string(), "tensor([[1.0000, 2.0000],\n        [3.0000, 4.5000]])");
/// let b = Tensor::ones(&[3], (DType::F16, Device::Cpu))?;
/// assert_eq!(format!("{b}"), "tensor([1., 1., 1.], dtype=f16)");
/// # Ok::<(), claystone::Error>(())
/// ```
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let precision = f.precision().unwrap_or(DEFAULT_PRECISION);
        let text = match self.format_elements(precision) {
            Ok(contents) => format!("{PREFIX}{contents}"),
            Err(error) => format!("{PREFIX}<{error}>"),
        };
        // The column includes two characters more than the last line has, as in PyTorch.
        let mut column = text.chars().rev().take_while(|&c| c != '\n').count() + 2;
        f.write_str(&text)?;
        for suffix in self.suffixes() {
            if column + suffix.len() + 2 > LINE_CHARS {
                write!(f, ",\n{:indent$}{suffix}", "", indent = PREFIX.len())?;
                column = PREFIX.len() + suffix.len();
            } else {
                write!(f, ", {suffix}")?;
                column += suffix.len() + 2;
            }
        }
        f.write_char(')')
    }
}

/// Prints the same text as `Display`.
impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Tensor {
    /// Returns the texts that follow the elements, as in PyTorch: the device, the shape of an empty tensor, the dtype and the gradient.
    fn suffixes(&self) -> Vec<String> {
        let mut all = Vec::new();
        if self.device() != Device::default() {
            all.push(format!("device={}", self.device()));
        }
        let empty = self.numel() == 0;
        if empty && self.rank() != 1 {
            let sizes: Vec<String> = self.shape().dims().iter().map(usize::to_string).collect();
            all.push(format!("size=({})", sizes.join(", ")));
        }
        // The values show whether a non-empty tensor is i64 or bool, so the dtype is omitted.
        if !(self.dtype == DType::F32 || !empty && matches!(self.dtype, DType::I64 | DType::Bool)) {
            all.push(format!("dtype={}", self.dtype));
        }
        match self.node() {
            Some(node) if !self.is_leaf() => all.push(format!("grad_fn=<{}>", node.op)),
            Some(_) => all.push("requires_grad=True".into()),
            None => {}
        }
        all
    }

    fn format_elements(&self, precision: usize) -> Result<String> {
        if self.numel() == 0 {
            return Ok("[]".into());
        }
        let summarise = self.numel() > SUMMARY_THRESHOLD;
        let shown = if summarise { self.with_layout(self.layout.edges(EDGE_ITEMS)) } else { self.detach() };
        // This returns an error if an expanded tensor has too many elements to copy.
        let shown = shown.contiguous()?;
        let mut bytes = vec![0; shown.numel() * self.dtype.size()];
        shown.read_bytes(&mut bytes)?;
        let values: Vec<Scalar> =
            bytes.chunks_exact(self.dtype.size()).map(|element| Scalar::decode(self.dtype, element)).collect();
        let format = Format::choose(&values, self.dtype, precision);
        let mut printer =
            Printer { summarise, width: format.width, cells: values.iter().map(|&v| format.format_cell(v)) };
        let mut out = String::new();
        printer.write_block(&mut out, self.shape().dims(), PREFIX.len());
        Ok(out)
    }
}

/// The format of numbers, chosen once for all elements of a tensor.
struct Format {
    notation: Notation,
    precision: usize,
    width: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Notation {
    Bool,
    Integer,
    /// Floats without fractional parts: `3.`
    Integral,
    /// `3.1416`
    Fixed,
    /// `3.1416e+00`
    Scientific,
}

impl Format {
    /// Chooses the notation for these values as PyTorch does, and computes the width of the widest value.
    fn choose(values: &[Scalar], dtype: DType, precision: usize) -> Format {
        let finite = || values.iter().map(|v| v.to_f64()).filter(|x| x.is_finite() && *x != 0.0);
        let notation = match dtype {
            DType::Bool => Notation::Bool,
            _ if !dtype.is_float() => Notation::Integer,
            _ => {
                let (min, max) = finite().fold((f64::INFINITY, 0f64), |(lo, hi), x| (lo.min(x.abs()), hi.max(x.abs())));
                let whole = finite().all(|x| x.fract() == 0.0);
                if max / min > 1000.0 || max > 1e8 || (!whole && min < 1e-4) {
                    Notation::Scientific
                } else if whole {
                    Notation::Integral
                } else {
                    Notation::Fixed
                }
            }
        };
        let mut format = Format { notation, precision, width: 1 };
        let length = |v: &Scalar| {
            let x = v.to_f64();
            // As in PyTorch, zeros and non-finite values do not affect the width; if they are wider than the column, they overflow it.
            if dtype.is_float() && (x == 0.0 || !x.is_finite()) { 0 } else { format.format_cell(*v).len() }
        };
        format.width = values.iter().map(length).max().unwrap_or(0).max(1);
        format
    }

    /// Formats one number, right-aligned to the current width.
    fn format_cell(&self, value: Scalar) -> String {
        let (x, precision) = (value.to_f64(), self.precision);
        let text = match self.notation {
            Notation::Bool => String::from(if x != 0.0 { "True" } else { "False" }),
            Notation::Integer => value.to_i64().to_string(),
            _ if x.is_nan() => "nan".into(),
            Notation::Integral if x.is_finite() => format!("{x:.0}."),
            Notation::Scientific if x.is_finite() => {
                // Rust writes 1e-5 where Python writes 1e-05.
                let text = format!("{x:.precision$e}");
                let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
                let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
                format!("{mantissa}e{sign}{digits:0>2}")
            }
            _ => format!("{x:.precision$}"),
        };
        format!("{text:>width$}", width = self.width)
    }
}

/// Arranges cells, given in row-major order, with brackets, commas and line breaks.
struct Printer<I> {
    summarise: bool,
    width: usize,
    cells: I,
}

impl<I: Iterator<Item = String>> Printer<I> {
    /// Prints a block of shape `dims` whose first bracket is in column `indent`.
    fn write_block(&mut self, out: &mut String, dims: &[usize], indent: usize) {
        let (&size, inner) = match dims {
            [] => return out.extend(self.cells.next()),
            [size, inner @ ..] => (size, inner),
        };
        let gap = self.summarise && size > 2 * EDGE_ITEMS;
        let count = if gap { 2 * EDGE_ITEMS } else { size };
        // Items of the innermost dimension are printed several to a line; outer blocks are separated by one line break per dimension of a
        // block.
        let per_line = if inner.is_empty() { (LINE_CHARS.saturating_sub(indent) / (self.width + 2)).max(1) } else { 1 };
        let breaks = dims.len().saturating_sub(1).max(1);
        let mut item = 0;
        let mut separate = |out: &mut String| {
            if item > 0 && item % per_line == 0 {
                out.push(',');
                out.extend(std::iter::repeat_n('\n', breaks));
                out.extend(std::iter::repeat_n(' ', indent + 1));
            } else if item > 0 {
                out.push_str(", ");
            }
            item += 1;
        };
        out.push('[');
        for i in 0..count {
            if gap && i == EDGE_ITEMS {
                separate(out);
                out.push_str(if inner.is_empty() { " ..." } else { "..." });
            }
            separate(out);
            self.write_block(out, inner, indent + 1);
        }
        out.push(']');
    }
}
