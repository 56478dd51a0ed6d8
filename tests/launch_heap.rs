//! Checks that an operation allocates nothing on the host's heap if its kernel and device memory already exist, and that the number of
//! cached formulas is bounded.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use claystone::autograd::{GradOptions, grad, grad_with_options};
use claystone::ops::{MapInto, TensorSet, map_each};
use claystone::optim::*;
use claystone::profiler::{Category, profile};
use claystone::{DType, Device, Expr, Graph, Result, Tensor, no_grad};

/// An allocator that counts the allocations of this thread. Drivers have their own heap, which is not counted.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// The bytes that this thread has allocated and not freed.
    static HELD_BYTES: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let _ = ALLOCATIONS.try_with(|asked| asked.set(asked.get() + u64::from(bytes > 0)));
    let _ = HELD_BYTES.try_with(|held| held.set(held.get() + bytes));
}

// SAFETY: all calls are forwarded to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize);
        let _ = HELD_BYTES.try_with(|held| held.set(held.get() - layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

type Step = Box<dyn FnMut() -> Result<()>>;

/// Returns a step of every optimizer, on two parameters in f32 or bf16. The learning rate is new in each step.
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
fn launches_do_not_allocate_on_the_heap() {
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
            (0..3).for_each(|_| drop(op().unwrap())); // builds the kernel and fills the caches, so that later calls need not allocate
            let before = ALLOCATIONS.get();
            (0..20).for_each(|_| drop(op().unwrap()));
            assert_eq!(ALLOCATIONS.get() - before, 0, "20 times {name} on {device}");
        }
        // The operation in place.
        (0..3).for_each(|_| _ = y.add_(&x).unwrap());
        let before = ALLOCATIONS.get();
        (0..20).for_each(|_| _ = y.add_(&x).unwrap());
        assert_eq!(ALLOCATIONS.get() - before, 0, "add_ on {device}");
        // Steps of optimizers with a changing learning rate.
        for (name, step) in &mut optimisers(device).unwrap() {
            (0..3).for_each(|_| step().unwrap());
            let before = ALLOCATIONS.get();
            (0..20).for_each(|_| step().unwrap());
            assert_eq!(ALLOCATIONS.get() - before, 0, "20 steps of {name} on {device}");
        }
        // Replays of a graph with kernels, fills and copies.
        let work = || Tensor::zeros(6, device)?.add(&x)?.softmax(1)?.t()?.contiguous();
        let (graph, _out) = Graph::capture(device, work).unwrap();
        graph.replay().unwrap();
        let before = ALLOCATIONS.get();
        (0..20).for_each(|_| graph.replay().unwrap());
        assert_eq!(ALLOCATIONS.get() - before, 0, "a replay on {device}");
        device.synchronize().unwrap();
    }
}

/// A sign-descent rule whose formula contains the learning rate as a literal number.
#[derive(Clone)]
struct Literal {
    lr: f64,
}

impl Rule for Literal {
    const NAME: &'static str = "Literal";
    fn numbers(&self, _: i32) -> Vec<f64> {
        Vec::new()
    }
    fn update(&self, w: &Expr, g: &Expr, _: &[Expr], _: &[Expr]) -> (Expr, Vec<Expr>) {
        (w - self.lr * g.sign(), Vec::new())
    }
    fn learning_rate(&self) -> f64 {
        self.lr
    }
    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }
}

/// An API function that takes a formula with a number in it: its name, the number of calls on the CPU, and the call.
type FormulaApi<'a> = (&'a str, usize, Box<dyn Fn(f64) -> Result<f32> + 'a>);

