//! GPT-2's byte-pair encoding. Pairs of symbols are merged in the order of `merges.txt`.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

/// A vocabulary, and the order in which pairs are merged.
pub struct Tokenizer {
    tokens: HashMap<String, i64>,
    names: HashMap<i64, String>,
    /// The line of each pair in `merges.txt`. The pair with the lowest line is merged first.
    ranks: HashMap<(String, String), usize>,
}

/// Returns the character that represents a byte in the files: the byte itself if it is printable, otherwise a character from 256 on.
pub fn character(byte: u8) -> char {
    let seen = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match seen(byte) {
        true => byte.into(),
        false => {
            char::from_u32(256 + (0..byte).filter(|&b| !seen(b)).count() as u32).expect("a letter of Latin Extended")
        }
    }
}

/// Cuts a text into words, inside which bytes are merged. A word is an English ending with an apostrophe; a run of letters, digits or
/// other characters, with an optional space before it; or a run of white space.
pub fn words(text: &str) -> Vec<&str> {
    let kind = |c: char| match c {
        _ if c.is_alphabetic() => 0,
        _ if c.is_numeric() => 1,
        _ if c.is_whitespace() => 2,
        _ => 3,
    };
    let (mut words, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let ending = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"].into_iter().find(|ending| rest.starts_with(ending));
        let body =
            rest.strip_prefix(' ').filter(|body| body.chars().next().is_some_and(|c| kind(c) != 2)).unwrap_or(rest);
        let of = body.chars().next().map_or(kind(first), kind);
        let end = body.find(|c| kind(c) != of).unwrap_or(body.len());
        let mut length = rest.len() - body.len() + end;
        if of == 2 && length < rest.len() {
            // The last white space before a word becomes part of the word.
            let last = rest[..length].chars().next_back().map_or(0, char::len_utf8);
            length = if length > last { length - last } else { length };
        }
        let (word, others) = rest.split_at(ending.map_or(length, str::len));
        words.push(word);
        rest = others;
    }
    words
}

impl Tokenizer {
    /// Loads `vocab.json` and `merges.txt` from a folder.
    pub fn load(folder: &Path) -> Result<Tokenizer, Box<dyn Error>> {
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))
        };
        let tokens: HashMap<String, i64> = serde_json::from_str(&read("vocab.json")?)?;
        let merges = read("merges.txt")?;
        let pairs = merges.lines().filter(|line| !line.starts_with("#version")).filter_map(|line| line.split_once(' '));
        let ranks = pairs.enumerate().map(|(rank, (a, b))| ((a.to_string(), b.to_string()), rank)).collect();
        let names = tokens.iter().map(|(name, &token)| (token, name.clone())).collect();
        Ok(Tokenizer { tokens, names, ranks })
    }

    /// Returns the numbers of the tokens of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, Box<dyn Error>> {
        let mut tokens = Vec::new();
        for word in words(text) {
            let mut parts: Vec<String> = word.bytes().map(|b| character(b).to_string()).collect();
            let rank = |pair: &[String]| self.ranks.get(&(pair[0].clone(), pair[1].clone())).copied();
            while let Some((_, i)) = (parts.windows(2).enumerate()).filter_map(|(i, p)| Some((rank(p)?, i))).min() {
                let merged = parts.remove(i + 1);
                parts[i].push_str(&merged);
            }
            for part in parts {
                tokens.push(*self.tokens.get(&part).ok_or_else(|| format!("{part:?} is not in the vocabulary"))?);
            }
        }
        Ok(tokens)
    }

    /// Returns the text of some tokens. Unknown tokens and invalid UTF-8 become replacement characters.
    pub fn decode(&self, tokens: &[i64]) -> String {
        let bytes: HashMap<char, u8> = (0..=255).map(|byte| (character(byte), byte)).collect();
        let names = tokens.iter().map(|token| self.names.get(token).map_or("\u{fffd}", String::as_str));
        let bytes: Vec<u8> = names
            .flat_map(str::chars)
            .flat_map(|c| bytes.get(&c).map_or_else(|| c.to_string().into_bytes(), |&b| vec![b]))
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
