//! Answers a prompt with a language model from a GGUF file, or chats without one:
//! `cargo run --release --example llm -- --model FILE.gguf --prompt "Why is the sky blue?"`.
//!
//! Models of the families Llama, Qwen2 and SmolLM. The file also has the tokenizer and the template of chats. A token is generated
//! by one replay of a captured graph; the CPU device, which has no graphs, calls the same function.

pub mod model;
pub mod template;
pub mod tokenizer;

use std::error::Error;
use std::io::{Write, stdin, stdout};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;
use claystone::io::{
    self,
    gguf::{Gguf, MetaValue},
};
use claystone::nn::{History, KvCache, Sampler};
use claystone::ops::CacheType;
use claystone::profiler::Profiler;
use claystone::storage::{MemPool, MemPoolOptions, SharedFile};
use claystone::{DType, Device, Graph, Tensor, manual_seed, no_grad};
use model::Model;
use template::Message;
use tokenizer::{TextStream, Tokenizer};

/// The result of `main`.
pub type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// The number of tokens of a prompt that are computed at once.
const CHUNK: usize = 256;

/// Answers a prompt with a language model from a GGUF file, or chats if there is no prompt.
#[derive(Parser)]
pub struct Args {
    /// A GGUF file of the families Llama, Qwen2 or SmolLM
    #[arg(long)]
    pub model: PathBuf,
    /// The question; without it, each line of the standard input is one
    #[arg(long)]
    pub prompt: Option<String>,
    /// Instructions before the first question
    #[arg(long)]
    pub system: Option<String>,
    /// Continue the text of the prompt, without the template of chats
    #[arg(long, requires = "prompt")]
    pub raw: bool,
    /// Maximum number of tokens of an answer
    #[arg(long, default_value_t = 512)]
    pub tokens: usize,
    /// Maximum number of tokens of the conversation [default: the model's]
    #[arg(long)]
    pub context: Option<usize>,
    /// Divisor of the logits; with 0 the most likely token is taken
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Number of most likely tokens to sample from; 0 for all
    #[arg(long, default_value_t = 40)]
    pub top_k: usize,
    /// Sum of the probabilities of the tokens to sample from
    #[arg(long, default_value_t = 0.95)]
    pub top_p: f64,
    /// Least probability of a token, as a fraction of the greatest
    #[arg(long, default_value_t = 0.05)]
    pub min_p: f64,
    /// Divisor of the logits of the last 64 tokens
    #[arg(long, default_value_t = 1.0)]
    pub repetition: f64,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where to run: cpu, opencl:N or best
    #[arg(long, default_value = "best", value_parser = device)]
    pub device: Device,
    /// Dtype of activations: f32, f16 or bf16
    #[arg(long, default_value = "f32")]
    pub dtype: DType,
    /// Type of cached keys and values: f32, f16, bf16 or q8_0
    #[arg(long, default_value = "f16", value_parser = cache_type)]
    pub cache: CacheType,
    /// Write the logits after each token of the prompt to FILE, in NumPy's format, before the answer
    #[arg(long, value_name = "FILE", requires = "raw")]
    pub logits: Option<PathBuf>,
    /// Record a profile to FILE (for ui.perfetto.dev, claystone profile and claystone view)
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
}

fn device(name: &str) -> Result<Device, claystone::Error> {
    if name == "best" { Ok(Device::best()) } else { name.parse() }
}

fn cache_type(name: &str) -> Result<CacheType, String> {
    let known =
        [("f32", CacheType::F32), ("f16", CacheType::F16), ("bf16", CacheType::BF16), ("q8_0", CacheType::Q8_0)];
    known.into_iter().find(|(of, _)| *of == name).map(|(_, kind)| kind).ok_or("not f32, f16, bf16 or q8_0".into())
}

/// A conversation with a model: the tokens so far, with their keys and values.
pub struct Session<'a> {
    model: &'a Model,
    sampler: Sampler,
    cache: KvCache,
    /// The tokens whose keys and values are stored.
    stored: Vec<i64>,
    /// The last token, `[1, 1]`, which a step replaces by the next.
    token: Tensor,
    /// The last tokens, if the sampler avoids repetitions.
    history: Option<History>,
    /// Host memory for two tokens, so that the device computes a token while the host prints the one before.
    seen: [Tensor; 2],
    graph: Option<Graph>,
    /// The memory of captured graphs; `None` on the CPU device.
    pool: Option<MemPool>,
}

