//! Live and peak memory of a snapshot written by hand.

use super::*;

fn entry(action: &str, addr: u64, size: u64, time_us: u64, context: &str) -> String {
    format!(
        r#"{{"action": "{action}", "addr": {addr}, "size": {size}, "time_us": {time_us}, "compile_context": "{context}"}}"#
    )
}

#[test]
fn live_blocks_have_context_and_age() -> Result<()> {
    const MIB: u64 = 1 << 20;
    let block = |address: u64, size: u64, state: &str, line: u32| {
        let frames = format!(r#"[{{"filename": "main.rs", "line": {line}, "name": "train"}}]"#);
        let frames = if line == 0 { "[]" } else { &frames };
        format!(
            r#"{{"address": {address}, "size": {size}, "requested_size": {size}, "state": "{state}", "frames": {frames}}}"#
        )
    };
    let blocks = [
        block(0, 3 * MIB, "active_allocated", 7),
        block(3 * MIB, MIB, "active_allocated", 9),
        block(4 * MIB, 2048, "active_pending_free", 7),
        block(4 * MIB + 2048, 512, "active_allocated", 0),
        block(4 * MIB + 2560, 1536, "inactive", 0),
    ];
    let trace = [
        entry("alloc", 3 * MIB, 100, 500_000, "old"), // another block that was allocated before the trace
        entry("alloc", 0, 3 * MIB, 1_000_000, "train/cache"),
        entry("free_requested", 3 * MIB, 100, 1_000_000, ""),
        entry("free_completed", 3 * MIB, 100, 1_000_000, ""),
        entry("alloc", 3 * MIB, MIB, 696_000_000, "N/A"),
        entry("alloc", 4 * MIB, 2048, 700_500_000, "train/cache"),
        entry("free_requested", 4 * MIB, 2048, 700_600_000, ""),
        entry("snapshot", 0, 0, 701_000_000, ""),
    ];
    let text = format!(
        r#"{{"segments": [{{"device": 0, "address": 0, "total_size": {}, "stream": 0, "blocks": [{}]}}],
            "device_traces": [[{}]]}}"#,
        4 * MIB + 4096,
        blocks.join(", "),
        trace.join(", ")
    );
    let snapshot = Snapshot::from_json(&text)?;
    let traced = |context: &str, millis| Some((context.to_string(), Duration::from_millis(millis)));
    let live: Vec<_> = snapshot.live_blocks().into_iter().map(|b| (b.address, b.bytes, b.traced)).collect();
    let expected = [
        (0, 3 * MIB, traced("train/cache", 700_000)),
        (3 * MIB, MIB, traced("", 5000)),
        (4 * MIB, 2048, traced("train/cache", 500)),
        (4 * MIB + 2048, 512, None),
    ];
    assert_eq!(live, expected);
    let printed = snapshot.to_string();
    let expected = "\
in use, by where it was allocated:
      bytes   blocks
   3.00 MiB        2  train (main.rs:7)
   1.00 MiB        1  train (main.rs:9)
      512 B        1  unknown
in use, by context:
      bytes   blocks
   3.00 MiB        2  train/cache
   1.00 MiB        1  no context
      512 B        1  not in the history
in use, by age:
      bytes   blocks
   2.00 KiB        1  under 1 second
   1.00 MiB        1  under 10 seconds
   3.00 MiB        1  older
      512 B        1  not in the history
the largest blocks in use:
      bytes      age
   3.00 MiB  700.0 s  train (main.rs:7), in train/cache
   1.00 MiB    5.0 s  train (main.rs:9)
   2.00 KiB    0.5 s  train (main.rs:7), in train/cache
      512 B  unknown  unknown
";
    assert!(printed.contains(expected), "{printed}");
    // Blocks that the trace frees but does not allocate existed before it. At the peak the block of 300 bytes is in use; the block
    // of 700 bytes was freed before.
    let mut earlier = snapshot.clone();
    let entries = |text: &[String]| serde_json::from_str::<Vec<TraceEntry>>(&format!("[{}]", text.join(", "))).unwrap();
    let at = |line| -> Arc<[Frame]> { [Frame { filename: "peak.rs".into(), line, name: String::new() }].into() };
    let mut trace = entries(&[
        entry("free_completed", 9 * MIB, 700, 1_000_000, ""),
        entry("alloc", 8 * MIB, 5 * MIB, 2_000_000, ""),
        entry("alloc", 16 * MIB, 1000, 3_000_000, ""),
        entry("free_completed", 8 * MIB, 5 * MIB, 3_500_000, ""),
        entry("alloc", 24 * MIB, 4 * MIB, 4_000_000, ""),
        entry("free_completed", 40 * MIB, 300, 4_500_000, ""),
        entry("free_completed", 24 * MIB, 4 * MIB, 4_500_000, ""),
    ]);
    [1, 2, 4].into_iter().for_each(|i| trace[i].frames = at(i as u32));
    earlier.device_traces[0] = trace;
    let [peak] = &earlier.peak_memory()[..] else { panic!("one device has a history") };
    let live = 4 * MIB + 2048 + 512; // bytes in use at the end and all the time before
    assert_eq!((peak.device, peak.bytes, peak.ago), (0, live + 5 * MIB + 1000 + 300, Duration::from_millis(1500)));
    let of = |line: u32| peak.sites.iter().find(|s| s.frames.first().is_some_and(|f| f.line == line)).map(|s| s.bytes);
    assert_eq!((of(1), of(2), of(4), of(7), of(9)), (Some(5 * MIB), Some(1000), None, Some(3 * MIB + 2048), Some(MIB)));
    assert_eq!(peak.sites.iter().find(|s| s.frames.is_empty()).map(|s| (s.bytes, s.blocks)), Some((812, 2)));
    let printed = earlier.to_string();
    let head = "at the peak of device 0's history, 1.5 s before its end, 9.00 MiB in use, by source line:\n";
    let (_, table) = printed.split_once(head).unwrap_or_else(|| panic!("{printed}"));
    assert!(table.lines().nth(1).is_some_and(|line| line.ends_with("5.00 MiB        1  peak.rs:1")), "{table}");
    // Without a history, the text has no tables by age and context.
    let bare = Snapshot { device_traces: vec![vec![]], ..snapshot };
    assert!(!bare.to_string().contains("by age") && !bare.to_string().contains("by context"), "{bare}");
    Ok(())
}

/// A block that keeps its address is new if the trace says that it was allocated again, and otherwise not.
#[test]
fn live_since_finds_new_blocks() -> Result<()> {
    let mut toy = Toy::new(1000)?;
    let sizes = |snapshot: &Snapshot, earlier: &Snapshot| {
        let sites = snapshot.live_since(earlier);
        (sites.iter().map(|site| site.bytes).sum::<u64>(), sites.iter().map(|site| site.blocks).sum::<u64>())
    };
    (0..3).for_each(|_| toy.alloc(1000, 0));
    let first = toy.snapshot();
    assert_eq!(sizes(&first, &first), (0, 0));
    assert_eq!(sizes(&first, &Snapshot::default()), (3000, 3));
    std::thread::sleep(Duration::from_millis(1)); // so that later events have later times
    toy.free(0, true);
    toy.alloc(1000, 0); // at the same address
    toy.alloc(2000, 0);
    let second = toy.snapshot();
    assert_eq!(sizes(&second, &first), (3000, 2));
    let mut untraced = second.clone();
    untraced.device_traces.clear();
    assert_eq!(sizes(&untraced, &first), if cfg!(miri) { (2000, 1) } else { (3000, 2) }, "the lines differ");
    Ok(())
}
