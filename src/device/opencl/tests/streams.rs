//! Tests of streams, events, faults across streams and pinned memory, on every device.

use super::*;
use crate::Result;
use crate::device::stream::{Stream, with_stream};
use crate::device::stream_id::StreamId;

/// Launches a kernel `times` times that adds one to every element.
fn add_ones(device: &ClDevice, x: &ClBuffer, times: i32) {
    let kernel = axb_kernel(device);
    (0..times).for_each(|_| axb(device, &kernel, x, x, 1, 1).unwrap());
}

fn ints(device: &ClDevice, value: i32) -> ClBuffer {
    buffer(device, bytemuck::cast_slice(&[value; 5000]))
}

fn assert_ints(device: &ClDevice, x: &ClBuffer, value: i32) {
    assert_eq!(contents(device, x), bytemuck::cast_slice::<i32, u8>(&[value; 5000]));
}

#[test]
fn streams_wait_for_each_other_alternately() {
    for device in devices() {
        let (a, b) = (Stream::new(device.device()).unwrap(), Stream::new(device.device()).unwrap());
        assert_ne!(a.id(), b.id());
        let x = ints(device, 0);
        for _ in 0..20 {
            with_stream(&a, || add_ones(device, &x, 5));
            b.wait_stream(&a).unwrap();
            with_stream(&b, || add_ones(device, &x, 3));
            a.wait_stream(&b).unwrap();
        }
        // A copy on stream `b` that waits for an event on stream `a` must see the additions on `a`.
        let y = ints(device, 7);
        let event = device.record(a.id()).unwrap();
        device.stream_waits(b.id(), &event).unwrap();
        device.copy_on(b.id(), (&x, 0), (&y, 0), x.bytes()).unwrap();
        with_stream(&b, || assert_ints(device, &y, 160));
    }
}

#[test]
fn events_are_done_when_earlier_work_is_done() {
    for device in devices() {
        let stream = Stream::new(device.device()).unwrap();
        let x = ints(device, 0);
        assert!(device.record(StreamId::DEFAULT).is_ok(), "on whatever is there");
        with_stream(&stream, || add_ones(device, &x, 50));
        let event = device.record(stream.id()).unwrap();
        device.wait(&event).unwrap();
        assert!(event.is_over().unwrap() && device.query(&event).unwrap());
        // Reads on the default stream, which is ordered behind the additions only by the event.
        assert_ints(device, &x, 50);

        let public = stream.record_event().unwrap();
        while !public.is_done().unwrap() {
            std::thread::yield_now();
        }
        public.synchronize().unwrap();
    }
}

#[test]
fn a_stream_becomes_idle_without_a_wait() {
    for device in devices() {
        let stream = Stream::new(device.device()).unwrap();
        stream.synchronize().unwrap();
        assert!(stream.is_idle().unwrap());
        let x = ints(device, 0);
        for _ in 0..3 {
            with_stream(&stream, || add_ones(device, &x, 40));
            while !stream.is_idle().unwrap() {
                std::thread::yield_now();
            }
        }
        assert_ints(device, &x, 120);
        assert!(stream.is_idle().unwrap());
    }
}

#[test]
fn submissions_are_counted_per_stream() {
    for device in devices() {
        let (a, b) = (Stream::new(device.device()).unwrap(), Stream::new(device.device()).unwrap());
        let count = || (device.submitted(a.id()), device.submitted(b.id()));
        let (x, y) = (ints(device, 0), ints(device, 0));
        let mut last = count();
        let work: [&dyn Fn() -> Result<()>; 5] = [
            &|| device.fill((&x, 0), 16, &[0]),
            &|| device.copy((&x, 0), (&y, 0), 16, false),
            &|| device.write(&[0; 4], (&x, 0)),
            &|| device.read((&x, 0), &mut [0; 4]),
            &|| axb(device, &axb_kernel(device), &x, &x, 1, 0),
        ];
        for submit in work {
            with_stream(&a, submit).unwrap();
            let now = count();
            assert!(now.0 > last.0 && now.1 == last.1);
            last = now;
        }
        let event = device.record(a.id()).unwrap();
        assert_eq!(count(), last, "a marker is no work");
        device.stream_waits(b.id(), &event).unwrap();
        assert!(device.submitted(b.id()) > last.1);
        device.finish().unwrap();
    }
}

#[test]
fn finishing_a_device_finishes_every_stream() {
    for device in devices() {
        let streams: Vec<Stream> = (0..4).map(|_| Stream::new(device.device()).unwrap()).collect();
        let buffers: Vec<ClBuffer> = streams.iter().map(|_| ints(device, 0)).collect();
        for (stream, x) in streams.iter().zip(&buffers) {
            with_stream(stream, || add_ones(device, x, 30));
        }
        device.finish().unwrap();
        // Reads on the default stream, which is not ordered behind the other streams: `finish` must have waited for them.
        buffers.iter().for_each(|x| assert_ints(device, x, 30));
        assert!(streams.iter().all(|s| s.is_idle().unwrap()));
    }
}

#[test]
fn waits_for_finished_work_do_not_call_the_driver() {
    for device in devices() {
        let stream = Stream::new(device.device()).unwrap();
        let count = || device.submitted(stream.id());
        let x = ints(device, 0);
        for round in 1..4 {
            with_stream(&stream, || add_ones(device, &x, 10));
            stream.synchronize().unwrap();
            let before = count();
            stream.synchronize().unwrap();
            assert_eq!(count(), before, "a wait is counted as it is enqueued");
            with_stream(&stream, || device.read((&x, 0), &mut [0; 4])).unwrap();
            assert!(count() > before);
            assert_ints(device, &x, 10 * round);
        }
    }
}

