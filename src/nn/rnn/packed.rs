//! Sequences of different lengths, packed without padding.

use std::borrow::Borrow;

use crate::storage::Caller;
use crate::{Device, Error, Result, Scalar, Tensor};

/// Sequences of different lengths for [`Rnn`](super::Rnn), [`Lstm`](super::Lstm) and [`Gru`](super::Gru), without padding (PyTorch's
/// `nn.utils.rnn.PackedSequence`). Sequences are sorted by length, the longest first. The data has the first step of all sequences,
/// then the second step of the sequences that have a second step, and so on. See [`pack_padded_sequence`] and [`pack_sequence`].
///
/// ```
/// use claystone::nn::{Lstm, RnnOptions, pack_padded_sequence, pad_packed_sequence};
/// use claystone::{Device, Tensor};
/// let lstm = Lstm::new(3, 5, RnnOptions { batch_first: true, bidirectional: true, ..RnnOptions::default() }, Device::Cpu)?;
/// let x = Tensor::ones(&[2, 7, 3], Device::Cpu)?;
/// let packed = pack_padded_sequence(&x, &[4, 7], true, false)?;
/// assert_eq!((packed.data().shape().dims(), packed.batch_sizes()), (&[11, 3][..], &[2, 2, 2, 2, 1, 1, 1][..]));
/// let (out, (h, _)) = lstm.run_packed(&packed, None)?;
/// let (padded, lengths) = pad_packed_sequence(&out, true, 0.0, None)?;
/// assert_eq!((padded.shape().dims(), lengths), (&[2, 7, 10][..], vec![4, 7]));
/// assert_eq!(h.shape().dims(), [2, 2, 5]); // what each sequence ends with, in the order of x
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
pub struct PackedSequence {
    data: Tensor,
    batch_sizes: Vec<usize>,
    order: Option<SortOrder>,
}

/// The permutation that sorted the sequences by length.
#[derive(Debug)]
struct SortOrder {
    /// For each sequence in sorted order, its index in the order in which sequences were packed.
    sorted: Tensor,
    /// For each sequence in the order in which sequences were packed, its index in sorted order (its rank).
    unsorted: Tensor,
    /// A copy of `unsorted` on the host.
    ranks: Vec<usize>,
}

impl SortOrder {
    fn new(sorted: &[usize], device: Device) -> Result<SortOrder> {
        let mut ranks = vec![0; sorted.len()];
        sorted.iter().enumerate().for_each(|(rank, &sequence)| ranks[sequence] = rank);
        Ok(SortOrder { sorted: index_tensor(sorted, device)?, unsorted: index_tensor(&ranks, device)?, ranks })
    }

    /// Returns the same order with other handles on its tensors, or copies of them.
    fn map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<SortOrder> {
        Ok(SortOrder { sorted: f(&self.sorted)?, unsorted: f(&self.unsorted)?, ranks: self.ranks.clone() })
    }
}

