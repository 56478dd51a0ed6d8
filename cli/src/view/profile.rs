//! The page of a profile: Chrome trace events, as written by claystone's profiler, PyTorch's and others.
//!
//! The file is parsed once, and its values are stored as columns. Texts are stored once. The arguments of an event are stored as
//! a template (names, and values that are not numbers) and the numbers to fill in.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::blob::{Blob, TextTable};

/// Builds the columns of a profile's page.
///
/// # Errors
/// The text is not JSON of trace events, or has no events that can be drawn.
pub fn blob(json: &str) -> Result<Blob, String> {
    let mut reader = Reader::default();
    let mut parser = serde_json::Deserializer::from_str(json);
    match parser.deserialize_any(ProfileFile(&mut reader)) {
        Ok(()) => {}
        // A program that ends early leaves its list of events without an end, which the format allows.
        Err(error) if error.is_eof() && reader.bare => {}
        Err(error) => return Err(format!("this is not the JSON of a profile: {error}")),
    }
    reader.finish()
}

/// Numbers below this bound are exact as f64.
const EXACT_F64_BOUND: f64 = 9007199254740992.0;

/// An event as in the file, with values of any type.
#[derive(Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
struct RawEvent<'a> {
    ph: Option<&'a RawValue>,
    cat: Option<&'a RawValue>,
    name: Option<&'a RawValue>,
    pid: Option<&'a RawValue>,
    tid: Option<&'a RawValue>,
    ts: Option<&'a RawValue>,
    dur: Option<&'a RawValue>,
    id: Option<&'a RawValue>,
    bp: Option<&'a RawValue>,
    args: Option<&'a RawValue>,
}

/// Returns the characters of a string, or the JSON of any other value.
fn text_of(raw: Option<&RawValue>) -> Cow<'_, str> {
    let raw = raw.map_or("", RawValue::get);
    serde_json::from_str(raw).map_or(Cow::Borrowed(raw), Cow::Owned)
}

/// Parses a number, also a number that was written as a string.
fn number(raw: Option<&RawValue>) -> Option<f64> {
    raw?.get().trim_matches('"').parse().ok().filter(|number: &f64| number.is_finite())
}

/// Returns the names and values of an object; empty for any other value.
fn members(raw: Option<&RawValue>) -> Vec<(String, &RawValue)> {
    struct Members;
    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(String, &'de RawValue)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some(member) = map.next_entry()? {
                members.push(member);
            }
            Ok(members)
        }
    }
    let Some(raw) = raw else { return Vec::new() };
    serde_json::Deserializer::from_str(raw.get()).deserialize_map(Members).unwrap_or_default()
}

/// The whole file: a list of events, or an object that contains the list.
struct ProfileFile<'a>(&'a mut Reader);

impl<'de> Visitor<'de> for ProfileFile<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with traceEvents, or a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        self.0.bare = true;
        Events(self.0).visit_seq(seq)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match &*key {
                "traceEvents" => map.next_value_seed(Events(self.0))?,
                "otherData" => self.0.about = parse_metadata(map.next_value()?),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

/// Extracts the metadata of claystone's profiler: devices, and the number of events that were dropped.
fn parse_metadata(other: &RawValue) -> Value {
    #[derive(Deserialize)]
    struct Other {
        #[serde(default)]
        dropped_events: u64,
        #[serde(default)]
        devices: Vec<Device>,
    }
    #[derive(Deserialize)]
    struct Device {
        device: String,
        name: String,
        copy_bytes_per_s: Option<f64>,
    }
    let Ok(Other { dropped_events, devices }) = serde_json::from_str(other.get()) else { return Value::Null };
    let device = |d: Device| json!({"device": d.device, "name": d.name, "copy": d.copy_bytes_per_s});
    json!({"dropped": dropped_events, "devices": devices.into_iter().map(device).collect::<Vec<_>>()})
}

/// Reads the list of events.
struct Events<'a>(&'a mut Reader);

impl<'de> DeserializeSeed<'de> for Events<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Events<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(raw) = seq.next_element::<Option<RawEvent<'de>>>()? {
            if let Some(raw) = raw {
                self.0.event(&raw);
            }
        }
        Ok(())
    }
}

/// An interval on a track.
struct Event {
    track: u32,
    depth: u32,
    start: f64,
    took: f64,
    /// Duration without the events nested inside it on its track.
    own: f64,
    name: u32,
    category: u32,
    template: u32,
    /// Index of the event's first numeric argument among the numbers of all events.
    numbers: u32,
}

