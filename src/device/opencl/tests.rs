//! Tests of the runtime with real drivers, on every device. On a machine without OpenCL they test nothing.

mod recovery;
mod streams;

use std::sync::Barrier;

use super::*;
use crate::Error;
use crate::device::count_launches;

pub(super) fn devices() -> Vec<&'static ClDevice> {
    (0..count()).map(|i| open(i).unwrap()).collect()
}

pub(super) fn buffer(device: &ClDevice, bytes: &[u8]) -> ClBuffer {
    let buffer = device.create_buffer(bytes.len()).unwrap();
    device.commit(&buffer).unwrap();
    device.write(bytes, (&buffer, 0)).unwrap();
    buffer
}

pub(super) fn contents(device: &ClDevice, buffer: &ClBuffer) -> Vec<u8> {
    let mut bytes = vec![0xee; buffer.bytes()];
    device.read((buffer, 0), &mut bytes).unwrap();
    bytes
}

pub(super) fn pattern(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// The source of a kernel that computes `y[i] = a * x[i] + b` in ints.
pub(super) const AXB: &str = "__kernel void axb(__global const int* x, __global int* y, ulong n, int a, int b) {
    size_t i = get_global_id(0);
    if (i < n) y[i] = a * x[i] + b;
}";

pub(super) fn axb_kernel(device: &ClDevice) -> ClKernel {
    device.build("axb", AXB, "axb").unwrap()
}

pub(super) fn axb(
    device: &ClDevice,
    kernel: &ClKernel,
    x: &ClBuffer,
    y: &ClBuffer,
    a: i32,
    b: i32,
) -> crate::Result<()> {
    let n = (x.bytes() / 4) as u64;
    let args = [Arg::Buffer(x), Arg::Buffer(y), Arg::U64(n), Arg::U32(a as u32), Arg::U32(b as u32)];
    device.launch(kernel, &args, &[n as usize], &[64])
}

#[test]
fn an_index_opens_one_device() {
    for (i, device) in devices().into_iter().enumerate() {
        assert!(std::ptr::eq(device, open(i).unwrap()));
        assert_eq!(device.device(), crate::Device::OpenCL(i));
        assert!(device.info().compute_units > 0 && device.info().base_alignment.is_power_of_two());
        assert!(device.info().base_alignment <= 4096, "in bytes, not bits");
    }
    let Err(Error::NoDevice { reason, .. }) = open(count() + 3) else { panic!("no such device") };
    assert!(count() == 0 || reason.contains("opencl:0"), "{reason}");
}

#[test]
fn bytes_survive_a_round_trip() {
    for device in devices() {
        for n in [1, 3, 15, 16, 17, 4096, 1_000_003] {
            let bytes = pattern(n);
            let b = buffer(device, &bytes);
            assert_eq!(contents(device, &b), bytes);
            let mut middle = vec![0; n / 2];
            device.read((&b, n / 3), &mut middle).unwrap();
            assert_eq!(middle, bytes[n / 3..n / 3 + n / 2]);
            device.write(&[9], (&b, n - 1)).unwrap();
            assert_eq!(contents(device, &b)[n - 1], 9);
            device.write(&[], (&b, n)).unwrap();
            device.read((&b, n), &mut []).unwrap();
        }
    }
}

#[test]
fn copies_within_and_between_buffers() {
    for device in devices() {
        for n in [1, 64, 1000, 100_003] {
            let (a, b) = (buffer(device, &pattern(n)), buffer(device, &vec![1; n]));
            device.copy((&a, n / 4), (&b, n / 2), n / 2, true).unwrap();
            let mut expected = vec![1; n];
            expected[n / 2..n / 2 * 2].copy_from_slice(&pattern(n)[n / 4..n / 4 + n / 2]);
            assert_eq!(contents(device, &b), expected);
            // Overlapping ranges: up and down, by one byte, by many, by nothing, in few pieces and in many.
            for (src, dst) in [(0, 1), (1, 0), (0, n / 3), (n / 3, 0), (n / 2, n / 2), (0, n / 50), (n / 50, 0)] {
                let len = n - src.max(dst);
                let a = buffer(device, &pattern(n));
                let mut expected = pattern(n);
                expected.copy_within(src..src + len, dst);
                device.copy((&a, src), (&a, dst), len, false).unwrap();
                assert_eq!(contents(device, &a), expected, "{n} bytes: {len} from {src} to {dst}");
            }
        }
    }
}

