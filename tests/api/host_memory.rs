//! Tensors over memory that user code owns, on the CPU and on OpenCL devices with unified memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use claystone::device::ReplayMode;
use claystone::{Device, Error, Graph, Stream, Tensor, storage, with_stream};

use crate::common::{devices, in_own_process, vec};

/// Owns numbers that start at a page boundary, as drivers require for use without a copy, or some elements after a boundary.
/// Increments `dropped` when dropped.
struct Lent {
    values: Vec<f32>,
    from: usize,
    n: usize,
    dropped: Arc<AtomicUsize>,
}

impl Lent {
    fn new(n: usize, behind: usize) -> (Lent, Arc<AtomicUsize>, *const f32) {
        let mut values = vec![-1.0; n + behind + 1024];
        let from = (4096 - values.as_ptr().addr() % 4096) / 4 % 1024 + behind;
        values[from..from + n].iter_mut().enumerate().for_each(|(i, v)| *v = i as f32);
        let (dropped, place) = (Arc::new(AtomicUsize::new(0)), &raw const values[from]);
        (Lent { values, from, n, dropped: dropped.clone() }, dropped, place)
    }
}

impl AsMut<[f32]> for Lent {
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.values[self.from..self.from + self.n]
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let outside = self.values[..self.from].iter().chain(&self.values[self.from + self.n..]);
        assert!(outside.into_iter().all(|&v| v == -1.0), "nothing was written beside the elements");
        self.dropped.fetch_add(1, SeqCst);
    }
}

fn in_place(device: Device) -> bool {
    device == Device::Cpu || device.info().unwrap().unified_memory
}

#[test]
fn host_memory_is_used_in_place_and_kept_alive() {
    if !in_own_process("host_memory::host_memory_is_used_in_place_and_kept_alive") {
        return; // other tests would change the allocator's statistics
    }
    for device in devices() {
        let (lent, dropped, _) = Lent::new(4096, 0);
        let counted = || storage::allocator(device).unwrap().stats().allocated_bytes.current;
        let before = counted();
        let x = Tensor::from_host_memory(lent, [64, 64], device).unwrap();
        assert!(!in_place(device) || counted() == before, "allocators do not count it");
        assert_eq!((x.device(), vec(&x)), (device, (0..4096).map(|i| i as f32).collect()));
        // Kernels, views, fills and copies work as on any other tensor.
        x.t().unwrap().narrow(0, 1, 2).unwrap().mul_scalar_(-1).unwrap();
        x.narrow(0, 0, 1).unwrap().zero_().unwrap();
        let sum = x.sum(1, false).unwrap().add(&x.i((.., 0)).unwrap()).unwrap();
        let view = x.i((5, ..)).unwrap();
        drop(x);
        assert_eq!(dropped.load(SeqCst), usize::from(!in_place(device)), "a view is left on {device}");
        assert_eq!(vec(&view)[..4], [320.0, -321.0, -322.0, 323.0]);
        drop(view);
        assert_eq!(dropped.load(SeqCst), 1, "once, on {device}");
        assert_eq!(vec(&sum)[..2], [0.0, 64.0 + (64..128).sum::<i32>() as f32 - 2.0 * 131.0]);

        // `into_host` gives access to the memory without a copy.
        let (lent, dropped, place) = Lent::new(4096, 0);
        let x = Tensor::from_host_memory(lent, 4096, device).unwrap();
        x.add_scalar_(1).unwrap();
        let mut host = x.into_host::<f32>().unwrap();
        assert_eq!((host[0], host[4095]), (1.0, 4096.0));
        assert!(!in_place(device) || host.as_ptr() == place, "{device}");
        host[7] = 100.0;
        if !in_place(device) {
            continue;
        }
        let x = host.into_tensor();
        assert_eq!(x.device(), device);
        assert_eq!(vec(&x.mul_scalar(2).unwrap())[6..8], [14.0, 200.0]);
        let host = x.into_host::<f32>().unwrap();
        assert_eq!((host[7], dropped.load(SeqCst)), (100.0, 0));
        drop(host); // the memory is still mapped by the device
        assert_eq!(dropped.load(SeqCst), 1);
    }
}

