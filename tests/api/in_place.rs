//! In-place operations on tensors that autograd records and on their views, compared with PyTorch.

use claystone::autograd::{GradOptions, checkpoint, grad, grad_with_options, gradcheck, gradgradcheck};
use claystone::device::count_launches;
use claystone::io::{self, StateDict};
use claystone::ops::ScatterReduce;
use claystone::{ConvOptions, DType, Device, Error, Graph, Result, Tensor, no_grad};

use crate::common::{each_device, values, vec};

type Program = fn(&dyn Fn(&str) -> Tensor) -> Result<Tensor>;

fn ints(of: &[i64], shape: &[usize], device: Device) -> Tensor {
    Tensor::from_slice(of, shape, device).unwrap()
}

fn leaf(of: &[f32], device: Device) -> Tensor {
    Tensor::from_slice(of, of.len(), device).unwrap().requires_grad_(true).unwrap()
}

/// The programs that tests/data/in_place.py ran in PyTorch.
const PROGRAMS: [(&str, Program); 9] = [
    ("residual_block", |x| {
        let options = ConvOptions { padding: 1.into(), ..ConvOptions::default() };
        let y = x("image").conv2d(&x("weight"), None, options)?;
        y.add_(&x("residual"))?.relu_().map(Tensor::shallow_clone)
    }),
    ("row_of_base", |x| {
        let y = x("a").mul_scalar(2)?;
        y.select(0, 1)?.mul_(&x("row"))?;
        y.mul(&y)
    }),
    ("base_under_view", |x| {
        let y = x("a").mul_scalar(2)?;
        let (t, column) = (y.t()?, y.i((.., 2))?);
        y.mul_(&x("b"))?;
        Tensor::cat(&[&t.mul(&t)?.flatten(0, -1)?, &column.exp()?], 0)
    }),
    ("views_of_views", |x| {
        let y = x("a").mul(&x("b"))?;
        let (part, other) = (y.t()?.i(1..3)?, y.i(0)?);
        part.mul_(&x("b").t()?.i(1..3)?)?;
        part.i(0)?.add_(&x("row").i(..3)?)?;
        y.i(2)?.copy_(&x("row"))?;
        let (part, y) = (part.flatten(0, -1)?.pow_scalar(2)?, y.flatten(0, -1)?.pow_scalar(3)?);
        Tensor::cat(&[&part, &other.sin()?, &y], 0)
    }),
    ("plain_buffer", |x| {
        let a = x("a");
        let buffer = Tensor::zeros([4, 4], (DType::F64, a.device()))?;
        buffer.i(..3)?.copy_(&a)?;
        let last = buffer.i(3)?;
        last.copy_(&x("row"))?.mul_(&x("b").i(0)?)?;
        buffer.i(0)?.add_(&last)?;
        buffer.mul(&buffer)
    }),
    ("permuted_base", |x| {
        let y = x("a").t()?.mul_scalar(3)?.t()?;
        y.i(1)?.mul_(&x("row"))?;
        y.i((.., 1..3))?.tanh_()?;
        y.pow_scalar(2)
    }),
    ("overwritten", |x| {
        let (y, z) = (x("a").exp()?, x("a").mul(&x("b"))?);
        z.zero_()?;
        z.add_(&x("b"))?;
        z.i(1)?.fill_(3)?;
        z.mul(&z)?.add(&y)
    }),
    ("indexed", |x| {
        let (a, b) = (x("a"), x("b"));
        let ints = |of: &[i64], shape: &[usize]| ints(of, shape, a.device());
        let y = a.mul_scalar(2)?;
        y.index_add_(0, &ints(&[2, 0], &[2]), &b.i(..2)?)?;
        y.index_put_(&[Some(&ints(&[1, 1], &[2])), Some(&ints(&[0, 3], &[2]))], &x("row").i(..2)?, false)?;
        y.masked_fill_(&b.gt_scalar(0.8)?, 0.5)?;
        y.t()?.scatter_(0, &ints(&[3, 2, 1], &[1, 3]), &a.i((.., ..1))?.t()?)?;
        y.i(1..)?.clamp_(-1.0, 1.0)?;
        y.pow_scalar(3)
    }),
    ("expanded_views", |x| {
        let y = x("row").mul_scalar(2)?;
        let wide = y.expand([3, 4])?;
        y.mul_(&x("b").i(0)?)?;
        wide.mul(&x("a"))
    }),
];