#[test]
fn overlapping_copies_may_exceed_the_temporary_buffer() {
    let n = 40 << 20;
    for device in devices() {
        for (src, dst) in [(0, 5), (5, 0), (0, 17 << 20), (17 << 20, 0)] {
            let a = buffer(device, &pattern(n));
            let mut expected = pattern(n);
            let len = n - src.max(dst);
            expected.copy_within(src..src + len, dst);
            device.copy((&a, src), (&a, dst), len, false).unwrap();
            assert!(contents(device, &a) == expected, "from {src} to {dst}");
        }
    }
}

#[test]
fn fills_repeat_their_pattern() {
    for device in devices() {
        for width in [1, 2, 4, 8, 16] {
            for (off, bytes) in [(0, 4096), (16, 32), (width, width * 5), (3 * width, 0)] {
                let b = buffer(device, &pattern(4096));
                let p: Vec<u8> = (1..=width as u8).collect();
                device.fill((&b, off), bytes, &p).unwrap();
                let mut expected = pattern(4096);
                expected[off..off + bytes].chunks_exact_mut(width).for_each(|c| c.copy_from_slice(&p));
                assert_eq!(contents(device, &b), expected, "{width} bytes over {bytes} at {off}");
            }
        }
        let b = buffer(device, &pattern(33));
        device.fill((&b, 1), 31, &[0]).unwrap();
        assert_eq!(contents(device, &b)[1..32], [0; 31]);
        assert_ne!(contents(device, &b)[32], 0);
        assert!(device.fill((&b, 0), 6, &[1, 2, 3]).is_err());
        assert!(device.fill((&b, 2), 8, &[1, 2, 3, 4]).is_err());
    }
}

#[test]
fn ranges_beyond_a_buffer_are_refused() {
    for device in devices() {
        let (a, b) = (buffer(device, &[1; 8]), buffer(device, &[2; 4]));
        assert!(device.write(&[0; 5], (&b, 0)).is_err());
        assert!(device.read((&b, 4), &mut [0]).is_err());
        assert!(device.read((&b, usize::MAX), &mut [0]).is_err());
        assert!(device.copy((&a, 0), (&b, 0), 8, true).is_err());
        assert!(device.copy((&a, 5), (&b, 0), 4, true).is_err());
        assert!(device.fill((&b, 1), 4, &[0]).is_err());
        assert_eq!(contents(device, &b), [2; 4]);
    }
}

#[test]
fn launches_compute_and_are_counted() {
    for device in devices() {
        let kernel = axb_kernel(device);
        assert_eq!((kernel.name(), kernel.arg_count()), ("axb", 5));
        for n in [1usize, 63, 64, 65, 10_007] {
            let ints: Vec<i32> = (0..n as i32).collect();
            let (x, y) = (buffer(device, bytemuck::cast_slice(&ints)), buffer(device, &vec![0; n * 4]));
            let (_, launches) = count_launches(|| axb(device, &kernel, &x, &y, 3, -1).unwrap());
            assert_eq!(launches, 1);
            let expected: Vec<i32> = ints.iter().map(|i| 3 * i - 1).collect();
            assert_eq!(contents(device, &y), bytemuck::cast_slice::<i32, u8>(&expected));
        }
        let x = buffer(device, &[0; 4]);
        let five = [Arg::Buffer(&x), Arg::Buffer(&x), Arg::U64(1), Arg::U32(0), Arg::U32(0)];
        let empty = count_launches(|| device.launch(&kernel, &five, &[0], &[64]).unwrap());
        assert_eq!(empty.1, 0, "nothing to do, nothing launched");
        assert!(device.launch(&kernel, &five[..4], &[1], &[1]).is_err(), "an argument is missing");
        assert!(device.launch(&kernel, &five, &[1, 1], &[1]).is_err());
        assert!(device.launch(&kernel, &five, &[1], &[0]).is_err());
        assert!(device.launch(&kernel, &five, &[usize::MAX], &[64]).is_err());
        assert!(device.launch(&kernel, &five, &[1], &[kernel.max_work_group() + 1]).is_err());
    }
}

