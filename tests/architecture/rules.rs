//! The eight rules, each a function from the crate's imports or texts to what breaks it.

use crate::methods;
use crate::modules::{Crate, Sources};
use crate::resolve::Import;
use proc_macro2::{TokenStream, TokenTree};

/// The rooms, from the top down. Those of one line do not import each other, unless [`CIRCLES`] says so.
const ROOMS: &[&[&str]] = &[
    &["distributed"],
    &["nn", "optim", "data"],
    &["io"],
    &["bin"],
    &["graph", "tune"],
    &["ops"],
    &["backend"],
    &["autograd", "tensor"],
    &["expr"],
    &["storage"],
    &["profiler"],
    &["device"],
    &["layout"],
    &["file"],
    &["dtype", "error"],
];

/// Rooms that may import each other: a tensor carries its node, a node its tensors, and every error may name a dtype.
const CIRCLES: &[&[&str]] = &[&["autograd", "tensor"], &["dtype", "error"]];

/// Where a device's kind may be told.
const DEVICE_KIND: &[&str] = &["src/device/", "src/storage/", "src/backend/mod.rs"];

/// Where OpenCL's own types may appear; files outside the first three rooms stand here for a reason.
const OPENCL: &[&str] = &[
    "src/device/opencl/",
    "src/storage/driver/",
    "src/backend/opencl/",
    "src/bin/claystone/cache.rs", // the command that shows the cache of programs
    "src/device/mod.rs",          // a `Device` asks its context for all that it tells
    "src/device/stream.rs",       // a `Stream` and an `Event` hold OpenCL's on such devices
];

/// Where `unsafe` may stand.
const UNSAFE: &[&str] = &["src/device/", "src/storage/"];

/// Where a storage's version counter may be moved: everything else goes through `backend::launch`, which cannot forget to.
const VERSIONS: &[&str] = &["src/storage/", "src/backend/"];

/// The rooms that use what any user of the crate could.
pub const PUBLIC_ONLY: &[&str] = &["nn", "optim", "data", "io"];

const LONGEST: usize = 500;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rule {
    Downwards,
    DeviceKind,
    OpenClTypes,
    Unsafe,
    Backends,
    Published,
    Length,
    Versions,
}

impl Rule {
    pub const ALL: [Self; 8] = [
        Self::Downwards,
        Self::DeviceKind,
        Self::OpenClTypes,
        Self::Unsafe,
        Self::Backends,
        Self::Published,
        Self::Length,
        Self::Versions,
    ];

    /// The name in the list of exceptions.
    pub fn name(self) -> &'static str {
        ["downwards", "device-kind", "opencl-types", "unsafe", "backends", "published", "length", "versions"]
            [self as usize]
    }

    /// The rule, and what to do where it is broken.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Downwards => {
                "imports go down only; move the item to a lower room, or hand it in from above (order: ROOMS in \
                 tests/architecture/rules.rs)"
            }
            Self::DeviceKind => {
                "only device/, storage/ and backend/mod.rs tell devices apart; call the `Backend` instead"
            }
            Self::OpenClTypes => {
                "OpenCL's types stay in device/opencl, storage/driver and backend/opencl; move the code there"
            }
            Self::Unsafe => "`unsafe` stays in device/ and storage/; put a safe function there and call it",
            Self::Backends => "backend/cpu and backend/opencl do not know each other; share it through backend/problem",
            Self::Published => "nn, optim, data and io use `pub` items by `pub` paths only; publish the item first",
            Self::Length => "no file has over 500 lines; split it by what it does",
            Self::Versions => {
                "version counters are moved by `backend::launch` and `backend::fill`; launch through them"
            }
        }
    }
}

/// A place that breaks a rule.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Violation {
    pub rule: Rule,
    pub file: String,
    /// What is imported or found there.
    pub target: String,
    pub line: usize,
}

/// Everything that breaks a rule, in order, each line of a file once a target.
pub fn violations(sources: &Sources, crates: &Crate, imports: &[Import]) -> Vec<Violation> {
    let mut all: Vec<Violation> = imports.iter().flat_map(of_import).collect();
    all.extend(methods::violations(crates, imports));
    all.extend(sources.iter().flat_map(|(file, text)| of_text(file, text)));
    all.sort();
    all.dedup();
    all
}

