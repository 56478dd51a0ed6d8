//! Images of other sizes: elements picked, mixed with their neighbours, or moved between channels and places.

use super::arguments::{Args, Argument};
use super::catalogue::{Dtypes, Gives, Kind, Operation};
use super::registry::replaced;
use crate::{Device, Error, Result, Shape, Tensor};

/// How [`Tensor::interpolate`] finds an element between others.
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

    fn align_corners(self) -> bool {
        matches!(self, Interpolation::Linear { align_corners: true })
    }

    fn of(a: &Args) -> Result<Interpolation> {
        match a.text(1)? {
            "nearest" => Ok(Interpolation::Nearest),
            "nearest-exact" => Ok(Interpolation::NearestExact),
            "linear" => Ok(Interpolation::Linear { align_corners: a.bool(2)? }),
            other => Err(Error::invalid("call", format!("the mode is nearest, nearest-exact or linear, not {other}"))),
        }
    }

    /// `to` elements of dim d, by each of which there are indices into x.
    fn along(self, x: &Tensor, d: usize, to: usize) -> Result<Tensor> {
        let from = x.shape().dims()[d];
        // The places are computed on the host.
        let too_many = |_| Error::invalid("interpolate", format!("there is no room for {to} elements"));
        Vec::<i64>::new().try_reserve_exact(to).map_err(too_many)?;
        let picked = |at: &dyn Fn(usize) -> usize| {
            let index: Vec<i64> = (0..to).map(|o| at(o).min(from - 1) as i64).collect();
            x.index_select(d as isize, &Tensor::from_vec(index, to, x.device())?)
        };
        // Where element o of the result is among those of x.
        let place = |o: usize| match self {
            Interpolation::Nearest => (o * from / to) as f64,
            Interpolation::NearestExact => ((2 * o + 1) * from / (2 * to)) as f64,
            Interpolation::Linear { align_corners: true } => (o * (from - 1)) as f64 / (to - 1).max(1) as f64,
            Interpolation::Linear { align_corners: false } => {
                ((o as f64 + 0.5) * from as f64 / to as f64 - 0.5).max(0.0)
            }
        };
        let Interpolation::Linear { .. } = self else { return picked(&|o| place(o) as usize) };
        let shares: Vec<f64> = (0..to).map(|o| place(o).fract()).collect();
        let shape: Shape = (0..x.rank()).map(|i| if i == d { to } else { 1 }).collect();
        let shares = Tensor::from_vec(shares, shape, Device::Cpu)?.to_dtype(x.dtype)?.to_device(x.device())?;
        picked(&|o| place(o) as usize)?.lerp_tensor(&picked(&|o| place(o) as usize + 1)?, &shares)
    }
}

impl From<Interpolation> for Argument {
    fn from(mode: Interpolation) -> Argument {
        mode.name().into()
    }
}

impl Tensor {
    /// Images `[N, C, ..]` with dims of other sizes (PyTorch's `interpolate` with a `size`). Floats, any number of dims.
    /// Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Interpolation, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 3.0], [1, 1, 2], Device::Cpu)?;
    /// assert_eq!(x.interpolate(&[4], Interpolation::Nearest)?.to_vec::<f32>()?, [1.0, 1.0, 3.0, 3.0]);
    /// let linear = Interpolation::Linear { align_corners: false };
    /// assert_eq!(x.interpolate(&[4], linear)?.to_vec::<f32>()?, [1.0, 1.5, 2.5, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes of 0 and another number of sizes than of dims; [`Error::UnsupportedDType`] for integers and
    /// bool.
    pub fn interpolate(&self, size: &[usize], mode: Interpolation) -> Result<Tensor> {
        let op = "interpolate";
        replaced!(op, [self], size, mode, mode.align_corners());
        self.dtype.check_float(op)?;
        if size.is_empty() || self.rank() != size.len() + 2 {
            let reason =
                format!("the input is [N, C, ..] with a dim for each of {} sizes, not {}", size.len(), self.shape());
            return Err(Error::invalid(op, reason));
        }
        if size.iter().chain(&self.shape().dims()[2..]).any(|&n| n == 0) {
            let reason = format!("sizes are above 0, and {} is to become {size:?}", self.shape());
            return Err(Error::invalid(op, reason));
        }
        let compute = self.dtype.compute().dtype();
        let wide = if let Interpolation::Linear { .. } = mode { self.to_dtype(compute)? } else { self.shallow_clone() };
        let out = size.iter().enumerate().try_fold(wide, |x, (i, &to)| mode.along(&x, 2 + i, to));
        out.map_err(|e| e.of(op))?.to_dtype(self.dtype)
    }