#[test]
fn every_kind_of_argument_arrives() {
    const SOURCE: &str = "typedef struct { long a; int b; float c; } S;
    __kernel void kinds(__global long* out, uint u, long l, ulong ul, float f, S s) {
        if (get_global_id(0) != 0 || get_global_id(1) != 0) return;
        long v[8] = { u, l, (long)ul, (long)(f * 4), s.a, s.b, (long)(s.c * 4), get_global_size(1) };
        for (int k = 0; k < 8; ++k) out[k] = v[k];
    }";
    for device in devices() {
        let kernel = device.build("kinds", SOURCE, "kinds").unwrap();
        let out = buffer(device, &[0; 64]);
        let mut s = Vec::new();
        s.extend((-9i64).to_ne_bytes());
        s.extend(77i32.to_ne_bytes());
        s.extend(2.25f32.to_ne_bytes());
        let args = [
            Arg::Buffer(&out),
            Arg::U32(u32::MAX),
            Arg::I64(i64::MIN),
            Arg::U64(1 << 63),
            Arg::F32(-1.5),
            Arg::Bytes(&s),
        ];
        device.launch(&kernel, &args, &[5, 3], &[8, 1]).unwrap();
        let mut got = [0i64; 8];
        device.read((&out, 0), bytemuck::cast_slice_mut(&mut got)).unwrap();
        assert_eq!(got, [u32::MAX.into(), i64::MIN, i64::MIN, -6, -9, 77, 9, 3]);
    }
}

#[test]
fn changed_number_arguments_are_set_again() {
    for device in devices() {
        let kernel = axb_kernel(device);
        assert!(!kernel.has_number(3, 0), "nothing is set");
        let (x, y) = (buffer(device, &7i32.to_ne_bytes()), buffer(device, &[0; 4]));
        for (a, b) in [(0, 0), (2, 0), (2, 0), (2, 5), (-1, 5), (-1, -1), (-1, -1), (3, -1), (2, 0)] {
            axb(device, &kernel, &x, &y, a, b).unwrap();
            assert_eq!(contents(device, &y), (7 * a + b).to_ne_bytes(), "{a} * 7 + {b}");
            assert!(kernel.has_number(2, 1) && kernel.has_number(3, u64::from(a as u32)));
        }
        // A number with the bits of u64::MAX equals the marker of an unknown number, so it must be set at every launch.
        for n in [1, u64::MAX, 1] {
            let args = [Arg::Buffer(&x), Arg::Buffer(&y), Arg::U64(n), Arg::U32(1), Arg::U32(1)];
            device.launch(&kernel, &args, &[1], &[1]).unwrap();
            assert_eq!((contents(device, &y), kernel.has_number(2, u64::MAX)), (8i32.to_ne_bytes().to_vec(), false));
        }
    }
}

#[test]
fn double_arguments_arrive() {
    const SOURCE: &str = "
    #ifdef HAS_F64
    #pragma OPENCL EXTENSION cl_khr_fp64 : enable
    __kernel void square(__global double* out, double x) { out[0] = x * x; }
    #endif";
    for device in devices().into_iter().filter(|d| d.info().fp64) {
        let kernel = device.build("square", SOURCE, "square").unwrap();
        let out = buffer(device, &[0; 8]);
        device.launch(&kernel, &[Arg::Buffer(&out), Arg::F64(1.1)], &[1], &[1]).unwrap();
        assert_eq!(contents(device, &out), (1.1f64 * 1.1).to_ne_bytes());
    }
}

