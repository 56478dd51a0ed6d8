//! Attention over a cache, by its definition.

use half::f16;

use super::values::{Memory, read_floats, storage_index, write};
use crate::backend::problem::cached::{CacheRows, CacheType, CachedAttention};
use crate::{Error, Result, Scalar};

pub(super) fn attend(a: &CachedAttention) -> Result<()> {
    let [batch, heads, capacity, width] = a.cache[0].sizes();
    let positions = read_floats(a.position)?;
    let start = |b: usize| positions[[b % a.position.numel()].as_slice()] as i64;
    let outside = |b: usize| start(b) < 0 || start(b) as usize + a.len() > capacity;
    if let Some(b) = (0..batch).find(|&b| outside(b)) {
        let index = if start(b) < 0 { start(b) } else { start(b) + a.len() as i64 - 1 };
        return Err(Error::IndexOutOfRange { op: a.op, index, size: capacity });
    }
    for (rows, cache) in a.rows.into_iter().zip(a.cache) {
        let (values, mut memory) = (read_floats(rows)?, Memory::read(&cache.tensor)?);
        for at in 0..batch * heads * a.len() {
            let [b, h, i] = [at / a.len() / heads, at / a.len() % heads, at % a.len()];
            let row: Vec<f32> = (0..width).map(|c| values[[b, h, i, c].as_slice()] as f32).collect();
            let to = storage_index(&cache.tensor.layout, &[b, h, start(b) as usize + i, 0]);
            store(cache.kind, &row, |c, value| memory.set(to + c as isize, value));
        }
        memory.write_to(&cache.tensor)?;
    }
    let Some([q, out]) = a.attend else { return Ok(()) };
    let [keys, values] = a.cache.map(load);
    let (q, keys, values, mut results) = (read_floats(q)?, keys?, values?, Vec::new());
    for at in 0..out.numel() / width {
        let [h, i] = [at / a.len() % (heads * a.group()), at % a.len()];
        let b = at / a.len() / heads / a.group();
        let head = (b * heads + h / a.group()) * capacity;
        let at = |j: usize, c: usize| (head + j) * width + c;
        let score = |j: usize| {
            let dot: f64 = (0..width).map(|c| keys[at(j, c)] * q[[b, h, i, c].as_slice()]).sum();
            dot * a.scale
        };
        let scores: Vec<f64> = (0..=start(b) as usize + i).map(score).collect();
        let top = scores.iter().copied().filter(|x| !x.is_nan()).fold(f64::NEG_INFINITY, f64::max);
        let base = if top == f64::NEG_INFINITY { 0.0 } else { top };
        let powers: Vec<f64> = scores.iter().map(|x| (x - base).exp()).collect();
        let total: f64 = powers.iter().sum();
        for c in 0..width {
            let sum: f64 = powers.iter().enumerate().map(|(j, p)| p * values[at(j, c)]).sum();
            results.push(if total == 0.0 { 0.0 } else { sum / total });
        }
    }
    write(out, results)
}

/// Calls `set` with the index and the value of each element that represents the row.
fn store(kind: CacheType, row: &[f32], mut set: impl FnMut(usize, Scalar)) {
    if kind != CacheType::Q8_0 {
        return row.iter().enumerate().for_each(|(c, &x)| set(c, Scalar::Float(x.into())));
    }
    for (block, x) in row.chunks(32).enumerate() {
        let d = x.iter().fold(0f32, |top, x| top.max(x.abs())) / 127.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let quants = x.iter().map(|x| (x * inverse).round() as i8 as u8);
        let bytes = f16::from_f32(d).to_le_bytes().into_iter().chain(quants);
        bytes.enumerate().for_each(|(i, byte)| set(block * 34 + i, Scalar::Int(byte.into())));
    }
}

/// Returns the values of all rows.
fn load(cache: &CacheRows) -> Result<Vec<f64>> {
    let stored: Vec<f64> = read_floats(&cache.tensor)?.into_iter().collect();
    Ok(match cache.kind {
        CacheType::Q8_0 => {
            let bytes: Vec<u8> = stored.into_iter().map(|byte| byte as u8).collect();
            let values = |block: &[u8]| {
                let d = f16::from_le_bytes([block[0], block[1]]).to_f64();
                block[2..].iter().map(|&q| f64::from(q as i8) * d).collect::<Vec<_>>()
            };
            bytes.chunks(34).flat_map(values).collect()
        }
        _ => stored,
    })
}