    /// `[.., C r², H, W]` as `[.., C, H r, W r]`: each r² channels become the r by r elements at a place (PyTorch's
    /// `pixel_shuffle`). Differentiable.
    ///
    /// # Errors
    /// [`Error::Invalid`] where there are less than three dims and where r² does not divide the channels.
    pub fn pixel_shuffle(&self, r: usize) -> Result<Tensor> {
        let op = "pixel_shuffle";
        replaced!(op, [self], r);
        let (rest, [c, h, w]) = self.images(op)?;
        let square = r.saturating_mul(r);
        if square == 0 || !c.is_multiple_of(square) {
            return Err(Error::invalid(op, format!("{c} channels are no multiple of {r} squared")));
        }
        let n: usize = rest.iter().product();
        let parts = self.reshape([n, c / square, r, r, h, w])?.permute(&[0, 1, 4, 2, 5, 3])?;
        parts.reshape(rest.iter().copied().chain([c / square, h * r, w * r]).collect::<Shape>())
    }

    /// `[.., C, H r, W r]` as `[.., C r², H, W]`, the opposite of [`Tensor::pixel_shuffle`] (PyTorch's `pixel_unshuffle`).
    /// Differentiable.
    ///
    /// # Errors
    /// [`Error::Invalid`] where there are less than three dims and where r does not divide the last two.
    pub fn pixel_unshuffle(&self, r: usize) -> Result<Tensor> {
        let op = "pixel_unshuffle";
        replaced!(op, [self], r);
        let (rest, [c, h, w]) = self.images(op)?;
        if r == 0 || !h.is_multiple_of(r) || !w.is_multiple_of(r) {
            return Err(Error::invalid(op, format!("images of {h} x {w} have no parts of {r} x {r}")));
        }
        let n: usize = rest.iter().product();
        let parts = self.reshape([n, c, h / r, r, w / r, r])?.permute(&[0, 1, 3, 5, 2, 4])?;
        parts.reshape(rest.iter().copied().chain([c * r * r, h / r, w / r]).collect::<Shape>())
    }

    /// The dims before the last three, and these.
    fn images(&self, op: &'static str) -> Result<(&[usize], [usize; 3])> {
        match self.shape().dims() {
            [rest @ .., c, h, w] => Ok((rest, [*c, *h, *w])),
            _ => Err(Error::invalid(op, format!("images are [.., C, H, W], not of shape {}", self.shape()))),
        }
    }
}

pub(super) static OPERATIONS: &[Operation] = &[
    Operation::new("interpolate", "nn.functional.interpolate", Kind::NeuralNetwork, Dtypes::Floats, Gives::Same, |a| {
        a.x(0)?.interpolate(&a.sizes(0)?, Interpolation::of(a)?)
    })
    .differentiable(),
    Operation::new(
        "pixel_shuffle",
        "nn.functional.pixel_shuffle",
        Kind::NeuralNetwork,
        Dtypes::All,
        Gives::Same,
        |a| a.x(0)?.pixel_shuffle(a.size(0)?),
    )
    .differentiable(),
    Operation::new(
        "pixel_unshuffle",
        "nn.functional.pixel_unshuffle",
        Kind::NeuralNetwork,
        Dtypes::All,
        Gives::Same,
        |a| a.x(0)?.pixel_unshuffle(a.size(0)?),
    )
    .differentiable(),
];
