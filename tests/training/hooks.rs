//! Hooks on saved tensors: values, gradients of gradients, in-place changes, errors, nesting, memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use claystone::autograd::*;
use claystone::{DType, Device, Error, Result, Tensor};

use crate::common::{each_device, in_own_process, opencl, scattered, values};

/// The numbers of calls of the two hooks.
#[derive(Clone, Default)]
struct Calls(Arc<[AtomicUsize; 2]>);

impl Calls {
    fn get(&self) -> [usize; 2] {
        [0, 1].map(|i| self.0[i].load(Relaxed))
    }

    /// Runs `f` with hooks that copy each tensor to the host and back, and count their calls.
    fn hooked<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let (packs, unpacks) = (self.0.clone(), self.0.clone());
        let pack = move |t: Tensor| {
            packs[0].fetch_add(1, Relaxed);
            assert!(!t.requires_grad() && !is_grad_enabled());
            Ok((t.device(), copied(&t.to_device(Device::Cpu)?)?))
        };
        let unpack = move |(device, t): &(Device, Tensor)| {
            unpacks[1].fetch_add(1, Relaxed);
            copied(&t.to_device(*device)?)
        };
        saved_tensors_hooks(pack, unpack, f)
    }
}

fn copied(t: &Tensor) -> Result<Tensor> {
    Ok(Tensor::empty(t.shape(), (t.dtype(), t.device()))?.copy_(t)?.shallow_clone())
}

fn leaf(shape: &[usize], device: Device) -> Tensor {
    scattered(shape, 2.0, device).requires_grad_(true).unwrap()
}

/// A function whose operations save inputs, results, indices and views.
fn network(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let index = Tensor::from_slice(&[2i64, 0, 1, 2], 4, x.device())?;
    let h = x.linear(w, None)?.relu()?;
    let h = h.sub(&h.mean(-1, true)?)?.div(&h.square()?.mean(-1, true)?.add_scalar(1)?.sqrt()?)?;
    let h = h.index(&[Some(&index)])?.add(&h.t()?.matmul(&h)?.sum(0, false)?)?;
    h.softmax(-1)?.mul(&h.sigmoid()?)?.logsumexp([1], false)?.square()?.sum((), false)
}

#[track_caller]
fn assert_close(got: &Tensor, want: &Tensor) {
    let close = |(a, b): (f64, f64)| (a - b).abs() <= 1e-4 * (1.0 + b.abs());
    assert!(values(got).into_iter().zip(values(want)).all(close), "{got:?} is not {want:?}");
}

#[test]
fn gradients_are_those_without_hooks() {
    each_device(|d| {
        let (x, w) = (leaf(&[3, 5], d), leaf(&[4, 5], d));
        let want = grad(&[&network(&x, &w).unwrap()], &[&x, &w]).unwrap();
        let calls = Calls::default();
        let out = calls.hooked(|| network(&x, &w)).unwrap();
        let [packs, unpacks] = calls.get();
        assert!(packs > 8 && unpacks == 0, "{packs} {unpacks}");
        let options = GradOptions { retain_graph: true, ..Default::default() };
        let first = grad_with_options(&[&out], &[&x, &w], options).unwrap();
        assert!(calls.get()[1] <= packs);
        let on_cpu = [false, true].map(|pinned| save_on_cpu(pinned, || network(&x, &w)).unwrap());
        for found in [first.into_iter().flatten().collect(), grad(&[&out], &[&x, &w]).unwrap()]
            .into_iter()
            .chain(on_cpu.iter().map(|out| grad(&[out], &[&x, &w]).unwrap()))
        {
            found.iter().zip(&want).for_each(|(found, want)| assert_close(found, want));
        }
        // Operations that are not recorded pack nothing.
        let before = calls.get();
        calls.hooked(|| no_grad(|| network(&x, &w))).unwrap();
        calls.hooked(|| network(&x.detach(), &w.detach())).unwrap();
        assert_eq!(calls.get(), before);
    });
}

#[test]
fn each_tensor_is_unpacked_once_in_a_pass() {
    each_device(|d| {
        let (a, b, calls) = (leaf(&[3, 4], d), leaf(&[4, 2], d), Calls::default());
        let out = calls.hooked(|| a.mm(&b)?.sum((), false)).unwrap();
        assert_eq!(calls.get(), [2, 0]);
        out.backward().unwrap();
        assert_eq!(calls.get(), [2, 2]);
    });
}

