//! Training steps captured in graphs. Step counts, learning rates and random numbers must advance in each replay as in direct calls.

use claystone::autograd::checkpoint;
use claystone::ops::Seed;
use claystone::optim::{
    AdagradConfig, AdamConfig, AdamWConfig, Fused, LionConfig, Optimizer, RmsPropConfig, Rule, Scheduler, SgdConfig,
    StepLr,
};
use claystone::{DType, Device, Generator, Graph, Result, Tensor, no_grad, with_generator};

use crate::common::{opencl, scattered, values, vec};

/// Two parameters, their optimizer, and the gradients of each step.
struct Pair<R> {
    leaves: [Tensor; 2],
    gradients: [Tensor; 2],
    optimizer: Fused<R>,
}

impl<R: Rule> Pair<R> {
    fn new(rule: R, dtype: DType, device: Device) -> Pair<R> {
        let of = |shape: &[usize], scale| scattered(shape, scale, device).to_dtype(dtype).unwrap();
        let mut leaves = [of(&[6, 7], 2.0), of(&[9], 3.0)].map(|t| t.requires_grad_(true).unwrap());
        let optimizer = Fused::new(leaves.iter_mut().collect(), rule).unwrap();
        let gradients = [of(&[6, 7], 1.5), of(&[9], 0.7)];
        Pair { leaves, gradients, optimizer }
    }

    fn step(&mut self) -> Result<()> {
        self.optimizer.zero_grad();
        for (leaf, gradient) in self.leaves.iter().zip(&self.gradients) {
            leaf.mul(gradient)?.sum((), false)?.backward()?;
        }
        self.optimizer.step()
    }

    fn state(&self) -> Vec<(String, Vec<f64>)> {
        let of = |(name, t): (&str, &Tensor)| (name.to_string(), values(t));
        let dict = self.optimizer.state_dict().unwrap();
        let leaves = self.leaves.iter().map(|leaf| ("leaf".to_string(), values(&leaf.detach())));
        dict.iter().map(of).chain(leaves).collect()
    }
}

/// Compares captured steps with direct steps while the learning rate changes, and direct steps after replays.
fn assert_replays_match<R: Rule>(rule: R) {
    for device in opencl() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let make = || Pair::new(rule.clone(), dtype, device);
            let (mut eager, mut replayed) = (make(), make());
            // One step is made before the capture, so that the first replay is not the optimizer's first step.
            eager.step().unwrap();
            replayed.step().unwrap();
            let schedule = || StepLr { step_size: 2, gamma: 0.5 };
            let mut schedulers =
                [&mut eager, &mut replayed].map(|pair| Scheduler::new(&mut pair.optimizer, schedule()).unwrap());
            let (graph, ()) = Graph::capture(device, || replayed.step()).unwrap();
            assert_eq!(replayed.state(), eager.state(), "{} captured in {dtype} on {device}", R::NAME);
            for step in 0..5 {
                for (i, scale) in [1.0, 0.3].into_iter().enumerate() {
                    for pair in [&eager, &replayed] {
                        pair.gradients[i].mul_scalar_(1.0 + scale * f64::from(step)).unwrap();
                    }
                }
                eager.step().unwrap();
                graph.replay().unwrap();
                assert_eq!(replayed.state(), eager.state(), "{} step {step} in {dtype} on {device}", R::NAME);
                for (pair, scheduler) in [&mut eager, &mut replayed].into_iter().zip(&mut schedulers) {
                    scheduler.step(&mut pair.optimizer).unwrap();
                }
                // Parameters that are written between steps must affect both optimizers.
                if step == 2 {
                    no_grad(|| [&eager, &replayed].map(|pair| pair.leaves[0].mul_scalar_(0.5).map(drop).unwrap()));
                }
                if step == 3 {
                    eager.step().unwrap();
                    replayed.step().unwrap();
                }
            }
            // The saved state must contain the number of steps, including replayed steps.
            let mut other = make();
            other.optimizer.load_state_dict(&replayed.optimizer.state_dict().unwrap()).unwrap();
            let steps = |pair: &Pair<R>| pair.optimizer.state_dict().unwrap().get("state.0.step").map(values);
            assert_eq!((steps(&other), steps(&eager)), (Some(vec![7.0]), Some(vec![7.0])));
        }
    }
}

