//! Tests that repeated launches use cached plans, and that new plans and cached plans give the right results.

use std::sync::{Mutex, MutexGuard, mpsc};

use crate::backend::opencl::launch_cache::*;
use crate::device::opencl;
use crate::device::opencl::TuningParameter;
use crate::storage::{MemoryMode, with_memory_mode};
use crate::sync;

/// Returns the number of plans that this thread has cached so far.
fn cached_plans() -> usize {
    PLAN_CACHE.with_borrow(|table| table.insertions)
}

fn devices() -> impl Iterator<Item = Device> {
    (0..opencl::count()).map(Device::OpenCL)
}

/// Serialises the tests, because a change of a tuning parameter clears the caches of all threads.
fn lock_tests() -> MutexGuard<'static, ()> {
    static TEST_LOCK: Mutex<()> = Mutex::new(());
    sync::lock(&TEST_LOCK)
}

fn test_values(shape: impl Into<crate::Shape>, device: Device) -> Result<Tensor> {
    let shape = shape.into();
    let values: Vec<f32> = (0..shape.numel()).map(|i| (i * i % 23) as f32 / 7.0 - 1.0).collect();
    Tensor::from_vec(values, shape, device)
}

/// The operands of the test cases: two matrices, a row, and labels.
struct Operands {
    x: Tensor,
    y: Tensor,
    row: Tensor,
    labels: Tensor,
}

impl Operands {
    fn new(device: Device) -> Result<Operands> {
        Ok(Operands {
            x: test_values([40, 40], device)?,
            y: test_values([40, 40], device)?,
            row: test_values(40, device)?,
            labels: Tensor::from_vec((0..40).map(|i| i * 3 % 40).collect::<Vec<i64>>(), 40, device)?,
        })
    }

    fn square_from(&self, start: usize) -> Result<Tensor> {
        self.y.flatten(0, 1)?.narrow(0, start, 1024)?.reshape([32, 32])
    }
}

