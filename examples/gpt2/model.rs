//! GPT-2 with a cache of keys and values. Parameters have the names of Hugging Face's `GPT2LMHeadModel`.

use std::path::Path;

use claystone::nn::{self, Embedding, Forward, LayerNorm, Module, init};
use claystone::ops::{Attention, Expr};
use claystone::{DType, Device, Error, Result, Tensor, io};

/// The sizes of a model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub vocabulary: usize,
    /// The length of the context in tokens.
    pub context: usize,
    pub width: usize,
    pub layers: usize,
    pub heads: usize,
}

/// A linear layer with a weight `[inputs, outputs]`, like Hugging Face's `Conv1D`.
struct Conv1d {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1d {
    fn new(inputs: usize, outputs: usize, at: (DType, Device)) -> Result<Conv1d> {
        Ok(Conv1d { weight: random(&[inputs, outputs], at)?, bias: Tensor::zeros(outputs, at)? })
    }

    fn map(&self, x: &Tensor, f: impl Fn(&Expr) -> Expr) -> Result<Tensor> {
        x.linear_map(&self.weight.t()?, Some(&self.bias), f) // `t` is a view, so nothing is copied
    }
}

impl Module for Conv1d {
    claystone::parts!(weight, bias);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.linear(&self.weight.t()?, Some(&self.bias))
    }
}

fn random(shape: &[usize], at: (DType, Device)) -> Result<Tensor> {
    let weight = Tensor::empty(shape, at)?;
    init::normal_(&weight, 0.0, 0.02)?;
    Ok(weight)
}

/// Causal self-attention with a cache of keys and values.
struct SelfAttention {
    c_attn: Conv1d,
    c_proj: Conv1d,
    heads: usize,
}

impl Module for SelfAttention {
    claystone::parts!(c_attn, c_proj);
}

/// The keys and values of all previous tokens, each `[batch, heads, context, head width]`, and the number of previous tokens.
pub struct Cache {
    layers: Vec<[Tensor; 2]>,
    pub length: usize,
}

/// One layer's keys and values in the cache, and the number of previous tokens.
type Past<'a> = (&'a [Tensor; 2], usize);

impl Forward<(&Tensor, Past<'_>)> for SelfAttention {
    type Output = Tensor;

    fn call(&self, (x, (cache, length)): (&Tensor, Past<'_>)) -> Result<Tensor> {
        let new = x.shape().dims()[1];
        let all =
            self.c_attn.forward(x)?.unflatten(-1, [3 * self.heads, cache[0].shape().dims()[3]])?.transpose(1, 2)?;
        let part = |i: usize| all.narrow(1, i * self.heads, self.heads);
        for (cache, i) in cache.iter().zip([1, 2]) {
            cache.narrow(2, length, new)?.copy_(&part(i)?)?;
        }
        let [k, v] = [cache[0].narrow(2, 0, length + new)?, cache[1].narrow(2, 0, length + new)?];
        // A single new token attends to all previous tokens, so it needs no causal mask.
        let options = Attention { is_causal: new > 1, ..Attention::default() };
        self.c_proj.forward(&part(0)?.scaled_dot_product_attention(&k, &v, options)?.transpose(1, 2)?.flatten(2, 3)?)
    }
}

/// The feed-forward block of a layer.
struct Mlp {
    c_fc: Conv1d,
    c_proj: Conv1d,
}

impl Module for Mlp {
    claystone::parts!(c_fc, c_proj);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.c_proj.forward(&self.c_fc.map(x, Expr::gelu_tanh)?)
    }
}

/// Attention, then an MLP. Each comes after a norm and has a residual connection.
struct Block {
    ln_1: LayerNorm,
    attn: SelfAttention,
    ln_2: LayerNorm,
    mlp: Mlp,
}

impl Module for Block {
    claystone::parts!(ln_1, attn, ln_2, mlp);
}