/// The numbers of tokens and the durations of an answer.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    pub prompt: (usize, Duration),
    pub answer: (usize, Duration),
}

impl<'a> Session<'a> {
    /// Begins a conversation of at most `limit` tokens.
    pub fn new(model: &'a Model, sampler: Sampler, kind: CacheType, limit: usize) -> claystone::Result<Session<'a>> {
        let device = model.device();
        let seen = || Tensor::zeros([1, 1], (DType::I64, Device::Cpu))?.pin_memory(device);
        Ok(Session {
            cache: model.cache(kind, limit)?,
            stored: Vec::new(),
            token: Tensor::zeros([1, 1], (DType::I64, device))?,
            history: None,
            seen: [seen()?, seen()?],
            graph: None,
            pool: (device != Device::Cpu).then(|| MemPool::of_device(device, MemPoolOptions::default())).transpose()?,
            model,
            sampler,
        })
    }

    /// Returns the size of the cached keys and values in bytes.
    pub fn cache_bytes(&self) -> usize {
        self.cache.nbytes()
    }

    /// Generates tokens after `prompt`, until `take` returns false or there are `max` tokens. A prompt that continues the conversation is
    /// only computed from the first new token on.
    pub fn answer(
        &mut self,
        prompt: &[i64],
        max: usize,
        mut take: impl FnMut(i64) -> Outcome<bool>,
    ) -> Outcome<Report> {
        let begin = Instant::now();
        let known =
            self.stored.iter().zip(prompt).take_while(|(a, b)| a == b).count().min(prompt.len().saturating_sub(1));
        self.cache.truncate(known)?;
        self.stored.truncate(known);
        let new = prompt.len() - known;
        self.read(prompt)?;
        let (mut count, mut answer_begin, ahead) = (0, begin, self.pool.is_some());
        while count < max {
            let seen = &self.seen[count % 2];
            seen.copy_non_blocking_(&self.token)?;
            let has_next = count + 1 < max;
            if ahead && has_next {
                self.step()?; // before the wait for the last token; one step too many after the end of the answer
            }
            let token = self.seen[count % 2].item::<i64>()?;
            if count == 0 {
                answer_begin = Instant::now();
            }
            count += 1;
            if !take(token)? {
                break;
            }
            self.stored.push(token);
            if !ahead && has_next {
                self.step()?;
            }
        }
        self.stored.truncate(self.cache.len());
        let prompt = (new, answer_begin - begin);
        Ok(Report { prompt, answer: (count.saturating_sub(1), answer_begin.elapsed()) })
    }

    /// Computes the prompt behind the stored tokens, in chunks, and samples the next token.
    fn read(&mut self, prompt: &[i64]) -> Outcome {
        let device = self.model.device();
        self.history = match self.sampler.repetition {
            1.0 => None,
            _ => Some(History::new(&Tensor::from_slice(prompt, [1, prompt.len()], device)?, 64)?),
        };
        self.graph = None; // it may use the history of the last answer
        let mut last = None;
        for chunk in prompt[self.stored.len()..].chunks(CHUNK) {
            last = Some(self.states(chunk)?.select(1, -1)?);
            self.stored.extend(chunk);
        }
        let last = last.ok_or("the prompt has no tokens")?;
        Ok(self.sample(&last)?)
    }

    /// Computes the states of tokens and stores their keys and values.
    fn states(&mut self, tokens: &[i64]) -> claystone::Result<Tensor> {
        self.cache.reserve(tokens.len())?;
        self.model.states(&Tensor::from_slice(tokens, [1, tokens.len()], self.model.device())?, &self.cache)
    }

    /// Computes the logits after each token of a conversation's first prompt: `[tokens, vocabulary]` on the CPU.
    pub fn logits(&mut self, prompt: &[i64]) -> claystone::Result<Tensor> {
        let rows = |chunk: &[i64]| self.model.logits(&self.states(chunk)?.squeeze(0)?)?.to_device(Device::Cpu);
        let logits = Tensor::cat(&prompt.chunks(CHUNK).map(rows).collect::<claystone::Result<Vec<_>>>()?, 0);
        self.cache.truncate(0)?;
        logits
    }

    /// Samples the token after some states.
    fn sample(&self, states: &Tensor) -> claystone::Result<()> {
        let next = self.sampler.sample(&self.model.logits(states)?, self.history.as_ref())?;
        self.history.iter().try_for_each(|history| history.push(&next))?;
        self.token.copy_(&next.unsqueeze(0)?).map(drop)
    }

    /// Replaces the last token by the next.
    fn step(&mut self) -> claystone::Result<()> {
        let moved = self.cache.reserve(1)?;
        if moved {
            self.graph = None;
        }
        let step = || self.sample(&self.model.states(&self.token, &self.cache)?.select(1, -1)?);
        let Some(pool) = &self.pool else { return step() };
        if self.graph.is_none() {
            self.graph = Some(Graph::capture_in(pool, step)?.0);
        }
        self.graph.as_ref().map_or(Ok(()), Graph::replay)
    }

    /// Returns the number of commands of the captured step.
    pub fn commands(&self) -> Option<usize> {
        self.graph.as_ref().map(Graph::commands)
    }
}

/// Answers the prompt, or every line of the standard input. Returns the last answer.
pub fn run(args: &Args) -> Outcome<String> {
    manual_seed(args.seed);
    let profiler = args.profile.as_ref().map(|_| Profiler::start()).transpose()?;
    let info = args.device.info()?;
    eprintln!("device {}: {} ({} compute units)", args.device, info.name.trim(), info.compute_units);
    // SAFETY: the file must not be changed while the program runs, as for all programs that map their weights.
    let file = Gguf::new(unsafe { SharedFile::open(&args.model)? })?;
    let tokenizer = Tokenizer::new(&file)?;
    let model = Model::load(&file, (args.dtype, args.device))?;
    let &Args { temperature, top_k, top_p, min_p, repetition, .. } = args;
    let sampler = Sampler { temperature, top_k, top_p, min_p, repetition };
    let limit = args.context.unwrap_or(model.sizes.context).min(model.sizes.context);
    let mut session = Session::new(&model, sampler, args.cache, limit)?;
    let template = match file.get("tokenizer.chat_template") {
        Some(MetaValue::Str(template)) => Some(template),
        _ => Some(template::CHATML).filter(|_| tokenizer.has("<|im_start|>")),
    };
    let mut answer = |prompt: &str| -> Outcome<String> {
        let prompt = tokenizer.encode(prompt)?;
        let room = limit.saturating_sub(prompt.len());
        if room == 0 {
            return Err(format!("{} tokens are too many for a context of {limit}", prompt.len()).into());
        }
        if let Some(file) = &args.logits {
            io::write_npy(file, &session.logits(&prompt)?)?;
        }
        let (mut stream, mut text) = (TextStream::new(&tokenizer), String::new());
        let mut show = |part: String| {
            text.push_str(&part);
            stdout().write_all(part.as_bytes()).and_then(|()| stdout().flush())
        };
        let report = session.answer(&prompt, args.tokens.min(room), |token| {
            let goes_on = !tokenizer.is_end(token);
            if goes_on {
                show(stream.push(token)?)?;
            }
            Ok(goes_on)
        })?;
        show(stream.finish()?)?;
        println!();
        let rate =
            |(tokens, time): (usize, Duration)| format!("{tokens} tokens, {:.1}/s", tokens as f64 / time.as_secs_f64());
        eprintln!("prompt: {}; answer: {}", rate(report.prompt), rate(report.answer));
        Ok(text)
    };
    let mut last = String::new();
    if args.raw {
        last = answer(args.prompt.as_deref().unwrap_or_default())?;
    } else {
        let template = template.ok_or("the file has no template of chats: use --raw")?;
        let system = args.system.iter().map(|text| Message { role: "system", content: text.clone() });
        let mut messages: Vec<Message> = system.collect();
        let lines = args.prompt.is_none().then(|| stdin().lines()).into_iter().flatten();
        for line in args.prompt.clone().map(Ok).into_iter().chain(lines) {
            messages.push(Message { role: "user", content: line? });
            last = answer(&template::render(template, &messages, &tokenizer.bounds)?)?;
            messages.push(Message { role: "assistant", content: last.clone() });
        }
    }
    if let (Some(profiler), Some(file)) = (profiler, &args.profile) {
        profiler.stop().save(file)?;
    }
    let mib = |bytes: usize| format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64);
    let reserved = args.device.memory_stats()?.reserved_bytes.peak;
    let (weights, cache) = (mib(model.nbytes()), mib(session.cache_bytes()));
    eprintln!("weights {weights}, cache {cache}, peak of reserved memory {}", mib(reserved as usize));
    Ok(last)
}

fn main() -> Outcome {
    no_grad(|| run(&Args::parse())).map(drop)
}