impl Event {
    fn end(&self) -> f64 {
        self.start + self.took
    }
}

/// A point of an arrow between events: its start, its end, or a step in between.
struct ArrowPoint {
    arrow: u32,
    at: f64,
    track: u32,
    first: bool,
    last: bool,
    /// Whether the point binds to the enclosing event instead of the next event.
    around: bool,
}

/// A thread, or a stream of a device.
#[derive(Default)]
struct Track {
    process: u32,
    id: String,
    name: Option<String>,
    order: f64,
}

/// A process, or a device.
#[derive(Default)]
struct Process {
    name: Option<String>,
    order: f64,
}

/// Collects tracks, events, counters and arrows while the file is parsed.
#[derive(Default)]
struct Reader {
    /// Whether the file is a bare list of events.
    bare: bool,
    about: Value,
    texts: TextTable,
    templates: TextTable,
    processes: Vec<Process>,
    process_of: HashMap<String, u32>,
    tracks: Vec<Track>,
    track_of: HashMap<(u32, String), u32>,
    events: Vec<Event>,
    numbers: Vec<f64>,
    /// For each track, the events that have begun and not ended.
    open: HashMap<u32, Vec<usize>>,
    series: Vec<(u32, u32, u32)>,
    series_of: HashMap<(u32, u32, u32), u32>,
    /// Samples of counters: series, time and value.
    samples: Vec<(u32, f64, f64)>,
    arrow_of: HashMap<(String, String), u32>,
    points: Vec<ArrowPoint>,
}

impl Reader {
    /// Adds an event of any phase of the trace event format; unknown phases are ignored.
    fn event(&mut self, raw: &RawEvent<'_>) {
        let phase = text_of(raw.ph);
        if phase == "M" {
            return self.metadata(raw);
        }
        let Some(start) = number(raw.ts) else { return };
        match &*phase {
            "X" | "B" | "i" | "I" | "R" => {
                let took = number(raw.dur).filter(|_| phase == "X").map_or(0.0, |took| took.max(0.0));
                let track = self.track(raw);
                let (name, category) = (self.texts.number(&text_of(raw.name)), self.texts.number(&text_of(raw.cat)));
                let numbers = self.numbers.len() as u32;
                let template = self.arguments(raw.args);
                if phase == "B" {
                    self.open.entry(track).or_default().push(self.events.len());
                }
                let event = Event { track, depth: 0, start, took, own: 0.0, name, category, template, numbers };
                self.events.push(event);
            }
            "E" => {
                let track = self.track(raw);
                if let Some(begun) = self.open.get_mut(&track).and_then(Vec::pop) {
                    let event = &mut self.events[begun];
                    event.took = (start - event.start).max(0.0);
                }
            }
            "C" => {
                let (process, name) = (self.process(raw), self.texts.number(&text_of(raw.name)));
                for (key, value) in members(raw.args) {
                    let Some(value) = number(Some(value)) else { continue };
                    let key = (process, name, self.texts.number(&key));
                    let next = self.series.len() as u32;
                    let series = *self.series_of.entry(key).or_insert(next);
                    if series == next {
                        self.series.push(key);
                    }
                    self.samples.push((series, start, value));
                }
            }
            "s" | "t" | "f" => {
                let key = (text_of(raw.cat).into_owned(), text_of(raw.id).into_owned());
                let next = self.arrow_of.len() as u32;
                let arrow = *self.arrow_of.entry(key).or_insert(next);
                let (first, last) = (phase == "s", phase == "f");
                let around = !last || text_of(raw.bp) == "e";
                let point = ArrowPoint { arrow, at: start, track: self.track(raw), first, last, around };
                self.points.push(point);
            }
            _ => {}
        }
    }

    /// Returns the number of the event's process, and adds the process if it is new.
    fn process(&mut self, raw: &RawEvent<'_>) -> u32 {
        let pid = text_of(raw.pid);
        if let Some(&process) = self.process_of.get(&*pid) {
            return process;
        }
        let process = self.processes.len() as u32;
        self.process_of.insert(pid.into_owned(), process);
        self.processes.push(Process::default());
        process
    }

    /// Returns the number of the event's track, and adds the track if it is new.
    fn track(&mut self, raw: &RawEvent<'_>) -> u32 {
        let process = self.process(raw);
        let key = (process, text_of(raw.tid).into_owned());
        if let Some(&track) = self.track_of.get(&key) {
            return track;
        }
        let track = self.tracks.len() as u32;
        self.tracks.push(Track { process, id: key.1.clone(), ..Track::default() });
        self.track_of.insert(key, track);
        track
    }

