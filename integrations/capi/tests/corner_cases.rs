//! What C programs do wrong, and what they cannot make happen: as seen from Rust, which can have claystone panic.

use std::ffi::{CStr, CString, c_char};
use std::ptr::{null, null_mut};

use claystone::ops::{self, Backend, Implementation};
use claystone_capi::call::*;
use claystone_capi::device::*;
use claystone_capi::memory::*;
use claystone_capi::random::*;
use claystone_capi::status::*;
use claystone_capi::storage::*;
use claystone_capi::stream::*;
use claystone_capi::tensor::*;

use ClaystoneStatus as Status;

/// The last error of this thread.
fn last_error() -> String {
    // SAFETY: a text that lives until the next failing call.
    unsafe { CStr::from_ptr(claystone_last_error()) }.to_str().unwrap().to_owned()
}

/// A storage on the CPU device.
fn storage(nbytes: usize) -> *mut ClaystoneStorage {
    let mut storage = null_mut();
    // SAFETY: a place for the result.
    assert_eq!(unsafe { claystone_storage_new(CLAYSTONE_CPU, nbytes, &mut storage) }, Status::Ok);
    storage
}

/// What `claystone_tensor_new` says to these, with the tensor where there is one.
fn view(
    storage: *mut ClaystoneStorage,
    dtype: i32,
    sizes: &[i64],
    strides: &[i64],
    offset: i64,
) -> (Status, *mut ClaystoneTensor) {
    assert_eq!(sizes.len(), strides.len());
    let mut tensor = null_mut();
    // SAFETY: a handle that lives, arrays of so many entries, a place for the result.
    let status = unsafe {
        claystone_tensor_new(storage, dtype, sizes.as_ptr(), strides.as_ptr(), sizes.len(), offset, &mut tensor)
    };
    (status, tensor)
}

/// A tensor of f32 of these values.
fn tensor(values: &[f32]) -> *mut ClaystoneTensor {
    let bytes = size_of_val(values);
    let storage = storage(bytes);
    let (status, tensor) = view(storage, ClaystoneDtype::F32 as i32, &[values.len() as i64], &[1], 0);
    assert_eq!(status, Status::Ok);
    // SAFETY: handles that live, and the bytes of the values.
    unsafe {
        claystone_storage_release(storage);
        assert_eq!(claystone_tensor_write(tensor, values.as_ptr().cast(), bytes), Status::Ok);
    }
    tensor
}

fn values<const N: usize>(tensor: *const ClaystoneTensor) -> [f32; N] {
    let mut values = [0.0; N];
    // SAFETY: a handle that lives, and bytes for the values.
    let status = unsafe { claystone_tensor_read(tensor, values.as_mut_ptr().cast(), size_of_val(&values)) };
    assert_eq!(status, Status::Ok, "{}", last_error());
    values
}

/// What `claystone_call` says to these, with the first result where there is one.
fn call(
    name: &str,
    tensors: &[*const ClaystoneTensor],
    arguments: &[ClaystoneArgument],
) -> (Status, *mut ClaystoneTensor) {
    let name = CString::new(name).unwrap();
    let call = ClaystoneCall {
        name: name.as_ptr(),
        tensors: tensors.as_ptr(),
        tensor_count: tensors.len(),
        arguments: arguments.as_ptr(),
        argument_count: arguments.len(),
    };
    let mut result = null_mut();
    // SAFETY: all of it lives.
    let status = unsafe { claystone_call(&call, &mut result, 1, null_mut()) };
    (status, result)
}

fn argument(tag: i32, value: ClaystoneValue) -> ClaystoneArgument {
    ClaystoneArgument { name: null(), tag, length: 0, value }
}

fn named(name: &CStr, argument: ClaystoneArgument) -> ClaystoneArgument {
    ClaystoneArgument { name: name.as_ptr(), ..argument }
}

/// Asserts that a call failed with a sentence that has `part`.
#[track_caller]
fn refused(status: Status, wanted: Status, part: &str) {
    assert_eq!(status, wanted, "{}", last_error());
    assert!(last_error().contains(part), "{}", last_error());
}

