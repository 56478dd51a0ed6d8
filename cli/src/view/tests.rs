//! Tests of pages: the contents of their columns, and that no file makes them panic or run its contents as a script.

use claystone::storage::{BlockInfo, BlockState, Frame, SegmentInfo};
use proptest::prelude::*;

use super::*;

fn entry(action: TraceAction, addr: u64, size: u64, time_us: u64) -> TraceEntry {
    let mut entry = TraceEntry::new(action, addr, size);
    entry.time_us = time_us;
    entry
}

fn segment(blocks: &[(u64, u64, BlockState)]) -> SegmentInfo {
    SegmentInfo::new(blocks.iter().map(|&(address, size, state)| BlockInfo::new(address, size, state)).collect())
}

const NAMES: [&str; 5] = ["block.addr", "block.size", "block.start", "block.requested", "block.done"];

/// Returns the prefix of the column names of the only device.
fn device(blob: &Blob) -> String {
    let [device] = &blob.metadata("devices").as_array().unwrap()[..] else { panic!("one device") };
    format!("d{}", device["device"])
}

/// Returns address, size, start, request and end of each block of the only device.
fn blocks(blob: &Blob) -> Vec<[f64; 5]> {
    let columns = NAMES.map(|name| blob.numbers(&format!("{}.{name}", device(blob))));
    (0..columns[0].len()).map(|i| std::array::from_fn(|column| columns[column][i])).collect()
}

#[test]
fn the_history_is_undone_from_its_end() {
    use BlockState::{ActiveAllocated, ActivePendingFree, Inactive};
    use TraceAction::{Alloc, FreeCompleted, FreeRequested, Oom, SegmentAlloc, SegmentFree};
    let trace = vec![
        entry(FreeCompleted, 4096, 100, 10), // the free was requested before the history
        entry(SegmentFree, 0x9000, 4096, 11),
        entry(Alloc, 4096, 200, 12),
        entry(FreeRequested, 4096, 200, 13),
        entry(SegmentAlloc, 8192, 4096, 14),
        entry(Alloc, 8192, 300, 9), // by another thread, whose clock is slightly behind
        entry(FreeCompleted, 4096, 200, 16),
        entry(Alloc, 4096, 400, 17),
        entry(FreeRequested, 4096, 400, 18),
        entry(Oom, 77, 99, 19),
    ];
    let segments = vec![
        segment(&[(4096, 400, ActivePendingFree), (4496, 600, ActiveAllocated), (5096, 3000, Inactive)]),
        segment(&[(8192, 300, ActiveAllocated), (8492, 3796, Inactive)]),
    ];
    let blob = memory::blob(&Snapshot::new(segments, vec![trace]), true).unwrap();
    let never = 10.0;
    assert_eq!(
        blocks(&blob),
        [
            [4096.0, 100.0, -1.0, 0.0, 0.0],
            [4496.0, 600.0, -1.0, never, never],
            [4096.0, 200.0, 2.0, 3.0, 6.0],
            [8192.0, 300.0, 5.0, never, never],
            [4096.0, 400.0, 7.0, 8.0, never],
        ]
    );
    let of = |name: &str| blob.numbers(&format!("d0.extent.{name}"));
    assert_eq!(of("addr"), [4096.0, 0x9000 as f64, 8192.0]);
    assert_eq!((of("start"), of("end")), (vec![-1.0, -1.0, 4.0], vec![never, 1.0, never]));
    assert_eq!(blob.numbers("d0.event.time"), [0.0, 1.0, 2.0, 3.0, 4.0, 4.0, 6.0, 7.0, 8.0, 9.0]);
    assert_eq!((blob.numbers("d0.oom.event"), blob.numbers("d0.oom.size")), (vec![9.0], vec![99.0]));
}

#[test]
fn extents_follow_mapped_and_unmapped_pages() {
    use TraceAction::{SegmentMap, SegmentUnmap};
    let trace = vec![
        entry(SegmentMap, 0, 100, 0),
        entry(SegmentMap, 100, 100, 1),
        entry(SegmentUnmap, 50, 100, 2),
        entry(SegmentMap, 50, 50, 3),
    ];
    let held = [segment(&[(0, 100, BlockState::Inactive)]), segment(&[(150, 50, BlockState::Inactive)])];
    let blob = memory::blob(&Snapshot::new(held.into(), vec![trace]), true);
    let blob = blob.unwrap();
    let of = |name: &str| blob.numbers(&format!("d0.extent.{name}"));
    let reserved = |state: usize| {
        let lives = |i: &usize| of("start")[*i] < state as f64 && of("end")[*i] >= state as f64;
        (0..of("addr").len()).filter(lives).map(|i| of("size")[i]).sum::<f64>()
    };
    assert_eq!([0, 1, 2, 3, 4].map(reserved), [0.0, 100.0, 200.0, 100.0, 150.0]);
}

