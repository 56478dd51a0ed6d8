use claystone::device::count_launches;
use claystone::distributed::{DataParallel, DataParallelOptions, Group, ReduceOp, ZeroRedundancyOptimizer};
use claystone::nn::{Module, PRelu};
use claystone::optim::{
    AdagradConfig, Adam, AdamConfig, AdamW, AdamWConfig, Fused, GradScaler, GradScalerConfig, LionConfig, Optimizer,
    RmsPropConfig, Rule, Scheduler, Sgd, SgdConfig, StepLr, clip_grad_norm_,
};
use claystone::{DType, Device, Error, Result, Tensor};

use crate::collectives::on_ranks;
use crate::common::values;
use crate::training::{
    Net, accumulated_losses, assert_ranks_match_one_process, batch, losses_of_one_process, losses_together, sgd,
    small_buckets,
};

/// Returns a network that is replicated on all ranks, and an optimizer that is sharded over the ranks.
fn sharded_model<R: Rule + PartialEq + Copy>(
    group: &Group,
    dtype: DType,
    options: DataParallelOptions,
    rule: R,
) -> Result<(DataParallel<Net>, ZeroRedundancyOptimizer<Fused<R>>)> {
    let net = Net::new(1 + group.rank() as u64, dtype, group.device())?;
    let mut net = DataParallel::new(net, group, options)?;
    let optimizer = ZeroRedundancyOptimizer::new(&mut net, |parameters| Fused::grouped(parameters, |_, _| rule))?;
    Ok((net, optimizer))
}

#[test]
fn any_number_of_ranks_trains_as_one() {
    assert_ranks_match_one_process(
        |dtype| losses_of_one_process(100, dtype),
        |group, dtype| {
            let (net, mut sgd) = sharded_model(group, dtype, small_buckets(), sgd())?;
            losses_together(group, 0..100, dtype, &net, &mut sgd)
        },
    );
}

#[test]
fn gradients_accumulate_before_reduction() {
    assert_ranks_match_one_process(
        |dtype| losses_of_one_process(100, dtype),
        |group, dtype| {
            let (net, mut sgd) = sharded_model(group, dtype, small_buckets(), sgd())?;
            accumulated_losses(group, dtype, &net, &mut sgd)
        },
    );
}

/// A rank's shard of a bucket is contiguous, even if it has elements of two parameters, so a step takes one launch per bucket.
#[test]
fn steps_are_one_launch_per_bucket() {
    on_ranks(3, |group| {
        let (net, mut adamw) = sharded_model(group, DType::F32, Default::default(), AdamWConfig::default())?;
        let (x, _) = batch(0, (0, 1), DType::F32, group.device())?;
        net.forward(&x)?.sum((), false)?.backward()?;
        let (stepped, launches) = count_launches(|| adamw.step());
        assert_eq!(launches, 1);
        stepped
    });
}

fn parameters_of(net: &impl Module) -> Vec<f64> {
    net.parameters().into_iter().flat_map(|p| values(&p.detach())).collect()
}

fn close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= tolerance, "{what}, element {i}: {got}, {want}");
    }
}

/// Runs five steps. Calls `before` with the optimizer before each step.
fn five_steps(
    group: &Group,
    dtype: DType,
    net: &impl Module,
    optimizer: &mut dyn Optimizer,
    mut before: impl FnMut(&mut dyn Optimizer) -> Result<()>,
) -> Result<Vec<f64>> {
    for step in 0..5 {
        let (x, y) = batch(step, (group.rank(), group.size()), dtype, group.device())?;
        optimizer.zero_grad();
        net.forward(&x)?.mse_loss(&y)?.backward()?;
        before(optimizer)?;
        optimizer.step()?;
    }
    Ok(parameters_of(net))
}

