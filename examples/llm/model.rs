//! Transformers of the Llama family, with the names and numbers of GGUF files: Llama, SmolLM, Qwen2.

use std::cell::RefCell;

use claystone::io::gguf::{Gguf, GgufType, MetaValue, Weight};
use claystone::nn::{KvCache, KvCacheOptions, Rotary, RotaryOptions, RotaryPairs, RotaryScaling};
use claystone::ops::CacheType;
use claystone::quantized::QuantizedTensor;
use claystone::storage::Storage;
use claystone::{DType, Device, Error, Result, Tensor};

/// The sizes of a model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub layers: usize,
    pub width: usize,
    /// The number of inner elements of a feed-forward block.
    pub inner: usize,
    pub heads: usize,
    /// The number of heads of keys and values. Several heads of queries share each.
    pub key_heads: usize,
    pub head_width: usize,
    /// The length of the context in tokens.
    pub context: usize,
}

/// The numbers of a file whose keys begin with the name of the architecture.
struct Numbers<'a> {
    file: &'a Gguf,
    architecture: &'a str,
}

impl Numbers<'_> {
    fn count(&self, key: &str) -> Result<usize> {
        Ok(self.file.u32(&format!("{}.{key}", self.architecture))? as usize)
    }

    /// Returns a count, or the default if the file has no such key.
    fn count_or(&self, key: &str, default: usize) -> Result<usize> {
        self.file.get(&format!("{}.{key}", self.architecture)).map_or(Ok(default), |_| self.count(key))
    }

    fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        let key = format!("{}.{key}", self.architecture);
        self.file.get(&key).map_or(Ok(default), |_| self.file.f32(&key).map(f64::from))
    }

    fn sizes(&self) -> Result<Sizes> {
        if self.count_or("expert_count", 0)? > 0 {
            return Err(Error::invalid("llm", "mixtures of experts are not supported".to_owned()));
        }
        let (width, heads) = (self.count("embedding_length")?, self.count("attention.head_count")?);
        let head_width = self.count_or("attention.key_length", width / heads.max(1))?;
        let sizes = Sizes {
            layers: self.count("block_count")?,
            width,
            inner: self.count("feed_forward_length")?,
            heads,
            key_heads: self.count_or("attention.head_count_kv", heads)?,
            head_width,
            context: self.count("context_length")?,
        };
        if self.count_or("attention.value_length", head_width)? != head_width {
            return Err(Error::invalid("llm", "keys and values of different widths are not supported".to_owned()));
        }
        Ok(sizes)
    }

    fn rotary(&self, sizes: &Sizes, device: Device) -> Result<Rotary> {
        let factor = self.number_or("rope.scaling.factor", 1.0)?;
        let kind = match self.file.get(&format!("{}.rope.scaling.type", self.architecture)) {
            Some(MetaValue::Str(kind)) => kind,
            _ => "none",
        };
        let scaling = match kind {
            _ if self.file.tensors().any(|(name, _)| name == "rope_freqs.weight") => {
                RotaryScaling::Factors(self.file.tensor("rope_freqs.weight", Device::Cpu)?.to_vec::<f32>()?)
            }
            "none" => RotaryScaling::None,
            "linear" => RotaryScaling::Linear { factor },
            "yarn" => RotaryScaling::Yarn {
                factor,
                original: self.count_or("rope.scaling.original_context_length", sizes.context)?,
                beta_fast: self.number_or("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: self.number_or("rope.scaling.yarn_beta_slow", 1.0)?,
                ext: self.number_or("rope.scaling.yarn_ext_factor", 1.0)?,
                attn: self
                    .number_or("rope.scaling.yarn_attn_factor", self.number_or("rope.scaling.attn_factor", 1.0)?)?,
            },
            _ => return Err(Error::invalid("llm", format!("the rope scaling {kind} is not supported"))),
        };
        // The files of Llama have their queries and keys permuted for adjacent pairs.
        let pairs = if self.architecture == "llama" { RotaryPairs::Adjacent } else { RotaryPairs::Halves };
        let options = RotaryOptions { base: self.number_or("rope.freq_base", 10_000.0)?, pairs, scaling };
        Rotary::new(self.count_or("rope.dimension_count", sizes.head_width)?, options, device)
    }
}

