//! The network of the example `rnn`, and its training data.

use claystone::nn::{Embedding, Linear, Lstm, Module, RnnOptions, pack_padded_sequence};
use claystone::tensor::TensorOptions;
use claystone::{DType, Device, Result, Tensor};

/// The number of different symbols, without the marker.
pub const SYMBOLS: i64 = 4;

/// Sequences of symbols `[N, L]`, their lengths (3 to L), and their classes. The class is the symbol after the marker, which is anywhere.
pub struct Batch(pub Tensor, pub Vec<usize>, pub Tensor);

impl Batch {
    pub fn random(n: usize, longest: usize, device: Device) -> Result<Batch> {
        let random = |from: i64, to: usize, count: usize| {
            Tensor::randint(from, to as i64, count, (DType::I64, Device::Cpu))?.to_vec::<i64>()
        };
        let lengths: Vec<usize> = random(3, longest + 1, n)?.into_iter().map(|length| length as usize).collect();
        let (mut symbols, markers) = (random(0, SYMBOLS as usize, n * longest)?, random(0, longest * longest, n)?);
        let mut classes = Vec::with_capacity(n);
        for ((row, length), marker) in symbols.chunks_mut(longest).zip(&lengths).zip(markers) {
            let marker = marker as usize % (length - 1);
            row[marker] = SYMBOLS;
            classes.push(row[marker + 1]);
        }
        let symbols = Tensor::from_slice(&symbols, [n, longest], device)?;
        Ok(Batch(symbols, lengths, Tensor::from_slice(&classes, n, device)?))
    }
}

/// An embedding, a bidirectional LSTM, and a linear layer on the final states of both directions.
pub struct Classifier {
    embedding: Embedding,
    lstm: Lstm,
    fc: Linear,
}

impl Classifier {
    pub fn new(hidden: usize, at: impl Into<TensorOptions>) -> Result<Classifier> {
        let (at, options) = (at.into(), RnnOptions { bidirectional: true, ..RnnOptions::default() });
        let embedding = Embedding::new(SYMBOLS as usize + 1, 16, at)?;
        let (lstm, fc) = (Lstm::new(16, hidden, options, at)?, Linear::new(2 * hidden, SYMBOLS as usize, at)?);
        Ok(Classifier { embedding, lstm, fc })
    }

    /// Returns the logits of the class of each sequence.
    pub fn classify(&self, symbols: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        let packed = pack_padded_sequence(symbols, lengths, true, false)?.map(|data| self.embedding.forward(data))?;
        let (_, (h, _)) = self.lstm.run_packed(&packed, None)?;
        self.fc.forward(&Tensor::cat(&[h.select(0, 0)?, h.select(0, 1)?], 1)?)
    }
}

impl Module for Classifier {
    claystone::parts!(embedding, lstm, fc);

    fn forward(&self, symbols: &Tensor) -> Result<Tensor> {
        self.classify(symbols, &vec![symbols.shape().dims()[1]; symbols.shape().dims()[0]])
    }
}
