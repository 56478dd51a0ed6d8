//! Tests of storages as a whole, on every device.

use std::sync::Barrier;
use std::thread;

use super::*;
use crate::{Device, Error};

/// Sizes around the edges of blocks, pools and transfers.
const SIZES: [usize; 9] = [1, 3, 511, 512, 513, 4099, (1 << 20) - 1, (1 << 20) + 1, (16 << 20) + 5];

fn bytes(n: usize, seed: usize) -> Vec<u8> {
    (0..n).map(|i| (i.wrapping_mul(31) ^ (i >> 8).wrapping_mul(17) ^ seed) as u8).collect()
}

fn contents(s: &Storage) -> Vec<u8> {
    let mut all = vec![0xEE; s.nbytes()];
    s.read(0, &mut all).unwrap();
    all
}

fn devices() -> Vec<Device> {
    if cfg!(miri) { vec![Device::Cpu] } else { Device::all() }
}

fn sizes() -> impl Iterator<Item = usize> {
    SIZES.into_iter().filter(|&n| !cfg!(miri) || n < 1 << 16)
}

fn storage_with(device: Device, data: &[u8]) -> Storage {
    let s = Storage::alloc(device, data.len()).unwrap();
    s.write(0, data).unwrap();
    s
}

#[test]
fn every_handle_reads_written_bytes() {
    for device in devices() {
        for n in sizes() {
            let a = Storage::alloc_zeroed(device, n).unwrap();
            assert!(contents(&a).iter().all(|&b| b == 0), "{device} {n}");
            let b = a.clone();
            assert!(a.ptr_eq(&b) && !a.is_unique() && a.allocation().offset().is_multiple_of(512));
            let data = bytes(n, 1);
            a.write(n / 2, &data[n / 2..]).unwrap();
            drop(a);
            assert!(b.is_unique());
            let mut got = vec![1; n - n / 3];
            b.read(n / 3, &mut got).unwrap();
            assert!(got.iter().enumerate().all(|(i, &x)| x == if n / 3 + i < n / 2 { 0 } else { data[n / 3 + i] }));
        }
    }
}

#[test]
fn copies_reach_every_device_from_every_device() {
    for from in devices() {
        for to in devices() {
            for n in sizes() {
                let (data, before) = (bytes(n, 2), bytes(n + 7, 3));
                let (src, dst) = (storage_with(from, &data), storage_with(to, &before));
                let (at, start, len) = (5, n / 4, n - n / 4);
                dst.copy_from(at, &src, start, len, n % 2 == 0).unwrap();
                let mut want = before;
                want[at..at + len].copy_from_slice(&data[start..]);
                assert!(contents(&dst) == want && contents(&src) == data, "{from} -> {to}, {n} bytes");
            }
        }
    }
}

#[test]
fn a_copy_within_a_storage_may_overlap() {
    for device in devices() {
        let mut want = bytes(5000, 4);
        let s = storage_with(device, &want);
        for (to, from, n) in
            [(0, 1, 4999), (1, 0, 4999), (2000, 100, 2500), (100, 2000, 2500), (7, 7, 9), (0, 4000, 1000)]
        {
            s.copy_from(to, &s.clone(), from, n, true).unwrap();
            want.copy_within(from..from + n, to);
            assert!(contents(&s) == want, "{device}: {n} bytes from {from} to {to}");
        }
    }
}