/// A weight `[outputs, inputs]`.
enum Matrix {
    Plain(Tensor),
    Quantized(QuantizedTensor),
}

/// The largest storage of several weights. Many drivers limit a buffer to a quarter of the device's memory.
const MAX_STORAGE_BYTES: usize = 512 << 20;

/// The alignment of weights in a storage, in bytes.
const ALIGNMENT: usize = 256;

/// Loads matrices. On the CPU device they are pages of the file. On other devices they are parts of few large storages, because the
/// allocator would round up each weight.
struct Loader<'a> {
    file: &'a Gguf,
    device: Device,
    /// The size in bytes of the quantised weights that are not loaded yet.
    rest: usize,
    /// The bytes of the last storage, and the number of used bytes.
    last: Option<(Tensor, usize)>,
}

impl Loader<'_> {
    fn new(file: &Gguf, device: Device) -> Loader<'_> {
        let quantized = file.tensors().filter(|(_, info)| matches!(info.kind, GgufType::Quantized(_)));
        let rest = quantized.map(|(_, info)| info.nbytes.next_multiple_of(ALIGNMENT)).sum();
        Loader { file, device, rest, last: None }
    }

    /// Loads weights and joins their rows, so that one product computes the outputs of all.
    fn matrix(&mut self, names: &[String]) -> Result<Matrix> {
        let weights: Vec<Weight> =
            names.iter().map(|name| self.file.weight(name, Device::Cpu)).collect::<Result<_>>()?;
        let dtype = weights.iter().find_map(|w| if let Weight::Plain(w) = w { Some(w.dtype()) } else { None });
        let Some(dtype) = dtype else {
            let weights: Vec<QuantizedTensor> =
                weights.into_iter().filter_map(|w| if let Weight::Quantized(w) = w { Some(w) } else { None }).collect();
            let parts = match self.device {
                Device::Cpu => weights,
                _ => {
                    let groups = weights.chunk_by(|a, b| a.format() == b.format());
                    groups.map(|group| self.upload(group)).collect::<Result<_>>()?
                }
            };
            return match &parts[..] {
                [one] => Ok(Matrix::Quantized(one.clone())),
                parts => QuantizedTensor::join_rows(&parts.iter().collect::<Vec<_>>()).map(Matrix::Quantized),
            };
        };
        let mut plain = weights.iter().map(|weight| match weight {
            Weight::Plain(w) => w.to_dtype(dtype),
            Weight::Quantized(w) => w.dequantize(dtype),
        });
        let joined = match weights.len() {
            1 => plain.next().expect("there is one weight")?,
            _ => Tensor::cat(&plain.collect::<Result<Vec<Tensor>>>()?, 0)?,
        };
        joined.to_device(self.device).map(Matrix::Plain)
    }

    /// Copies weights of one format, which follow each other as rows of one weight, to the device.
    fn upload(&mut self, weights: &[QuantizedTensor]) -> Result<QuantizedTensor> {
        let bytes: Vec<Vec<u8>> = weights.iter().map(QuantizedTensor::to_bytes).collect::<Result<_>>()?;
        let (format, columns) = (weights[0].format(), weights[0].shape().dims().last().copied().unwrap_or(0));
        let rows: usize = weights.iter().map(|w| w.shape().numel() / columns.max(1)).sum();
        let bytes = bytes.concat();
        let arranged = QuantizedTensor::arrange(&bytes, columns, format, self.device)?;
        let size = arranged.len().next_multiple_of(ALIGNMENT);
        let (storage, used) = match self.last.take() {
            Some((storage, used)) if storage.numel() - used >= size => (storage, used),
            _ => {
                let len = self.rest.min(MAX_STORAGE_BYTES).max(size);
                let storage = Storage::alloc_static(self.device, len)?;
                (Tensor::from_storage(storage, len, DType::U8)?, 0)
            }
        };
        storage.narrow(0, used, arranged.len())?.write_bytes_(&arranged)?;
        let weight = QuantizedTensor::from_storage(storage.storage().clone(), used, [rows, columns], format);
        self.rest = self.rest.saturating_sub(size);
        self.last = Some((storage, used + size));
        weight
    }
}

