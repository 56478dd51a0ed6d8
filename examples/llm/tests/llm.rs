//! Tests of the language models on every device, with two tiny models that `tests/data/llm.py` writes, and of tokenizers and templates.

#[allow(dead_code)]
#[path = "../main.rs"]
mod llm;

#[path = "../../../tests/common/mod.rs"]
mod tests_common;

use std::fs;
use std::path::PathBuf;

use clap::Parser;
use claystone::io::{self, gguf::Gguf};
use claystone::nn::Sampler;
use claystone::ops::CacheType;
use claystone::storage::SharedFile;
use claystone::{DType, Device, Generator, Tensor, no_grad, with_generator};

use llm::model::Model;
use llm::template::{CHATML, Message, date, render};
use llm::tokenizer::{TextStream, Tokenizer};
use llm::{Args, Session};
use tests_common::gguf::{GgufWriter, array, text};
use tests_common::{each_device, in_own_process, values};

const GREEDY: Sampler = Sampler { temperature: 0.0, top_k: 40, top_p: 0.95, min_p: 0.05, repetition: 1.0 };

fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/llm")).join(name)
}

fn open(path: PathBuf) -> Gguf {
    // SAFETY: no process writes to the files of tests.
    Gguf::new(unsafe { SharedFile::open(path).unwrap() }).unwrap()
}

fn load(name: &str, device: Device) -> Model {
    Model::load(&open(path(&format!("{name}.gguf"))), (DType::F32, device)).unwrap()
}

fn tokens(name: &str) -> Vec<i64> {
    io::read_npy(path(name), Device::Cpu).unwrap().to_vec().unwrap()
}

/// Logits must equal NumPy's, for a whole text at once, in two pieces, and token by token.
#[test]
fn logits_match_numpy() {
    each_device(|device| {
        // The plain weights of the second model are f16, so that activations are rounded to f16.
        for (name, tolerance) in [("llama", 1e-3), ("qwen2", 5e-3)] {
            let (model, tokens) = (load(name, device), tokens(&format!("{name}.tokens.npy")));
            let wanted = values(&io::read_npy(path(&format!("{name}.logits.npy")), Device::Cpu).unwrap());
            for pieces in [vec![21], vec![9, 12], vec![1; 21], vec![16, 1, 1, 1, 1, 1]] {
                let mut cache = model.cache(CacheType::F32, 64).unwrap();
                let (mut rest, mut logits) = (&tokens[..], Vec::new());
                for &len in &pieces {
                    cache.reserve(len).unwrap();
                    let piece = Tensor::from_slice(&rest[..len], [1, len], device).unwrap();
                    let states = no_grad(|| model.states(&piece, &cache)).unwrap();
                    logits.extend(values(&no_grad(|| model.logits(&states)).unwrap()));
                    rest = &rest[len..];
                }
                for (i, (row, wanted)) in logits.chunks(64).zip(wanted.chunks(64)).enumerate() {
                    let (low, high) = wanted.iter().fold((f64::MAX, f64::MIN), |(l, h), &x| (l.min(x), h.max(x)));
                    let error = row.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    let relative = error / (high - low);
                    assert!(
                        relative < tolerance,
                        "{relative} after token {i} of {name} in pieces {pieces:?} on {device}"
                    );
                }
            }
        }
    });
}

/// Greedy answers must equal NumPy's, also those that continue a conversation and those of a cache that grows.
#[test]
fn greedy_answers_match_numpy() {
    each_device(|device| {
        for name in ["llama", "qwen2"] {
            let (model, prompt) = (load(name, device), &tokens(&format!("{name}.tokens.npy"))[..5]);
            let wanted = tokens(&format!("{name}.greedy.npy"));
            let mut session = Session::new(&model, GREEDY, CacheType::F16, 512).unwrap();
            let mut answer = |prompt: &[i64], max: usize| {
                let mut answer = Vec::new();
                let report = no_grad(|| {
                    session.answer(prompt, max, |token| {
                        answer.push(token);
                        Ok(true)
                    })
                });
                (answer, report.unwrap().prompt.0)
            };
            assert_eq!(answer(prompt, 12), (wanted.clone(), 5), "{name} on {device}");
            let longer = [prompt, &wanted[..6]].concat();
            assert_eq!(answer(&longer, 6), (wanted[6..].to_vec(), 1), "only the last token is new, {name} on {device}");
            let (long, _) = answer(prompt, 290);
            assert_eq!((long.len(), &long[..12]), (290, &wanted[..]), "{name} on {device}");
            let longer = [prompt, &long[..280]].concat();
            let mut again = Session::new(&model, GREEDY, CacheType::F16, 512).unwrap();
            let mut tail = Vec::new();
            let take = |token| {
                tail.push(token);
                Ok(tail.len() < 10)
            };
            no_grad(|| again.answer(&longer, 100, take)).unwrap();
            assert_eq!(tail, long[280..], "the prompt is computed in two chunks, {name} on {device}");
            assert!(no_grad(|| again.answer(&[], 1, |_| Ok(true))).is_err());
        }
    });
}