#[test]
fn null_is_an_error_wherever_something_has_to_be() {
    let (kept, x) = (storage(16), tensor(&[1.0]));
    // SAFETY: handles that live, and null, which is what this is about.
    unsafe {
        refused(claystone_device_count(null_mut()), Status::Invalid, "claystone_device_count: count is null");
        refused(claystone_device_name(-1, null_mut()), Status::Invalid, "name is null");
        refused(claystone_device_memory(-1, null_mut()), Status::Invalid, "bytes is null");
        refused(claystone_device_is_available(-1, null_mut()), Status::Invalid, "available is null");
        refused(claystone_storage_new(-1, 4, null_mut()), Status::Invalid, "storage is null");
        refused(claystone_storage_retain(null()), Status::Invalid, "storage is null");
        refused(claystone_storage_use_count(null(), &mut 0), Status::Invalid, "storage is null");
        refused(claystone_storage_use_count(kept, null_mut()), Status::Invalid, "count is null");
        refused(claystone_storage_nbytes(null(), &mut 0), Status::Invalid, "storage is null");
        refused(claystone_storage_device(kept, null_mut()), Status::Invalid, "device_number is null");
        refused(claystone_storage_is_same(kept, null(), &mut false), Status::Invalid, "other is null");
        refused(claystone_storage_record_stream(kept, null()), Status::Invalid, "stream is null");
        let mut made = null_mut();
        let new = |sizes, strides, tensor| claystone_tensor_new(kept, 0, sizes, strides, 1, 0, tensor);
        refused(new(null(), &1, &mut made), Status::Invalid, "sizes is null");
        refused(new(&1, null(), &mut made), Status::Invalid, "strides is null");
        refused(new(&1, &1, null_mut()), Status::Invalid, "tensor is null");
        refused(claystone_tensor_new(null(), 0, null(), null(), 0, 0, &mut made), Status::Invalid, "storage is null");
        refused(
            claystone_tensor_info(null(), 0, null_mut(), null_mut(), null_mut()),
            Status::Invalid,
            "tensor is null",
        );
        assert_eq!(claystone_tensor_info(x, 0, null_mut(), null_mut(), null_mut()), Status::Ok);
        refused(claystone_tensor_storage(x, null_mut()), Status::Invalid, "storage is null");
        refused(claystone_tensor_copy(x, null()), Status::Invalid, "source is null");
        refused(claystone_tensor_write(x, null(), 4), Status::Invalid, "data is null");
        refused(claystone_tensor_read(x, null_mut(), 4), Status::Invalid, "data is null");
        refused(claystone_call(null(), null_mut(), 0, null_mut()), Status::Invalid, "call is null");
        let nothing =
            ClaystoneCall { name: null(), tensors: null(), tensor_count: 0, arguments: null(), argument_count: 0 };
        refused(claystone_call(&nothing, null_mut(), 0, null_mut()), Status::Invalid, "name is null");
        let relu = ClaystoneCall { name: c"relu".as_ptr(), tensor_count: 1, ..nothing };
        refused(claystone_call(&relu, null_mut(), 0, null_mut()), Status::Invalid, "tensors is null");
        let relu = ClaystoneCall { name: c"relu".as_ptr(), argument_count: 1, ..nothing };
        refused(claystone_call(&relu, null_mut(), 0, null_mut()), Status::Invalid, "arguments is null");
        let pointer = x.cast_const();
        let relu = ClaystoneCall { name: c"relu".as_ptr(), tensors: &pointer, tensor_count: 1, ..nothing };
        refused(claystone_call(&relu, null_mut(), 1, null_mut()), Status::Invalid, "results is null");
        refused(claystone_call_out(&relu, null(), 1), Status::Invalid, "out is null");
        refused(claystone_call_backward(&relu, null(), 1, &1, &mut made, 1), Status::Invalid, "grad_outputs is null");
        refused(claystone_call_backward(&relu, &pointer, 1, null(), &mut made, 1), Status::Invalid, "wanted is null");
        refused(claystone_call_backward(&relu, &pointer, 1, &1, null_mut(), 1), Status::Invalid, "gradients is null");
        refused(claystone_operations(null_mut()), Status::Invalid, "signatures is null");
        refused(claystone_stream_new(-1, null_mut()), Status::Invalid, "stream is null");
        refused(claystone_stream_set_current(null()), Status::Invalid, "stream is null");
        refused(claystone_stream_record_event(null(), null_mut()), Status::Invalid, "stream is null");
        refused(claystone_event_query(null(), &mut false), Status::Invalid, "event is null");
        refused(claystone_memory_stats(-1, null_mut()), Status::Invalid, "json is null");
        refused(claystone_memory_snapshot(-1, 0, null_mut()), Status::Invalid, "snapshot is null");
        refused(claystone_generator_new(0, null_mut()), Status::Invalid, "generator is null");
        refused(claystone_generator_state(null(), null_mut(), &mut 0), Status::Invalid, "seed is null");
        claystone_tensor_release(x);
        claystone_storage_release(kept);
    }
    let missing = argument(ClaystoneTag::Text as i32, ClaystoneValue { text: null() });
    refused(call("mse_loss", &[], &[missing]).0, Status::Invalid, "text is null");
    let list = argument(ClaystoneTag::Ints as i32, ClaystoneValue { integers: null() });
    refused(call("ones", &[], &[ClaystoneArgument { length: 2, ..list }]).0, Status::Invalid, "integers is null");
    let holes = [null::<ClaystoneTensor>()];
    let list = argument(ClaystoneTag::Tensors as i32, ClaystoneValue { tensors: holes.as_ptr() });
    let cat = call("cat", &[], &[ClaystoneArgument { length: 1, ..list }]);
    refused(cat.0, Status::Invalid, "a tensor of a list is null");
}

