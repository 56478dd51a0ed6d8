use claystone::device::count_launches;
use claystone::distributed::{DataParallel, DataParallelOptions, Group, ReduceOp, ZeroRedundancyOptimizer};
use claystone::nn::{Module, PRelu};
use claystone::optim::{
    AdagradConfig, Adam, AdamConfig, AdamW, AdamWConfig, Fused, GradScaler, GradScalerConfig, LionConfig, Optimizer,
    RmsPropConfig, Rule, Scheduler, Sgd, SgdConfig, StepLr, clip_grad_norm_,
};
use claystone::{DType, Device, Error, Result, Tensor};

use crate::collectives::all;
use crate::common::values;
use crate::training::{
    Net, accumulated_losses, alone, any_number_of_ranks_is_one, batch, losses_together, sgd, small_buckets,
};

/// A net on all ranks, and an optimiser that is divided among them.
fn divided<R: Rule + PartialEq + Copy>(
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
    any_number_of_ranks_is_one(
        |dtype| alone(100, dtype),
        |group, dtype| {
            let (net, mut sgd) = divided(group, dtype, small_buckets(), sgd())?;
            losses_together(group, 0..100, dtype, &net, &mut sgd)
        },
    );
}

#[test]
fn gradients_add_up_before_they_travel() {
    any_number_of_ranks_is_one(
        |dtype| alone(100, dtype),
        |group, dtype| {
            let (net, mut sgd) = divided(group, dtype, small_buckets(), sgd())?;
            accumulated_losses(group, dtype, &net, &mut sgd)
        },
    );
}

