//! Formulas: programs of elementwise operations that run in one launch.

use std::ffi::{CStr, CString};
use std::ptr::null_mut;

use claystone_capi::device::CLAYSTONE_CPU;
use claystone_capi::formula::*;
use claystone_capi::multi::ClaystoneTensors;
use claystone_capi::status::*;
use claystone_capi::storage::*;
use claystone_capi::tensor::*;

/// Makes an f32 tensor of one dim on the CPU device.
fn tensor(values: &[f32]) -> *mut ClaystoneTensor {
    let (mut storage, mut made) = (null_mut(), null_mut());
    let (dtype, bytes) = (ClaystoneDtype::F32 as i32, size_of_val(values));
    // SAFETY: live handles, arrays of the given lengths, and valid result pointers.
    unsafe {
        assert_eq!(claystone_storage_new(CLAYSTONE_CPU, bytes, &mut storage), ClaystoneStatus::Ok);
        let size = values.len() as i64;
        assert_eq!(claystone_tensor_new(storage, dtype, &size, &1, 1, 0, &mut made), ClaystoneStatus::Ok);
        assert_eq!(claystone_tensor_write(made, values.as_ptr().cast(), bytes), ClaystoneStatus::Ok);
        claystone_storage_release(storage);
    }
    made
}

fn values<const N: usize>(tensor: *mut ClaystoneTensor) -> [f32; N] {
    let mut read = [0f32; N];
    // SAFETY: a live handle and as many writable bytes as stated.
    let status = unsafe { claystone_tensor_read(tensor, read.as_mut_ptr().cast(), size_of_val(&read)) };
    assert_eq!(status, ClaystoneStatus::Ok);
    read
}

fn formula(program: &str, inputs: usize, scalars: usize) -> Result<*mut ClaystoneFormula, String> {
    let (program, mut made) = (CString::new(program).unwrap(), null_mut());
    // SAFETY: a string, and a valid result pointer; the error message lives until the next failing call.
    unsafe {
        match claystone_formula_new(program.as_ptr(), inputs, scalars, &mut made) {
            ClaystoneStatus::Ok => Ok(made),
            _ => Err(CStr::from_ptr(claystone_last_error()).to_str().unwrap().to_owned()),
        }
    }
}

fn launches() -> u64 {
    let mut count = 0;
    // SAFETY: a valid result pointer.
    assert_eq!(unsafe { claystone_launch_count(&mut count) }, ClaystoneStatus::Ok);
    count
}

#[test]
fn a_program_runs_in_one_launch_with_new_scalars_each_time() {
    let program = "add x0 x1\nmul_scalar v0 s0; relu v1\nrelu'0 v1\nreturn v2 v3";
    let made = formula(program, 2, 1).unwrap();
    let (a, b) = (tensor(&[1.0, -2.0, 3.0]), tensor(&[1.0]));
    let (y, slope) = (tensor(&[0.0; 3]), tensor(&[0.0; 3]));
    let inputs = [a.cast_const(), b.cast_const()];
    let outputs = [y.cast_const(), slope.cast_const()];
    let list = |handles: &[*const ClaystoneTensor; 2]| ClaystoneTensors { tensors: handles.as_ptr(), count: 2 };
    for (scalar, expected) in [(0.5, [1.0, 0.0, 2.0]), (-1.0, [0.0, 1.0, 0.0])] {
        let before = launches();
        // SAFETY: live handles and arrays of the given lengths.
        let status = unsafe { claystone_formula_run(made, list(&inputs), &scalar, 1, list(&outputs)) };
        assert_eq!((status, launches() - before), (ClaystoneStatus::Ok, 1));
        assert_eq!(values(y), expected);
        assert_eq!(values(slope), expected.map(|x| f32::from(x > 0.0)));
    }
    // SAFETY: handles that are not used afterwards.
    unsafe {
        assert_ne!(claystone_formula_run(made, list(&inputs), &1.0, 0, list(&outputs)), ClaystoneStatus::Ok);
        claystone_formula_release(made);
        [a, b, y, slope].into_iter().for_each(|t| claystone_tensor_release(t));
    }
}

#[test]
fn invalid_programs_are_errors() {
    for (program, message) in [
        ("neg x0", "ends with a line that returns"),
        ("return", "at least one formula"),
        ("neg x1; return v0", "\"x1\" is no operand"),
        ("neg x0; return v1", "\"v1\" is no operand"),
        ("neg s0; return v0", "\"s0\" is no operand"),
        ("neg é; return v0", "is no operand"),
        ("fly x0; return v0", "\"fly\" is no elementwise operation"),
        ("add x0; return v0", "it takes 2 tensors and 0 scalars"),
        ("relu'1 x0; return v0", "it has no operand 1"),
    ] {
        let error = formula(program, 1, 0).unwrap_err();
        assert!(error.contains(message), "{program}: {error}");
    }
}

#[test]
fn operations_are_listed() {
    let mut list = claystone_capi::memory::ClaystoneBytes { data: null_mut(), length: 0 };
    // SAFETY: a valid result pointer, and the string that the call made.
    unsafe {
        assert_eq!(claystone_formula_operations(&mut list), ClaystoneStatus::Ok);
        let text = CStr::from_ptr(list.data.cast()).to_str().unwrap().to_owned();
        claystone_capi::memory::claystone_bytes_free(&mut list);
        assert!(text.contains("\nlerp 2 1 float\n") && text.contains("\nbitwise_and 2 0 integer\n"), "{text}");
    }
}
