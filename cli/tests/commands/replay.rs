//! Runs the command `claystone replay` as a user would.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use claystone::storage::{BlockInfo, BlockState, CsvAction, CsvLog, SegmentInfo, Snapshot, TraceAction, TraceEntry};
use serde_json::Value;
use tempfile::TempDir;

const KEYS: [&str; 10] = [
    "trace",
    "backend",
    "peak_requested",
    "peak_reserved",
    "utilisation",
    "segments",
    "driver_calls",
    "ns_per_pair",
    "planned",
    "min_capacity",
];

fn run_command(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_claystone"));
    command.args(args).env_remove("CLAYSTONE_ALLOC_CONF").output().unwrap()
}

fn replay(files: &[&Path], args: &[&str]) -> Output {
    let files: Vec<&str> = files.iter().map(|file| file.to_str().unwrap()).collect();
    run_command(&[&["replay"], &files[..], args].concat())
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Runs a replay with `--json`, which must succeed, and returns the printed objects.
fn json(files: &[&Path], args: &[&str]) -> Vec<Value> {
    let output = replay(files, &[args, &["--json"]].concat());
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn number(row: &Value, key: &str) -> u64 {
    row[key].as_u64().unwrap_or_else(|| panic!("{key} of {row}"))
}

/// Runs a replay, which must fail with exit code 1, and returns its standard error.
fn error_output(files: &[&Path], args: &[&str]) -> String {
    let output = replay(files, args);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    text(&output.stderr).to_owned()
}

/// Returns the paths of the traces in the repository.
fn traces() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("tests/data/traces");
    let mut files: Vec<PathBuf> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|ending| ending == "trace"));
    files.sort();
    assert_eq!(files.len(), 8);
    files
}

/// Reads a trace in this crate's text format. Returns the block's name and its bytes for each event; 0 bytes for a free.
fn events(file: &Path) -> Vec<(u64, u64)> {
    let line = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        (words[1].parse().unwrap(), words.get(2).map_or(0, |bytes| bytes.parse().unwrap()))
    };
    std::fs::read_to_string(file).unwrap().lines().filter(|l| !l.is_empty()).map(line).collect()
}

/// Returns the peak of live bytes, with each block rounded up to a multiple of `unit` bytes.
fn peak(events: &[(u64, u64)], unit: u64) -> u64 {
    let mut sizes = std::collections::HashMap::new();
    let (mut live, mut peak) = (0, 0);
    for &(id, bytes) in events {
        match bytes {
            0 => live -= sizes.remove(&id).unwrap(),
            _ => {
                let bytes = bytes.next_multiple_of(unit);
                live += bytes;
                sizes.insert(id, bytes);
            }
        }
        peak = peak.max(live);
    }
    peak
}

