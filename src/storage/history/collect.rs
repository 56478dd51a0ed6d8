//! Construction of a device allocator's snapshot.

use std::collections::BTreeMap;

use super::super::config::Config;
use super::stack::Stack;
use super::{Context, FrameCache, RecordedEvents, SegmentInfo, Setting, Snapshot, TraceAction, annotations};

/// A segment, and the contexts of the segment and its blocks. The frames of these contexts are looked up later, when the
/// allocator's lock is released.
pub(crate) struct SegmentWithContexts {
    pub(crate) segment: SegmentInfo,
    pub(crate) context: Context,
    /// The contexts of the segment's blocks.
    pub(crate) contexts: Vec<Context>,
}

impl SegmentWithContexts {
    fn resolve(mut self, frames: &mut FrameCache) -> SegmentInfo {
        self.segment.frames = frames.resolve(self.context);
        for (block, context) in self.segment.blocks.iter_mut().zip(self.contexts) {
            block.frames = frames.resolve(context);
        }
        self.segment
    }
}

impl Snapshot {
    /// Makes the snapshot of one device from its segments, its history and its configuration.
    pub(crate) fn of_device(
        device: u32,
        segments: Vec<SegmentWithContexts>,
        recorded: RecordedEvents,
        config: &Config,
    ) -> Snapshot {
        let mut frames = FrameCache::default();
        let mut segments: Vec<_> = segments.into_iter().map(|segment| segment.resolve(&mut frames)).collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        let mut settings: BTreeMap<String, Setting> =
            Config::KEYS.iter().map(|key| (key.name.to_owned(), parse_setting(key.value(config)))).collect();
        let count = |n: u64| Setting::Int(i64::try_from(n).unwrap_or(i64::MAX));
        settings.insert("CLAYSTONE_ALLOC_CONF".into(), Setting::Text(config.to_string()));
        settings.insert("trace_alloc_max_entries".into(), count(recorded.max_entries as u64));
        settings.insert("trace_alloc_overflowed".into(), count(recorded.overwritten));
        settings.insert("stacks_lost".into(), count(Stack::lost()));
        // The index of a trace is the number of its device.
        let mut device_traces = vec![Vec::new(); device as usize];
        device_traces.push(recorded.events.into_iter().map(|event| event.entry(&mut frames)).collect());
        let external_annotations = annotations(device);
        Snapshot { allocator_settings: settings, external_annotations, ..Snapshot::new(segments, device_traces) }
    }

    /// Adds the segments and events of the same device's images, whose segments get pool (1, 0).
    pub(in crate::storage) fn with_images(mut self, images: Snapshot) -> Snapshot {
        self.segments.extend(images.segments.into_iter().map(|s| SegmentInfo { segment_pool_id: (1, 0), ..s }));
        self.segments.sort_by_key(|segment| segment.address);
        for (trace, others) in self.device_traces.iter_mut().zip(images.device_traces) {
            // Taking the two snapshots recorded two `Snapshot` events, of which only one is kept.
            trace.extend(others.into_iter().filter(|entry| entry.action != TraceAction::Snapshot));
            trace.sort_by_key(|entry| entry.time_us); // the sort is stable, so events of one allocator stay in order
        }
        self
    }
}

/// Converts a configuration value into the type it would have in Python.
fn parse_setting(text: String) -> Setting {
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