    /// Stores the name or the sort index of a process or a thread.
    fn metadata(&mut self, raw: &RawEvent<'_>) {
        for (key, value) in members(raw.args) {
            let (said, order) = (text_of(Some(value)).into_owned(), number(Some(value)).unwrap_or(0.0));
            let what = text_of(raw.name);
            if what.starts_with("process_") {
                let process = self.process(raw) as usize;
                match (&*what, &*key) {
                    ("process_name", "name") => self.processes[process].name = Some(said),
                    ("process_sort_index", "sort_index") => self.processes[process].order = order,
                    _ => {}
                }
            } else if what.starts_with("thread_") {
                let track = self.track(raw) as usize;
                match (&*what, &*key) {
                    ("thread_name", "name") => self.tracks[track].name = Some(said),
                    ("thread_sort_index", "sort_index") => self.tracks[track].order = order,
                    _ => {}
                }
            }
        }
    }

    /// Stores an event's numbers and returns its template: pairs of a name and a text, and single names of numbers.
    fn arguments(&mut self, args: Option<&RawValue>) -> u32 {
        let mut template: Vec<Vec<Cow<'_, str>>> = Vec::new();
        for (key, value) in members(args) {
            match value.get().parse::<f64>().ok().filter(|number| number.abs() < EXACT_F64_BOUND) {
                Some(number) => {
                    self.numbers.push(number);
                    template.push(vec![key.into()]);
                }
                None => template.push(vec![key.into(), text_of(Some(value))]),
            }
        }
        self.templates.number(&json!(template).to_string())
    }
}

/// A row of the timeline: events of one track at one depth, which do not overlap.
struct Row {
    track: u32,
    first: usize,
    end: usize,
}

impl Reader {
    /// Sorts the events into rows and returns the columns of the page.
    fn finish(mut self) -> Result<Blob, String> {
        if self.events.is_empty() && self.samples.is_empty() {
            return Err("the profile has no events".to_owned());
        }
        if self.events.len().max(self.numbers.len()) > u32::MAX as usize {
            return Err("the profile has more than 2^32 events".to_owned());
        }
        let moments = self.events.iter().map(|e| e.start).chain(self.samples.iter().map(|sample| sample.1));
        let start = moments.fold(f64::INFINITY, f64::min);
        let end = self.events.iter().map(Event::end).fold(start, f64::max);
        for begun in std::mem::take(&mut self.open).into_values().flatten() {
            self.events[begun].took = end - self.events[begun].start; // an event without an end lasts until the end of the profile
        }
        self.compute_nesting();
        let order = self.track_order();
        self.events.sort_by(|a, b| {
            let place = |e: &Event| (order[e.track as usize], e.depth);
            place(a).cmp(&place(b)).then(a.start.total_cmp(&b.start))
        });
        let rows = self.rows();
        let mut blob = Blob::default();
        self.arrows(&rows, &mut blob);
        let events = &self.events;
        blob.column("start", events.iter().map(|e| e.start - start));
        blob.column("took", events.iter().map(|e| e.took));
        blob.column("own", events.iter().map(|e| e.own));
        blob.column("name", events.iter().map(|e| e.name));
        blob.column("category", events.iter().map(|e| e.category));
        blob.column("template", events.iter().map(|e| e.template));
        blob.column("argument", events.iter().map(|e| e.numbers));
        blob.column("numbers", std::mem::take(&mut self.numbers));
        blob.column("row.end", rows.iter().map(|row| row.end as u32));
        blob.column("row.track", rows.iter().map(|row| order[row.track as usize]));
        self.samples.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        blob.column("sample.series", self.samples.iter().map(|sample| sample.0));
        blob.column("sample.at", self.samples.iter().map(|sample| sample.1 - start));
        blob.column("sample.value", self.samples.iter().map(|sample| sample.2));
        self.write_metadata(&order, &mut blob);
        Ok(blob)
    }

    /// Sets the nesting depth of every event on its track, and its duration without nested events.
    fn compute_nesting(&mut self) {
        self.events
            .sort_by(|a, b| a.track.cmp(&b.track).then(a.start.total_cmp(&b.start)).then(b.took.total_cmp(&a.took)));
        let mut around: Vec<usize> = Vec::new();
        for i in 0..self.events.len() {
            let (track, start, took) = (self.events[i].track, self.events[i].start, self.events[i].took);
            while around.last().is_some_and(|&o| self.events[o].track != track || self.events[o].end() <= start) {
                around.pop();
            }
            self.events[i].own = took;
            self.events[i].depth = around.len() as u32;
            if let Some(&outer) = around.last() {
                self.events[outer].own = (self.events[outer].own - took).max(0.0);
            }
            around.push(i);
        }
    }

