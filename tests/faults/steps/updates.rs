//! Steps with in-place operations that consist of several commands.

use claystone::nn::{BatchNorm1d, Module};
use claystone::ops::ScatterReduce;
use claystone::{DType, Result, Tensor};

use super::{Run, Values, network};

pub(super) fn scatter_reduce(run: &mut Run) -> Result<Values> {
    run.ramp(1000)?;
    let at = run.kept.len() - 1;
    let index = Tensor::arange(0, 1000, 1, (DType::I64, run.device))?;
    let fours = Tensor::full([1000], 4.0, run.device)?;
    let reduce = |how, include_self| {
        let (index, fours) = (&index, &fours);
        move |t: &Tensor| t.scatter_reduce_(0, index, fours, how, include_self).map(drop)
    };
    run.change(at, |x| (x + 4.0) / 2.0, reduce(ScatterReduce::Mean, true))?;
    run.change(at, |_| 4.0, reduce(ScatterReduce::Prod, false))?;
    run.change(at, |x| x + 4.0, reduce(ScatterReduce::Sum, true))?;
    run.change(at, |_| 4.0, reduce(ScatterReduce::Mean, false))?;
    Ok(vec![run.kept[at].tensor.to_vec()?])
}

/// Runs a second backward pass, which adds to existing gradients.
pub(super) fn accumulation(run: &mut Run) -> Result<Values> {
    let (net, x, y) = network(run)?;
    net.forward(&x)?.cross_entropy(&y)?.backward()?;
    let gradients: Vec<Tensor> = net.parameters().into_iter().filter_map(Tensor::grad).collect();
    let loss = net.forward(&x)?.cross_entropy(&y)?;
    run.change_all(&gradients, || loss.backward())?;
    gradients.iter().map(|g| g.to_vec()).collect()
}

pub(super) fn running_statistics(run: &mut Run) -> Result<Values> {
    let (norm, x) = (BatchNorm1d::new(12, run.device)?, run.ramp(96)?.reshape([8, 12])?);
    let buffers = norm.named_buffers("");
    let buffers: Vec<Tensor> =
        buffers.iter().filter(|(_, t)| t.dtype() == DType::F32).map(|(_, t)| t.shallow_clone()).collect();
    let mut values = Values::new();
    for _ in 0..2 {
        values.push(run.change_all(&buffers, || norm.forward(&x))?.to_vec()?);
    }
    buffers.iter().try_for_each(|t| t.to_vec().map(|v| values.push(v)))?;
    Ok(values)
}