/// Checks that the sharded optimizer gives the same parameters as an unsharded optimizer on every rank.
fn assert_matches_whole_optimizer<R: Rule + PartialEq + Copy + Sync>(rule: R, dtype: DType, tolerance: f64) {
    for ranks in [1, 2, 3, 4] {
        on_ranks(ranks, |group| {
            let mut whole = DataParallel::new(Net::new(1, dtype, group.device())?, group, Default::default())?;
            let mut optimizer = Fused::new(whole.parameters_mut(), rule)?;
            let want = five_steps(group, dtype, &whole, &mut optimizer, |_| Ok(()))?;
            let (net, mut optimizer) = sharded_model(group, dtype, small_buckets(), rule)?;
            let got = five_steps(group, dtype, &net, &mut optimizer, |_| Ok(()))?;
            close(&got, &want, tolerance, &format!("{} of {dtype}, rank {} of {ranks}", R::NAME, group.rank()));
            Ok(())
        });
    }
}

#[test]
fn every_optimizer_can_be_sharded() {
    assert_matches_whole_optimizer(
        SgdConfig { lr: 0.1, momentum: 0.9, nesterov: true, ..Default::default() },
        DType::F32,
        1e-6,
    );
    assert_matches_whole_optimizer(
        AdamConfig { lr: 0.1, amsgrad: true, weight_decay: 0.1, ..Default::default() },
        DType::F32,
        1e-5,
    );
    assert_matches_whole_optimizer(AdamWConfig { lr: 0.1, ..Default::default() }, DType::F32, 1e-5);
    assert_matches_whole_optimizer(LionConfig { lr: 0.1, ..Default::default() }, DType::F32, 1e-6);
    assert_matches_whole_optimizer(
        RmsPropConfig { momentum: 0.5, centered: true, ..Default::default() },
        DType::F32,
        1e-5,
    );
    assert_matches_whole_optimizer(AdagradConfig { lr: 0.1, ..Default::default() }, DType::F32, 1e-5);
}

/// Steps that are too small to change a bf16 weight must accumulate in the f32 master weights.
#[test]
fn sharded_halves_keep_f32_weights() {
    assert_matches_whole_optimizer(SgdConfig { lr: 1e-3, momentum: 0.9, ..Default::default() }, DType::BF16, 0.0);
}

#[test]
fn gradients_can_be_reduced_in_halves() {
    on_ranks(2, |group| {
        let options = DataParallelOptions { gradient_dtype: Some(DType::BF16), ..small_buckets() };
        let mut whole = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, options.clone())?;
        let mut optimizer = Sgd::new(whole.parameters_mut(), sgd())?;
        let want = five_steps(group, DType::F32, &whole, &mut optimizer, |_| Ok(()))?;
        let (net, mut optimizer) = sharded_model(group, DType::F32, options, sgd())?;
        let got = five_steps(group, DType::F32, &net, &mut optimizer, |_| Ok(()))?;
        close(&got, &want, 1e-6, "bf16 on the way");
        Ok(())
    });
}

#[test]
fn each_rank_stores_a_shard_of_the_state() {
    let bytes = |state: claystone::io::StateDict| -> usize {
        state.iter().filter(|(_, t)| t.rank() > 0).map(|(_, t)| t.numel() * t.dtype().size()).sum()
    };
    for ranks in [1, 2, 4] {
        for (rank, (own, whole)) in on_ranks(ranks, |group| {
            let (mut net, divided) = sharded_model(group, DType::F32, Default::default(), AdamWConfig::default())?;
            let whole = AdamW::new(net.parameters_mut(), AdamWConfig::default())?;
            Ok((bytes(Optimizer::state_dict(&divided)?), bytes(Optimizer::state_dict(&whole)?)))
        }) {
            // Shards are rounded up to equal sizes. The state has two numbers per element of a parameter.
            let share = whole.div_ceil(8).div_ceil(ranks) * 8;
            assert_eq!(whole, 8 * (10 * 16 + 16 + 16 * 3 + 3));
            assert!(own <= share && own + 8 * ranks >= share, "rank {rank} of {ranks} has {own} bytes of {whole}");
        }
    }
}

