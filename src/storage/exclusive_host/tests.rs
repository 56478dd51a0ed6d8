//! Tests of which storages can be owned exclusively, and of how their blocks are pinned.

use std::thread;

use super::*;

fn holding(bytes: &[u8]) -> Storage {
    let s = Storage::alloc(Device::Cpu, bytes.len()).unwrap();
    s.write(0, bytes).unwrap();
    s
}

fn is_exported(s: &Storage) -> bool {
    s.allocation().block().unwrap().slot().is_exported()
}

#[test]
fn an_exclusive_owner_accesses_the_elements_in_place() {
    let values: Vec<u8> = (1..8_i32).flat_map(i32::to_ne_bytes).collect();
    let mut exclusive = ExclusiveHost::<i32>::new("test", holding(&values), 8, 4).unwrap();
    assert!(exclusive[..] == [3, 4, 5, 6] && is_exported(&exclusive.storage));
    // Another thread can own the elements and write without a lock. After `into_storage` the block may move again.
    let change = move || {
        exclusive[3] = -1;
        exclusive.into_storage()
    };
    let s = thread::spawn(change).join().unwrap();
    assert!(!is_exported(&s) && s.is_unique());
    let mut last = [0; 4];
    s.read(20, &mut last).unwrap();
    assert_eq!(i32::from_ne_bytes(last), -1);
    s.allocation().block().unwrap().export();
    let s = ExclusiveHost::<i32>::new("test", s, 0, 7).unwrap().into_storage();
    assert!(is_exported(&s), "what others made stay stays");
    assert!(ExclusiveHost::<i32>::new("test", s, 28, 0).unwrap().is_empty());
    for storage in [Storage::adopt(vec![1_i32, 2]), holding(bytemuck::bytes_of(&[1_i32, 2]))] {
        let exclusive = ExclusiveHost::<i32>::new("test", storage, 0, 2).unwrap();
        thread::scope(|scope| scope.spawn(|| assert_eq!(exclusive[..], [1, 2])).join().unwrap());
    }
    assert!(ExclusiveHost::<f64>::new("test", Storage::alloc(Device::Cpu, 0).unwrap(), 0, 0).unwrap().is_empty());
}

#[test]
fn shared_and_invalid_storages_are_refused() {
    let message = |made: Result<ExclusiveHost<bool>>| made.err().unwrap().to_string();
    let s = holding(&[0, 1, 2, 1]);
    assert!(message(ExclusiveHost::new("test", s.clone(), 0, 2)).contains("not in host memory with a single owner"));
    assert!(!is_exported(&s));
    assert_eq!(ExclusiveHost::<bool>::new("test", s, 0, 2).unwrap()[..], [false, true]);
    let s = || holding(&[0, 1, 2, 1]);
    assert_eq!(message(ExclusiveHost::new("test", s(), 0, 4)), "test: the storage holds bytes that are no valid bool");
    for (offset, count) in [(0, 5), (5, 0), (usize::MAX, 1), (1, usize::MAX)] {
        assert!(message(ExclusiveHost::new("test", s(), offset, count)).contains("not in a storage"));
    }
    assert!(ExclusiveHost::<u32>::new("test", holding(&[0; 8]), 2, 1).is_err(), "not aligned");
    assert!(ExclusiveHost::<u32>::new("test", s(), 4, usize::MAX / 2).is_err(), "no such size");
}

/// Compaction moves the other blocks. The exclusive block keeps its location until it is a storage again.
#[test]
fn compaction_does_not_move_an_exclusive_block() {
    let allocator = super::super::allocator(Device::Cpu).unwrap();
    drop(Storage::alloc(Device::Cpu, 1 << 20).unwrap()); // creates the segment for the blocks below
    let mut held: Vec<_> = (0..24).map(|i| Some(holding(&[i; 40_000]))).collect();
    held.iter_mut().step_by(2).for_each(|s| *s = None);
    let mut exclusive = ExclusiveHost::<u8>::new("test", held[13].take().unwrap(), 0, 40_000).unwrap();
    let start = exclusive.as_ptr();
    thread::scope(|scope| {
        scope.spawn(|| allocator.compact(u64::MAX).unwrap());
        exclusive.iter_mut().for_each(|byte| *byte += 1);
    });
    assert!(exclusive.as_ptr() == start && exclusive.iter().all(|&byte| byte == 14));
    let s = exclusive.into_storage();
    drop(held);
    allocator.compact(u64::MAX).unwrap();
    assert!(ExclusiveHost::<u8>::new("test", s, 0, 40_000).unwrap().iter().all(|&byte| byte == 14));
}
