//! Adopts contexts and queues that other OpenCL code created as claystone devices.

use std::ffi::c_void;
use std::ptr;

use cl3::command_queue as queues;
use cl3::device::{CL_DEVICE_TYPE_ALL, get_device_ids};
use cl3::memory::{CL_MEM_READ_WRITE, create_buffer, release_mem_object};
use claystone::profiler::profile;
use claystone::storage::Storage;
use claystone::{DType, Device, Error, Result, Stream, Tensor, with_stream};

use crate::common::{devices, in_own_process};

type Handle = *mut c_void;

const N: usize = 5000;
const BYTES: usize = N * 4;

/// The context, device and queue of a program that already uses OpenCL.
struct Caller {
    context: Handle,
    device: Handle,
    queue: Handle,
    /// A buffer of `N` floats.
    buffer: Handle,
    /// A kernel that slowly replaces each element x of `N` floats by 3 x + 1.
    kernel: Handle,
}

impl Caller {
    fn new(devices: &[Handle], device: Handle, properties: u64) -> Caller {
        let context = cl3::context::create_context(devices, ptr::null(), None, ptr::null_mut()).unwrap();
        let source = "__kernel void slow(__global float *x, ulong first) {
            float y = x[first + get_global_id(0)];
            volatile float z = 0;
            for (int i = 0; i < 2000; i++) z += i;
            x[first + get_global_id(0)] = z == -1.0f ? 0.0f : 3.0f * y + 1.0f;
        }";
        let program = cl3::program::create_program_with_source(context, &[source]).unwrap();
        cl3::program::build_program(program, &[device], c"", None, ptr::null_mut()).unwrap();
        let kernel = cl3::kernel::create_kernel(program, c"slow").unwrap();
        // SAFETY: the context is valid and contains the device.
        let (queue, buffer) = unsafe {
            let queue = queues::create_command_queue(context, device, properties).unwrap();
            (queue, create_buffer(context, CL_MEM_READ_WRITE, BYTES, ptr::null_mut()).unwrap())
        };
        Caller { context, device, queue, buffer, kernel }
    }

    fn adopt(&self) -> Result<Device> {
        // SAFETY: the handles are valid and come from the OpenCL loader.
        unsafe { Device::adopt(self.context, self.device, self.queue) }
    }

    /// Enqueues a non-blocking write of the whole buffer. The values are 'static, so they exist until the write is done.
    fn write(&self, values: &'static [f32]) {
        let from = values.as_ptr().cast::<c_void>();
        // SAFETY: `values` has as many bytes as the buffer and is 'static.
        unsafe { queues::enqueue_write_buffer(self.queue, self.buffer, 0, 0, BYTES, from, 0, ptr::null()) }.unwrap();
    }

    /// Enqueues the kernel on `N` floats of a buffer, starting at a byte offset.
    fn run(&self, buffer: Handle, offset: usize) {
        let (first, size) = (offset as u64 / 4, N);
        // SAFETY: the arguments match the kernel's parameters, and the buffer contains `N` floats from the offset on.
        unsafe {
            cl3::kernel::set_kernel_arg(self.kernel, 0, size_of::<Handle>(), ptr::from_ref(&buffer).cast()).unwrap();
            cl3::kernel::set_kernel_arg(self.kernel, 1, 8, ptr::from_ref(&first).cast()).unwrap();
            queues::enqueue_nd_range_kernel(
                self.queue,
                self.kernel,
                1,
                ptr::null(),
                &size,
                ptr::null(),
                0,
                ptr::null(),
            )
            .unwrap();
        }
    }

    /// Reads `N` floats of a buffer, starting at a byte offset, after the earlier commands in the queue.
    fn read(&self, buffer: Handle, offset: usize) -> Vec<f32> {
        let mut values = vec![0f32; N];
        let to = values.as_mut_ptr().cast();
        // SAFETY: the vector has enough bytes, and the call blocks.
        unsafe { queues::enqueue_read_buffer(self.queue, buffer, 1, offset, BYTES, to, 0, ptr::null()) }.unwrap();
        values
    }

    /// Imports the buffer as a tensor.
    fn tensor(&self, device: Device) -> Tensor {
        // SAFETY: only the adopted queue uses the buffer.
        let storage = unsafe { Storage::import_cl(device, self.buffer, 0, BYTES) }.unwrap();
        Tensor::from_storage(storage, N, DType::F32).unwrap()
    }

    /// Releases the caller's handles.
    fn release(self) {
        // SAFETY: each handle was created once and is released once.
        unsafe {
            release_mem_object(self.buffer).unwrap();
            queues::release_command_queue(self.queue).unwrap();
            cl3::context::release_context(self.context).unwrap();
        }
    }
}

/// Returns the devices of each platform.
fn platforms() -> Vec<Vec<Handle>> {
    let platforms = cl3::platform::get_platform_ids().unwrap();
    platforms.into_iter().map(|p| get_device_ids(p, CL_DEVICE_TYPE_ALL).unwrap_or_default()).collect()
}

fn ramp() -> &'static [f32] {
    (0..N).map(|i| (i % 100) as f32).collect::<Vec<_>>().leak()
}

