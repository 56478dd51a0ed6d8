//! The one error type of the crate.
//!
//! Every fallible method returns [`Result`]. A message is one sentence that names the operation, what it was given
//! (shapes, dtypes, devices) and what to do about it. After any error every other tensor still holds its values.

use std::fmt::{self, Display, Write};

use crate::{DType, Device, tensor::Shape};

/// `Result` with claystone's [`Error`], unless another is named.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the operation's name and what it was given.
///
/// ```
/// use claystone::{Device, Error, Tensor};
/// let a = Tensor::zeros(&[2, 3], Device::Cpu)?;
/// let b = Tensor::zeros(&[4], Device::Cpu)?;
/// assert!(matches!(a.add(&b), Err(Error::ShapeMismatch { op: "add", .. })));
/// # Ok::<(), Error>(())
/// ```
/// `{:?}` is the sentence as well, as that is what a `main` that returns an error and `unwrap` print.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // of the fields: `op` is the method's name, and each message shows what the others are
pub enum Error {
    /// Two shapes do not go together in this operation.
    #[error("{op}: shapes {lhs} and {rhs} do not go together: {hint}")]
    ShapeMismatch { op: &'static str, lhs: Shape, rhs: Shape, hint: &'static str },
    /// A dimension does not exist in a tensor of this rank.
    #[error("{op}: dimension {dim} is out of range: {}", dims_there_are(*rank))]
    DimOutOfRange { op: &'static str, dim: isize, rank: usize },
    /// An index does not exist in a dimension of this size.
    #[error("{op}: index {index} is out of range for a dimension of size {size}")]
    IndexOutOfRange { op: &'static str, index: i64, size: usize },
    /// Two operands have different dtypes, in an operation that does not promote them (elementwise ones and `cat` do).
    #[error("{op}: dtypes {lhs} and {rhs} differ: convert one with .to_dtype()")]
    DTypeMismatch { op: &'static str, lhs: DType, rhs: DType },
    /// The operation is not defined for this dtype.
    #[error("{op}: dtype {dtype} is not supported: it takes {expected}")]
    UnsupportedDType { op: &'static str, dtype: DType, expected: &'static str },
    /// Two operands live on different devices.
    #[error("{op}: tensors are on {lhs} and {rhs}: bring one over with .to_device()")]
    DeviceMismatch { op: &'static str, lhs: Device, rhs: Device },
    /// The device asked for is not there.
    #[error("{device} is not available: {reason}")]
    NoDevice { device: Device, reason: String },
    /// The device, after giving back everything cached, cannot hold the allocation.
    #[error("{device} is out of memory: tried to allocate {}; {detail}. {NEED_LESS}", requested_bytes(*requested))]
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
    /// An operation in place failed after a part of it was done, or may have been: what it writes to holds neither the old
    /// values nor all of the new ones. Any other failure of a device or of memory but [`DeviceLost`](Error::DeviceLost)
    /// leaves it as it was, so that the operation can be tried again; after this one its contents have to be set anew first.
    /// Errors that trying again cannot mend, such as a division by zero that a kernel found, stay what they are.
    #[error("{op} was done in part, so what it writes to has to be set anew before it is tried again: {source}")]
    Partial { op: &'static str, source: Box<Error> },
    /// The device has faulted; nothing can run on it in this process any more.
    #[error("{device} is lost after a device fault ({cause}): restart the process to use it again")]
    DeviceLost { device: Device, cause: String },
    /// A gradient cannot be computed, or an in-place change would make one wrong.
    #[error("{op}: {reason}")]
    Autograd { op: &'static str, reason: String },
    /// Another rank of a group did not do its part of a collective.
    #[error("{op}: rank {rank} {reason}")]
    Rank { op: &'static str, rank: usize, reason: String },
    /// An argument makes no sense; the sentence says which and why.
    #[error("{op}: {reason}")]
    Invalid { op: &'static str, reason: String },
}

/// Advice of every out-of-memory error: means to need less memory, and the tool that estimates the need.
const NEED_LESS: &str = "Smaller batches, bf16 (autocast, Module::to_dtype) and autograd::checkpoint need less; `claystone \
                         replay --min-capacity` tells how much a program needs of a snapshot with a history \
                         (Device::record_memory_history)";

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl Error {
    /// [`Error::Invalid`] of the operation `op`, for layers, optimisers and file formats of your own. Of a reason longer than
    /// 2,000 bytes the start and the end are kept.
    ///
    /// ```
    /// use claystone::Error;
    /// let error = Error::invalid("Highway::new", "the gate needs a bias");
    /// assert_eq!(error.to_string(), "Highway::new: the gate needs a bias");
    /// ```
    pub fn invalid(op: &'static str, reason: impl Into<String>) -> Error {
        Error::Invalid { op, reason: shortened(reason.into()) }
    }

    /// The same error of another operation: of the one that the user called, where it is made of others.
    pub(crate) fn of(mut self, name: &'static str) -> Error {
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

    /// The error of an operation in place of which a part was done before: [`Error::Partial`] where the device or memory
    /// failed. What the caller did wrong stays what it is.
    pub(crate) fn in_part(self, op: &'static str) -> Error {
        match self {
            source @ (Error::OpenCl { .. } | Error::OutOfMemory { .. } | Error::Build { .. }) => {
                Error::Partial { op, source: Box::new(source) }
            }
            Error::Partial { source, .. } => Error::Partial { op, source },
            other => other,
        }
    }
}

/// Runs `f`, an operation in place of several steps. `version` is that of what it writes to
/// ([`Storage::version`](crate::storage::Storage::version)), which grows with every change: where the device or memory fails
/// after a change, the error is [`Error::Partial`].
///
/// ```
/// use claystone::{Device, Result, Tensor, in_steps};
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
/// Those of `f`.
pub fn in_steps<T>(op: &'static str, version: impl Fn() -> u64, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = version();
    f().map_err(|e| if version() != before { e.in_part(op) } else { e })
}

/// An operation in place that is made of several, such as an optimiser's step: calls `f` for each item up to the first that
/// fails. Where the device or memory fails after the first item, the error is [`Error::Partial`].
///
/// ```
/// use claystone::{Device, Tensor, for_each_part};
/// let weights = [Tensor::ones(2, Device::Cpu)?, Tensor::ones(3, Device::Cpu)?];
/// for_each_part("shrink", &weights, |w| w.mul_scalar_(0.5).map(|_| ()))?;
/// assert_eq!(weights[1].to_vec::<f32>()?, [0.5; 3]);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Those of `f`.
pub fn for_each_part<T>(
    op: &'static str,
    items: impl IntoIterator<Item = T>,
    mut f: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    items.into_iter().enumerate().try_for_each(|(i, item)| f(item).map_err(|e| if i > 0 { e.in_part(op) } else { e }))
}

/// Text of a file or a user as the reasons of [`Error::invalid`] quote it: on one line, and no more than its first 80
/// characters.
///
/// ```
/// use claystone::Excerpt;
/// assert_eq!(Excerpt("layer\n1").to_string(), "layer\\n1");
/// assert_eq!(Excerpt(&"x".repeat(1000)).to_string().len(), 83);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Excerpt<'a>(
    /// The text.
    pub &'a str,
);

impl Excerpt<'_> {
    /// How many characters are quoted.
    const LENGTH: usize = 80;
}

impl Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut chars = self.0.chars();
        for c in chars.by_ref().take(Excerpt::LENGTH) {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { f.write_char(c)? }
        }
        if chars.next().is_some() { f.write_str("...") } else { Ok(()) }
    }
}

/// Bytes as a person reads them, `19.07 MiB`, and as `{:#}` exactly as well, `19.07 MiB (20000000 bytes)`. Two digits follow the
/// point unless the format says otherwise.
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

/// Reasons longer than this are shortened: those of libraries that read a file may quote all of it.
const LONGEST: usize = 2000;

fn shortened(reason: String) -> String {
    if reason.len() <= LONGEST {
        return reason;
    }
    let boundary = |at: &usize| reason.is_char_boundary(*at);
    let head = (0..LONGEST / 2).rev().find(boundary).unwrap_or(0);
    let tail = (reason.len() - LONGEST / 4..reason.len()).find(boundary).unwrap_or(reason.len());
    format!("{} ... ({} bytes left out) ... {}", &reason[..head], tail - head, &reason[tail..])
}

/// Sizes that cannot be counted are asked for as the largest that can.
fn requested_bytes(bytes: usize) -> String {
    if bytes == usize::MAX { "more bytes than can be counted".into() } else { format!("{:#}", Size(bytes as u64)) }
}

/// Which dims a tensor of this rank has.
fn dims_there_are(rank: usize) -> String {
    if rank == 0 { "there is none".into() } else { format!("give one in -{rank}..{rank}") }
}

/// With the feature `serde`, a type is written as the text that Display prints, and read back from it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_for_people_and_exact() {
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

    /// What a `main` that returns an error prints.
    #[test]
    fn debug_is_the_sentence() {
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
    fn what_errors_quote_is_short_and_on_one_line() {
        assert_eq!(Excerpt("layer 1").to_string(), "layer 1");
        assert_eq!(Excerpt("a\nb\u{1b}[31m").to_string(), "a\\nb\\u{1b}[31m");
        let quoted = Excerpt(&"é".repeat(1 << 20)).to_string();
        assert_eq!(quoted, format!("{}...", "é".repeat(80)));
        for short in ["", "x", &"é".repeat(1000)] {
            assert_eq!(shortened(short.to_owned()), short);
        }
        let error = Error::invalid("load", format!("the start, {} and the end", "é".repeat(1 << 20))).to_string();
        assert!(
            error.starts_with("load: the start") && error.ends_with("and the end") && error.len() < LONGEST,
            "{error}"
        );
    }
}
