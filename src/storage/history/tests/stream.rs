//! Pickles read as a stream give the same results as pickles read as a whole.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::pickle::PYTORCH_2_15;
use super::*;

/// Reads the file both ways and compares everything but the events that a stream leaves out.
fn check_stream(path: &Path) -> Result<()> {
    let whole = Snapshot::load(path)?;
    let mut stream = Snapshot::load_in_use(path)?;
    assert!(stream.live_blocks() == whole.live_blocks(), "live_blocks");
    assert!(stream.live_memory() == whole.live_memory(), "live_memory");
    assert!(stream.peak_memory() == whole.peak_memory(), "peak_memory");
    let counts = whole
        .device_traces
        .iter()
        .map(|trace| Setting::Int(trace.len() as i64))
        .chain((!whole.host_traces.is_empty()).then_some(Setting::Int(whole.host_traces.len() as i64)));
    let counts = Setting::List(counts.collect());
    assert_eq!(stream.allocator_settings.remove("trace_events_read"), Some(counts));
    for (kept, all) in stream.device_traces.iter_mut().zip(&whole.device_traces) {
        assert!(
            kept.len() < 2 || kept[1..kept.len() - 1].iter().all(|entry| all.contains(entry)),
            "events are unchanged"
        );
        kept.clone_from(all);
    }
    stream.host_traces.clone_from(&whole.host_traces);
    assert_eq!(stream, whole);
    Ok(())
}

/// Writes a pickle to a file and compares both ways of reading the file.
fn check_bytes(bytes: &[u8]) -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.pickle");
    fs::write(&path, bytes).unwrap();
    check_stream(&path)
}

/// Returns an error's text for a pickle that is read as a stream.
fn refusal(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.pickle");
    fs::write(&path, bytes).unwrap();
    Snapshot::load_in_use(&path).unwrap_err().to_string()
}

fn text(text: &str) -> Vec<u8> {
    [&[0x8c, text.len() as u8], text.as_bytes()].concat()
}

/// Returns a dict whose entries are added one by one, by the instruction SETITEM.
fn dict<'a>(entries: impl IntoIterator<Item = (&'a str, Vec<u8>)>) -> Vec<u8> {
    let entries = entries.into_iter().flat_map(|(key, value)| [text(key), value, b"s".to_vec()].concat());
    b"}".iter().copied().chain(entries).collect()
}

/// Returns a list whose items are added one by one, by the instruction APPEND.
fn list(items: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    b"]".iter().copied().chain(items.into_iter().flat_map(|item| [&item[..], b"a"].concat())).collect()
}

