//! Memory plans: a training step whose allocations a plan serves, steps that deviate from the plan, and a check on a simulated
//! device that blocks do not overlap.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use claystone::device::StreamId;
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::storage::plan::{Plan, PlanStats};
use claystone::storage::{Allocator, Block, CachingAllocator, Config, Driver, HistoryOptions, Sim, SimOptions};
use claystone::{DType, Device, Result, Stream, Tensor, manual_seed, with_stream};
use proptest::prelude::*;

use crate::common::{each_device, in_own_process, serial_guard, vec};

/// A two-layer perceptron, its optimizer and its data.
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
            .push(Linear::new(128, 128, options).unwrap().with_activation(Activation::Relu))
            .push(Linear::new(128, 10, options).unwrap());
        let config = SgdConfig { lr: 0.1, momentum: 0.9, ..Default::default() };
        let sgd = Sgd::new(net.parameters_mut(), config).unwrap();
        let x = Tensor::rand(&[32, 64], options).unwrap();
        let y = Tensor::randint(0, 10, &[32], (DType::I64, device)).unwrap();
        Training { net, sgd, x, y }
    }

    /// Runs a training step on the first `rows` rows, and returns the loss.
    fn step(&mut self, rows: usize) -> Result<f32> {
        self.sgd.zero_grad();
        let (x, y) = (self.x.narrow(0, 0, rows)?, self.y.narrow(0, 0, rows)?);
        let loss = self.net.forward(&x)?.cross_entropy(&y)?;
        loss.backward()?;
        self.sgd.step()?;
        loss.item()
    }
}

/// Returns the plan's runs, hits and misses since `before`.
fn stats_since(before: PlanStats, plan: &Plan) -> (u64, u64, u64) {
    let now = plan.stats();
    (now.runs - before.runs, now.hits - before.hits, now.misses - before.misses)
}

#[test]
fn training_steps_under_a_plan_reserve_the_planned_bytes() {
    if !in_own_process("plans::training_steps_under_a_plan_reserve_the_planned_bytes") {
        return;
    }
    each_device(|device| {
        let mut plain = Training::new(device);
        let want: Vec<f32> = (0..12).map(|_| plain.step(32).unwrap()).collect();
        drop(plain);

        let mut training = Training::new(device);
        let mut got = vec![training.step(32).unwrap()]; // warm-up: allocates all memory that outlives a step
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
fn other_batch_sizes_are_misses_with_correct_results() {
    let _guard = serial_guard();
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
            let (_, hits, misses) = stats_since(before, &plan);
            assert_eq!(misses == 0, rows == 32, "{rows} rows on {device}: {hits} hits, {misses} misses");
            assert_eq!(hits == plan.blocks() as u64, rows == 32);
        }
        assert_eq!(got, want, "on {device}");
    });
}

/// Computes a chain of temporary tensors and returns the last one.
fn chain(x: &Tensor, steps: usize) -> Result<Tensor> {
    (0..steps).try_fold(x.shallow_clone(), |y, _| y.add_scalar(1)?.mul_scalar(2))
}

#[test]
fn results_that_outlive_the_step_are_not_planned() {
    let _guard = serial_guard();
    each_device(|device| {
        let x = Tensor::ones(1000, device).unwrap();
        let (first, mut plan) = Plan::record(device, || chain(&x, 3).unwrap()).unwrap();
        let results: Vec<Tensor> = (0..4).map(|_| plan.run(|| chain(&x, 3).unwrap())).collect();
        drop(plan);
        results.iter().for_each(|result| assert_eq!(vec(result), vec(&first)));
        assert_eq!(vec(&first), [22.0; 1000]);
    });
}

#[test]
fn blocks_kept_longer_than_recorded_are_not_reused() {
    let _guard = serial_guard();
    each_device(|device| {
        let x = Tensor::ones(1000, device).unwrap();
        let mut kept: Vec<Tensor> = Vec::new();
        let step = |keep: Option<&mut Vec<Tensor>>| {
            let y = x.add_scalar(1).unwrap();
            keep.into_iter().for_each(|kept| kept.push(y.shallow_clone()));
            chain(&y, 2).unwrap().sum((), false).unwrap().item::<f32>().unwrap()
        };
        let (want, mut plan) = Plan::record(device, || step(None)).unwrap();
        let before = device.memory_stats().unwrap().allocated_bytes.current;
        assert_eq!(want, 14_000.0);
        for run in 0..4 {
            let misses = plan.stats().misses;
            assert_eq!(plan.run(|| step(Some(&mut kept))), want);
            assert_eq!(plan.stats().misses > misses, run > 0, "run {run} on {device}: the first block is still there");
        }
        drop(plan);
        assert!(device.memory_stats().unwrap().allocated_bytes.current > before, "the arena is in use");
        kept.iter().for_each(|y| assert_eq!(vec(y), [2.0; 1000]));
        std::thread::spawn(move || drop(kept)).join().unwrap();
        assert_eq!(device.memory_stats().unwrap().allocated_bytes.current, before);
    });
}

