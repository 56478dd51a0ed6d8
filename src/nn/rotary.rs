//! Rotary position embeddings.

use std::f64::consts::TAU;

use crate::storage::Caller;
use crate::{DType, Device, Error, Result, Tensor, is_grad_enabled};

/// The elements of a head that are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RotaryPairs {
    /// Elements `2i` and `2i + 1`, as in the files of Llama that llama.cpp reads.
    Adjacent,
    /// Elements `i` and `i + dims / 2`, as in Hugging Face's models and GPT-NeoX.
    Halves,
}

/// How the frequencies of a model are changed for a context longer than the one that the model was trained for.
#[derive(Debug, Clone, PartialEq)]
pub enum RotaryScaling {
    /// The frequencies are `base^(-2i / dims)`.
    None,
    /// All frequencies are divided by `factor`.
    Linear {
        /// The factor, above 0.
        factor: f64,
    },
    /// Frequencies with more than `high` turns in the original context stay, those with fewer than `low` turns are divided by `factor`, and
    /// those between are interpolated (Llama 3.1).
    Llama3 {
        /// The divisor of low frequencies: 8 in Llama 3.1.
        factor: f64,
        /// The number of turns of the lowest interpolated frequency: 1 in Llama 3.1.
        low: f64,
        /// The number of turns of the highest interpolated frequency: 4 in Llama 3.1.
        high: f64,
        /// The original length of the context: 8192 in Llama 3.1.
        original: usize,
    },
    /// Frequencies change as for `Llama3`, but linearly in their index, and sines and cosines are multiplied (YaRN).
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// The original length of the context.
        original: usize,
        /// The number of turns of the highest interpolated frequency: usually 32.
        beta_fast: f64,
        /// The number of turns of the lowest interpolated frequency: usually 1.
        beta_slow: f64,
        /// The share of the unchanged frequencies in the mix: usually 1. With 0, all frequencies are divided.
        ext: f64,
        /// The factor of sines and cosines besides `1 + 0.1 ln(factor)`: usually 1.
        attn: f64,
    },
    /// Each frequency is divided by a factor of its own, as given by the tensor `rope_freqs.weight` of GGUF files.
    Factors(Vec<f32>),
}

options! {
    /// The options of [`Rotary::new`].
    #[derive(Debug, Clone, PartialEq)]
    pub struct RotaryOptions {
        /// The base of the frequencies.
        pub base: f64 = 10_000.0,
        /// The elements that are rotated together.
        pub pairs: RotaryPairs = RotaryPairs::Halves,
        /// The change of the frequencies for long contexts.
        pub scaling: RotaryScaling = RotaryScaling::None,
    }
}

/// Rotary position embeddings (RoPE): rotates pairs of elements of queries and keys by angles proportional to their positions, so that
/// their products depend on the distance of the positions.
///
/// ```
/// use claystone::{Device, Tensor, nn::{Rotary, RotaryOptions}};
/// let rotary = Rotary::new(64, RotaryOptions::default(), Device::Cpu)?;
/// let positions = Tensor::from_slice(&[0i64, 1, 2], 3, Device::Cpu)?;
/// let angles = rotary.angles(&positions)?; // once for all layers
/// let q = Tensor::randn([2, 3, 9, 64], Device::Cpu)?; // [batch, len, heads, width]
/// let rotated = rotary.apply(&q, &angles)?;
/// assert_eq!(rotated.i((0, 0))?.to_vec::<f32>()?, q.i((0, 0))?.to_vec::<f32>()?); // position 0
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
pub struct Rotary {
    /// The angle of one position, of each element: negative for the first element of a pair.
    frequencies: Tensor,
    pairs: RotaryPairs,
    amplitude: f64,
}

/// Cosines and signed sines of angles, `[.., len, dims]`, in f32. See [`Rotary::angles`].
#[derive(Debug)]
pub struct Angles {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// Creates the embedding of the first `dims` elements of each head. Fails with [`Error::Invalid`] if `dims` is odd or 0, and for a
    /// number of [factors](RotaryScaling::Factors) other than `dims / 2`.
    #[track_caller]
    pub fn new(dims: usize, options: RotaryOptions, device: Device) -> Result<Rotary> {
        let _caller = Caller::enter();
        let fail = |reason: String| Err(Error::invalid("Rotary::new", reason));
        if dims == 0 || !dims.is_multiple_of(2) {
            return fail(format!("{dims} elements are not pairs"));
        }
        if let RotaryScaling::Factors(factors) = &options.scaling
            && factors.len() != dims / 2
        {
            return fail(format!("{} factors for {} frequencies", factors.len(), dims / 2));
        }
        let (frequencies, amplitude) = frequencies(dims, options.base, &options.scaling);
        let signed: Vec<f32> = match options.pairs {
            RotaryPairs::Adjacent => frequencies.into_iter().flat_map(|f| [-f as f32, f as f32]).collect(),
            RotaryPairs::Halves => {
                [-1.0, 1.0].iter().flat_map(|s| frequencies.iter().map(move |f| (s * f) as f32)).collect()
            }
        };
        Ok(Rotary { frequencies: Tensor::from_slice(&signed, dims, device)?, pairs: options.pairs, amplitude })
    }

