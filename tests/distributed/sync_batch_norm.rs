use claystone::autograd::BackwardOptions;
use claystone::distributed::{DataParallel, Group, ReduceOp, SyncBatchNorm};
use claystone::nn::{Activation, BatchNorm, BatchNorm1d, Linear, Module, Sequential};
use claystone::optim::Sgd;
use claystone::{DType, Device, Error, Generator, Result, Tensor, with_generator};

use crate::collectives::on_ranks;
use crate::common::values;
use crate::training::{assert_ranks_match_one_process, has_doubles, losses_alone, losses_together, sgd, small_buckets};

/// The number of rows on each of three ranks. A rank may have any number of rows, including 0.
const ROWS: [usize; 3] = [3, 0, 5];

fn randn(seed: u64, shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
    let x = with_generator(&Generator::new(seed), || Tensor::randn(shape, (DType::F32, Device::Cpu)))?;
    x.mul_scalar(2)?.add_scalar(3)?.to_dtype(dtype)?.to_device(device)
}

/// The results of one forward and backward pass through a layer.
struct Step {
    out: Tensor,
    /// The gradients of x, weight and bias.
    gradients: Vec<Tensor>,
    running: Vec<Vec<f64>>,
}

/// Runs a forward and backward pass on the given rows of a batch of `shape`.
fn step(norm: &impl Module, shape: &[usize], rows: (usize, usize), dtype: DType, device: Device) -> Result<Step> {
    for (i, p) in norm.parameters().into_iter().enumerate() {
        p.detach().copy_(&randn(10 + i as u64, p.shape().dims(), p.dtype(), device)?)?;
    }
    let own = |seed| randn(seed, shape, dtype, device)?.narrow(0, rows.0, rows.1);
    let x = own(1)?.contiguous()?.requires_grad_(true)?;
    let out = norm.forward(&x)?;
    out.mul(&own(2)?)?.sum((), false)?.backward()?;
    let leaves = [&x].into_iter().chain(norm.parameters());
    let gradients = leaves.map(|t| t.grad().expect("a gradient")).collect();
    let running = norm.named_buffers("").into_iter().map(|(_, t)| values(t)).collect();
    Ok(Step { out: out.detach(), gradients, running })
}

fn close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1.0f64, |m, v| m.max(v.abs()));
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= tolerance * largest, "{what}: {got}, {want}");
    }
}

/// Checks that values, gradients and running statistics equal those of one layer that gets the batches of all ranks.
fn assert_matches_one_layer(group: &Group, shape: &[usize], dtype: DType, wide: DType, tolerance: f64) -> Result<()> {
    let device = group.device();
    let channels = shape[1];
    let alone = BatchNorm::new(channels, (wide, Device::Cpu))?.with_eps(1e-3).with_momentum(0.3);
    let want = step(&alone, shape, (0, shape[0]), dtype, Device::Cpu)?;
    let norm = SyncBatchNorm::new(channels, (wide, device), group)?.with_eps(1e-3).with_momentum(0.3);
    let rows = (ROWS[..group.rank()].iter().sum(), ROWS[group.rank()]);
    let got = step(&norm, shape, rows, dtype, device)?;
    let what = format!("rank {} on {device}, {shape:?} of {dtype}", group.rank());
    let own = |t: &Tensor| Ok::<_, Error>(values(&t.narrow(0, rows.0, rows.1)?.contiguous()?));
    close(&values(&got.out), &own(&want.out)?, tolerance, &what);
    close(&values(&got.gradients[0]), &own(&want.gradients[0])?, tolerance, &what);
    for (own, want) in got.gradients.iter().zip(&want.gradients).skip(1) {
        assert_eq!(own.dtype(), wide);
        let sum = own.to_device(Device::Cpu)?.to_dtype(DType::F64)?;
        group.all_reduce(&sum, ReduceOp::Sum)?;
        close(&values(&sum), &values(want), tolerance, &what);
    }
    for (got, want) in got.running.iter().zip(&want.running) {
        close(got, want, tolerance, &what);
    }
    Ok(())
}