/// If a capture has several steps, a replay must count each of them.
#[test]
fn captures_of_several_steps_count_each_step() {
    for device in opencl() {
        for dtype in [DType::F32, DType::BF16] {
            let make = || Pair::new(AdamWConfig { lr: 0.1, ..Default::default() }, dtype, device);
            let (mut eager, mut replayed) = (make(), make());
            let steps = |pair: &mut Pair<_>| -> Result<()> {
                pair.step()?;
                pair.step()?;
                pair.step()
            };
            let (graph, ()) = Graph::capture(device, || steps(&mut replayed)).unwrap();
            for round in 0..3 {
                steps(&mut eager).unwrap();
                graph.replay().unwrap();
                assert_eq!(replayed.state(), eager.state(), "round {round} in {dtype} on {device}");
            }
            // Now only one parameter has a gradient. The captured step updates both parameters, so it must refuse to be replayed.
            replayed.optimizer.zero_grad();
            replayed.leaves[0].square().unwrap().sum((), false).unwrap().backward().unwrap();
            replayed.optimizer.step().unwrap();
            let before = replayed.state();
            let message = graph.replay().unwrap_err().to_string();
            assert!(message.contains("capture it again"), "{message}");
            assert_eq!(replayed.state(), before, "{dtype} on {device}");
        }
    }
}

#[test]
fn replayed_adam_steps_match_direct_steps() {
    assert_replays_match(AdamWConfig { lr: 0.1, ..Default::default() });
    assert_replays_match(AdamConfig { lr: 0.1, amsgrad: true, weight_decay: 0.1, ..Default::default() });
}

#[test]
fn replayed_steps_of_other_optimizers_match_direct_steps() {
    assert_replays_match(SgdConfig { lr: 0.1, momentum: 0.9, dampening: 0.5, ..Default::default() });
    assert_replays_match(AdagradConfig { lr: 0.1, lr_decay: 0.3, ..Default::default() });
    assert_replays_match(RmsPropConfig { momentum: 0.5, centered: true, ..Default::default() });
    assert_replays_match(LionConfig::default());
}

/// A failed capture must not change the optimizer or its f32 master weights.
#[test]
fn failed_captures_do_not_count_steps() {
    for device in opencl() {
        let rule = AdamWConfig { lr: 0.1, ..Default::default() };
        let (mut eager, mut failed) = (Pair::new(rule, DType::BF16, device), Pair::new(rule, DType::BF16, device));
        eager.step().unwrap();
        failed.step().unwrap();
        let captured = Graph::capture(device, || {
            failed.step()?;
            failed.leaves[0].detach().to_vec::<half::bf16>()
        });
        assert!(captured.is_err());
        let (never_replayed, ()) = Graph::capture(device, || failed.step()).unwrap();
        drop(never_replayed);
        eager.step().unwrap();
        failed.step().unwrap();
        assert_eq!(failed.state(), eager.state(), "on {device}");
    }
}

