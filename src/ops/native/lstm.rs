//! One step of an LSTM cell and its gradients, for callers such as PyTorch's autograd that store the data for the backward pass
//! themselves. The layers of `nn` do not use these functions.

use crate::ops::dispatch::prelude::*;

/// Checks that `gates` is `[N, 4 H]` and that the other tensors are `[N, H]`.
fn check(op: &'static str, gates: &Tensor, others: &[&Tensor]) -> Result<()> {
    gates.dtype.check_float(op)?;
    for t in others {
        same_dtype(op, &[gates, t])?;
        same_device(op, &[gates, t])?;
        mismatch!(op if gates.rank() != 2 || t.rank() != 2 || t.shape().dims()[0] != gates.shape().dims()[0]
            || 4 * t.shape().dims()[1] != gates.shape().dims()[1], gates, t, "gates are [N, 4 H] and states [N, H]");
    }
    Ok(())
}

operations! {
    /// Computes one step of an LSTM cell (PyTorch's `_thnn_fused_lstm_cell`). Returns the hidden state, the cell state, and the gates
    /// `[N, 4 H]` in the order input, forget, new, output.
    ///
    /// The gates before activation are the sum of this tensor, which comes from the input, and `hidden_gates`, which comes from the
    /// hidden state; both are `[N, 4 H]`. The cell state `cx` is `[N, H]`, and biases are `[4 H]`. Not recorded for autograd: compute
    /// gradients with [`Tensor::fused_lstm_cell_backward`]. Three launches. Floats.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let (sums, c) = (Tensor::zeros(&[1, 4], Device::Cpu)?, Tensor::ones(&[1, 1], Device::Cpu)?);
    /// let (h, next, gates) = sums.fused_lstm_cell(&sums, &c, None, None)?;
    /// assert_eq!(gates.to_vec::<f32>()?, [0.5, 0.5, 0.0, 0.5]);
    /// assert_eq!((next.item::<f32>()?, h.item::<f32>()?), (0.5, 0.5 * 0.5f32.tanh()));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    fused_lstm_cell(input_gates: x, hidden_gates: x, cx: x, input_bias: x?, hidden_bias: x?) "_thnn_fused_lstm_cell":
        NeuralNetwork, Floats -> Same = |op, self, hidden_gates, cx, input_bias, hidden_bias| -> (Tensor, Tensor, Tensor) {
        check(op, self, &[cx])?;
        check(op, hidden_gates, &[cx])?;
        let parts: SmallVec<[&Tensor; 4]> =
            [self, hidden_gates].into_iter().chain(input_bias).chain(hidden_bias).collect();
        no_grad(|| {
            let sum = |e: &[Expr]| e[1..].iter().fold(e[0].clone(), |sum, part| sum + part);
            let sums = Tensor::map(&parts, sum).with_op(op)?.chunk(4, 1)?;
            let made = (0..6).map(|_| cx.empty_like()).collect::<Result<Vec<_>>>()?;
            let read: SmallVec<[&Tensor; 5]> = sums.iter().chain([cx]).collect();
            let written: Vec<&Tensor> = made.iter().collect();
            Tensor::map_into(&read, &[], &written, |e, _| {
                let [i, f, g, o] = [e[0].sigmoid(), e[1].sigmoid(), e[2].tanh(), e[3].sigmoid()];
                let c = &f * &e[4] + &i * &g;
                vec![&o * c.tanh(), c, i, f, g, o]
            })
            .with_op(op)?;
            Ok((made[0].shallow_clone(), made[1].shallow_clone(), Tensor::cat(&made[2..], 1)?))
        })
    };
    /// Computes the gradients of the gates before activation, `[N, 4 H]`, and of the cell state before the step, which is this tensor, in
    /// [`Tensor::fused_lstm_cell`] (PyTorch's `_thnn_fused_lstm_cell_backward_impl`).
    ///
    /// `cy` and `gates` are results of the step. The gradients of the hidden and cell states after the step count as zero if they are
    /// left out. Not recorded for autograd. Two launches.
    fused_lstm_cell_backward(cx: x, cy: x, gates: x, grad_hy: x?, grad_cy: x?) "_thnn_fused_lstm_cell_backward_impl":
        NeuralNetwork, Floats -> Same = |op, self, cy, gates, grad_hy, grad_cy| -> (Tensor, Tensor) {
        let given: SmallVec<[&Tensor; 2]> = grad_hy.into_iter().chain(grad_cy).collect();
        check(op, gates, &[self, cy])?;
        check(op, gates, &given)?;
        no_grad(|| {
            let (made, parts) = ((0..5).map(|_| self.empty_like()).collect::<Result<Vec<_>>>()?, gates.chunk(4, 1)?);
            let read: SmallVec<[&Tensor; 8]> = parts.iter().chain([self, cy]).chain(given.iter().copied()).collect();
            let written: Vec<&Tensor> = made.iter().collect();
            Tensor::map_into(&read, &[], &written, |e, _| {
                let one = || Expr::constant(1.0);
                let (sigmoid, tanh) = (|y: &Expr| y * (one() - y), |y: &Expr| one() - y * y);
                let [i, f, g, o] = [&e[0], &e[1], &e[2], &e[3]];
                let h = grad_hy.map_or(Expr::constant(0.0), |_| e[6].clone());
                let c = grad_cy.map_or(Expr::constant(0.0), |_| e[5 + given.len()].clone());
                let tanh_c = e[5].tanh();
                let c = c + &h * o * tanh(&tanh_c);
                vec![&c * g * sigmoid(i), &c * &e[4] * sigmoid(f), &c * i * tanh(g), &h * &tanh_c * sigmoid(o), &c * f]
            })
            .with_op(op)?;
            Ok((Tensor::cat(&made[..4], 1)?, made[4].shallow_clone()))
        })
    };
}
