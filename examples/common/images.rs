//! Images with labels: the digits of this repository, and sets in the IDX format, which is MNIST's.

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use claystone::{DType, Device, Tensor};
use flate2::read::GzDecoder;

/// The digits: an image of 8 x 8 a row, then its label.
const DIGITS: &[u8] = include_bytes!("../data/digits.csv.gz");
pub const HELD_OUT: usize = 360;
/// The split into training and test set does not depend on an example's `--seed`.
const SPLIT_SEED: u64 = 20;

/// Images `[N, 1, rows, columns]` with pixels in 0..1, and labels `[N]`, on the device.
pub struct Set {
    pub images: Tensor,
    pub labels: Tensor,
}

impl Set {
    /// The rows of `order`, in that order: two gather kernels.
    pub fn select(&self, order: &Tensor) -> claystone::Result<Set> {
        Ok(Set { images: self.images.index_select(0, order)?, labels: self.labels.index_select(0, order)? })
    }

    /// The same in random order.
    pub fn shuffled(&self) -> claystone::Result<Set> {
        self.select(&Tensor::randperm(self.len(), self.labels.device())?)
    }

    /// Row `from` and at most `len - 1` after it: views, nothing is copied.
    pub fn batch(&self, from: usize, len: usize) -> claystone::Result<Set> {
        let len = len.min(self.len() - from);
        Ok(Set { images: self.images.narrow(0, from, len)?, labels: self.labels.narrow(0, from, len)? })
    }

    pub fn len(&self) -> usize {
        self.labels.numel()
    }
}

/// The digits, for training and for testing.
pub fn digits(device: Device, dtype: DType) -> Result<(Set, Set), Box<dyn Error>> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).from_reader(GzDecoder::new(DIGITS));
    let (mut pixels, mut labels) = (Vec::<f32>::new(), Vec::<i64>::new());
    for row in reader.deserialize() {
        let row: Vec<u8> = row?;
        let (&label, image) = row.split_last().ok_or("an empty row")?;
        pixels.extend(image.iter().map(|&p| f32::from(p) / 16.0));
        labels.push(i64::from(label));
    }
    let all = Set {
        images: Tensor::from_slice(&pixels, [labels.len(), 1, 8, 8], device)?.to_dtype(dtype)?,
        labels: Tensor::from_slice(&labels, [labels.len()], device)?,
    };
    claystone::manual_seed(SPLIT_SEED);
    let order = Tensor::randperm(all.len(), device)?;
    let train = all.select(&order.narrow(0, HELD_OUT, all.len() - HELD_OUT)?)?;
    Ok((train, all.select(&order.narrow(0, 0, HELD_OUT)?)?))
}

/// The four files of MNIST and its like in a folder, for training and for testing: `train-images-idx3-ubyte`,
/// `t10k-labels-idx1-ubyte` and so on, gzipped (`.gz`) or not.
pub fn idx(folder: &Path, device: Device, dtype: DType) -> Result<(Set, Set), Box<dyn Error>> {
    let set = |name: &str| -> Result<Set, Box<dyn Error>> {
        let (shape, pixels) = idx_file(folder, &format!("{name}-images-idx3-ubyte"))?;
        let (count, labels) = idx_file(folder, &format!("{name}-labels-idx1-ubyte"))?;
        let (&[n, rows, columns], &[m]) = (&shape[..], &count[..]) else {
            return Err(format!("{name}: images have 3 dimensions and labels 1, not {shape:?} and {count:?}").into());
        };
        if n != m {
            return Err(format!("{name}: {n} images and {m} labels").into());
        }
        let images = Tensor::from_vec(pixels, [n, 1, rows, columns], device)?.to_dtype(DType::F32)?;
        let labels = Tensor::from_vec(labels, [m], device)?.to_dtype(DType::I64)?;
        Ok(Set { images: images.div_scalar(255.0)?.to_dtype(dtype)?, labels })
    };
    Ok((set("train")?, set("t10k")?))
}

/// The shape and the bytes of an IDX file: two zeros, the type (8 for bytes), the number of dimensions, each of them in four
/// bytes with the highest first, the elements.
fn idx_file(folder: &Path, name: &str) -> Result<(Vec<usize>, Vec<u8>), Box<dyn Error>> {
    let plain = folder.join(name);
    let packed = folder.join(format!("{name}.gz"));
    let mut bytes = Vec::new();
    if plain.exists() {
        File::open(&plain)?.read_to_end(&mut bytes)?;
    } else {
        let file = File::open(&packed).map_err(|e| format!("{} nor {}: {e}", plain.display(), packed.display()))?;
        GzDecoder::new(file).read_to_end(&mut bytes)?;
    }
    let wrong = || format!("{name} is no IDX file of bytes");
    let [0, 0, 8, rank, rest @ ..] = &bytes[..] else { return Err(wrong().into()) };
    let (sizes, elements) = rest.split_at_checked(4 * usize::from(*rank)).ok_or_else(wrong)?;
    let shape: Vec<usize> = sizes.chunks(4).map(|d| d.iter().fold(0, |n, &b| n << 8 | usize::from(b))).collect();
    if shape.iter().product::<usize>() != elements.len() {
        return Err(format!("{name} has {} bytes for shape {shape:?}", elements.len()).into());
    }
    Ok((shape, elements.to_vec()))
}