impl PackedSequence {
    /// Creates packed sequences from data that is already packed (PyTorch's `PackedSequence(data, batch_sizes)`). The longest sequence
    /// comes first. `batch_sizes[t]` is the number of sequences that have step t. Fails with [`Error::Invalid`] for sizes that increase or
    /// are 0, or whose sum differs from the number of rows of the data.
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::PackedSequence};
    /// let packed = PackedSequence::new(&Tensor::ones(&[5, 3], Device::Cpu)?, vec![2, 2, 1])?;
    /// assert_eq!(packed.lengths(), [3, 2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn new(data: &Tensor, batch_sizes: Vec<usize>) -> Result<PackedSequence> {
        let rows = data.shape().dims().first().copied();
        let sorted = batch_sizes.is_sorted_by(|a, b| a >= b) && batch_sizes.last().is_some_and(|&size| size > 0);
        // If the sum overflows, it exceeds the number of rows, which is an error anyway.
        let total = batch_sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size));
        invalid!("PackedSequence::new" if !sorted || total.is_none() || total != rows,
            "batch sizes must be above 0, not increase, and add up to the rows of shape {}, not {}",
            data.shape(), format_lengths(&batch_sizes));
        Ok(PackedSequence { data: data.shallow_clone(), batch_sizes, order: None })
    }

    /// Returns the elements of all sequences in packed order, `[sum of lengths, ..]`.
    pub fn data(&self) -> &Tensor {
        &self.data
    }

    /// Returns for each step the number of sequences that have this step.
    pub fn batch_sizes(&self) -> &[usize] {
        &self.batch_sizes
    }

    /// Returns, longest sequence first, the index at which each was packed: i64 on the data's device. `None` if packed in sorted order.
    pub fn sorted_indices(&self) -> Option<&Tensor> {
        self.order.as_ref().map(|order| &order.sorted)
    }

    /// Returns, in the order of packing, each sequence's index in sorted order: i64 on the data's device. `None` if packed in sorted order.
    pub fn unsorted_indices(&self) -> Option<&Tensor> {
        self.order.as_ref().map(|order| &order.unsorted)
    }

    /// Returns the length of each sequence, in the order of packing.
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::pack_padded_sequence};
    /// let x = Tensor::ones(&[7, 3, 2], Device::Cpu)?;
    /// assert_eq!(pack_padded_sequence(&x, &[4, 7, 1], false, false)?.lengths(), [4, 7, 1]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn lengths(&self) -> Vec<usize> {
        let length = |rank: usize| self.batch_sizes.partition_point(|&size| size > rank);
        match &self.order {
            Some(order) => order.ranks.iter().map(|&rank| length(rank)).collect(),
            None => (0..self.batch_sizes[0]).map(length).collect(),
        }
    }

    /// Replaces [`data`](Self::data) by `f(data)`, where `f` is for example an embedding, dropout, or a layer after a recurrent layer.
    /// Fails with the errors of `f`, and with [`Error::Invalid`] if the result of `f` has another number of rows.
    ///
    /// ```
    /// use claystone::nn::{Embedding, Module, pack_padded_sequence};
    /// use claystone::{DType, Device, Tensor};
    /// let words = Tensor::zeros(&[2, 7], (DType::I64, Device::Cpu))?;
    /// let embedding = Embedding::new(100, 8, Device::Cpu)?;
    /// let packed = pack_padded_sequence(&words, &[7, 4], true, true)?.map(|data| embedding.forward(data))?;
    /// assert_eq!(packed.data().shape().dims(), [11, 8]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn map(&self, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<PackedSequence> {
        let data = f(&self.data)?;
        let rows = self.data.shape().dims()[0];
        invalid!("PackedSequence::map" if data.shape().dims().first() != Some(&rows),
            "the result has shape {} instead of {rows} rows, one for each element", data.shape());
        let order = self.order.as_ref().map(|order| order.map(|t| Ok(t.shallow_clone()))).transpose()?;
        Ok(PackedSequence { data, batch_sizes: self.batch_sizes.clone(), order })
    }

    /// Copies the packed sequences to another device. Fails with [`Error::NoDevice`](crate::Error::NoDevice) without that device.
    #[track_caller]
    pub fn to_device(&self, device: Device) -> Result<PackedSequence> {
        let _caller = Caller::enter();
        let order = self.order.as_ref().map(|order| order.map(|t| t.to_device(device))).transpose()?;
        Ok(PackedSequence { data: self.data.to_device(device)?, batch_sizes: self.batch_sizes.clone(), order })
    }

    /// Packs sequences of these lengths. `row(t, s)` is the row of `from` that has step t of sequence s.
    fn pack_rows(
        op: &'static str,
        from: &Tensor,
        lengths: &[usize],
        enforce_sorted: bool,
        row: impl Fn(usize, usize) -> usize,
    ) -> Result<PackedSequence> {
        invalid!(op if let Some(empty) = lengths.iter().position(|&length| length == 0),
            "sequence {empty} is empty: each needs at least one element");
        let is_sorted = lengths.is_sorted_by(|a, b| a >= b);
        invalid!(op if enforce_sorted && !is_sorted,
            "lengths must not increase, but are {}: sort the sequences, or pass enforce_sorted = false",
            format_lengths(lengths));
        let mut sorted: Vec<usize> = (0..lengths.len()).collect();
        sorted.sort_by_key(|&sequence| std::cmp::Reverse(lengths[sequence]));
        let Some(&longest) = sorted.first() else { invalid!(op, "there are no sequences") };
        let size = |step: usize| sorted.partition_point(|&sequence| lengths[sequence] > step);
        let batch_sizes: Vec<usize> = (0..lengths[longest]).map(size).collect();
        let order = (!is_sorted).then(|| SortOrder::new(&sorted, from.device())).transpose()?;
        let rows = enumerate_elements(&batch_sizes).map(|(step, rank)| row(step, sorted[rank])).collect::<Vec<_>>();
        let data = from.index_select(0, &index_tensor(&rows, from.device())?)?;
        Ok(PackedSequence { data, batch_sizes, order })
    }
}

