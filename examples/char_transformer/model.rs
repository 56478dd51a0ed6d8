//! A small GPT: token and position embeddings, pre-norm blocks of causal attention and an MLP, and a projection onto the vocabulary.

use claystone::nn::{Activation, Dropout, Embedding, LayerNorm, Linear, Module, init};
use claystone::ops::Attention;
use claystone::{DType, Device, Result, Tensor, autocast, no_grad};

/// The sizes and options of a model.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub vocabulary: usize,
    /// The length of the context in characters.
    pub context: usize,
    pub width: usize,
    pub layers: usize,
    pub heads: usize,
    /// Whether the projection onto the vocabulary uses the weight of the token embedding.
    pub tied: bool,
    /// The dropout probability of the features that a block adds to its input; 0 for no dropout.
    pub dropout: f64,
}

/// Attention, then an MLP. Each has a residual connection.
struct Block {
    ln_1: LayerNorm,
    /// The projection from features to queries, keys and values of all heads.
    attn: Linear,
    proj: Linear,
    ln_2: LayerNorm,
    fc: Linear,
    out: Linear,
    dropout: Option<Dropout>,
    heads: usize,
}

impl Block {
    fn new(sizes: Sizes, device: Device) -> Result<Block> {
        let width = sizes.width;
        let linear = |inputs, outputs| Linear::new(inputs, outputs, device);
        let block = Block {
            ln_1: LayerNorm::new(&[width], device)?,
            attn: linear(width, 3 * width)?,
            proj: linear(width, width)?,
            ln_2: LayerNorm::new(&[width], device)?,
            fc: linear(width, 4 * width)?.with_activation(Activation::Gelu),
            out: linear(4 * width, width)?,
            dropout: (sizes.dropout > 0.0).then(|| Dropout::new(sizes.dropout)).transpose()?,
            heads: sizes.heads,
        };
        // As in GPT-2: the more layers add to the residual stream, the smaller their initial weights are.
        let small = 0.02 / (2.0 * sizes.layers as f64).sqrt();
        for (layer, std) in [(&block.attn, 0.02), (&block.proj, small), (&block.fc, 0.02), (&block.out, small)] {
            init_weight(layer.weight(), std)?;
            no_grad(|| layer.bias().map(|b| b.zero_().map(drop)).transpose())?;
        }
        Ok(block)
    }
}

impl Module for Block {
    claystone::parts!(ln_1, attn, proj, ln_2, fc, out, dropout);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let heads = self.attn.forward(&self.ln_1.forward(x)?)?;
        let causal = Attention { is_causal: true, ..Attention::default() };
        // The residual stream stays in f32, even if autocast computes the products in another dtype.
        let plus = |x: &Tensor, y: Tensor| {
            let y = self.dropout.as_ref().map_or(Ok(y.shallow_clone()), |dropout| dropout.forward(&y))?;
            x.add(&y)
        };
        let x = plus(x, self.proj.forward(&heads.packed_attention(self.heads, causal)?)?)?;
        plus(&x, self.out.forward(&self.fc.forward(&self.ln_2.forward(&x)?)?)?)
    }
}

/// The model. It maps characters `[batch, length]` (i64) to logits `[batch, length, vocabulary]`.
pub struct Gpt {
    wte: Embedding,
    wpe: Embedding,
    h: Vec<Block>,
    ln_f: LayerNorm,
    lm_head: Option<Linear>,
    context: usize,
}

impl Gpt {
    pub fn new(sizes: Sizes, device: Device) -> Result<Gpt> {
        let gpt = Gpt {
            wte: Embedding::new(sizes.vocabulary, sizes.width, device)?,
            wpe: Embedding::new(sizes.context, sizes.width, device)?,
            h: (0..sizes.layers).map(|_| Block::new(sizes, device)).collect::<Result<_>>()?,
            ln_f: LayerNorm::new(&[sizes.width], device)?,
            lm_head: match sizes.tied {
                true => None,
                false => Some(Linear::new(sizes.width, sizes.vocabulary, device)?.without_bias()),
            },
            context: sizes.context,
        };
        let head = gpt.lm_head.as_ref().map(Linear::weight);
        [gpt.wte.weight(), gpt.wpe.weight()]
            .into_iter()
            .chain(head)
            .try_for_each(|weight| init_weight(weight, 0.02))?;
        Ok(gpt)
    }

    /// Returns the logits for the character after `numbers`. Reads at most the last `context` characters.
    pub fn next(&self, numbers: &[i64], device: Device) -> Result<Tensor> {
        let seen = &numbers[numbers.len().saturating_sub(self.context)..];
        self.forward(&Tensor::from_slice(seen, [1, seen.len()], device)?)?.select(1, -1)
    }

    /// Returns the mean cross-entropy of predicting each next character in windows `[batch, context + 1]`. `precision` is f32, or the
    /// dtype of autocast.
    pub fn loss(&self, windows: &Tensor, precision: DType) -> Result<Tensor> {
        let length = windows.shape().dims()[1] - 1;
        autocast((precision != DType::F32).then_some(precision), || {
            let logits = self.forward(&windows.narrow(1, 0, length)?)?.flatten(0, 1)?;
            logits.cross_entropy(&windows.narrow(1, 1, length)?.flatten(0, 1)?)
        })
    }
}

impl Module for Gpt {
    claystone::parts!(wte, wpe, h, ln_f, lm_head);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let positions = self.wpe.weight().narrow(0, 0, x.shape().dims()[1])?;
        let x = self.wte.forward(x)?.add(&positions)?;
        let x = self.h.iter().try_fold(x, |x, block| block.forward(&x))?;
        let x = self.ln_f.forward(&x)?;
        match &self.lm_head {
            Some(head) => head.forward(&x),
            None => x.linear(self.wte.weight(), None),
        }
    }
}

fn init_weight(weight: &Tensor, std: f64) -> Result<()> {
    init::normal_(weight, 0.0, std)
}

/// A text as numbers. Each number is the index of a character among the distinct characters of the text.
pub struct Text {
    pub characters: Vec<char>,
    pub numbers: Vec<i64>,
}

impl Text {
    pub fn new(text: &str) -> Text {
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        let number = |c| characters.binary_search(&c).expect("it is one of them") as i64;
        let numbers = text.chars().map(number).collect();
        Text { characters, numbers }
    }
}

/// Returns `batch` random windows, each of `length` characters.
pub fn windows(text: &Tensor, batch: usize, length: usize) -> Result<Tensor> {
    let all = text.unfold(0, length, 1)?; // a view whose windows overlap
    let first = Tensor::randint(0, all.shape().dims()[0] as i64, &[batch], (DType::I64, text.device()))?;
    all.index_select(0, &first)
}
