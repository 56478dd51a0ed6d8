//! Transformers (Vaswani et al., 2017): encoder and decoder layers, and stacks of them.

use super::{Activation, AttentionMasks, Dropout, Forward, LayerNorm, Linear, Module, MultiheadAttention, init};
use crate::storage::Caller;
use crate::tensor::TensorOptions;
use crate::{Result, Tensor};

options! {
    /// Options of [`TransformerEncoderLayer`], [`TransformerDecoderLayer`] and [`Transformer`], with PyTorch's names and defaults.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct TransformerOptions {
        /// The number of features between the two linear layers.
        pub dim_feedforward: usize = 2048,
        /// The dropout probability of attention weights and of each sublayer's result. Applies in training only.
        pub dropout: f64 = 0.1,
        /// The activation between the two linear layers.
        pub activation: Activation = Activation::Relu,
        /// The number that layer norms add to the variance (`eps`).
        pub layer_norm_eps: f64 = 1e-5,
        /// Whether layer norms are applied to the input of each sublayer (pre-norm) instead of to the residual sum (post-norm).
        pub norm_first: bool = false,
        /// Whether linear layers and norms have biases.
        pub bias: bool = true,
    }
}

impl TransformerOptions {
    fn attention(&self, [d_model, nhead]: [usize; 2], tensors: TensorOptions) -> Result<MultiheadAttention> {
        let attention = MultiheadAttention::new(d_model, nhead, tensors)?.with_dropout(self.dropout);
        Ok(if self.bias { attention } else { attention.without_bias() })
    }

    fn norm(&self, d_model: usize, tensors: TensorOptions) -> Result<LayerNorm> {
        let norm = LayerNorm::new(&[d_model], tensors)?.with_eps(self.layer_norm_eps);
        Ok(if self.bias { norm } else { norm.without_bias() })
    }

    /// Creates the two linear layers of the feed-forward block.
    fn products(&self, d_model: usize, tensors: TensorOptions) -> Result<[Linear; 2]> {
        let linear = |inputs, outputs| {
            let linear = Linear::new(inputs, outputs, tensors)?;
            Ok(if self.bias { linear } else { linear.without_bias() })
        };
        let first = linear(d_model, self.dim_feedforward)?.with_activation(self.activation);
        Ok([first, linear(self.dim_feedforward, d_model)?])
    }
}

/// Applies a sublayer with a residual connection. The layer norm comes before the sublayer (pre-norm) or after the sum (post-norm).
fn residual(
    x: &Tensor,
    norm: &LayerNorm,
    norm_first: bool,
    part: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if norm_first { x.add(&part(&norm.forward(x)?)?) } else { norm.forward(&x.add(&part(x)?)?) }
}

/// Applies the two linear layers of the feed-forward block. Each is followed by dropout.
fn feed_forward(x: &Tensor, products: [&Linear; 2], dropout: &Dropout) -> Result<Tensor> {
    products.into_iter().try_fold(x.shallow_clone(), |x, product| dropout.forward(&product.forward(&x)?))
}

/// Self-attention and a feed-forward block of two linear layers, each with a residual connection and a layer norm (PyTorch's
/// `nn.TransformerEncoderLayer` with `batch_first=True`). Maps `[N, S, E]` to `[N, S, E]`. The parameters have PyTorch's names:
/// `self_attn`, `linear1`, `linear2`, `norm1`, `norm2`.
///
/// [`Module::forward`] uses no masks. Call [`TransformerEncoderLayer::encode`] to pass masks.
pub struct TransformerEncoderLayer {
    self_attn: MultiheadAttention,
    linear1: Linear,
    linear2: Linear,
    norm1: LayerNorm,
    norm2: LayerNorm,
    dropout: Dropout,
    norm_first: bool,
}