/// Returns an iterator over the elements of packed sequences. Each element is a tuple (step, rank).
fn enumerate_elements(batch_sizes: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    batch_sizes.iter().enumerate().flat_map(|(step, &size)| (0..size).map(move |rank| (step, rank)))
}

/// Creates an index tensor from host row numbers.
pub(super) fn index_tensor(rows: &[usize], device: Device) -> Result<Tensor> {
    Tensor::from_vec(rows.iter().map(|&row| row as i64).collect(), rows.len(), device)
}

/// Formats the first eight numbers of a list.
fn format_lengths(lengths: &[usize]) -> String {
    if lengths.len() <= 8 { format!("{lengths:?}") } else { format!("{:?} and so on", &lengths[..8]) }
}

/// Returns the number of sequences and the number of steps of a padded tensor.
fn padded_dims(op: &'static str, x: &Tensor, batch_first: bool) -> Result<[usize; 2]> {
    match *x.shape().dims() {
        [n, steps, ..] if batch_first => Ok([n, steps]),
        [steps, n, ..] => Ok([n, steps]),
        _ => {
            let shape = if batch_first { "[N, L, ..]" } else { "[L, N, ..]" };
            Err(Error::invalid(op, format!("padded sequences must be {shape}, not of shape {}", x.shape())))
        }
    }
}

/// Returns an error unless each sequence of a padded tensor has one length, and no length exceeds the padded length.
fn check_lengths(op: &'static str, lengths: &[usize], [n, steps]: [usize; 2]) -> Result<()> {
    invalid!(op if lengths.len() != n, "there are {} lengths for {n} sequences", lengths.len());
    invalid!(op if let Some((i, length)) = lengths.iter().enumerate().find(|&(_, &length)| length > steps),
        "sequence {i} has length {length}, but is padded to {steps} steps");
    Ok(())
}

/// Packs the first `lengths[i]` steps of each sequence i of `x` (PyTorch's `pack_padded_sequence`). `x` is `[N, L, ..]` if `batch_first`,
/// else `[L, N, ..]`. If `enforce_sorted`, lengths must not increase; otherwise the sequences are sorted here, and layers return results in
/// the original order. Takes one launch. Differentiable. Fails with [`Error::Invalid`] if there is no sequence, a sequence is empty, the
/// number of lengths is not N, a length exceeds L, or lengths are unsorted with `enforce_sorted`.
///
/// ```
/// use claystone::{Device, Tensor, nn::pack_padded_sequence};
/// let x = Tensor::from_slice(&[1f32, 2.0, 0.0, 3.0, 4.0, 5.0], [2, 3], Device::Cpu)?;
/// let packed = pack_padded_sequence(&x, &[2, 3], true, false)?;
/// assert_eq!(packed.data().to_vec::<f32>()?, [3.0, 1.0, 4.0, 2.0, 5.0]);
/// assert_eq!(packed.sorted_indices().unwrap().to_vec::<i64>()?, [1, 0]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn pack_padded_sequence(
    x: &Tensor,
    lengths: &[usize],
    batch_first: bool,
    enforce_sorted: bool,
) -> Result<PackedSequence> {
    let _caller = Caller::enter();
    let op = "pack_padded_sequence";
    let [n, steps] = padded_dims(op, x, batch_first)?;
    check_lengths(op, lengths, [n, steps])?;
    let rows = [n * steps].iter().chain(&x.shape().dims()[2..]).copied().collect::<Vec<_>>();
    let row = |step, sequence| if batch_first { sequence * steps + step } else { step * n + sequence };
    PackedSequence::pack_rows(op, &x.reshape(&rows[..])?, lengths, enforce_sorted, row)
}

