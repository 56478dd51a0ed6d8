//! Tests on every OpenCL device, including devices whose transfers are not normally staged.

use super::transfer::chunks_of;
use super::*;
use crate::storage::{PinnedStats, Storage};
use crate::{Error, Tensor};

fn devices() -> Vec<&'static ClDevice> {
    (0..opencl::count()).map(|i| opencl::open(i).unwrap()).collect()
}

/// Makes a separate pool, so that its counts belong to one test.
fn new_pool(device: &'static ClDevice, cap: usize) -> &'static DevicePinnedPool {
    Box::leak(Box::new(PinnedPool::new(PinnedDevice(device), 0, Budget::new(cap))))
}

/// The number of slices in the tested rings.
const RING: usize = 6;

/// Makes a transfer through slices of `slice` bytes, of which threads copy a third at a time.
fn ring(pool: &'static DevicePinnedPool, device: &'static ClDevice, slice: usize, total: usize) -> Ring {
    let sizes = StagingSizes { block: slice, slice, slices: RING, piece: slice.div_ceil(3) };
    Ring::new(pool, device, sizes, total).expect("there is pinned memory")
}

fn pattern(n: usize, seed: usize) -> Vec<u8> {
    (0..n).map(|i| (i.wrapping_mul(31) ^ (i >> 8).wrapping_mul(17) ^ seed) as u8).collect()
}

fn storage_with(device: Device, data: &[u8]) -> Storage {
    let s = Storage::alloc(device, data.len()).unwrap();
    let location = s.cl().unwrap();
    location.device.write(data, location.at(0)).unwrap();
    drop(location);
    s
}

/// Staged transfers give the same bytes as plain transfers, for every length around the slices' boundaries and the ring's end, at
/// odd offsets.
#[test]
fn staged_and_plain_transfers_agree() {
    const SLICE: usize = 4096;
    for device in devices() {
        let pool = new_pool(device, 1 << 20);
        for chunks in 0..=2 * RING {
            for (more, off) in [(1, 0), (SLICE - 1, 1), (SLICE, 511), (SLICE / 2 + 3, 4097)] {
                let n = chunks * SLICE + more;
                let whole = pattern(n + off + 5, chunks);
                let storage = storage_with(device.device(), &whole);
                let location = storage.cl().unwrap();
                let mut read = vec![0xee; n];
                ring(pool, device, SLICE, n).read(location.at(off), &mut read).unwrap();
                assert_eq!(read, whole[off..off + n], "{n} bytes at {off} read");

                let fresh = pattern(n, !chunks);
                ring(pool, device, SLICE, n).write(&fresh, location.at(off)).unwrap();
                let mut after = vec![0; whole.len()];
                device.read(location.at(0), &mut after).unwrap();
                assert_eq!(after[..off], whole[..off], "before the {n} bytes at {off}");
                assert_eq!(after[off..off + n], fresh, "{n} bytes at {off} written");
                assert_eq!(after[off + n..], whole[off + n..], "behind the {n} bytes at {off}");
            }
        }
        let stats = pool.stats();
        assert_eq!((stats.num_host_alloc, stats.active_requests.current), (RING as u64, 0), "made once, and reused");
        assert_eq!(stats.allocated_bytes.current, (RING * SLICE) as u64);
        pool.empty_cache();
        assert_eq!((pool.stats().allocations.current, pool.stats().num_host_free), (0, RING as u64));
    }
}

#[test]
fn chunks_cover_a_transfer_and_are_small_at_both_ends() {
    for (total, slice) in
        [(0, 8), (1, 8), (2, 8), (7, 8), (8, 8), (9, 8), (100, 8), (1 << 20, 4096), (64 << 20, 2usize << 20)]
    {
        let chunks = chunks_of(total, slice);
        let mut end = 0;
        for chunk in &chunks {
            assert_eq!((chunk.start, chunk.is_empty()), (end, false));
            assert!(chunk.len() <= slice);
            end = chunk.end;
        }
        assert_eq!(end, total);
        let ends = [chunks.first(), chunks.last()].into_iter().flatten();
        assert!(ends.into_iter().all(|chunk| chunk.len() <= slice.div_ceil(4)), "{total} in {slice}: {chunks:?}");
    }
}

#[test]
fn large_slices_are_copied_by_many_threads() {
    for device in devices() {
        let pool = new_pool(device, 16 << 20);
        let (slice, n) = ((1 << 20) + 512, (9 << 20) + 77);
        let data = pattern(n, 9);
        let storage = Storage::alloc(device.device(), n).unwrap();
        let location = storage.cl().unwrap();
        ring(pool, device, slice, n).write(&data, location.at(0)).unwrap();
        let mut read = vec![0; n];
        ring(pool, device, slice, n).read(location.at(0), &mut read).unwrap();
        assert!(read == data);
    }
}

#[test]
fn threads_share_a_pool() {
    for device in devices() {
        let pool = new_pool(device, 1 << 20);
        std::thread::scope(|scope| {
            for thread in 0..6 {
                scope.spawn(move || {
                    for round in 0..8 {
                        let n = 10_000 * thread + 777 * round + 1;
                        let data = pattern(n, thread ^ round);
                        let storage = Storage::alloc(device.device(), n).unwrap();
                        let location = storage.cl().unwrap();
                        ring(pool, device, 8192, n).write(&data, location.at(0)).unwrap();
                        let mut read = vec![0; n];
                        ring(pool, device, 8192, n).read(location.at(0), &mut read).unwrap();
                        assert_eq!(read, data, "thread {thread}, round {round}");
                    }
                });
            }
        });
        assert_eq!(pool.stats().active_requests.current, 0);
    }
}

#[test]
fn faults_are_reported_by_a_staged_read() {
    for device in devices() {
        let pool = new_pool(device, 1 << 20);
        let ones = Tensor::ones(&[3000], (crate::DType::I32, device.device())).unwrap();
        let zeros = ones.sub(&ones).unwrap();
        let quotient = ones.div_trunc(&zeros).unwrap();
        let read = |tensor: &Tensor| {
            let location = tensor.storage().cl().unwrap();
            let mut bytes = vec![0; 12_000];
            ring(pool, device, 4096, 12_000).read(location.at(0), &mut bytes).map(|()| bytes)
        };
        let error = read(&quotient).unwrap_err();
        assert!(matches!(error, Error::DivisionByZero { .. }), "{error}");
        assert_eq!(read(&ones).unwrap(), [1, 0, 0, 0].repeat(3000), "it is told once");
    }
}

#[test]
fn a_range_beyond_the_buffer_is_an_error_and_returns_the_slices() {
    for device in devices() {
        let pool = new_pool(device, 1 << 20);
        let buffer = device.create_buffer(20_000).unwrap();
        let mut bytes = vec![0; 20_000];
        let error = ring(pool, device, 4096, 20_000).read((&buffer, 1), &mut bytes).unwrap_err();
        assert!(matches!(error, Error::Invalid { op: "read", .. }), "{error}");
        let error = ring(pool, device, 4096, 20_000).write(&bytes, (&buffer, 1)).unwrap_err();
        assert!(matches!(error, Error::Invalid { op: "write", .. }), "{error}");
        device.finish().unwrap();
        assert!(!pool.free_finished(), "their transfers are done");
        assert_eq!(pool.stats().active_bytes.current, 0);
    }
}

#[test]
fn without_pinned_memory_transfers_are_not_staged() {
    for device in devices() {
        let ring = |cap: usize, total: usize| {
            Ring::new(
                new_pool(device, cap),
                device,
                StagingSizes { block: 4096, slice: 4096, slices: RING, piece: 4096 },
                total,
            )
        };
        assert!(ring(4096, 8192).is_none(), "one slice is no ring");
        assert!(ring(4096, 4000).is_some(), "unless one is enough");
        assert!(ring(0, 4000).is_none());
        let info = device.info();
        let staged = !info.unified_memory && info.kind != DeviceKind::Cpu;
        for (bytes, large) in [(MIN_STAGED_BYTES - 1, false), (MIN_STAGED_BYTES, true), (1 << 30, true)] {
            assert_eq!(is_staged(device, bytes), staged && large);
        }
    }
}

#[test]
fn pinned_bytes_belong_to_a_transfer_until_it_is_over() {
    for opened in devices() {
        let (pool, device) = (new_pool(opened, 1 << 20), opened.device());
        let pinned = PinnedBytes::new(pool, opened, 10_000).unwrap();
        let start = pinned.start().as_ptr();
        assert!(pinned.is_for(device) && !pinned.is_for(Device::OpenCL(opencl::count())));
        let refused = || [false, true].map(|written| pinned.wait_and_check(written).is_err());
        for (written, kept) in [(false, [false, true]), (true, [true, true])] {
            let lent = || pinned.lend(opened, start, 10_000, written).unwrap();
            let (first, mut second) = (lent(), lent());
            assert_eq!((second.range(), refused()), ((start, 10_000), kept));
            drop(first);
            assert_eq!(refused(), kept);
            drop(second);
            assert_eq!(refused(), [false, false]);
        }
        mem::forget(pinned.lend(opened, start.wrapping_add(9_999), 1, true).unwrap());
        let error = pinned.wait_and_check(false).unwrap_err();
        assert!(matches!(error, Error::DeviceLost { device: of, .. } if of == device), "{error}");
        assert_eq!(pool.stats().active_requests.current, 1);
        drop(pinned);
        assert_eq!(pool.stats().active_requests.current, 0);
        assert!(PinnedBytes::new(pool, opened, 2 << 20).is_none(), "more than there may be");
    }
}

/// Small transfers, which use slices of half their size, reuse the blocks of large transfers. Sizes on both sides of the limits of
/// halving are tested.
#[test]
fn small_transfers_use_the_blocks_of_large_ones() {
    for device in devices() {
        let pool = new_pool(device, 32 << 20);
        for total in [
            1,
            2,
            3,
            MIN_STAGED_BYTES - 1,
            MIN_STAGED_BYTES + 13,
            2 * MIN_STAGED_BYTES + 1,
            SMALL_TRANSFER_BYTES - 1,
            SMALL_TRANSFER_BYTES,
            SMALL_TRANSFER_BYTES + 1,
        ] {
            let data = pattern(total, 9);
            let s = storage_with(device.device(), &vec![7; total + 2]);
            let location = s.cl().unwrap();
            for sizes in [UPLOAD_SIZES.for_transfer(total), DOWNLOAD_SIZES.for_transfer(total)] {
                assert!(sizes.slice <= sizes.block && sizes.piece <= sizes.block, "{sizes:?}");
            }
            let up = Ring::new(pool, device, UPLOAD_SIZES.for_transfer(total), total).unwrap();
            up.write(&data, location.at(1)).unwrap();
            let mut got = vec![0; total];
            let down = Ring::new(pool, device, DOWNLOAD_SIZES.for_transfer(total), total).unwrap();
            down.read(location.at(1), &mut got).unwrap();
            assert!(got == data, "{total} bytes on {}", device.device());
        }
    }
}

#[test]
fn tensors_in_pinned_memory_hold_their_values() {
    let x = Tensor::from_vec((0..3_000_000).collect::<Vec<i32>>(), &[1000, 3000], Device::Cpu).unwrap();
    let odd = x.t().unwrap().narrow(0, 1, 2999).unwrap(); // a view with strides and an offset
    let want = odd.to_vec::<i32>().unwrap();
    for opened in devices() {
        let device = opened.device();
        let pinned = odd.pin_memory(device).unwrap();
        assert_eq!((pinned.device(), pinned.is_pinned(device)), (Device::Cpu, true));
        assert!(!pinned.is_pinned(Device::Cpu) && !x.is_pinned(device));
        let there = pinned.to_device(device).unwrap();
        assert!(there.to_vec::<i32>().unwrap() == want);
        let twice = there.add(&there).unwrap();
        pinned.copy_(&twice).unwrap();
        assert!(pinned.to_vec::<i32>().unwrap().iter().zip(&want).all(|(twice, once)| *twice == 2 * once));
        let empty = x.narrow(0, 0, 0).unwrap().pin_memory(device).unwrap();
        assert_eq!((empty.numel(), empty.is_pinned(device)), (0, false));
    }
    assert_eq!(x.pin_memory(Device::Cpu).unwrap().to_vec::<i32>().unwrap(), x.to_vec::<i32>().unwrap());
    assert!(matches!(x.pin_memory(Device::OpenCL(opencl::count())), Err(Error::NoDevice { .. })));
}

#[test]
fn devices_without_pinned_memory_report_zero_statistics() {
    assert_eq!(Device::Cpu.pinned_memory_stats().unwrap(), PinnedStats::default());
    let nowhere = Device::OpenCL(opencl::count() + 3);
    assert!(matches!(nowhere.pinned_memory_stats(), Err(Error::NoDevice { .. })));
    assert!(matches!(nowhere.empty_pinned_cache(), Err(Error::NoDevice { .. })));
    for device in devices() {
        let device = device.device();
        device.empty_pinned_cache().unwrap();
        device.reset_peak_pinned_memory_stats().unwrap();
        device.reset_accumulated_pinned_memory_stats().unwrap();
        let shown = device.pinned_memory_stats().unwrap().to_string();
        assert!(shown.contains("active bytes") && shown.contains("made in"), "{shown}");
    }
}

/// Tests large copies within one segment and between segments, at odd offsets, and overlapping ranges, which take
/// another code path.
#[test]
fn blocking_copies_are_complete_and_touch_nothing_else() {
    for device in devices() {
        let n = MIN_MAPPED_BYTES + 4099;
        let data = pattern(2 * n, 5);
        let (here, there) = (storage_with(device.device(), &data), storage_with(device.device(), &vec![7; n]));
        for (from, to, bytes) in
            [(0, 3, MIN_MAPPED_BYTES - 1), (1, 0, n), (n, 1, n - 1), (n - 5, 4098, MIN_MAPPED_BYTES)]
        {
            there.fill(0, n, &[7]).unwrap();
            there.copy_from(to, &here, from, bytes, true).unwrap();
            let mut got = vec![0; n];
            there.read(0, &mut got).unwrap();
            assert!(got[to..][..bytes] == data[from..][..bytes], "{bytes} bytes from {from} to {to}");
            assert!(got[..to].iter().chain(&got[to + bytes..]).all(|&b| b == 7), "nothing else is written");
        }
        let mut want = data.clone();
        for (from, to, bytes) in
            [(n, 0, n), (9, n, MIN_MAPPED_BYTES), (100, 0, MIN_MAPPED_BYTES + 1), (0, 4096, MIN_MAPPED_BYTES)]
        {
            here.copy_from(to, &here, from, bytes, true).unwrap();
            want.copy_within(from..from + bytes, to);
            let mut got = vec![0; 2 * n];
            here.read(0, &mut got).unwrap();
            assert!(got == want, "{bytes} bytes from {from} to {to} of the same");
        }
        assert!(there.copy_from(1, &here, 0, n, true).is_err(), "beyond the end");
    }
}
