//! The coordinates of interpolation in its input, in integer arithmetic, so that host and kernels compute the same elements.

use crate::{Error, Result, Tensor};

/// The source coordinates along one dim when `from` inputs are resized to `to` outputs. Output o has the coordinate `(scale * o +
/// shift) / unit`, which is clamped to at least 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Samples {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) scale: i64,
    pub(crate) shift: i64,
    pub(crate) unit: i64,
    pub(crate) linear: bool,
}

impl Samples {
    pub(crate) fn new(op: &'static str, mode: Interpolation, from: usize, to: usize) -> Result<Samples> {
        // All intermediate values below are at most twice this product.
        if (from as u128 + 1) * (to as u128 + 1) > (i64::MAX / 2) as u128 {
            return Err(Error::invalid(
                op,
                format!("sizes {from} and {to} are too large to interpolate between: use smaller ones"),
            ));
        }
        let (n, m) = (from as i64, to as i64);
        let (scale, shift, unit) = match mode {
            Interpolation::Nearest => (n, 0, m),
            Interpolation::NearestExact => (2 * n, n, 2 * m),
            Interpolation::Linear { align_corners: true } => (n - 1, 0, (m - 1).max(1)),
            Interpolation::Linear { align_corners: false } => (2 * n, n - m, 2 * m),
        };
        Ok(Samples { from, to, scale, shift, unit, linear: matches!(mode, Interpolation::Linear { .. }) })
    }

    /// Returns the identity map: output i reads input i.
    pub(crate) fn identity(n: usize) -> Samples {
        Samples { from: n, to: n, scale: 1, shift: 0, unit: 1, linear: false }
    }

    /// True if all coordinates, as multiples of `1 / unit`, fit in 31 bits.
    pub(crate) fn fits_32_bits(&self) -> bool {
        // All intermediate values are at most twice this product: see `new`.
        (self.from as u128 + 1) * (self.to as u128 + 1) < 1 << 29
    }

    /// Returns the inputs before and after the coordinate of output o, and the weight of the input after it.
    pub(crate) fn source(&self, o: usize) -> (usize, usize, f64) {
        let coordinate = (self.scale * o as i64 + self.shift).max(0);
        let low = (coordinate / self.unit) as usize;
        match self.linear {
            true => (low, (low + 1).min(self.from - 1), (coordinate % self.unit) as f64 / self.unit as f64),
            false => (low, low, 0.0),
        }
    }

    /// Returns the first output whose coordinate is at least k, or `to` if there is none.
    pub(crate) fn first_output_at(&self, k: usize) -> usize {
        match (k, self.scale) {
            (0, _) => 0,
            (_, 0) => self.to,
            _ => {
                let wanted = self.unit * k as i64 - self.shift;
                (wanted + self.scale - 1).div_euclid(self.scale).clamp(0, self.to as i64) as usize
            }
        }
    }

    /// Returns the range of outputs that read input j, as the first output and the end (exclusive).
    pub(crate) fn outputs_reading(&self, j: usize) -> (usize, usize) {
        (self.first_output_at(if self.linear { j.saturating_sub(1) } else { j }), self.first_output_at(j + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODES: [Interpolation; 4] = [
        Interpolation::Nearest,
        Interpolation::NearestExact,
        Interpolation::Linear { align_corners: false },
        Interpolation::Linear { align_corners: true },
    ];

    #[test]
    fn outputs_of_returns_the_outputs_that_read_an_input() {
        for mode in MODES {
            for (from, to) in (1..24).flat_map(|from| (1..24).map(move |to| (from, to))) {
                let samples = Samples::new("interpolate", mode, from, to).unwrap();
                for j in 0..from {
                    let reads = |o: &usize| {
                        let (low, high, _) = samples.source(*o);
                        low == j || high == j
                    };
                    let outputs: Vec<usize> = (0..to).filter(reads).collect();
                    let (first, end) = samples.outputs_reading(j);
                    assert_eq!((first..end).collect::<Vec<_>>(), outputs, "{mode:?} {from} {to} {j}");
                }
            }
        }
    }

    #[test]
    fn coordinates_match_the_definition_of_each_mode() {
        for mode in MODES {
            for (from, to) in [(1, 1), (1, 5), (5, 1), (4, 8), (8, 4), (7, 7), (13, 29), (29, 13), (1 << 20, 3)] {
                let samples = Samples::new("interpolate", mode, from, to).unwrap();
                for o in (0..to).step_by(to / 40 + 1) {
                    let (n, m, x) = (from as f64, to as f64, o as f64);
                    let coordinate = match mode {
                        Interpolation::Nearest => ((o * from) / to) as f64,
                        Interpolation::NearestExact => (((2 * o + 1) * from) / (2 * to)) as f64,
                        Interpolation::Linear { align_corners: true } => x * (n - 1.0) / (m - 1.0).max(1.0),
                        Interpolation::Linear { align_corners: false } => ((x + 0.5) * n / m - 0.5).max(0.0),
                    };
                    let (low, high, weight) = samples.source(o);
                    let error = (low as f64 + weight - coordinate).abs();
                    assert!(error < 1e-9 * (1.0 + coordinate), "{mode:?} {from} {to} {o}");
                    assert!(low < from && (0.0..1.0).contains(&weight));
                    assert_eq!(high, if samples.linear { (low + 1).min(from - 1) } else { low });
                }
            }
        }
        assert!(Samples::new("interpolate", Interpolation::Nearest, 3, usize::MAX).is_err());
    }
}

/// The mode of interpolation for [`Tensor::interpolate`](crate::Tensor::interpolate).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Interpolation {
    /// The element at the coordinate, rounded down (PyTorch's `'nearest'`).
    Nearest,
    /// The element whose centre is closest to the coordinate (PyTorch's `'nearest-exact'`).
    NearestExact,
    /// The weighted mean of the two closest elements in each dim (PyTorch's `'linear'`, `'bilinear'` and `'trilinear'`).
    Linear {
        /// Whether the centres of the corner elements of input and output are aligned, instead of the outer edges (PyTorch's `align_corners`).
        align_corners: bool,
    },
}

/// Resizes x into `out`. If `transposed`, applies the transposed linear map instead, which computes the gradient.
pub(crate) struct Interpolate<'a> {
    pub(crate) resize: &'a Resize,
    pub(crate) x: &'a Tensor,
    pub(crate) out: &'a Tensor,
    pub(crate) transposed: bool,
}

impl Interpolation {
    /// Returns PyTorch's name of the mode for one dim.
    pub fn name(self) -> &'static str {
        match self {
            Interpolation::Nearest => "nearest",
            Interpolation::NearestExact => "nearest-exact",
            Interpolation::Linear { .. } => "linear",
        }
    }

    pub(crate) fn align_corners(self) -> bool {
        matches!(self, Interpolation::Linear { align_corners: true })
    }
}

/// Resizes the rows, the columns or both of `[N, C, H, W]` in one launch. The map is linear, so its gradient is the transposed map, and the
/// gradient of the transposed map is this map again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resize {
    pub(crate) rows: Option<Samples>,
    pub(crate) columns: Option<Samples>,
}