fn assert_close(name: &str, got: &Tensor, all: &StateDict) {
    let want = all.get(name).unwrap_or_else(|| panic!("{name}"));
    assert_eq!(got.shape(), want.shape(), "{name}");
    for (got, want) in values(got).iter().zip(values(want)) {
        assert!((got - want).abs() <= 1e-10 * want.abs().max(1.0), "{name}: {got} for {want}");
    }
}

#[test]
fn results_and_gradients_match_pytorch() {
    each_device(|device| {
        let all = io::load("tests/data/in_place.npz", device).unwrap();
        let names = ["image", "weight", "residual", "a", "b", "row"];
        for (program, f) in PROGRAMS {
            let leaf = |name: &&str| all.get(name).unwrap().detach().requires_grad_(true).unwrap();
            let leaves: Vec<Tensor> = names.iter().map(leaf).collect();
            let x = |name: &str| leaves[names.iter().position(|n| *n == name).unwrap()].shallow_clone();
            let result = f(&x).unwrap();
            assert_close(&format!("{program}.result"), &result, &all);
            result.square().unwrap().sum((), false).unwrap().backward().unwrap();
            for (name, leaf) in names.iter().zip(&leaves) {
                let name = format!("{program}.{name}");
                match leaf.grad() {
                    Some(grad) => assert_close(&name, &grad, &all),
                    // PyTorch returns zeros if claystone has no gradient.
                    None => {
                        assert!(all.get(&name).is_none_or(|zeros| values(zeros).iter().all(|v| *v == 0.0)), "{name}")
                    }
                }
            }
            // Checks the same program inside a checkpoint, and its second derivatives.
            if program != "residual_block" {
                let inputs = ["a", "b", "row"].map(|name| all.get(name).unwrap().mul_scalar(0.5).unwrap());
                let of = move |x: &[Tensor]| {
                    f(&|name| x[["a", "b", "row"].iter().position(|n| *n == name).unwrap()].shallow_clone())
                };
                let sum = |x: &[Tensor]| of(x)?.square()?.sum((), false);
                gradgradcheck(sum, &inputs, 1e-5).unwrap_or_else(|e| panic!("{program}: {e}"));
                let again = |x: &[Tensor]| checkpoint(of, &x.iter().collect::<Vec<_>>())?.square()?.sum((), false);
                gradcheck(again, &inputs, 1e-6).unwrap_or_else(|e| panic!("{program}: {e}"));
            }
        }
    });
}

