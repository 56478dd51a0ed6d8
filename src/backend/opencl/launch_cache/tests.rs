//! Counts which launches are planned and which are found in the cache, and checks that results are right in both cases.

use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};

use crate::backend::opencl::launch_cache::*;
use crate::device::opencl;
use crate::device::opencl::Knob;
use crate::storage::{MemoryMode, with_memory_mode};

/// Launches that this thread has kept so far.
fn kept() -> usize {
    TABLE.with_borrow(|table| table.kept)
}

fn devices() -> impl Iterator<Item = Device> {
    (0..opencl::count()).map(Device::OpenCL)
}

/// One test at a time: a change of a parameter makes all threads forget.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sevenths(shape: impl Into<crate::Shape>, device: Device) -> Result<Tensor> {
    let shape = shape.into();
    let values: Vec<f32> = (0..shape.numel()).map(|i| (i * i % 23) as f32 / 7.0 - 1.0).collect();
    Tensor::from_vec(values, shape, device)
}

/// The matrices, a row, and labels.
struct Operands {
    x: Tensor,
    y: Tensor,
    row: Tensor,
    labels: Tensor,
}

impl Operands {
    fn new(device: Device) -> Result<Operands> {
        Ok(Operands {
            x: sevenths([40, 40], device)?,
            y: sevenths([40, 40], device)?,
            row: sevenths(40, device)?,
            labels: Tensor::from_vec((0..40).map(|i| i * 3 % 40).collect::<Vec<i64>>(), 40, device)?,
        })
    }

    fn from(&self, start: usize) -> Result<Tensor> {
        self.y.flatten(0, 1)?.narrow(0, start, 1024)?.reshape([32, 32])
    }
}

type Case = (&'static str, fn(&Operands) -> Result<Tensor>);

/// No two of these are prepared alike.
const CASES: [Case; 26] = [
    ("add", |o| o.x.add(&o.y)),
    ("sub", |o| o.x.sub(&o.y)),
    ("add a row", |o| o.x.add(&o.row)),
    ("add a column", |o| o.x.add(&o.row.unsqueeze(1)?)),
    ("add transposed", |o| o.x.add(&o.y.t()?)),
    ("add i64", |o| o.labels.add(&o.labels)),
    ("copy", |o| o.x.t()?.contiguous()),
    ("relu of a part", |o| o.from(0)?.relu()),
    ("relu of a part that is not aligned", |o| o.from(1)?.relu()),
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

/// With buffers, whose launches are prepared and kept, whatever the environment says of images.
fn buffers<R>(f: impl FnOnce() -> R) -> R {
    with_memory_mode(MemoryMode::Buffer, f)
}

/// One after another, so that a launch which was looked up wrongly would give another one's results.
#[test]
fn repeated_calls_are_prepared_once() {
    let _alone = alone();
    for device in devices() {
        // A new thread, whose cache is empty.
        let rounds = std::thread::spawn(move || {
            buffers(|| {
                let (right, operands) = (Operands::new(Device::Cpu).unwrap(), Operands::new(device).unwrap());
                for round in 0..3 {
                    for (name, case) in &CASES {
                        let before = kept();
                        let got = case(&operands).unwrap();
                        let prepared = kept() - before;
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
fn only_how_a_tensor_is_aligned_counts() {
    let _alone = alone();
    buffers(|| {
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
                for (start, new) in [(3, true), (3 + ALIGNED, false), (3 + 9 * ALIGNED, false), (4, true), (20, false)]
                {
                    let before = kept();
                    let got = f(&operands.from(start).unwrap()).unwrap();
                    assert_eq!(kept() > before, new, "{name} from {start} on, on {device}");
                    assert_close(
                        &format!("{name} from {start} on, on {device}"),
                        &got,
                        &f(&right.from(start).unwrap()).unwrap(),
                    );
                }
            }
        }
    });
}

/// A storage that is read while it is written is only like another one that is.
#[test]
fn in_place_is_another_launch() {
    let _alone = alone();
    buffers(|| {
        for device in devices() {
            let (a, b) = (sevenths(100, device).unwrap(), sevenths(100, device).unwrap());
            let sum = a.add(&b).unwrap();
            let before = kept();
            a.add_(&b).unwrap();
            assert_eq!(kept(), before + 1);
            assert!(a.equal(&sum).unwrap());
            let (early, late) = (a.narrow(0, 0, 64).unwrap(), a.narrow(0, 32, 64).unwrap());
            let right = early.add(&late).unwrap();
            late.add_(&early).unwrap();
            assert!(late.equal(&right).unwrap(), "overlapping views on {device}");
        }
    });
}

#[test]
fn a_thread_knows_so_many_at_most() {
    let _alone = alone();
    buffers(|| {
        let Some(device) = devices().next() else { return };
        let before = kept();
        for n in 1..=2 * SETS * WAYS {
            let x = sevenths(n, Device::Cpu).unwrap().to_device(device).unwrap();
            drop(x.neg().unwrap());
        }
        assert_eq!(kept() - before, 2 * SETS * WAYS);
        let known =
            TABLE.with_borrow(|table| (table.slots.len(), table.slots.iter().flat_map(|way| &way.entry).count()));
        assert_eq!(known.0, SETS * WAYS);
        assert!(known.1 > SETS * WAYS / 2, "slots are used: {known:?}");
        let again = kept();
        drop(sevenths(2 * SETS * WAYS, device).unwrap().neg().unwrap());
        assert_eq!(kept(), again, "the latest is known");
    });
}

/// On every thread.
#[test]
fn a_parameter_that_changes_is_looked_at() {
    let _alone = alone();
    for device in devices() {
        let Device::OpenCL(index) = device else { unreachable!("a list of OpenCL devices") };
        let cl = opencl::open(index).unwrap();
        let ((go, calls), (say, counts)) = (mpsc::channel::<()>(), mpsc::channel());
        let thread = std::thread::spawn(move || {
            buffers(|| {
                let x = sevenths(64, device).unwrap();
                while calls.recv().is_ok() {
                    let before = kept();
                    drop(x.relu().unwrap());
                    say.send(kept() - before).unwrap();
                }
            })
        });
        let call = || {
            go.send(()).unwrap();
            counts.recv().unwrap()
        };
        assert_eq!((call(), call()), (1, 0));
        cl.set_tuned(Knob::MapGroup, cl.tuned(Knob::MapGroup));
        assert_eq!((call(), call()), (1, 0), "after a change, on {device}");
        drop(go);
        thread.join().unwrap();
    }
}
