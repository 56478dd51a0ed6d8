use std::ops::Range;

use claystone::distributed::{DataParallel, DataParallelOptions, Group, ReduceOp};
use claystone::nn::{BatchNorm1d, Linear, Module};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::{DType, Device, Error, Generator, Result, Tensor, with_generator};

use crate::collectives::on_ranks;

/// A network of two layers. It is equal on all ranks that use the same seed.
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

/// Returns the inputs and targets of a step, or a rank's part of them.
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

/// Returns the losses of one process that trains on the whole batch.
pub fn losses_of_one_process(steps: usize, dtype: DType) -> Result<Vec<f64>> {
    let mut net = Net::new(1, dtype, Device::Cpu)?;
    let mut sgd = Sgd::new(net.parameters_mut(), sgd())?;
    losses_alone(0..steps, dtype, &net, &mut sgd)
}

/// Returns the losses of this network and optimizer in one process that trains on the whole batch.
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

/// Returns the mean of the losses of all ranks.
pub fn mean(group: &Group, loss: &Tensor) -> Result<f64> {
    let loss = loss.detach().to_dtype(DType::F64)?;
    group.all_reduce(&loss, ReduceOp::Mean)?;
    loss.item()
}

fn together(group: &Group, steps: usize, dtype: DType, options: DataParallelOptions) -> Result<Vec<f64>> {
    // Only rank 0 has the initial weights of the reference process. Other ranks must get them by the broadcast of `DataParallel::new`.
    let net = Net::new(1 + group.rank() as u64, dtype, group.device())?;
    let mut net = DataParallel::new(net, group, options)?;
    let mut sgd = Sgd::new(net.parameters_mut(), sgd())?;
    losses_together(group, 0..steps, dtype, &net, &mut sgd)
}

/// Returns the mean losses of all ranks, each of which trains on its part of the batch.
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

/// Returns options with buckets so small that several are reduced during backward.
pub fn small_buckets() -> DataParallelOptions {
    DataParallelOptions { bucket_bytes: 300, ..Default::default() }
}

/// Checks that 1, 2 and 4 ranks have the same losses as one process over 100 steps.
pub fn assert_ranks_match_one_process(
    alone: impl Fn(DType) -> Result<Vec<f64>>,
    together: impl Fn(&Group, DType) -> Result<Vec<f64>> + Sync,
) {
    for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F64, 1e-6)] {
        let want = alone(dtype).unwrap();
        for ranks in [1, 2, 4] {
            // Either all ranks compute in f64 or none does. A rank that skipped the computation would leave the other ranks waiting.
            let doubles = |group: &Group| group.device() == Device::Cpu || has_doubles(group.device());
            let all_have = on_ranks(ranks, |group| {
                let has = Tensor::full(1, i64::from(doubles(group)), (DType::I64, Device::Cpu))?;
                group.all_reduce(&has, ReduceOp::Min)?;
                Ok(has.item::<i64>()? == 1)
            });
            if dtype == DType::F64 && all_have.iter().any(|(_, has)| !has) {
                continue;
            }
            for (rank, losses) in on_ranks(ranks, |group| together(group, dtype)) {
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
    assert_ranks_match_one_process(
        |dtype| losses_of_one_process(100, dtype),
        |group, dtype| together(group, 100, dtype, small_buckets()),
    );
}

/// Returns the losses with two backward passes per step, of which the first does not reduce gradients.
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
fn gradients_accumulate_before_reduction() {
    assert_ranks_match_one_process(
        |dtype| losses_of_one_process(100, dtype),
        |group, dtype| {
            let mut net = DataParallel::new(Net::new(1, dtype, group.device())?, group, small_buckets())?;
            let mut sgd = Sgd::new(net.parameters_mut(), sgd())?;
            accumulated_losses(group, dtype, &net, &mut sgd)
        },
    );
}

#[test]
fn gradients_can_be_reduced_in_halves() {
    let options = DataParallelOptions { gradient_dtype: Some(DType::BF16), ..Default::default() };
    let want = losses_of_one_process(20, DType::F32).unwrap();
    for (_, losses) in on_ranks(2, |group| together(group, 20, DType::F32, options.clone())) {
        assert_ne!(losses, want);
        for (got, want) in losses.iter().zip(&want) {
            assert!((got - want).abs() <= 2e-2, "{got}, {want}");
        }
    }
}

/// Returns the gradients of a network of which rank 1 uses only the first layer.
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
fn parameters_unused_by_one_rank_get_the_others_gradients() {
    for (rank, gradients) in on_ranks(2, |group| gradients(group, true)) {
        // The sum of the ranks' gradients is the number of rows on rank 0 plus zero on rank 1; the mean over two ranks is half of that.
        assert_eq!(gradients[3], [BATCH as f32 / 2.0; 3], "rank {rank}");
    }
}

#[test]
fn parameters_unused_by_backward_are_named() {
    let groups = Group::threads(&[Device::Cpu; 2]).unwrap();
    let message: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || gradients(&group, false).unwrap_err())).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().to_string()).collect()
    });
    assert!(message[1].contains("has not reached second.weight, second.bias"), "{message:?}");
    assert!(message[0].contains("rank 1"), "{message:?}");
}

#[test]
fn buffers_are_copied_from_rank_0() {
    for (rank, mean) in on_ranks(2, |group| {
        let net = DataParallel::new(BatchNorm1d::new(4, group.device())?, group, Default::default())?;
        let x = Tensor::full([8, 4], 1.0 + group.rank() as f32, group.device())?;
        net.forward(&x)?;
        net.forward(&x)?; // starts with rank 0's running statistics, which the first call has changed
        net.named_buffers("")[0].1.to_vec::<f32>()
    }) {
        let own = 1.0 + rank as f32;
        let want = 0.1 * 0.9 + 0.1 * own;
        assert!(mean.iter().all(|got| (got - want).abs() < 1e-6), "rank {rank}: {mean:?}, {want}");
    }
}

#[test]
fn failed_backwards_do_not_affect_later_ones() {
    for (rank, bias) in on_ranks(2, |group| {
        let net = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, Default::default())?;
        let (x, _) = batch(0, (0, 1), DType::F32, group.device())?;
        let hidden = net.module().first.forward(&x)?;
        hidden.register_hook(|_| Err(Error::DivisionByZero { op: "hook" }))?; // fails after the gradients of the second layer are computed
        assert!(net.module().second.forward(&hidden)?.sum((), false)?.backward().is_err());
        net.zero_grad();
        net.forward(&x)?.mul_scalar(group.rank() as f32)?.sum((), false)?.backward()?;
        net.module().second.bias().expect("it has one").grad().expect("a gradient").to_vec::<f32>()
    }) {
        assert_eq!(bias, [BATCH as f32 / 2.0; 3], "rank {rank}");
    }
}

#[test]
fn modules_without_parameters_are_refused() {
    let group = &Group::threads(&[Device::Cpu]).unwrap()[0];
    let net = claystone::nn::Identity;
    assert!(matches!(DataParallel::new(net, group, Default::default()).map(drop), Err(Error::Invalid { .. })));
}