#[test]
fn every_trace_replays_with_every_allocator() {
    let files = traces();
    let paths: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let rows = json(&paths, &["--backend", "all"]);
    let expected = files.iter().flat_map(|file| ["caching", "pool", "direct"].map(|backend| (file, backend)));
    assert_eq!(rows.len(), 24);
    for (row, (file, backend)) in rows.iter().zip(expected) {
        let keys: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        let mut sorted = KEYS;
        sorted.sort_unstable(); // a JSON parser may not keep the order of keys
        let mut found = keys.clone();
        found.sort_unstable();
        assert_eq!(found, sorted);
        assert_eq!((row["trace"].as_str(), row["backend"].as_str()), (file.to_str(), Some(backend)));
        let (events, requested, reserved) = (events(file), number(row, "peak_requested"), number(row, "peak_reserved"));
        assert_eq!(requested, peak(&events, 1), "{row}");
        assert!(requested <= reserved && number(row, "segments") > 0, "{row}");
        let utilisation = row["utilisation"].as_f64().unwrap();
        assert!((utilisation - requested as f64 / reserved as f64).abs() < 1e-9, "{row}");
        assert!(number(row, "driver_calls") >= 2 * number(row, "segments"), "each is made and committed: {row}");
        assert!(row["ns_per_pair"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["planned"].is_null() && row["min_capacity"].is_null(), "{row}");
        if backend == "direct" {
            let unit = if events.iter().all(|event| event.1 < 512) { 1 } else { 512 };
            assert_eq!(reserved, peak(&events, unit), "a buffer a block: {row}");
            let (made, freed) = events.iter().fold((0, 0), |(a, f), e| if e.1 > 0 { (a + 1, f) } else { (a, f + 1) });
            assert!(number(row, "driver_calls") >= 2 * made + freed, "made, committed, released: {row}");
        }
    }
}

/// MiB reserved by PyTorch's own allocator for the MiniMalloc traces and `mnn_2`, measured with a driver that only counts bytes.
const PYTORCH_RESERVED_MIB: [u64; 7] = [2444, 3006, 4094, 1726, 3106, 1516, 976];

#[test]
fn peaks_equal_or_undercut_pytorchs() {
    let mut files = traces();
    files.retain(|file| !file.ends_with("mnn_1.trace"));
    let paths: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let theirs = json(&paths, &["--config", "segments:pytorch"]);
    let ours = json(&paths, &[]);
    for ((theirs, ours), mib) in theirs.iter().zip(&ours).zip(PYTORCH_RESERVED_MIB) {
        assert_eq!(number(theirs, "peak_reserved"), mib << 20, "{theirs}");
        assert!(number(ours, "peak_reserved") <= mib << 20, "{ours}");
    }
}

#[test]
fn plans_contain_every_block() {
    let files = traces();
    let paths: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    for (row, file) in json(&paths, &["--plan"]).iter().zip(&files) {
        let events = events(file);
        let unit = if events.iter().all(|event| event.1 < 512) { 1 } else { 512 };
        let (planned, least) = (number(row, "planned"), peak(&events, unit));
        assert!(least <= planned && planned < 2 * least, "{row}"); // a time limit makes the result depend on the machine
        if file.ends_with("mnn_1.trace") || file.ends_with("mnn_2.trace") {
            assert_eq!(planned, least, "{row}");
        }
    }
}

#[test]
fn min_capacity_is_minimal() {
    let file = &traces()[7];
    let row = json(&[file], &["--min-capacity", "--config", "compaction:False"]).remove(0);
    let (least, capacity) = (number(&row, "peak_requested"), number(&row, "min_capacity"));
    assert!(least <= capacity, "{row}");
    // A device of this capacity survives three passes; a device with 1 % less does not.
    let with = |capacity: u64| {
        let capacity = capacity.to_string();
        replay(&[file], &["--capacity", &capacity, "--passes", "3", "--json", "--config", "compaction:False"])
    };
    assert!(with(capacity).status.success(), "{row}");
    let smaller = with(capacity - capacity / 100);
    assert_eq!(smaller.status.code(), Some(1), "{row}");
    assert!(text(&smaller.stderr).contains("out of memory"), "{smaller:?}");
    // Without caching, a capacity equal to the peak of live bytes suffices.
    let row = json(&[file], &["--min-capacity", "--backend", "direct"]).remove(0);
    let least = peak(&events(file), 512);
    assert!((least..=least + least / 1000).contains(&number(&row, "min_capacity")), "{row}");
}

/// MiB of the smallest device that suffices for PyTorch's own allocator, measured as for [`PYTORCH_RESERVED_MIB`].
const PYTORCH_MIN_CAPACITY_MIB: [u64; 7] = [1876, 1916, 2002, 1646, 2058, 1328, 650];

/// docs/notebook/allocator.md explains why the first trace needs up to 1 % more than in PyTorch.
#[test]
fn without_compaction_one_trace_needs_more_than_in_pytorch() {
    let mut files = traces();
    files.retain(|file| !file.ends_with("mnn_1.trace"));
    let paths: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let rows = json(&paths, &["--min-capacity", "--config", "compaction:False"]);
    for (i, (row, mib)) in rows.iter().zip(PYTORCH_MIN_CAPACITY_MIB).enumerate() {
        let most = if i == 0 { mib + mib / 100 } else { mib };
        assert!(number(row, "min_capacity") >> 20 <= most, "{row}");
    }
    let whole = json(&paths, &["--min-capacity", "--config", "compaction:False,max_split_size_mb:64"]);
    for (row, mib) in whole.iter().zip(PYTORCH_MIN_CAPACITY_MIB) {
        assert!(number(row, "min_capacity") >> 20 < mib, "{row}");
    }
}

#[test]
fn other_formats_of_the_same_events_give_the_same_figures() {
    let folder = TempDir::new().unwrap();
    let file = &traces()[0];
    let events = events(file);
    let mut sizes = std::collections::HashMap::new();
    let csv = folder.path().join("a.log");
    let log = CsvLog::new(std::fs::File::create(&csv).unwrap()).unwrap();
    let mut entries = Vec::new();
    for (id, bytes) in events {
        let addr = (id + 1) << 32; // addresses far apart, so that blocks do not overlap
        let entry = |action, size| TraceEntry::new(action, addr, size);
        if bytes > 0 {
            sizes.insert(addr, bytes);
            log.log(CsvAction::Allocate, addr, bytes, 0).unwrap();
            entries.push(entry(TraceAction::Alloc, bytes));
        } else {
            let size = sizes.remove(&addr).unwrap();
            log.log(CsvAction::Free, addr, size, 0).unwrap();
            entries.push(entry(TraceAction::FreeRequested, size));
            entries.push(entry(TraceAction::FreeCompleted, size));
        }
    }
    drop(log);
    let mut snapshot = Snapshot::new(vec![], vec![entries]);
    let (pickle, plain) = (folder.path().join("b.pickle"), folder.path().join("c.json"));
    std::fs::write(&pickle, snapshot.to_pickle().unwrap()).unwrap();
    std::fs::write(&plain, snapshot.to_json().unwrap()).unwrap();
    // Removes the first event, the allocation of the first block, as if the recording had begun after it.
    snapshot.device_traces[0].remove(0);
    let late = folder.path().join("d.pickle");
    std::fs::write(&late, snapshot.to_pickle().unwrap()).unwrap();

    let rows = json(&[file, &csv, &pickle, &plain, &late], &["--plan", "--plan-seconds", "600", "--backend", "all"]);
    assert_eq!(rows.len(), 15);
    for (row, ours) in rows[3..].iter().zip(rows[..3].iter().cycle()) {
        for key in KEYS.iter().filter(|key| !["trace", "ns_per_pair"].contains(key)) {
            assert_eq!(row[key], ours[key], "{key} of {row}");
        }
    }
}

#[test]
fn passes_capacity_and_configuration_take_effect() {
    let file = &traces()[7];
    let calls = |args: &[&str]| number(&json(&[file], args)[0], "driver_calls");
    let direct = ["--backend", "direct"];
    assert_eq!(calls(&[&direct[..], &["--passes", "5"]].concat()), 5 * calls(&direct));
    // --config can select the backend too, but --backend has precedence.
    assert_eq!(calls(&["--config", "backend:direct"]), calls(&direct));
    assert_eq!(json(&[file], &["--config", "backend:direct", "--backend", "pool"])[0]["backend"], "pool");
    let reserved = |args: &[&str]| number(&json(&[file], args)[0], "peak_reserved");
    assert!(reserved(&["--capacity", "700MiB"]) <= 700 << 20);
    let blocks = json(&[file], &["--alignment", "1048576", "--backend", "direct"]);
    assert_eq!(number(&blocks[0], "peak_reserved"), peak(&events(file), 1 << 20));
}

#[test]
fn expandable_segments_reserve_whole_pages() {
    let files = traces();
    let paths: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    for row in json(&paths, &["--config", "expandable_segments:True"]) {
        let (peak, reserved) = (number(&row, "peak_requested"), number(&row, "peak_reserved"));
        assert!(reserved >= peak && number(&row, "segments") <= 2, "{row}");
        assert!(reserved.is_multiple_of(if peak < 512 { 8 } else { 4096 }), "{row}");
    }
    // With compaction of segments, a capacity little above the peak of live bytes suffices.
    let row = &json(&[&files[7]], &["--config", "expandable_segments:True", "--min-capacity"])[0];
    let (peak, least) = (number(row, "peak_requested"), number(row, "min_capacity"));
    assert!(least <= peak + peak / 20, "{row}");
}

#[test]
fn host_memory_can_be_the_driver() {
    let folder = TempDir::new().unwrap();
    let small = folder.path().join("small.trace");
    std::fs::write(&small, "a 0 4000000\na 1 600\nf 0\na 2 70000\nf 1\nf 2\n").unwrap();
    for row in json(&[&small], &["--driver", "cpu", "--backend", "all"]) {
        assert_eq!(number(&row, "peak_requested"), 4_000_600);
        assert!(number(&row, "peak_reserved") >= 4_000_600 && number(&row, "driver_calls") > 0, "{row}");
    }
    assert!(error_output(&[&small], &["--driver", "opencl:999"]).contains("opencl:999 is not available"));
    assert!(error_output(&[&small], &["--driver", "cpu", "--min-capacity"]).contains("simulated"));
    assert!(error_output(&[&small], &["--driver", "cpu", "--alignment", "64"]).contains("simulated"));
}

#[test]
fn the_table_is_aligned_and_has_means() {
    let files = traces();
    let output = replay(&[&files[6], &files[7]], &["--plan", "--min-capacity"]);
    assert!(output.status.success());
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    assert_eq!(lines.len(), 4);
    let columns: Vec<&str> = lines[0].split_whitespace().collect();
    assert_eq!(
        columns,
        [
            "trace",
            "backend",
            "requested",
            "reserved",
            "used",
            "segments",
            "calls",
            "ns/pair",
            "planned",
            "used",
            "served",
            "capacity"
        ]
    );
    assert!(lines[1].starts_with("mnn_1.trace") && lines[2].starts_with("mnn_2.trace"), "{lines:?}");
    assert!(lines[2].contains(" 540.02 ") && lines[3].starts_with("mean"), "{lines:?}");
    // Memory served from a plan takes its arena plus the rounding of one segment.
    let cells: Vec<&str> = lines[2].split_whitespace().collect();
    let [planned, served] = [8, 10].map(|at| cells[at].parse::<f64>().unwrap());
    assert!(planned <= served && served <= planned + 2.0, "{lines:?}");
    let end = lines[0].find("requested").unwrap() + "requested".len();
    assert!(lines[2][..end].ends_with("540.02"), "{lines:?}");
    // The last line is the mean of the lines above.
    let used = |line: &str| line.split_whitespace().find_map(|w| w.strip_suffix('%')?.parse::<f64>().ok()).unwrap();
    assert!((used(lines[3]) - (used(lines[1]) + used(lines[2])) / 2.0).abs() <= 0.1001, "{lines:?}");
    // A single trace has no line of means.
    let output = replay(&[&files[7]], &[]);
    assert_eq!(text(&output.stdout).lines().count(), 2);
}

#[test]
fn errors_name_the_line_of_the_trace() {
    let folder = TempDir::new().unwrap();
    let bad = folder.path().join("bad.trace");
    let says = |content: &[u8], what: &str| {
        std::fs::write(&bad, content).unwrap();
        let error = error_output(&[&bad], &["--json"]);
        assert!(error.contains(&format!("bad.trace{what}")), "{error}");
    };
    says(b"a 1 5\n\nf 1\nf 1\n", ":4: block 1 is freed twice");
    says(b"a 1 5\nf 2\n", ":2: block 2 is freed, but was never allocated");
    says(b"a 1 5\na 1 6\n", ":2: block 1 is allocated again");
    says(b"a 1 5\nwhat is this\n", ":2: 'what is this' is neither");
    says(b"Thread,Time,Action,Pointer,Size,Stream\n1,0:0:0.0,grow,0x1,1,0x0\n", ":2: action \"grow\"");
    says(b"not a trace\n", ":1: not a trace: the supported formats are lines 'a ID BYTES'");
    says(b"\xff\xfe\x00", ": not a trace: the supported formats are");
    says(b"\x80\x04nonsense", ": ");
    let missing = error_output(&[&folder.path().join("missing.trace")], &[]);
    assert!(missing.contains("missing.trace: "), "{missing}");
    // Valid traces are replayed nevertheless.
    std::fs::write(&bad, "f 1\n").unwrap();
    let good = &traces()[7];
    let output = replay(&[&bad, good], &["--json"]);
    assert_eq!((output.status.code(), text(&output.stdout).lines().count()), (Some(1), 1));
}

#[test]
fn traces_beyond_the_capacity_are_errors() {
    let error = error_output(&[&traces()[7]], &["--capacity", "500MiB"]);
    assert!(error.contains("mnn_2.trace: caching: allocation") && error.contains("out of memory"), "{error}");
}

#[test]
fn invalid_arguments_are_refused() {
    let file = traces()[7].to_str().unwrap().to_owned();
    for (args, what) in [
        (&["replay"][..], "TRACE"),
        (&["replay", &file, "--backend", "slab"], "caching, pool, direct, all"),
        (&["replay", &file, "--config", "no_such_key:1"], "no_such_key"),
        (&["replay", &file, "--driver", "cuda:0"], "sim, cpu or opencl:N"),
        (&["replay", &file, "--passes", "0"], "--passes"),
        (&["replay", &file, "--capacity", "5MB"], "KiB, MiB or GiB"),
        (&["replay", &file, "--alignment", "3"], "power of two"),
    ] {
        let output = run_command(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(what), "{}", text(&output.stderr));
    }
}

#[test]
fn snapshots_are_summarised() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("a.pickle");
    Snapshot::default().save(&file).unwrap();
    let output = run_command(&["snapshot", file.to_str().unwrap()]);
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("a.pickle:") && text(&output.stdout).contains("reserved"));

    let block = BlockInfo::new(1 << 20, 4096, BlockState::ActiveAllocated);
    let later = folder.path().join("b.json");
    Snapshot::new(vec![SegmentInfo::new(vec![block])], vec![]).save(&later).unwrap();
    let [file_name, later_name] = [&file, &later].map(|path| path.to_str().unwrap());
    let output = run_command(&["snapshot", later_name, "--since", file_name]);
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("4096 bytes in 1 blocks"), "{}", text(&output.stdout));
    let output = run_command(&["snapshot", later_name, "--since", later_name]);
    assert!(text(&output.stdout).contains("0 bytes in 0 blocks"), "{}", text(&output.stdout));

    std::fs::write(&file, "none").unwrap();
    let output = run_command(&["snapshot", later_name, "--since", file_name]);
    assert!(output.status.code() == Some(1) && text(&output.stderr).contains("snapshot"));
    let output = run_command(&["snapshot", file.to_str().unwrap()]);
    assert!(output.status.code() == Some(1) && text(&output.stderr).contains("snapshot"));
}

