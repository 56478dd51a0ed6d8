use std::ops::Range;

use claystone::distributed::{DataParallel, DataParallelOptions, Group, ReduceOp};
use claystone::nn::{BatchNorm1d, Linear, Module};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::{DType, Device, Error, Generator, Result, Tensor, with_generator};

use crate::collectives::all;

/// Two layers, made alike by every rank that gives the same seed.
pub struct Net {
    pub first: Linear,
    pub second: Linear,
}

impl Net {
    pub fn new(seed: u64, dtype: DType, device: Device) -> Result<Net> {
        with_generator(&Generator::new(seed), || {
            let mut net = Net { first: Linear::new(10, 16, Device::Cpu)?, second: Linear::new(16, 3, Device::Cpu)? };
            net.to_dtype(dtype)?;
            net.to_device(device)?;
            Ok(net)
        })
    }
}

impl Module for Net {
    claystone::parts!(first, second);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.second.forward(&self.first.forward(x)?.tanh()?)
    }
}

pub const BATCH: usize = 16;

/// Step `step`'s inputs and targets, or the share of them that a rank has.
pub fn batch(step: usize, (rank, ranks): (usize, usize), dtype: DType, device: Device) -> Result<(Tensor, Tensor)> {
    let (x, y) = with_generator(&Generator::new(1000 + step as u64), || -> Result<_> {
        Ok((Tensor::randn([BATCH, 10], Device::Cpu)?, Tensor::randn([BATCH, 3], Device::Cpu)?))
    })?;
    let share = BATCH / ranks;
    let of = |t: Tensor| t.narrow(0, rank * share, share)?.to_dtype(dtype)?.to_device(device);
    Ok((of(x)?, of(y)?))
}

pub fn sgd() -> SgdConfig {
    SgdConfig { lr: 0.1, momentum: 0.9, ..SgdConfig::default() }
}

/// The losses of one process with the whole batch.
pub fn alone(steps: usize, dtype: DType) -> Result<Vec<f64>> {
    let mut net = Net::new(1, dtype, Device::Cpu)?;
    let mut sgd = Sgd::new(net.parameters_mut(), sgd())?;
    losses_alone(0..steps, dtype, &net, &mut sgd)
}

/// The losses of a net and its optimiser in one process with the whole batch.
pub fn losses_alone(steps: Range<usize>, dtype: DType, net: &impl Module, sgd: &mut dyn Optimizer) -> Result<Vec<f64>> {
    steps
        .map(|step| {
            let (x, y) = batch(step, (0, 1), dtype, Device::Cpu)?;
            sgd.zero_grad();
            let loss = net.forward(&x)?.mse_loss(&y)?;
            loss.backward()?;
            sgd.step()?;
            loss.detach().to_dtype(DType::F64)?.item()
        })
        .collect()
}

/// The mean of the ranks' losses.
pub fn mean(group: &Group, loss: &Tensor) -> Result<f64> {
    let loss = loss.detach().to_dtype(DType::F64)?;
    group.all_reduce(&loss, ReduceOp::Mean)?;
    loss.item()
}

fn together(group: &Group, steps: usize, dtype: DType, options: DataParallelOptions) -> Result<Vec<f64>> {
    // Only rank 0 begins with the weights of the one process.
    let net = Net::new(1 + group.rank() as u64, dtype, group.device())?;
    let mut net = DataParallel::new(net, group, options)?;
    let mut sgd = Sgd::new(net.parameters_mut(), sgd())?;
    losses_together(group, 0..steps, dtype, &net, &mut sgd)
}

/// The losses of all ranks together, each with its share of the batch.
pub fn losses_together(
    group: &Group,
    steps: Range<usize>,
    dtype: DType,
    net: &impl Module,
    sgd: &mut dyn Optimizer,
) -> Result<Vec<f64>> {
    steps
        .map(|step| {
            let (x, y) = batch(step, (group.rank(), group.size()), dtype, group.device())?;
            sgd.zero_grad();
            let loss = net.forward(&x)?.mse_loss(&y)?;
            loss.backward()?;
            sgd.step()?;
            mean(group, &loss)
        })
        .collect()
}

pub fn has_doubles(device: Device) -> bool {
    device == Device::Cpu || Tensor::zeros(1, (DType::F64, device)).and_then(|x| x.exp()).is_ok()
}

/// Small buckets: several travel while backward goes on.
pub fn small_buckets() -> DataParallelOptions {
    DataParallelOptions { bucket_bytes: 300, ..Default::default() }
}

/// Whether 1, 2 and 4 ranks have the losses of one process over 100 steps.
pub fn any_number_of_ranks_is_one(
    alone: impl Fn(DType) -> Result<Vec<f64>>,
    together: impl Fn(&Group, DType) -> Result<Vec<f64>> + Sync,
) {
    for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F64, 1e-6)] {
        let want = alone(dtype).unwrap();
        for ranks in [1, 2, 4] {
            // All ranks compute in f64, or none: they wait for each other.
            let doubles = |group: &Group| group.device() == Device::Cpu || has_doubles(group.device());
            let all_have = all(ranks, |group| {
                let has = Tensor::full(1, i64::from(doubles(group)), (DType::I64, Device::Cpu))?;
                group.all_reduce(&has, ReduceOp::Min)?;
                Ok(has.item::<i64>()? == 1)
            });
            if dtype == DType::F64 && all_have.iter().any(|(_, has)| !has) {
                continue;
            }
            for (rank, losses) in all(ranks, |group| together(group, dtype)) {
                assert_eq!(losses.len(), want.len());
                for (step, (got, want)) in losses.into_iter().zip(&want).enumerate() {
                    assert!((got - want).abs() <= tolerance, "{dtype}, rank {rank} of {ranks}, {step}: {got}, {want}");
                }
            }
        }
        assert_eq!(want.len(), 100);
        assert!(want[99] < want[0], "it learns");
    }
}