/// The numbers of launches determine the speed of small models. Counted for a step of two layers.
#[test]
fn a_step_has_few_commands() {
    for device in tests_common::opencl() {
        let model = load("llama", device);
        let mut session = Session::new(&model, GREEDY, CacheType::F16, 64).unwrap();
        no_grad(|| session.answer(&[1, 2], 3, |_| Ok(true))).unwrap();
        let commands = session.commands().unwrap();
        assert!(commands <= 31, "{commands} commands"); // more than usual: the queries, keys and values of a layer have three formats
    }
}

#[test]
fn samples_depend_only_on_the_seed() {
    each_device(|device| {
        let model = load("llama", device);
        let sampler = Sampler { temperature: 1.5, repetition: 1.2, ..GREEDY };
        let draw = |seed| {
            let mut session = Session::new(&model, sampler, CacheType::Q8_0, 64).unwrap();
            let mut answer = Vec::new();
            let take = |token| {
                answer.push(token);
                Ok(true)
            };
            with_generator(&Generator::new(seed), || no_grad(|| session.answer(&[5, 6, 7], 20, take))).unwrap();
            answer
        };
        let (first, same, other) = (draw(1), draw(1), draw(2));
        assert_eq!(first, same, "on {device}");
        assert_ne!(first, other, "on {device}");
        assert!(first.len() == 20 && first.iter().all(|token| (0..64).contains(token)));
    });
}

#[test]
fn answers_are_printed() {
    // The default random generator is shared by the process.
    if !in_own_process("answers_are_printed") {
        return;
    }
    let run = |words: &str, device: Device, prompt: &str| {
        let (model, device) = (path("llama.gguf").display().to_string(), device.to_string());
        let more = ["--model", &model, "--device", &device, "--prompt", prompt];
        no_grad(|| llm::run(&Args::parse_from(["llm"].into_iter().chain(words.split_whitespace()).chain(more))))
    };
    let wanted = run("--temperature 0 --tokens 20", Device::Cpu, "the hello and?").unwrap();
    assert!(!wanted.is_empty());
    each_device(|device| {
        assert_eq!(run("--temperature 0 --tokens 20", device, "the hello and?").unwrap(), wanted);
        let sampled = run("--raw --tokens 9 --cache q8_0 --dtype f16 --repetition 1.1", device, "hello").unwrap();
        assert!(sampled.len() <= 9 * 14, "{sampled}");
        let (folder, prompt) = (tempfile::tempdir().unwrap(), "hello".repeat(50));
        let file = folder.path().join("logits.npy");
        let words = format!("--raw --temperature 0 --tokens 1 --logits {}", file.display());
        let first = run(&words, device, &prompt).unwrap();
        let tokenizer = Tokenizer::new(&open(path("llama.gguf"))).unwrap();
        let logits = io::read_npy(file, Device::Cpu).unwrap();
        assert_eq!(logits.shape().dims(), [tokenizer.encode(&prompt).unwrap().len(), 64]);
        let last = logits.select(0, -1).unwrap().argmax(0, false).unwrap().item::<i64>().unwrap();
        let mut stream = TextStream::new(&tokenizer);
        assert_eq!(stream.push(last).unwrap() + &stream.finish().unwrap(), first);
    });
    let error = run("--context 8", Device::Cpu, "the hello and").unwrap_err().to_string();
    assert!(error.contains("too many for a context of 8"), "{error}");
    let missing = llm::run(&Args::parse_from(["llm", "--model", "/no/such/file", "--device", "cpu"]));
    assert!(missing.unwrap_err().to_string().contains("/no/such/file"));
}

