//! Snapshots of a toy allocator, checked against other readers and by breaking each rule once.

mod caller;
mod check;
mod live;
mod pickle;
mod stream;
mod toy;

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::thread;

use super::*;
use toy::Toy;

fn addrs(history: &History) -> Vec<u64> {
    history.entries().iter().map(|e| e.addr).collect()
}

#[test]
fn ring_keeps_the_latest() -> Result<()> {
    let history = History::new();
    history.record(TraceAction::Alloc, 1, 1, 0);
    assert!(!history.is_on() && history.entries().is_empty());
    history.record_memory_history(HistoryOptions { max_entries: 3, ..Default::default() })?;
    for addr in 0..8 {
        history.record(TraceAction::Alloc, addr, 512, 7);
    }
    assert_eq!((addrs(&history), history.overwritten()), (vec![5, 6, 7], 5));
    assert!(history.entries().is_sorted_by_key(|e| e.time_us));
    history.record_memory_history(HistoryOptions { max_entries: 2, ..Default::default() })?;
    assert_eq!((addrs(&history), history.overwritten()), (vec![6, 7], 6));
    history.record_memory_history(HistoryOptions { max_entries: 4, ..Default::default() })?;
    for addr in 8..11 {
        history.record(TraceAction::Alloc, addr, 512, 7);
    }
    assert_eq!((addrs(&history), history.overwritten()), (vec![7, 8, 9, 10], 7));
    history.record_memory_history(HistoryOptions { enabled: Recording::Off, ..Default::default() })?;
    history.record(TraceAction::Alloc, 99, 512, 7);
    assert_eq!(addrs(&history), [7, 8, 9, 10], "off keeps what there is");
    history.clear();
    assert_eq!((addrs(&history), history.overwritten()), (vec![], 0));
    assert!(history.record_memory_history(HistoryOptions { max_entries: 0, ..Default::default() }).is_err());
    assert!(history.record_memory_history(HistoryOptions { max_entries: usize::MAX, ..Default::default() }).is_err());
    assert!(!history.is_on());
    Ok(())
}

#[test]
fn recording_never_grows_the_ring() -> Result<()> {
    let history = History::new();
    history.record_memory_history(HistoryOptions { max_entries: 100, ..Default::default() })?;
    let place = |h: &History| {
        let ring = lock(&h.ring);
        (ring.events.as_ptr(), ring.events.capacity())
    };
    let before = place(&history);
    (0..1000).for_each(|addr| _ = history.record(TraceAction::Alloc, addr, 512, 0));
    assert_eq!(place(&history), before);
    assert_eq!(size_of::<Event>(), 48, "as documented");
    Ok(())
}

#[test]
fn state_and_clear_behave_as_in_pytorch() -> Result<()> {
    let history = History::new();
    let options = HistoryOptions { enabled: Recording::State, ..Default::default() };
    history.record_memory_history(options)?;
    (0..5).for_each(|addr| _ = history.record(TraceAction::Alloc, addr, 512, 0));
    assert_eq!((addrs(&history), history.max_entries()), (vec![4], 1));
    assert_ne!(history.record(TraceAction::Alloc, 5, 512, 0), Context::NONE, "kept on blocks");
    history.record_memory_history(HistoryOptions { clear_history: true, ..Default::default() })?;
    assert_eq!((addrs(&history), history.overwritten()), (vec![], 0));
    assert!(history.is_on());
    Ok(())
}