#[test]
fn help_explains_itself() {
    let help = run_command(&["replay", "--help"]);
    let words = ["Examples:", "--min-capacity", "a ID BYTES", "Thread,Time,Action,Pointer,Size,Stream", "alignment 1"];
    for word in words {
        assert!(text(&help.stdout).contains(word), "{word}");
    }
    let devices = run_command(&["devices"]);
    assert!(devices.status.success() && text(&devices.stdout).contains("cpu: "));
}

/// Real devices copy a block through the host if it moves by less than its size. A simulated device must only count the bytes.
#[test]
fn simulated_memory_may_be_larger_than_the_hosts() {
    let folder = TempDir::new().unwrap();
    let (file, unit) = (folder.path().join("huge.trace"), 64usize << 30);
    let (part, most) = (unit / 128, 3 * unit);
    // Repeats an allocation until the allocator splits segments, and then frees the blocks on both sides of a live block.
    let mut trace: String = (0..200).map(|i| format!("a {i} {most}\nf {i}\n")).collect();
    let (rest, double) = (2 * unit - part, 2 * unit);
    trace += &format!("a 200 {part}\na 201 {rest}\na 202 {unit}\nf 200\nf 201\na 203 {double}\nf 202\nf 203\n");
    std::fs::write(&file, trace).unwrap();
    let row = json(&[&file], &["--min-capacity", "--passes", "1"]).remove(0);
    assert_eq!(number(&row, "min_capacity"), most as u64, "{row}");
    assert_eq!(number(&row, "peak_requested"), most as u64);
}
