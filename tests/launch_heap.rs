//! An operation asks the host's heap for nothing, once its kernel and its memory are there.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use claystone::optim::*;
use claystone::{DType, Device, Graph, Result, Tensor};

/// Counts what this thread asks for. Drivers have their own heap.
struct Counting;

thread_local! {
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    let _ = ASKED.try_with(|asked| asked.set(asked.get() + 1));
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

type Step = Box<dyn FnMut() -> Result<()>>;

/// Steps of every optimiser, two parameters in f32 or bf16, with another learning rate each time.
fn optimisers(device: Device) -> Result<Vec<(String, Step)>> {
    fn of<R: Rule + 'static>(rule: R, dtype: DType, device: Device) -> Result<(String, Step)> {
        let leaf = |n: usize| Tensor::ones(n, (dtype, device))?.requires_grad_(true);
        let (mut a, mut b) = (leaf(6)?, leaf(4)?);
        let mut optimizer = Fused::new(vec![&mut a, &mut b], rule)?;
        a.sum((), false)?.add(&b.sum((), false)?)?.backward()?;
        let mut lr = 0.1;
        let step = move || {
            lr *= 0.99;
            optimizer.set_learning_rates(&[lr])?;
            optimizer.step()
        };
        Ok((format!("{} of {dtype}", R::NAME), Box::new(step)))
    }
    let mut steps = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        steps.push(of(SgdConfig { momentum: 0.9, ..Default::default() }, dtype, device)?);
        steps.push(of(AdamConfig { amsgrad: true, ..Default::default() }, dtype, device)?);
        steps.push(of(AdamWConfig::default(), dtype, device)?);
        steps.push(of(RmsPropConfig { centered: true, ..Default::default() }, dtype, device)?);
        steps.push(of(AdagradConfig::default(), dtype, device)?);
        steps.push(of(LionConfig::default(), dtype, device)?);
    }
    Ok(steps)
}

#[test]
fn launches_ask_the_heap_for_nothing() {
    for device in common::devices().into_iter().filter(|&d| d != Device::Cpu) {
        let make = |seed: usize| -> Result<Tensor> {
            let values: Vec<f32> = (0..24).map(|i| (i * 7 % (11 + seed)) as f32 / 8.0).collect();
            Tensor::from_slice(&values, [4, 6], device)
        };
        let (x, y) = (make(0).unwrap(), make(1).unwrap());
        let row = y.narrow(0, 1, 1).unwrap();
        let turned = x.t().unwrap();
        let (bias, shift) = (row.contiguous().unwrap().flatten(0, 1).unwrap(), turned.narrow(0, 1, 1).unwrap());
        let shift = shift.contiguous().unwrap().flatten(0, 1).unwrap();
        let labels = Tensor::from_slice(&[3i64, 0, 2, 1], 4, device).unwrap();
        type Case<'a> = (&'a str, Box<dyn Fn() -> Result<Tensor> + 'a>);
        let cases: [Case; 16] = [
            ("add", Box::new(|| x.add(&y))),
            ("add a row", Box::new(|| x.add(&row))),
            ("relu", Box::new(|| x.relu())),
            ("mul_scalar", Box::new(|| x.mul_scalar(2.0))),
            ("addcmul", Box::new(|| x.addcmul(&y, &row, 0.5))),
            ("transposed copy", Box::new(|| turned.contiguous())),
            ("sum", Box::new(|| x.sum((), false))),
            ("sum of rows", Box::new(|| x.sum(1, false))),
            ("sum of columns", Box::new(|| x.sum(0, false))),
            ("softmax", Box::new(|| x.softmax(1))),
            ("layer_norm", Box::new(|| x.layer_norm(&[6], Some(&bias), Some(&bias), 1e-5))),
            ("matmul", Box::new(|| x.matmul(&turned))),
            ("linear", Box::new(|| x.linear(&y, Some(&shift)))),
            ("index_select", Box::new(|| x.index_select(0, &labels))),
            ("embedding", Box::new(|| x.embedding(&labels))),
            ("cross_entropy", Box::new(|| x.cross_entropy(&labels))),
        ];
        for (name, op) in &cases {
            (0..3).for_each(|_| drop(op().unwrap())); // builds the kernel, fills the caches
            let before = ASKED.get();
            (0..20).for_each(|_| drop(op().unwrap()));
            assert_eq!(ASKED.get() - before, 0, "20 times {name} on {device}");
        }
        // In place, and given back on the way.
        (0..3).for_each(|_| _ = y.add_(&x).unwrap());
        let before = ASKED.get();
        (0..20).for_each(|_| _ = y.add_(&x).unwrap());
        assert_eq!(ASKED.get() - before, 0, "add_ on {device}");
        // Steps of optimisers, whose learning rate changes.
        for (name, step) in &mut optimisers(device).unwrap() {
            (0..3).for_each(|_| step().unwrap());
            let before = ASKED.get();
            (0..20).for_each(|_| step().unwrap());
            assert_eq!(ASKED.get() - before, 0, "20 steps of {name} on {device}");
        }
        // Replays, of kernels, fills and copies.
        let work = || Tensor::zeros(6, device)?.add(&x)?.softmax(1)?.t()?.contiguous();
        let (graph, _out) = Graph::capture(device, work).unwrap();
        graph.replay().unwrap();
        let before = ASKED.get();
        (0..20).for_each(|_| graph.replay().unwrap());
        assert_eq!(ASKED.get() - before, 0, "a replay on {device}");
        device.synchronize().unwrap();
    }
}
