//! The operators `+ - * /` on tensors and numbers.

use std::ops::SubAssign;
use std::panic::AssertUnwindSafe;
use std::sync::Mutex;

use claystone::{DType, Device, Tensor};

use crate::common::{each_device, in_own_process, iota, vec};

#[test]
fn operators_call_the_methods() {
    each_device(|device| {
        let (a, b) = (iota(&[2, 2], device), Tensor::full([2], 2, device).unwrap());
        assert_eq!(vec(&(&a + &b)), [2., 3., 4., 5.]);
        assert_eq!(vec(&(&a - &b)), [-2., -1., 0., 1.]);
        assert_eq!(vec(&(&a * &b)), [0., 2., 4., 6.]);
        assert_eq!(vec(&(&a / &b)), [0., 0.5, 1., 1.5]);
        assert_eq!(vec(&-&a), [-0., -1., -2., -3.]);
        // Operands are owned tensors, borrowed tensors, and numbers on either side.
        assert_eq!(vec(&((&a + 1) * (2.0 * &a - 1.0) / b)), [-0.5, 1.0, 4.5, 10.0]);
        assert_eq!(vec(&(1.0 - &a)), [1., 0., -1., -2.]);
        assert_eq!(vec(&(6 / (a.shallow_clone() + 1))), [6., 3., 2., 1.5]);
        assert_eq!(vec(&-(-a)), [0., 1., 2., 3.]);
        let ints = Tensor::arange(1, 4, 1, (DType::I64, device)).unwrap();
        assert_eq!(vec(&(6 / ints * 2)), [12.0, 6.0, 4.0]); // division of integers gives floats
    });
}

#[test]
fn owned_operands_give_their_memory_to_the_result() {
    each_device(|device| {
        let (x, row) = (iota(&[3, 4], device), iota(&[4], device));
        let sum = &x + &row;
        let address = |t: &Tensor| (t.storage().allocation().segment(), t.storage().allocation().offset());
        let place = address(&sum);
        let result = -((sum + 1.0) * &row - 2);
        assert_eq!(address(&result), place);
        let right: Vec<f32> = (0..12).map(|i| -((i + i % 4 + 1) * (i % 4) - 2) as f32).collect();
        assert_eq!(vec(&result), right);
        // The memory is not reused if another handle exists, if it is too small for the result, or if autograd records the tensor.
        let (a, b) = (&x * 2, iota(&[4], device));
        let view = a.t().unwrap();
        assert_eq!(vec(&(a + 1))[..3], [1.0, 3.0, 5.0]);
        assert_eq!(vec(&view)[..3], [0.0, 8.0, 16.0]);
        assert_eq!(vec(&(b + &x))[..5], [0.0, 2.0, 4.0, 6.0, 4.0]);
        let leaf = iota(&[4], device).requires_grad_(true).unwrap();
        let y = (leaf.shallow_clone() * 3.0) * &leaf;
        y.sum((), false).unwrap().backward().unwrap();
        assert_eq!(vec(&leaf.grad().unwrap()), [0.0, 6.0, 12.0, 18.0]);
    });
}

#[test]
fn gradients_flow_through_operators() {
    let x = iota(&[3], Device::Cpu).requires_grad_(true).unwrap();
    let y = 1.0 / (&x * &x + 1.0) - &x;
    y.sum((), false).unwrap().backward().unwrap();
    let expected: Vec<f32> = (0..3).map(|x| x as f32).map(|x| -2.0 * x / (x * x + 1.0).powi(2) - 1.0).collect();
    assert!(vec(&x.grad().unwrap()).iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6));
}

#[test]
fn operators_panic_with_the_message_of_the_method() {
    let (a, b) = (iota(&[2], Device::Cpu), iota(&[3], Device::Cpu));
    let message = a.add(&b).unwrap_err().to_string();
    let panic = std::panic::catch_unwind(|| &a + &b).unwrap_err();
    assert_eq!(panic.downcast_ref::<String>(), Some(&message));
    assert!(message.contains("[2]") && message.contains("[3]"), "{message}");
}

/// The panic is reported at the line of the operator in the caller's code.
#[test]
fn operators_panic_at_the_line_of_their_caller() {
    if !in_own_process("operators::operators_panic_at_the_line_of_their_caller") {
        return;
    }
    let (a, b) = (iota(&[2], Device::Cpu), iota(&[3], Device::Cpu));
    static AT: Mutex<Option<(String, u32)>> = Mutex::new(None);
    std::panic::set_hook(Box::new(|panic| {
        *AT.lock().unwrap() = panic.location().map(|at| (at.file().to_owned(), at.line()));
    }));
    let operations: [(u32, &dyn Fn()); 4] = [
        (line!(), &|| drop(&a + &b)),
        (line!(), &|| drop(a.shallow_clone() * &b)),
        (line!(), &|| a.shallow_clone().sub_assign(&b)),
        (line!(), &|| drop(a.i(0).unwrap().unsqueeze(0).unwrap().expand(&[1_usize << 60, 3]).unwrap().clone())),
    ];
    let named = operations.map(|(line, operation)| {
        let panicked = std::panic::catch_unwind(AssertUnwindSafe(operation)).is_err();
        (panicked, AT.lock().unwrap().take(), Some((file!().to_owned(), line)))
    });
    drop(std::panic::take_hook());
    for (panicked, at, expected) in named {
        assert!(panicked);
        assert_eq!(at, expected);
    }
}