/// Draws random numbers of every kind, and computes gradients that repeat draws.
fn draw_every_kind(x: &Tensor) -> Result<Vec<Tensor>> {
    let device = x.device();
    let leaf = x.detach().requires_grad_(true)?;
    let dropped = leaf.dropout(0.4)?.mul(&leaf)?;
    dropped.sum((), false)?.backward()?;
    let again = x.detach().requires_grad_(true)?;
    checkpoint(|x| x[0].dropout(0.3)?.sin(), &[&again])?.sum((), false)?.backward()?;
    let filled = x.empty_like()?;
    filled.t()?.normal_(1.0, 2.0)?;
    let probabilities = x.abs()?.clamp_max(1.0)?;
    Ok(vec![
        Tensor::rand(&[5, 9], device)?,
        Tensor::randn(&[1000], (DType::F64, device))?,
        Tensor::rand(&[33], (DType::BF16, device))?,
        Tensor::randint(-3, 9, &[70], (DType::I64, device))?,
        dropped.detach(),
        leaf.grad().unwrap(),
        again.grad().unwrap(),
        filled,
        probabilities.bernoulli()?,
        probabilities.add_scalar(0.1)?.multinomial(6, false)?,
        probabilities.add_scalar(0.1)?.multinomial(6, true)?,
        x.reshape([3, 7, 2])?.dropout2d(0.5)?,
    ])
}

#[test]
fn replays_draw_the_numbers_of_direct_calls() {
    for device in opencl() {
        let x = scattered(&[6, 7], 2.0, device);
        let (eager, captured) = (Generator::new(5), Generator::new(5));
        let (graph, results) =
            with_generator(&captured, || Graph::capture(device, || draw_every_kind(&x.narrow(0, 0, 6)?))).unwrap();
        assert_eq!(captured.state(), Seed { key: 5, stream: 0 }, "a capture draws nothing");
        let mut before = Vec::new();
        for round in 0..4 {
            let want = with_generator(&eager, || draw_every_kind(&x)).unwrap();
            graph.replay().unwrap();
            let got: Vec<Vec<f64>> = results.iter().map(values).collect();
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got, &values(want), "result {i} of round {round} on {device}");
            }
            assert!(got != before, "others each time");
            before = got;
            assert_eq!(captured.state(), eager.state());
            // Direct calls and replays may alternate, and both generators may be seeded again in between.
            let between = |generator| with_generator(generator, || Tensor::rand(5, device)).unwrap();
            assert_eq!(vec(&between(&eager)), vec(&between(&captured)));
            if round == 1 {
                [&eager, &captured].into_iter().for_each(|generator| generator.manual_seed(1 << 40 | 17));
            }
        }
    }
}

/// A graph may draw from two generators. A captured backward may repeat draws made outside the graph, and vice versa.
#[test]
fn graphs_may_use_several_generators() {
    for device in opencl() {
        let (a, b) = (Generator::new(1), Generator::new(2));
        let of = |generator: &Generator| with_generator(generator, || Tensor::rand(4, device));
        let (graph, drawn) = Graph::capture(device, || Ok([of(&a)?, of(&b)?, of(&a)?])).unwrap();
        for _ in 0..2 {
            graph.replay().unwrap();
        }
        let (c, d) = (Generator::new(1), Generator::new(2));
        c.set_state(Seed { key: 1, stream: 2 });
        d.set_state(Seed { key: 2, stream: 1 });
        let want = [of(&c).unwrap(), of(&d).unwrap(), of(&c).unwrap()];
        assert_eq!(drawn.each_ref().map(vec), want.each_ref().map(vec));

        let leaf = scattered(&[50], 2.0, device).requires_grad_(true).unwrap();
        let dropped = leaf.dropout(0.5).unwrap();
        let (graph, ()) = Graph::capture(device, || dropped.sum((), false)?.backward()).unwrap();
        graph.replay().unwrap();
        let kept = |t: &Tensor| vec(t).into_iter().map(|x| x != 0.0).collect::<Vec<_>>();
        assert_eq!(kept(&leaf.grad().unwrap()), kept(&dropped.detach()));
        // A backward outside the graph must repeat the draws of the last replay.
        let leaf = scattered(&[50], 2.0, device).requires_grad_(true).unwrap();
        let (graph, dropped) = Graph::capture(device, || leaf.dropout(0.5)).unwrap();
        graph.replay().unwrap();
        graph.replay().unwrap();
        dropped.sum((), false).unwrap().backward().unwrap();
        assert_eq!(kept(&leaf.grad().unwrap()), kept(&dropped.detach()));
    }
}
