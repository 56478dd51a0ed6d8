//! Invalid calls and cases that C programs cannot produce. The tests are in Rust, which can make claystone panic.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{null, null_mut};

use claystone::ops::{self, Backend, Implementation};
use claystone_capi::call::*;
use claystone_capi::device::*;
use claystone_capi::dry_run::*;
use claystone_capi::hooks::*;
use claystone_capi::memory::*;
use claystone_capi::random::*;
use claystone_capi::status::*;
use claystone_capi::storage::*;
use claystone_capi::stream::*;
use claystone_capi::tensor::*;

use ClaystoneStatus as Status;

/// Returns the last error of this thread.
fn last_error() -> String {
    // SAFETY: a string that lives until the next failing call.
    unsafe { CStr::from_ptr(claystone_last_error()) }.to_str().unwrap().to_owned()
}

/// Allocates a storage on the CPU device.
fn storage(nbytes: usize) -> *mut ClaystoneStorage {
    let mut storage = null_mut();
    // SAFETY: the result pointer is valid.
    assert_eq!(unsafe { claystone_storage_new(CLAYSTONE_CPU, nbytes, &mut storage) }, Status::Ok);
    storage
}

/// Returns the status of `claystone_tensor_new`, and the tensor if the call succeeded.
fn view(
    storage: *mut ClaystoneStorage,
    dtype: i32,
    sizes: &[i64],
    strides: &[i64],
    offset: i64,
) -> (Status, *mut ClaystoneTensor) {
    assert_eq!(sizes.len(), strides.len());
    let mut tensor = null_mut();
    // SAFETY: a live handle, arrays of the given lengths, and a valid result pointer.
    let status = unsafe {
        claystone_tensor_new(storage, dtype, sizes.as_ptr(), strides.as_ptr(), sizes.len(), offset, &mut tensor)
    };
    (status, tensor)
}

/// Makes an f32 tensor with these values on the CPU device.
fn tensor(values: &[f32]) -> *mut ClaystoneTensor {
    let bytes = size_of_val(values);
    let storage = storage(bytes);
    let (status, tensor) = view(storage, ClaystoneDtype::F32 as i32, &[values.len() as i64], &[1], 0);
    assert_eq!(status, Status::Ok);
    // SAFETY: live handles, and as many readable bytes as stated.
    unsafe {
        claystone_storage_release(storage);
        assert_eq!(claystone_tensor_write(tensor, values.as_ptr().cast(), bytes), Status::Ok);
    }
    tensor
}

fn values<const N: usize>(tensor: *const ClaystoneTensor) -> [f32; N] {
    let mut values = [0.0; N];
    // SAFETY: a live handle, and as many writable bytes as stated.
    let status = unsafe { claystone_tensor_read(tensor, values.as_mut_ptr().cast(), size_of_val(&values)) };
    assert_eq!(status, Status::Ok, "{}", last_error());
    values
}

/// Returns the status of `claystone_call`, and the first result if the call succeeded.
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
    // SAFETY: every pointer is valid and outlives the call.
    let status = unsafe { claystone_call(&call, &mut result, 1, null_mut()) };
    (status, result)
}

fn argument(tag: i32, value: ClaystoneValue) -> ClaystoneArgument {
    ClaystoneArgument { name: null(), tag, length: 0, value }
}

fn named(name: &CStr, argument: ClaystoneArgument) -> ClaystoneArgument {
    ClaystoneArgument { name: name.as_ptr(), ..argument }
}

/// Asserts that a call failed with the status `wanted` and a message that contains `part`.
#[track_caller]
fn assert_refused(status: Status, wanted: Status, part: &str) {
    assert_eq!(status, wanted, "{}", last_error());
    assert!(last_error().contains(part), "{}", last_error());
}