#[test]
fn unsuitable_memory_is_copied() {
    for device in devices() {
        for (n, behind) in [(4096, 1), (4095, 0), (1, 0), (0, 0), (6, 2), (1024, 4)] {
            let (lent, dropped, place) = Lent::new(n, behind);
            let x = Tensor::from_host_memory(lent, n, device).unwrap();
            let kept = n > 0 && in_place(device) && (device == Device::Cpu || (n % 4, behind % 4) == (0, 0));
            assert_eq!(dropped.load(SeqCst), usize::from(!kept), "{n} at {behind} on {device}");
            x.add_scalar_(1).unwrap();
            let want: Vec<f32> = (1..=n).map(|i| i as f32).collect();
            assert_eq!(vec(&x), want);
            let host = x.into_host::<f32>().unwrap();
            assert_eq!((&host[..], kept), (&want[..], kept && host.as_ptr() == place));
            drop(host);
            assert_eq!(dropped.load(SeqCst), 1);
        }
    }
    // Vectors, boxed slices and arrays of any dtype are accepted. If the number of elements is wrong, the call fails and drops the
    // owner.
    for device in devices() {
        let x = Tensor::from_host_memory(vec![true, false, true], 3, device).unwrap();
        assert_eq!(x.to_vec::<bool>().unwrap(), [true, false, true]);
        let boxed: Box<[i64]> = (0..32).collect();
        let x = Tensor::from_host_memory(boxed, [4, 8], device).unwrap();
        assert_eq!(x.t().unwrap().to_vec::<i64>().unwrap()[..5], [0, 8, 16, 24, 1]);
        let x = Tensor::from_host_memory([1.5f64; 6], [2, 3], device).unwrap(); // an array, which contains the elements itself
        assert_eq!(x.to_vec::<f64>().unwrap(), [1.5; 6]);
        let (lent, dropped, _) = Lent::new(8, 0);
        let error = Tensor::from_host_memory(lent, 9, device).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains("8 values"), "{error}");
        assert_eq!(dropped.load(SeqCst), 1);
    }
}

#[test]
fn pending_commands_finish_before_the_memory_is_freed() {
    for device in devices().into_iter().filter(|&device| device != Device::Cpu) {
        let (lent, dropped, _) = Lent::new(1 << 20, 0);
        let x = Tensor::from_host_memory(lent, 1 << 20, device).unwrap();
        let side = Stream::new(device).unwrap();
        side.wait_stream(&Stream::current(device).unwrap()).unwrap();
        let sums = with_stream(&side, || {
            (0..20).try_for_each(|_| x.add_scalar_(1).map(drop))?;
            x.sum((), false)
        });
        drop(x); // the side stream may still be using the memory
        assert_eq!(dropped.load(SeqCst), 1);
        let want = (0..1u64 << 20).map(|i| i as f64 + 20.0).sum::<f64>();
        let got = f64::from(with_stream(&side, || sums.unwrap().item::<f32>()).unwrap());
        assert!((got - want).abs() < want * 1e-5, "{got}, {want} on {device}");
    }
}

#[test]
fn graphs_keep_host_memory_and_errors_unmap_it() {
    for device in devices().into_iter().filter(|&device| device != Device::Cpu) {
        for mode in [ReplayMode::Host, ReplayMode::CommandBuffer] {
            let (lent, dropped, _) = Lent::new(1024, 0);
            let x = Tensor::from_host_memory(lent, 1024, device).unwrap();
            let (mut graph, y) = Graph::capture(device, || x.add_scalar_(1)?.mul_scalar(2)).unwrap();
            let _ = graph.set_replay_mode(mode); // this fails if the device does not support the mode
            drop(x);
            assert_eq!(dropped.load(SeqCst), usize::from(!in_place(device)));
            (0..3).for_each(|_| graph.replay().unwrap());
            assert_eq!(vec(&y)[..2], [6.0, 8.0], "{mode} on {device}");
            drop((graph, y));
            assert_eq!(dropped.load(SeqCst), 1);
        }
        let (lent, _, _) = Lent::new(1024, 0);
        let x = Tensor::from_host_memory(lent, 1024, device).unwrap();
        let inside = Graph::capture(device, || x.shallow_clone().into_host::<f32>().map(drop)).unwrap_err();
        assert!(matches!(inside, Error::Invalid { .. }), "{inside}");
        // The next wait reports kernel errors, also if `into_host` waits in order to map the memory. The memory is unmapped after
        // the error.
        let labels = Tensor::from_slice(&[9i64], 1, device).unwrap();
        let _loss = x.narrow(0, 0, 4).unwrap().reshape([1, 4]).unwrap().cross_entropy(&labels).unwrap();
        let keep = x.shallow_clone();
        assert!(matches!(x.into_host::<f32>(), Err(Error::IndexOutOfRange { index: 9, .. })), "on {device}");
        assert_eq!(vec(&keep)[..3], [0.0, 1.0, 2.0]);
        let _loss = keep.narrow(0, 0, 4).unwrap().reshape([1, 4]).unwrap().cross_entropy(&labels).unwrap();
        assert!(matches!(keep.into_host::<f32>(), Err(Error::IndexOutOfRange { .. })), "alone, so mapped");
        assert_eq!(vec(&Tensor::ones(4, device).unwrap()), [1.0; 4], "the device goes on");
    }
}