#[test]
fn contexts_follow_the_level() -> Result<()> {
    use TraceAction::{Alloc, FreeCompleted, FreeRequested, Oom, SegmentAlloc, SegmentFree};
    for (level, in_blocks, in_allocations, in_all) in [
        (ContextLevel::Never, false, false, false),
        (ContextLevel::State, true, false, false),
        (ContextLevel::Alloc, true, true, false),
        (ContextLevel::All, true, true, true),
    ] {
        for stacks in [false, true] {
            let history = History::new();
            history.record_memory_history(HistoryOptions { context: level, stacks, ..Default::default() })?;
            let kept = with_context("step", || {
                let kept = [SegmentAlloc, Alloc, Oom, SegmentFree].map(|action| history.record(action, 0, 512, 0));
                history.record_free(0, 512, 0);
                kept
            });
            assert_eq!(kept.map(|context| context != Context::NONE), [in_blocks, in_blocks, false, false], "{level:?}");
            let frames = |context: Context| context.frames().iter().map(|f| f.name.clone()).collect::<Vec<_>>();
            assert!(!in_blocks || frames(kept[1]).last().is_some_and(|name| name == "step"), "{level:?}");
            for entry in history.entries() {
                let expected = match entry.action {
                    SegmentAlloc | Alloc | Oom => in_allocations,
                    _ => in_all,
                };
                let what = format!("{:?} at {level:?}, stacks: {stacks}", entry.action);
                assert_eq!(entry.compile_context, if expected { "step" } else { "" }, "{what}");
                assert_eq!(entry.frames.len() > 1, expected && stacks, "{what}: {:?}", entry.frames);
                assert_eq!(entry.frames.is_empty(), !expected, "{what}");
            }
            let last: Vec<_> = history.entries()[4..].iter().map(|e| e.action).collect();
            assert_eq!(last, [FreeRequested, FreeCompleted]);
        }
    }
    assert_eq!(with_context("step", || History::new().record(Alloc, 0, 512, 0)), Context::NONE, "off");
    Ok(())
}

#[test]
fn contexts_nest_and_end() {
    let names = |c: Context| c.frames().iter().map(|f| f.name.clone()).collect::<Vec<_>>();
    let inner = with_context("a", || with_context("b", || with_context("ö", Context::current)));
    assert_eq!((names(inner), inner.path()), (vec!["ö".into(), "b".into(), "a".into()], "a/b/ö".into()));
    assert_eq!(with_context("a", || with_context("b", || with_context("ö", Context::current))), inner, "known already");
    assert_ne!(with_context("b", || with_context("a", || with_context("ö", Context::current))), inner);
    assert_eq!(Context::current(), Context::NONE);
    let panicked = thread::spawn(|| {
        let caught = std::panic::catch_unwind(|| with_context("panics", || panic!("on purpose")));
        (caught.is_err(), Context::current())
    });
    assert_eq!(panicked.join().unwrap(), (true, Context::NONE));
    with_context("outer", || {
        let other = thread::spawn(Context::current).join().unwrap();
        assert_eq!(other, Context::NONE, "of this thread alone");
    });
}

#[test]
fn annotations_nest() -> Result<()> {
    let history = History::new();
    history.record_memory_history(HistoryOptions::default())?;
    // Only these names are checked, because other tests record spans at the same time.
    annotate("nest: step", || annotate("nest: forward", || ()));
    let mine = annotations(3).into_iter().filter(|a| a.name.starts_with("nest: ")).collect::<Vec<_>>();
    let spans: Vec<_> = mine.iter().map(|a| (&a.name[6..], a.stage)).collect();
    assert_eq!(
        spans,
        [("step", Stage::Start), ("forward", Stage::Start), ("forward", Stage::End), ("step", Stage::End)]
    );
    assert!(mine.is_sorted_by_key(|a| a.time_us) && mine.iter().all(|a| a.device == 3));
    Ok(())
}

#[test]
fn concurrent_threads_record_complete_entries_in_order() -> Result<()> {
    let max_entries = if cfg!(miri) { 20 } else { 1000 };
    let history = Arc::new(History::new());
    history.record_memory_history(HistoryOptions { max_entries, ..Default::default() })?;
    let (workers, each) = if cfg!(miri) { (2, 40) } else { (4, 2000) };
    thread::scope(|scope| {
        for worker in 0..workers {
            let history = &history;
            scope.spawn(move || {
                with_context(&format!("worker {worker}"), || {
                    (0..each).for_each(|i| _ = history.record(TraceAction::Alloc, i, 512, worker));
                })
            });
        }
        scope.spawn(|| {
            (0..if cfg!(miri) { 5 } else { 100 }).for_each(|_| assert!(history.entries().len() <= max_entries))
        });
    });
    let entries = history.entries();
    assert_eq!((entries.len(), history.overwritten()), (max_entries, u64::from(workers) * each - max_entries as u64));
    assert!(entries.is_sorted_by_key(|e| e.time_us));
    assert!(entries.iter().all(|e| e.compile_context == format!("worker {}", e.stream)));
    for worker in 0..workers {
        let mut its = entries.iter().filter(|e| e.stream == u64::from(worker)).map(|e| e.addr);
        assert!(its.by_ref().is_sorted(), "each thread's are in its order");
    }
    Ok(())
}