/// Packs sequences `[L, ..]` of different lengths (PyTorch's `pack_sequence`); see [`pack_padded_sequence`]. Fails with [`Error::Invalid`]
/// for no sequence, an empty sequence, and unsorted lengths with `enforce_sorted`, and as [`Tensor::cat`] does.
///
/// ```
/// use claystone::{Device, Tensor, nn::{pack_sequence, unpack_sequence}};
/// let (a, b) = (Tensor::ones(&[2, 3], Device::Cpu)?, Tensor::zeros(&[4, 3], Device::Cpu)?);
/// let packed = pack_sequence(&[&a, &b], false)?;
/// assert_eq!(packed.batch_sizes(), [2, 2, 1, 1]);
/// assert!(unpack_sequence(&packed)?[0].equal(&a)?);
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn pack_sequence<T: Borrow<Tensor>>(sequences: &[T], enforce_sorted: bool) -> Result<PackedSequence> {
    let _caller = Caller::enter();
    let op = "pack_sequence";
    let lengths = sequence_lengths(op, sequences)?;
    let first = lengths.iter().scan(0, |end, &length| Some(std::mem::replace(end, *end + length)));
    let starts: Vec<usize> = first.collect(); // for each sequence, its first row in the concatenation
    PackedSequence::pack_rows(op, &Tensor::cat(sequences, 0)?, &lengths, enforce_sorted, |step, i| starts[i] + step)
}

/// Returns the lengths of sequences, or an error if there are no sequences.
fn sequence_lengths<T: Borrow<Tensor>>(op: &'static str, sequences: &[T]) -> Result<Vec<usize>> {
    invalid!(op if sequences.is_empty(), "there are no sequences");
    let length = |t: &T| match *t.borrow().shape().dims() {
        [length, ..] => Ok(length),
        [] => Err(Error::invalid(op, "a sequence must be [L, ..], not a scalar")),
    };
    sequences.iter().map(length).collect()
}

/// Creates `[n, steps, ..]` if `batch_first`, else `[steps, n, ..]`. It has `rows` at the flat indices `at`, and `padding` elsewhere.
fn scatter_padded(
    rows: &Tensor,
    at: &[usize],
    [n, steps]: [usize; 2],
    batch_first: bool,
    padding: Scalar,
) -> Result<Tensor> {
    let element = &rows.shape().dims()[1..];
    let flat: Vec<usize> = [n * steps].iter().chain(element).copied().collect();
    let outer = if batch_first { [n, steps] } else { [steps, n] };
    let whole: Vec<usize> = outer.iter().chain(element).copied().collect();
    Tensor::full(&flat[..], padding, rows)?.index_copy(0, &index_tensor(at, rows.device())?, rows)?.reshape(&whole[..])
}

/// Pads sequences `[L, ..]` to one tensor, `[N, longest L, ..]` if `batch_first`, else `[longest L, N, ..]`. Shorter sequences are followed
/// by `padding_value` (PyTorch's `pad_sequence`). Takes three launches. Differentiable. Fails with [`Error::Invalid`] if there is no
/// sequence, and as [`Tensor::cat`] does.
///
/// ```
/// use claystone::{Device, Tensor, nn::pad_sequence};
/// let (a, b) = (Tensor::ones(&[1], Device::Cpu)?, Tensor::ones(&[3], Device::Cpu)?);
/// assert_eq!(pad_sequence(&[&a, &b], true, -1)?.to_vec::<f32>()?, [1.0, -1.0, -1.0, 1.0, 1.0, 1.0]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn pad_sequence<T: Borrow<Tensor>>(
    sequences: &[T],
    batch_first: bool,
    padding_value: impl Into<Scalar>,
) -> Result<Tensor> {
    let _caller = Caller::enter();
    let lengths = sequence_lengths("pad_sequence", sequences)?;
    let (n, steps) = (lengths.len(), lengths.iter().copied().max().unwrap_or(0));
    let row = |(i, step)| if batch_first { i * steps + step } else { step * n + i };
    let at = lengths.iter().enumerate().flat_map(|(i, &length)| (0..length).map(move |step| (i, step))).map(row);
    scatter_padded(&Tensor::cat(sequences, 0)?, &at.collect::<Vec<_>>(), [n, steps], batch_first, padding_value.into())
}

