//! Tests of the readers: valid input in each format, and invalid input.

use claystone::storage::{BlockInfo, BlockState, SegmentInfo, Snapshot, TraceAction, TraceEntry};
use proptest::prelude::*;

use super::*;

fn one(text: &str) -> Trace {
    let traces = Trace::read(text.as_bytes(), "t").unwrap();
    assert_eq!(traces.len(), 1);
    traces.into_iter().next().unwrap()
}

/// Returns the line and the message of an error.
fn fault(bytes: impl AsRef<[u8]>) -> (usize, String) {
    let fault = Trace::read(bytes.as_ref(), "t").unwrap_err();
    (fault.line, fault.what)
}

const fn a(block: usize, bytes: usize) -> Event {
    Event::Allocate { block, bytes, stream: 0 }
}

const fn f(block: usize) -> Event {
    Event::Free { block }
}

/// The events of the same trace in all formats: blocks 0 and 1 overlap, and block 2 reuses the name of block 0 and stays live.
const EVENTS: [Event; 5] = [a(0, 1000), a(1, 600), f(0), a(2, 300), f(1)];
const TEXT: &str = "# a step\n\na 7 1000\n  a 8 600 # bytes\nf 7\na 9 0\na 7 300\nf 9\nf 8\n";
const CSV: &str = "Thread,Time,Action,Pointer,Size,Stream
1,10:05:43.000001,allocate,0x7f10,1000,0x0
1,10:05:43:000002,allocate,0x7f20,600,0x0
2,10:05:43.000003,free,0x7f10,1000,0x0
2,10:05:43.000004,allocate failure,0x0,99999999,0x0

2,10:05:43.000005,allocate,7f10,300,0x0
1,10:05:43.000006,free,(nil),0,0x0
1,10:05:43.000007,free,0x7f20,600,0x0
";

fn snapshot(entries: Vec<TraceEntry>, live: &[(u64, u64)]) -> Snapshot {
    let block = |&(address, requested_size): &(u64, u64)| {
        let mut block = BlockInfo::new(address, 1024, BlockState::ActiveAllocated);
        block.requested_size = requested_size;
        block
    };
    Snapshot::new(vec![SegmentInfo::new(live.iter().map(block).collect())], vec![entries])
}

fn from_snapshot(snapshot: &Snapshot) -> Trace {
    let traces = Trace::read(&snapshot.to_pickle().unwrap(), "t").unwrap();
    assert_eq!(traces, Trace::read(snapshot.to_json().unwrap().as_bytes(), "t").unwrap());
    assert_eq!(traces.len(), 1);
    traces.into_iter().next().unwrap()
}

#[test]
fn every_format_gives_the_same_trace() {
    use TraceAction::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc};
    let text = one(TEXT);
    assert_eq!(text.events, EVENTS);
    assert_eq!((text.blocks, text.peak_requested, text.largest, text.streams), (3, 1600, 1000, 1));
    assert_eq!(one(CSV), text);
    let entries = vec![
        TraceEntry::new(SegmentAlloc, 4096, 2 << 20),
        TraceEntry::new(Alloc, 4096, 1000),
        TraceEntry::new(Alloc, 8192, 600),
        TraceEntry::new(FreeRequested, 4096, 1000),
        TraceEntry::new(FreeCompleted, 4096, 1000),
        TraceEntry::new(Alloc, 4096, 300),
        TraceEntry::new(FreeRequested, 8192, 600), // another stream still uses the block
    ];
    assert_eq!(from_snapshot(&snapshot(entries, &[(4096, 300)])), text);
}

