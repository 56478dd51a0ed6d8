//! Files of tensors: NumPy's npy and npz, safetensors, and [`gguf`].
//!
//! [`save`] and [`load`] choose the format by the file's extension. The contents are a [`StateDict`], such as a model's
//! [`state_dict`](crate::nn::Module::state_dict), which has PyTorch's names. [`save_checkpoint`] and [`load_checkpoint`] save
//! and load the complete state of a training run. Elements are transferred between file and device in pieces, so that host memory
//! never holds a whole tensor. Views are written by their strides. Dtypes are kept. npy has no bf16: its bits are stored as `<V2`, as
//! by ml_dtypes. Elements of a dtype that claystone lacks (u16, f8, complex numbers, text) are read as bytes: a u8 tensor
//! with one more dim, `[.., bytes of an element]`, or `[bytes]` if an element is not a whole number of bytes.
//!
//! An error names the file, the tensor and the fault. A size in a file is not trusted beyond the bytes that the file has: reading
//! takes little more memory than the tensors in the file, and a damaged file takes little more than its own size. An archive
//! that claims far more than its size is refused by default. [`read_npz_limited`] reads such an archive; it first decompresses the
//! archive once to check the sizes, before it allocates tensors.

mod checkpoint;
pub mod gguf;
mod npy;
mod npz;
mod safetensors;
pub(crate) mod state;

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, Read};
use std::path::Path;

use crate::file::NewFile;
use crate::internal::Excerpt;
use crate::{DType, Device, Error, Result, Shape, Tensor};

pub use self::checkpoint::{Stateful, load_checkpoint, save_checkpoint};
pub use self::npy::{read_npy, write_npy};
pub use self::npz::{read_npz, read_npz_limited, write_npz};
pub use self::safetensors::{SafeTensors, read_safetensors, write_safetensors};
pub use self::state::{IncompatibleKeys, StateDict};

/// Writes tensors to a file, `.safetensors` or `.npz` by its extension. The file is replaced atomically: the old contents stay until the
/// new contents are on the disk, so the previous checkpoint survives a full disk or a crash. Fails with [`Error::Invalid`] for another
/// extension, and for every failure of the file; the message then has the file's name.
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
pub fn save(path: impl AsRef<Path>, tensors: &StateDict) -> Result<()> {
    let path = path.as_ref();
    match extension(path) {
        "safetensors" => write_safetensors(path, tensors),
        "npz" => write_npz(path, tensors),
        _ => Err(file_error("save", path, "the name ends in neither .safetensors nor .npz")),
    }
}

/// Reads the tensors of a file, `.safetensors` or `.npz` by its extension, to `device`. They are in the order of the file.
///
/// # Errors
/// Errors of [`save`]. [`Error::Invalid`] for an archive that unpacks to far more than its size ([`read_npz`]), and for a pickle file
/// of PyTorch (`.bin`, `.pt`, `.pth`, `.ckpt`); its message has the line of Python that converts the file.
#[track_caller]
pub fn load(path: impl AsRef<Path>, device: Device) -> Result<StateDict> {
    let path = path.as_ref();
    match extension(path) {
        "safetensors" => read_safetensors(path, device),
        "npz" => read_npz(path, device),
        "npy" => Err(file_error("load", path, "an .npy file has one tensor without a name: use read_npy()")),
        "bin" | "pt" | "pth" | "ckpt" => {
            Err(file_error("load", path, format!("{PICKLE_ADVICE} {}", conversion_command(path))))
        }
        _ => Err(file_error("load", path, "the name ends in neither .safetensors nor .npz")),
    }
}

/// The error message for pickle files. The command that converts the file follows.
const PICKLE_ADVICE: &str = "a pickle file of PyTorch, which only Python can read safely: convert it once, after `pip install safetensors`, with";