#[test]
fn panics_end_a_run() {
    let _guard = serial_guard();
    each_device(|device| {
        let x = Tensor::ones(100, device).unwrap();
        let step = || chain(&x, 2).unwrap().sum((), false).unwrap().item::<f32>().unwrap();
        let (want, mut plan) = Plan::record(device, step).unwrap();
        let panics = || {
            let _some = chain(&x, 1).unwrap();
            panic!("on purpose");
        };
        assert!(catch_unwind(AssertUnwindSafe(|| plan.run(panics))).is_err());
        let hits = plan.stats().hits;
        assert_eq!(step(), want);
        assert_eq!(plan.stats().hits, hits, "after the panic the plan no longer serves");
        assert_eq!(plan.run(step), want);
        assert_eq!(stats_since(PlanStats::default(), &plan), (2, hits + plan.blocks() as u64, 0));
        // If the closure panics while it is recorded, no plan is made, and the next recording works.
        assert!(catch_unwind(AssertUnwindSafe(|| Plan::record(device, panics))).is_err());
        assert_eq!(Plan::record(device, step).unwrap().1.blocks(), plan.blocks());
    });
}

#[test]
fn plans_nest_and_threads_have_their_own() {
    let _guard = serial_guard();
    each_device(|device| {
        let run = |size: usize| {
            let x = Tensor::ones(size, device).unwrap();
            let sum = |x: &Tensor, n| chain(x, n).unwrap().sum((), false).unwrap().item::<f32>().unwrap();
            let (inner, mut inner_plan) = Plan::record(device, || sum(&x, 1)).unwrap();
            let (outer, mut plan) =
                Plan::record(device, || [sum(&x, 2), inner_plan.run(|| sum(&x, 1)), sum(&x, 3)]).unwrap();
            assert_eq!((outer[1], inner), (inner, 4.0 * size as f32));
            for _ in 0..20 {
                assert_eq!(plan.run(|| [sum(&x, 2), inner_plan.run(|| sum(&x, 1)), sum(&x, 3)]), outer);
            }
            assert_eq!(stats_since(PlanStats::default(), &plan), (20, 20 * plan.blocks() as u64, 0));
            assert_eq!(stats_since(PlanStats::default(), &inner_plan), (21, 21 * inner_plan.blocks() as u64, 0));
        };
        std::thread::scope(|scope| {
            scope.spawn(|| run(1000));
            scope.spawn(|| run(3000));
        });
    });
}

#[test]
fn plans_apply_to_the_recorded_stream_only() {
    let _guard = serial_guard();
    each_device(|device| {
        let side = Stream::new(device).unwrap();
        let x = Tensor::ones(1000, device).unwrap();
        side.wait_stream(&Stream::current(device).unwrap()).unwrap();
        let step = || chain(&x, 2).unwrap().sum((), false).unwrap().item::<f32>().unwrap();
        let (want, mut plan) = with_stream(&side, || Plan::record(device, step)).unwrap();
        assert!(plan.blocks() > 0, "{plan}");
        assert_eq!(with_stream(&side, || plan.run(step)), want);
        assert_eq!(stats_since(PlanStats::default(), &plan), (1, plan.blocks() as u64, 0), "on {device}");
        assert_eq!(plan.run(step), want);
        // Host memory is not tied to a stream, so on the CPU the run on the other stream counts as hits too.
        let hits = plan.blocks() as u64 * if device == Device::Cpu { 2 } else { 1 };
        assert_eq!(stats_since(PlanStats::default(), &plan), (2, hits, 0), "on {device}");
    });
}

/// Operations in a step on the simulated device.
#[derive(Debug, Clone, Copy)]
enum Op {
    /// Allocates a block on a stream. The fields are the size in bytes and the stream (0 or 1).
    Make(usize, u32),
    /// Frees one of the step's blocks, which the number selects.
    Free(usize),
    /// Keeps one of the step's blocks (which the number selects) beyond the end of the step.
    Keep(usize),
    /// Frees one of the kept blocks, which the number selects.
    FreeKept(usize),
    /// Uses one of the step's blocks (which the number selects) on the other stream.
    Share(usize),
}

type LiveBlock = (Arc<dyn Allocator>, Block, StreamId, u32);

/// A simulated device with the contents of its memory, its allocator, and the blocks that outlive their step.
struct SimulatedDevice {
    sim: Sim,
    allocator: Arc<dyn Allocator>,
    kept: Vec<LiveBlock>,
    tag: u32,
}