#[test]
fn in_place_gradients_match_out_of_place_gradients() {
    type InPlace = fn(&Tensor, &Tensor) -> Result<()>;
    type View = fn(&Tensor) -> Result<Tensor>;
    // x has shape [3, 4] and values between 0 and 2. y has the same shape and a similar range.
    let operations: &[(&str, InPlace)] = &[
        ("add_", |x, y| x.add_(y).map(drop)),
        ("sub_", |x, y| x.sub_(y).map(drop)),
        ("mul_", |x, y| x.mul_(y).map(drop)),
        ("div_", |x, y| x.div_(y).map(drop)),
        ("div_ of a row", |x, y| x.div_(&y.i(0)?).map(drop)),
        ("mul_ of itself", |x, _| x.mul_(x).map(drop)),
        ("mul_ of its row", |x, _| x.mul_(&x.i(1)?).map(drop)),
        ("exp_", |x, _| x.exp_().map(drop)),
        ("sigmoid_", |x, _| x.sigmoid_().map(drop)),
        ("relu_", |x, _| x.sub_scalar_(1)?.relu_().map(drop)),
        ("leaky_relu_", |x, _| x.sub_scalar_(1)?.leaky_relu_(0.1).map(drop)),
        ("pow_scalar_", |x, _| x.pow_scalar_(2)?.pow_scalar_(1.5).map(drop)),
        ("rsub", |x, y| x.copy_(&y.sub(x)?).map(drop)),
        ("lerp_", |x, y| x.lerp_(y, 0.3).map(drop)),
        ("addcmul_", |x, y| x.addcmul_(y, y, 0.5).map(drop)),
        ("masked_fill_", |x, y| x.masked_fill_(&y.detach().gt_scalar(1)?, 0.7).map(drop)),
        ("gt_scalar_", |x, _| x.gt_scalar_(1).map(drop)),
        ("copy_ of a row", |x, y| x.copy_(&y.i(2)?).map(drop)),
        ("copy_ of a constant", |x, y| x.copy_(&y.ones_like()?).map(drop)),
        ("fill_", |x, _| x.fill_(2).map(drop)),
        ("uniform_", |x, _| x.uniform_(0.0, 1.0)?.zero_().map(drop)),
        ("slice_assign_", |x, y| x.slice_assign_((1, ..2), &y.i((0, 1..3))?).map(drop)),
        ("tril_", |x, _| x.tril_(0).map(drop)),
        ("index_fill_", |x, _| x.index_fill_(1, &ints(&[0, -1], &[2], x.device()), 3).map(drop)),
        ("scatter_value_", |x, _| x.scatter_value_(1, &ints(&[0, 2, 1], &[3, 1], x.device()), 3).map(drop)),
        ("index_add_alpha_", |x, y| x.index_add_alpha_(0, &ints(&[1], &[1], x.device()), &y.i(..1)?, 0.5).map(drop)),
        ("index_copy_", |x, y| x.index_copy_(0, &ints(&[1], &[1], x.device()), &y.i(..1)?).map(drop)),
        ("scatter_add_", |x, y| x.scatter_add_(0, &ints(&[1, 1, 2], &[3, 1], x.device()), y).map(drop)),
        ("scatter_reduce_", |x, y| {
            let index = ints(&[1, 1, 2], &[3, 1], x.device());
            x.scatter_reduce_(0, &index, y, ScatterReduce::Prod, true).map(drop)
        }),
        ("put_", |x, y| x.put_(&ints(&[3, 7, -1], &[3], x.device()), &y.i((.., 0))?, true).map(drop)),
        ("masked_scatter_", |x, y| x.masked_scatter_(&x.detach().gt_scalar(1)?, y).map(drop)),
    ];
    // The views through which the base is changed.
    let views: [(&str, View); 5] = [
        ("all", |x| Ok(x.shallow_clone())),
        ("a part", |x| x.narrow(0, 1, 3)?.narrow(1, 1, 4)),
        ("every second", |x| x.slice(0, 0, 5, 2)?.slice(1, 1, 5, 1)),
        ("turned", |x| x.t()?.narrow(0, 2, 3)?.narrow(1, 0, 4)),
        ("backwards", |x| x.narrow(0, 2, 3)?.narrow(1, 0, 4)?.flip(1)),
    ];
    each_device(|device| {
        let sizes = |i: i64| 0.3 + (i * 7 % 17) as f64 * 0.1;
        let numbers = |n: i64, shape: &[usize]| {
            let numbers: Vec<f64> = (0..n).map(sizes).collect();
            Tensor::from_slice(&numbers, shape, device).unwrap()
        };
        for (view, pick) in views {
            let x = if view == "all" { numbers(12, &[3, 4]) } else { numbers(25, &[5, 5]) };
            let y = numbers(12, &[3, 4]).add_scalar(0.05).unwrap();
            for (name, operation) in operations {
                let f = |inputs: &[Tensor]| {
                    let base = inputs[0].mul_scalar(1.1)?;
                    let part = pick(&base)?;
                    operation(&part, &inputs[1].mul_scalar(1)?)?;
                    base.square()?.sum((), false)?.add(&part.sin()?.sum((), false)?)
                };
                gradcheck(f, &[x.detach(), y.detach()], 1e-5).unwrap_or_else(|e| panic!("{name} of {view}: {e}"));
            }
        }
    });
}

