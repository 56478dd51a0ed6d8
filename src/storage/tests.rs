//! The room as a whole, on host memory.

use super::*;

#[test]
fn what_is_written_is_read_through_every_handle() {
    let a = Storage::alloc_zeroed(Device::Cpu, 1000).unwrap();
    let b = a.clone();
    assert!(a.ptr_eq(&b) && !a.is_unique());
    a.write(10, &[1, 2, 3]).unwrap();
    let mut got = [9; 5];
    b.read(9, &mut got).unwrap();
    assert_eq!(got, [0, 1, 2, 3, 0]);
    drop(a);
    assert!(b.is_unique());
}

#[test]
fn an_adopted_vector_stays_where_it_is() {
    let mut v: Vec<f32> = Vec::with_capacity(100);
    v.extend([1.0, 2.0, 3.0]);
    let place = v.as_ptr().addr();
    let s = Storage::adopt(v);
    assert_eq!((s.nbytes(), s.device(), s.allocation().segment()), (12, Device::Cpu, None));
    with_host(&[&s], &[], |r, _| {
        assert_eq!(r[0].as_ptr().addr(), place);
        assert_eq!(bytemuck::cast_slice::<u8, f32>(r[0]), [1.0, 2.0, 3.0]);
    })
    .unwrap();
    assert_eq!(Storage::adopt(Vec::<f64>::with_capacity(3)).nbytes(), 0);
}

#[test]
fn slices_are_exact_aligned_and_refused_when_they_would_alias() {
    let (a, b) = (Storage::alloc(Device::Cpu, 700).unwrap(), Storage::alloc(Device::Cpu, 4).unwrap());
    let empty = Storage::alloc(Device::Cpu, 0).unwrap();
    with_host(&[&a, &empty, &a], &[&b, &empty], |r, w| {
        assert_eq!(r.iter().map(|s| s.len()).collect::<Vec<_>>(), [700, 0, 700]);
        assert_eq!(w.iter().map(|s| s.len()).collect::<Vec<_>>(), [4, 0]);
        assert!(r.iter().all(|s| s.as_ptr().addr() % 64 == 0));
        assert!(w.iter().all(|s| s.as_ptr().addr() % 64 == 0));
        assert!(bytemuck::cast_slice_mut::<u8, f64>(w[1]).is_empty());
    })
    .unwrap();
    assert!(matches!(with_host(&[&a], &[&a], |_, _| ()), Err(Error::Invalid { .. })));
    assert!(matches!(with_host(&[], &[&a, &b, &a.clone()], |_, _| ()), Err(Error::Invalid { .. })));
    with_host(&[], &[&a, &b], |_, w| w[0].fill(w[1][0])).unwrap(); // nothing stayed locked
}