#[test]
fn unequal_batches_are_normalized_together() {
    for shape in [&[8, 5][..], &[8, 3, 7], &[8, 4, 3, 5], &[8, 2, 3, 2, 4]] {
        on_ranks(3, |group| assert_matches_one_layer(group, shape, DType::F32, DType::F32, 2e-5));
        on_ranks(3, |group| assert_matches_one_layer(group, shape, DType::F16, DType::F32, 4e-3));
        on_ranks(3, |group| assert_matches_one_layer(group, shape, DType::BF16, DType::BF16, 3e-2));
    }
}

#[test]
fn doubles_are_normalized_in_full_precision() {
    let every_rank_has_doubles = on_ranks(3, |group| {
        let has = Tensor::full(1, i64::from(has_doubles(group.device())), (DType::I64, Device::Cpu))?;
        group.all_reduce(&has, ReduceOp::Min)?;
        Ok(has.item::<i64>()? == 1)
    });
    if every_rank_has_doubles.iter().all(|(_, has)| *has) {
        on_ranks(3, |group| assert_matches_one_layer(group, &[8, 4, 3, 5], DType::F64, DType::F64, 1e-12));
    }
}

/// Returns a network with a batch norm in the middle.
fn net(dtype: DType, device: Device) -> Result<Sequential> {
    with_generator(&Generator::new(1), || {
        let mut net = Sequential::new()
            .push(Linear::new(10, 16, Device::Cpu)?)
            .push(BatchNorm1d::new(16, Device::Cpu)?)
            .push(Linear::new(16, 3, Device::Cpu)?.with_activation(Activation::Tanh));
        net.to_dtype(dtype)?;
        net.to_device(device)?;
        Ok(net)
    })
}

#[test]
fn any_number_of_ranks_trains_as_one() {
    assert_ranks_match_one_process(
        |dtype| {
            let mut net = net(dtype, Device::Cpu)?;
            let mut sgd = Sgd::new(net.parameters_mut(), sgd())?;
            losses_alone(0..100, dtype, &net, &mut sgd)
        },
        |group, dtype| {
            let mut net = DataParallel::new(net(dtype, group.device())?, group, small_buckets())?;
            assert_eq!(SyncBatchNorm::convert_sync_batchnorm(&net, group), 1);
            let mut sgd = Sgd::new(net.parameters_mut(), sgd())?;
            losses_together(group, 0..100, dtype, &net, &mut sgd)
        },
    );
}

#[test]
fn ranks_do_not_wait_in_evaluation() {
    for (rank, out) in on_ranks(2, |group| {
        let norm = SyncBatchNorm::new(2, group.device(), group)?;
        norm.eval();
        match group.rank() {
            0 => values_of(&norm.forward(&Tensor::ones([1, 2], group.device())?)?),
            _ => Ok(vec![1.0; 2]),
        }
    }) {
        assert!(out.iter().all(|v| (v - 1.0).abs() < 1e-4), "rank {rank}: {out:?}");
    }
}

fn values_of(x: &Tensor) -> Result<Vec<f64>> {
    Ok(values(x))
}

#[test]
fn batches_without_statistics_are_errors() {
    let error_message = |shape: &'static [usize]| {
        let groups = Group::threads(&[Device::Cpu]).unwrap();
        let norm = SyncBatchNorm::new(2, Device::Cpu, &groups[0]).unwrap();
        norm.forward(&Tensor::ones(shape, Device::Cpu).unwrap()).unwrap_err().to_string()
    };
    assert!(error_message(&[1, 2]).contains("one element per channel"), "{}", error_message(&[1, 2]));
    assert!(error_message(&[4, 3]).contains("[N, 2, ..]"), "{}", error_message(&[4, 3]));
}

#[test]
fn second_derivatives_are_refused() {
    let group = &Group::threads(&[Device::Cpu]).unwrap()[0];
    let norm = SyncBatchNorm::new(2, Device::Cpu, group).unwrap();
    let x = Tensor::ones([3, 2], Device::Cpu).unwrap().requires_grad_(true).unwrap();
    let out = norm.forward(&x).unwrap().sum((), false).unwrap();
    let options = BackwardOptions { create_graph: true, ..Default::default() };
    assert!(out.backward_with_options(options).is_err());
}
