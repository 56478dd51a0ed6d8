//! The error type of the crate.
//!
//! Every fallible method returns [`Result`]. A message is one sentence that names the operation, its arguments (shapes,
//! dtypes, devices) and the remedy. After an error, all tensors that the operation does not write to keep their values.

use std::fmt::{self, Display, Write};

use crate::{DType, Device, tensor::Shape};

/// `Result` whose error type is claystone's [`Error`] by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error of an operation: its kind, the operation's name and the arguments that matter.
///
/// ```
/// use claystone::{Device, Error, Tensor};
/// let a = Tensor::zeros(&[2, 3], Device::Cpu)?;
/// let b = Tensor::zeros(&[4], Device::Cpu)?;
/// assert!(matches!(a.add(&b), Err(Error::ShapeMismatch { op: "add", .. })));
/// # Ok::<(), Error>(())
/// ```
/// `{:?}` prints the same sentence as `{}`, because `unwrap` and a `main` that returns an error print `{:?}`.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // fields: `op` is the method's name, and the messages explain the others
pub enum Error {
    /// Two shapes are not compatible in this operation.
    #[error("{op}: shapes {lhs} and {rhs} are not compatible: {hint}")]
    ShapeMismatch { op: &'static str, lhs: Shape, rhs: Shape, hint: &'static str },
    /// A dimension does not exist in a tensor of this rank.
    #[error("{op}: dimension {dim} is out of range: {}", valid_dims(*rank))]
    DimOutOfRange { op: &'static str, dim: isize, rank: usize },
    /// An index does not exist in a dimension of this size.
    #[error("{op}: index {index} is out of range for a dimension of size {size}")]
    IndexOutOfRange { op: &'static str, index: i64, size: usize },
    /// Two operands have different dtypes. Elementwise operations and `cat` promote dtypes; this operation does not.
    #[error("{op}: dtypes {lhs} and {rhs} differ: convert one with .to_dtype()")]
    DTypeMismatch { op: &'static str, lhs: DType, rhs: DType },
    /// The operation is not defined for this dtype.
    #[error("{op}: dtype {dtype} is not supported: it takes {expected}")]
    UnsupportedDType { op: &'static str, dtype: DType, expected: &'static str },
    /// Two operands are on different devices.
    #[error("{op}: tensors are on {lhs} and {rhs}: move one with .to_device()")]
    DeviceMismatch { op: &'static str, lhs: Device, rhs: Device },
    /// The requested device does not exist or cannot be used.
    #[error("{device} is not available: {reason}")]
    NoDevice { device: Device, reason: String },
    /// The device cannot hold the allocation, even after the allocator returned all cached memory.
    #[error("{device} is out of memory: tried to allocate {}; {detail}. {OOM_ADVICE}", requested_bytes(*requested))]
    OutOfMemory { device: Device, requested: usize, detail: String },
    /// An integer was divided by zero.
    #[error("{op}: integer division by zero: divide floats, or mask the zeros first")]
    DivisionByZero { op: &'static str },
    /// An OpenCL call failed.
    #[error("{device}: {call} failed with {code}{detail}")]
    OpenCl { device: Device, call: &'static str, code: &'static str, detail: String },
    /// An OpenCL program did not compile.
    #[error("{device}: kernel {kernel} does not compile:\n{log}")]
    Build { device: Device, kernel: String, log: String },
    /// An in-place operation failed after a part of the work was done, or may have been done. Its output holds a mixture of old
    /// and new values and has to be set again before a retry. After any other device or memory failure except
    /// [`DeviceLost`](Error::DeviceLost) the output is unchanged, and the operation can be retried. Errors that a retry cannot
    /// fix, such as a division by zero in a kernel, are not converted to this variant.
    #[error("{op} was only partly done, so its output has to be set again before a retry: {source}")]
    Partial { op: &'static str, source: Box<Error> },
    /// The device has faulted. This process can run nothing on it any more.
    #[error("{device} is lost after a device fault ({cause}): restart the process to use it again")]
    DeviceLost { device: Device, cause: String },
    /// A gradient cannot be computed, or an in-place change would make one wrong.
    #[error("{op}: {reason}")]
    Autograd { op: &'static str, reason: String },
    /// Another rank of a process group did not take part in a collective operation.
    #[error("{op}: rank {rank} {reason}")]
    Rank { op: &'static str, rank: usize, reason: String },
    /// An argument is invalid; the sentence says which argument and why.
    #[error("{op}: {reason}")]
    Invalid { op: &'static str, reason: String },
}

/// Advice at the end of every out-of-memory error: how to use less memory, and the tool that estimates the need.
const OOM_ADVICE: &str = "Smaller batches, bf16 (autocast, Module::to_dtype) and autograd::checkpoint need less; `claystone \
                         replay --min-capacity` computes how much memory a program needs, from a snapshot with a history \
                         (Device::record_memory_history)";

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl Error {
    /// Creates an [`Error::Invalid`] of the operation `op`, for layers, optimisers and file formats of your own. The middle of a
    /// reason longer than 2,000 bytes is cut out.
    ///
    /// ```
    /// use claystone::Error;
    /// let error = Error::invalid("Highway::new", "the gate needs a bias");
    /// assert_eq!(error.to_string(), "Highway::new: the gate needs a bias");
    /// ```
    pub fn invalid(op: &'static str, reason: impl Into<String>) -> Error {
        Error::Invalid { op, reason: shorten_reason(reason.into()) }
    }

    pub(crate) fn autograd(op: &'static str, reason: impl Into<String>) -> Error {
        Error::Autograd { op, reason: reason.into() }
    }

    /// Replaces the operation's name by the name of the public operation that the user called.
    pub(crate) fn with_op(mut self, name: &'static str) -> Error {
        use Error::*;
        if let ShapeMismatch { op, .. }
        | DimOutOfRange { op, .. }
        | IndexOutOfRange { op, .. }
        | DTypeMismatch { op, .. }
        | UnsupportedDType { op, .. }
        | DeviceMismatch { op, .. }
        | DivisionByZero { op }
        | Partial { op, .. }
        | Autograd { op, .. }
        | Invalid { op, .. } = &mut self
        {
            *op = name;
        }
        self
    }

    /// Converts device and memory errors to [`Error::Partial`], for an in-place operation that has already changed its output.
    /// Other errors, such as invalid arguments, are returned unchanged.
    pub(crate) fn into_partial(self, op: &'static str) -> Error {
        match self {
            source @ (Error::OpenCl { .. } | Error::OutOfMemory { .. } | Error::Build { .. }) => {
                Error::Partial { op, source: Box::new(source) }
            }
            Error::Partial { source, .. } => Error::Partial { op, source },
            other => other,
        }
    }
}

/// Runs `f`, an in-place operation that consists of several steps. `version` returns the version counter of the output
/// ([`Storage::version`](crate::storage::Storage::version)), which grows with every change. If the device or memory fails
/// after the counter has grown, the error is [`Error::Partial`].
///
/// ```
/// use claystone::{Device, Result, Tensor, internal::in_steps};
/// /// Moves running statistics towards those of a batch.
/// fn track(mean: &Tensor, batch: &Tensor) -> Result<()> {
///     in_steps("track", || mean.storage().version(), || {
///         mean.mul_scalar_(0.9)?;
///         mean.add_(&batch.mean(0, false)?.mul_scalar(0.1)?)?;
///         Ok(())
///     })
/// }
/// let mean = Tensor::ones(2, Device::Cpu)?;
/// track(&mean, &Tensor::zeros([4, 2], Device::Cpu)?)?;
/// assert_eq!(mean.to_vec::<f32>()?, [0.9, 0.9]);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// The errors of `f`.
pub fn in_steps<T>(op: &'static str, version: impl Fn() -> u64, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = version();
    f().map_err(|e| if version() != before { e.into_partial(op) } else { e })
}

/// Runs an in-place operation over several items, such as an optimiser's step over parameters: calls `f` for each item and
/// stops at the first error. If the device or memory fails after the first item, the error is [`Error::Partial`].
///
/// ```
/// use claystone::{Device, Tensor, internal::for_each_part};
/// let weights = [Tensor::ones(2, Device::Cpu)?, Tensor::ones(3, Device::Cpu)?];
/// for_each_part("shrink", &weights, |w| w.mul_scalar_(0.5).map(|_| ()))?;
/// assert_eq!(weights[1].to_vec::<f32>()?, [0.5; 3]);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// The errors of `f`.
pub fn for_each_part<T>(
    op: &'static str,
    items: impl IntoIterator<Item = T>,
    mut f: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    items
        .into_iter()
        .enumerate()
        .try_for_each(|(i, item)| f(item).map_err(|e| if i > 0 { e.into_partial(op) } else { e }))
}

/// Text from a file or a user, for error messages: control characters are escaped, and at most 80 characters are printed.
///
/// ```
/// use claystone::internal::Excerpt;
/// assert_eq!(Excerpt("layer\n1").to_string(), "layer\\n1");
/// assert_eq!(Excerpt(&"x".repeat(1000)).to_string().len(), 83);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Excerpt<'a>(
    /// The text.
    pub &'a str,
);

impl Excerpt<'_> {
    /// The maximum number of characters that are printed.
    const MAX_CHARS: usize = 80;
}

impl Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut chars = self.0.chars();
        for c in chars.by_ref().take(Excerpt::MAX_CHARS) {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { f.write_char(c)? }
        }
        if chars.next().is_some() { f.write_str("...") } else { Ok(()) }
    }
}

/// Displays a size with two decimals by default, `19.07 MiB`, and with `{:#}` also exactly, `19.07 MiB (20000000 bytes)`.
#[derive(Clone, Copy)]
pub(crate) struct Size(pub(crate) u64);

impl Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Size(bytes) = *self;
        let unit = bytes.max(1).ilog2() / 10;
        let Some(name) = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].get((unit as usize).wrapping_sub(1)) else {
            return write!(f, "{bytes} bytes");
        };
        write!(f, "{:.*} {name}", f.precision().unwrap_or(2), bytes as f64 / (1u64 << (10 * unit)) as f64)?;
        if f.alternate() { write!(f, " ({bytes} bytes)") } else { Ok(()) }
    }
}

/// Parses a number of bytes: `700`, or a whole number with `KiB`, `MiB` or `GiB`, as `24GiB`.
///
/// ```
/// assert_eq!(claystone::storage::parse_bytes("3 MiB"), Ok(3 << 20));
/// ```
///
/// # Errors
/// What is wrong with the text.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err("write bytes, or a whole number with KiB, MiB or GiB".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| "it does not begin with a number".to_owned())?;
    number.checked_mul(unit).ok_or_else(|| "no device has that much memory".to_owned())
}

/// Reasons longer than this number of bytes are shortened: a parser's error message may quote a whole file.
const MAX_REASON_BYTES: usize = 2000;

/// Leaves out the middle of a reason longer than [`MAX_REASON_BYTES`].
fn shorten_reason(reason: String) -> String {
    if reason.len() <= MAX_REASON_BYTES {
        return reason;
    }
    let boundary = |at: &usize| reason.is_char_boundary(*at);
    let head = (0..MAX_REASON_BYTES / 2).rev().find(boundary).unwrap_or(0);
    let tail = (reason.len() - MAX_REASON_BYTES / 4..reason.len()).find(boundary).unwrap_or(reason.len());
    format!("{} ... ({} bytes left out) ... {}", &reason[..head], tail - head, &reason[tail..])
}

/// Formats a size in bytes; `usize::MAX` means a size that overflowed.
fn requested_bytes(bytes: usize) -> String {
    if bytes == usize::MAX { "more than usize::MAX bytes".into() } else { format!("{:#}", Size(bytes as u64)) }
}

/// Returns the valid range of a dimension argument, as text for error messages.
fn valid_dims(rank: usize) -> String {
    if rank == 0 { "the tensor is a scalar".into() } else { format!("give one in -{rank}..{rank}") }
}

/// With the feature `serde`, serialises a type as its Display text and parses that text back.
macro_rules! serde_as_text {
    ($type:ty) => {
        #[cfg(feature = "serde")]
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        #[cfg(feature = "serde")]
        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(crate) use serde_as_text;

/// Returns an error from the function, made by `Error::$error`, if a condition holds or a pattern matches.
macro_rules! return_error {
    ($error:ident $op:tt if let $pattern:pat = $value:expr, $($message:tt)+) => {
        if let $pattern = $value {
            return_error!($error $op, $($message)+);
        }
    };
    ($error:ident $op:tt if $condition:expr, $($message:tt)+) => {
        if $condition {
            return_error!($error $op, $($message)+);
        }
    };
    ($error:ident $op:tt, $($message:tt)+) => {
        return Err($crate::Error::$error($op, format!($($message)+)))
    };
}

/// `invalid!(op if condition, "message {}", ..)` returns [`Error::Invalid`] from the function if the condition holds;
/// `invalid!(op, "message {}", ..)` always returns it.
macro_rules! invalid {
    ($($arguments:tt)+) => { return_error!(invalid $($arguments)+) };
}

/// Like `invalid!`, for [`Error::Autograd`].
macro_rules! no_gradient {
    ($($arguments:tt)+) => { return_error!(autograd $($arguments)+) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_with_units() {
        assert_eq!(parse_bytes("700"), Ok(700));
        assert_eq!(
            (parse_bytes("3KiB"), parse_bytes("3 MiB"), parse_bytes("2GiB")),
            (Ok(3 << 10), Ok(3 << 20), Ok(2 << 30))
        );
        for bad in ["", "MiB", "-1", "1.5MiB", "1MB", "99999999999999999999", "99999999999GiB"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_print_with_a_unit_and_exactly() {
        for (bytes, want) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1025, "1.00 KiB (1025 bytes)"),
            (1 << 20, "1.00 MiB (1048576 bytes)"),
            (20_000_000, "19.07 MiB (20000000 bytes)"),
            (3 << 30, "3.00 GiB (3221225472 bytes)"),
            (1 << 60, "1.00 EiB (1152921504606846976 bytes)"),
            (u64::MAX, "16.00 EiB (18446744073709551615 bytes)"),
        ] {
            assert_eq!(format!("{:#}", Size(bytes)), want);
        }
        assert_eq!(format!("{:.1} {}", Size(150_119_776_256), Size(150_119_776_256)), "139.8 GiB 139.81 GiB");
    }

    /// A `main` that returns an error prints its Debug text, so this text must be the sentence too.
    #[test]
    fn debug_prints_the_display_text() {
        let error = Error::OutOfMemory { device: Device::OpenCL(0), requested: 20_000_000, detail: "no more".into() };
        let sentence =
            "opencl:0 is out of memory: tried to allocate 19.07 MiB (20000000 bytes); no more. Smaller batches";
        let (debug, display) = (format!("{error:?}"), error.to_string());
        assert!(debug == display && display.starts_with(sentence), "{display}");
        for help in ["bf16", "autograd::checkpoint", "claystone replay --min-capacity", "record_memory_history"] {
            assert!(display.contains(help), "{help}: {display}");
        }
    }

    #[test]
    fn quoted_text_is_short_and_on_one_line() {
        assert_eq!(Excerpt("layer 1").to_string(), "layer 1");
        assert_eq!(Excerpt("a\nb\u{1b}[31m").to_string(), "a\\nb\\u{1b}[31m");
        let quoted = Excerpt(&"é".repeat(1 << 20)).to_string();
        assert_eq!(quoted, format!("{}...", "é".repeat(80)));
        for short in ["", "x", &"é".repeat(1000)] {
            assert_eq!(shorten_reason(short.to_owned()), short);
        }
        let error = Error::invalid("load", format!("the start, {} and the end", "é".repeat(1 << 20))).to_string();
        assert!(
            error.starts_with("load: the start") && error.ends_with("and the end") && error.len() < MAX_REASON_BYTES,
            "{error}"
        );
    }
}