impl Matrix {
    fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Matrix::Quantized(w) => w.linear(x, bias),
            Matrix::Plain(w) if w.dtype() == x.dtype() => x.linear(w, bias),
            Matrix::Plain(w) => {
                let y = x.to_dtype(w.dtype())?.linear(w, None)?.to_dtype(x.dtype())?;
                bias.map_or(Ok(y.shallow_clone()), |bias| y.add(bias))
            }
        }
    }

    fn linear_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        match self {
            Matrix::Quantized(w) => w.linear_add(x, residual),
            Matrix::Plain(_) => self.linear(x, None)?.add(residual),
        }
    }

    /// Returns the rows of tokens.
    fn rows(&self, tokens: &Tensor, dtype: DType) -> Result<Tensor> {
        match self {
            Matrix::Quantized(w) => w.rows(tokens, dtype),
            Matrix::Plain(w) => w.embedding(tokens)?.to_dtype(dtype),
        }
    }

    fn nbytes(&self) -> usize {
        match self {
            Matrix::Quantized(w) => w.nbytes(),
            Matrix::Plain(w) => w.numel() * w.dtype().size(),
        }
    }
}

/// The weights of attention and of the feed-forward block after it. Each block has a norm before it and a residual connection.
struct Layer {
    attention_norm: Tensor,
    /// Queries, keys and values.
    qkv: Matrix,
    qkv_bias: Option<Tensor>,
    output: Matrix,
    inner_norm: Tensor,
    /// The gate and the projection that it multiplies.
    gate_up: Matrix,
    down: Matrix,
}

/// A transformer that predicts the next token.
pub struct Model {
    pub sizes: Sizes,
    embedding: Matrix,
    layers: Vec<Layer>,
    norm: Tensor,
    /// The projection to logits; without one, the embedding.
    head: Option<Matrix>,
    rotary: Rotary,
    epsilon: f64,
    at: (DType, Device),
}

impl Model {
    /// Loads a model that computes in f32, f16 or bf16. On the CPU device the weights stay in the pages of the file.
    pub fn load(file: &Gguf, at: (DType, Device)) -> Result<Model> {
        let architecture = file.str("general.architecture")?;
        if !["llama", "qwen2"].contains(&architecture) {
            let reason = format!("the architecture {architecture} is not supported, only llama and qwen2");
            return Err(Error::invalid("llm", reason));
        }
        let (numbers, (dtype, device)) = (Numbers { file, architecture }, at);
        let sizes = numbers.sizes()?;
        let has = |name: &str| file.tensors().any(|(known, _)| known == name);
        let loader = RefCell::new(Loader::new(file, device));
        let matrix = |names: &[String]| loader.borrow_mut().matrix(names);
        let vector = |name: &str| match file.weight(name, device)? {
            Weight::Plain(vector) => vector.to_dtype(dtype),
            Weight::Quantized(vector) => vector.dequantize(dtype),
        };
        let layer = |i: usize| {
            let name = |part: &str| format!("blk.{i}.{part}");
            let weight = |part: &str| name(&format!("{part}.weight"));
            let qkv = ["attn_q", "attn_k", "attn_v"];
            let bias = match has(&name("attn_q.bias")) {
                true => {
                    let parts = qkv.map(|part| vector(&name(&format!("{part}.bias"))));
                    Some(Tensor::cat(&parts.into_iter().collect::<Result<Vec<Tensor>>>()?, 0)?)
                }
                false => None,
            };
            Ok(Layer {
                attention_norm: vector(&weight("attn_norm"))?,
                qkv: matrix(&qkv.map(weight))?,
                qkv_bias: bias,
                output: matrix(&[weight("attn_output")])?,
                inner_norm: vector(&weight("ffn_norm"))?,
                gate_up: matrix(&["ffn_gate", "ffn_up"].map(weight))?,
                down: matrix(&[weight("ffn_down")])?,
            })
        };
        let single = |name: &str| matrix(&[name.to_owned()]);
        Ok(Model {
            embedding: single("token_embd.weight")?,
            layers: (0..sizes.layers).map(layer).collect::<Result<_>>()?,
            norm: vector("output_norm.weight")?,
            head: if has("output.weight") { Some(single("output.weight")?) } else { None },
            rotary: numbers.rotary(&sizes, device)?,
            epsilon: numbers.number_or("attention.layer_norm_rms_epsilon", 1e-5)?,
            sizes,
            at,
        })
    }