/// The parts of a bucket's parameters lie one after another, on ranks that have the end of one and the beginning of another too.
#[test]
fn a_step_is_a_launch_for_each_bucket() {
    all(3, |group| {
        let (net, mut adamw) = divided(group, DType::F32, Default::default(), AdamWConfig::default())?;
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

/// Five steps, of which `before` sees the optimiser before each.
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

/// The whole optimiser on every rank and the divided one come to the same parameters.
fn is_the_whole_one<R: Rule + PartialEq + Copy + Sync>(rule: R, dtype: DType, tolerance: f64) {
    for ranks in [1, 2, 3, 4] {
        all(ranks, |group| {
            let mut whole = DataParallel::new(Net::new(1, dtype, group.device())?, group, Default::default())?;
            let mut optimizer = Fused::new(whole.parameters_mut(), rule)?;
            let want = five_steps(group, dtype, &whole, &mut optimizer, |_| Ok(()))?;
            let (net, mut optimizer) = divided(group, dtype, small_buckets(), rule)?;
            let got = five_steps(group, dtype, &net, &mut optimizer, |_| Ok(()))?;
            close(&got, &want, tolerance, &format!("{} of {dtype}, rank {} of {ranks}", R::NAME, group.rank()));
            Ok(())
        });
    }
}

#[test]
fn every_optimiser_can_be_divided() {
    is_the_whole_one(SgdConfig { lr: 0.1, momentum: 0.9, nesterov: true, ..Default::default() }, DType::F32, 1e-6);
    is_the_whole_one(AdamConfig { lr: 0.1, amsgrad: true, weight_decay: 0.1, ..Default::default() }, DType::F32, 1e-5);
    is_the_whole_one(AdamWConfig { lr: 0.1, ..Default::default() }, DType::F32, 1e-5);
    is_the_whole_one(LionConfig { lr: 0.1, ..Default::default() }, DType::F32, 1e-6);
    is_the_whole_one(RmsPropConfig { momentum: 0.5, centered: true, ..Default::default() }, DType::F32, 1e-5);
    is_the_whole_one(AdagradConfig { lr: 0.1, ..Default::default() }, DType::F32, 1e-5);
}

/// Steps that a bf16 weight does not show add up in the f32 master weights.
#[test]
fn halves_keep_their_masters() {
    is_the_whole_one(SgdConfig { lr: 1e-3, momentum: 0.9, ..Default::default() }, DType::BF16, 0.0);
}

#[test]
fn gradients_travel_in_halves() {
    all(2, |group| {
        let options = DataParallelOptions { gradient_dtype: Some(DType::BF16), ..small_buckets() };
        let mut whole = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, options.clone())?;
        let mut optimizer = Sgd::new(whole.parameters_mut(), sgd())?;
        let want = five_steps(group, DType::F32, &whole, &mut optimizer, |_| Ok(()))?;
        let (net, mut optimizer) = divided(group, DType::F32, options, sgd())?;
        let got = five_steps(group, DType::F32, &net, &mut optimizer, |_| Ok(()))?;
        close(&got, &want, 1e-6, "bf16 on the way");
        Ok(())
    });
}

#[test]
fn each_rank_has_its_share_of_the_state() {
    let bytes = |state: claystone::io::StateDict| -> usize {
        state.iter().filter(|(_, t)| t.rank() > 0).map(|(_, t)| t.numel() * t.dtype().size()).sum()
    };
    for ranks in [1, 2, 4] {
        for (rank, (own, whole)) in all(ranks, |group| {
            let (mut net, divided) = divided(group, DType::F32, Default::default(), AdamWConfig::default())?;
            let whole = AdamW::new(net.parameters_mut(), AdamWConfig::default())?;
            Ok((bytes(Optimizer::state_dict(&divided)?), bytes(Optimizer::state_dict(&whole)?)))
        }) {
            // Shares are rounded up to one size; the state is two numbers a parameter.
            let share = whole.div_ceil(8).div_ceil(ranks) * 8;
            assert_eq!(whole, 8 * (10 * 16 + 16 + 16 * 3 + 3));
            assert!(own <= share && own + 8 * ranks >= share, "rank {rank} of {ranks} has {own} bytes of {whole}");
        }
    }
}

#[test]
fn norms_are_clipped_over_all_ranks() {
    for norm_type in [2.0, 1.0, f64::INFINITY] {
        for ranks in [1, 3, 4] {
            all(ranks, |group| {
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
                let (net, mut optimizer) = divided(group, DType::F32, small_buckets(), sgd())?;
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
    for (_, (rates, got, want)) in all(4, |group| {
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

/// Where one rank's gradients overflow no rank steps.
#[test]
fn ranks_skip_a_step_together() {
    for (rank, (stepped, unchanged, factor)) in all(3, |group| {
        let (net, mut optimizer) = divided(group, DType::F32, small_buckets(), sgd())?;
        let mut scaler = GradScaler::new(GradScalerConfig::default())?;
        let before = parameters_of(&net);
        let mut stepped = Vec::new();
        for step in 0..2 {
            let (x, y) = batch(step, (group.rank(), group.size()), DType::F32, group.device())?;
            // One element of the last bias, which is the last rank's, gets an infinite gradient.
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
fn parameters_that_no_rank_reaches_stay_as_they_are() {
    let options = || DataParallelOptions { find_unused_parameters: true, ..small_buckets() };
    let step = |group: &Group, net: &DataParallel<Net>, optimizer: &mut dyn Optimizer, second: bool| {
        let (x, _) = batch(0, (0, 1), DType::F32, group.device())?;
        optimizer.zero_grad();
        let hidden = net.module().first.forward(&x)?;
        // The second layer is reached on rank 0 alone, or on none.
        let out = if second && group.rank() == 0 { net.module().second.forward(&hidden)? } else { hidden };
        out.sum((), false)?.backward()?;
        optimizer.step()
    };
    all(3, |group| {
        let config = AdamWConfig { lr: 0.1, weight_decay: 0.1, ..Default::default() };
        let mut whole = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, options())?;
        let mut adamw = AdamW::new(whole.parameters_mut(), config)?;
        let (net, mut divided) = divided(group, DType::F32, options(), config)?;
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

/// Whether the second layer was never stepped.
fn adamw_is_new(adamw: &AdamW) -> bool {
    let state = Optimizer::state_dict(adamw).unwrap();
    state.get("state.2.step").unwrap().item::<i64>().unwrap() == 0
}

#[test]
fn what_is_written_to_parameters_between_steps_counts() {
    for dtype in [DType::F32, DType::BF16] {
        all(2, |group| {
            let (net, mut optimizer) = divided(group, dtype, small_buckets(), sgd())?;
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

/// Memory that somebody else holds stays where everybody sees the steps.
#[test]
fn state_dicts_taken_before_follow() {
    all(2, |group| {
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
fn what_does_not_go_together_is_told() {
    let group = &Group::threads(&[Device::Cpu]).unwrap()[0];
    let (mut net, mut optimizer) = divided(group, DType::F32, Default::default(), sgd()).unwrap();
    let told = |e: Result<()>| e.unwrap_err().to_string();
    let another = |net: &mut DataParallel<Net>| {
        ZeroRedundancyOptimizer::new(net, |named| Sgd::grouped(named, |_, _| sgd())).map(drop)
    };
    assert!(told(another(&mut net)).contains("has one already"));
    net.to_dtype(DType::F64).unwrap();
    assert!(told(optimizer.step()).contains("was converted"));
    drop(optimizer);
    assert!(told(another(&mut net)).contains("other parameters"));
    let mut net = DataParallel::new(Net::new(1, DType::F32, Device::Cpu).unwrap(), group, Default::default()).unwrap();
    let (_other, mut amsgrad) =
        divided(group, DType::F32, Default::default(), AdamConfig { amsgrad: true, ..Default::default() }).unwrap();
    let (_net, mut adam) = divided(group, DType::F32, Default::default(), AdamConfig::default()).unwrap();
    let states = [Optimizer::state_dict(&adam).unwrap(), Optimizer::state_dict(&amsgrad).unwrap()];
    assert!(told(Optimizer::load_state_dict(&mut amsgrad, &states[0])).contains("no state.0.max_exp_avg_sq"));
    assert!(told(Optimizer::load_state_dict(&mut adam, &states[1])).contains("has state.0.max_exp_avg_sq"));
    Optimizer::load_state_dict(&mut adam, &states[0]).unwrap();
    let moved = ZeroRedundancyOptimizer::new(&mut net, |named| {
        let mut copies: Vec<Tensor> =
            named.iter().map(|(_, p)| p.detach().clone().requires_grad_(true).unwrap()).collect();
        Sgd::new(copies.iter_mut().collect(), sgd())
    });
    assert!(matches!(moved.map(drop), Err(Error::Invalid { .. })));
    // Without the optimiser backward leaves whole gradients again.
    let x = Tensor::ones([2, 10], Device::Cpu).unwrap();
    net.forward(&x).unwrap().sum((), false).unwrap().backward().unwrap();
    assert!(net.parameters().iter().all(|p| p.grad().is_some()));
    let sum = Tensor::ones(1, Device::Cpu).unwrap();
    group.all_reduce(&sum, ReduceOp::Sum).unwrap();
}

/// More ranks than elements: some have nothing to step.
#[test]
fn ranks_may_have_nothing() {
    for (_, weight) in all(4, |group| {
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

/// Optimisers step parameters in one buffer, though hooks wait for their gradients.
#[test]
fn an_optimiser_moves_the_parameters_of_a_model() {
    all(2, |group| {
        let mut net = DataParallel::new(Net::new(1, DType::F32, group.device())?, group, Default::default())?;
        let _sgd = Sgd::new(net.parameters_mut(), sgd())?;
        let parameters = net.parameters();
        assert!(parameters.iter().all(|p| p.shares_storage(parameters[0])));
        Ok(())
    });
}