#[test]
fn required_pointers_that_are_null_are_errors() {
    let (kept, x) = (storage(16), tensor(&[1.0]));
    // SAFETY: live handles and null pointers, which the API checks.
    unsafe {
        assert_refused(claystone_device_count(null_mut()), Status::Invalid, "claystone_device_count: count is null");
        assert_refused(claystone_device_name(-1, null_mut()), Status::Invalid, "name is null");
        assert_refused(claystone_device_memory(-1, null_mut()), Status::Invalid, "bytes is null");
        assert_refused(claystone_device_is_available(-1, null_mut()), Status::Invalid, "available is null");
        assert_refused(claystone_storage_new(-1, 4, null_mut()), Status::Invalid, "storage is null");
        assert_refused(claystone_storage_retain(null()), Status::Invalid, "storage is null");
        assert_refused(claystone_storage_use_count(null(), &mut 0), Status::Invalid, "storage is null");
        assert_refused(claystone_storage_use_count(kept, null_mut()), Status::Invalid, "count is null");
        assert_refused(claystone_storage_nbytes(null(), &mut 0), Status::Invalid, "storage is null");
        assert_refused(claystone_storage_device(kept, null_mut()), Status::Invalid, "device_number is null");
        assert_refused(claystone_storage_is_same(kept, null(), &mut false), Status::Invalid, "other is null");
        assert_refused(claystone_storage_record_stream(kept, null()), Status::Invalid, "stream is null");
        let mut made = null_mut();
        let new = |sizes, strides, tensor| claystone_tensor_new(kept, 0, sizes, strides, 1, 0, tensor);
        assert_refused(new(null(), &1, &mut made), Status::Invalid, "sizes is null");
        assert_refused(new(&1, null(), &mut made), Status::Invalid, "strides is null");
        assert_refused(new(&1, &1, null_mut()), Status::Invalid, "tensor is null");
        assert_refused(
            claystone_tensor_new(null(), 0, null(), null(), 0, 0, &mut made),
            Status::Invalid,
            "storage is null",
        );
        assert_refused(
            claystone_tensor_info(null(), 0, null_mut(), null_mut(), null_mut()),
            Status::Invalid,
            "tensor is null",
        );
        assert_eq!(claystone_tensor_info(x, 0, null_mut(), null_mut(), null_mut()), Status::Ok);
        assert_refused(claystone_tensor_storage(x, null_mut()), Status::Invalid, "storage is null");
        assert_refused(claystone_tensor_copy(x, null()), Status::Invalid, "source is null");
        assert_refused(claystone_tensor_write(x, null(), 4), Status::Invalid, "data is null");
        assert_refused(claystone_tensor_read(x, null_mut(), 4), Status::Invalid, "data is null");
        assert_refused(claystone_call(null(), null_mut(), 0, null_mut()), Status::Invalid, "call is null");
        let nothing =
            ClaystoneCall { name: null(), tensors: null(), tensor_count: 0, arguments: null(), argument_count: 0 };
        assert_refused(claystone_call(&nothing, null_mut(), 0, null_mut()), Status::Invalid, "name is null");
        let relu = ClaystoneCall { name: c"relu".as_ptr(), tensor_count: 1, ..nothing };
        assert_refused(claystone_call(&relu, null_mut(), 0, null_mut()), Status::Invalid, "tensors is null");
        let relu = ClaystoneCall { name: c"relu".as_ptr(), argument_count: 1, ..nothing };
        assert_refused(claystone_call(&relu, null_mut(), 0, null_mut()), Status::Invalid, "arguments is null");
        let pointer = x.cast_const();
        let relu = ClaystoneCall { name: c"relu".as_ptr(), tensors: &pointer, tensor_count: 1, ..nothing };
        assert_refused(claystone_call(&relu, null_mut(), 1, null_mut()), Status::Invalid, "results is null");
        assert_refused(claystone_call_out(&relu, null(), 1), Status::Invalid, "out is null");
        assert_refused(
            claystone_call_backward(&relu, null(), 1, &1, &mut made, 1),
            Status::Invalid,
            "grad_outputs is null",
        );
        assert_refused(
            claystone_call_backward(&relu, &pointer, 1, null(), &mut made, 1),
            Status::Invalid,
            "wanted is null",
        );
        assert_refused(
            claystone_call_backward(&relu, &pointer, 1, &1, null_mut(), 1),
            Status::Invalid,
            "gradients is null",
        );
        assert_refused(claystone_operations(null_mut()), Status::Invalid, "signatures is null");
        assert_refused(claystone_stream_new(-1, null_mut()), Status::Invalid, "stream is null");
        assert_refused(claystone_stream_set_current(null()), Status::Invalid, "stream is null");
        assert_refused(claystone_stream_record_event(null(), null_mut()), Status::Invalid, "stream is null");
        assert_refused(claystone_event_query(null(), &mut false), Status::Invalid, "event is null");
        assert_refused(claystone_memory_stats(-1, null_mut()), Status::Invalid, "json is null");
        assert_refused(claystone_memory_snapshot(-1, 0, null_mut()), Status::Invalid, "snapshot is null");
        assert_refused(claystone_generator_new(0, null_mut()), Status::Invalid, "generator is null");
        assert_refused(claystone_generator_state(null(), null_mut(), &mut 0), Status::Invalid, "seed is null");
        claystone_tensor_release(x);
        claystone_storage_release(kept);
    }
    let missing = argument(ClaystoneTag::Text as i32, ClaystoneValue { text: null() });
    assert_refused(call("mse_loss", &[], &[missing]).0, Status::Invalid, "text is null");
    let list = argument(ClaystoneTag::Ints as i32, ClaystoneValue { integers: null() });
    assert_refused(
        call("ones", &[], &[ClaystoneArgument { length: 2, ..list }]).0,
        Status::Invalid,
        "integers is null",
    );
    let holes = [null::<ClaystoneTensor>()];
    let list = argument(ClaystoneTag::Tensors as i32, ClaystoneValue { tensors: holes.as_ptr() });
    let cat = call("cat", &[], &[ClaystoneArgument { length: 1, ..list }]);
    assert_refused(cat.0, Status::Invalid, "a tensor of a list is null");
}

