//! Norms that return their statistics, and their gradients, which are computed from the statistics, compared with the definition.

use claystone::device::count_launches;
use claystone::ops::Argument;
use claystone::{BatchNormOptions, DType, Device, Error, Result, Tensor};
use ndarray::{ArrayD, Dimension, IxDyn};

use crate::common::{each_device, vec};
use crate::harness::{Case, case};

const EPS: f64 = 1e-5;

/// How elements are assigned to rows (the elements that are normalised together) and to elements of the weight.
#[derive(Clone, Copy)]
enum Rows {
    /// A row consists of the last dims, the normalised shape. The field is the number of these dims.
    Last(usize),
    /// A row is one channel of all samples.
    Batch,
    /// A row is a group of channels of one sample. The fields are the number of groups, and the number of channels in each group.
    Groups(usize, usize),
}

impl Rows {
    fn name(self) -> &'static str {
        match self {
            Rows::Last(_) => "layer",
            Rows::Batch => "batch",
            Rows::Groups(..) => "group",
        }
    }

    /// Returns the shapes of the weight and of the statistics.
    fn shapes(self, shape: &[usize]) -> [Vec<usize>; 2] {
        match self {
            Rows::Last(dims) => {
                let kept = shape.len() - dims;
                [shape[kept..].to_vec(), shape[..kept].iter().copied().chain(vec![1; dims]).collect()]
            }
            Rows::Batch => [shape[1..2].to_vec(), shape[1..2].to_vec()],
            Rows::Groups(groups, _) => [shape[1..2].to_vec(), vec![shape[0], groups]],
        }
    }

    /// Returns the indices of an element's weight and statistics.
    fn of(self, at: &[usize]) -> [IxDyn; 2] {
        match self {
            Rows::Last(dims) => {
                let kept = at.len() - dims;
                let row: Vec<usize> = at[..kept].iter().copied().chain(vec![0; dims]).collect();
                [IxDyn(&at[kept..]), IxDyn(&row)]
            }
            Rows::Batch => [IxDyn(&at[1..2]), IxDyn(&at[1..2])],
            Rows::Groups(_, each) => [IxDyn(&at[1..2]), IxDyn(&[at[0], at[1] / each])],
        }
    }

    /// Sums the elements that have the same weight (`which` = 0) or are in the same row (`which` = 1).
    fn sums(self, x: &ArrayD<f64>, which: usize) -> ArrayD<f64> {
        let mut sums = ArrayD::zeros(IxDyn(&self.shapes(x.shape())[which]));
        x.indexed_iter().for_each(|(at, v)| sums[&self.of(at.slice())[which]] += v);
        sums
    }

    /// Combines each element with the entry of `other` for its weight (`which` = 0) or its row (`which` = 1).
    fn with(self, x: &ArrayD<f64>, other: &ArrayD<f64>, which: usize, f: impl Fn(f64, f64) -> f64) -> ArrayD<f64> {
        ArrayD::from_shape_fn(x.raw_dim(), |at| f(x[&at], other[&self.of(at.slice())[which]]))
    }

    fn forward(self, x: &[ArrayD<f64>]) -> Vec<ArrayD<f64>> {
        let n = x[0].len() as f64 / self.sums(&x[0], 1).len().max(1) as f64;
        let mean = self.sums(&x[0], 1) / n;
        let centred = self.with(&x[0], &mean, 1, |x, mean| x - mean);
        let rstd = (self.sums(&centred.mapv(|v| v * v), 1) / n).mapv(|var| (var + EPS).sqrt().recip());
        let y = self.with(&centred, &rstd, 1, |x, rstd| x * rstd);
        let y = x.get(1).map_or(y.clone(), |w| self.with(&y, w, 0, |y, w| y * w));
        let y = x.get(2).map_or(y.clone(), |b| self.with(&y, b, 0, |y, b| y + b));
        vec![y, mean, rstd]
    }

    /// Returns the gradients. `x` contains the output gradient, the input, the mean, the reciprocal deviation and an optional
    /// weight.
    fn backward(self, x: &[ArrayD<f64>], wanted: [bool; 3]) -> Vec<ArrayD<f64>> {
        let n = x[1].len() as f64 / x[2].len().max(1) as f64;
        let normal = self.with(&self.with(&x[1], &x[2], 1, |x, mean| x - mean), &x[3], 1, |x, rstd| x * rstd);
        let weighted = x.get(4).map_or(x[0].clone(), |w| self.with(&x[0], w, 0, |g, w| g * w));
        let (sum, product) = (self.sums(&weighted, 1) / n, self.sums(&(&weighted * &normal), 1) / n);
        let centred = self.with(&weighted, &sum, 1, |g, sum| g - sum) - self.with(&normal, &product, 1, |y, sum| y * sum);
        let to_x = self.with(&centred, &x[3], 1, |g, rstd| g * rstd);
        let all = [to_x, self.sums(&(&x[0] * &normal), 0), self.sums(&x[0], 0)];
        all.into_iter().zip(wanted).filter(|(_, wanted)| *wanted).map(|(gradient, _)| gradient).collect()
    }
}