#[test]
fn sites_are_stored_once() {
    let stack: std::sync::Arc<[Frame]> =
        ["inner", "outer"].map(|name| Frame { filename: "f.rs".into(), line: 7, name: name.into() }).into();
    let mut trace: Vec<TraceEntry> = (0..4).map(|i| entry(TraceAction::Alloc, 512 * i, 512, i)).collect();
    (trace[0].frames, trace[1].frames) = (stack.clone(), stack[..].into()); // the same stack shared, and as a copy
    (trace[2].frames, trace[2].compile_context) = (stack, "forward".into());
    let blob = memory::blob(&Snapshot::new(vec![], vec![trace]), false).unwrap();
    let sites = blob.numbers("d0.block.site");
    assert!(sites[0] == sites[1] && sites[0] != sites[2] && sites[3] != sites[0] && sites[3] != sites[2], "{sites:?}");
    assert_eq!(blob.numbers("frame.line"), [7.0, 7.0]);
    assert_eq!((blob.numbers("site.end").len(), blob.numbers("site.frames").len()), (3, 4));
    assert!(blob.metadata("texts").as_array().unwrap().iter().any(|text| text == "forward"));
}

#[test]
fn times_of_a_log_increase_past_midnight() {
    let log = b"1,23:59:59.999999,allocate,0x10,100,0x0\n1,00:00:00.000002,free,0x10,100,0x0\n";
    let (_, blob) = read(log, "log").unwrap();
    assert_eq!(blob.numbers("d0.event.time"), [0.0, 3.0, 3.0]);
    assert_eq!(blocks(&blob), [[16.0, 100.0, 0.0, 1.0, 2.0]]);
}

#[test]
fn blocks_live_at_the_end_of_a_trace_stay_live() {
    let (_, blob) = read(b"a 1 1000\na 2 2000\nf 1\n", "t").unwrap();
    let (blocks, device) = (blocks(&blob), device(&blob));
    let never = blob.numbers(&format!("{device}.event.action")).len() as f64;
    let sizes: Vec<(f64, bool)> = blocks.iter().map(|block| (block[1], block[4] < never)).collect();
    assert_eq!(sizes, [(1000.0, true), (2000.0, false)]);
    assert!(!blob.numbers(&format!("{device}.extent.size")).is_empty());
}

#[test]
fn a_page_contains_no_scripts_but_its_own() {
    let hostile = "</script><script>alert(1)</script><!--";
    let mut trace = vec![entry(TraceAction::Alloc, 512, 512, 1)];
    trace[0].compile_context = hostile.into();
    trace[0].frames = [Frame { filename: hostile.into(), line: 1, name: hostile.into() }].into();
    let mut blob = memory::blob(&Snapshot::new(vec![], vec![trace]), true).unwrap();
    blob.set("name", hostile);
    let mut page = Vec::new();
    page::MEMORY.write(blob, &mut page).unwrap();
    let page = String::from_utf8(page).unwrap();
    assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (2, 2));
    assert!(!page.contains("alert(1)") && !page.contains("http:") && !page.contains("https:"));
}

/// Two kernels of one operation, in the wrong order, and events as other programs write them.
const PROFILE: &str = r#"[
{"ph":"M","name":"process_name","pid":"gpu","args":{"name":"device"}},
{"ph":"X","cat":"kernel","name":"gemm","pid":"gpu","tid":7,"ts":150,"dur":20,"args":{"operation":"matmul","bytes":100,"shapes":[[1,2]],"flops":5}},
{"ph":"X","cat":"kernel","name":"gemm","pid":"gpu","tid":7,"ts":120,"dur":20,"args":{"operation":"matmul","bytes":300,"shapes":[[1,2]],"flops":6}},
{"ph":"X","cat":"operation","name":"matmul","pid":0,"tid":1,"ts":"100","dur":30},
{"ph":"X","cat":"launch","name":"gemm","pid":0,"tid":1,"ts":105,"dur":10},
{"ph":"s","id":"0x1","cat":"launch","pid":0,"tid":1,"ts":105},
{"ph":"f","bp":"e","id":"0x1","cat":"launch","pid":"gpu","tid":7,"ts":120},
{"ph":"B","name":"step","pid":0,"tid":2,"ts":90}, {"ph":"E","pid":0,"tid":2,"ts":95}, {"ph":"B","name":"open","pid":0,"tid":2,"ts":130},
null, {"ph":"C","name":"memory","pid":0,"ts":110,"args":{"allocated":1,"reserved":2,"text":"x"}},"#;