/// More launches than a queue may hold must run in order: each uses the result of the launch before.
#[test]
fn long_queues_stay_in_order() {
    for device in devices() {
        let kernel = axb_kernel(device);
        let x = buffer(device, bytemuck::cast_slice(&[0i32; 64]));
        for _ in 0..2500 {
            axb(device, &kernel, &x, &x, 1, 1).unwrap();
        }
        assert_eq!(contents(device, &x), bytemuck::cast_slice::<i32, u8>(&[2500; 64]));
    }
}

#[test]
fn eight_threads_share_a_device() {
    for device in devices() {
        let shared = axb_kernel(device);
        let start = Barrier::new(8);
        std::thread::scope(|scope| {
            for t in 0..8i32 {
                let (shared, start) = (&shared, &start);
                scope.spawn(move || {
                    start.wait();
                    for round in 0..25 {
                        let n = 1 + (t * 131 + round * 17) as usize % 3000;
                        let ints: Vec<i32> = (0..n as i32).map(|i| i ^ t).collect();
                        let (x, y) = (buffer(device, bytemuck::cast_slice(&ints)), buffer(device, &vec![0; n * 4]));
                        // All threads use the same kernel object: arguments must not mix.
                        axb(device, shared, &x, &y, t, round).unwrap();
                        let z = device.create_buffer(n * 4).unwrap();
                        device.copy((&y, 0), (&z, 0), n * 4, round % 2 == 0).unwrap();
                        let expected: Vec<i32> = ints.iter().map(|i| t * i + round).collect();
                        assert_eq!(contents(device, &z), bytemuck::cast_slice::<i32, u8>(&expected));
                    }
                });
            }
        });
    }
}

#[test]
fn a_build_failure_carries_the_log() {
    for device in devices() {
        let source = "__kernel void broken(__global int* x) { x[0] = no_such_name; }";
        let Err(error) = device.build("broken", source, "broken") else { panic!("it builds") };
        let Error::Build { kernel, log, .. } = &error else { panic!("{error}") };
        assert_eq!(kernel, "broken");
        assert!(log.contains("no_such_name"), "{log}");
        assert!(matches!(device.build("axb", AXB, "other"), Err(Error::Build { .. })), "no such entry");
        assert!(matches!(device.build("axb", "a\0b", "axb"), Err(Error::Invalid { .. })));
        device.build("axb", AXB, "axb").expect("the device is none the worse");
    }
}

pub(super) const FAULTY: &str =
    "__kernel void check(__global const int* x, int n, int code, volatile __global int* fault) {
    int i = x[get_global_id(0)];
    if ((i < 0 || i >= n) && atomic_cmpxchg(fault, 0, code) == 0) {
        fault[1] = i; fault[2] = i < 0 ? -1 : 0; fault[3] = n;
    }
}";

#[test]
fn faults_are_reported_once_to_their_thread() {
    for device in devices() {
        let kernel = device.build("check", FAULTY, "check").unwrap();
        let check = |index: i32, code: Fault| {
            let x = buffer(device, &index.to_ne_bytes());
            let args = [Arg::Buffer(&x), Arg::U32(10), Arg::U32(code as u32), device.faults()];
            device.launch(&kernel, &args, &[1], &[1]).unwrap();
            x
        };
        let x = check(9, Fault::Index);
        assert_eq!(contents(device, &x), 9i32.to_ne_bytes());
        let x = check(-2, Fault::Index);
        let error = device.read((&x, 0), &mut [0; 4]).unwrap_err();
        assert!(matches!(error, Error::IndexOutOfRange { index: -2, size: 10, .. }), "{error}");
        device.read((&x, 0), &mut [0; 4]).expect("told once");

        check(10, Fault::DivisionByZero);
        // Another thread's read must not report the fault.
        std::thread::scope(|s| _ = s.spawn(|| contents(device, &x)));
        assert!(matches!(device.finish(), Err(Error::DivisionByZero { .. })));
        device.finish().unwrap();

        check(11, Fault::Label);
        let y = buffer(device, &[0; 4]);
        let error = device.copy((&x, 0), (&y, 0), 4, true).unwrap_err();
        assert!(matches!(error, Error::IndexOutOfRange { op: "cross_entropy", index: 11, .. }));
        device.copy((&x, 0), (&y, 0), 4, true).unwrap();
    }
}