fn cases_of(shape: &[usize], rows: Rows, given: usize) -> Vec<Case> {
    let [own, of_rows] = rows.shapes(shape);
    let named = |end: &str| case(&format!("native_{}_norm{end}", rows.name()));
    // The argument besides tensors and eps, and whether a bias gradient can be requested without passing a bias.
    let (argument, alone): (Argument, bool) = match rows {
        Rows::Last(_) => (own[..].into(), false),
        Rows::Batch => (0.1.into(), true),
        Rows::Groups(groups, _) => (groups.into(), true),
    };
    let forward = named("").input(shape);
    let forward = if let Rows::Batch = rows { forward.none().none() } else { forward };
    let forward = (0..given).fold(forward, |c, _| c.input(&own)).arg(argument.clone());
    let mut cases = vec![forward.arg(EPS).with_reference(move |x| rows.forward(x))];
    let wanted = [true, given > 1, given > 0 || alone];
    let backward = named("_backward").input(shape).input(shape).input(&of_rows).input_in(&of_rows, 0.5..2.0);
    let backward = if given > 0 { backward.input(&own) } else { backward };
    let backward = if let Rows::Batch = rows { backward } else { backward.arg(argument) };
    let mask = wanted.map(usize::from);
    cases.push(backward.arg(&mask[..]).tolerance(4.0).with_reference(move |x| rows.backward(x, wanted)));
    cases
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for given in 0..3 {
        for (shape, rows) in [
            (&[4, 7][..], Rows::Last(1)),
            (&[2, 3, 5], Rows::Last(2)),
            (&[0, 5], Rows::Last(1)),
            (&[3, 257], Rows::Last(1)),
            (&[1, 1025], Rows::Last(1)),
            (&[3, 2, 4], Rows::Batch),
            (&[2, 3, 3, 4], Rows::Batch),
            (&[2, 0, 3], Rows::Batch),
            (&[3, 6, 5], Rows::Groups(3, 2)),
            (&[2, 4, 3, 11], Rows::Groups(1, 4)),
            (&[2, 5, 65], Rows::Groups(5, 1)),
            (&[0, 4, 3], Rows::Groups(2, 2)),
        ] {
            cases.extend(cases_of(shape, rows, given));
        }
    }
    cases
}