/// Returns the shell command that converts a file written by `torch.save` to safetensors.
fn conversion_command(path: &Path) -> String {
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

pub(crate) fn file_error(op: &'static str, path: &Path, cause: impl Display) -> Error {
    Error::invalid(op, format!("{}: {cause}", path.display()))
}

fn tensor_error(op: &'static str, path: &Path, tensor: &str, cause: impl Display) -> Error {
    Error::invalid(op, format!("{}: tensor {}: {cause}", path.display(), Excerpt(tensor)))
}

/// Opens a file. Also returns its size if it is a regular file; the size of a pipe or a device is unknown.
fn open(op: &'static str, path: &Path) -> Result<(File, Option<u64>)> {
    let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
    let (about, file) = opened.map_err(|e| file_error(op, path, e))?;
    Ok((file, about.is_file().then_some(about.len())))
}

/// Creates a temporary file. [`finish`] gives it its final name.
fn create(op: &'static str, path: &Path) -> Result<BufWriter<NewFile>> {
    NewFile::create(path).map(BufWriter::new).map_err(|e| file_error(op, path, e))
}

fn finish(op: &'static str, path: &Path, file: BufWriter<NewFile>) -> Result<()> {
    file.into_inner().map_err(|e| e.into_error()).and_then(NewFile::commit).map_err(|e| file_error(op, path, e))
}

/// Returns an error about the contents of a file. [`with_location`] adds the file's name.
fn content_error(reason: impl Into<String>) -> Error {
    Error::invalid("", reason)
}

fn read_error(e: io::Error) -> Error {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => content_error("the file ends before its elements do"),
        _ => content_error(e.to_string()),
    }
}

/// Adds the names of the file and the tensor to an error about contents. Returns other errors, such as device errors, unchanged.
fn with_location(e: Error, op: &'static str, path: &Path, tensor: Option<&str>) -> Error {
    match (e, tensor) {
        (Error::Invalid { reason, .. }, Some(tensor)) => tensor_error(op, path, tensor, reason),
        (Error::Invalid { reason, .. }, None) => file_error(op, path, reason),
        (e, _) => e,
    }
}

/// The maximum number of dims of a tensor in a file.
const MAX_DIMS: usize = 1000;

/// Converts sizes from a file to a shape. Returns an error if the shape's number of bytes overflows.
fn checked_shape(sizes: impl ExactSizeIterator<Item = u64>) -> Result<Shape> {
    if sizes.len() > MAX_DIMS {
        return Err(content_error(format!("it has {} dims, more than the maximum of {MAX_DIMS}", sizes.len())));
    }
    let sizes: Option<Shape> = sizes.map(|d| usize::try_from(d).ok()).collect();
    let fits =
        |s: &Shape| s.dims().iter().try_fold(16usize, |n, &d| n.checked_mul(d.max(1))).is_some_and(|n| n < 1 << 62);
    sizes.filter(fits).ok_or_else(|| content_error("its sizes are too large"))
}

/// Creates a tensor from the next bytes of `from`, and reverses each group of `swap_unit` bytes. `available` is the number of bytes in
/// the file, if known: if the shape needs more, the function fails before it allocates memory.
fn read_elements(
    from: &mut dyn Read,
    available: Option<u64>,
    shape: Shape,
    dtype: DType,
    device: Device,
    swap_unit: usize,
) -> Result<Tensor> {
    let bytes = (shape.numel() * dtype.size()) as u64;
    let Some(available) = available else {
        // The size of a pipe is unknown. Its bytes are collected first, so that memory is allocated only for bytes that have arrived.
        let mut piped = Vec::new();
        from.take(bytes).read_to_end(&mut piped).map_err(read_error)?;
        return read_elements(&mut &piped[..], Some(piped.len() as u64), shape, dtype, device, swap_unit);
    };
    if bytes > available {
        return Err(read_error(io::ErrorKind::UnexpectedEof.into()));
    }
    match swap_unit {
        0 | 1 => Tensor::read_from(from, shape, (dtype, device)),
        size => Tensor::read_from(&mut ByteSwapper { from, size }, shape, (dtype, device)),
    }
}

/// A reader that reverses each group of `size` bytes (a power of two up to 16). Callers must read multiples of `size` bytes.
struct ByteSwapper<'a> {
    from: &'a mut dyn Read,
    size: usize,
}

impl Read for ByteSwapper<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.from.read_exact(to)?;
        to.chunks_exact_mut(self.size).for_each(<[u8]>::reverse);
        Ok(to.len())
    }
}