#[test]
fn gradient_norms_are_clipped_over_all_ranks() {
    for norm_type in [2.0, 1.0, f64::INFINITY] {
        for ranks in [1, 3, 4] {
            on_ranks(ranks, |group| {
                let mut norms = [Vec::new(), Vec::new()];
                let net = Net::new(1, DType::F32, group.device())?;
                let mut whole = DataParallel::new(net, group, Default::default())?;
                let mut optimizer = Sgd::new(whole.parameters_mut(), sgd())?;
                for step in 0..5 {
                    let (x, y) = batch(step, (group.rank(), group.size()), DType::F32, group.device())?;
                    optimizer.zero_grad();
                    whole.forward(&x)?.mse_loss(&y)?.backward()?;
                    norms[0].push(clip_grad_norm_(whole.parameters(), 0.1, norm_type)?.item::<f32>()?);
                    optimizer.step()?;
                }
                let (net, mut optimizer) = sharded_model(group, DType::F32, small_buckets(), sgd())?;
                for step in 0..5 {
                    let (x, y) = batch(step, (group.rank(), group.size()), DType::F32, group.device())?;
                    optimizer.zero_grad();
                    net.forward(&x)?.mse_loss(&y)?.backward()?;
                    assert!(net.parameters().iter().all(|p| p.grad().is_none()), "each rank has a part of them only");
                    norms[1].push(optimizer.clip_grad_norm_(0.1, norm_type)?.item::<f32>()?);
                    optimizer.step()?;
                }
                close(&parameters_of(&net), &parameters_of(&whole), 1e-5, "clipped");
                for (got, want) in norms[1].iter().zip(&norms[0]) {
                    assert!((got - want).abs() <= 1e-5 * want && *want > 0.1, "{got}, {want}");
                }
                assert!(optimizer.clip_grad_norm_(-1.0, norm_type).is_err());
                Ok(())
            });
        }
    }
}

#[test]
fn schedules_set_the_rates_of_named_groups_on_every_rank() {
    for (_, (rates, got, want)) in on_ranks(4, |group| {
        let config = |name: &str, p: &Tensor| AdamWConfig {
            lr: if name.starts_with("second") { 0.1 } else { 0.01 },
            weight_decay: if p.rank() < 2 { 0.0 } else { 0.1 },
            ..Default::default()
        };
        let scheduled = |group: &Group, net: &DataParallel<Net>, optimizer: &mut dyn Optimizer| {
            let mut scheduler = Scheduler::new(optimizer, StepLr { step_size: 2, gamma: 0.5 })?;
            five_steps(group, DType::F32, net, optimizer, |optimizer| scheduler.step(optimizer))
        };
        let mut whole = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, Default::default())?;
        let mut optimizer = AdamW::grouped(whole.named_parameters_mut(""), config)?;
        let want = scheduled(group, &whole, &mut optimizer)?;
        let mut net = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, small_buckets())?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&mut net, |named| AdamW::grouped(named, config))?;
        let got = scheduled(group, &net, &mut optimizer)?;
        Ok((optimizer.learning_rates(), got, want))
    }) {
        assert_eq!(rates, [0.0025, 0.0025, 0.025, 0.025]);
        close(&got, &want, 1e-5, "scheduled");
    }
}