/// A writer whose bytes can be read after the writer was given away.
#[derive(Clone, Default)]
pub(in crate::storage) struct SharedWriter(pub(in crate::storage) Arc<Mutex<Vec<u8>>>);

impl Write for SharedWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn csv_logs_round_trip() -> Result<()> {
    let file = SharedWriter::default();
    let log = CsvLog::new(file.clone())?;
    log.log(CsvAction::Allocate, 0x7f00_1234_5600, 1 << 40, 3)?;
    thread::scope(|scope| scope.spawn(|| log.log(CsvAction::Free, 0x7f00_1234_5600, 1 << 40, 3)).join().unwrap())?;
    log.log(CsvAction::AllocateFailure, 0, 77, 0)?;
    drop(log);
    let bytes = file.0.lock().unwrap().clone();
    let text = String::from_utf8(bytes.clone()).unwrap();
    assert!(text.starts_with("Thread,Time,Action,Pointer,Size,Stream\n"), "{text}");
    assert!(text.lines().nth(1).unwrap().ends_with(",allocate,0x7f0012345600,1099511627776,0x3"), "{text}");
    let events = CsvEvent::read_all(&bytes[..])?;
    let [a, b, c] = events[..] else { panic!("{events:?}") };
    assert_eq!((a.action, a.addr, a.bytes, a.stream), (CsvAction::Allocate, 0x7f00_1234_5600, 1 << 40, 3));
    assert_eq!((b.action, b.addr, c.action, c.bytes), (CsvAction::Free, a.addr, CsvAction::AllocateFailure, 77));
    assert!(a.thread != b.thread && a.thread == c.thread);
    assert!(events.iter().all(|e| e.time_us < 86_400_000_000));
    Ok(())
}

#[test]
fn reads_rmm_logs() -> Result<()> {
    // Lines as RMM writes them through spdlog and glibc. Older versions wrote a colon before the microseconds.
    let text = "Thread,Time,Action,Pointer,Size,Stream\r\n\
        2146,12:41:22.000123,allocate,0x7f5c3e000000,256,0\r\n\
        2146,23:59:59:999999,free,0x7f5c3e000000,256,0x55d0c0ffee00\n\
        2147,00:00:00.000000,allocate failure,(nil),1099511627776,0x2\n\n";
    let events = CsvEvent::read_all(text.as_bytes())?;
    let [a, b, c] = events[..] else { panic!("{events:?}") };
    assert_eq!((a.thread, a.time_us, a.addr, a.stream), (2146, 45_682_000_123, 0x7f5c_3e00_0000, 0));
    assert_eq!((b.time_us, b.action, b.stream), (86_399_999_999, CsvAction::Free, 0x55d0_c0ff_ee00));
    assert_eq!((c.action, c.addr, c.bytes), (CsvAction::AllocateFailure, 0, 1 << 40));
    for (line, what) in [
        ("1,12:00:00.000000,allocate,0x0,256", "5 columns"),
        ("x,12:00:00.000000,allocate,0x0,256,0", "thread"),
        ("1,12:00,allocate,0x0,256,0", "time"),
        ("1,25:00:00.000000,allocate,0x0,256,0", "time"),
        ("1,12:00:00.000000,malloc,0x0,256,0", "action"),
        ("1,12:00:00.000000,allocate,0xg,256,0", "pointer"),
        ("1,12:00:00.000000,allocate,0x0,-1,0", "size"),
        ("1,12:00:00.000000,allocate,0x0,1,s", "stream"),
    ] {
        let error = CsvEvent::read_all(
            format!("{HEADER}\n{line}", HEADER = "Thread,Time,Action,Pointer,Size,Stream").as_bytes(),
        );
        let error = error.expect_err(line).to_string();
        assert!(error.contains("line 2") && error.contains(what), "{error}");
    }
    Ok(())
}

#[test]
fn csv_writers_failures_are_errors() -> Result<()> {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let log = CsvLog::new(Full)?; // does not fail yet, because the line is buffered
    assert!(log.flush().is_err());
    Ok(())
}