/// Pads packed sequences to one tensor, `[N, L, ..]` if `batch_first`, else `[L, N, ..]`, with `padding_value` after shorter sequences
/// (PyTorch's `pad_packed_sequence`). Also returns the lengths. Sequences and lengths are in the order of packing. L is `total_length` if
/// given, else the longest length. Takes two launches. Differentiable. Fails with [`Error::Invalid`] for a total length below the longest
/// length.
///
/// ```
/// use claystone::{Device, Tensor, nn::{pack_padded_sequence, pad_packed_sequence}};
/// let x = Tensor::ones(&[2, 3], Device::Cpu)?;
/// let packed = pack_padded_sequence(&x, &[1, 2], true, false)?;
/// let (padded, lengths) = pad_packed_sequence(&packed, true, 0.0, Some(3))?;
/// assert_eq!((padded.to_vec::<f32>()?, lengths), (vec![1.0, 0.0, 0.0, 1.0, 1.0, 0.0], vec![1, 2]));
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn pad_packed_sequence(
    packed: &PackedSequence,
    batch_first: bool,
    padding_value: impl Into<Scalar>,
    total_length: Option<usize>,
) -> Result<(Tensor, Vec<usize>)> {
    let _caller = Caller::enter();
    let (longest, n) = (packed.batch_sizes.len(), packed.batch_sizes[0]);
    let steps = total_length.unwrap_or(longest);
    invalid!("pad_packed_sequence" if steps < longest,
        "the total length {steps} is below {longest}, the length of the longest sequence");
    let mut sequences: Vec<usize> = (0..n).collect();
    if let Some(order) = &packed.order {
        order.ranks.iter().enumerate().for_each(|(sequence, &rank)| sequences[rank] = sequence);
    }
    let row = |(step, rank): (usize, usize)| match batch_first {
        true => sequences[rank] * steps + step,
        false => step * n + sequences[rank],
    };
    let at: Vec<usize> = enumerate_elements(&packed.batch_sizes).map(row).collect();
    let out = scatter_padded(&packed.data, &at, [n, steps], batch_first, padding_value.into())?;
    Ok((out, packed.lengths()))
}

/// Returns each sequence of a padded tensor as a view without the padding (PyTorch's `unpad_sequence`). Fails with [`Error::Invalid`] if
/// the number of lengths is not the number of sequences, or a length is too large.
///
/// ```
/// use claystone::{Device, Tensor, nn::unpad_sequence};
/// let x = Tensor::ones(&[2, 3], Device::Cpu)?;
/// let sequences = unpad_sequence(&x, &[1, 3], true)?;
/// assert_eq!((sequences[0].numel(), sequences[1].numel()), (1, 3));
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn unpad_sequence(x: &Tensor, lengths: &[usize], batch_first: bool) -> Result<Vec<Tensor>> {
    let _caller = Caller::enter();
    let op = "unpad_sequence";
    check_lengths(op, lengths, padded_dims(op, x, batch_first)?)?;
    let dim = if batch_first { 0 } else { 1 };
    let sequence = |(i, &length): (usize, &usize)| x.select(dim, i as isize)?.narrow(0, 0, length);
    lengths.iter().enumerate().map(sequence).collect()
}

/// Returns packed sequences as tensors `[L, ..]`, in the order of packing (PyTorch's `unpack_sequence`); see [`pack_sequence`].
#[track_caller]
pub fn unpack_sequence(packed: &PackedSequence) -> Result<Vec<Tensor>> {
    let _caller = Caller::enter();
    let (padded, lengths) = pad_packed_sequence(packed, true, 0, None)?;
    unpad_sequence(&padded, &lengths, true)
}