#[test]
fn views_are_checked_against_their_storage() {
    let kept = storage(24);
    let (f32, f64, bool) = (ClaystoneDtype::F32 as i32, ClaystoneDtype::F64 as i32, ClaystoneDtype::Bool as i32);
    for (dtype, sizes, strides, offset) in [
        (f32, &[6i64][..], &[1i64][..], 0),
        (f32, &[6], &[-1], 5),      // backwards
        (f32, &[2, 3], &[1, 2], 0), // columns
        (f32, &[1 << 40], &[0], 5), // one element again and again
        (f32, &[3, 4], &[1, 1], 0), // overlapping windows
        (f32, &[], &[], 5),         // one element
        (f32, &[0], &[1], 6),       // nothing, at the end
        (f64, &[3], &[1], 0),
        (bool, &[24], &[1], 0),
    ] {
        let (status, tensor) = view(kept, dtype, sizes, strides, offset);
        assert_eq!(status, Status::Ok, "{sizes:?} {strides:?} {offset}: {}", last_error());
        // SAFETY: given just now.
        unsafe { claystone_tensor_release(tensor) };
    }
    for (dtype, sizes, strides, offset, part) in [
        (f32, &[7i64][..], &[1i64][..], 0, "a storage of 6"),
        (f32, &[6], &[1], 1, "a storage of 6"),
        (f32, &[6], &[-1], 4, "elements -1 to 4"),
        (f32, &[2], &[i64::MAX], 0, "a storage of 6"),
        (f32, &[2], &[i64::MIN], 5, "a storage of 6"),
        (f32, &[i64::MAX, i64::MAX], &[0, 0], 0, "from_storage_strided"),
        (f32, &[i64::MAX], &[i64::MAX], 0, "from_storage_strided"),
        (f32, &[], &[], 6, "a storage of 6"),
        (f32, &[0], &[1], 7, "a storage of 6"),
        (f32, &[-1], &[1], 0, "the size -1 is negative"),
        (f32, &[1], &[1], -1, "the offset -1 is negative"),
        (f32, &[1], &[1], i64::MAX, "a storage of 6"),
        (f64, &[4], &[1], 0, "a storage of 3"),
        (9, &[1], &[1], 0, "9 is no ClaystoneDtype"),
        (-1, &[1], &[1], 0, "-1 is no ClaystoneDtype"),
    ] {
        let (status, tensor) = view(kept, dtype, sizes, strides, offset);
        refused(status, Status::Invalid, part);
        assert!(tensor.is_null(), "where a function fails it gives nothing");
    }
    // SAFETY: given above.
    unsafe { claystone_storage_release(kept) };
    let odd = storage(21);
    refused(view(odd, f32, &[5], &[1], 0).0, Status::Invalid, "21 bytes are no whole number of f32");
    // SAFETY: given above.
    unsafe { claystone_storage_release(odd) };
}

