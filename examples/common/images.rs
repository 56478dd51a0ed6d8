//! Labelled images: this repository's digits, data sets in MNIST's IDX format, CIFAR-10, and synthetic images.

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use claystone::data::Dataset;
use claystone::distributed::Group;
use claystone::nn::Module;
use claystone::{DType, Device, Generator, Interpolation, PadMode, Tensor, no_grad, with_generator};
use flate2::read::GzDecoder;

/// The digits, as gzipped CSV. Each row has an image of 8 x 8 pixels and its label.
const DIGITS: &[u8] = include_bytes!("../data/digits.csv.gz");
/// The number of images in the test set.
pub const HELD_OUT: usize = 360;
/// The seed of the split into training and test set. It does not depend on an example's `--seed`.
const SPLIT_SEED: u64 = 20;

/// A set of images `[N, channels, rows, columns]` and their labels `[N]`.
pub struct Set {
    pub images: Tensor,
    pub labels: Tensor,
}

impl Set {
    /// Returns the images and labels with the indices `order`, in that order. Takes two gather kernels.
    pub fn select(&self, order: &Tensor) -> claystone::Result<Set> {
        Ok(Set { images: self.images.index_select(0, order)?, labels: self.labels.index_select(0, order)? })
    }

    /// Returns the images and labels in random order.
    pub fn shuffled(&self) -> claystone::Result<Set> {
        self.select(&Tensor::randperm(self.len(), self.labels.device())?)
    }

    /// Returns up to `len` images and labels, beginning with number `from`, as views.
    pub fn batch(&self, from: usize, len: usize) -> claystone::Result<Set> {
        let len = len.min(self.len() - from);
        Ok(Set { images: self.images.narrow(0, from, len)?, labels: self.labels.narrow(0, from, len)? })
    }

    pub fn to_device(&self, device: Device) -> claystone::Result<Set> {
        Ok(Set { images: self.images.to_device(device)?, labels: self.labels.to_device(device)? })
    }

    pub fn len(&self) -> usize {
        self.labels.numel()
    }
}

/// A set with the usual augmentation for CIFAR-10: half of the images are mirrored, and each image is shifted by up to four pixels.
pub struct Augmented(pub Set);

impl Dataset for Augmented {
    type Item = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize) -> claystone::Result<(Tensor, Tensor)> {
        let image = self.0.images.select(0, index as isize)?;
        let [_, rows, columns] = *image.shape().dims() else { unreachable!("channels, rows, columns") };
        let random = Tensor::randint(0, 9, 3, (DType::I64, Device::Cpu))?.to_vec::<i64>()?;
        let image = if random[2] % 2 == 0 { image.flip(-1)? } else { image };
        let padded = image.pad(&[4, 4, 4, 4], PadMode::Constant(0.into()))?;
        let image = padded.narrow(1, random[0] as usize, rows)?.narrow(2, random[1] as usize, columns)?;
        Ok((image, self.0.labels.select(0, index as isize)?))
    }
}

/// Returns the number of the first image of each of this rank's batches. Ranks take batches in turns, and all take equally many.
pub fn batches(images: usize, batch: usize, group: &Group) -> impl Iterator<Item = usize> + use<> {
    let count = images.div_ceil(batch) / group.size();
    (0..images).step_by(batch).skip(group.rank()).step_by(group.size()).take(count)
}

/// Converts pixel bytes to numbers with a mean of about 0 and a variance of about 1.
pub fn normalised(images: &Tensor, dtype: DType) -> claystone::Result<Tensor> {
    images.to_dtype(dtype)?.sub_scalar(128)?.div_scalar(64)
}

/// Returns the fraction of images whose largest logit is that of the label. Computes 1,000 images at a time. `input` converts images
/// to the input of the network.
pub fn accuracy(
    net: &dyn Module,
    set: &Set,
    input: impl Fn(&Tensor) -> claystone::Result<Tensor>,
) -> claystone::Result<f64> {
    net.eval();
    let mut right = Vec::new();
    for from in (0..set.len()).step_by(1000) {
        let batch = set.batch(from, 1000)?;
        let guess = no_grad(|| net.forward(&input(&batch.images)?)?.argmax(1, false))?;
        right.push(guess.eq(&batch.labels)?.sum((), false)?);
    }
    net.train();
    Ok(Tensor::stack(&right, 0)?.sum((), false)?.item::<i64>()? as f64 / set.len() as f64)
}

/// Loads the digits as a training set and a test set on the device. Pixels are in 0..1, like those of [`idx`].
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
    let order = with_generator(&Generator::new(SPLIT_SEED), || Tensor::randperm(all.len(), device))?;
    let train = all.select(&order.narrow(0, HELD_OUT, all.len() - HELD_OUT)?)?;
    Ok((train, all.select(&order.narrow(0, 0, HELD_OUT)?)?))
}

/// Loads a training set and a test set in MNIST's format. The folder has the files `train-images-idx3-ubyte`,
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

/// Reads the shape and the bytes of an IDX file. The format is: two zeros, the type (8 for bytes), the number of dims, each dim as four
/// big-endian bytes, the elements.
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

/// Loads the training set and the test set of CIFAR-10's binary version: `data_batch_1.bin` to `data_batch_5.bin`, and
/// `test_batch.bin`. Images are bytes `[N, 3, 32, 32]` on the CPU.
pub fn cifar10(folder: &Path) -> Result<(Set, Set), Box<dyn Error>> {
    // An image has one byte for the label, then the pixels.
    const IMAGE_BYTES: usize = 1 + 3 * 32 * 32;
    let set = |names: &[String]| -> Result<Set, Box<dyn Error>> {
        let mut bytes = Vec::new();
        for file in names.iter().map(|name| folder.join(name)) {
            let before = bytes.len();
            bytes.extend(std::fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?);
            if bytes.len() == before || !bytes.len().is_multiple_of(IMAGE_BYTES) {
                let size = bytes.len() - before;
                return Err(format!("{}: {size} bytes are not images of {IMAGE_BYTES} bytes", file.display()).into());
            }
        }
        let n = bytes.len() / IMAGE_BYTES;
        let all = Tensor::from_vec(bytes, [n, IMAGE_BYTES], Device::Cpu)?;
        let images = all.narrow(1, 1, IMAGE_BYTES - 1)?.reshape([n, 3, 32, 32])?;
        Ok(Set { images, labels: all.select(1, 0)?.to_dtype(DType::I64)? })
    };
    let train: Vec<String> = (1..=5).map(|i| format!("data_batch_{i}.bin")).collect();
    Ok((set(&train)?, set(&["test_batch.bin".into()])?))
}

/// Generates images like those of [`cifar10`]. Each of ten classes has a coarse pattern, to which noise is added. The test set has half
/// as many images as the training set.
pub fn patterns(train: usize) -> Result<(Set, Set), Box<dyn Error>> {
    let coarse = Tensor::rand([10, 3, 4, 4], Device::Cpu)?;
    let classes = coarse.interpolate(&[32, 32], Interpolation::Nearest)?;
    let set = |n: usize| -> claystone::Result<Set> {
        let labels = Tensor::randint(0, 10, n, (DType::I64, Device::Cpu))?;
        let noise = Tensor::randn([n, 3, 32, 32], Device::Cpu)?.mul_scalar(0.3)?;
        let images = classes.index_select(0, &labels)?.add(&noise)?.clamp(0.0, 1.0)?;
        Ok(Set { images: images.mul_scalar(255)?.to_dtype(DType::U8)?, labels })
    };
    Ok((set(train)?, set(train.div_ceil(2))?))
}
