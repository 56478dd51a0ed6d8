//! An LSTM step, compared with its definition.

use ndarray::{ArrayD, IxDyn};

use crate::harness::{Case, case};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns the hidden and cell states after the step, and the gates.
fn forward(x: &[ArrayD<f64>]) -> Vec<ArrayD<f64>> {
    let h = x[2].shape()[1];
    let sum = |n: usize, k: usize| x[0][[n, k]] + x[1][[n, k]] + x[3..].iter().map(|bias| bias[[k]]).sum::<f64>();
    let activated = |n: usize, k: usize| if k / h.max(1) == 2 { sum(n, k).tanh() } else { sigmoid(sum(n, k)) };
    let gates = ArrayD::from_shape_fn(x[0].raw_dim(), |at| activated(at[0], at[1]));
    let gate = |at: &IxDyn, i: usize| gates[[at[0], i * h + at[1]]];
    let c = ArrayD::from_shape_fn(x[2].raw_dim(), |at| gate(&at, 1) * x[2][&at] + gate(&at, 0) * gate(&at, 2));
    vec![ArrayD::from_shape_fn(c.raw_dim(), |at| gate(&at, 3) * c[&at].tanh()), c, gates]
}

/// Returns the gradients. `x` contains the cell states before and after the step, the gates, and the gradients at `of_h` and `of_c`
/// (if given) of the hidden and cell states.
fn backward(x: &[ArrayD<f64>], of_h: Option<usize>, of_c: Option<usize>) -> Vec<ArrayD<f64>> {
    let h = x[0].shape()[1];
    let gate = |at: &IxDyn, i: usize| x[2][[at[0], i * h + at[1]]];
    let given = |at: &IxDyn, k: Option<usize>| k.map_or(0.0, |k| x[k][at]);
    let of_cell = |at: &IxDyn| {
        let bent = x[1][at].tanh();
        given(at, of_c) + given(at, of_h) * gate(at, 3) * (1.0 - bent * bent)
    };
    let slope = |y: f64| y * (1.0 - y);
    let sums = ArrayD::from_shape_fn(x[2].raw_dim(), |index| {
        let at = IxDyn(&[index[0], index[1] % h.max(1)]);
        match index[1] / h.max(1) {
            0 => of_cell(&at) * gate(&at, 2) * slope(gate(&at, 0)),
            1 => of_cell(&at) * x[0][&at] * slope(gate(&at, 1)),
            2 => of_cell(&at) * gate(&at, 0) * (1.0 - gate(&at, 2).powi(2)),
            _ => given(&at, of_h) * x[1][&at].tanh() * slope(gate(&at, 3)),
        }
    });
    vec![sums, ArrayD::from_shape_fn(x[0].raw_dim(), |at| of_cell(&at) * gate(&at, 1))]
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for [n, h] in [[2, 3], [1, 1], [0, 2], [3, 37]] {
        let (states, gates) = ([n, h], [n, 4 * h]);
        let cell = || case("fused_lstm_cell").input(&gates).input(&gates).input(&states).tolerance(2.0);
        cases.push(cell().with_reference(forward));
        cases.push(cell().input(&gates[1..]).input(&gates[1..]).with_reference(forward));
        let back = || {
            case("fused_lstm_cell_backward").input(&states).input(&states).input_in(&gates, 0.1..0.9).tolerance(2.0)
        };
        cases.push(back().with_reference(|x| backward(x, None, None)));
        cases.push(back().input(&states).with_reference(|x| backward(x, Some(3), None)));
        cases.push(back().none().input(&states).with_reference(|x| backward(x, None, Some(3))));
        cases.push(back().input(&states).input(&states).with_reference(|x| backward(x, Some(3), Some(4))));
    }
    cases
}
