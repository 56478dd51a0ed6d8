//! Pickles read by other readers: a small unpickler of the instructions that PyTorch's viewer supports, and Python.

use std::process::Command;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::*;
use crate::storage::history::pickle::ITEMS_EXAMINED;

pub const PYTORCH_2_15: &[u8] = include_bytes!("pytorch-2.15.pickle");

/// Reads a pickle as PyTorch's `MemoryViz.js` does. Panics on every instruction that `MemoryViz.js` lacks, on integers
/// of more than 8 bytes, and on batches larger than the arguments that a call may have.
fn unpickle(mut bytes: &[u8]) -> Value {
    fn take<'a>(bytes: &mut &'a [u8], n: usize) -> &'a [u8] {
        let (head, tail) = bytes.split_at(n);
        *bytes = tail;
        head
    }
    fn int(bytes: &[u8]) -> i64 {
        let sign = if bytes.last().is_some_and(|b| *b >= 0x80) { 0xff } else { 0 };
        let mut wide = [sign; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        i64::from_le_bytes(wide)
    }
    assert_eq!(take(&mut bytes, 1), [0x80], "PROTO");
    assert!((2..=4).contains(&take(&mut bytes, 1)[0]));
    let (mut stack, mut marks, mut memo) = (Vec::<Value>::new(), Vec::new(), Map::new());
    loop {
        match take(&mut bytes, 1)[0] {
            b'.' => break,
            b'(' => marks.push(stack.len()),
            b'N' => stack.push(Value::Null),
            0x88 => stack.push(true.into()),
            0x89 => stack.push(false.into()),
            b'J' => stack.push(int(take(&mut bytes, 4)).into()),
            0x8a => {
                let n = take(&mut bytes, 1)[0] as usize;
                assert!(n <= 8, "an integer of {n} bytes");
                stack.push(int(take(&mut bytes, n)).into());
            }
            b'G' => stack.push(f64::from_be_bytes(take(&mut bytes, 8).try_into().unwrap()).into()),
            b'X' => {
                let n = u32::from_le_bytes(take(&mut bytes, 4).try_into().unwrap()) as usize;
                stack.push(std::str::from_utf8(take(&mut bytes, n)).unwrap().into());
            }
            b'r' => {
                let key = int(take(&mut bytes, 4)).to_string();
                memo.insert(key, stack.last().unwrap().clone());
            }
            b'j' => stack.push(memo[&int(take(&mut bytes, 4)).to_string()].clone()),
            b']' => stack.push(json!([])),
            b'}' => stack.push(json!({})),
            b't' => {
                let items = stack.split_off(marks.pop().unwrap());
                stack.push(items.into());
            }
            b'e' => {
                let items = stack.split_off(marks.pop().unwrap());
                assert!(items.len() <= 1000, "{} items in one batch", items.len());
                stack.last_mut().unwrap().as_array_mut().unwrap().extend(items);
            }
            b'u' => {
                let items = stack.split_off(marks.pop().unwrap());
                let map: &mut Map<_, _> = stack.last_mut().unwrap().as_object_mut().unwrap();
                for pair in items.chunks(2) {
                    let old = map.insert(pair[0].as_str().unwrap().to_owned(), pair[1].clone());
                    assert_eq!(old, None, "{} is there twice", pair[0]);
                }
            }
            opcode => panic!("the viewer does not know the instruction {:?}", opcode as char),
        }
    }
    assert!(bytes.is_empty() && stack.len() == 1 && marks.is_empty());
    stack.pop().unwrap()
}