impl TransformerEncoderLayer {
    /// Creates a layer of `d_model` features in `nhead` heads, with PyTorch's initialisation. Fails as [`MultiheadAttention::new`] does,
    /// and with [`Error::Invalid`](crate::Error::Invalid) for a dropout outside `0.0..=1.0`.
    #[track_caller]
    pub fn new(
        d_model: usize,
        nhead: usize,
        options: TransformerOptions,
        tensors: impl Into<TensorOptions>,
    ) -> Result<TransformerEncoderLayer> {
        let _caller = Caller::enter();
        let tensors = tensors.into();
        let [linear1, linear2] = options.products(d_model, tensors)?;
        Ok(TransformerEncoderLayer {
            self_attn: options.attention([d_model, nhead], tensors)?,
            linear1,
            linear2,
            norm1: options.norm(d_model, tensors)?,
            norm2: options.norm(d_model, tensors)?,
            dropout: Dropout::new(options.dropout)?,
            norm_first: options.norm_first,
        })
    }

    /// Computes the result for `[N, S, E]` with attention masks. Fails as [`MultiheadAttention::attend`] does.
    #[track_caller]
    pub fn encode(&self, x: &Tensor, masks: AttentionMasks<'_>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let dropped = |t: Tensor| self.dropout.forward(&t);
        let x = residual(x, &self.norm1, self.norm_first, |x| dropped(self.self_attn.attend(x, x, x, masks)?.0))?;
        residual(&x, &self.norm2, self.norm_first, |x| feed_forward(x, [&self.linear1, &self.linear2], &self.dropout))
    }
}

impl Module for TransformerEncoderLayer {
    crate::parts!(self_attn, linear1, linear2, norm1, norm2, dropout);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.encode(x, AttentionMasks::default())
    }
}

/// Self-attention, attention to the encoder's result, and a feed-forward block, each with a residual connection and a layer norm
/// (PyTorch's `nn.TransformerDecoderLayer` with `batch_first=True`). Maps `[N, T, E]` and `[N, S, E]` to `[N, T, E]`. The
/// parameters have PyTorch's names: `self_attn`, `multihead_attn`, `linear1`, `linear2`, `norm1`, `norm2`, `norm3`.
///
/// [`Forward::call`] takes a target and a memory, without masks. Call [`TransformerDecoderLayer::decode`] to pass masks.
pub struct TransformerDecoderLayer {
    self_attn: MultiheadAttention,
    multihead_attn: MultiheadAttention,
    linear1: Linear,
    linear2: Linear,
    norm1: LayerNorm,
    norm2: LayerNorm,
    norm3: LayerNorm,
    dropout: Dropout,
    norm_first: bool,
}

impl TransformerDecoderLayer {
    /// Creates a layer of `d_model` features in `nhead` heads, with PyTorch's initialisation. Fails as [`TransformerEncoderLayer::new`]
    /// does.
    #[track_caller]
    pub fn new(
        d_model: usize,
        nhead: usize,
        options: TransformerOptions,
        tensors: impl Into<TensorOptions>,
    ) -> Result<TransformerDecoderLayer> {
        let _caller = Caller::enter();
        let tensors = tensors.into();
        let [linear1, linear2] = options.products(d_model, tensors)?;
        Ok(TransformerDecoderLayer {
            self_attn: options.attention([d_model, nhead], tensors)?,
            multihead_attn: options.attention([d_model, nhead], tensors)?,
            linear1,
            linear2,
            norm1: options.norm(d_model, tensors)?,
            norm2: options.norm(d_model, tensors)?,
            norm3: options.norm(d_model, tensors)?,
            dropout: Dropout::new(options.dropout)?,
            norm_first: options.norm_first,
        })
    }

    /// Computes the result for a target `[N, T, E]` and a memory (the encoder's result) `[N, S, E]`, with masks for both attentions. Fails
    /// as [`MultiheadAttention::attend`] does.
    pub fn decode(
        &self,
        target: &Tensor,
        memory: &Tensor,
        target_masks: AttentionMasks<'_>,
        memory_masks: AttentionMasks<'_>,
    ) -> Result<Tensor> {
        let dropped = |t: Tensor| self.dropout.forward(&t);
        let x = residual(target, &self.norm1, self.norm_first, |x| {
            dropped(self.self_attn.attend(x, x, x, target_masks)?.0)
        })?;
        let x = residual(&x, &self.norm2, self.norm_first, |x| {
            dropped(self.multihead_attn.attend(x, memory, memory, memory_masks)?.0)
        })?;
        residual(&x, &self.norm3, self.norm_first, |x| feed_forward(x, [&self.linear1, &self.linear2], &self.dropout))
    }
}