    /// Returns the position of each track on the page: sorted by process, then by thread, with explicit sort indices first.
    fn track_order(&self) -> Vec<u32> {
        let mut tracks: Vec<usize> = (0..self.tracks.len()).collect();
        tracks.sort_by(|&a, &b| {
            let (a, b) = (&self.tracks[a], &self.tracks[b]);
            let processes = |track: &Track| (self.processes[track.process as usize].order, track.process);
            let number = |track: &Track| track.id.parse::<f64>().unwrap_or(f64::MAX);
            (processes(a).0.total_cmp(&processes(b).0))
                .then(processes(a).1.cmp(&processes(b).1))
                .then(a.order.total_cmp(&b.order))
                .then(number(a).total_cmp(&number(b)))
        });
        let mut order = vec![0; tracks.len()];
        for (place, track) in (0..).zip(tracks) {
            order[track] = place;
        }
        order
    }

    /// Splits the sorted events where the track or the depth changes.
    fn rows(&self) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        let mut depth = 0;
        for (i, event) in self.events.iter().enumerate() {
            match rows.last_mut() {
                Some(row) if row.track == event.track && depth == event.depth => row.end = i + 1,
                _ => rows.push(Row { track: event.track, first: i, end: i + 1 }),
            }
            depth = event.depth;
        }
        rows
    }

    /// Adds the arrows from an event to the event that it caused, as indices in the columns.
    fn arrows(&mut self, rows: &[Row], blob: &mut Blob) {
        let mut rows_of: HashMap<u32, Vec<&Row>> = HashMap::new();
        for row in rows {
            rows_of.entry(row.track).or_default().push(row);
        }
        let bound = |point: &ArrowPoint| -> Option<u32> {
            let rows = rows_of.get(&point.track)?;
            let after =
                |row: &Row| row.first + self.events[row.first..row.end].partition_point(|e| e.start <= point.at);
            if !point.around {
                // Without `around`, a point binds to the next event at depth 0.
                let row = rows.first()?;
                let before = row.first + self.events[row.first..row.end].partition_point(|e| e.start < point.at);
                return (before < row.end).then_some(before as u32);
            }
            let holds = |&i: &usize| point.at <= self.events[i].end();
            let around = |row: &&Row| after(row).checked_sub(1).filter(|&i| i >= row.first).filter(holds);
            rows.iter().rev().find_map(around).map(|i| i as u32)
        };
        self.points.sort_by(|a, b| a.arrow.cmp(&b.arrow).then(a.at.total_cmp(&b.at)));
        let (mut from, mut to) = (Vec::new(), Vec::new());
        let mut last: Option<(u32, u32)> = None; // the arrow, and the event to which the arrow's last point is bound
        for point in &self.points {
            let event = bound(point);
            if let (Some((arrow, begin)), Some(end)) = (last, event)
                && arrow == point.arrow
                && !point.first
            {
                from.push(begin);
                to.push(end);
            }
            last = event.filter(|_| !point.last).map(|event| (point.arrow, event));
        }
        blob.column("arrow.from", from);
        blob.column("arrow.to", to);
    }

    fn write_metadata(self, order: &[u32], blob: &mut Blob) {
        let mut tracks = vec![Value::Null; order.len()];
        for (track, &place) in self.tracks.iter().zip(order) {
            tracks[place as usize] = json!({"process": track.process, "id": track.id, "name": track.name});
        }
        let mut ids: Vec<(u32, String)> = self.process_of.into_iter().map(|(id, process)| (process, id)).collect();
        ids.sort_unstable();
        let named = self.processes.into_iter().zip(ids);
        let processes: Vec<Value> = named.map(|(p, (_, id))| json!({"id": id, "name": p.name})).collect();
        blob.set("kind", "profile");
        blob.set("tracks", tracks);
        blob.set("processes", processes);
        blob.set("series", self.series.iter().map(|&(p, name, key)| json!([p, name, key])).collect::<Vec<_>>());
        blob.set("about", self.about);
        blob.set("texts", self.texts.into_json());
        blob.set("templates", self.templates.into_json());
    }
}