#[test]
fn blocks_older_than_the_history_are_allocated_first() {
    use TraceAction::{Alloc, FreeCompleted, FreeRequested};
    let entries = vec![
        TraceEntry::new(FreeCompleted, 1024, 111), // the free was requested before the history
        TraceEntry::new(Alloc, 1024, 50),
        TraceEntry::new(FreeRequested, 2048, 222),
        TraceEntry::new(FreeCompleted, 2048, 222),
        TraceEntry::new(FreeRequested, 1024, 50),
        TraceEntry::new(FreeCompleted, 1024, 50),
    ];
    let trace = from_snapshot(&snapshot(entries, &[(4096, 333)]));
    assert_eq!(trace.events, [a(0, 111), a(1, 222), a(2, 333), f(0), a(3, 50), f(1), f(3)]);
    // Without a history, the trace has only the live blocks.
    let trace = from_snapshot(&snapshot(vec![], &[(4096, 5), (5120, 6)]));
    assert_eq!(trace.events, [a(0, 5), a(1, 6)]);
}

#[test]
fn a_snapshot_of_two_devices_gives_two_traces() {
    let mut both = snapshot(vec![TraceEntry::new(TraceAction::Alloc, 0, 7)], &[]);
    both.device_traces.push(vec![TraceEntry::new(TraceAction::Alloc, 0, 8)]);
    let traces = Trace::read(&both.to_pickle().unwrap(), "t").unwrap();
    let seen: Vec<_> = traces.iter().map(|t| (t.name.as_str(), t.events[0])).collect();
    assert_eq!(seen, [("t (device 0)", a(0, 7)), ("t (device 1)", a(0, 8))]);
}

#[test]
fn streams_are_numbered_by_first_use() {
    let line = |stream, pointer| format!("1,0:0:0.0,allocate,{pointer},8,{stream}\n");
    let log = format!("{}{}{}", line("0x7fa0", 1), line("0", 2), line("0x7fa0", 3));
    let streams: Vec<usize> = (one(&log).events.iter())
        .map(|event| match event {
            Event::Allocate { stream, .. } => *stream,
            Event::Free { .. } => unreachable!("nothing is freed"),
        })
        .collect();
    assert_eq!(streams, [0, 1, 0]);
}

#[test]
fn lifetimes_match_the_events() {
    let lives: Vec<_> = one(TEXT).lifetimes().iter().map(|l| (l.start, l.end, l.bytes)).collect();
    assert_eq!(lives, [(0, 2, 1000), (1, 4, 600), (3, 5, 300)]);
}

#[test]
fn sizes_below_a_block_are_replayed_with_alignment_1() {
    assert_eq!((one("a 0 511").alignment(), one("a 0 10\na 1 512").alignment()), (1, 512));
}

#[test]
fn errors_name_the_line() {
    let says = |text: &str, line, what: &str| {
        let (at, message) = fault(text);
        assert!(at == line && message.contains(what), "{text:?}: {at}: {message}");
    };
    says("a 1 5\nf 1\n# twice\nf 1", 4, "block 1 is freed twice");
    says("a 1 5\nf 2", 2, "block 2 is freed, but was never allocated");
    says("a 1 5\na 1 5", 2, "block 1 is allocated again, though it was not freed");
    says("a 1 5\na 2 x", 2, "'x' is not a number of bytes");
    says("a 1 -5", 1, "'-5' is not a number of bytes");
    says("a one 5", 1, "'one' is not the number of a block");
    says("a 1 5\nb 1", 2, "'b 1' is neither 'a ID BYTES' nor 'f ID'");
    says("a 1 5 6", 1, "neither");
    says("a 1 18446744073709551615", 1, "no device has that much");
    says(&format!("a 1 {MAX_LIVE_BYTES}\na 2 1"), 2, "no device has that much");
    says("a 1 0\nf 1\n", 0, "no allocations");
    let log = |row: &str| format!("{CSV}{row}\n");
    says(&log("1,10:05:43.1,free,0x7f20,600,0x0"), 10, "block 0x7f20 is freed twice");
    says(&log("1,10:05:43.1,free,0xbad,600,0x0"), 10, "block 0xbad is freed, but was never allocated");
    says(&log("1,10:05:43.1,allocate,0x7f10,1,0x0"), 10, "block 0x7f10 is allocated again");
    says(&log("1,10:05:43.1,realloc,0x7f10,1,0x0"), 10, "\"realloc\"");
    says(&log("1,10:05:43.1,free,0x7f10"), 10, "4 columns");
    says(&log("1,10:05:43.1,allocate,pointer,1,0x0"), 10, "\"pointer\"");
}