/// If the gradients of one rank overflow, all ranks must skip the step; otherwise their weights would differ.
#[test]
fn ranks_skip_a_step_together() {
    for (rank, (stepped, unchanged, factor)) in on_ranks(3, |group| {
        let (net, mut optimizer) = sharded_model(group, DType::F32, small_buckets(), sgd())?;
        let mut scaler = GradScaler::new(GradScalerConfig::default())?;
        let before = parameters_of(&net);
        let mut stepped = Vec::new();
        for step in 0..2 {
            let (x, y) = batch(step, (group.rank(), group.size()), DType::F32, group.device())?;
            // One element of the last bias gets an infinite gradient. The element is in the shard of the last rank.
            let factor = if step == 0 && group.rank() == 1 { f64::INFINITY } else { 1.0 };
            let out = net.forward(&x)?;
            optimizer.zero_grad();
            let loss = out.mse_loss(&y)?.add(&out.i((.., 2))?.mean((), false)?.mul_scalar(factor)?)?;
            scaler.scale(&loss)?.backward()?;
            stepped.push(scaler.step(&mut optimizer)?);
            scaler.update();
            if step == 0 {
                stepped.push(parameters_of(&net) == before);
            }
        }
        Ok((stepped[0] || !stepped[2], stepped[1], scaler.get_scale()))
    }) {
        assert!(!stepped && unchanged, "rank {rank}");
        assert_eq!(factor, 32768.0);
    }
}

#[test]
fn parameters_unused_by_all_ranks_do_not_change() {
    let options = || DataParallelOptions { find_unused_parameters: true, ..small_buckets() };
    let step = |group: &Group, net: &DataParallel<Net>, optimizer: &mut dyn Optimizer, second: bool| {
        let (x, _) = batch(0, (0, 1), DType::F32, group.device())?;
        optimizer.zero_grad();
        let hidden = net.module().first.forward(&x)?;
        // The second layer is used by rank 0 alone, or by no rank.
        let out = if second && group.rank() == 0 { net.module().second.forward(&hidden)? } else { hidden };
        out.sum((), false)?.backward()?;
        optimizer.step()
    };
    on_ranks(3, |group| {
        let config = AdamWConfig { lr: 0.1, weight_decay: 0.1, ..Default::default() };
        let mut whole = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, options())?;
        let mut adamw = AdamW::new(whole.parameters_mut(), config)?;
        let (net, mut divided) = sharded_model(group, DType::F32, options(), config)?;
        let before = parameters_of(&net);
        for second in [false, true, false] {
            step(group, &whole, &mut adamw, second)?;
            step(group, &net, &mut divided, second)?;
            close(&parameters_of(&net), &parameters_of(&whole), 1e-5, "unused parameters");
            let second_layer = 10 * 16 + 16..before.len();
            assert_eq!(
                parameters_of(&net)[second_layer.clone()] == before[second_layer],
                !second && adamw_is_new(&adamw)
            );
        }
        Ok(())
    });
}

/// True if the optimizer never updated the second layer.
fn adamw_is_new(adamw: &AdamW) -> bool {
    let state = Optimizer::state_dict(adamw).unwrap();
    state.get("state.2.step").unwrap().item::<i64>().unwrap() == 0
}

#[test]
fn parameters_written_between_steps_take_effect() {
    for dtype in [DType::F32, DType::BF16] {
        on_ranks(2, |group| {
            let (net, mut optimizer) = sharded_model(group, dtype, small_buckets(), sgd())?;
            five_steps(group, dtype, &net, &mut optimizer, |_| Ok(()))?;
            let other = Net::new(9, dtype, group.device())?;
            net.load_state_dict(&other.state_dict(), true)?;
            optimizer.set_learning_rate(0.0);
            five_steps(group, dtype, &net, &mut optimizer, |_| Ok(()))?;
            assert_eq!(parameters_of(&net), parameters_of(&other));
            Ok(())
        });
    }
}

/// Tensors that share the parameters' memory must show each step.
#[test]
fn earlier_state_dicts_show_later_steps() {
    on_ranks(2, |group| {
        let mut net = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, Default::default())?;
        let state = net.state_dict();
        let before = values(state.get("second.bias").expect("it has one"));
        let mut sgd = ZeroRedundancyOptimizer::new(&mut net, |named| Sgd::grouped(named, |_, _| sgd()))?;
        five_steps(group, DType::F32, &net, &mut sgd, |_| Ok(()))?;
        let after = values(state.get("second.bias").expect("it has one"));
        assert_eq!(after, values(&net.module().second.bias().expect("it has one").detach()));
        assert_ne!(after, before);
        Ok(())
    });
}

