//! The page of a profile: Chrome's trace events, as claystone's profiler, PyTorch's and others write them.
//!
//! The file is read once and its values are kept as columns. Text is kept once, and the arguments of an event as a
//! template (names, and values that are no numbers) and the numbers that fill it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::blob::{Blob, Texts};

/// A page's columns of a profile.
///
/// # Errors
/// When it is no JSON of trace events, or has none that are drawn.
pub fn blob(json: &str) -> Result<Blob, String> {
    let mut reader = Reader::default();
    let mut parser = serde_json::Deserializer::from_str(json);
    match parser.deserialize_any(Top(&mut reader)) {
        Ok(()) => {}
        // A program that ends early leaves its list without an end, which the format allows.
        Err(error) if error.is_eof() && reader.bare => {}
        Err(error) => return Err(format!("this is not the JSON of a profile: {error}")),
    }
    reader.finish()
}

/// Numbers below this are exact as f64.
const EXACT: f64 = 9007199254740992.0;

/// An event as it is in the file, with whatever types its values have.
#[derive(Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
struct Raw<'a> {
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

/// A string's characters; the JSON of anything else.
fn text(raw: Option<&RawValue>) -> Cow<'_, str> {
    let raw = raw.map_or("", RawValue::get);
    serde_json::from_str(raw).map_or(Cow::Borrowed(raw), Cow::Owned)
}

/// A number, also one that was written as a string.
fn number(raw: Option<&RawValue>) -> Option<f64> {
    raw?.get().trim_matches('"').parse().ok().filter(|number: &f64| number.is_finite())
}

/// The names and values of an object; nothing of what is none.
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

/// The whole file: a list of events, or an object that has one.
struct Top<'a>(&'a mut Reader);

impl<'de> Visitor<'de> for Top<'_> {
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
                "otherData" => self.0.about = about(map.next_value()?),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

/// What claystone's profiler says of the whole: devices, and how many events it could not keep.
fn about(other: &RawValue) -> Value {
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
        while let Some(raw) = seq.next_element::<Option<Raw<'de>>>()? {
            if let Some(raw) = raw {
                self.0.event(&raw);
            }
        }
        Ok(())
    }
}

/// Something that took time.
struct Event {
    track: u32,
    depth: u32,
    start: f64,
    took: f64,
    /// Without what is nested inside it on its track.
    own: f64,
    name: u32,
    category: u32,
    template: u32,
    /// Where its arguments begin among the numbers.
    numbers: u32,
}

impl Event {
    fn end(&self) -> f64 {
        self.start + self.took
    }
}

/// An end of an arrow.
struct Point {
    arrow: u32,
    at: f64,
    track: u32,
    first: bool,
    last: bool,
    /// Whether it binds to the event around it, and not to the next one.
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

#[derive(Default)]
struct Process {
    name: Option<String>,
    order: f64,
}

#[derive(Default)]
struct Reader {
    /// Whether the file is a list of events.
    bare: bool,
    about: Value,
    texts: Texts,
    templates: Texts,
    processes: Vec<Process>,
    process_of: HashMap<String, u32>,
    tracks: Vec<Track>,
    track_of: HashMap<(u32, String), u32>,
    events: Vec<Event>,
    numbers: Vec<f64>,
    /// Events of each track that have begun and not ended.
    open: HashMap<u32, Vec<usize>>,
    series: Vec<(u32, u32, u32)>,
    series_of: HashMap<(u32, u32, u32), u32>,
    /// Series, time and value.
    samples: Vec<(u32, f64, f64)>,
    arrow_of: HashMap<(String, String), u32>,
    points: Vec<Point>,
}

impl Reader {
    fn event(&mut self, raw: &Raw<'_>) {
        let phase = text(raw.ph);
        if phase == "M" {
            return self.metadata(raw);
        }
        let Some(start) = number(raw.ts) else { return };
        match &*phase {
            "X" | "B" | "i" | "I" | "R" => {
                let took = number(raw.dur).filter(|_| phase == "X").map_or(0.0, |took| took.max(0.0));
                let track = self.track(raw);
                let (name, category) = (self.texts.number(&text(raw.name)), self.texts.number(&text(raw.cat)));
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
                let (process, name) = (self.process(raw), self.texts.number(&text(raw.name)));
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
                let key = (text(raw.cat).into_owned(), text(raw.id).into_owned());
                let next = self.arrow_of.len() as u32;
                let arrow = *self.arrow_of.entry(key).or_insert(next);
                let (first, last) = (phase == "s", phase == "f");
                let around = !last || text(raw.bp) == "e";
                let point = Point { arrow, at: start, track: self.track(raw), first, last, around };
                self.points.push(point);
            }
            _ => {}
        }
    }

    fn process(&mut self, raw: &Raw<'_>) -> u32 {
        let pid = text(raw.pid);
        if let Some(&process) = self.process_of.get(&*pid) {
            return process;
        }
        let process = self.processes.len() as u32;
        self.process_of.insert(pid.into_owned(), process);
        self.processes.push(Process::default());
        process
    }

    fn track(&mut self, raw: &Raw<'_>) -> u32 {
        let process = self.process(raw);
        let key = (process, text(raw.tid).into_owned());
        if let Some(&track) = self.track_of.get(&key) {
            return track;
        }
        let track = self.tracks.len() as u32;
        self.tracks.push(Track { process, id: key.1.clone(), ..Track::default() });
        self.track_of.insert(key, track);
        track
    }

    fn metadata(&mut self, raw: &Raw<'_>) {
        for (key, value) in members(raw.args) {
            let (said, order) = (text(Some(value)).into_owned(), number(Some(value)).unwrap_or(0.0));
            let what = text(raw.name);
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

    /// The template of an event's arguments: pairs of a name and a text, and names alone, of which each has a number.
    fn arguments(&mut self, args: Option<&RawValue>) -> u32 {
        let mut template: Vec<Vec<Cow<'_, str>>> = Vec::new();
        for (key, value) in members(args) {
            match value.get().parse::<f64>().ok().filter(|number| number.abs() < EXACT) {
                Some(number) => {
                    self.numbers.push(number);
                    template.push(vec![key.into()]);
                }
                None => template.push(vec![key.into(), text(Some(value))]),
            }
        }
        self.templates.number(&json!(template).to_string())
    }
}

/// A line of the timeline: events of one track at one depth, which do not overlap.
struct Row {
    track: u32,
    first: usize,
    end: usize,
}

impl Reader {
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
            self.events[begun].took = end - self.events[begun].start; // it had not ended when the profile did
        }
        self.nest();
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
        self.say(&order, &mut blob);
        Ok(blob)
    }

    /// Sets the depth of every event on its track and the time that is its own.
    fn nest(&mut self) {
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

    /// The place of each track on the page: processes as they say or come, of each its threads likewise.
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

    /// Arrows from an event to the one that it caused, by their indices in the columns.
    fn arrows(&mut self, rows: &[Row], blob: &mut Blob) {
        let mut rows_of: HashMap<u32, Vec<&Row>> = HashMap::new();
        for row in rows {
            rows_of.entry(row.track).or_default().push(row);
        }
        let bound = |point: &Point| -> Option<u32> {
            let rows = rows_of.get(&point.track)?;
            let after =
                |row: &Row| row.first + self.events[row.first..row.end].partition_point(|e| e.start <= point.at);
            if !point.around {
                // The next event, of those at depth 0.
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
        let mut last: Option<(u32, u32)> = None; // the arrow, and the event that its last point is bound to
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

    /// Names, and what is said of the whole.
    fn say(self, order: &[u32], blob: &mut Blob) {
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