#[test]
fn a_storage_lives_as_long_as_a_handle_or_a_tensor() {
    let held = || claystone::Device::Cpu.memory_stats().unwrap().requested_bytes.current;
    let before = held();
    let (kept, mut count) = (storage(5 << 20), 0);
    let (_, whole) = view(kept, ClaystoneDtype::U8 as i32, &[5 << 20], &[1], 0);
    // SAFETY: handles are released as often as they are given and retained.
    unsafe {
        for wanted in [2, 3] {
            assert_eq!(claystone_storage_retain(kept), Status::Ok);
            assert_eq!(claystone_storage_use_count(kept, &mut count), Status::Ok);
            assert_eq!(count, wanted);
        }
        let mut other = null_mut();
        assert_eq!(claystone_tensor_storage(whole, &mut other), Status::Ok);
        assert_eq!(claystone_storage_use_count(other, &mut count), Status::Ok);
        assert_eq!(count, 1, "a handle of its own");
        claystone_storage_release(other);
        (0..3).for_each(|_| claystone_storage_release(kept));
        assert!(held() >= before + (5 << 20), "the tensor keeps it");
        claystone_tensor_release(whole);
    }
    assert!(held() < before + (5 << 20));
}

#[test]
fn arguments_that_do_not_fit_are_errors_that_say_so() {
    let x = tensor(&[1.0, 2.0, 3.0, 4.0]);
    let integer = |tag: ClaystoneTag, integer| argument(tag as i32, ClaystoneValue { integer });
    let int = |n| integer(ClaystoneTag::Int, n);
    for (name, arguments, part) in [
        ("softmax", vec![argument(12, ClaystoneValue { integer: 0 })], "12 is no ClaystoneTag"),
        ("softmax", vec![argument(-1, ClaystoneValue { integer: 0 })], "-1 is no ClaystoneTag"),
        ("softmax", vec![argument(ClaystoneTag::Float as i32, ClaystoneValue { number: 0.5 })], "dim is 0.5"),
        ("softmax", vec![], "dim, an integer, is missing"),
        ("softmax", vec![int(0), int(0)], "at most 1 arguments besides tensors"),
        ("softmax", vec![named(c"axis", int(0))], "no parameter axis"),
        ("softmax", vec![int(0), named(c"dim", int(0))], "dim is given twice"),
        ("softmax", vec![named(c"dim", int(0)), int(0)], "comes after one with a name"),
        (
            "softmax",
            vec![named(c"input", argument(ClaystoneTag::Tensor as i32, ClaystoneValue { tensor: x }))],
            "input is given twice",
        ),
        ("to_dtype", vec![integer(ClaystoneTag::Dtype, 77)], "77 is no ClaystoneDtype"),
        ("ones", vec![int(1), integer(ClaystoneTag::None, 0), integer(ClaystoneTag::Device, i64::MAX)], "is no device"),
        (
            "softmax",
            vec![named(c"generator", argument(ClaystoneTag::Generator as i32, ClaystoneValue { generator: null() }))],
            "takes none",
        ),
        ("my_own", vec![named(c"dim", int(0))], "no built-in operation"),
    ] {
        let tensors = if name == "ones" { &[][..] } else { &[x.cast_const()][..] };
        let (status, result) = call(name, tensors, &arguments);
        refused(status, Status::Invalid, part);
        assert!(result.is_null());
    }
    let latin: &[u8] = b"caf\xe9\0";
    let call = ClaystoneCall {
        name: latin.as_ptr().cast::<c_char>(),
        tensors: null(),
        tensor_count: 0,
        arguments: null(),
        argument_count: 0,
    };
    // SAFETY: all of it lives.
    unsafe {
        refused(claystone_call(&call, null_mut(), 0, null_mut()), Status::Invalid, "name is no UTF-8");
        claystone_tensor_release(x);
    }
}