#[test]
fn fills_write_exactly_their_range() {
    for device in devices() {
        let mut want = bytes(4099, 5);
        let (s, neighbour) = (storage_with(device, &want), storage_with(device, &bytes(512, 6)));
        for pattern in [&[7][..], &[1, 2], &[1, 2, 3, 4], &[0, 0, 128, 63], &[9; 8], &bytes(16, 7)] {
            let n = pattern.len();
            for (offset, bytes) in [(0, 0), (0, n), (16 * n, 33 * n), (n, 96), (0, 4099 / n * n), (4096 - n, n)] {
                s.fill(offset, bytes, pattern).unwrap();
                want[offset..offset + bytes].chunks_exact_mut(n).for_each(|c| c.copy_from_slice(pattern));
                assert!(contents(&s) == want, "{device}: {pattern:?} over {bytes} at {offset}");
            }
        }
        assert_eq!(contents(&neighbour), bytes(512, 6));
        // Large enough that several threads copy, except under Miri, which reports threads that still run when the process ends.
        let n = if cfg!(miri) { 9 << 10 } else { 9 << 20 };
        let large = Storage::alloc(device, n + 4).unwrap();
        large.fill(0, large.nbytes(), &[1, 2, 3, 4]).unwrap();
        assert!(contents(&large).chunks_exact(4).all(|c| c == [1, 2, 3, 4]), "{device}");
        for (offset, bytes, pattern) in [(0, 4, &[][..]), (0, 6, &[1; 4]), (2, 4, &[1; 4]), (0, 12, &[1; 3])] {
            assert!(matches!(s.fill(offset, bytes, pattern), Err(Error::Invalid { .. })));
        }
    }
}

#[test]
fn ranges_outside_are_errors_and_change_nothing() {
    for device in devices() {
        let data = bytes(100, 8);
        let (s, other) = (storage_with(device, &data), storage_with(Device::Cpu, &data));
        for (offset, n) in [(0, 101), (100, 1), (101, 0), (usize::MAX, 1), (1, usize::MAX), (usize::MAX, usize::MAX)] {
            let mut host = vec![0; n.min(200)];
            if n <= 200 {
                assert!(matches!(s.read(offset, &mut host), Err(Error::Invalid { op: "read", .. })));
                assert!(matches!(s.write(offset, &host), Err(Error::Invalid { op: "write", .. })));
            }
            assert!(matches!(s.fill(offset, n, &[0]), Err(Error::Invalid { .. })));
            assert!(matches!(s.copy_from(offset, &other, 0, n, true), Err(Error::Invalid { .. })));
            assert!(matches!(other.copy_from(0, &s, offset, n, true), Err(Error::Invalid { .. })));
        }
        assert!(contents(&s) == data && contents(&other) == data);
    }
}

#[test]
fn empty_storages_take_no_memory() {
    for device in devices() {
        let s = Storage::alloc_zeroed(device, 0).unwrap();
        assert_eq!((s.nbytes(), s.device(), s.allocation().segment(), s.allocation().offset()), (0, device, None, 0));
        s.write(0, &[]).unwrap();
        s.read(0, &mut []).unwrap();
        s.copy_from(0, &s, 0, 0, true).unwrap();
        assert!(s.cl().is_err() && contents(&s).is_empty());
    }
}

#[test]
fn too_large_an_allocation_is_an_error_and_leaves_others_intact() {
    for device in devices() {
        let data = bytes(1000, 9);
        let s = storage_with(device, &data);
        for n in [usize::MAX, usize::MAX - 4096, isize::MAX as usize, 1 << 60, 1 << 45] {
            let error = Storage::alloc(device, n).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { requested, .. } if requested == n), "{error}");
        }
        assert!(contents(&s) == data);
    }
}

#[test]
#[cfg(not(miri))] // Miri cannot look for OpenCL drivers
fn a_missing_device_is_an_error() {
    let missing = Device::OpenCL(usize::MAX);
    assert!(matches!(Storage::alloc(missing, 4), Err(Error::NoDevice { .. })));
    assert!(matches!(missing.memory_stats(), Err(Error::NoDevice { .. })));
    assert!(matches!(missing.empty_cache(), Err(Error::NoDevice { .. })));
}