    /// Creates a cache for up to `limit` tokens.
    pub fn cache(&self, kind: CacheType, limit: usize) -> Result<KvCache> {
        let Sizes { layers, key_heads, head_width, .. } = self.sizes;
        let options = KvCacheOptions { kind, limit, capacity: limit.min(256), ..Default::default() };
        KvCache::new([layers, key_heads, head_width], options, self.at.1)
    }

    /// Computes the states `[1, len, width]` after tokens `[1, len]` that follow those in the cache, and adds the tokens to the cache. A
    /// graph can capture the call.
    pub fn states(&self, tokens: &Tensor, cache: &KvCache) -> Result<Tensor> {
        let (Sizes { inner, heads, key_heads, .. }, len) = (self.sizes, tokens.shape().dims()[1]);
        let positions = match len {
            1 => cache.position().shallow_clone(),
            _ => Tensor::arange(0, len as i64, 1, (DType::I64, self.at.1))?.add(cache.position())?,
        };
        let angles = self.rotary.angles(&positions)?; // for all layers
        let mut x = self.embedding.rows(tokens, self.at.0)?;
        for (i, layer) in self.layers.iter().enumerate() {
            let normal = self.norm(&x, &layer.attention_norm)?;
            let qkv = layer.qkv.linear(&normal, layer.qkv_bias.as_ref())?;
            let qkv = qkv.unflatten(-1, [heads + 2 * key_heads, self.sizes.head_width])?;
            let rotated = self.rotary.apply(&qkv.narrow(2, 0, heads + key_heads)?, &angles)?.transpose(1, 2)?;
            let (q, k) = (rotated.narrow(1, 0, heads)?, rotated.narrow(1, heads, key_heads)?);
            let v = qkv.narrow(2, heads + key_heads, key_heads)?.transpose(1, 2)?;
            let attended = cache.attend(i, &q, &k, &v)?.transpose(1, 2)?.flatten(2, 3)?;
            x = layer.output.linear_add(&attended, &x)?;
            let gate_up = layer.gate_up.linear(&self.norm(&x, &layer.inner_norm)?, None)?;
            let (gate, up) = (gate_up.narrow(-1, 0, inner)?, gate_up.narrow(-1, inner, inner)?);
            x = layer.down.linear_add(&Tensor::map(&[&gate, &up], |e| e[0].silu() * &e[1])?, &x)?;
        }
        cache.advance(len)?;
        Ok(x)
    }

    /// Computes the logits `[.., vocabulary]` of states `[.., width]`, in f32.
    pub fn logits(&self, states: &Tensor) -> Result<Tensor> {
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        head.linear(&self.norm(states, &self.norm)?, None)?.to_dtype(DType::F32)
    }

    fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        x.rms_norm(&[self.sizes.width], Some(weight), Some(self.epsilon))
    }

    pub fn device(&self) -> Device {
        self.at.1
    }

    /// Returns the size of the matrices in bytes.
    pub fn nbytes(&self) -> usize {
        let layers = self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]);
        layers.chain([&self.embedding]).chain(&self.head).map(Matrix::nbytes).sum()
    }
}