#[test]
fn errors_of_unknown_files_list_the_formats() {
    for bytes in [&b""[..], b"\n# nothing\n", b"hello\n", b"PK\x03\x04\xff", b"\xff\xfe"] {
        let (_, what) = fault(bytes);
        assert!(what.contains("'a ID BYTES'") && what.contains("RMM") && what.contains("snapshot"), "{what}");
    }
    assert_eq!(fault("# comment\n\nhello\n").0, 3);
    assert!(fault(b"\x80\x04").1.contains("pickle"));
    assert!(fault("{\"segments\":").1.contains("JSON"));
    assert!(fault("{\"segments\":[]}").1.contains("neither events nor segments"));
    let twice = vec![TraceEntry::new(TraceAction::Alloc, 512, 7), TraceEntry::new(TraceAction::Alloc, 512, 7)];
    let what = fault(snapshot(twice, &[]).to_pickle().unwrap()).1;
    assert!(what.starts_with("device_traces[0][1]: block 0x200 is allocated again"), "{what}");
}

/// Checks that blocks are allocated before they are freed and freed at most once, and that the peak matches the events.
fn check(trace: &Trace) {
    let (mut live, mut sum, mut peak) = (vec![], 0, 0);
    for event in &trace.events {
        match *event {
            Event::Allocate { block, bytes, stream } => {
                assert!(block == live.len() && bytes > 0 && stream < trace.streams);
                live.push(Some(bytes));
                sum += bytes as u64;
            }
            Event::Free { block } => sum -= live[block].take().expect("live") as u64,
        }
        peak = peak.max(sum);
    }
    assert_eq!((live.len(), peak), (trace.blocks, trace.peak_requested));
}

/// Generates lines that are often valid, in either text format.
fn line() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => (0..8u8, any::<u32>()).prop_map(|(id, bytes)| format!("a {id} {bytes}")),
        4 => (0..8u8).prop_map(|id| format!("f {id}")),
        1 => (0..8u8, 0..999u32).prop_map(|(p, n)| format!("1,1:2:3.4,allocate,0x{p},{n},0x{p}")),
        1 => (0..8u8).prop_map(|p| format!("1,1:2:3.4,free,0x{p},0,0x0")),
        1 => Just("Thread,Time,Action,Pointer,Size,Stream".to_owned()),
        1 => any::<String>(),
    ]
}

proptest! {
    #[test]
    fn no_lines_make_a_reader_panic(lines in prop::collection::vec(line(), 0..40)) {
        if let Ok(traces) = Trace::read(lines.join("\n").as_bytes(), "t") {
            traces.iter().for_each(check);
        }
    }

    #[test]
    fn no_bytes_make_a_reader_panic(start in prop_oneof![Just(&b""[..]), Just(&b"\x80\x03"[..]), Just(&b"{"[..])],
                                    bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Trace::read(&[start, &bytes].concat(), "t");
    }

    #[test]
    fn no_snapshot_makes_a_reader_panic(
        events in prop::collection::vec((0..4u8, 0..6u64, 0..3u64), 0..30),
        live in prop::collection::vec(0..9u64, 0..4),
        (at, byte) in (any::<prop::sample::Index>(), any::<u8>()),
    ) {
        use TraceAction::{Alloc, FreeCompleted, FreeRequested, Oom};
        let entries = events.iter().map(|&(kind, addr, size)| {
            TraceEntry::new([Alloc, FreeRequested, FreeCompleted, Oom][kind as usize], addr, size)
        });
        let blocks: Vec<_> = live.iter().map(|&addr| (addr, addr)).collect();
        let mut pickle = snapshot(entries.collect(), &blocks).to_pickle().unwrap();
        if let Ok(traces) = Trace::read(&pickle, "t") {
            traces.iter().for_each(check);
        }
        let at = at.index(pickle.len());
        pickle[at] = byte; // damages one byte
        let _ = Trace::read(&pickle, "t");
    }
}
