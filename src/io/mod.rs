//! Files of tensors: NumPy's npy and npz, and safetensors.
//!
//! [`save`] and [`load`] take the format from the file's name, and a [`StateDict`] for what is in it: a model's
//! [`state_dict`](crate::nn::Module::state_dict), whose names are PyTorch's. Elements go between file and device in pieces, so
//! that no tensor is ever on the heap as a whole, and views are written by their strides. Dtypes are kept: npy has no
//! bf16, and keeps its bits as ml_dtypes does (`<V2`).
//!
//! An error names the file, the tensor and what is wrong with it. What a file says about itself is believed as far as it has
//! the bytes: reading takes little more memory than the tensors that are really in it, and a file that is damaged takes
//! little more than its own size. An archive that claims far more than its size is refused unless it is read with
//! [`read_npz_limited`], and is then decompressed once to see that it has as much, before its tensors are made.

mod npy;
mod npz;
mod safetensors;
mod state;

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use crate::error::Excerpt;
use crate::file::NewFile;
use crate::storage::Storage;
use crate::tensor::Layout;
use crate::{DType, Device, Error, Result, Shape, Tensor};

pub use self::npy::{read_npy, write_npy};
pub use self::npz::{read_npz, read_npz_limited, write_npz};
pub use self::safetensors::{SafeTensors, read_safetensors, write_safetensors};
pub use self::state::{IncompatibleKeys, StateDict};

/// Elements pass through a buffer of this size.
const PIECE: usize = 4 << 20;

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
/// As [`save`]; a dtype that claystone does not have; an archive that is far larger unpacked ([`read_npz`]).
pub fn load(path: impl AsRef<Path>, device: Device) -> Result<StateDict> {
    let path = path.as_ref();
    match extension(path) {
        "safetensors" => read_safetensors(path, device),
        "npz" => read_npz(path, device),
        "npy" => Err(fail("load", path, "an .npy file has one tensor without a name: use read_npy()")),
        _ => Err(fail("load", path, "the name ends in neither .safetensors nor .npz")),
    }
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

/// Why a tensor was not read or written: the file, or the device.
enum Cause {
    File(String),
    Device(Error),
}

impl From<io::Error> for Cause {
    fn from(e: io::Error) -> Cause {
        Cause::File(match e.kind() {
            io::ErrorKind::UnexpectedEof => "the file ends before its elements do".into(),
            _ => e.to_string(),
        })
    }
}

impl From<Error> for Cause {
    fn from(e: Error) -> Cause {
        Cause::Device(e)
    }
}

impl Cause {
    fn of(self, op: &'static str, path: &Path, tensor: Option<&str>) -> Error {
        match (self, tensor) {
            (Cause::Device(e), _) => e,
            (Cause::File(cause), Some(tensor)) => fail_in(op, path, tensor, cause),
            (Cause::File(cause), None) => fail(op, path, cause),
        }
    }
}

/// No tensor in a file has more dims.
const MOST_DIMS: usize = 1000;

/// A file's sizes as a shape whose bytes can be counted.
fn shape_of(sizes: impl ExactSizeIterator<Item = u64>) -> Result<Shape, Cause> {
    if sizes.len() > MOST_DIMS {
        return Err(Cause::File(format!("it has {} dims, and {MOST_DIMS} are the most", sizes.len())));
    }
    let sizes: Option<Shape> = sizes.map(|d| usize::try_from(d).ok()).collect();
    let fits =
        |s: &Shape| s.dims().iter().try_fold(16usize, |n, &d| n.checked_mul(d.max(1))).is_some_and(|n| n < 1 << 62);
    sizes.filter(fits).ok_or_else(|| Cause::File("its sizes are too large".into()))
}

/// A tensor of the bytes that `from` gives next, turned around in each element where `swapped`. `there` is how many bytes
/// it has: what is shorter than its shape asks for no memory.
fn read_elements(
    from: &mut dyn Read,
    there: Option<u64>,
    shape: Shape,
    dtype: DType,
    device: Device,
    swapped: bool,
) -> Result<Tensor, Cause> {
    let bytes = shape.numel() * dtype.size();
    let Some(there) = there else {
        // A pipe does not say how much it has: what comes is collected, and memory taken for that alone.
        let mut piped = Vec::new();
        from.take(bytes as u64).read_to_end(&mut piped)?;
        return read_elements(&mut &piped[..], Some(piped.len() as u64), shape, dtype, device, swapped);
    };
    if bytes as u64 > there {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    let mut piece = vec![0u8; bytes.min(PIECE)];
    // Read first: a file that cannot be read asks for no memory of the device.
    let first = piece.len();
    from.read_exact(&mut piece)?;
    let storage = Storage::alloc(device, bytes)?;
    let mut at = 0;
    while at < bytes {
        let part = if at == 0 { &mut piece[..first] } else { &mut piece[..PIECE.min(bytes - at)] };
        if at > 0 {
            from.read_exact(part)?;
        }
        if swapped {
            part.chunks_exact_mut(dtype.size()).for_each(<[u8]>::reverse);
        }
        write_piece(&storage, at, part, dtype)?;
        at += part.len();
    }
    Ok(Tensor { storage, layout: Layout::contiguous(shape), dtype, node: None })
}

/// Bytes of elements into a storage, unless they are none of this dtype.
fn write_piece(storage: &Storage, at: usize, bytes: &[u8], dtype: DType) -> Result<(), Cause> {
    if dtype == DType::Bool
        && let Some(byte) = bytes.iter().find(|b| **b > 1)
    {
        return Err(Cause::File(format!("a bool is neither 0 nor 1 but {byte}")));
    }
    Ok(storage.write(at, bytes)?)
}

/// Calls `to` with the tensor's bytes, piece by piece, in row-major order.
fn write_elements(tensor: &Tensor, to: &mut dyn Write) -> Result<(), Cause> {
    let source = tensor.detach().contiguous()?;
    let (start, bytes) = (source.layout.offset * source.dtype.size(), source.numel() * source.dtype.size());
    let mut piece = vec![0u8; bytes.min(PIECE)];
    for at in (0..bytes).step_by(PIECE) {
        let part = &mut piece[..PIECE.min(bytes - at)];
        source.storage.read(start + at, part)?;
        to.write_all(part)?;
    }
    Ok(())
}
