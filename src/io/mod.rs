//! Files of tensors: NumPy's npy and npz, and safetensors.
//!
//! [`save`] and [`load`] take the format from the file's name, and a [`StateDict`] for what is in it: a model's
//! [`state_dict`](crate::nn::Module::state_dict), whose names are PyTorch's. [`save_checkpoint`] and [`load_checkpoint`] are one
//! call for all that a training run goes on from. Elements go between file and device in pieces, so
//! that no tensor is ever on the heap as a whole, and views are written by their strides. Dtypes are kept: npy has no
//! bf16, and keeps its bits as ml_dtypes does (`<V2`). Elements of a dtype that claystone lacks (i8, u16, f8, complex numbers, text)
//! are read as their bytes: u8 with one more dim, `[.., bytes of an element]`, or `[bytes]` where an element has no whole bytes.
//!
//! An error names the file, the tensor and what is wrong with it. What a file says about itself is believed as far as it has
//! the bytes: reading takes little more memory than the tensors that are really in it, and a file that is damaged takes
//! little more than its own size. An archive that claims far more than its size is refused unless it is read with
//! [`read_npz_limited`], and is then decompressed once to see that it has as much, before its tensors are made.

mod checkpoint;
mod npy;
mod npz;
mod safetensors;
mod state;

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, Read};
use std::path::Path;

use crate::file::NewFile;
use crate::{DType, Device, Error, Excerpt, Result, Shape, Tensor};

pub use self::checkpoint::{Stateful, load_checkpoint, save_checkpoint};
pub use self::npy::{read_npy, write_npy};
pub use self::npz::{read_npz, read_npz_limited, write_npz};
pub use self::safetensors::{SafeTensors, read_safetensors, write_safetensors};
#[doc(hidden)]
pub use self::state::joined;
pub use self::state::{IncompatibleKeys, StateDict};

/// Writes tensors to a file: `.safetensors` or `.npz` by its name. The file is replaced as a whole: it has its old contents
/// until the new ones are on the disk, so that a full disk or a crash leaves the checkpoint before.
///
/// ```
/// use claystone::{Device, Tensor, io, nn::StateDict};
/// # let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("model.safetensors");
/// let state: StateDict = [("weight".to_string(), Tensor::eye(3, Device::Cpu)?.t()?)].into_iter().collect();
/// io::save(&path, &state)?;
/// let loaded = io::load(&path, Device::best())?;
/// assert_eq!(loaded.get("weight").unwrap().to_vec::<f32>()?, Tensor::eye(3, Device::Cpu)?.to_vec::<f32>()?);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] for another extension, and with the file's name for whatever goes wrong with the file.
pub fn save(path: impl AsRef<Path>, tensors: &StateDict) -> Result<()> {
    let path = path.as_ref();
    match extension(path) {
        "safetensors" => write_safetensors(path, tensors),
        "npz" => write_npz(path, tensors),
        _ => Err(fail("save", path, "the name ends in neither .safetensors nor .npz")),
    }
}

/// Reads the tensors of a file, `.safetensors` or `.npz` by its name, to `device`, in the file's order.
///
/// # Errors
/// As [`save`]; an archive that is far larger unpacked ([`read_npz`]). The error for a file of PyTorch's pickle (`.bin`, `.pt`,
/// `.pth`, `.ckpt`) has the line of Python that converts it.
#[track_caller]
pub fn load(path: impl AsRef<Path>, device: Device) -> Result<StateDict> {
    let path = path.as_ref();
    match extension(path) {
        "safetensors" => read_safetensors(path, device),
        "npz" => read_npz(path, device),
        "npy" => Err(fail("load", path, "an .npy file has one tensor without a name: use read_npy()")),
        "bin" | "pt" | "pth" | "ckpt" => Err(fail("load", path, format!("{PICKLE} {}", conversion(path)))),
        _ => Err(fail("load", path, "the name ends in neither .safetensors nor .npz")),
    }
}

const PICKLE: &str =
    "a pickle of PyTorch's, which Python alone can read safely: convert it once, after `pip install safetensors`, with";

/// The shell's line that converts a file of `torch.save` to safetensors.
fn conversion(path: &Path) -> String {
    let (from, to) = (path.display(), path.with_extension("safetensors"));
    format!(
        "python -c 'import torch, safetensors.torch as s; t = torch.load(\"{from}\", \"cpu\", weights_only=True); \
         s.save_file({{k: v.clone().contiguous() for k, v in t.items()}}, \"{}\")'",
        to.display()
    )
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|e| e.to_str()).unwrap_or_default()
}