#[test]
fn gradients_of_gradients_pass_through_hooks() {
    each_device(|d| {
        let second = |hooked: bool| {
            let x = leaf(&[3, 5], d);
            let f = || x.mul(&x)?.mul(&x)?.exp()?.sum((), false);
            let run = || -> Result<Vec<Tensor>> {
                let out = if hooked { Calls::default().hooked(f)? } else { f()? };
                let options = GradOptions { create_graph: true, ..Default::default() };
                let first = grad_with_options(&[&out], &[&x], options)?.remove(0).unwrap();
                grad(&[&first.square()?.sum((), false)?], &[&x])
            };
            run().unwrap().remove(0)
        };
        assert_close(&second(true), &second(false));
    });
}

#[test]
fn packed_tensors_may_be_changed_in_place() {
    each_device(|d| {
        let x = leaf(&[4], d);
        let want = x.exp().unwrap().detach();
        let out = Calls::default().hooked(|| x.exp()).unwrap();
        no_grad(|| out.zero_().map(drop)).unwrap();
        out.sum((), false).unwrap().backward().unwrap();
        assert_close(&x.grad().unwrap(), &want);
        let out = x.exp().unwrap();
        no_grad(|| out.zero_().map(drop)).unwrap();
        assert!(out.sum((), false).unwrap().backward().unwrap_err().to_string().contains("changed in place"));
    });
}

#[test]
fn errors_of_hooks_are_returned() {
    each_device(|d| {
        let x = leaf(&[3], d);
        let refuse = |what: &str| Error::Invalid { op: "hook", reason: what.into() };
        let error = move |out: Result<Tensor>| out.and_then(|y| y.sum((), false)?.backward()).unwrap_err().to_string();
        let out = saved_tensors_hooks::<Tensor, _>(move |_| Err(refuse("no room")), |t| Ok(t.detach()), || x.mul(&x));
        assert!(error(out).contains("no room"));
        let out = saved_tensors_hooks(Ok, move |_| Err(refuse("it is gone")), || x.mul(&x));
        assert!(error(out).contains("it is gone"));
        let out = saved_tensors_hooks(Ok, |t: &Tensor| t.narrow(0, 0, 2), || x.square());
        let text = error(out);
        assert!(text.contains("[2], f32") && text.contains("[3], f32"), "{text}");
        let out = saved_tensors_hooks(Ok, |t: &Tensor| t.to_dtype(DType::F16), || x.square());
        assert!(error(out).contains("f16"));
        let out = saved_tensors_hooks(
            |t: Tensor| t.zero_().map(Tensor::shallow_clone),
            |t: &Tensor| Ok(t.detach()),
            || x.square(),
        );
        assert!(error(out).contains("changed its tensor in place"));
        // A scope that fails leaves no hooks behind.
        let failed = Calls::default().hooked::<()>(|| Err(refuse("f")));
        assert!(failed.is_err());
        disable_saved_tensors_hooks("off", || x.square()?.sum((), false)?.backward()).unwrap();
    });
}

#[test]
fn the_innermost_hooks_are_used() {
    let (x, outer, inner) = (leaf(&[3], Device::Cpu), Calls::default(), Calls::default());
    let out = outer.hooked(|| {
        let y = x.square()?;
        let z = inner.hooked(|| y.square())?;
        z.square()?.sum((), false)
    });
    assert_eq!((outer.get(), inner.get()), ([2, 0], [1, 0]));
    out.unwrap().backward().unwrap();
    assert_eq!((outer.get(), inner.get()), ([2, 2], [1, 1]));
    let error = disable_saved_tensors_hooks("not here", || outer.hooked(|| Ok(()))).unwrap_err();
    assert!(error.to_string().contains("not here"));
    let error = outer.hooked(|| disable_saved_tensors_hooks("not here", || Ok(()))).unwrap_err();
    assert!(error.to_string().contains("not here"));
}