/// A file with a tokenizer only. `kinds` has the types of the tokens.
fn vocabulary(model: &str, pre: &str, tokens: &[&str], kinds: &[i32], merges: &[&str]) -> GgufWriter {
    let texts = |texts: &[&str]| array(8, &texts.iter().map(|t| text(t)).collect::<Vec<_>>());
    let kinds: Vec<Vec<u8>> = kinds.iter().map(|kind| kind.to_le_bytes().to_vec()).collect();
    GgufWriter::new()
        .pair("tokenizer.ggml.model", 8, &text(model))
        .pair("tokenizer.ggml.pre", 8, &text(pre))
        .pair("tokenizer.ggml.tokens", 9, &texts(tokens))
        .pair("tokenizer.ggml.token_type", 9, &array(5, &kinds))
        .pair("tokenizer.ggml.merges", 9, &texts(merges))
}

fn tokenizer(file: &GgufWriter) -> llm::Outcome<Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, file.finish()).unwrap();
    Tokenizer::new(&open(path))
}

/// Tokens of bytes as in the files: printable bytes are themselves.
fn bytes() -> Vec<String> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=255u8).filter(|&b| !printable(b)).zip(256u32..).collect::<std::collections::HashMap<u8, u32>>();
    (0..=255u8).map(|b| char::from_u32(others.get(&b).copied().unwrap_or(b.into())).unwrap().to_string()).collect()
}

#[test]
fn byte_level_tokenizers_split_words() {
    let bytes = bytes();
    let more = ["<end>", "12", "123", "1234", "\u{120}a", "ab", "\u{120}ab", "'s", "S", "<user>"];
    let tokens: Vec<&str> = bytes.iter().map(String::as_str).chain(more).collect();
    let mut kinds = vec![1; tokens.len()];
    (kinds[256], kinds[265]) = (3, 4);
    let merges = ["1 2", "12 3", "123 4", "\u{120} a", "a b", "\u{120}a b", "' s"];
    let built = |pre: &str| tokenizer(&vocabulary("gpt2", pre, &tokens, &kinds, &merges));
    let encode = |pre: &str, text: &str| built(pre).unwrap().encode(text).unwrap();
    let [space, one, two] = [32, 49, 50];
    assert_eq!(encode("gpt-2", " ab 1234's"), [262, space, 259, 263]);
    assert_eq!(encode("llama-bpe", "1234 ab"), [258, 52, 262]);
    assert_eq!(encode("smollm", "12 ab"), [one, two, 262]);
    assert_eq!(encode("qwen2", "12 ab"), [one, two, 262]);
    assert_eq!(encode("qwen2", "a<end>ab<user>"), [97, 256, 261, 265]);
    for pre in ["gpt-2", "llama-bpe", "smollm", "qwen2"] {
        let tokenizer = built(pre).unwrap();
        for text in ["hello world", "naïve: ¿日本?\n\t x  ", "I'M 12345,\r\n\r\n 'Tis  ab", ""] {
            let tokens = tokenizer.encode(text).unwrap();
            assert_eq!(tokenizer.decode(&tokens).unwrap(), text, "{pre}");
            let mut stream = TextStream::new(&tokenizer);
            let parts: Vec<String> = tokens.iter().map(|&token| stream.push(token).unwrap()).collect();
            assert!(parts.iter().all(|part| !part.contains('\u{fffd}')), "{parts:?}");
            assert_eq!(parts.concat(), text, "{pre}");
        }
        assert_eq!(tokenizer.decode(&[97, 256, 265]).unwrap(), "a<user>"); // without control tokens
    }
    let tokenizer = built("qwen2").unwrap();
    let mut stream = TextStream::new(&tokenizer);
    assert_eq!([0xe6, 0x97].map(|byte| stream.push(byte).unwrap()), ["", ""]);
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");

    let error = |file: GgufWriter| tokenizer_error(&file);
    assert!(error(vocabulary("gpt2", "dots", &tokens, &kinds, &merges)).contains("dots"));
    assert!(error(vocabulary("bert", "", &tokens, &kinds, &merges)).contains("bert"));
    assert!(error(vocabulary("gpt2", "gpt-2", &tokens, &kinds, &["ab"])).contains("two tokens"));
    assert!(error(vocabulary("gpt2", "gpt-2", &tokens, &kinds, &["123 123"])).contains("does not give a token"));
    assert!(error(GgufWriter::new()).contains("tokenizer.ggml.tokens"));
}

fn tokenizer_error(file: &GgufWriter) -> String {
    tokenizer(file).err().map_or_else(String::new, |e| e.to_string())
}

