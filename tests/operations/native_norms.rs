//! Norms with their statistics and gradients made of these, against their definition.

use ndarray::{ArrayD, Dimension, IxDyn};

use crate::harness::{Case, case};

const EPS: f64 = 1e-5;

/// Which row an element is in, and which element of the weight it has, by its index.
#[derive(Clone, Copy)]
enum Rows {
    /// The last so many dims, of the normalised shape.
    Last(usize),
    /// A channel.
    Batch,
}

impl Rows {
    /// The shapes of the weight and of the statistics.
    fn shapes(self, shape: &[usize]) -> [Vec<usize>; 2] {
        match self {
            Rows::Last(dims) => {
                let kept = shape.len() - dims;
                [shape[kept..].to_vec(), shape[..kept].iter().copied().chain(vec![1; dims]).collect()]
            }
            Rows::Batch => [shape[1..2].to_vec(), shape[1..2].to_vec()],
        }
    }

    /// The indices of the two for that of an element.
    fn of(self, at: &[usize]) -> [IxDyn; 2] {
        match self {
            Rows::Last(dims) => {
                let kept = at.len() - dims;
                let row: Vec<usize> = at[..kept].iter().copied().chain(vec![0; dims]).collect();
                [IxDyn(&at[kept..]), IxDyn(&row)]
            }
            Rows::Batch => [IxDyn(&at[1..2]), IxDyn(&at[1..2])],
        }
    }

    /// Sums of an array's rows, or of what has one weight.
    fn sums(self, x: &ArrayD<f64>, which: usize) -> ArrayD<f64> {
        let mut sums = ArrayD::zeros(IxDyn(&self.shapes(x.shape())[which]));
        x.indexed_iter().for_each(|(at, v)| sums[&self.of(at.slice())[which]] += v);
        sums
    }

    /// Each element with that of an array of its row's, or its weight's.
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

    /// From the gradient, x, the mean, 1 over the deviation and perhaps the weight.
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
    let made = |name: &str| if let Rows::Batch = rows { case(&format!("native_batch_norm{name}")) } else { case(&format!("native_layer_norm{name}")) };
    let forward = if let Rows::Batch = rows { made("").input(shape).none().none() } else { made("").input(shape) };
    let forward = (0..given).fold(forward, |c, _| c.input(&own));
    let forward = if let Rows::Batch = rows { forward.arg(0.1) } else { forward.arg(&own[..]) };
    let mut cases = vec![forward.arg(EPS).gives(move |x| rows.forward(x))];
    let wanted = if given > 0 { [true, given > 1, true] } else { [true, false, false] };
    let backward = made("_backward").input(shape).input(shape).input(&of_rows).input_in(&of_rows, 0.5..2.0);
    let backward = if given > 0 { backward.input(&own) } else { backward };
    let backward = if let Rows::Batch = rows { backward } else { backward.arg(&own[..]) };
    let mask = wanted.map(usize::from);
    cases.push(backward.arg(&mask[..]).tolerance(4.0).gives(move |x| rows.backward(x, wanted)));
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
            (&[3, 2, 4], Rows::Batch),
            (&[2, 3, 3, 4], Rows::Batch),
            (&[2, 0, 3], Rows::Batch),
        ] {
            cases.extend(cases_of(shape, rows, given));
        }
    }
    cases
}
