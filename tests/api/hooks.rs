//! Hooks that run after a leaf has accumulated its gradient, and callbacks that run at the end of a backward pass.

use std::sync::{Arc, Mutex};

use claystone::{Error, Tensor, autograd};

use crate::common::each_device;

#[test]
fn accumulation_hooks_get_the_sum_and_callbacks_run_last() {
    each_device(|device| {
        let w = Tensor::ones(2, device).unwrap().requires_grad_(true).unwrap();
        let message = Arc::new(Mutex::new(Vec::<String>::new()));
        let tell = message.clone();
        let hook = w.register_post_accumulate_grad_hook(move |grad| {
            tell.lock().unwrap().push(format!("collected {:?}", grad.to_vec::<f32>()?));
            let last = tell.clone();
            autograd::queue_callback(move || {
                last.lock().unwrap().push("over".into());
                Ok(())
            })
        });
        let backward = || w.mul_scalar(2).unwrap().add(&w).unwrap().sum((), false).unwrap().backward();
        let hook = hook.unwrap();
        backward().unwrap();
        backward().unwrap();
        hook.remove();
        backward().unwrap();
        let want = ["collected [3.0, 3.0]", "over", "collected [6.0, 6.0]", "over"];
        assert_eq!(*message.lock().unwrap(), want);
        // If a hook or callback fails, backward returns its error, and callbacks that were queued before are discarded.
        let fails = w.register_post_accumulate_grad_hook(|_| {
            Err(autograd::queue_callback(|| Ok(())).err().unwrap_or(Error::DivisionByZero { op: "hook" }))
        });
        assert!(backward().unwrap_err().to_string().contains("division by zero"));
        fails.unwrap().remove();
        let fails = w.register_post_accumulate_grad_hook(|_| {
            autograd::queue_callback(|| Err(Error::DivisionByZero { op: "callback" }))
        });
        assert!(backward().unwrap_err().to_string().contains("division by zero"));
        fails.unwrap().remove();
        backward().unwrap();
        assert!(autograd::queue_callback(|| Ok(())).is_err());
        let y = w.mul_scalar(2).unwrap();
        assert!(matches!(y.register_post_accumulate_grad_hook(|_| Ok(())), Err(Error::Autograd { .. })));
    });
}

/// A leaf's hook runs as soon as the leaf's gradient is complete. For a leaf that is used twice, that is after the backward of its
/// earlier use.
#[test]
fn leaves_accumulate_before_older_operations_run() {
    each_device(|device| {
        let leaf = || Tensor::ones(2, device).unwrap().requires_grad_(true).unwrap();
        let message = Arc::new(Mutex::new(Vec::new()));
        let tell = |name: &'static str| {
            let message = message.clone();
            move |_: &Tensor| {
                message.lock().unwrap().push(name);
                Ok(())
            }
        };
        let passing = |name: &'static str| {
            let tell = tell(name);
            move |grad: &Tensor| tell(grad).map(|()| None)
        };
        let (first, second, twice) = (leaf(), leaf(), leaf());
        for (w, name) in [(&first, "first"), (&second, "second"), (&twice, "twice")] {
            w.register_post_accumulate_grad_hook(tell(name)).unwrap();
        }
        let x = first.exp().unwrap();
        x.register_hook(passing("x")).unwrap();
        let y = x.mul(&twice).unwrap();
        y.register_hook(passing("y")).unwrap();
        let z = y.mul(&second).unwrap().mul(&twice).unwrap();
        z.sum((), false).unwrap().backward().unwrap();
        assert_eq!(*message.lock().unwrap(), ["second", "y", "twice", "x", "first"], "on {device}");
        assert_eq!(twice.grad().unwrap().to_vec::<f32>().unwrap(), [2.0 * 1f32.exp(); 2]);
    });
}
