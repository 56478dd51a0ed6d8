//! Plans: a training step served from one, steps that deviate, and every block apart from every other on a simulated
//! device.

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};

use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::storage::plan::{Plan, PlanStats};
use claystone::{DType, Device, Result, Tensor, manual_seed};
use common::{each_device, vec};

/// Statistics and the random generator are the process's: tests that look at them take turns.
fn take_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A two-layer perceptron, its optimiser and its data.
struct Training {
    net: Sequential,
    sgd: Sgd,
    x: Tensor,
    y: Tensor,
}

impl Training {
    fn new(device: Device) -> Training {
        manual_seed(7);
        let options = (DType::F32, device);
        let mut net = Sequential::new()
            .push(Linear::new(64, 128, options).unwrap().with_activation(Activation::Relu))
            .push(Linear::new(128, 10, options).unwrap());
        let config = SgdConfig { lr: 0.1, momentum: 0.9, ..Default::default() };
        let sgd = Sgd::new(net.parameters_mut(), config).unwrap();
        let x = Tensor::rand(&[32, 64], options).unwrap();
        let y = Tensor::randint(0, 10, &[32], (DType::I64, device)).unwrap();
        Training { net, sgd, x, y }
    }

    /// A step on the first `rows` rows.
    fn step(&mut self, rows: usize) -> Result<f32> {
        self.sgd.zero_grad();
        let (x, y) = (self.x.narrow(0, 0, rows)?, self.y.narrow(0, 0, rows)?);
        let loss = self.net.forward(&x)?.cross_entropy(&y)?;
        loss.backward()?;
        self.sgd.step()?;
        loss.item()
    }
}

/// (runs, hits, misses) between two looks.
fn since(before: PlanStats, plan: &Plan) -> (u64, u64, u64) {
    let now = plan.stats();
    (now.runs - before.runs, now.hits - before.hits, now.misses - before.misses)
}

#[test]
fn a_training_step_under_a_plan_reserves_what_is_planned() {
    let _turn = take_turn();
    each_device(|device| {
        let mut plain = Training::new(device);
        let want: Vec<f32> = (0..12).map(|_| plain.step(32).unwrap()).collect();
        drop(plain);

        let mut training = Training::new(device);
        let mut got = vec![training.step(32).unwrap()]; // warm: everything that persists is there
        let (loss, mut plan) = Plan::record(device, || training.step(32)).unwrap();
        got.push(loss.unwrap());
        assert!(plan.blocks() > 5 && plan.arena() > 0 && plan.lower_bound() <= plan.arena(), "{plan}");

        device.empty_cache().unwrap();
        let persistent = device.memory_stats().unwrap();
        got.push(plan.run(|| training.step(32)).unwrap());
        let first = device.memory_stats().unwrap();
        assert_eq!(
            first.reserved_bytes.current,
            persistent.reserved_bytes.current + plan.arena(),
            "{plan} on {device}"
        );
        assert_eq!(first.allocated_bytes.current, persistent.allocated_bytes.current + plan.arena());
        device.reset_accumulated_stats().unwrap();
        device.reset_peak_stats().unwrap();
        while got.len() < want.len() {
            got.push(plan.run(|| training.step(32)).unwrap());
        }
        let last = device.memory_stats().unwrap();
        assert_eq!(last.reserved_bytes.peak, first.reserved_bytes.current);
        assert_eq!((last.num_device_alloc, last.num_device_free), (0, 0), "driver calls on {device}");
        assert_eq!(last.allocation.allocated, 0, "requests that the allocator saw on {device}");

        let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&want), "on {device}");
        let PlanStats { runs, hits, misses, .. } = plan.stats();
        assert_eq!((runs, hits, misses), (10, 10 * plan.blocks() as u64, 0));
        println!("{plan}");

        drop(plan);
        assert_eq!(device.memory_stats().unwrap().allocated_bytes.current, persistent.allocated_bytes.current);
    });
}

#[test]
fn another_batch_size_is_a_miss_and_right_all_the_same() {
    let _turn = take_turn();
    each_device(|device| {
        let rows = [32, 32, 32, 20, 32, 7, 7, 32];
        let mut plain = Training::new(device);
        let want = rows.map(|rows| plain.step(rows).unwrap().to_bits());
        let mut training = Training::new(device);
        let mut got = vec![training.step(rows[0]).unwrap().to_bits()];
        let (loss, mut plan) = Plan::record(device, || training.step(rows[1])).unwrap();
        got.push(loss.unwrap().to_bits());
        for &rows in &rows[2..] {
            let before = plan.stats();
            got.push(plan.run(|| training.step(rows)).unwrap().to_bits());
            let (_, hits, misses) = since(before, &plan);
            assert_eq!(misses == 0, rows == 32, "{rows} rows on {device}: {hits} hits, {misses} misses");
            assert_eq!(hits == plan.blocks() as u64, rows == 32);
        }
        assert_eq!(got, want, "on {device}");
    });
}

/// A few tensors, the last of which is the result.
fn chain(x: &Tensor, steps: usize) -> Result<Tensor> {
    (0..steps).try_fold(x.shallow_clone(), |y, _| y.add_scalar(1)?.mul_scalar(2))
}

#[test]
fn results_that_outlive_the_step_are_left_to_the_allocator() {
    let _turn = take_turn();
    each_device(|device| {
        let x = Tensor::ones(1000, device).unwrap();
        let (first, mut plan) = Plan::record(device, || chain(&x, 3).unwrap()).unwrap();
        let results: Vec<Tensor> = (0..4).map(|_| plan.run(|| chain(&x, 3).unwrap())).collect();
        drop(plan);
        results.iter().for_each(|result| assert_eq!(vec(result), vec(&first)));
        assert_eq!(vec(&first), [22.0; 1000]);
    });
}