#[test]
fn a_fault_of_an_ended_thread_is_reported() {
    for i in 0..count() {
        // Opens the device again, because a wait on any thread may report the fault of a shared device.
        let device = &ClDevice::open(i, discovery::description(i).unwrap()).unwrap();
        let kernel = device.build("check", FAULTY, "check").unwrap();
        let x = buffer(device, &99i32.to_ne_bytes());
        let launch = || {
            let args = [Arg::Buffer(&x), Arg::U32(10), Arg::U32(Fault::Index as u32), device.faults()];
            device.launch(&kernel, &args, &[1], &[1]).unwrap();
        };
        // Two threads at the same time must have different fault words.
        let both = std::sync::Barrier::new(2);
        let launch_at_once = || {
            launch();
            both.wait();
        };
        // Joined explicitly, because a scope does not wait until threads have returned their slots.
        std::thread::scope(|s| [s.spawn(launch_at_once), s.spawn(launch_at_once)].map(|t| t.join().unwrap()));
        assert_eq!(contents(device, &x), 99i32.to_ne_bytes(), "a read is not disturbed");
        for _ in 0..2 {
            assert!(matches!(device.finish(), Err(Error::IndexOutOfRange { index: 99, .. })), "each is told once");
        }
        device.finish().unwrap();
    }
}

#[test]
fn impossible_sizes_fail_and_leave_other_buffers_intact() {
    for device in devices() {
        let b = buffer(device, &pattern(100));
        // Drivers that allocate lazily create buffers of a size that they can never commit.
        let error = device.create_buffer(1 << 60).and_then(|b| device.commit(&b)).unwrap_err();
        assert!(matches!(error.classify(), Class::TooBig | Class::OutOfMemory), "{}", error.name());
        assert!(matches!(device.error(error), Error::OpenCl { .. }));
        assert_eq!(contents(device, &b), pattern(100));
        assert!(!device.is_lost());
    }
}

/// Opens the device again, so that no other test uses the lost device.
#[test]
fn a_lost_device_stays_lost() {
    let Ok(found) = discovery::description(0) else { return };
    let device = ClDevice::open(0, found).unwrap();
    let kernel = axb_kernel(&device);
    let b = buffer(&device, &[1; 8]);
    assert_eq!(device.detect_loss(ClError::new("clFinish", -5)).classify(), Class::OutOfMemory, "it still answers");
    assert!(!device.is_lost());
    assert_eq!(device.detect_loss(ClError::new("clFinish", -9999)).classify(), Class::Lost);
    assert!(device.is_lost());
    let lost = |e: Error| {
        assert!(matches!(e, Error::DeviceLost { .. }), "{e}");
        assert!(e.to_string().contains("clFinish") && e.to_string().contains("-9999"), "{e}");
    };
    lost(device.finish().unwrap_err());
    lost(device.read((&b, 0), &mut [0; 8]).unwrap_err());
    lost(device.write(&[0; 8], (&b, 0)).unwrap_err());
    lost(device.fill((&b, 0), 8, &[0]).unwrap_err());
    lost(device.copy((&b, 0), (&b, 4), 4, true).unwrap_err());
    lost(axb(&device, &kernel, &b, &b, 1, 1).unwrap_err());
    lost(device.build("axb", AXB, "axb").unwrap_err());
    assert_eq!(device.create_buffer(8).unwrap_err().classify(), Class::Lost);
    assert_eq!(device.commit(&b).unwrap_err().classify(), Class::Lost);
    lost(device.error(device.commit(&b).unwrap_err()));
    drop((b, kernel));
}