/// What an import breaks.
fn of_import(import: &Import) -> Vec<Violation> {
    let file = import.file.as_str();
    let target = import.target.as_str();
    let target_file = import.target_file.as_deref();
    let mut broken = Vec::new();
    if let Some(to) = target_file.filter(|to| *to != "src/lib.rs" && file != "src/lib.rs" && !downwards(file, to)) {
        broken.push((Rule::Downwards, module_of(to)));
    }
    if let Some(kind) = target.strip_prefix("crate::device::Device::") {
        let kind = kind.split("::").next().unwrap_or_default();
        if ["Cpu", "OpenCL", "*"].contains(&kind) && !within(file, DEVICE_KIND) {
            broken.push((Rule::DeviceKind, format!("Device::{kind}")));
        }
    }
    let foreign = ["cl3", "opencl3"].contains(&import.item.as_str());
    if (foreign || target_file.is_some_and(|to| to.starts_with("src/device/opencl/"))) && !within(file, OPENCL) {
        broken.push((Rule::OpenClTypes, if foreign { import.item.clone() } else { "crate::device::opencl".into() }));
    }
    let (cpu, opencl) = ("src/backend/cpu/", "src/backend/opencl/");
    let crosses =
        |to: &str| file.starts_with(cpu) && to.starts_with(opencl) || file.starts_with(opencl) && to.starts_with(cpu);
    if target_file.is_some_and(crosses) {
        broken.push((Rule::Backends, import.item.clone()));
    }
    if PUBLIC_ONLY.contains(&room(file)) && !import.public {
        broken.push((Rule::Published, import.item.clone()));
    }
    let violation = |(rule, target)| Violation { rule, file: file.into(), target, line: import.line };
    broken.into_iter().map(violation).collect()
}

/// What a file's text breaks.
fn of_text(file: &str, text: &str) -> Vec<Violation> {
    let mut broken = Vec::new();
    let violation = |rule, target: String, line| Violation { rule, file: file.into(), target, line };
    let lines = text.lines().count();
    if lines > LONGEST {
        broken.push(violation(Rule::Length, format!("over-{LONGEST}-lines"), lines));
    }
    let words = [(Rule::Unsafe, "unsafe", UNSAFE), (Rule::Versions, "bump_version", VERSIONS)];
    for (rule, word, places) in words {
        if file.starts_with("src/") && file.ends_with(".rs") && !within(file, places) {
            let tokens = text.parse().unwrap_or_else(|e| panic!("{file}: {e}"));
            let mut found = Vec::new();
            find_word(tokens, word, &mut found);
            broken.extend(found.into_iter().map(|line| violation(rule, word.into(), line)));
        }
    }
    broken
}

/// The lines of a keyword or a name, in macros too.
fn find_word(tokens: TokenStream, word: &str, lines: &mut Vec<usize>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => find_word(group.stream(), word, lines),
            TokenTree::Ident(ident) if ident == word => lines.push(ident.span().start().line),
            _ => {}
        }
    }
}

/// Whether a file may import from another.
fn downwards(from: &str, to: &str) -> bool {
    let (from, to) = (room(from), room(to));
    let circle = CIRCLES.iter().any(|circle| circle.contains(&from) && circle.contains(&to));
    from == to || circle || level(from) < level(to)
}

/// How many rooms' lines are above this one.
fn level(room: &str) -> usize {
    let found = ROOMS.iter().position(|level| level.contains(&room));
    found.unwrap_or_else(|| panic!("`{room}` is in no room: give it a line of ROOMS in tests/architecture/rules.rs"))
}

/// The room of a file: the folder or the file at the top of src.
pub fn room(file: &str) -> &str {
    let inside = file.strip_prefix("src/").unwrap_or(file);
    inside.split('/').next().unwrap_or(inside).trim_end_matches(".rs")
}

/// The module of a file: `crate::ops::reduce`.
pub fn module_of(file: &str) -> String {
    let inside = file.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    format!("crate::{}", inside.replace('/', "::"))
}

fn within(file: &str, places: &[&str]) -> bool {
    places.iter().any(|place| file.starts_with(place))
}