impl Forward<(&Tensor, Past<'_>)> for Block {
    type Output = Tensor;

    fn call(&self, (x, past): (&Tensor, Past<'_>)) -> Result<Tensor> {
        let x = x.add(&self.attn.call((&self.ln_1.forward(x)?, past))?)?;
        x.add(&self.mlp.forward(&self.ln_2.forward(&x)?)?)
    }
}

/// The model. The token embedding is also used as the output projection.
pub struct Gpt2 {
    wte: Embedding,
    wpe: Embedding,
    h: Vec<Block>,
    ln_f: LayerNorm,
    pub sizes: Sizes,
}

impl Gpt2 {
    /// Creates a model with random weights.
    pub fn new(sizes: Sizes, at: (DType, Device)) -> Result<Gpt2> {
        let width = sizes.width;
        let block = |_| {
            Ok(Block {
                ln_1: LayerNorm::new(&[width], at)?,
                attn: SelfAttention {
                    c_attn: Conv1d::new(width, 3 * width, at)?,
                    c_proj: Conv1d::new(width, width, at)?,
                    heads: sizes.heads,
                },
                ln_2: LayerNorm::new(&[width], at)?,
                mlp: Mlp { c_fc: Conv1d::new(width, 4 * width, at)?, c_proj: Conv1d::new(4 * width, width, at)? },
            })
        };
        let (wte, wpe) = (Embedding::new(sizes.vocabulary, width, at)?, Embedding::new(sizes.context, width, at)?);
        init::normal_(wte.weight(), 0.0, 0.02)?;
        init::normal_(wpe.weight(), 0.0, 0.02)?;
        let h = (0..sizes.layers).map(block).collect::<Result<_>>()?;
        Ok(Gpt2 { wte, wpe, h, ln_f: LayerNorm::new(&[width], at)?, sizes })
    }

    /// Loads a safetensors file. Its shapes determine all sizes except the number of heads. By default heads are 64 wide, as in OpenAI's models.
    pub fn load(path: &Path, heads: Option<usize>, at: (DType, Device)) -> Result<Gpt2> {
        let state = io::load(path, at.1)?.strip_prefix("transformer");
        let missing = |name: &str| Error::invalid("gpt2", format!("{} has no {name}", path.display()));
        let dims = |name: &str| match state.get(name).map(|t| t.shape().dims()) {
            Some(&[rows, columns]) => Ok((rows, columns)),
            _ => Err(missing(name)),
        };
        let ((vocabulary, width), (context, _)) = (dims("wte.weight")?, dims("wpe.weight")?);
        let layers = (0..).take_while(|i| state.get(&format!("h.{i}.ln_1.weight")).is_some()).count();
        let heads = heads.unwrap_or(width.div_ceil(64));
        let mut gpt = nn::uninit(|| Gpt2::new(Sizes { vocabulary, context, width, layers, heads }, at))?;
        // Files also contain causal masks and the output projection. They are not needed: the projection is the token embedding.
        match gpt.assign_state_dict(state, false)?.missing_keys.first() {
            Some(name) => Err(missing(name)),
            None => Ok(gpt),
        }
    }

    /// Creates a cache without tokens.
    pub fn cache(&self, batch: usize) -> Result<Cache> {
        let Sizes { context, width, heads, .. } = self.sizes;
        let weight = self.wte.weight();
        let empty = || Tensor::empty([batch, heads, context, width / heads], (weight.dtype(), weight.device()));
        let layers = self.h.iter().map(|_| Ok([empty()?, empty()?])).collect::<Result<_>>()?;
        Ok(Cache { layers, length: 0 })
    }
}

impl Module for Gpt2 {
    claystone::parts!(wte, wpe, h, ln_f);
}

/// Maps tokens `[batch, length]` to the logits after the last token, `[batch, vocabulary]`. Pass the whole prompt first, then single tokens.
impl Forward<(&Tensor, &mut Cache)> for Gpt2 {
    type Output = Tensor;

    fn call(&self, (tokens, cache): (&Tensor, &mut Cache)) -> Result<Tensor> {
        let length = tokens.shape().dims()[1];
        let positions = self.wpe.weight().narrow(0, cache.length, length)?;
        let x = self.wte.forward(tokens)?.add(&positions)?;
        let past = |layer| (layer, cache.length);
        let x = self.h.iter().zip(&cache.layers).try_fold(x, |x, (block, layer)| block.call((&x, past(layer))))?;
        cache.length += length;
        self.ln_f.forward(&x.select(1, -1)?)?.linear(self.wte.weight(), None)
    }
}
