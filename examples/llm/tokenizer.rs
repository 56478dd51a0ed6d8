//! The tokenizer that a GGUF file describes, built for the crate `tokenizers`.

use claystone::io::gguf::{Gguf, MetaValue};
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::Outcome;

/// The words of Llama 3 and Qwen2, inside which bytes are merged. The two differ in the number of digits of a word.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The type of control tokens, such as the end of a turn.
const CONTROL: i64 = 3;

/// The type of tokens that are added to those of the encoding.
const USER_DEFINED: i64 = 4;

/// Names of tokens that end an answer, for files that only name one such token.
const ENDS: [&str; 5] = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"];

/// The number of tokens after which a text is shown even if it ends with bytes that are not UTF-8. A character has at most 4 bytes.
const MAX_PENDING_TOKENS: usize = 4;

/// Converts texts to tokens and tokens to texts.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The token that every prompt begins with, if the model was trained so.
    first: Option<u32>,
    ends: Vec<i64>,
    /// The texts of the tokens that begin and end a sequence, for templates.
    pub bounds: [String; 2],
}

impl Tokenizer {
    /// Builds the tokenizer of a file.
    pub fn new(file: &Gguf) -> Outcome<Tokenizer> {
        let tokens = texts(file, "tokenizer.ggml.tokens")?;
        let types: Vec<i64> = match file.get("tokenizer.ggml.token_type") {
            Some(MetaValue::Array(types)) => types.iter().map(|kind| integer(kind).unwrap_or(0)).collect(),
            _ => Vec::new(),
        };
        let model = file.str("tokenizer.ggml.model")?;
        let pre = file.str("tokenizer.ggml.pre").unwrap_or("gpt-2");
        let (mut inner, begins) = match model {
            "gpt2" => byte_level(file, &tokens, pre)?,
            "llama" => sentence_piece(file, &tokens)?,
            _ => return Err(format!("the tokenizer {model} is not supported, only gpt2 and llama").into()),
        };
        let added = |kind: i64, special: bool| {
            let tokens = tokens.iter().zip(&types).filter(move |&(_, &of)| of == kind);
            tokens.map(move |(&token, _)| AddedToken::from(token, special).normalized(false)).collect::<Vec<_>>()
        };
        inner.add_special_tokens(added(CONTROL, true))?;
        inner.add_tokens(added(USER_DEFINED, false))?;

        let id = |name: &str| file.u32(&format!("tokenizer.ggml.{name}_token_id")).ok();
        let [begin, end] = ["bos", "eos"].map(id);
        let named = ENDS.into_iter().filter_map(|name| inner.token_to_id(name));
        let ends = named.chain(["eos", "eot", "eom"].into_iter().filter_map(id)).map(i64::from).collect();
        let text = |id: Option<u32>| id.and_then(|id| inner.id_to_token(id)).unwrap_or_default();
        let bounds = [begin, end].map(text);
        let first = begin.filter(|_| file.bool("tokenizer.ggml.add_bos_token").unwrap_or(begins));
        Ok(Tokenizer { inner, first, ends, bounds })
    }

    /// Returns the tokens of a text. Names of control tokens in the text become these tokens.
    pub fn encode(&self, text: &str) -> Outcome<Vec<i64>> {
        let encoding = self.inner.encode_fast(text, false)?;
        let tokens = encoding.get_ids();
        let first = self.first.filter(|first| tokens.first() != Some(first));
        Ok(first.iter().chain(tokens).copied().map(i64::from).collect())
    }

    /// Returns the text of some tokens, without control tokens. Bytes that are not UTF-8 become replacement characters.
    pub fn decode(&self, tokens: &[i64]) -> Outcome<String> {
        let tokens: Vec<u32> = tokens.iter().filter_map(|&token| token.try_into().ok()).collect();
        self.inner.decode(&tokens, true)
    }

    /// True if a token ends an answer.
    pub fn is_end(&self, token: i64) -> bool {
        self.ends.contains(&token)
    }

    /// True if a control token has this name.
    pub fn has(&self, name: &str) -> bool {
        self.inner.token_to_id(name).is_some()
    }
}

/// Decodes tokens one by one.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens that end inside a character.
    pending: Vec<i64>,
}

impl TextStream<'_> {
    pub fn new(tokenizer: &Tokenizer) -> TextStream<'_> {
        TextStream { tokenizer, pending: Vec::new() }
    }

    /// Adds a token, and returns the text that is complete.
    pub fn push(&mut self, token: i64) -> Outcome<String> {
        self.pending.push(token);
        let text = self.tokenizer.decode(&self.pending)?;
        if text.ends_with('\u{fffd}') && self.pending.len() < MAX_PENDING_TOKENS {
            return Ok(String::new());
        }
        self.pending.clear();
        Ok(text)
    }

    /// Returns the text of tokens that end inside a character.
    pub fn finish(self) -> Outcome<String> {
        self.tokenizer.decode(&self.pending)
    }
}