type Case = (&'static str, fn(&Operands) -> Result<Tensor>);

/// The operations under test. All have different launch-cache keys.
const CASES: [Case; 26] = [
    ("add", |o| o.x.add(&o.y)),
    ("sub", |o| o.x.sub(&o.y)),
    ("add a row", |o| o.x.add(&o.row)),
    ("add a column", |o| o.x.add(&o.row.unsqueeze(1)?)),
    ("add transposed", |o| o.x.add(&o.y.t()?)),
    ("add i64", |o| o.labels.add(&o.labels)),
    ("copy", |o| o.x.t()?.contiguous()),
    ("relu of a part", |o| o.square_from(0)?.relu()),
    ("relu of a part that is not aligned", |o| o.square_from(1)?.relu()),
    ("sum of rows", |o| o.x.sum(1, false)),
    ("sum of columns", |o| o.x.sum(0, false)),
    ("sum", |o| o.x.sum((), false)),
    ("mean of rows", |o| o.x.mean(1, false)),
    ("argmax of rows", |o| o.x.argmax(1, false)),
    ("softmax of rows", |o| o.x.softmax(1)),
    ("softmax of columns", |o| o.x.softmax(0)),
    ("log_softmax of rows", |o| o.x.log_softmax(1)),
    ("layer_norm", |o| o.x.layer_norm(&[40], Some(&o.row), Some(&o.row), 1e-5)),
    ("layer_norm without a bias", |o| o.x.layer_norm(&[40], Some(&o.row), None, 1e-5)),
    ("layer_norm of another eps", |o| o.x.layer_norm(&[40], Some(&o.row), Some(&o.row), 0.5)),
    ("matmul", |o| o.x.matmul(&o.y)),
    ("matmul transposed", |o| o.x.matmul(&o.y.t()?)),
    ("linear", |o| o.x.linear(&o.y, Some(&o.row))),
    ("index_select of rows", |o| o.x.index_select(0, &o.labels)),
    ("index_select of columns", |o| o.x.index_select(1, &o.labels)),
    ("cross_entropy", |o| o.x.cross_entropy(&o.labels)),
];

fn assert_close(what: &str, got: &Tensor, right: &Tensor) {
    let values = |t: &Tensor| t.to(DType::F64, Device::Cpu).unwrap().to_vec::<f64>().unwrap();
    assert_eq!(got.shape(), right.shape(), "{what}");
    for (got, right) in values(got).into_iter().zip(values(right)) {
        assert!((got - right).abs() <= 1e-4 * right.abs().max(1.0), "{what}: {got} for {right}");
    }
}

/// Runs `f` in memory mode buffer, even if the environment asks for images, because only launches on buffers are cached.
fn with_buffers<R>(f: impl FnOnce() -> R) -> R {
    with_memory_mode(MemoryMode::Buffer, f)
}

/// The cases run alternately. A plan cached under a wrong key would give the result of another case.
#[test]
fn repeated_calls_are_planned_once() {
    let _guard = lock_tests();
    for device in devices() {
        // Runs in a new thread, whose cache is empty.
        let rounds = std::thread::spawn(move || {
            with_buffers(|| {
                let (right, operands) = (Operands::new(Device::Cpu).unwrap(), Operands::new(device).unwrap());
                for round in 0..3 {
                    for (name, case) in &CASES {
                        let before = cached_plans();
                        let got = case(&operands).unwrap();
                        let prepared = cached_plans() - before;
                        assert_eq!(prepared > 0, round == 0, "{name} on {device}, round {round}: {prepared} prepared");
                        assert_close(&format!("{name} on {device}"), &got, &case(&right).unwrap());
                    }
                }
                let Operands { x, y, row, labels } = &operands;
                assert!([x, y, row, labels].iter().all(|t| t.storage.is_unique()));
            })
        });
        rounds.join().unwrap();
    }
}

#[test]
fn offsets_count_only_by_their_alignment() {
    let _guard = lock_tests();
    with_buffers(|| {
        let right = Operands::new(Device::Cpu).unwrap();
        for device in devices() {
            let operands = Operands::new(device).unwrap();
            type Of = fn(&Tensor) -> Result<Tensor>;
            let of: [(&str, Of); 4] = [
                ("exp", |t| t.exp()),
                ("sum", |t| t.sum(0, false)),
                ("flipped sum", |t| t.flip([0, 1])?.sum(1, false)),
                ("matmul", |t| t.matmul(t)),
            ];
            for (name, f) in of {
                for (start, new) in [
                    (3, true),
                    (3 + OFFSET_ALIGNMENT_ELEMENTS, false),
                    (3 + 9 * OFFSET_ALIGNMENT_ELEMENTS, false),
                    (4, true),
                    (20, false),
                ] {
                    let before = cached_plans();
                    let got = f(&operands.square_from(start).unwrap()).unwrap();
                    assert_eq!(cached_plans() > before, new, "{name} from {start} on, on {device}");
                    assert_close(
                        &format!("{name} from {start} on, on {device}"),
                        &got,
                        &f(&right.square_from(start).unwrap()).unwrap(),
                    );
                }
            }
        }
    });
}

/// An in-place operation needs a plan of its own, because it reads the storage that it writes.
#[test]
fn in_place_launches_have_their_own_plan() {
    let _guard = lock_tests();
    with_buffers(|| {
        for device in devices() {
            let (a, b) = (test_values(100, device).unwrap(), test_values(100, device).unwrap());
            let sum = a.add(&b).unwrap();
            let before = cached_plans();
            a.add_(&b).unwrap();
            assert_eq!(cached_plans(), before + 1);
            assert!(a.equal(&sum).unwrap());
            let (early, late) = (a.narrow(0, 0, 64).unwrap(), a.narrow(0, 32, 64).unwrap());
            let right = early.add(&late).unwrap();
            late.add_(&early).unwrap();
            assert!(late.equal(&right).unwrap(), "overlapping views on {device}");
        }
    });
}

#[test]
fn the_cache_of_a_thread_is_bounded() {
    let _guard = lock_tests();
    with_buffers(|| {
        let Some(device) = devices().next() else { return };
        let before = cached_plans();
        for n in 1..=2 * SETS * WAYS {
            let x = test_values(n, Device::Cpu).unwrap().to_device(device).unwrap();
            drop(x.neg().unwrap());
        }
        assert_eq!(cached_plans() - before, 2 * SETS * WAYS);
        let known =
            PLAN_CACHE.with_borrow(|table| (table.slots.len(), table.slots.iter().flat_map(|way| &way.entry).count()));
        assert_eq!(known.0, SETS * WAYS);
        assert!(known.1 > SETS * WAYS / 2, "slots are used: {known:?}");
        let again = cached_plans();
        drop(test_values(2 * SETS * WAYS, device).unwrap().neg().unwrap());
        assert_eq!(cached_plans(), again, "the latest is known");
    });
}

/// A changed tuning parameter must drop the cached plans of all threads.
#[test]
fn a_changed_tuning_parameter_drops_cached_plans() {
    let _guard = lock_tests();
    for device in devices() {
        let Device::OpenCL(index) = device else { unreachable!("a list of OpenCL devices") };
        let cl = opencl::open(index).unwrap();
        let ((go, calls), (say, counts)) = (mpsc::channel::<()>(), mpsc::channel());
        let thread = std::thread::spawn(move || {
            with_buffers(|| {
                let x = test_values(64, device).unwrap();
                while calls.recv().is_ok() {
                    let before = cached_plans();
                    drop(x.relu().unwrap());
                    say.send(cached_plans() - before).unwrap();
                }
            })
        });
        let call = || {
            go.send(()).unwrap();
            counts.recv().unwrap()
        };
        assert_eq!((call(), call()), (1, 0));
        cl.tuning().set(TuningParameter::MapGroup, cl.tuned(TuningParameter::MapGroup));
        assert_eq!((call(), call()), (1, 0), "after a change, on {device}");
        drop(go);
        thread.join().unwrap();
    }
}