#[test]
fn buffer_locations_are_for_opencl_and_slices_for_the_host() {
    for device in devices() {
        let s = Storage::alloc(device, 10).unwrap();
        match device {
            Device::Cpu => assert!(s.cl().is_err() && with_host(&[&s], &[], |_, _| ()).is_ok()),
            _ => {
                assert!(with_host(&[&s], &[], |_, _| ()).is_err());
                let location = s.cl().unwrap();
                assert_eq!((location.device.device(), location.offset()), (device, s.allocation().offset()));
                assert!(location.offset() + 10 <= location.buffer().bytes());
            }
        }
        assert!(format!("{s:?}").starts_with(&format!("10 bytes on {device} at segment ")), "{s:?}");
    }
}

#[test]
fn changes_are_counted_for_all_handles() {
    let a = Storage::alloc(Device::Cpu, 10).unwrap();
    let b = a.clone();
    b.bump_version();
    assert_eq!((a.version(), b.version()), (1, 1));
}

#[test]
fn an_adopted_vector_does_not_move() {
    let mut v: Vec<f32> = Vec::with_capacity(100);
    v.extend([1.0, 2.0, 3.0]);
    let location = v.as_ptr().addr();
    let s = Storage::adopt(v);
    assert_eq!((s.nbytes(), s.device(), s.allocation().segment()), (12, Device::Cpu, None));
    with_host(&[&s], &[], |r, _| {
        assert_eq!(r[0].as_ptr().addr(), location);
        assert_eq!(bytemuck::cast_slice::<u8, f32>(r[0]), [1.0, 2.0, 3.0]);
    })
    .unwrap();
    s.write(4, &5.0_f32.to_ne_bytes()).unwrap();
    thread::spawn(move || assert_eq!(contents(&s)[4..8], 5.0_f32.to_ne_bytes())).join().unwrap();
    assert_eq!(Storage::adopt(Vec::<f64>::with_capacity(3)).nbytes(), 0);
    assert_eq!(Storage::adopt(Vec::<bool>::new()).nbytes(), 0);
}

#[test]
fn slices_are_exact_aligned_and_refused_when_they_would_alias() {
    let (a, b) = (Storage::alloc(Device::Cpu, 700).unwrap(), Storage::alloc(Device::Cpu, 4).unwrap());
    let empty = Storage::alloc(Device::Cpu, 0).unwrap();
    with_host(&[&a, &empty, &a], &[&b, &empty, &empty], |r, w| {
        assert_eq!(r.iter().map(|s| s.len()).collect::<Vec<_>>(), [700, 0, 700]);
        assert_eq!(w.iter().map(|s| s.len()).collect::<Vec<_>>(), [4, 0, 0]);
        assert!(r.iter().all(|s| s.as_ptr().addr().is_multiple_of(64)));
        assert!(w.iter().all(|s| s.as_ptr().addr().is_multiple_of(64)));
        assert!(bytemuck::cast_slice_mut::<u8, f64>(w[1]).is_empty());
    })
    .unwrap();
    assert!(matches!(with_host(&[&a], &[&a], |_, _| ()), Err(Error::Invalid { .. })));
    assert!(matches!(with_host(&[&b, &a], &[&a.clone()], |_, _| ()), Err(Error::Invalid { .. })));
    assert!(matches!(with_host(&[], &[&a, &b, &a.clone()], |_, _| ()), Err(Error::Invalid { .. })));
    with_host(&[], &[&a, &b], |_, w| w[0].fill(w[1][0])).unwrap(); // succeeds, so no lock was left locked
}

#[test]
fn a_panic_inside_leaves_the_storage_usable() {
    let s = Storage::alloc_zeroed(Device::Cpu, 8).unwrap();
    let caught = std::panic::catch_unwind(|| {
        with_host::<()>(&[], &[&s], |_, w| {
            w[0][0] = 1;
            panic!("inside")
        })
    });
    assert!(caught.is_err());
    assert_eq!(contents(&s)[0], 1);
    s.write(0, &[2]).unwrap();
}

