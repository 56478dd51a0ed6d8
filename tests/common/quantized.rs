//! Quantised weights for tests of kernels.

use claystone::Device;
use claystone::quantized::{GroupOffset, QuantFormat, QuantizedTensor};

/// The names of formats of each kind.
pub const FORMATS: [&str; 16] = [
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "g4_32",
    "g4_128_zero",
    "g4_row_min",
    "g8_64",
    "g8_row_zero",
    "g8_32_min",
];

/// Returns a weight `[n, k]` of arbitrary integers, with scales of at most 0.02.
pub fn random_weight(format: QuantFormat, n: usize, k: usize, device: Device) -> QuantizedTensor {
    let mut bytes: Vec<u8> = (0..n * format.row_bytes(k).unwrap()).map(|i| (i * 7919 % 1013) as u8).collect();
    let halves: &[usize] = match format {
        QuantFormat::Q2K => &[80, 82],
        QuantFormat::Q3K => &[108],
        QuantFormat::Q6K => &[208],
        QuantFormat::Q8_0 | QuantFormat::Q4_0 | QuantFormat::Q5_0 => &[0],
        QuantFormat::Grouped { offset: GroupOffset::None, .. } => &[0],
        _ => &[0, 2],
    };
    for (i, block) in bytes.chunks_exact_mut(format.block_bytes(k)).enumerate() {
        for (j, &at) in halves.iter().enumerate() {
            // An f16 of about 0.01, or a zero point.
            let zero = j == 1 && matches!(format, QuantFormat::Grouped { offset: GroupOffset::Zero, .. });
            let number = if zero { i as u16 % 16 } else { (0x2000 + (i * 37 % 256) as u16) | ((i as u16 % 2) << 15) };
            block[at..][..2].copy_from_slice(&number.to_le_bytes());
        }
    }
    QuantizedTensor::from_bytes(&bytes, [n, k], format, device).unwrap()
}