#[test]
fn mismatched_optimizers_are_errors() {
    let group = &Group::threads(&[Device::Cpu]).unwrap()[0];
    let (mut net, mut optimizer) = sharded_model(group, DType::F32, Default::default(), sgd()).unwrap();
    let error_message = |e: Result<()>| e.unwrap_err().to_string();
    let another = |net: &mut DataParallel<Net>| {
        ZeroRedundancyOptimizer::new(net, |named| Sgd::grouped(named, |_, _| sgd())).map(drop)
    };
    assert!(error_message(another(&mut net)).contains("already has such an optimiser"));
    net.to_dtype(DType::F64).unwrap();
    assert!(error_message(optimizer.step()).contains("was converted"));
    drop(optimizer);
    assert!(error_message(another(&mut net)).contains("parameters have changed"));
    let mut net = DataParallel::new(Net::new(1, DType::F32, Device::Cpu).unwrap(), group, Default::default()).unwrap();
    let (_other, mut amsgrad) =
        sharded_model(group, DType::F32, Default::default(), AdamConfig { amsgrad: true, ..Default::default() })
            .unwrap();
    let (_net, mut adam) = sharded_model(group, DType::F32, Default::default(), AdamConfig::default()).unwrap();
    let states = [Optimizer::state_dict(&adam).unwrap(), Optimizer::state_dict(&amsgrad).unwrap()];
    assert!(
        error_message(Optimizer::load_state_dict(&mut amsgrad, &states[0])).contains("lacks state.0.max_exp_avg_sq")
    );
    assert!(error_message(Optimizer::load_state_dict(&mut adam, &states[1])).contains("has state.0.max_exp_avg_sq"));
    Optimizer::load_state_dict(&mut adam, &states[0]).unwrap();
    let moved = ZeroRedundancyOptimizer::new(&mut net, |named| {
        let mut copies: Vec<Tensor> =
            named.iter().map(|(_, p)| p.detach().clone().requires_grad_(true).unwrap()).collect();
        Sgd::new(copies.iter_mut().collect(), sgd())
    });
    assert!(matches!(moved.map(drop), Err(Error::Invalid { .. })));
    // After the optimizer is dropped, backward must give full gradients again.
    let x = Tensor::ones([2, 10], Device::Cpu).unwrap();
    net.forward(&x).unwrap().sum((), false).unwrap().backward().unwrap();
    assert!(net.parameters().iter().all(|p| p.grad().is_some()));
    let sum = Tensor::ones(1, Device::Cpu).unwrap();
    group.all_reduce(&sum, ReduceOp::Sum).unwrap();
}

/// With more ranks than elements, some ranks have no element to update. Their steps must succeed.
#[test]
fn ranks_may_have_no_elements() {
    for (_, weight) in on_ranks(4, |group| {
        let mut net = DataParallel::new(PRelu::new(1, 0.25, group.device())?, group, Default::default())?;
        let mut adam = ZeroRedundancyOptimizer::new(&mut net, |p| Adam::grouped(p, |_, _| AdamConfig::default()))?;
        let x = Tensor::full([2, 1], -1.0, group.device())?;
        for _ in 0..3 {
            adam.zero_grad();
            net.forward(&x)?.sum((), false)?.backward()?;
            adam.clip_grad_norm_(1.0, 2.0)?;
            adam.step()?;
        }
        Ok(parameters_of(&net))
    }) {
        assert!((weight[0] - 0.253).abs() < 1e-5, "{weight:?}");
    }
}

/// Optimizers must move parameters into one buffer even if `DataParallel` has hooks on their gradients.
#[test]
fn optimizers_move_parameters_into_one_buffer() {
    on_ranks(2, |group| {
        let mut net = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, Default::default())?;
        let _sgd = Sgd::new(net.parameters_mut(), sgd())?;
        let parameters = net.parameters();
        assert!(parameters.iter().all(|p| p.shares_storage(parameters[0])));
        Ok(())
    });
}
