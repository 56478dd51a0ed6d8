//! Snapshots of a made-up device, checked against Python's own pickle and by breaking each rule once.

use super::*;

#[test]
fn ring_keeps_the_latest() -> Result<()> {
    let history = History::new();
    history.record(TraceAction::Alloc, 1, 1, 0);
    assert!(!history.is_on() && history.entries().is_empty());
    history.record_memory_history(HistoryOptions { max_entries: 3, ..Default::default() })?;
    for addr in 0..8 {
        history.record(TraceAction::Alloc, addr, 512, 7);
    }
    let addrs = |h: &History| h.entries().iter().map(|e| e.addr).collect::<Vec<_>>();
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