fn event(action: &str, addr: u8, size: u8, time: u8, more: Vec<(&'static str, Vec<u8>)>) -> Vec<u8> {
    let int = |int| vec![b'K', int];
    let plain = [("action", text(action)), ("addr", int(addr)), ("size", int(size)), ("time_us", int(time))];
    dict(plain.into_iter().chain(more))
}

fn frame(line: u8) -> Vec<u8> {
    dict([("filename", text("a.py")), ("line", vec![b'K', line]), ("name", text("f"))])
}

fn snapshot(more: Vec<(&'static str, Vec<u8>)>) -> Vec<u8> {
    let block = |address: u8, state: &str, frames| {
        let int = |int| vec![b'K', int];
        let size = [("size", int(20)), ("requested_size", int(17))];
        dict([("address", int(address)), ("state", text(state)), ("frames", frames)].into_iter().chain(size))
    };
    let blocks = [block(10, "active_allocated", list([frame(1), frame(2)])), block(30, "inactive", list([]))];
    let int = |int| vec![b'K', int];
    let segment = dict([
        ("device", int(0)),
        ("address", int(10)),
        ("total_size", int(40)),
        ("stream", int(0)),
        ("blocks", list(blocks)),
    ]);
    [b"\x80\x04".to_vec(), dict([("segments", list([segment]))].into_iter().chain(more)), b".".to_vec()].concat()
}

#[test]
fn single_items_are_appended() -> Result<()> {
    let frames = || ("frames", list([frame(1), frame(2)]));
    let trace = [
        event("alloc", 10, 20, 1, vec![frames()]),
        event("alloc", 30, 20, 2, vec![("frames", list([]))]),
        event("alloc", 60, 9, 3, vec![frames()]),
        event("free_requested", 30, 20, 4, vec![]),
        event("free_completed", 30, 20, 5, vec![frames()]),
        event("free_completed", 60, 9, 6, vec![]),
        event("annotate", 0, 0, 7, vec![]),
    ];
    check_bytes(&snapshot(vec![("device_traces", list([list(trace), list([])]))]))
}

/// Only events that are in a list belong to a trace, and events may have lists and dicts that this version does not know.
#[test]
fn values_that_are_no_events_of_a_trace_are_skipped() -> Result<()> {
    let inner = || event("alloc", 90, 90, 9, vec![("frames", list([frame(9)]))]);
    let trace = || {
        let unknown = list([dict([("deep", list([inner()]))]), inner()]);
        let more = vec![("last", inner()), ("new", unknown), ("frames", list([frame(1)]))];
        list([event("alloc", 10, 20, 1, more), event("alloc", 60, 9, 2, vec![("frames", list([]))])])
    };
    let other = ("other", dict([("event", inner()), ("frames", list([vec![b'N']])), ("trace", trace())]));
    check_bytes(&snapshot(vec![("latest", inner()), ("device_traces", list([trace()])), other]))?;
    // A key of the snapshot with an event as its value.
    let error = refusal(&snapshot(vec![("device_traces", inner())]));
    assert!(error.contains("invalid type: map"), "{error}");
    Ok(())
}

/// Frames, lists of frames and events that are used more than once, before and after they were converted.
#[test]
fn shared_values_are_kept_until_their_last_use() -> Result<()> {
    let memo = |value: Vec<u8>, key: u8| [&value[..], &[b'q', key]].concat();
    let again = |key: u8| vec![b'h', key];
    let frames = || list([memo(frame(1), 0), again(0), frame(2), again(0)]);
    let trace = list([
        event("alloc", 10, 20, 1, vec![("frames", memo(frames(), 1)), ("other", list([again(0)]))]),
        memo(event("alloc", 30, 20, 2, vec![("frames", again(1)), ("frames_of_other", again(1))]), 2),
        event("alloc", 60, 9, 3, vec![("frames", list([again(0)])), ("used", again(2))]),
        event("free_completed", 30, 20, 4, vec![("frames", again(1))]),
    ]);
    check_bytes(&snapshot(vec![("device_traces", list([trace])), ("unknown", list([again(2), again(1), again(0)]))]))
}

#[test]
fn streams_with_errors_are_refused() {
    let with_frames =
        |frames| snapshot(vec![("device_traces", list([list([event("alloc", 10, 20, 1, vec![("frames", frames)])])]))]);
    let cases: [(Vec<u8>, &str); 8] = [
        (with_frames(list([frame(1), vec![b'N']])), "a frame is not a dict with a file"),
        (with_frames(vec![b'K', 3]), "the frames are not a list of frames"),
        (with_frames(b"]r\x05\0\0\0".to_vec()), "not in order"),
        (with_frames(b"h\x07".to_vec()), "used before it is stored"),
        (with_frames(b"]N".to_vec()), "neither a list nor a dict"),
        (b"\x80\x04e.".to_vec(), "finds no mark"),
        (b"\x80\x04]ia.".to_vec(), "is not one of plain data"),
        (snapshot(vec![]).split_last().unwrap().1.to_vec(), "cut short"),
    ];
    // A stream skips lists of events that are not frames.
    assert!(Snapshot::from_pickle(&with_frames(list([vec![b'N']]))).is_err());
    for (bytes, expected) in cases {
        let error = refusal(&bytes);
        assert!(error.contains(expected), "{error}, not {expected}");
    }
}

/// The device -1 of host memory is `u32::MAX`, and -1 again for Python.
#[test]
fn host_memory_round_trips() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.pickle");
    let snapshot = Snapshot::from_pickle(PYTORCH_2_15)?;
    snapshot.save(&path)?;
    check_stream(&path)?;
    assert_eq!(Snapshot::load_in_use(&path)?.host_segments, snapshot.host_segments);
    assert_eq!(snapshot.host_segments[0].device, u32::MAX);
    let script = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))['host_segments'][0]['device'])";
    if cfg!(miri) {
        return Ok(()); // Miri cannot start programs
    }
    if let Ok(output) = Command::new("python3").args(["-c", script]).arg(&path).output() {
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "-1");
    }
    Ok(())
}