impl Module for TransformerDecoderLayer {
    crate::parts!(self_attn, multihead_attn, linear1, linear2, norm1, norm2, norm3, dropout);
}

/// A stack of encoder layers and an optional norm (PyTorch's `nn.TransformerEncoder`). The layers are named `layers.0` and so on.
///
/// ```
/// use claystone::nn::{AttentionMasks, Module, TransformerEncoder, TransformerEncoderLayer, TransformerOptions};
/// use claystone::{DType, Device, Tensor};
/// let layer = || TransformerEncoderLayer::new(8, 2, TransformerOptions::default(), Device::Cpu);
/// let encoder = TransformerEncoder::new(vec![layer()?, layer()?]);
/// let x = Tensor::randn(&[3, 5, 8], Device::Cpu)?;
/// assert_eq!(encoder.forward(&x)?.shape().dims(), [3, 5, 8]);
/// let padding = Tensor::zeros(&[3, 5], (DType::Bool, Device::Cpu))?;
/// let masks = AttentionMasks { key_padding_mask: Some(&padding), ..AttentionMasks::default() };
/// assert_eq!(encoder.encode(&x, masks)?.shape().dims(), [3, 5, 8]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct TransformerEncoder {
    layers: Vec<TransformerEncoderLayer>,
    norm: Option<LayerNorm>,
}

impl TransformerEncoder {
    /// Creates a stack of these layers, without a final norm.
    pub fn new(layers: Vec<TransformerEncoderLayer>) -> TransformerEncoder {
        TransformerEncoder { layers, norm: None }
    }

    /// Adds a norm after the last layer, as pre-norm layers need.
    pub fn with_norm(self, norm: LayerNorm) -> TransformerEncoder {
        TransformerEncoder { norm: Some(norm), ..self }
    }

    /// Computes the result for `[N, S, E]`. Every layer uses the same attention masks. Fails as [`MultiheadAttention::attend`] does.
    #[track_caller]
    pub fn encode(&self, x: &Tensor, masks: AttentionMasks<'_>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let x = self.layers.iter().try_fold(x.shallow_clone(), |x, layer| layer.encode(&x, masks))?;
        self.norm.as_ref().map_or(Ok(x.shallow_clone()), |norm| norm.forward(&x))
    }
}

impl Module for TransformerEncoder {
    crate::parts!(layers, norm);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.encode(x, AttentionMasks::default())
    }
}

/// A stack of decoder layers and an optional norm (PyTorch's `nn.TransformerDecoder`). The layers are named `layers.0` and so on.
pub struct TransformerDecoder {
    layers: Vec<TransformerDecoderLayer>,
    norm: Option<LayerNorm>,
}

impl TransformerDecoder {
    /// Creates a stack of these layers, without a final norm.
    pub fn new(layers: Vec<TransformerDecoderLayer>) -> TransformerDecoder {
        TransformerDecoder { layers, norm: None }
    }

    /// Adds a norm after the last layer, as pre-norm layers need.
    pub fn with_norm(self, norm: LayerNorm) -> TransformerDecoder {
        TransformerDecoder { norm: Some(norm), ..self }
    }

    /// Computes the result for a target `[N, T, E]` and a memory (the encoder's result) `[N, S, E]`. Every layer uses the same masks. Fails
    /// as [`MultiheadAttention::attend`] does.
    pub fn decode(
        &self,
        target: &Tensor,
        memory: &Tensor,
        target_masks: AttentionMasks<'_>,
        memory_masks: AttentionMasks<'_>,
    ) -> Result<Tensor> {
        let decoded = |x: Tensor, layer: &TransformerDecoderLayer| layer.decode(&x, memory, target_masks, memory_masks);
        let x = self.layers.iter().try_fold(target.shallow_clone(), decoded)?;
        self.norm.as_ref().map_or(Ok(x.shallow_clone()), |norm| norm.forward(&x))
    }
}