/// The forward launch also computes the statistics, and backward uses the statistics without copying them, although they may be
/// views. Copies of the statistics give the same gradients.
#[test]
fn native_norms_take_one_launch_each_way() {
    type Forward = fn(&Tensor) -> Result<[Tensor; 3]>;
    type Backward = fn(&Tensor, &Tensor, [&Tensor; 2]) -> Result<Option<Tensor>>;
    let norms: [(Forward, Backward); 3] = [
        (
            |x| x.native_layer_norm(&[5], None, None, EPS).map(Into::into),
            |g, x, [mean, rstd]| Ok(g.native_layer_norm_backward(x, &[5], mean, rstd, None, None, ONLY_INPUT_GRADIENT)?[0].take()),
        ),
        (
            |x| x.native_batch_norm(BatchNormOptions { training: true, ..Default::default() }).map(Into::into),
            |g, x, [mean, rstd]| Ok(g.native_batch_norm_backward(x, mean, rstd, None, ONLY_INPUT_GRADIENT)?[0].take()),
        ),
        (
            |x| x.native_group_norm(2, None, None, EPS).map(Into::into),
            |g, x, [mean, rstd]| Ok(g.native_group_norm_backward(x, 2, mean, rstd, None, ONLY_INPUT_GRADIENT)?[0].take()),
        ),
    ];
    each_device(|device| {
        let x = Tensor::arange(0, 120, 1, device).unwrap().sin().unwrap().reshape([6, 4, 5]).unwrap();
        for (i, (forward, backward)) in norms.iter().enumerate() {
            let (made, launches) = count_launches(|| forward(&x).unwrap());
            // OpenCL CPU devices have a single kernel for each norm. The CPU normalises the channels of a batch in a second launch.
            let most = if device == Device::Cpu && i == 1 { 2 } else { 1 };
            assert!(launches <= most, "norm {i} on {device}: {launches} launches");
            let [y, mean, rstd] = made;
            let (dx, launches) = count_launches(|| backward(&y, &x, [&mean, &rstd]).unwrap());
            assert!(launches <= most, "gradient of norm {i} on {device}: {launches} launches");
            let copied = backward(&y, &x, [&mean.try_clone().unwrap(), &rstd.try_clone().unwrap()]).unwrap();
            assert_eq!(vec(&dx.unwrap()), vec(&copied.unwrap()), "norm {i} on {device}");
        }
    });
}

/// A weight or bias whose length differs from that of a row is an error, whether it is shorter or longer.
#[test]
fn mismatched_weights_and_biases_are_errors() {
    each_device(|device| {
        let x = Tensor::ones([4, 8], device).unwrap().to_dtype(DType::F16).unwrap();
        let [y, mean, rstd]: [Tensor; 3] = x.native_layer_norm(&[8], None, None, EPS).unwrap().into();
        for other in [3, 64] {
            let other = Tensor::ones(other, device).unwrap();
            for (weight, bias) in [(Some(&other), None), (None, Some(&other))] {
                let made = y.native_layer_norm_backward(&x, &[8], &mean, &rstd, weight, bias, [true; 3]);
                assert!(matches!(made, Err(Error::ShapeMismatch { .. })), "{made:?} on {device}");
            }
        }
    });
}

const ONLY_INPUT_GRADIENT: [bool; 3] = [true, false, false];

/// The running variance is updated with the variance itself, even if eps is much larger than the variance.
#[test]
fn running_statistics_match_batch_norm() {
    each_device(|device| {
        let x = Tensor::arange(0, 24, 1, device).unwrap().mul_scalar(1e-6).unwrap().reshape([4, 3, 2]).unwrap();
        let run = |native: bool| {
            let (mean, var) = (Tensor::zeros(3, device).unwrap(), Tensor::zeros(3, device).unwrap());
            let (running_mean, running_var) = (Some(&mean), Some(&var));
            let options = BatchNormOptions { running_mean, running_var, training: true, momentum: 1.0, ..Default::default() };
            if native {
                let (.., rstd) = x.native_batch_norm(options).unwrap();
                assert!(vec(&rstd).iter().all(|r| (r - 1e-5f32.sqrt().recip()).abs() < 1e-2));
            } else {
                x.batch_norm(options).unwrap();
            }
            [vec(&mean), vec(&var)]
        };
        let found = run(true);
        assert!(found[1].iter().all(|&var| var > 4e-11 && var < 6e-11), "{found:?} on {device}");
        assert_eq!(found, run(false), "{device}");
    });
}
