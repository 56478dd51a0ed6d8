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
    fn damaged_streams_never_panic(at in 0_usize..4000, byte: u8, cut in 0_usize..4500) {
        let mut bytes = PYTORCH_2_15.to_vec();
        let at = at % bytes.len();
        bytes[at] = byte;
        bytes.truncate(cut);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.pickle");
        fs::write(&path, &bytes).unwrap();
        _ = Snapshot::load_in_use(&path).map(|s| (s.check(), s.to_string(), s.to_pickle()));
        _ = Snapshot::from_pickle(&bytes).map(|s| (s.check(), s.to_string(), s.to_pickle()));
    }
}