#[test]
fn changing_a_saved_tensor_is_an_error_in_backward() {
    each_device(|d| {
        let x = leaf(&[1.0, 2.0, 3.0], d);
        // mul saves its operands for backward. Each operand is changed directly, through a view, or through a detached handle.
        let changes: [fn(&Tensor) -> Result<()>; 3] =
            [|h| h.add_scalar_(1).map(drop), |h| h.i(0)?.zero_().map(drop), |h| h.detach().add_scalar_(1).map(drop)];
        for change in changes {
            let h = x.mul_scalar(2).unwrap();
            let y = h.mul(&h).unwrap();
            change(&h).unwrap();
            let error = y.sum((), false).unwrap().backward().unwrap_err().to_string();
            assert!(
                error.starts_with("mul: ") && error.contains("changed in place") && error.contains("clone()"),
                "{error}"
            );
        }
        // An addition saves no operands, so they may change.
        let h = x.mul_scalar(2).unwrap();
        let y = h.add_scalar(1).unwrap();
        h.mul_scalar_(5).unwrap();
        y.add(&h).unwrap().sum((), false).unwrap().backward().unwrap();
        assert_eq!(vec(&x.grad().unwrap()), [12.0; 3]);
        x.zero_grad();
        // The backward of relu and exp reads the result and not the input, whether or not the operation is in-place.
        for f in [Tensor::relu, Tensor::exp] {
            let h = x.mul_scalar(2).unwrap();
            let y = f(&h).unwrap();
            h.mul_(&y).unwrap();
            h.sum((), false).unwrap().backward().unwrap();
            let y = f(&x.mul_scalar(2).unwrap()).unwrap();
            y.add_scalar_(1).unwrap();
            let error = y.sum((), false).unwrap().backward().unwrap_err().to_string();
            assert!(error.contains("changed in place"), "{error}");
        }
        let h = x.mul_scalar(2).unwrap();
        h.relu_().unwrap().mul_scalar_(2).unwrap();
        assert!(h.sum((), false).unwrap().backward().is_err());
        // The expected gradients: the derivatives of 4x² and 2x exp(2x).
        let want = [1.0f32, 2.0, 3.0].map(|x| 8.0 * x + (2.0 + 4.0 * x) * (2.0 * x).exp());
        let got = vec(&x.grad().unwrap());
        assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-5 * want), "{got:?} for {want:?}");
    });
}

#[test]
fn in_place_changes_of_leaves_are_errors() {
    each_device(|d| {
        let x = leaf(&[1.0, 2.0, 3.0], d);
        let refused = |result: Result<&Tensor>, with: &str| {
            let error = result.map(drop).unwrap_err();
            assert!(matches!(error, Error::Autograd { .. }) && error.to_string().contains(with), "{error}");
        };
        refused(x.add_scalar_(1), "a leaf that requires a gradient");
        refused(x.copy_(&x.exp().unwrap()), "a leaf that requires a gradient");
        refused(x.i(0).unwrap().zero_(), "a view of a leaf");
        let y = x.mul_scalar(2).unwrap();
        let view = no_grad(|| y.i(1..)).unwrap();
        refused(view.mul_(&x.i(1..).unwrap()), "made inside no_grad");
        view.mul_scalar_(1).unwrap(); // the factor requires no gradient, so nothing is recorded
        assert_eq!(vec(&x), [1.0, 2.0, 3.0]);
        // Inside `no_grad`, leaves may be changed, as optimizers do.
        no_grad(|| x.add_scalar_(1).and_then(|x| x.i(0)?.zero_().map(drop))).unwrap();
        assert_eq!(vec(&x), [0.0, 3.0, 4.0]);
        // `map_into` does not record formulas, so it is refused outside of `no_grad`.
        let error = Tensor::map_into(&[&y], &[], &[&y], |e, _| vec![e[0].exp()]).unwrap_err();
        assert!(error.to_string().contains("no_grad"), "{error}");
        // Integer tensors have no gradient, so copying to them records nothing.
        let whole = Tensor::zeros(3, (DType::I64, d)).unwrap();
        whole.copy_(&y).unwrap();
        assert!(!whole.requires_grad());
    });
}