#[test]
fn streams_agree_with_whole_files() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.pickle");
    for file in [PYTORCH_2_15, include_bytes!("pytorch.pickle")] {
        fs::write(&path, file).unwrap();
        check_stream(&path)?;
    }
    assert!(Snapshot::load_in_use(dir.path().join("none.pickle")).is_err());
    Ok(())
}

/// The same snapshots written by each of Python's protocols, which share other values than claystone does.
#[test]
fn streams_of_python_agree() -> Result<()> {
    if cfg!(miri) {
        return Ok(()); // Miri cannot start programs
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.pickle");
    let mut toy = Toy::new(5000)?;
    for i in 0..2000_u32 {
        toy.step((i as u8, i.wrapping_mul(2_654_435_761)));
    }
    let mut snapshot = toy.snapshot();
    let frame = |line| Frame { filename: "a.py".into(), line, name: "f".into() };
    let deep: Arc<[Frame]> = (0..2500).map(frame).collect(); // three batches of frames
    snapshot.device_traces[0].iter_mut().skip(7).step_by(50).for_each(|entry| entry.frames = Arc::clone(&deep));
    snapshot.save(&path)?;
    check_stream(&path)?;
    let script = "import pickle, sys\n\
        for protocol in (2, 3, 4):\n\
        \x20   a = pickle.load(open(sys.argv[1], 'rb'))\n\
        \x20   pickle.dump(a, open(f'{sys.argv[1]}.{protocol}.pickle', 'wb'), protocol)";
    let Ok(output) = Command::new("python3").args(["-c", script]).arg(&path).output() else { return Ok(()) };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for protocol in 2..=4 {
        check_stream(&dir.path().join(format!("a.pickle.{protocol}.pickle")))?;
    }
    Ok(())
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 200 }))]
    #[test]
    fn streams_of_any_history_agree(
        steps in proptest::collection::vec((0_u8..9, proptest::prelude::any::<u32>()), 0..300),
        max_entries in 1_usize..300,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.pickle");
        Toy::after(max_entries, &steps).unwrap().snapshot().save(&path).unwrap();
        check_stream(&path).unwrap();
    }

    /// Reading a damaged file gives an error or another snapshot, but never panics.
    #[test]
    fn damaged_streams_never_panic(which in 0_usize..3, at in 0_usize..9000, byte: u8, cut in 1_usize..9000) {
        let own = || Toy::after(100, &[(0, 77), (1, 5), (0, 900), (2, 1), (3, 3)]).unwrap().snapshot().to_pickle().unwrap();
        let mut bytes = match which {
            0 => PYTORCH_2_15.to_vec(),
            1 => include_bytes!("pytorch.pickle").to_vec(),
            _ => own(),
        };
        let (at, cut) = (at % bytes.len(), cut % (2 * bytes.len()));
        bytes[at] = byte;
        bytes.truncate(cut);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.pickle");
        fs::write(&path, &bytes).unwrap();
        _ = Snapshot::load_in_use(&path).map(|s| (s.check(), s.to_string(), s.to_pickle()));
        _ = Snapshot::from_pickle(&bytes).map(|s| (s.check(), s.to_string(), s.to_pickle()));
    }
}
