//! Snapshots of a device's allocator.

use std::collections::BTreeMap;

use super::super::config::Config;
use super::{Event, Recorded, SegmentInfo, Setting, Snapshot, annotations};

impl Snapshot {
    /// The snapshot of one device: its segments, what its history has recorded, and its configuration.
    pub(crate) fn of_device(device: u32, segments: Vec<SegmentInfo>, recorded: Recorded, config: &Config) -> Snapshot {
        let mut settings: BTreeMap<String, Setting> =
            Config::KEYS.iter().map(|key| (key.name.to_owned(), setting(key.value(config)))).collect();
        let count = |n: u64| Setting::Int(i64::try_from(n).unwrap_or(i64::MAX));
        settings.insert("CLAYSTONE_ALLOC_CONF".into(), Setting::Text(config.to_string()));
        settings.insert("trace_alloc_max_entries".into(), count(recorded.max_entries as u64));
        settings.insert("trace_alloc_overflowed".into(), count(recorded.overwritten));
        // A trace's place is its device's number.
        let mut device_traces = vec![Vec::new(); device as usize];
        device_traces.push(recorded.events.into_iter().map(Event::entry).collect());
        Snapshot { segments, device_traces, allocator_settings: settings, external_annotations: annotations(device) }
    }
}

/// A value in the form that it would have in Python.
fn setting(text: String) -> Setting {
    match text.as_str() {
        "True" => Setting::Bool(true),
        "False" => Setting::Bool(false),
        text => match (text.parse(), text.parse()) {
            (Ok(int), _) => Setting::Int(int),
            (_, Ok(float)) if f64::is_finite(float) => Setting::Float(float),
            _ => Setting::Text(text.to_owned()),
        },
    }
}