#[test]
fn views_are_checked_against_the_bounds_of_their_storage() {
    let kept = storage(24);
    let (f32, f64, bool) = (ClaystoneDtype::F32 as i32, ClaystoneDtype::F64 as i32, ClaystoneDtype::Bool as i32);
    for (dtype, sizes, strides, offset) in [
        (f32, &[6i64][..], &[1i64][..], 0),
        (f32, &[6], &[-1], 5),      // reversed
        (f32, &[2, 3], &[1, 2], 0), // column-major
        (f32, &[1 << 40], &[0], 5), // one element, expanded
        (f32, &[3, 4], &[1, 1], 0), // overlapping windows
        (f32, &[], &[], 5),         // one element
        (f32, &[0], &[1], 6),       // empty, at the end
        (f64, &[3], &[1], 0),
        (bool, &[24], &[1], 0),
    ] {
        let (status, tensor) = view(kept, dtype, sizes, strides, offset);
        assert_eq!(status, Status::Ok, "{sizes:?} {strides:?} {offset}: {}", last_error());
        // SAFETY: made by `view` just now.
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
        (77, &[1], &[1], 0, "77 is no ClaystoneDtype"),
        (-1, &[1], &[1], 0, "-1 is no ClaystoneDtype"),
    ] {
        let (status, tensor) = view(kept, dtype, sizes, strides, offset);
        assert_refused(status, Status::Invalid, part);
        assert!(tensor.is_null(), "a failing function writes no result");
    }
    // SAFETY: made above.
    unsafe { claystone_storage_release(kept) };
    let odd = storage(21);
    assert_refused(view(odd, f32, &[5], &[1], 0).0, Status::Invalid, "21 bytes are not a whole number of f32");
    // SAFETY: made above.
    unsafe { claystone_storage_release(odd) };
}