/// Every thread locks the same storages in a different order, and moves one unit from one storage to another. No thread
/// deadlocks and no unit is lost.
#[test]
fn threads_that_lock_the_same_storages_take_turns() {
    const N: usize = 4;
    let (threads, rounds) = if cfg!(miri) { (3, 8) } else { (8, 500) };
    let accounts: Vec<Storage> = (0..N).map(|_| Storage::adopt(vec![1000_i64])).collect();
    let start = Barrier::new(threads);
    thread::scope(|scope| {
        for t in 0..threads {
            let (accounts, start) = (&accounts, &start);
            scope.spawn(move || {
                start.wait();
                for round in 0..rounds {
                    let (from, to) = ((t + round) % N, (t * 3 + round * 2 + 1) % N);
                    let other = (0..N).find(|&i| i != from && i != to).unwrap();
                    if from == to {
                        continue;
                    }
                    with_host(&[&accounts[other]], &[&accounts[from], &accounts[to]], |r, w| {
                        assert_eq!(r[0].len(), 8);
                        let [from, to] = w else { unreachable!() };
                        bytemuck::cast_slice_mut::<u8, i64>(from)[0] -= 1;
                        bytemuck::cast_slice_mut::<u8, i64>(to)[0] += 1;
                    })
                    .unwrap();
                }
            });
        }
    });
    let total: i64 = accounts.iter().map(|s| i64::from_ne_bytes(contents(s).try_into().unwrap())).sum();
    assert_eq!(total, 1000 * N as i64);
}

/// Blocks move between threads all the time; each thread must read its own bytes.
#[test]
fn threads_never_see_each_others_bytes() {
    for device in devices() {
        thread::scope(|scope| {
            for t in 0..if cfg!(miri) { 2 } else { 8 } {
                scope.spawn(move || {
                    let mut held: Vec<(Storage, Vec<u8>)> = Vec::new();
                    for round in 0..if cfg!(miri) { 6 } else { 40 } {
                        let n = 1 + (t * 7919 + round * 104_729) % if cfg!(miri) { 900 } else { 70_000 };
                        let data = bytes(n, t * 64 + round);
                        held.push((storage_with(device, &data), data));
                        if held.len() > 4 {
                            let (s, data) = held.remove(round % 4);
                            let copy = Storage::alloc(device, s.nbytes()).unwrap();
                            copy.copy_from(0, &s, 0, s.nbytes(), false).unwrap();
                            drop(s); // while the copy may still be queued
                            assert!(contents(&copy) == data, "{device}, thread {t}, round {round}");
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn concurrent_copies_in_both_directions_are_complete() {
    let (a, b) = (Storage::alloc_zeroed(Device::Cpu, 5000).unwrap(), Storage::alloc(Device::Cpu, 5000).unwrap());
    b.fill(0, 5000, &[7]).unwrap();
    let rounds = if cfg!(miri) { 8 } else { 500 };
    thread::scope(|scope| {
        for (to, from) in [(&a, &b), (&b, &a), (&a, &b)] {
            scope.spawn(move || (0..rounds).for_each(|_| to.copy_from(0, from, 0, 5000, true).unwrap()));
        }
        for s in [&a, &b] {
            let bytes = contents(s);
            assert!(bytes.iter().all(|&byte| byte == bytes[0]), "a copy was seen half done");
        }
    });
    assert_eq!(contents(&a), contents(&b));
    // Copies between two storages at different offsets, and between overlapping ranges of one storage.
    a.write(0, &[1, 2, 3, 4, 5]).unwrap();
    b.copy_from(4990, &a, 1, 10, true).unwrap();
    assert_eq!(contents(&b)[4989..4995], [contents(&b)[0], 2, 3, 4, 5, contents(&b)[0]]);
    a.copy_from(1, &a, 0, 5, true).unwrap();
    assert_eq!(contents(&a)[..6], [1, 1, 2, 3, 4, 5]);
    assert!(b.copy_from(4991, &a, 0, 10, true).is_err());
}