fn formula_apis(device: Device) -> Result<Vec<FormulaApi<'static>>> {
    let x = Tensor::from_slice(&[0.5f32, -1.5, 2.0, 4.0], [2, 2], device)?;
    let w = x.try_clone()?.requires_grad_(true)?;
    let weight = Tensor::ones([2, 2], device)?.requires_grad_(true)?;
    let first = |t: &Tensor| Ok(t.to_vec::<f32>()?[0]);
    let (a, b, c, d, e) = (x.try_clone()?, x.try_clone()?, x.try_clone()?, w.shallow_clone(), w.shallow_clone());
    let (f, g, h) = (x.try_clone()?, x.try_clone()?, x.try_clone()?);
    Ok(vec![
        ("map", 100_000, Box::new(move |n| first(&Tensor::map(&[&x], |e| &e[0] * n)?))),
        ("map of two numbers", 2_000, Box::new(move |n| first(&Tensor::map(&[&a], |e| &e[0] * n + (1.0 + n))?))),
        (
            "map_with",
            2_000,
            Box::new(move |n| first(&Tensor::map_with(&[&b], |e| &e[0] / n, |_| vec![(1.0 / n).into()])?)),
        ),
        (
            "map_into",
            2_000,
            Box::new(move |n| {
                Tensor::map_into(&[&c], &[0.5.into()], &[&c], |e, s| vec![&e[0] * &s[0] + n])?;
                first(&c)
            }),
        ),
        (
            "gradients",
            2_000,
            Box::new(move |n| {
                let y = Tensor::map(&[&d], |e| (&e[0] * n).tanh() * n)?.sum((), false)?;
                first(&grad(&[&y], &[&d])?[0])
            }),
        ),
        (
            "second gradients",
            500,
            Box::new(move |n| {
                let y = Tensor::map(&[&e], |e| (&e[0] * n).sin().pow(n + 3.0))?.sum((), false)?;
                let options = GradOptions { create_graph: true, ..Default::default() };
                let slope = grad_with_options(&[&y], &[&e], options)?.remove(0).expect("y depends on it");
                first(&grad(&[&slope.sum((), false)?], &[&e])?[0])
            }),
        ),
        (
            "MapInto",
            2_000,
            Box::new(move |n| {
                let handle = || vec![f.shallow_clone()];
                MapInto::new("shrink", handle(), 1, handle(), |e, s| vec![&e[0] * n - &s[0]])?.launch(&[n.into()])?;
                first(&f)
            }),
        ),
        (
            "map_each",
            2_000,
            Box::new(move |n| {
                let sets =
                    [&g].map(|t| TensorSet { inputs: [t].into_iter().collect(), outputs: [t].into_iter().collect() });
                map_each("shrink", &sets, &[], &[], |x, _| vec![&x[0] * n])?;
                first(&g)
            }),
        ),
        (
            "linear_map",
            1_000,
            Box::new(move |n| {
                let y = h.linear_map(&weight, None, |z| z.leaky_relu(n) + n)?;
                first(&grad(&[&y.sum((), false)?], &[&weight])?[0])
            }),
        ),
        (
            "a rule",
            200,
            Box::new(move |n| {
                let mut w = Tensor::ones([2, 2], w.device())?.requires_grad_(true)?;
                let mut optimizer = Fused::new(vec![&mut w], Literal { lr: n })?;
                w.sum((), false)?.backward()?;
                optimizer.step()?;
                first(&w)
            }),
        ),
    ])
}

#[test]
fn changing_numbers_in_formulas_adds_no_programs_or_memory() {
    // Runs in its own process: it fills caches that other tests measure.
    if !common::in_own_process("changing_numbers_in_formulas_adds_no_programs_or_memory") {
        return;
    }
    for device in common::devices() {
        for (name, times, door) in formula_apis(device).unwrap() {
            let nth = |i: usize| 0.0137 + i as f64 * 1.7e-5;
            let times = if device == Device::Cpu { times } else { times.min(2_000) };
            let work = || (0..50).for_each(|i| _ = door(nth(i)).unwrap());
            let (_, profile) = profile(work).unwrap();
            let compiled = profile.events().iter().filter(|event| event.category == Category::Compile).count();
            assert!(compiled <= 24, "{name} on {device}: {compiled} programs");
            drop(profile);
            let before = HELD_BYTES.get();
            (50..times).for_each(|i| _ = door(nth(i)).unwrap());
            let grown = HELD_BYTES.get() - before;
            assert!(grown < 128 << 10, "{name} on {device}: {grown} bytes more after {times} numbers");
        }
    }
}

/// Returns a different formula for each `n`.
fn formula(x: &Expr, n: usize) -> Expr {
    (0..usize::BITS - n.leading_zeros()).fold(x.clone(), |e, bit| if n >> bit & 1 == 1 { e.abs() + x } else { e * x })
}

#[test]
fn cache_of_formulas_is_bounded() {
    // Runs in its own process: it fills caches that other tests measure.
    if !common::in_own_process("cache_of_formulas_is_bounded") {
        return;
    }
    let x = Tensor::from_slice(&[0.5f32, -1.5], 2, Device::Cpu).unwrap();
    let compute = |n: usize| no_grad(|| Tensor::map(&[&x], |e| formula(&e[0], n))).unwrap();
    (0..20_000).for_each(|n| drop(compute(n)));
    let before = HELD_BYTES.get();
    (20_000..100_000).for_each(|n| drop(compute(n)));
    let grown = HELD_BYTES.get() - before;
    assert!(grown < 4 << 20, "{grown} bytes more");
}