#[test]
fn a_profile_has_a_row_for_each_track_and_depth() {
    let blob = profile::blob(PROFILE).unwrap(); // PROFILE has no closing bracket, as after an early exit
    let of = |name: &str| blob.numbers(name);
    let text = |number: f64| blob.metadata("texts")[number as usize].as_str().unwrap().to_owned();
    let names: Vec<String> = of("name").into_iter().map(text).collect();
    assert_eq!(names, ["gemm", "gemm", "matmul", "gemm", "step", "open"]);
    assert_eq!(of("start"), [30.0, 60.0, 10.0, 15.0, 0.0, 40.0]);
    assert_eq!(of("took"), [20.0, 20.0, 30.0, 10.0, 5.0, 40.0]); // the last event has no end
    assert_eq!(of("own"), [20.0, 20.0, 20.0, 10.0, 5.0, 40.0]);
    assert_eq!((of("row.end"), of("row.track")), (vec![2.0, 3.0, 4.0, 6.0], vec![0.0, 1.0, 1.0, 2.0]));
    assert_eq!((of("arrow.from"), of("arrow.to")), (vec![3.0], vec![0.0]));
    assert_eq!(of("template")[0], of("template")[1]);
    let argument = of("argument")[0] as usize;
    assert_eq!(of("numbers")[argument..argument + 2], [300.0, 6.0]);
    let template = blob.metadata("templates")[of("template")[0] as usize].as_str().unwrap();
    assert_eq!(template, r#"[["operation","matmul"],["bytes"],["shapes","[[1,2]]"],["flops"]]"#);
    assert_eq!((of("sample.value"), of("sample.at")), (vec![1.0, 2.0], vec![20.0, 20.0]));
    assert_eq!(blob.metadata("processes")[0]["name"], "device");
}

#[test]
fn files_that_cannot_be_shown_are_errors() {
    let says = |bytes: &[u8], what: &str| {
        let error = read(bytes, "file").map(drop).unwrap_err();
        assert!(error.starts_with("file") && error.contains(what), "{error}");
    };
    says(b"hello", "not a trace");
    says(b"a 1 5\nf 2\n", "file:2: block 2 is freed");
    says(b"1,10:05:43.1,allocate,0x1,1,0x0\nnonsense", "file:2: ");
    says(b"\x80\x04", "pickle");
    says(br#"{"segments":[]}"#, "neither events nor segments");
    says(br#"{"traceEvents":[{"ph":"X"}]}"#, "no events");
    says(br#"{"traceEvents":[{"ph":"X","ts":1}"#, "JSON of a profile");
    says(b"[1,2]", "JSON of a profile");
    says(b"{\"a\":\"\xff\"}", "utf-8");
}

proptest! {
    #[test]
    fn no_history_makes_a_page_panic(
        events in prop::collection::vec((0..9usize, 0..8u64, 0..5u64), 0..40),
        live in prop::collection::vec((0..8u64, 0..4u64), 0..4),
    ) {
        use TraceAction::*;
        const ACTIONS: [TraceAction; 9] =
            [Alloc, FreeRequested, FreeCompleted, SegmentAlloc, SegmentFree, SegmentMap, SegmentUnmap, Snapshot, Oom];
        let far = |addr: u64| if addr == 7 { u64::MAX - 1 } else { addr };
        let trace: Vec<_> = events.iter().map(|&(action, addr, size)| entry(ACTIONS[action], far(addr), size, size)).collect();
        let held = live.iter().map(|&(at, size)| segment(&[(at, size, BlockState::ActiveAllocated)])).collect();
        let snapshot = claystone::storage::Snapshot::new(held, vec![trace]);
        if let Ok(blob) = memory::blob(&snapshot, true) {
            let n = events.len() as f64;
            for [_, _, start, requested, done] in blocks(&blob) {
                prop_assert!(start >= -1.0 && start < n.max(1.0) && requested <= n && done <= n);
            }
        }
    }
}