impl SimulatedDevice {
    fn new() -> SimulatedDevice {
        let sim =
            Sim::new(SimOptions { asynchronous: true, contents: true, capacity: 8 << 20, ..SimOptions::default() });
        let allocator = Arc::new(CachingAllocator::new(Arc::new(sim.clone()), Config::default()).unwrap());
        SimulatedDevice { sim, allocator, kept: Vec::new(), tag: 0 }
    }

    /// Checks that the block still has its tag after all commands that use the block, and frees the block.
    fn free(&self, (allocator, block, stream, tag): LiveBlock) {
        self.sim.check_tag(stream, &block, tag).unwrap();
        allocator.deallocate(block);
    }

    fn step(&mut self, allocator: &Arc<dyn Allocator>, ops: &[Op]) {
        let mut live: Vec<LiveBlock> = Vec::new();
        for &op in ops {
            let at = |which: usize, of: &[LiveBlock]| which.checked_rem(of.len());
            match op {
                Op::Make(bytes, stream) => {
                    let stream = self.sim.stream(stream);
                    let block = allocator.allocate(bytes, stream).unwrap();
                    self.tag += 1;
                    self.sim.write_tag(stream, &block, self.tag).unwrap();
                    live.push((Arc::clone(allocator), block, stream, self.tag));
                }
                Op::Free(which) => _ = at(which, &live).map(|at| self.free(live.swap_remove(at))),
                Op::Keep(which) => _ = at(which, &live).map(|at| self.kept.push(live.swap_remove(at))),
                Op::FreeKept(which) => {
                    if let Some(at) = at(which, &self.kept) {
                        let block = self.kept.swap_remove(at);
                        self.free(block);
                    }
                }
                Op::Share(which) => {
                    if let Some(at) = at(which, &live) {
                        let (allocator, block, stream, tag) = &live[at];
                        let other = self.sim.stream(1 - stream.index() as u32);
                        self.sim.stream_waits(other, &self.sim.record(*stream).unwrap()).unwrap();
                        self.sim.check_tag(other, block, *tag).unwrap();
                        allocator.record_stream(block, other);
                    }
                }
            }
            if self.tag.is_multiple_of(7) {
                self.sim.run_some(u64::from(self.tag));
            }
        }
        live.into_iter().rev().for_each(|block| self.free(block));
    }

    /// Checks that the simulation found no violations, and that all memory is released.
    fn finish(mut self) {
        std::mem::take(&mut self.kept).into_iter().for_each(|block| self.free(block));
        self.sim.synchronize().unwrap();
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        self.allocator.empty_cache().unwrap();
        assert_eq!((self.allocator.stats().active_bytes.current, self.sim.committed()), (0, 0));
    }
}

fn op(pure: bool) -> BoxedStrategy<Op> {
    let sizes = prop::sample::select(vec![1usize, 512, 600, 1024, 3000, 5000]);
    let make = sizes.clone().prop_map(|bytes| Op::Make(bytes, 0));
    let free = any::<usize>().prop_map(Op::Free);
    if pure {
        return prop_oneof![5 => make, 4 => free].boxed();
    }
    prop_oneof![
        10 => make,
        8 => free,
        1 => sizes.prop_map(|bytes| Op::Make(bytes, 1)),
        1 => any::<usize>().prop_map(Op::Keep),
        1 => any::<usize>().prop_map(Op::FreeKept),
        1 => any::<usize>().prop_map(Op::Share),
    ]
    .boxed()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 128 }))]

    /// Runs a recorded step in which operations are inserted, removed or replaced.
    #[test]
    fn steps_that_deviate_never_overlap(
        ops in prop::collection::vec(op(false), 1..80),
        edits in prop::collection::vec(prop::collection::vec((any::<prop::sample::Index>(), 0..3, op(false)), 0..6), 1..8),
    ) {
        let mut world = SimulatedDevice::new();
        let allocator = Arc::clone(&world.allocator);
        let (_, mut plan) = Plan::record_on(allocator, StreamId::DEFAULT, |a| world.step(a, &ops));
        for edits in edits {
            let mut ops = ops.clone();
            for (at, what, op) in edits {
                let at = at.index(ops.len());
                match what {
                    0 => ops.insert(at, op),
                    1 if ops.len() > 1 => _ = ops.remove(at),
                    _ => ops[at] = op,
                }
            }
            plan.run_on(|a| world.step(a, &ops));
        }
        drop(plan);
        world.finish();
    }

    /// Repeated runs of a recorded step neither search the allocator's free lists nor call the driver.
    #[test]
    fn steps_that_repeat_need_no_search(ops in prop::collection::vec(op(true), 1..80)) {
        let mut world = SimulatedDevice::new();
        let allocator = Arc::clone(&world.allocator);
        let (_, mut plan) = Plan::record_on(allocator, StreamId::DEFAULT, |a| world.step(a, &ops));
        let made = ops.iter().filter(|op| matches!(op, Op::Make(..))).count();
        prop_assert_eq!(plan.blocks(), made);
        plan.run_on(|a| world.step(a, &ops));
        let (calls, seen) = (world.sim.call_count(), world.allocator.stats().allocation.allocated);
        for _ in 0..3 {
            plan.run_on(|a| world.step(a, &ops));
        }
        prop_assert_eq!((world.sim.call_count(), world.allocator.stats().allocation.allocated), (calls, seen));
        prop_assert_eq!(stats_since(PlanStats::default(), &plan), (4, 4 * made as u64, 0));
        drop(plan);
        world.finish();
    }
}