#[test]
fn any_number_of_ranks_trains_as_one() {
    any_number_of_ranks_is_one(|dtype| alone(100, dtype), |group, dtype| together(group, 100, dtype, small_buckets()));
}

/// The losses with two backwards a step, of which the first stays on its rank.
pub fn accumulated_losses<M: Module>(
    group: &Group,
    dtype: DType,
    net: &DataParallel<M>,
    sgd: &mut dyn Optimizer,
) -> Result<Vec<f64>> {
    (0..100)
        .map(|step| {
            sgd.zero_grad();
            let part = |half: usize| -> Result<Tensor> {
                let (x, y) = batch(step, (2 * group.rank() + half, 2 * group.size()), dtype, group.device())?;
                let loss = net.forward(&x)?.mse_loss(&y)?.mul_scalar(0.5)?;
                loss.backward()?;
                Ok(loss)
            };
            let first = net.no_sync(|| part(0))?;
            let loss = first.detach().add(&part(1)?.detach())?;
            sgd.step()?;
            mean(group, &loss)
        })
        .collect()
}

#[test]
fn gradients_add_up_before_they_travel() {
    any_number_of_ranks_is_one(
        |dtype| alone(100, dtype),
        |group, dtype| {
            let mut net = DataParallel::new(Net::new(1, dtype, group.device())?, group, small_buckets())?;
            let mut sgd = Sgd::new(net.parameters_mut(), sgd())?;
            accumulated_losses(group, dtype, &net, &mut sgd)
        },
    );
}

#[test]
fn gradients_travel_in_halves() {
    let options = DataParallelOptions { gradient_dtype: Some(DType::BF16), ..Default::default() };
    let want = alone(20, DType::F32).unwrap();
    for (_, losses) in all(2, |group| together(group, 20, DType::F32, options.clone())) {
        assert_ne!(losses, want);
        for (got, want) in losses.iter().zip(&want) {
            assert!((got - want).abs() <= 2e-2, "{got}, {want}");
        }
    }
}

/// The gradients of a net of which rank 1 uses the first layer alone.
fn gradients(group: &Group, find_unused_parameters: bool) -> Result<Vec<Vec<f32>>> {
    let options = DataParallelOptions { find_unused_parameters, ..Default::default() };
    let net = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, options)?;
    let (x, _) = batch(0, (0, 1), DType::F32, group.device())?;
    let hidden = net.module().first.forward(&x)?;
    let out = if group.rank() == 1 { hidden } else { net.module().second.forward(&hidden)? };
    out.sum((), false)?.backward()?;
    net.parameters().into_iter().map(|p| p.grad().expect("a gradient").to_vec::<f32>()).collect()
}

#[test]
fn parameters_that_one_rank_does_not_reach_have_the_others_gradients() {
    for (rank, gradients) in all(2, |group| gradients(group, true)) {
        // The number of rows on rank 0, nothing on rank 1.
        assert_eq!(gradients[3], [BATCH as f32 / 2.0; 3], "rank {rank}");
    }
}

#[test]
fn parameters_that_backward_does_not_reach_are_named() {
    let groups = Group::threads(&[Device::Cpu; 2]).unwrap();
    let told: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || gradients(&group, false).unwrap_err())).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().to_string()).collect()
    });
    assert!(told[1].contains("has not reached second.weight, second.bias"), "{told:?}");
    assert!(told[0].contains("rank 1"), "{told:?}");
}

#[test]
fn buffers_are_those_of_rank_0() {
    for (rank, mean) in all(2, |group| {
        let net = DataParallel::new(BatchNorm1d::new(4, group.device())?, group, Default::default())?;
        let x = Tensor::full([8, 4], 1.0 + group.rank() as f32, group.device())?;
        net.forward(&x)?;
        net.forward(&x)?; // begins with the statistics of rank 0's first
        net.named_buffers("")[0].1.to_vec::<f32>()
    }) {
        let own = 1.0 + rank as f32;
        let want = 0.1 * 0.9 + 0.1 * own;
        assert!(mean.iter().all(|got| (got - want).abs() < 1e-6), "rank {rank}: {mean:?}, {want}");
    }
}

#[test]
fn a_backward_that_fails_leaves_the_next_one_whole() {
    for (rank, bias) in all(2, |group| {
        let net = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, Default::default())?;
        let (x, _) = batch(0, (0, 1), DType::F32, group.device())?;
        let hidden = net.module().first.forward(&x)?;
        hidden.register_hook(|_| Err(Error::DivisionByZero { op: "hook" }))?; // the second layer has its gradients by then
        assert!(net.module().second.forward(&hidden)?.sum((), false)?.backward().is_err());
        net.zero_grad();
        net.forward(&x)?.mul_scalar(group.rank() as f32)?.sum((), false)?.backward()?;
        net.module().second.bias().expect("it has one").grad().expect("a gradient").to_vec::<f32>()
    }) {
        assert_eq!(bias, [BATCH as f32 / 2.0; 3], "rank {rank}");
    }
}

#[test]
fn a_module_without_parameters_is_refused() {
    let group = &Group::threads(&[Device::Cpu]).unwrap()[0];
    let net = claystone::nn::Identity;
    assert!(matches!(DataParallel::new(net, group, Default::default()).map(drop), Err(Error::Invalid { .. })));
}