#[test]
fn a_dropped_streams_work_is_done_and_its_id_is_reused() {
    for device in devices() {
        let x = ints(device, 0);
        let stream = Stream::new(device.device()).unwrap();
        let id = stream.id();
        let other = stream.clone();
        with_stream(&stream, || {
            drop(other);
            add_ones(device, &x, 3);
        });
        let event = device.record(id).unwrap();
        with_stream(&stream, || add_ones(device, &x, 3)); // too few launches for a flush
        drop(stream);
        device.wait(&event).unwrap();
        device.finish().unwrap();
        assert_ints(device, &x, 6);
        // Dropped streams must be reused, or else ids run out. (Other tests take streams meanwhile, so the next id is not known.)
        for _ in 0..3000 {
            Stream::new(device.device()).unwrap();
        }
    }
}

#[test]
fn threads_on_their_own_streams_share_kernels() {
    for device in devices() {
        let kernel = axb_kernel(device);
        let start = Barrier::new(8);
        std::thread::scope(|scope| {
            for t in 0..8 {
                let (kernel, start) = (&kernel, &start);
                scope.spawn(move || {
                    let stream = Stream::new(device.device()).unwrap();
                    start.wait();
                    with_stream(&stream, || {
                        for round in 0..25 {
                            let (x, y) = (ints(device, round), ints(device, 0));
                            axb(device, kernel, &x, &y, t, 1).unwrap();
                            axb(device, kernel, &y, &x, 2, t).unwrap();
                            assert_ints(device, &x, 2 * (t * round + 1) + t);
                        }
                    });
                });
            }
        });
    }
}

/// Launches, on the current stream, a check of `index` against a size of 10, behind slow work.
fn check(device: &ClDevice, kernel: &ClKernel, index: i32) -> ClBuffer {
    let (slow, x) = (ints(device, 0), buffer(device, &index.to_ne_bytes()));
    add_ones(device, &slow, 20);
    let args = [Arg::Buffer(&x), Arg::U32(10), Arg::U32(Fault::Index as u32), device.faults()];
    device.launch(kernel, &args, &[1], &[1]).unwrap();
    x
}

#[track_caller]
fn assert_fault<T>(result: Result<T>, bad: i64) {
    let Err(error) = result else { panic!("no fault told") };
    assert!(matches!(error, Error::IndexOutOfRange { index, size: 10, .. } if index == bad), "{error}");
}

#[test]
fn faults_on_any_stream_are_reported_once() {
    for device in devices() {
        let kernel = device.build("check", FAULTY, "check").unwrap();
        let (a, b) = (Stream::new(device.device()).unwrap(), Stream::new(device.device()).unwrap());
        let fine = ints(device, 1);
        let read = || device.read((&fine, 0), &mut [0; 4]);

        with_stream(&a, || check(device, &kernel, 99));
        assert_fault(read(), 99); // the read is on the default stream
        read().expect("told once");

        with_stream(&a, || check(device, &kernel, -5));
        assert_fault(with_stream(&b, || device.copy((&fine, 0), (&fine, 400), 4, true)), -5);
        with_stream(&a, read).expect("told once");

        // A valid index on one stream and an invalid index on the other, in both orders: the fault must be reported in both.
        with_stream(&a, || check(device, &kernel, 3));
        with_stream(&b, || check(device, &kernel, 10));
        assert_fault(device.finish(), 10);
        with_stream(&b, || check(device, &kernel, 11));
        with_stream(&a, || check(device, &kernel, 3));
        assert_fault(with_stream(&a, read), 11);

        // A wait for a stream must report that stream's fault.
        with_stream(&a, || check(device, &kernel, 12));
        b.synchronize().expect("it was not on this stream");
        assert_fault(a.synchronize(), 12);
        device.finish().expect("told once");

        // Another thread's read must not report the fault.
        with_stream(&a, || check(device, &kernel, 13));
        std::thread::scope(|s| s.spawn(|| with_stream(&a, read)).join().unwrap()).expect("another thread's");
        assert_fault(with_stream(&b, read), 13);
    }
}

#[test]
fn pinned_memory_is_read_and_written_through_its_pointer() {
    for device in devices() {
        for n in [1, 4096, 1_000_003] {
            let pinned = device.create_pinned(n).unwrap();
            assert_eq!(pinned.bytes(), n);
            // SAFETY: `n` bytes, mapped for reading and writing until `pinned` is dropped; no transfer is in progress, and
            // this is the only slice of them. They are initialised before the slice is made.
            let bytes = unsafe {
                pinned.start().write_bytes(0, n);
                std::slice::from_raw_parts_mut(pinned.start().as_ptr(), n)
            };
            bytes.copy_from_slice(&pattern(n));
            let x = device.create_buffer(n).unwrap();
            device.write(bytes, (&x, 0)).unwrap();
            assert_eq!(contents(device, &x), pattern(n));
            bytes.fill(0);
            device.read((&x, 0), bytes).unwrap();
            assert_eq!(bytes, pattern(n));
        }
        // Pinned memory can be dropped on any thread. A size of 0 must be an error.
        let pinned = device.create_pinned(64).unwrap();
        std::thread::spawn(move || drop(pinned)).join().unwrap();
        assert!(device.create_pinned(0).is_err());
        assert!(!device.is_lost());
    }
}