/// If ten requests in the middle of a step change their size, only these ten are misses.
#[test]
fn a_plan_finds_its_place_again() {
    let mut world = SimulatedDevice::new();
    let sizes = |changed: std::ops::Range<usize>| -> Vec<Op> {
        let make = |i: usize| Op::Make(512 * (i + 1) + if changed.contains(&i) { 100_000 } else { 0 }, 0);
        (0..40).flat_map(|i| [make(i), Op::Free(0)]).collect()
    };
    let allocator = Arc::clone(&world.allocator);
    let (_, mut plan) = Plan::record_on(allocator, StreamId::DEFAULT, |a| world.step(a, &sizes(0..0)));
    assert_eq!((plan.blocks(), plan.arena(), plan.lower_bound()), (40, 40 * 512, 40 * 512));
    plan.run_on(|a| world.step(a, &sizes(15..25)));
    assert_eq!(stats_since(PlanStats::default(), &plan), (1, 30, 10));
    drop(plan);
    world.finish();
}

/// Blocks of zero bytes have no offset in the arena, so they must not make other blocks overlap.
#[test]
fn empty_blocks_take_no_space_in_the_arena() {
    let world = SimulatedDevice::new();
    let make = |a: &Arc<dyn Allocator>, bytes| a.allocate(bytes, StreamId::DEFAULT).unwrap();
    let (_, mut plan) = Plan::record_on(Arc::clone(&world.allocator), StreamId::DEFAULT, |a| {
        [512, 0, 512].into_iter().for_each(|bytes| a.deallocate(make(a, bytes)));
    });
    plan.run_on(|a| {
        let blocks = [512, 0, 512].map(|bytes| make(a, bytes));
        let place = |b: &Block| (b.location().segment().id(), b.location().offset());
        assert_ne!(place(&blocks[0]), place(&blocks[2]));
        blocks.into_iter().for_each(|block| a.deallocate(block));
    });
    drop(plan);
    world.finish();
}

/// Snapshots mark the memory of a plan.
#[test]
fn snapshots_name_the_arena() {
    let mut world = SimulatedDevice::new();
    let allocator = Arc::clone(&world.allocator);
    allocator.record_memory_history(HistoryOptions::default()).unwrap();
    let ops = [Op::Make(5000, 0), Op::Make(70_000, 0), Op::Free(0), Op::Free(0)];
    let (_, mut plan) = Plan::record_on(Arc::clone(&allocator), StreamId::DEFAULT, |a| world.step(a, &ops));
    let arenas = || {
        let snapshot = allocator.snapshot();
        snapshot.check().unwrap();
        let blocks = snapshot.segments.into_iter().flat_map(|segment| segment.blocks);
        blocks.filter(|b| b.frames.iter().any(|f| f.name == "plan")).map(|b| b.requested_size).collect::<Vec<_>>()
    };
    assert!(arenas().is_empty());
    (0..2).for_each(|_| plan.run_on(|a| world.step(a, &ops)));
    assert_eq!(arenas(), [plan.arena()]);
    drop(plan);
    assert!(arenas().is_empty());
    world.finish();
}

/// If the device has no contiguous memory for the arena, the allocator serves the step's blocks one by one.
#[test]
fn no_room_for_the_arena_is_a_run_of_misses() {
    let mut world = SimulatedDevice::new();
    let ops = [Op::Make(300 << 10, 0), Op::Make(300 << 10, 0)];
    let allocator = Arc::clone(&world.allocator);
    let (_, mut plan) = Plan::record_on(Arc::clone(&allocator), StreamId::DEFAULT, |a| world.step(a, &ops));
    world.step(&allocator, &[Op::Make(300 << 10, 0), Op::Keep(0)]);
    world.sim.set_others((7 << 20) + (150 << 10)); // room for two more blocks, but not for one block of their size
    allocator.empty_cache().unwrap();
    plan.run_on(|a| world.step(a, &ops[..1]));
    assert_eq!(stats_since(PlanStats::default(), &plan), (1, 0, 1));
    world.sim.set_others(0);
    plan.run_on(|a| world.step(a, &ops));
    assert_eq!(stats_since(PlanStats::default(), &plan), (2, 2, 1));
    drop(plan);
    world.finish();
}