#[test]
fn sequences_begin_and_end_with_tokens() {
    let names = ["<bos>", "<eos>", "a", "<|eot_id|>"];
    let file = || {
        let file = vocabulary("gpt2", "gpt-2", &names, &[3, 3, 1, 3], &[]);
        let id = |n: u32| n.to_le_bytes();
        file.pair("tokenizer.ggml.bos_token_id", 4, &id(0)).pair("tokenizer.ggml.eos_token_id", 4, &id(1))
    };
    let plain = tokenizer(&file()).unwrap();
    assert_eq!(plain.encode("a").unwrap(), [2]);
    assert_eq!(plain.bounds, ["<bos>", "<eos>"]);
    assert_eq!([0, 1, 2, 3].map(|token| plain.is_end(token)), [false, true, false, true]);
    let with_first = tokenizer(&file().pair("tokenizer.ggml.add_bos_token", 7, &[1])).unwrap();
    assert_eq!(with_first.encode("a").unwrap(), [0, 2]);
    assert_eq!(with_first.encode("<bos>a").unwrap(), [0, 2]);
}

#[test]
fn sentence_piece_tokenizers_merge_by_score() {
    let tokens =
        ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "\u{2581}", "a", "b", "ab", "\u{2581}a", "\u{2581}ab", "bb"];
    let scores = [0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -3.0, -4.0, -1.0f32];
    let mut kinds = [1; 12];
    kinds[..5].copy_from_slice(&[2, 3, 3, 6, 6]);
    let scores = array(6, &scores.map(|score| score.to_le_bytes().to_vec()));
    let id = |n: u32| n.to_le_bytes();
    let file = vocabulary("llama", "default", &tokens, &kinds, &[])
        .pair("tokenizer.ggml.scores", 9, &scores)
        .pair("tokenizer.ggml.unknown_token_id", 4, &id(0))
        .pair("tokenizer.ggml.bos_token_id", 4, &id(1));
    let tokenizer = tokenizer(&file).unwrap();
    // `bb` has the highest score, then `ab`.
    assert_eq!(tokenizer.encode("ab abb").unwrap(), [1, 10, 9, 11]);
    assert_eq!(tokenizer.encode("é").unwrap(), [1, 5, 3, 4]);
    assert_eq!(tokenizer.decode(&[1, 10, 9, 11, 5, 3, 4]).unwrap(), " ab abb é");
}

#[test]
fn templates_write_conversations() {
    let message = |role, content: &str| Message { role, content: content.into() };
    let chat = [message("user", " Hi "), message("assistant", "Yes?"), message("user", "1 < 2")];
    let bounds = ["<s>", "</s>"].map(String::from);
    let render = |template: &str| render(template, &chat, &bounds);
    let wanted = "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n1 < 2<|im_end|>\n\
        <|im_start|>assistant\n";
    assert_eq!(render(CHATML).unwrap(), wanted);
    // Blocks, slices, filters, undefined variables and methods as in the templates of Llama 3 and Qwen2.
    let llama3 = "{{- bos_token }}\n{%- if custom_tools is defined %}\n    {%- set tools = custom_tools %}\n{%- endif %}\n\
        {%- if messages[0]['role'] == 'system' %}\n    {%- set messages = messages[1:] %}\n{%- endif %}\n\
        {%- for message in messages %}\n    {{- '<' + message['role'] + '>' + message['content'] | trim + eos_token }}\n\
        {%- if message.tool_calls is defined and message.tool_calls %}!{% endif %}\n{%- endfor %}\n\
        {%- if add_generation_prompt %}\n    {{- '<assistant>' }}\n{%- endif %}\n";
    assert_eq!(render(llama3).unwrap(), "<s><user>Hi</s><assistant>Yes?</s><user>1 < 2</s><assistant>");
    let trimmed = "{% for message in messages %}\n    {% if loop.first %}\n{{ message.content.strip().split('i')[0] }}\n    {% endif %}\n\
        {% endfor %}\n";
    assert_eq!(render(trimmed).unwrap(), "H\n");
    assert!(
        render("{{ raise_exception('roles must alternate') }}").unwrap_err().to_string().contains("must alternate")
    );
    assert!(render("{% if %}").is_err());
    let year = render("{{ strftime_now('%Y') }}").unwrap();
    assert!(year.parse::<u32>().unwrap() >= 2025, "{year}");
    for (days, wanted) in
        [(0, "01 Jan 1970"), (11_016, "29 Feb 2000"), (11_017, "01 Mar 2000"), (20_453, "31 Dec 2025")]
    {
        assert_eq!(date("%d %b %Y", days), wanted);
    }
    assert_eq!(date("%B %m", 59), "March 03");
}