#[test]
fn detached_handles_are_not_part_of_the_history() {
    each_device(|d| {
        let (x, w) = (leaf(&[1.0, 2.0], d), leaf(&[3.0, 4.0], d));
        let y = x.mul_scalar(2).unwrap();
        let before = y.detach();
        y.mul_(&w).unwrap();
        let after = y.detach();
        assert!(!before.requires_grad() && !after.requires_grad() && y.requires_grad());
        assert!(!no_grad(|| y.i(0)).unwrap().requires_grad());
        // A detached handle that is changed in place with a tracked operand gets a history of its own.
        let view = after.i(0).unwrap();
        after.add_(&w).unwrap();
        assert!(after.requires_grad() && view.requires_grad() && !before.requires_grad());
        assert!(!after.detach().requires_grad());
        let sum = after.sum((), false).unwrap().add(&view).unwrap();
        assert_eq!(vec(&grad(&[&sum], &[&w]).unwrap()[0]), [2.0, 1.0]);
        let sum = y.sum((), false).unwrap();
        assert_eq!(vec(&grad(&[&sum], &[&x]).unwrap()[0]), [6.0, 8.0]);
        // A handle made by `shallow_clone` before the change becomes tracked; a detached handle and a new tensor on the storage do
        // not.
        let buffer = Tensor::zeros(2, d).unwrap();
        let (handle, detached) = (buffer.shallow_clone(), buffer.detach());
        buffer.copy_(&x).unwrap();
        let raw = Tensor::from_storage(buffer.storage().clone(), 2, DType::F32).unwrap();
        assert!(handle.requires_grad() && !handle.is_leaf() && !detached.requires_grad() && !raw.requires_grad());
        assert!(format!("{handle}").contains("grad_fn=<copy_>"), "{handle}");
    });
}

#[test]
fn hooks_and_retained_gradients_belong_to_values() {
    each_device(|d| {
        let x = leaf(&[1.0, 2.0], d);
        let y = x.mul_scalar(2).unwrap();
        y.retain_grad().unwrap();
        // A hook belongs to the value that the tensor had when the hook was registered. The retained gradient is that of the
        // tensor's last value.
        let hook = y.register_hook(|grad| grad.mul_scalar(10).map(Some)).unwrap();
        y.mul_scalar_(3).unwrap();
        assert!(y.retains_grad());
        let view = y.i(0).unwrap();
        view.retain_grad().unwrap();
        view.mul_scalar_(5).unwrap();
        y.sum((), false).unwrap().add(&view).unwrap().backward().unwrap();
        assert_eq!(vec(&x.grad().unwrap()), [2.0 * 10.0 * 3.0 * 5.0 * 2.0, 2.0 * 10.0 * 3.0]);
        assert_eq!(vec(&y.grad().unwrap()), [2.0, 1.0]);
        assert_eq!(vec(&view.grad().unwrap()), [1.0], "of its own uses: y's are not through it");
        hook.remove();
    });
}

#[test]
fn operands_of_other_dtypes_are_converted_both_ways() {
    each_device(|d| {
        let (x, w) = (leaf(&[1.0, 2.0], d), leaf(&[3.0, 4.0], d));
        let half = x.to_dtype(DType::F16).unwrap().mul_scalar(2).unwrap();
        half.mul_(&w).unwrap();
        half.i(0).unwrap().copy_(&w.i(1).unwrap()).unwrap();
        assert_eq!((half.dtype(), values(&half)), (DType::F16, vec![4.0, 16.0]));
        half.sum((), false).unwrap().backward().unwrap();
        assert_eq!((vec(&x.grad().unwrap()), vec(&w.grad().unwrap())), (vec![0.0, 8.0], vec![0.0, 5.0]));
    });
}

#[test]
fn loops_of_in_place_operators_extend_the_graph() {
    each_device(|d| {
        let x = leaf(&[1.0, 2.0], d);
        let mut sum = Tensor::zeros(2, d).unwrap();
        for _ in 0..300 {
            sum += &x;
            sum *= 1.0;
        }
        sum /= &x;
        assert_eq!(vec(&sum), [300.0, 300.0]);
        let options = GradOptions { create_graph: true, ..Default::default() };
        let first = grad_with_options(&[&sum.mul(&x).unwrap().sum((), false).unwrap()], &[&x], options).unwrap();
        assert_eq!(vec(first[0].as_ref().unwrap()), [300.0, 300.0]);
        // A history of 20,000 operations is freed without recursion, which would overflow the stack.
        let long = x.mul_scalar(1).unwrap();
        for _ in 0..20_000 {
            long.add_scalar_(1).unwrap();
        }
        drop(long);
    });
}

