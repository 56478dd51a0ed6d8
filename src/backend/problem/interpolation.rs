//! Which elements each element of a result lies between, in whole numbers: the host and kernels find the same ones.

use crate::{Error, Result};

/// Where the elements of a result are along one dim: element o at `(scale * o + shift) / unit`, not below 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Samples {
    pub(crate) from: usize,
    pub(crate) to: usize,
    scale: i64,
    shift: i64,
    unit: i64,
    pub(crate) linear: bool,
}

impl Samples {
    pub(crate) fn new(op: &'static str, mode: Interpolation, from: usize, to: usize) -> Result<Samples> {
        // No number below is greater than twice this product.
        if (from as u128 + 1) * (to as u128 + 1) > (i64::MAX / 2) as u128 {
            return Err(Error::invalid(op, format!("there is no room for {to} elements in place of {from}")));
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

    /// As many elements, each where it is.
    pub(crate) fn same(n: usize) -> Samples {
        Samples { from: n, to: n, scale: 1, shift: 0, unit: 1, linear: false }
    }

    /// Whether all places in units fit in 31 bits.
    pub(crate) fn is_near(&self) -> bool {
        // As in `new`.
        (self.from as u128 + 1) * (self.to as u128 + 1) < 1 << 29
    }

    /// As kernels have it, with the whole elements of a step from one place to the next.
    pub(crate) fn words(&self) -> [i64; 6] {
        [self.from as i64, self.to as i64, self.scale, self.shift, self.unit, self.scale / self.unit]
    }

    /// The elements before and after the place of element o, and the second one's share.
    pub(crate) fn at(&self, o: usize) -> (usize, usize, f64) {
        let place = (self.scale * o as i64 + self.shift).max(0);
        let low = (place / self.unit) as usize;
        match self.linear {
            true => (low, (low + 1).min(self.from - 1), (place % self.unit) as f64 / self.unit as f64),
            false => (low, low, 0.0),
        }
    }

    /// The first element of the result whose place is at k or behind it, `to` where there is none.
    pub(crate) fn first(&self, k: usize) -> usize {
        match (k, self.scale) {
            (0, _) => 0,
            (_, 0) => self.to,
            _ => {
                let wanted = self.unit * k as i64 - self.shift;
                (wanted + self.scale - 1).div_euclid(self.scale).clamp(0, self.to as i64) as usize
            }
        }
    }

    /// The elements of the result that have a share of element j, from the first to before the last.
    pub(crate) fn takers(&self, j: usize) -> (usize, usize) {
        (self.first(if self.linear { j.saturating_sub(1) } else { j }), self.first(j + 1))
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

    /// Of every element those that take it, and none besides.
    #[test]
    fn takers_are_those_that_take() {
        for mode in MODES {
            for (from, to) in (1..24).flat_map(|from| (1..24).map(move |to| (from, to))) {
                let samples = Samples::new("interpolate", mode, from, to).unwrap();
                for j in 0..from {
                    let takes = |o: &usize| {
                        let (low, high, _) = samples.at(*o);
                        low == j || high == j
                    };
                    let takers: Vec<usize> = (0..to).filter(takes).collect();
                    let (first, last) = samples.takers(j);
                    assert_eq!((first..last).collect::<Vec<_>>(), takers, "{mode:?} {from} {to} {j}");
                }
            }
        }
    }

    #[test]
    fn places_are_as_defined() {
        for mode in MODES {
            for (from, to) in [(1, 1), (1, 5), (5, 1), (4, 8), (8, 4), (7, 7), (13, 29), (29, 13), (1 << 20, 3)] {
                let samples = Samples::new("interpolate", mode, from, to).unwrap();
                for o in (0..to).step_by(to / 40 + 1) {
                    let (n, m, x) = (from as f64, to as f64, o as f64);
                    let place = match mode {
                        Interpolation::Nearest => ((o * from) / to) as f64,
                        Interpolation::NearestExact => (((2 * o + 1) * from) / (2 * to)) as f64,
                        Interpolation::Linear { align_corners: true } => x * (n - 1.0) / (m - 1.0).max(1.0),
                        Interpolation::Linear { align_corners: false } => ((x + 0.5) * n / m - 0.5).max(0.0),
                    };
                    let (low, high, share) = samples.at(o);
                    assert!((low as f64 + share - place).abs() < 1e-9 * (1.0 + place), "{mode:?} {from} {to} {o}");
                    assert!(low < from && (0.0..1.0).contains(&share));
                    assert_eq!(high, if samples.linear { (low + 1).min(from - 1) } else { low });
                }
            }
        }
        assert!(Samples::new("interpolate", Interpolation::Nearest, 3, usize::MAX).is_err());
    }
}

/// How [`Tensor::interpolate`](crate::Tensor::interpolate) finds an element between others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Interpolation {
    /// The one before it (PyTorch's `'nearest'`).
    Nearest,
    /// The one whose middle is nearest (PyTorch's `'nearest-exact'`).
    NearestExact,
    /// Both neighbours in each direction, in proportion (PyTorch's `'linear'`, `'bilinear'` and `'trilinear'`).
    Linear {
        /// Whether the middles of the corners stay where they are, instead of the corners' outer edges.
        align_corners: bool,
    },
}

impl Interpolation {
    /// PyTorch's word for it, for one dim.
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

/// Rows, columns or both of `[N, C, H, W]` in another number: one launch. Linear, so that its gradient is its transpose, and
/// the gradient of that is itself again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resize {
    pub(crate) rows: Option<Samples>,
    pub(crate) columns: Option<Samples>,
}