/// Byte-pair encoding as in GPT-2, and whether prompts begin with a token of their own by default.
fn byte_level(file: &Gguf, tokens: &[&str], pre: &str) -> Outcome<(tokenizers::Tokenizer, bool)> {
    let vocabulary = vocabulary(tokens);
    let merges = texts(file, "tokenizer.ggml.merges")?.into_iter().map(|merge| {
        let (left, right) = merge.split_once(' ').ok_or_else(|| format!("the merge {merge:?} is not of two tokens"))?;
        match vocabulary.contains_key(&[left, right].concat()) {
            true => Ok((left.to_owned(), right.to_owned())),
            false => Err(format!("the merge {merge:?} does not give a token")),
        }
    });
    let merges = merges.collect::<Result<_, String>>()?;
    let begins = matches!(pre, "llama-bpe" | "llama3" | "llama-v3");
    let split = |digits: &str| -> Outcome<[PreTokenizerWrapper; 2]> {
        let words = SplitPattern::Regex(WORDS.replace("DIGITS", digits));
        let words = Split::new(words, SplitDelimiterBehavior::Isolated, false)?;
        Ok([words.into(), ByteLevel::new(false, false, false).into()])
    };
    let gpt2 = ByteLevel::new(false, false, true).into();
    let pre = match pre {
        _ if begins => split("{1,3}")?.into(),
        "qwen2" | "deepseek-r1-qwen" => split("")?.into(),
        "smollm" => vec![Digits::new(true).into(), gpt2],
        "gpt-2" => vec![gpt2],
        _ => return Err(format!("words of {pre} are not known, only of llama-bpe, qwen2, smollm and gpt-2").into()),
    };
    let model = BPE::builder().vocab_and_merges(vocabulary, merges).ignore_merges(begins).build()?;
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_pre_tokenizer(Some(Sequence::new(pre)));
    inner.with_decoder(Some(ByteLevel::default()));
    Ok((inner, begins))
}

/// Byte-pair encoding of characters as in SentencePiece. The file has no merges, but scores: of two neighbours the pair whose token has the
/// highest score is merged first.
fn sentence_piece(file: &Gguf, tokens: &[&str]) -> Outcome<(tokenizers::Tokenizer, bool)> {
    let vocabulary = vocabulary(tokens);
    let scores: Vec<f64> =
        file.array("tokenizer.ggml.scores")?.iter().map(|score| number(score).unwrap_or(0.0)).collect();
    let mut ranked: Vec<(&str, f64)> = tokens.iter().copied().zip(scores).collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    let pairs = ranked.iter().flat_map(|(token, _)| token.char_indices().skip(1).map(|(i, _)| token.split_at(i)));
    let known = pairs.filter(|(left, right)| vocabulary.contains_key(*left) && vocabulary.contains_key(*right));
    let merges = known.map(|(left, right)| (left.to_owned(), right.to_owned())).collect();
    let mut model = BPE::builder().vocab_and_merges(vocabulary, merges).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = file.u32("tokenizer.ggml.unknown_token_id").ok().and_then(|id| tokens.get(id as usize)) {
        model = model.unk_token((*unknown).to_owned());
    }
    let mut inner = tokenizers::Tokenizer::new(model.build()?);
    let mut normalizers = Vec::new();
    if file.bool("tokenizer.ggml.add_space_prefix").unwrap_or(true) {
        normalizers.push(Prepend::new("\u{2581}".into()).into());
    }
    normalizers.push(Replace::new(" ", "\u{2581}")?.into());
    inner.with_normalizer(Some(Normalizers::new(normalizers)))?;
    let spaces = Replace::new("\u{2581}", " ")?;
    inner.with_decoder(Some(Decoders::new(vec![spaces.into(), ByteFallback::new().into(), Fuse::new().into()])));
    Ok((inner, true))
}

fn vocabulary(tokens: &[&str]) -> Vocab {
    (0..).zip(tokens).map(|(id, &token)| (token.to_owned(), id)).collect()
}

/// Returns the texts of an array.
fn texts<'a>(file: &'a Gguf, key: &str) -> Outcome<Vec<&'a str>> {
    let text = |value| if let MetaValue::Str(text) = value { Some(text) } else { None };
    let texts: Option<Vec<&str>> = file.array(key)?.iter().map(text).collect();
    texts.ok_or_else(|| format!("{key} is not an array of texts").into())
}

fn integer(value: MetaValue) -> Option<i64> {
    if let MetaValue::Int(n) = value { n.try_into().ok() } else { None }
}

fn number(value: MetaValue) -> Option<f64> {
    if let MetaValue::Float(x) = value { Some(x) } else { None }
}