#[test]
fn storage_lives_as_long_as_a_handle_or_tensor() {
    let held = || claystone::Device::Cpu.memory_stats().unwrap().requested_bytes.current;
    let before = held();
    let (kept, mut count) = (storage(5 << 20), 0);
    let (_, whole) = view(kept, ClaystoneDtype::U8 as i32, &[5 << 20], &[1], 0);
    // SAFETY: each handle is released as often as it is returned and retained.
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
fn invalid_arguments_are_errors_that_name_the_problem() {
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
        (
            "ones",
            vec![int(1), integer(ClaystoneTag::None, 0), integer(ClaystoneTag::Device, i64::MAX)],
            "is not a device",
        ),
        (
            "softmax",
            vec![named(c"generator", argument(ClaystoneTag::Generator as i32, ClaystoneValue { generator: null() }))],
            "takes no name",
        ),
        ("my_own", vec![named(c"dim", int(0))], "not a built-in operation"),
    ] {
        let tensors = if name == "ones" { &[][..] } else { &[x.cast_const()][..] };
        let (status, result) = call(name, tensors, &arguments);
        assert_refused(status, Status::Invalid, part);
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
    // SAFETY: every pointer is valid and outlives the call.
    unsafe {
        assert_refused(claystone_call(&call, null_mut(), 0, null_mut()), Status::Invalid, "name is not UTF-8");
        claystone_tensor_release(x);
    }
}

#[test]
fn statuses_distinguish_kinds_of_errors() {
    let x = tensor(&[1.0, 2.0]);
    let dim = |n| argument(ClaystoneTag::Int as i32, ClaystoneValue { integer: n });
    assert_refused(call("softmax", &[x], &[dim(3)]).0, Status::Index, "dimension 3 is out of range");
    assert_refused(claystone_device_synchronize(999), Status::NoDevice, "opencl:999");
    let (tensors, mut made) = ([x.cast_const(); 2], null_mut());
    let call = ClaystoneCall {
        name: c"add".as_ptr(),
        tensors: tensors.as_ptr(),
        tensor_count: 2,
        arguments: null(),
        argument_count: 0,
    };
    // SAFETY: every pointer is valid and outlives the call.
    unsafe {
        let wrong = tensor(&[1.0, 2.0, 3.0]);
        let outs = [wrong.cast_const()];
        assert_refused(
            claystone_call_backward(&call, outs.as_ptr(), 1, &1, &mut made, 1),
            Status::Invalid,
            "the gradient has the shape",
        );
        assert_refused(
            claystone_storage_new(CLAYSTONE_CPU, usize::MAX, &mut null_mut()),
            Status::OutOfMemory,
            "out of memory",
        );
        claystone_tensor_release(wrong);
        claystone_tensor_release(x);
    }
}

#[test]
fn panics_become_a_status() {
    let panics = Implementation::new(|_, _| panic!("the \0 in my_panic"));
    let _kept = ops::register("my_panic", Backend::Cpu, panics).unwrap();
    let x = tensor(&[1.0]);
    let (status, result) = call("my_panic", &[x], &[]);
    assert_refused(status, Status::Panic, "claystone_call panicked, which is a bug in claystone: the \\0 in my_panic");
    assert!(result.is_null());
    // The API still works after a panic.
    let (status, result) =
        call("add_scalar", &[x], &[argument(ClaystoneTag::Float as i32, ClaystoneValue { number: 1.5 })]);
    assert_eq!(status, Status::Ok);
    assert_eq!(values(result), [2.5]);
    assert!(last_error().contains("my_panic"), "successful calls keep the last error");
    // SAFETY: made above.
    unsafe {
        claystone_tensor_release(result);
        claystone_tensor_release(x);
    }
}

#[test]
fn backward_gives_gradients_only_for_tensors_that_have_one() {
    // The weight is omitted; the bias is passed by position, then by name. Integer arguments have no gradient.
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
        // SAFETY: every pointer is valid and outlives the call.
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
    // SAFETY: made above.
    unsafe { [x, bias, grad].into_iter().for_each(|tensor| claystone_tensor_release(tensor)) };
}

/// Returns the status and the gradient of `x * x` for a gradient of 1.
fn gradient_of_square(x: *const ClaystoneTensor) -> (Status, [f32; 1]) {
    let (ones, tensors) = (tensor(&[1.0]), [x, x]);
    let (mut gradients, outs) = ([null_mut(); 2], [ones.cast_const()]);
    let call = ClaystoneCall {
        name: c"mul".as_ptr(),
        tensors: tensors.as_ptr(),
        tensor_count: 2,
        arguments: null(),
        argument_count: 0,
    };
    // SAFETY: every pointer is valid and outlives the call.
    unsafe {
        let status = claystone_call_backward(&call, outs.as_ptr(), 1, [1u8, 0].as_ptr(), gradients.as_mut_ptr(), 2);
        let found = if status == Status::Ok { values(gradients[0]) } else { [0.0] };
        claystone_tensor_release(gradients[0]);
        claystone_tensor_release(ones);
        (status, found)
    }
}

/// The state of hooks that keep the values of one-element tensors: the calls of pack, unpack and release, and the results of `run`.
#[derive(Default)]
struct Hooked {
    calls: [usize; 3],
    x: usize,
    fails: bool,
    found: Option<(Status, [f32; 1])>,
}

unsafe extern "C" fn pack(data: *mut c_void, t: *const ClaystoneTensor, packed: *mut *mut c_void) -> Status {
    // SAFETY: the data of this test, and valid pointers.
    unsafe {
        let hooked = &mut *data.cast::<Hooked>();
        hooked.calls[0] += 1;
        if hooked.fails {
            return Status::Failed;
        }
        *packed = Box::into_raw(Box::new(values::<1>(t)[0])).cast();
    }
    Status::Ok
}

unsafe extern "C" fn unpack(data: *mut c_void, packed: *mut c_void, t: *mut *mut ClaystoneTensor) -> Status {
    // SAFETY: as in `pack`.
    unsafe {
        (*data.cast::<Hooked>()).calls[1] += 1;
        *t = tensor(&[*packed.cast::<f32>()]);
    }
    Status::Ok
}

unsafe extern "C" fn release_packed(data: *mut c_void, packed: *mut c_void) {
    // SAFETY: as in `pack`.
    unsafe {
        (*data.cast::<Hooked>()).calls[2] += 1;
        drop(Box::from_raw(packed.cast::<f32>()));
    }
}

unsafe extern "C" fn compute(data: *mut c_void) {
    // SAFETY: as in `pack`; the hooks borrow the data only while they run.
    unsafe {
        let found = gradient_of_square((*data.cast::<Hooked>()).x as *const ClaystoneTensor);
        (*data.cast::<Hooked>()).found = Some(found);
    }
}

#[test]
fn hooks_store_saved_tensors() {
    let x = tensor(&[3.0]);
    let mut hooked = Hooked { x: x as usize, ..Hooked::default() };
    let data: *mut c_void = (&raw mut hooked).cast();
    let hooks =
        ClaystoneSavedTensorsHooks { pack: Some(pack), unpack: Some(unpack), release: Some(release_packed), data };
    let none = ClaystoneSavedTensorsHooks { pack: None, ..hooks };
    // SAFETY: valid pointers, and null pointers, which the API checks.
    unsafe {
        assert_refused(claystone_saved_tensors_hooks(null(), Some(compute), data), Status::Invalid, "hooks is null");
        assert_refused(claystone_saved_tensors_hooks(&none, Some(compute), data), Status::Invalid, "pack or unpack");
        assert_refused(claystone_saved_tensors_hooks(&hooks, None, data), Status::Invalid, "run is null");
        assert_refused(claystone_save_on_cpu(true, None, data), Status::Invalid, "run is null");
        let disable = |reason| claystone_disable_saved_tensors_hooks(reason, Some(compute), data);
        assert_refused(disable(null()), Status::Invalid, "reason is null");
        assert_eq!((&raw const hooked.calls).read(), [0; 3]);
        for run in [
            &|| claystone_saved_tensors_hooks(&hooks, Some(compute), data) as Status,
            &|| claystone_save_on_cpu(true, Some(compute), data),
            &|| disable(c"not here".as_ptr()),
        ] as [&dyn Fn() -> Status; 3]
        {
            assert_eq!(run(), Status::Ok, "{}", last_error());
            assert_eq!((&raw const hooked.found).read(), Some((Status::Ok, [3.0])), "{}", last_error());
        }
        let calls = (&raw const hooked.calls).read();
        assert!(calls[0] > 0 && calls[1] > 0 && calls[0] == calls[2], "{calls:?}");
        (&raw mut hooked.fails).write(true);
        assert_eq!(claystone_saved_tensors_hooks(&hooks, Some(compute), data), Status::Ok);
        assert_eq!((&raw const hooked.found).read(), Some((Status::Autograd, [0.0])));
        assert!(last_error().contains("the pack hook returned Failed"), "{}", last_error());
        claystone_tensor_release(x);
    }
}

/// The body of the child process of the test below, because a dry run begins before the first tensor of a process.
#[test]
fn dry_child_process() {
    if std::env::var_os("CLAYSTONE_CAPI_DRY").is_none() {
        return;
    }
    let nothing = || ClaystoneBytes { data: null_mut(), length: 0 };
    let (mut json, mut text) = (nothing(), nothing());
    // SAFETY: valid result pointers, or null; live handles; bytes that this API made.
    unsafe {
        assert_refused(claystone_dry_run_end(&mut json, &mut text), Status::Invalid, "no dry run");
        assert_eq!(claystone_dry_run_begin(1 << 20), Status::Ok, "{}", last_error());
        assert_refused(claystone_dry_run_begin(0), Status::Invalid, "in progress");
        let (parameter, large) = (tensor(&[1.0; 3]), tensor(&[1.0; 1 << 20]));
        assert_eq!(claystone_tensor_set_role(large, ClaystoneRole::Parameter as i32), Status::Ok);
        assert_eq!(claystone_tensor_set_role(large, ClaystoneRole::Saved as i32), Status::Ok, "does not replace");
        assert_refused(claystone_tensor_set_role(large, 5), Status::Invalid, "ClaystoneRole");
        assert_refused(claystone_tensor_set_role(null(), 0), Status::Invalid, "tensor is null");
        assert_refused(claystone_dry_run_end(null_mut(), &mut text), Status::Invalid, "json is null");
        assert_refused(claystone_dry_run_end(&mut json, null_mut()), Status::Invalid, "text is null");
        assert_eq!(claystone_dry_run_end(&mut json, &mut text), Status::Ok, "{}", last_error());
        let said = [&json, &text].map(|bytes| std::slice::from_raw_parts(bytes.data, bytes.length));
        let [report, printed] = said.map(String::from_utf8_lossy);
        assert!(report.contains("\"fits\":false") && report.contains("\"Parameter\":4194304"), "{report}");
        assert!(printed.contains("does not fit in 1.00 MiB"), "{printed}");
        [json, text].iter_mut().for_each(|bytes| claystone_bytes_free(bytes));
        // Memory is real again, and tensors of the dry run stay without bytes.
        let real = tensor(&[7.0; 3]);
        let (status, exp) = call("exp", &[parameter], &[]);
        assert_eq!((status, values(real)), (Status::Ok, [7.0; 3]));
        assert_refused(claystone_dry_run_begin(0), Status::Invalid, "before the first");
        [parameter, large, real, exp].into_iter().for_each(|tensor| claystone_tensor_release(tensor));
        assert_eq!(claystone_dry_run_begin(0), Status::Ok, "no tensor is left: {}", last_error());
    }
}

#[test]
fn dry_runs_report_the_memory_of_a_process() {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let child = child.args(["--exact", "dry_child_process", "--nocapture"]).env("CLAYSTONE_CAPI_DRY", "1");
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