/// Returns a snapshot with more than two batches of entries, names in several scripts, addresses above 2^31, and all
/// fields filled.
fn rich() -> Result<Snapshot> {
    let rounds = if cfg!(miri) { 20 } else { 1500 };
    let toy = with_context("προς τα εμπρός", || {
        let mut toy = Toy::new(5000)?;
        for i in 0..rounds {
            toy.alloc(513 + i, u64::from(i as u32 % 3));
            toy.free(i as usize, i % 3 > 0);
        }
        Result::Ok(toy)
    })?;
    toy.history.record(TraceAction::Oom, 5 << 30, 6 << 30, 2);
    toy.history.record(TraceAction::Snapshot, 0, 0, 0);
    annotate("後退 🦀 \"quoted\" \\ \n", || ());
    let snapshot = toy.snapshot();
    assert!(snapshot.device_traces[0].len() as u64 > rounds && !snapshot.external_annotations.is_empty());
    Ok(snapshot)
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn pickles_are_readable_by_the_viewer() -> Result<()> {
    let snapshot = rich()?;
    let value = unpickle(&snapshot.to_pickle()?);
    assert_eq!(value, serde_json::from_str::<Value>(&snapshot.to_json()?).unwrap());

    // PyTorch's field names and types, written down here instead of derived from the crate's code.
    assert_eq!(keys(&value), ["allocator_settings", "device_traces", "external_annotations", "segments"]);
    for segment in value["segments"].as_array().unwrap() {
        let ints = ["active_size", "address", "allocated_size", "device", "requested_size", "stream", "total_size"];
        assert!(ints.iter().all(|key| segment[key].is_i64()), "{segment}");
        assert!(["small", "large"].contains(&segment["segment_type"].as_str().unwrap()));
        assert_eq!(segment["segment_pool_id"].as_array().unwrap().len(), 2);
        assert!(segment["is_expandable"].is_boolean() && segment["frames"].is_array());
        let sum = |states: &[&str], key: &str| -> i64 {
            let blocks = segment["blocks"].as_array().unwrap().iter();
            blocks.filter(|b| states.contains(&b["state"].as_str().unwrap())).map(|b| b[key].as_i64().unwrap()).sum()
        };
        let (all, active) =
            (["active_allocated", "active_pending_free", "inactive"], ["active_allocated", "active_pending_free"]);
        assert_eq!(segment["total_size"], sum(&all, "size"));
        assert_eq!(segment["active_size"], sum(&active, "size"));
        assert_eq!(segment["requested_size"], sum(&active, "requested_size"));
        assert_eq!(segment["allocated_size"], sum(&["active_allocated"], "size"));
        for block in segment["blocks"].as_array().unwrap() {
            assert_eq!(keys(block), ["address", "frames", "requested_size", "size", "state"]);
        }
    }
    for entry in value["device_traces"][0].as_array().unwrap() {
        let addr = if entry["action"] == "oom" { "device_free" } else { "addr" };
        assert!([addr, "size", "stream", "time_us"].iter().all(|key| entry[key].is_i64()), "{entry}");
        assert_eq!(entry.as_object().unwrap().len(), 7, "no category, no other: {entry}");
    }
    let first = &value["device_traces"][0][0];
    let frames = first["frames"].as_array().unwrap();
    assert_eq!(frames.last(), Some(&json!({"filename": "", "line": 0, "name": "προς τα εμπρός"})));
    assert_eq!(first["compile_context"], "προς τα εμπρός");
    assert_eq!(value["device_traces"][0].as_array().unwrap().last().unwrap()["compile_context"], "N/A");
    let spans = value["external_annotations"].as_array().unwrap();
    assert!(spans.iter().any(|a| a["stage"] == "START") && spans.iter().any(|a| a["stage"] == "END"));
    Ok(())
}

#[test]
fn too_large_is_an_error() -> Result<()> {
    let mut snapshot = Toy::after(10, &[(0, 1)])?.snapshot();
    snapshot.segments[0].address = 1 << 63;
    assert!(snapshot.to_pickle().is_err() && snapshot.to_json().is_err() && snapshot.check().is_err());
    Ok(())
}

#[test]
fn files_round_trip_and_agree_with_python() -> Result<()> {
    let (dir, snapshot) = (tempfile::tempdir().unwrap(), rich()?);
    for name in ["a.pickle", "a.pkl", "a.json"] {
        snapshot.save(dir.path().join(name))?;
        assert_eq!(Snapshot::load(dir.path().join(name))?, snapshot);
    }
    assert!(snapshot.save(dir.path().join("a.txt")).is_err());
    assert!(Snapshot::load(dir.path().join("none.json")).is_err());
    std::fs::write(dir.path().join("bad.pickle"), b"\x80\x03}(").unwrap();
    std::fs::write(dir.path().join("bad.json"), b"{\"segments\": 3}").unwrap();
    assert!(Snapshot::load(dir.path().join("bad.pickle")).is_err());
    assert!(Snapshot::load(dir.path().join("bad.json")).is_err());

    if cfg!(miri) {
        return Ok(()); // Miri cannot start programs
    }
    // Python's own pickle and json agree, if Python is installed.
    let script = "import json, pickle, sys\n\
        a = pickle.load(open(sys.argv[1] + '/a.pickle', 'rb'))\n\
        assert all(type(s['segment_pool_id']) is tuple and len(s['segment_pool_id']) == 2 for s in a['segments'])\n\
        assert json.loads(json.dumps(a)) == json.load(open(sys.argv[1] + '/a.json'))";
    if let Ok(output) = Command::new("python3").arg("-c").arg(script).arg(dir.path()).output() {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// A stack of many frames that is used many times is decoded only once.
#[test]
fn a_shared_stack_is_decoded_once() {
    const FRAMES: usize = 1000;
    const USES: usize = 3000;
    let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let line = [&text("line")[..], b"K\x07"].concat();
    let frame = [&b"}("[..], &text("filename"), &text("a.py"), &line, &text("name"), &text("f"), b"uq\x01"].concat();
    let again = [b'h', 1].repeat(FRAMES - 1);
    let stack = [&b"]("[..], &frame, &again, b"eq\x00"].concat();
    let event = |frames: &[u8]| {
        let action = [&b"}("[..], &text("action"), &text("snapshot"), &text("size"), b"K\0"].concat();
        [&action, &text("frames"), frames, b"u"].concat()
    };
    let events = [&b"]("[..], &event(&stack), &event(&[b'h', 0]).repeat(USES - 1), b"e"].concat();
    let traces = [&text("device_traces")[..], b"](", &events, b"e"].concat();
    let pickle = [&b"\x80\x04}("[..], &text("segments"), b"]", &traces, b"u."].concat();
    let before = ITEMS_EXAMINED.get();
    let snapshot = Snapshot::from_pickle(&pickle).unwrap();
    let events = &snapshot.device_traces[0];
    assert_eq!((events.len(), events[0].frames.len(), events[0].frames[0].line), (USES, FRAMES, 7));
    assert!(events.iter().all(|event| Arc::ptr_eq(&event.frames, &events[0].frames)));
    assert_eq!(ITEMS_EXAMINED.get() - before, FRAMES);
}

/// A snapshot written by Python's pickle (protocol 4: memo, short strings, integers of 5 to 7 bytes). It has fields of
/// PyTorch that claystone lacks, and lacks fields that old versions of PyTorch lack.
#[test]
fn reads_pytorch_pickles() -> Result<()> {
    let snapshot = Snapshot::from_pickle(include_bytes!("pytorch.pickle"))?;
    snapshot.check()?;
    let [segment] = &snapshot.segments[..] else { panic!("{snapshot:?}") };
    assert_eq!((segment.address, segment.total_size), (0x7f12_3400_0000, 2 << 20));
    assert_eq!(segment.segment_pool_id, (0, 0));
    assert_eq!(segment.blocks[1].address, 0x7f12_3400_0400, "filled in");
    assert_eq!(segment.blocks[1].state, BlockState::ActivePendingFree, "by its old name");
    let frames = [Frame { filename: "train.py".into(), line: 12, name: "step".into() }];
    assert_eq!(*segment.blocks[0].frames, frames);
    let trace = &snapshot.device_traces[0];
    assert_eq!(*trace[1].frames, frames);
    assert!(Arc::ptr_eq(&segment.blocks[0].frames, &trace[1].frames), "stacks of the same frames are one");
    assert_eq!((trace[3].action, trace[3].addr), (TraceAction::Oom, 5 << 30));
    assert_eq!(snapshot.allocator_settings["max_split_size"], Setting::Int(-1));
    Ok(())
}

proptest::proptest! {
    /// Reading a damaged file gives an error or another snapshot, but never panics.
    #[test]
    fn damaged_files_never_panic(at in 0_usize..1000, byte: u8, cut in 0_usize..1100) {
        let mut bytes = include_bytes!("pytorch.pickle").to_vec();
        let at = at % bytes.len();
        bytes[at] = byte;
        bytes.truncate(cut);
        _ = Snapshot::from_pickle(&bytes).map(|s| (s.check(), s.to_string(), s.to_pickle()));
    }
}

/// A snapshot of PyTorch 2.15, written by Python's pickle: `annotate` events, metadata and pools of events, host memory of device -1.
#[test]
fn reads_pytorch_2_15_pickles() -> Result<()> {
    let snapshot = Snapshot::from_pickle(PYTORCH_2_15)?;
    snapshot.check()?;
    let actions: Vec<_> = snapshot.device_traces[0].iter().map(|entry| entry.action).collect();
    use TraceAction::{Alloc, FreeCompleted, FreeRequested, Oom, Other, SegmentAlloc};
    let expected = [SegmentAlloc, Alloc, Other, Alloc, FreeRequested, FreeCompleted, Alloc, FreeRequested, Oom];
    assert_eq!(actions[..9], expected);
    let [host] = &snapshot.host_segments[..] else { panic!("{:?}", snapshot.host_segments) };
    assert_eq!((host.device, host.total_size, host.blocks[0].frames[0].line), (u32::MAX, 4096, 7));
    assert_eq!(snapshot.host_traces.iter().map(|entry| entry.addr).collect::<Vec<_>>(), [host.address; 2]);
    assert_eq!(snapshot.allocator_settings["graph_capture_record_stream_reuse"], Setting::Bool(false));
    assert_eq!(snapshot.peak_memory()[0].bytes, 5000);
    assert_eq!(Snapshot::from_pickle(&snapshot.to_pickle()?)?, snapshot, "host memory and unknown events are kept");
    assert_eq!(Snapshot::from_json(&snapshot.to_json()?)?, snapshot);
    Ok(())
}

/// Names that a later version of PyTorch may add are read as the names that the viewers treat in the same way.
#[test]
fn unknown_names_and_large_integers_are_read() -> Result<()> {
    let text = r#"{"segments": [{"device": 0, "address": 18446744073709551104, "total_size": 512, "stream": 9223372036854775808,
        "segment_type": "huge", "new": [1, {"a": 2}], "blocks":
        [{"address": 18446744073709551104, "size": 512, "requested_size": 1, "state": "lent", "new": null}]}],
        "device_traces": [[{"action": "moved", "new": 1}]], "new": {"b": []}}"#;
    let snapshot = Snapshot::from_json(text)?;
    let segment = &snapshot.segments[0];
    assert_eq!((segment.address, segment.stream), (u64::MAX - 511, 1 << 63));
    assert_eq!((segment.segment_type, segment.blocks[0].state), (SegmentType::Large, BlockState::Inactive));
    assert_eq!(snapshot.device_traces[0][0], TraceEntry::new(TraceAction::Other, 0, 0));
    _ = snapshot.to_string();
    let address = |long: &[u8]| {
        let text = |text: &str| [&[0x8c, text.len() as u8], text.as_bytes()].concat();
        let entry = [&b"}("[..], &text("action"), &text("alloc"), &text("addr"), &[0x8a, long.len() as u8], long, b"u"];
        let traces = [&text("device_traces")[..], b"](](", &entry.concat(), b"ee"].concat();
        Snapshot::from_pickle(&[&b"\x80\x04}("[..], &text("segments"), b"]", &traces, b"u."].concat())
    };
    assert_eq!(address(&[0, 0, 0, 0, 0, 0, 0, 0xff, 0])?.device_traces[0][0].addr, 0xff << 56);
    assert!(address(&[0, 0, 0, 0, 0, 0, 0, 0, 1]).is_err(), "2^64");
    Ok(())
}
