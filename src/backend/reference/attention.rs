//! Attention: every weight by its definition, and the gradients from the weights. Keys that a causal mask hides are skipped. A kernel may
//! instead multiply the values of these keys by a weight of 0, which gives NaN if a value is not finite.

use ndarray::ArrayD;

use super::values::{indices, read_floats, write};
use crate::backend::problem::attention::{AttentionBackward, FusedAttention};
use crate::expr::philox::Uniform;
use crate::{DType, Result, Tensor};

/// Computes the scores and the dropout factors of attention.
struct Scores<'a> {
    a: &'a FusedAttention<'a>,
    q: ArrayD<f64>,
    k: ArrayD<f64>,
    mask: Option<ArrayD<f64>>,
}

impl Scores<'_> {
    fn new<'a>(a: &'a FusedAttention<'a>) -> Result<Scores<'a>> {
        let mask = a.mask.map(read_floats).transpose()?;
        Ok(Scores { a, q: read_floats(a.q)?, k: read_floats(a.k)?, mask })
    }

    /// Returns the scores of a row for the keys that are visible to it. `row` is the index of the row's query.
    fn scores(&self, row: &[usize]) -> Vec<f64> {
        let [_, _, keys, width, _] = self.a.sizes();
        let query = row[row.len() - 1];
        let score = |j: usize| {
            let dot: f64 =
                (0..width).map(|c| self.q[&with_column(row, c)[..]] * self.k[&key_index(row, j, c)[..]]).sum();
            let score = dot * self.a.scale;
            let is_bool = self.a.mask.is_some_and(|mask| mask.dtype == DType::Bool);
            match self.mask.as_ref().map(|mask| mask[&with_column(row, j)[..]]) {
                None => score,
                Some(mask) if !is_bool => score + mask,
                Some(0.0) => f64::NEG_INFINITY,
                Some(_) => score,
            }
        };
        (0..if self.a.causal { keys.min(query + 1) } else { keys }).map(score).collect()
    }

    /// Returns the dropout factor of weight j in this row. Rows are numbered over the whole tensor.
    fn dropout_factor(&self, row: usize, j: usize) -> f64 {
        let Some((p, seed)) = self.a.dropout else { return 1.0 };
        let mut uniform = [0f32];
        seed.fill::<Uniform, _>((row * self.a.sizes()[2] + j) as u64, &mut uniform, |u| u);
        if f64::from(uniform[0]) < p { 0.0 } else { 1.0 / (1.0 - p) }
    }

    /// Iterates over the indices of all rows of scores.
    fn rows(&self) -> impl Iterator<Item = Vec<usize>> + use<> {
        let scores = self.a.scores();
        indices(&scores.dims()[..scores.rank() - 1])
    }
}

fn with_column(row: &[usize], column: usize) -> Vec<usize> {
    [row, &[column]].concat()
}

/// Returns the index of an element of key or value j, for a row of scores. Keys and values have one head.
fn key_index(row: &[usize], j: usize, column: usize) -> Vec<usize> {
    [&row[..row.len() - 2], &[0, j, column]].concat()
}

pub(super) fn forward(a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()> {
    let (weights, v) = (Scores::new(a)?, read_floats(a.v)?);
    let (mut results, mut sums) = (Vec::new(), Vec::new());
    for (i, row) in weights.rows().enumerate() {
        let scores = weights.scores(&row);
        let top = scores.iter().copied().filter(|x| !x.is_nan()).fold(f64::NEG_INFINITY, f64::max);
        let base = if top == f64::NEG_INFINITY { 0.0 } else { top };
        let powers: Vec<f64> = scores.iter().map(|x| (x - base).exp()).collect();
        let total: f64 = powers.iter().sum();
        let weigh = |c: usize, (j, p): (usize, &f64)| p * weights.dropout_factor(i, j) * v[&key_index(&row, j, c)[..]];
        for c in 0..a.sizes()[4] {
            let sum: f64 = powers.iter().enumerate().map(|weight| weigh(c, weight)).sum();
            results.push(if total == 0.0 { 0.0 } else { sum / total });
        }
        sums.push(base + total.ln());
    }
    write(out, results)?;
    write(logsumexp, sums)
}

pub(super) fn backward(a: &FusedAttention, of: &AttentionBackward) -> Result<()> {
    let (weights, v, [.., width, value_width]) = (Scores::new(a)?, read_floats(a.v)?, a.sizes());
    let [out, sums, grad] = [of.out, of.logsumexp, of.grad].map(read_floats);
    let (out, sums, grad) = (out?, sums?, grad?);
    let [mut dq, mut dk, mut dv] = [a.q, a.k, a.v].map(|t| ArrayD::<f64>::zeros(t.shape().dims()));
    for (i, row) in weights.rows().enumerate() {
        let sum = sums[&row[..]];
        let dot =
            |f: &dyn Fn(usize) -> f64| (0..value_width).map(|c| grad[&with_column(&row, c)[..]] * f(c)).sum::<f64>();
        let delta = dot(&|c| out[&with_column(&row, c)[..]]);
        for (j, score) in weights.scores(&row).into_iter().enumerate() {
            let p = if sum == f64::NEG_INFINITY { 0.0 } else { (score - sum).exp() };
            let kept = weights.dropout_factor(i, j);
            for c in 0..value_width {
                dv[&key_index(&row, j, c)[..]] += p * kept * grad[&with_column(&row, c)[..]];
            }
            let ds = p * (dot(&|c| v[&key_index(&row, j, c)[..]]) * kept - delta) * a.scale;
            for c in 0..width {
                dq[&with_column(&row, c)[..]] += ds * weights.k[&key_index(&row, j, c)[..]];
                dk[&key_index(&row, j, c)[..]] += ds * weights.q[&with_column(&row, c)[..]];
            }
        }
    }
    of.results.into_iter().zip([dq, dk, dv]).try_for_each(|(t, values)| write(t, values))
}
