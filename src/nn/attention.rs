//! Multi-head attention, with the projections of queries, keys, values and the result.

use super::{Linear, Mode, Module};
use crate::ops::Attention;
use crate::storage::Caller;
use crate::tensor::TensorOptions;
use crate::{DType, Error, Result, Tensor};

/// Multi-head attention with input and output projections (PyTorch's `nn.MultiheadAttention` with `batch_first=True`), from `[.., L, E]`
/// to `[.., L, E]`. The parameters are PyTorch's: `in_proj_weight` `[3 E, E]`, `in_proj_bias` `[3 E]`, `out_proj.weight`, `out_proj.bias`.
///
/// As a [`Module`] it computes self-attention in five launches. [`MultiheadAttention::attend`] takes separate queries, keys and values.
///
/// ```
/// use claystone::{Device, Tensor, nn::{Module, MultiheadAttention}};
/// let layer = MultiheadAttention::new(8, 2, Device::Cpu)?.with_causal();
/// assert_eq!(layer.forward(&Tensor::ones(&[3, 5, 8], Device::Cpu)?)?.shape().dims(), [3, 5, 8]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct MultiheadAttention {
    in_proj_weight: Tensor,
    in_proj_bias: Option<Tensor>,
    out_proj: Linear,
    heads: usize,
    dropout: f64,
    causal: bool,
    mode: Mode,
}

/// Masks and optional outputs of [`MultiheadAttention::attend`]. The names are those of PyTorch's arguments.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionMasks<'a> {
    /// `[S]` or `[batch, S]`. Bool: true for keys that are padding and get no attention. Float: numbers added to the scores.
    pub key_padding_mask: Option<&'a Tensor>,
    /// `[L, S]` or `[batch * heads, L, S]`. Bool: true where a query may **not** attend to a key. Float: numbers added to the scores.
    pub attn_mask: Option<&'a Tensor>,
    /// Whether to also return the attention weights, `[.., L, S]`, averaged over heads.
    pub need_weights: bool,
}

impl MultiheadAttention {
    /// Creates a layer of `embed_dim` features in `num_heads` heads, with biases and PyTorch's initialisation. Fails with
    /// [`Error::Invalid`] if `embed_dim` is not a multiple of `num_heads`.
    #[track_caller]
    pub fn new(embed_dim: usize, num_heads: usize, options: impl Into<TensorOptions>) -> Result<MultiheadAttention> {
        let _caller = Caller::enter();
        let options = options.into();
        invalid!("MultiheadAttention::new" if num_heads == 0 || !embed_dim.is_multiple_of(num_heads),
            "{embed_dim} features are not a multiple of {num_heads} heads");
        // The bound of Glorot's uniform distribution for the joint weight, of shape [3 E, E].
        let bound = (6.0 / (4.0 * embed_dim.max(1) as f64)).sqrt();
        let width = embed_dim.saturating_mul(3);
        let weight = Tensor::rand(&[width, embed_dim], options)?;
        weight.affine_(2.0 * bound, -bound)?;
        let out_proj = Linear::new(embed_dim, embed_dim, options)?;
        if let Some(bias) = out_proj.bias() {
            bias.detach().zero_()?;
        }
        Ok(MultiheadAttention {
            in_proj_weight: weight.requires_grad_(true)?,
            in_proj_bias: Some(Tensor::zeros(width, options)?.requires_grad_(true)?),
            out_proj,
            heads: num_heads,
            dropout: 0.0,
            causal: false,
            mode: Mode::default(),
        })
    }

    /// Returns the joint weight of the projections of queries, keys and values, `[3 E, E]` (PyTorch's `in_proj_weight`).
    pub fn weight(&self) -> &Tensor {
        &self.in_proj_weight
    }

    /// Returns the joint bias of the projections of queries, keys and values, `[3 E]` (PyTorch's `in_proj_bias`). `None` without biases.
    pub fn bias(&self) -> Option<&Tensor> {
        self.in_proj_bias.as_ref()
    }

    /// Returns the output projection, which is applied to the concatenated heads (PyTorch's `out_proj`).
    pub fn out_proj(&self) -> &Linear {
        &self.out_proj
    }

    /// Removes the biases of all projections.
    pub fn without_bias(self) -> MultiheadAttention {
        MultiheadAttention { in_proj_bias: None, out_proj: self.out_proj.without_bias(), ..self }
    }

    /// Sets the probability with which attention weights are dropped in training.
    pub fn with_dropout(self, p: f64) -> MultiheadAttention {
        MultiheadAttention { dropout: p, ..self }
    }

    /// Enables the causal mask: position i attends only to positions 0 to i.
    pub fn with_causal(self) -> MultiheadAttention {
        MultiheadAttention { causal: true, ..self }
    }

    fn dropout_p(&self) -> f64 {
        if self.mode.is_training() { self.dropout } else { 0.0 }
    }

    /// Computes projection `i` (0: queries, 1: keys, 2: values) and splits the heads, from `[.., L, E]` to `[.., heads, L, E / heads]`.
    fn project_heads(&self, i: usize, x: &Tensor) -> Result<Tensor> {
        let width = self.in_proj_weight.shape().dims()[1];
        let part = |t: &Tensor| t.narrow(0, i * width, width);
        let bias = self.in_proj_bias.as_ref().map(part).transpose()?;
        let x = x.linear(&part(&self.in_proj_weight)?, bias.as_ref())?;
        x.unflatten(-1, [self.heads, width / self.heads])?.transpose(-2, -3)
    }