impl Module for TransformerDecoder {
    crate::parts!(layers, norm);
}

/// An encoder and a decoder (PyTorch's `nn.Transformer` with `batch_first=True`). Maps a source `[N, S, E]` and a target `[N, T, E]` to
/// `[N, T, E]`. The parameters have PyTorch's names, beginning with `encoder.layers.0.self_attn.in_proj_weight`.
///
/// ```
/// use claystone::nn::{AttentionMasks, Transformer, TransformerOptions};
/// use claystone::{DType, Device, Tensor};
/// let options = TransformerOptions { dim_feedforward: 16, ..TransformerOptions::default() };
/// let net = Transformer::new(8, 2, [2, 2], options, Device::Cpu)?;
/// let (source, target) = (Tensor::randn(&[3, 5, 8], Device::Cpu)?, Tensor::randn(&[3, 4, 8], Device::Cpu)?);
/// // A word of the target sees those up to itself.
/// let later = Tensor::ones(&[4, 4], (DType::Bool, Device::Cpu))?.triu(1)?;
/// let causal = AttentionMasks { attn_mask: Some(&later), ..AttentionMasks::default() };
/// let all = AttentionMasks::default();
/// let y = net.decoder.decode(&target, &net.encoder.encode(&source, all)?, causal, all)?;
/// assert_eq!(y.shape().dims(), [3, 4, 8]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct Transformer {
    /// The encoder. Its input is the source.
    pub encoder: TransformerEncoder,
    /// The decoder. Its inputs are the target and the encoder's result.
    pub decoder: TransformerDecoder,
}

impl Transformer {
    /// Creates an encoder and a decoder with the given numbers of layers, both with a final norm. Weights are drawn from Glorot's uniform
    /// distribution, as in PyTorch (whose default is `[6, 6]` layers of 512 features in 8 heads). Fails as [`TransformerEncoderLayer::new`]
    /// does.
    #[track_caller]
    pub fn new(
        d_model: usize,
        nhead: usize,
        [encoder_layers, decoder_layers]: [usize; 2],
        options: TransformerOptions,
        tensors: impl Into<TensorOptions>,
    ) -> Result<Transformer> {
        let _caller = Caller::enter();
        let tensors = tensors.into();
        let encoder = (0..encoder_layers).map(|_| TransformerEncoderLayer::new(d_model, nhead, options, tensors));
        let decoder = (0..decoder_layers).map(|_| TransformerDecoderLayer::new(d_model, nhead, options, tensors));
        let encoder = TransformerEncoder::new(encoder.collect::<Result<_>>()?);
        let decoder = TransformerDecoder::new(decoder.collect::<Result<_>>()?);
        let norm = || options.norm(d_model, tensors);
        let net = Transformer { encoder: encoder.with_norm(norm()?), decoder: decoder.with_norm(norm()?) };
        for weight in net.parameters().into_iter().filter(|t| t.rank() > 1) {
            init::xavier_uniform_(weight, 1.0)?;
        }
        Ok(net)
    }
}

impl Module for Transformer {
    crate::parts!(encoder, decoder);
}

/// Takes a target and a memory (the encoder's result), without masks.
impl Forward<(&Tensor, &Tensor)> for TransformerDecoderLayer {
    type Output = Tensor;

    #[track_caller]
    fn call(&self, (target, memory): (&Tensor, &Tensor)) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.decode(target, memory, AttentionMasks::default(), AttentionMasks::default())
    }
}

/// Takes a target and a memory (the encoder's result), without masks.
impl Forward<(&Tensor, &Tensor)> for TransformerDecoder {
    type Output = Tensor;

    #[track_caller]
    fn call(&self, (target, memory): (&Tensor, &Tensor)) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.decode(target, memory, AttentionMasks::default(), AttentionMasks::default())
    }
}

/// Takes a source and a target, without masks.
impl Forward<(&Tensor, &Tensor)> for Transformer {
    type Output = Tensor;

    #[track_caller]
    fn call(&self, (source, target): (&Tensor, &Tensor)) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.decoder.call((target, &self.encoder.forward(source)?))
    }
}