fn fail(op: &'static str, path: &Path, cause: impl Display) -> Error {
    Error::invalid(op, format!("{}: {cause}", path.display()))
}

/// The error of one tensor in a file.
fn fail_in(op: &'static str, path: &Path, tensor: &str, cause: impl Display) -> Error {
    Error::invalid(op, format!("{}: tensor {}: {cause}", path.display(), Excerpt(tensor)))
}

/// The file, and how many bytes it has: a pipe or a device does not say.
fn open(op: &'static str, path: &Path) -> Result<(File, Option<u64>)> {
    let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
    let (about, file) = opened.map_err(|e| fail(op, path, e))?;
    Ok((file, about.is_file().then_some(about.len())))
}

/// A file that has its name once [`finish`] has been called.
fn create(op: &'static str, path: &Path) -> Result<BufWriter<NewFile>> {
    NewFile::create(path).map(BufWriter::new).map_err(|e| fail(op, path, e))
}

fn finish(op: &'static str, path: &Path, file: BufWriter<NewFile>) -> Result<()> {
    file.into_inner().map_err(|e| e.into_error()).and_then(NewFile::commit).map_err(|e| fail(op, path, e))
}

/// The error of what is wrong inside of a file, before [`located`] says which one.
fn wrong(reason: impl Into<String>) -> Error {
    Error::invalid("", reason)
}

fn unread(e: io::Error) -> Error {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => wrong("the file ends before its elements do"),
        _ => wrong(e.to_string()),
    }
}

/// The error with the file's name, and the tensor's; that of a device as it is.
fn located(e: Error, op: &'static str, path: &Path, tensor: Option<&str>) -> Error {
    match (e, tensor) {
        (Error::Invalid { reason, .. }, Some(tensor)) => fail_in(op, path, tensor, reason),
        (Error::Invalid { reason, .. }, None) => fail(op, path, reason),
        (e, _) => e,
    }
}

/// No tensor in a file has more dims.
const MOST_DIMS: usize = 1000;

/// A file's sizes as a shape whose bytes can be counted.
fn shape_of(sizes: impl ExactSizeIterator<Item = u64>) -> Result<Shape> {
    if sizes.len() > MOST_DIMS {
        return Err(wrong(format!("it has {} dims, and {MOST_DIMS} are the most", sizes.len())));
    }
    let sizes: Option<Shape> = sizes.map(|d| usize::try_from(d).ok()).collect();
    let fits =
        |s: &Shape| s.dims().iter().try_fold(16usize, |n, &d| n.checked_mul(d.max(1))).is_some_and(|n| n < 1 << 62);
    sizes.filter(fits).ok_or_else(|| wrong("its sizes are too large"))
}

/// A tensor of the bytes that `from` gives next, each `swapped` of them in reverse. `available` is how many bytes there are: a
/// stream that is shorter than the shape asks for no memory.
fn read_elements(
    from: &mut dyn Read,
    available: Option<u64>,
    shape: Shape,
    dtype: DType,
    device: Device,
    swapped: usize,
) -> Result<Tensor> {
    let bytes = (shape.numel() * dtype.size()) as u64;
    let Some(available) = available else {
        // A pipe does not say how much it has: what comes is collected, and memory taken for that alone.
        let mut piped = Vec::new();
        from.take(bytes).read_to_end(&mut piped).map_err(unread)?;
        return read_elements(&mut &piped[..], Some(piped.len() as u64), shape, dtype, device, swapped);
    };
    if bytes > available {
        return Err(unread(io::ErrorKind::UnexpectedEof.into()));
    }
    match swapped {
        0 | 1 => Tensor::read_from(from, shape, (dtype, device)),
        size => Tensor::read_from(&mut Swapped { from, size }, shape, (dtype, device)),
    }
}

/// Reverses each `size` bytes, a power of two up to 16. Callers read multiples of that.
struct Swapped<'a> {
    from: &'a mut dyn Read,
    size: usize,
}

impl Read for Swapped<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.from.read_exact(to)?;
        to.chunks_exact_mut(self.size).for_each(<[u8]>::reverse);
        Ok(to.len())
    }
}