/// Alternates between OpenCL commands of the caller and claystone operations, without waiting in between.
fn check_round_trip(caller: &Caller, device: Device) {
    let want = |f: fn(f32) -> f32| ramp().iter().map(|&x| f(x)).collect::<Vec<_>>();
    caller.write(ramp());
    let x = caller.tensor(device);
    x.mul_scalar_(2.0).unwrap();
    caller.run(caller.buffer, 0);
    assert_eq!(x.add_scalar(0.5).unwrap().to_vec::<f32>().unwrap(), want(|x| 6.0 * x + 1.5));
    assert_eq!(caller.read(caller.buffer, 0), want(|x| 6.0 * x + 1.0));
    // The caller's kernel runs on a tensor of claystone, whose memory starts at an offset in a buffer of claystone's allocator.
    let ballast = Tensor::zeros(100, device).unwrap();
    let y = Tensor::from_slice(ramp(), N, device).unwrap().add_scalar(1.0).unwrap();
    let (buffer, offset) = y.storage().export_cl().unwrap();
    caller.run(buffer, offset);
    y.mul_(&y).unwrap();
    caller.run(buffer, offset);
    assert_eq!(caller.read(buffer, offset), want(|x| 3.0 * (3.0 * x + 4.0) * (3.0 * x + 4.0) + 1.0));
    assert_eq!(ballast.to_vec::<f32>().unwrap(), [0.0; 100]);
    // Another stream waits for the commands in the adopted queue.
    caller.run(caller.buffer, 0);
    let side = Stream::new(device).unwrap();
    side.wait_stream(&Stream::current(device).unwrap()).unwrap();
    let z = with_stream(&side, || x.neg()?.to_vec::<f32>()).unwrap();
    assert_eq!(z, want(|x| -(18.0 * x + 4.0)));
}

#[test]
fn contexts_and_queues_of_other_code_can_be_adopted() {
    if !in_own_process("adopt::contexts_and_queues_of_other_code_can_be_adopted") {
        return; // other tests count the devices of their process
    }
    for ids in platforms() {
        for &id in &ids {
            let before = devices();
            let caller = Caller::new(&[id], id, 0);
            let device = caller.adopt().unwrap();
            assert_eq!((device, caller.adopt().unwrap()), (Device::OpenCL(before.len() - 1), device), "once");
            assert_eq!(devices(), [&before[..before.len() - 1], &[device, Device::Cpu]].concat());
            assert!(device.is_available());
            assert_eq!(device.cl_context().unwrap(), caller.context);
            let known = before.iter().map(|known| known.info().unwrap().name);
            assert!(known.into_iter().any(|name| name == device.info().unwrap().name));
            check_round_trip(&caller, device);
            let ((), profile) = profile(|| check_round_trip(&caller, device)).unwrap();
            assert!(!profile.events().is_empty());
            // A network's training step on the adopted device has the same losses as on other devices.
            let step = |device| -> Result<Vec<f32>> {
                let x = Tensor::arange(0, 12, 1, device)?.to_dtype(DType::F32)?.reshape([3, 4])?;
                let w = x.t()?.contiguous()?.mul_scalar(0.125)?.requires_grad_(true)?;
                x.matmul(&w)?.tanh()?.sum((), false)?.backward()?;
                w.grad().expect("it took part").to_vec()
            };
            let (here, cpu) = (step(device).unwrap(), step(Device::Cpu).unwrap());
            assert!(here.iter().zip(&cpu).all(|(a, b)| (a - b).abs() < 1e-5), "{here:?} {cpu:?}");
            let kept = caller.tensor(device);
            caller.release();
            assert_eq!(kept.add_scalar(1.0).unwrap().numel(), N);
            device.synchronize().unwrap();
        }
        // A context with several devices, and a queue that was created with profiling enabled.
        if let [_, second, ..] = ids[..] {
            let caller = Caller::new(&ids, second, queues::CL_QUEUE_PROFILING_ENABLE);
            let device = caller.adopt().unwrap();
            check_round_trip(&caller, device);
            let ((), profile) = profile(|| check_round_trip(&caller, device)).unwrap();
            let times =
                profile.events().iter().filter(|event| event.device == Some(device) && event.queued_us.is_some());
            assert!(times.count() > 0);
        }
    }
}

#[test]
fn invalid_handles_are_errors() {
    if !in_own_process("adopt::invalid_handles_are_errors") {
        return;
    }
    let error_message = |adopted: Result<Device>| match adopted {
        Err(Error::Invalid { op: "Device::adopt", reason }) => reason,
        other => panic!("{other:?}"),
    };
    for ids in platforms().into_iter().filter(|ids| !ids.is_empty()) {
        let before = devices();
        let caller = Caller::new(&ids[..1], ids[0], 0);
        let (context, device, queue, none) = (caller.context, caller.device, caller.queue, ptr::null_mut());
        // SAFETY: each handle is valid or null.
        let adopt = |context, device, queue| unsafe { Device::adopt(context, device, queue) };
        assert!(error_message(adopt(none, device, queue)).contains("the context is null"));
        assert!(error_message(adopt(context, none, queue)).contains("the device is null"));
        assert!(error_message(adopt(context, device, none)).contains("the queue is null"));
        let other = Caller::new(&ids[..1], ids[0], 0);
        assert!(error_message(adopt(context, device, other.queue)).contains("of another context"));
        if let Some(&second) = ids.get(1) {
            assert!(error_message(adopt(context, second, queue)).contains("does not have the device"));
            let both = Caller::new(&ids, ids[0], 0);
            assert!(error_message(adopt(both.context, second, both.queue)).contains("of another device"));
        }
        let unordered = Caller::new(&ids[..1], ids[0], queues::CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
        assert!(error_message(unordered.adopt()).contains("out of order"));
        assert_eq!(devices(), before);
    }
}