#[test]
fn recording_copies_only_if_old_elements_are_needed() {
    type InPlace = fn(&Tensor, &Tensor) -> Result<()>;
    let operations: [(u64, InPlace); 8] = [
        (1, |y, x| y.add_(x).map(drop)),
        (1, |y, _| y.relu_().map(drop)),
        (1, |y, x| y.mul_(&x.detach()).map(drop)),
        (1, |y, x| y.i(0)?.copy_(&x.i(1)?).map(drop)),
        (1, |y, _| y.i(..1)?.fill_(3).map(drop)),
        (2, |y, x| y.mul_(x).map(drop)), // the second launch copies the old y
        (1, |y, _| y.exp_().map(drop)),
        (2, |y, _| y.tanh_().map(drop)),
    ];
    each_device(|d| {
        let mask = Tensor::from_slice(&[true, false], [2, 1], d).unwrap();
        let x = Tensor::ones([2, 3], d).unwrap().requires_grad_(true).unwrap();
        for (i, (most, operation)) in operations.iter().enumerate() {
            let y = x.t().unwrap().mul_scalar(2).unwrap().t().unwrap();
            let (result, launches) = count_launches(|| operation(&y, &x));
            result.unwrap();
            assert!(launches <= *most, "operation {i}: {launches} launches on {d}");
        }
        let y = x.mul_scalar(2).unwrap();
        let (_, launches) = count_launches(|| y.masked_fill_(&mask, 1).map(drop).unwrap());
        assert_eq!(launches, 1);
        y.sum((), false).unwrap().backward().unwrap();
        assert_eq!(vec(&x.grad().unwrap()), [0.0, 0.0, 0.0, 2.0, 2.0, 2.0]);
    });
}

#[test]
fn captured_graphs_replay_in_place_changes_and_gradients() {
    each_device(|d| {
        if d == Device::Cpu {
            return; // the CPU computes at once and has no graphs
        }
        let x = leaf(&[-1.0, 2.0, 3.0], d);
        let step = || {
            x.zero_grad();
            let y = x.mul_scalar(2)?;
            y.add_(&x)?.i(..2)?.mul_(&x.i(1..)?)?;
            y.relu_()?.sum((), false)?.backward()?;
            Ok(x.grad().unwrap())
        };
        step().unwrap();
        let (graph, gradient) = Graph::capture(d, step).unwrap();
        no_grad(|| x.add_scalar_(3).map(drop)).unwrap();
        graph.replay().unwrap();
        let replayed = vec(&gradient);
        assert_eq!(replayed, vec(&step().unwrap()));
        // x is now 2, 5, 6: the derivatives of 3 x0 x1 + 3 x1 x2 + 3 x2.
        assert_eq!(replayed, [15.0, 6.0 + 18.0, 15.0 + 3.0]);
    });
}

#[test]
fn graphs_without_backward_free_their_memory() {
    let d = Device::Cpu;
    let x = Tensor::ones(1 << 20, d).unwrap().requires_grad_(true).unwrap();
    let run = || {
        // Each operation saves a tensor whose history contains the operation, which must not keep the graph alive.
        let y = x.mul_scalar(2)?;
        y.relu_()?;
        let cache = Tensor::zeros(1 << 20, d)?;
        cache.copy_(&y)?;
        let seen = cache.mul(&cache)?;
        cache.narrow(0, 5, 10)?.add_(&seen.narrow(0, 7, 10)?)?;
        cache.requires_grad().then_some(()).ok_or(Error::invalid("cache", "it is tracked"))
    };
    run().unwrap();
    let allocated = || d.memory_stats().unwrap().allocated_bytes.current;
    let before = allocated();
    (0..20).for_each(|_| run().unwrap());
    // Other tests also allocate on the CPU, but less than the 160 MiB that twenty runs would leak.
    assert!(allocated() < before + (80 << 20), "{} bytes more", allocated() - before);
}

#[test]
fn handles_with_a_history_can_be_dropped_by_several_threads() {
    let d = Device::Cpu;
    let x = Tensor::ones(1 << 18, d).unwrap().requires_grad_(true).unwrap();
    let allocated = || d.memory_stats().unwrap().allocated_bytes.current;
    let before = allocated();
    for _ in 0..300 {
        let y = x.mul_scalar(2).unwrap();
        let handles = [y.shallow_clone(), y.i(..9).unwrap(), y.detach()];
        y.relu_().unwrap().i(..5).unwrap().mul_(&y.i(5..10).unwrap()).unwrap();
        std::thread::scope(|scope| handles.into_iter().for_each(|handle| drop(scope.spawn(move || drop(handle)))));
    }
    // The limit is less than the 300 MiB of all histories, but allows for the memory of other tests.
    assert!(allocated() < before + (100 << 20), "{} bytes more", allocated() - before);
}