#[test]
fn statuses_tell_kinds_of_errors_apart() {
    let x = tensor(&[1.0, 2.0]);
    let dim = |n| argument(ClaystoneTag::Int as i32, ClaystoneValue { integer: n });
    refused(call("softmax", &[x], &[dim(3)]).0, Status::Index, "dimension 3 is out of range");
    refused(claystone_device_synchronize(999), Status::NoDevice, "opencl:999");
    let (tensors, mut made) = ([x.cast_const(); 2], null_mut());
    let call = ClaystoneCall {
        name: c"add".as_ptr(),
        tensors: tensors.as_ptr(),
        tensor_count: 2,
        arguments: null(),
        argument_count: 0,
    };
    // SAFETY: all of it lives.
    unsafe {
        let wrong = tensor(&[1.0, 2.0, 3.0]);
        let outs = [wrong.cast_const()];
        refused(
            claystone_call_backward(&call, outs.as_ptr(), 1, &1, &mut made, 1),
            Status::Invalid,
            "the gradient has the shape",
        );
        refused(
            claystone_storage_new(CLAYSTONE_CPU, usize::MAX, &mut null_mut()),
            Status::OutOfMemory,
            "out of memory",
        );
        claystone_tensor_release(wrong);
        claystone_tensor_release(x);
    }
}

#[test]
fn a_panic_ends_at_the_border() {
    let panics = Implementation::new(|_, _| panic!("the \0 in my_panic"));
    let _kept = ops::register("my_panic", Backend::Cpu, panics).unwrap();
    let x = tensor(&[1.0]);
    let (status, result) = call("my_panic", &[x], &[]);
    refused(status, Status::Panic, "claystone_call panicked, which is a bug in claystone: the \\0 in my_panic");
    assert!(result.is_null());
    // Everything still works.
    let (status, result) =
        call("add_scalar", &[x], &[argument(ClaystoneTag::Float as i32, ClaystoneValue { number: 1.5 })]);
    assert_eq!(status, Status::Ok);
    assert_eq!(values(result), [2.5]);
    assert!(last_error().contains("my_panic"), "what succeeds leaves the last error as it is");
    // SAFETY: given above.
    unsafe {
        claystone_tensor_release(result);
        claystone_tensor_release(x);
    }
}

#[test]
fn a_gradient_is_that_of_each_tensor_that_has_one() {
    // A tensor that is left out, by position and by name, and integers that have none.
    let (x, bias) = (tensor(&[1.0, 2.0, 4.0]), tensor(&[0.0, 0.0, 0.0]));
    let grad = tensor(&[1.0, 0.0, 0.0]);
    let size = [3i64];
    let sizes = argument(ClaystoneTag::Ints as i32, ClaystoneValue { integers: size.as_ptr() });
    let sizes = ClaystoneArgument { length: 1, ..sizes };
    let given = argument(ClaystoneTag::Tensor as i32, ClaystoneValue { tensor: bias });
    let tensors = [x.cast_const(), null(), bias.cast_const()];
    let (positional, mixed) = ([sizes], [sizes, named(c"bias", given)]);
    let mut all = Vec::new();
    for (count, arguments) in [(3, &positional[..]), (1, &mixed[..])] {
        let call = ClaystoneCall {
            name: c"layer_norm".as_ptr(),
            tensors: tensors.as_ptr(),
            tensor_count: count,
            arguments: arguments.as_ptr(),
            argument_count: arguments.len(),
        };
        let (mut gradients, outs) = ([x; 3], [grad.cast_const()]);
        // SAFETY: all of it lives.
        unsafe {
            let wanted = [1u8, 1, 1];
            let status = claystone_call_backward(&call, outs.as_ptr(), 1, wanted.as_ptr(), gradients.as_mut_ptr(), 3);
            assert_eq!(status, Status::Ok, "{}", last_error());
            assert!(gradients[1].is_null() && values(gradients[2]) == [1.0, 0.0, 0.0]);
            all.push(values::<3>(gradients[0]));
            assert!(all[0].iter().sum::<f32>().abs() < 1e-5);
            claystone_tensor_release(gradients[0]);
            claystone_tensor_release(gradients[2]);
        }
    }
    assert_eq!(all[0], all[1]);
    // SAFETY: given above.
    unsafe { [x, bias, grad].into_iter().for_each(|tensor| claystone_tensor_release(tensor)) };
}