    /// Computes attention of queries `[.., L, E]` to keys and values `[.., S, E]`. Returns `[.., L, E]` and, on request, the attention
    /// weights. Fails as [`Tensor::scaled_dot_product_attention`] does.
    #[track_caller]
    pub fn attend(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        masks: AttentionMasks<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let _caller = Caller::enter();
        check_shapes(query, key, value, masks)?;
        let (q, k, v) = (self.project_heads(0, query)?, self.project_heads(1, key)?, self.project_heads(2, value)?);
        let mask = self.combine_masks(&q, masks)?;
        let (heads, weights) = match masks.need_weights {
            false => {
                let options = Attention {
                    attn_mask: mask.as_ref(),
                    dropout_p: self.dropout_p(),
                    is_causal: self.causal,
                    ..Attention::default()
                };
                (q.scaled_dot_product_attention(&k, &v, options)?, None)
            }
            true => {
                let weights = self.attention_weights(&q, &k, mask.as_ref())?;
                (weights.matmul(&v)?, Some(weights.mean(-3, false)?))
            }
        };
        Ok((self.out_proj.forward(&heads.transpose(-2, -3)?.flatten(-2, -1)?)?, weights))
    }

    /// Computes the attention weights separately, because the fused attention operation does not return them.
    fn attention_weights(&self, q: &Tensor, k: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let width = q.shape().dims()[q.rank() - 1] as f64;
        let mut scores = q.matmul(&k.transpose(-2, -1)?)?.mul_scalar(1.0 / width.sqrt())?;
        if let Some(mask) = mask {
            scores = match mask.dtype() {
                DType::Bool => scores.masked_fill(&mask.logical_not()?, f64::NEG_INFINITY)?,
                _ => scores.add(mask)?,
            };
        }
        if self.causal {
            let [.., l, s] = *scores.shape().dims() else { unreachable!("queries by keys") };
            let later = Tensor::ones(&[l, s], (DType::Bool, q.device()))?.triu(1)?;
            scores = scores.masked_fill(&later, f64::NEG_INFINITY)?;
        }
        let weights = scores.softmax(-1)?;
        if self.dropout_p() > 0.0 { weights.dropout(self.dropout_p()) } else { Ok(weights) }
    }

    /// Combines both masks into one that broadcasts to the scores. Bool: true where a query attends to a key. Float: numbers to add.
    fn combine_masks(&self, q: &Tensor, masks: AttentionMasks<'_>) -> Result<Option<Tensor>> {
        let padding = masks.key_padding_mask.map(|m| m.unsqueeze(-2)?.unsqueeze(-2)).transpose()?;
        let pairs = match masks.attn_mask {
            Some(m) if m.rank() == 3 && q.rank() > 3 => Some(m.unflatten(0, [-1, self.heads as isize])?),
            m => m.map(Tensor::shallow_clone),
        };
        let added = |m: &Tensor| match m.dtype() {
            DType::Bool => Tensor::zeros((), (q.dtype(), q.device()))?.masked_fill(m, f64::NEG_INFINITY),
            _ => Ok(m.shallow_clone()),
        };
        let combined = match (padding, pairs) {
            (Some(a), Some(b)) if a.dtype() == DType::Bool && b.dtype() == DType::Bool => Some(a.logical_or(&b)?),
            (Some(a), Some(b)) => Some(added(&a)?.add(&added(&b)?)?),
            (a, b) => a.or(b),
        };
        combined.map(|m| if m.dtype() == DType::Bool { m.logical_not() } else { Ok(m) }).transpose()
    }
}

/// Checks the arguments of [`MultiheadAttention::attend`], so that errors show the shapes that the caller passed, not those of heads.
fn check_shapes(query: &Tensor, key: &Tensor, value: &Tensor, masks: AttentionMasks<'_>) -> Result<()> {
    let mismatch = |lhs: &Tensor, rhs: &Tensor, hint| {
        let (lhs, rhs) = (lhs.shape().clone(), rhs.shape().clone());
        Err(Error::ShapeMismatch { op: "MultiheadAttention", lhs, rhs, hint })
    };
    // True if the shapes can be broadcast in the trailing dims that both of them have.
    let can_broadcast =
        |a: &[usize], b: &[usize]| a.iter().rev().zip(b.iter().rev()).all(|(&a, &b)| a == b || a == 1 || b == 1);
    let ([batch @ .., l, _], [key_batch @ .., s, _]) = (query.shape().dims(), key.shape().dims()) else {
        return mismatch(query, key, "queries are [.., L, E] and keys [.., S, E]");
    };
    if !can_broadcast(batch, key_batch) {
        return mismatch(query, key, "queries are [.., L, E] and keys [.., S, E], whose first dims broadcast");
    }
    if !matches!(value.shape().dims(), [value_batch @ .., values, _] if values == s && can_broadcast(value_batch, key_batch))
    {
        return mismatch(key, value, "there are as many values as keys");
    }
    if let Some(mask) = masks.key_padding_mask
        && !can_broadcast(mask.shape().dims(), &[key_batch, &[*s]].concat())
    {
        return mismatch(key, mask, "a key_padding_mask is [S] or [batch, S] for keys [batch, S, E]");
    }
    match masks.attn_mask {
        Some(mask) if !can_broadcast(mask.shape().dims(), &[*l, *s]) => {
            mismatch(query, mask, "an attn_mask is [L, S] or [batch * heads, L, S]")
        }
        _ => Ok(()),
    }
}

impl Module for MultiheadAttention {
    crate::parts!(in_proj_weight, in_proj_bias, out_proj, mode);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        let options = Attention { dropout_p: self.dropout_p(), is_causal: self.causal, ..Attention::default() };
        let projected = x.linear(&self.in_proj_weight, self.in_proj_bias.as_ref())?;
        self.out_proj.forward(&projected.packed_attention(self.heads, options)?)
    }
}
