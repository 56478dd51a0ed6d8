//! Sampling of tokens from logits.

use crate::storage::Caller;
use crate::{DType, Error, Expr, Result, Tensor};

options! {
    /// Draws tokens from logits, on their device. The filters apply in the order of the fields `repetition`, `top_k`, `top_p`, `min_p` and
    /// `temperature`, as in llama.cpp.
    ///
    /// ```
    /// use claystone::{Device, Generator, Tensor, nn::{History, Sampler}, with_generator};
    /// let logits = Tensor::from_slice(&[1f32, 4.0, 3.9, -2.0], [1, 4], Device::Cpu)?;
    /// let greedy = Sampler { temperature: 0.0, ..Sampler::default() };
    /// assert_eq!(greedy.sample(&logits, None)?.to_vec::<i64>()?, [1]);
    /// let prompt = Tensor::from_slice(&[0i64, 1], [1, 2], Device::Cpu)?;
    /// let history = History::new(&prompt, 64)?;
    /// let varied = Sampler { repetition: 1.3, ..greedy };
    /// assert_eq!(varied.sample(&logits, Some(&history))?.to_vec::<i64>()?, [2]);
    /// let sampler = Sampler { temperature: 1.0, top_k: 2, ..Sampler::default() };
    /// let draw = || sampler.sample(&logits, None)?.item::<i64>();
    /// let seeded = |seed| with_generator(&Generator::new(seed), draw);
    /// assert_eq!(seeded(7)?, seeded(7)?);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct Sampler {
        /// The divisor of the logits. With 0, the most likely token is taken, and only `repetition` applies.
        pub temperature: f64 = 0.8,
        /// The number of most likely tokens that are kept; 0 for all.
        pub top_k: usize = 40,
        /// Keeps the most likely tokens whose probabilities add up to this number: 1 for all.
        pub top_p: f64 = 0.95,
        /// Keeps the tokens with at least this fraction of the greatest probability: 0 for all.
        pub min_p: f64 = 0.05,
        /// The divisor of positive logits and the factor of negative logits of tokens in the history: 1 for no change.
        pub repetition: f64 = 1.0,
    }
}

impl Sampler {
    /// Draws one token for each row of `logits`, `[batch, vocabulary]`, as i64 `[batch]`. Draws from the thread's generator
    /// ([`with_generator`](crate::with_generator)). A [`Graph`](crate::Graph) can capture the call; outside a capture, the call waits for
    /// the device if the temperature is above 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] for logits or a history of another shape, NaN or infinite greatest logits, a negative `temperature`, a `top_p` that
    /// is not above 0, a `min_p` above 1, and a `repetition` that is not above 0.
    #[track_caller]
    pub fn sample(&self, logits: &Tensor, history: Option<&History>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let &Sampler { temperature, top_k, top_p, min_p, repetition } = self;
        let &[_, vocabulary] = logits.shape().dims() else {
            let reason = format!("logits of shape {} are not [batch, vocabulary]", logits.shape());
            return Err(Error::invalid("Sampler::sample", reason));
        };
        if !(temperature >= 0.0 && top_p > 0.0 && min_p <= 1.0 && repetition > 0.0) {
            return Err(Error::invalid("Sampler::sample", format!("{self:?} is out of range")));
        }
        let mut logits = logits.detach().to_dtype(DType::F32)?;
        if let Some(history) = history.filter(|_| repetition != 1.0) {
            let found = logits.gather(1, &history.tokens)?;
            let penalised = Tensor::map(&[&found], |e| e[0].gt(0.0).select(&e[0] / repetition, &e[0] * repetition))?;
            logits = logits.scatter(1, &history.tokens, &penalised)?; // equal values for equal tokens
        }
        if temperature == 0.0 {
            return logits.argmax(1, false);
        }
        let (values, tokens) = match top_k {
            0 => logits.sort(1, true)?,
            k => logits.topk(k.min(vocabulary), 1, true)?,
        };
        let greatest = values.narrow(1, 0, 1)?;
        let weight = |logit: &Expr, greatest: &Expr| {
            let difference = logit - greatest;
            difference.ge(min_p.ln()).select((difference / temperature).exp(), 0.0)
        };
        let weights = if top_p < 1.0 {
            let probabilities = values.softmax(1)?;
            let sums = probabilities.cumsum(1)?;
            Tensor::map(&[&values, &greatest, &probabilities, &sums], |e| {
                (&e[3] - &e[2]).lt(top_p).select(weight(&e[0], &e[1]), 0.0)
            })?
        } else {
            Tensor::map(&[&values, &greatest], |e| weight(&e[0], &e[1]))?
        };
        let drawn = weights.multinomial(1, false)?;
        tokens.gather(1, &drawn)?.squeeze(1)
    }
}

/// The last tokens of each sequence of a batch, in device memory, for [`Sampler::repetition`].
#[derive(Debug)]
pub struct History {
    /// A ring of tokens, `[batch, window]`.
    tokens: Tensor,
    /// The index in the ring of the next token, `[1]`.
    next: Tensor,
}

impl History {
    /// Creates a history of the last `window` tokens, beginning with `prompt`: i64 `[batch, len]`. Fails with [`Error::Invalid`] for a prompt
    /// of another shape or without tokens, and for a window of 0.
    #[track_caller]
    pub fn new(prompt: &Tensor, window: usize) -> Result<History> {
        let _caller = Caller::enter();
        let len = match *prompt.shape().dims() {
            [_, len] if len > 0 && window > 0 => len.min(window),
            _ => {
                let reason = format!("a prompt of shape {} for a window of {window} tokens", prompt.shape());
                return Err(Error::invalid("History::new", reason));
            }
        };
        let last = prompt.narrow(1, prompt.shape().dims()[1] - len, len)?.to_dtype(DType::I64)?;
        // The first token fills the rest of the ring, and the next tokens replace it there.
        let fill = last.narrow(1, 0, 1)?.expand([last.shape().dims()[0], window - len])?;
        let next = Tensor::full([1], (len % window) as i64, (DType::I64, prompt.device()))?;
        Ok(History { tokens: Tensor::cat(&[&last, &fill], 1)?, next })
    }

    /// Appends one token to each sequence: i64 `[batch]`, as [`Sampler::sample`] returns it. A [`Graph`](crate::Graph) can capture the call.
    #[track_caller]
    pub fn push(&self, tokens: &Tensor) -> Result<()> {
        let _caller = Caller::enter();
        self.tokens.index_copy_(1, &self.next, &tokens.unsqueeze(1)?)?;
        let window = self.tokens.shape().dims()[1] as f64;
        Tensor::map_into(&[&self.next], &[], &[&self.next], |e, _| vec![(&e[0] + 1.0).remainder(window)])
    }
}