/// The first run of a checkpoint packs its inputs only, and the second run packs nothing outside the scope.
#[test]
fn checkpoints_pack_their_inputs() {
    each_device(|d| {
        let (x, calls) = (leaf(&[3], d), Calls::default());
        let out = calls.hooked(|| checkpoint(|x| x[0].exp()?.square()?.exp(), &[&x])).unwrap();
        assert_eq!(calls.get(), [1, 0]);
        out.sum((), false).unwrap().backward().unwrap();
        assert_eq!(calls.get(), [1, 1]);
        let found = x.grad().unwrap();
        x.zero_grad();
        x.exp().unwrap().square().unwrap().exp().unwrap().sum((), false).unwrap().backward().unwrap();
        assert_close(&found, &x.grad().unwrap());
    });
}

/// Saves its input and its result.
struct Exp;

impl CustomOp for Exp {
    fn name(&self) -> &'static str {
        "my_exp"
    }

    fn forward(&self, ctx: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
        let out = inputs[0].exp()?;
        ctx.save_for_backward(&[inputs[0], &out]);
        Ok(out)
    }

    fn backward(&self, ctx: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        assert_eq!(ctx.saved_tensors()?.len(), 2);
        Ok(vec![Some(grad.mul(&ctx.saved_tensors()?[1])?)])
    }

    fn differentiable_twice(&self) -> bool {
        true
    }
}

#[test]
fn custom_operations_pack_what_they_save() {
    each_device(|d| {
        let (x, calls) = (leaf(&[3], d), Calls::default());
        let out = calls.hooked(|| Tensor::apply_op(Exp, &[&x])).unwrap();
        assert_eq!(calls.get(), [2, 0]);
        let options = GradOptions { create_graph: true, ..Default::default() };
        let out = out.sum((), false).unwrap();
        let first = grad_with_options(&[&out], &[&x], options).unwrap().remove(0).unwrap();
        let second = grad(&[&first.sum((), false).unwrap()], &[&x]).unwrap();
        assert_close(&second[0], &x.exp().unwrap().detach());
        assert_eq!(calls.get(), [2, 2]);
    });
}

/// The memory of a saved activation is free while it waits in host memory, and the host memory is free after backward.
#[test]
fn saved_activations_leave_the_device() {
    if !in_own_process("hooks::saved_activations_leave_the_device") {
        return;
    }
    for d in opencl() {
        let allocated = |d: Device| d.memory_stats().unwrap().allocated_bytes.current;
        let x = leaf(&[1 << 18], d);
        let run = |f: fn(bool, &Tensor) -> Result<Tensor>, pinned| {
            let (before, host) = (allocated(d), allocated(Device::Cpu));
            let out = f(pinned, &x).unwrap();
            d.synchronize().unwrap();
            let kept = allocated(d) - before;
            out.backward().unwrap();
            x.zero_grad();
            drop(out);
            d.synchronize().unwrap();
            assert_eq!((allocated(d), allocated(Device::Cpu)), (before, host));
            kept
        };
        let plain = run(|_, x| x.exp()?.sin()?.square()?.sum((), false), false);
        assert!(plain >= 2 << 20, "{plain}");
        for pinned in [false, true] {
            let kept = run(|pinned, x| save_on_cpu(pinned, || x.exp()?.sin()?.square()?.sum((), false)), pinned);
            assert!(kept <= 1 << 16, "{kept} bytes are still allocated");
        }
    }
}

/// A hook that returns its argument, on a storage that records in-place changes, does not keep the storage alive.
#[test]
fn hooks_that_return_their_argument_free_the_graph() {
    if !in_own_process("hooks::hooks_that_return_their_argument_free_the_graph") {
        return;
    }
    each_device(|d| {
        let allocated = || d.memory_stats().unwrap().allocated_bytes.current;
        let x = leaf(&[1 << 16], d);
        let before = allocated();
        for retain_graph in [false, true] {
            let run = || {
                let y = x.mul_scalar(2)?;
                y.exp_()?;
                y.mul_(&x)?;
                let out = y.square()?.sum((), false)?;
                out.backward_with_options(BackwardOptions { retain_graph, ..Default::default() })
            };
            saved_tensors_hooks(Ok, |t: &Tensor| Ok(t.shallow_clone()), run).unwrap();
            x.zero_grad();
            d.synchronize().unwrap();
            assert_eq!(allocated(), before);
        }
    });
}