    /// Computes the angles of integer positions, `[.., len]`, in one launch. Angles are products in f32: the angle of position 100,000
    /// has an error of up to 0.012.
    #[track_caller]
    pub fn angles(&self, positions: &Tensor) -> Result<Angles> {
        let _caller = Caller::enter();
        let shape: Vec<usize> = positions.shape().dims().iter().copied().chain([self.frequencies.numel()]).collect();
        let empty = || Tensor::empty(&shape[..], (DType::F32, positions.device()));
        let angles = Angles { cos: empty()?, sin: empty()? };
        let (inputs, scalars) = ([&positions.unsqueeze(-1)?, &self.frequencies], [self.amplitude.into()]);
        Tensor::map_into(&inputs, &scalars, &[&angles.cos, &angles.sin], |e, s| {
            let angle = &e[0] * &e[1];
            vec![&s[0] * angle.cos(), &s[0] * angle.sin()]
        })?;
        Ok(angles)
    }

    /// Rotates heads, `[.., len, heads, width]`, by the angles of their positions. Elements from `dims` on are copied. One launch if
    /// `width` is `dims`. Differentiable. The result has the dtype of `x`; angles are f32. Fails with [`Error::Invalid`] for heads with fewer
    /// than `dims` elements.
    #[track_caller]
    pub fn apply(&self, x: &Tensor, angles: &Angles) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.rotate(x, angles, 1.0)
    }

    /// Rotates back: the inverse of [`apply`](Self::apply), up to the factor of [YaRN](RotaryScaling::Yarn).
    #[track_caller]
    pub fn inverse(&self, x: &Tensor, angles: &Angles) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.rotate(x, angles, -1.0)
    }

    fn rotate(&self, x: &Tensor, angles: &Angles, sign: f64) -> Result<Tensor> {
        let (dims, width) = (self.frequencies.numel(), x.shape().dims().last().copied().unwrap_or(0));
        if x.rank() < 2 || width < dims {
            let reason = format!("heads of shape {} have fewer than {dims} elements", x.shape());
            return Err(Error::invalid("Rotary::apply", reason));
        }
        if width > dims {
            let rotated = self.rotate(&x.narrow(-1, 0, dims)?, angles, sign)?;
            return Tensor::cat(&[&rotated, &x.narrow(-1, dims, width - dims)?], -1);
        }
        let (sizes, pair_dim) = match self.pairs {
            RotaryPairs::Adjacent => ([dims / 2, 2], -1),
            RotaryPairs::Halves => ([2, dims / 2], -2),
        };
        let dtype = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let split = |t: &Tensor| t.unsqueeze(-2)?.to_dtype(dtype)?.unflatten(-1, sizes);
        let (cos, sin, heads) = (split(&angles.cos)?, split(&angles.sin)?, x.unflatten(-1, sizes)?);
        let is_tracked = is_grad_enabled() && x.requires_grad();
        let rotated = if x.dtype() == dtype || is_tracked {
            let heads = heads.to_dtype(dtype)?;
            let inputs = [&heads, &heads.flip(pair_dim)?, &cos, &sin];
            Tensor::map(&inputs, |e| &e[0] * &e[2] + sign * (&e[1] * &e[3]))?.to_dtype(x.dtype())?
        } else {
            let rotated = Tensor::empty(heads.shape().dims(), (x.dtype(), x.device()))?;
            let inputs = [&heads, &heads.flip(pair_dim)?, &cos, &sin];
            Tensor::map_into(&inputs, &[], &[&rotated], |e, _| vec![&e[0] * &e[2] + sign * (&e[1] * &e[3])])?;
            rotated
        };
        rotated.flatten(-2, -1)
    }
}

/// Returns the frequencies, and the factor of sines and cosines.
fn frequencies(dims: usize, base: f64, scaling: &RotaryScaling) -> (Vec<f64>, f64) {
    let (mut frequencies, n): (Vec<f64>, _) =
        ((0..dims / 2).map(|i| base.powf(-2.0 * i as f64 / dims as f64)).collect(), dims as f64);
    let mut amplitude = 1.0;
    match *scaling {
        RotaryScaling::None => {}
        RotaryScaling::Linear { factor } => frequencies.iter_mut().for_each(|f| *f /= factor),
        RotaryScaling::Factors(ref factors) => {
            frequencies.iter_mut().zip(factors).for_each(|(f, &by)| *f /= f64::from(by))
        }
        RotaryScaling::Llama3 { factor, low, high, original } => {
            for f in &mut frequencies {
                let turns = original as f64 * *f / TAU;
                let unchanged = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                *f *= unchanged + (1.0 - unchanged) / factor;
            }
        }
        RotaryScaling::Yarn { factor, original, beta_fast, beta_slow, ext, attn } => {
            // The index of the frequency with this number of turns in the original context.
            let index = |turns: f64| n * (original as f64 / (turns * TAU)).ln() / (2.0 * base.ln());
            let (first, last) = (index(beta_fast).floor().max(0.0), index(beta_slow).ceil().min(n - 1.0));
            for (i, f) in frequencies.iter_mut().enumerate() {
                let unchanged = ext * (1.0 - ((i as f64 - first) / (last - first).max(0.001)).clamp(0.0, 1.0));
                *f *= unchanged + (1.0 - unchanged) / factor;
            }
            amplitude = attn * if ext == 0.0 { 1.0 } else { 1.0 + 0.1 * factor.ln() };
        }
    }
    (frequencies, amplitude)
}
