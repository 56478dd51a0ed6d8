//! The rules that the compiler cannot check. Each rule finds violations in the crate's imports or source text.

use crate::methods;
use crate::modules::{Crate, Sources};
use crate::resolve::Import;
use proc_macro2::{TokenStream, TokenTree};

/// The rooms (top-level folders and files of src) from top to bottom. A room may import only rooms on lines below its own, and
/// those in [`CIRCLES`].
const ROOMS: &[&[&str]] = &[
    &["distributed"],
    &["nn", "optim", "data"],
    &["io"],
    &["graph", "tune", "images"],
    &["ops"],
    &["backend"],
    &["autograd", "tensor"],
    &["expr"],
    &["storage"],
    &["profiler"],
    &["device"],
    &["layout"],
    &["file"],
    &["dtype", "error", "options"],
    &["sync"],
];

/// Rooms that may import each other: a tensor holds its autograd node and a node its tensors; errors contain dtypes.
const CIRCLES: &[&[&str]] = &[&["autograd", "tensor"], &["dtype", "error"]];

/// Files that may distinguish kinds of devices, such as CPU and GPU.
const DEVICE_KIND: &[&str] = &["src/device/", "src/storage/", "src/backend/mod.rs"];

/// Files that may test whether a device is the CPU.
const ASKS_CPU: &[&str] = &["src/device/", "src/storage/", "src/backend/"];

/// Files that may use OpenCL's own types. Entries after the first three state their reason.
const OPENCL: &[&str] = &[
    "src/device/opencl/",
    "src/storage/driver/",
    "src/backend/opencl/",
    "src/graph/",           // a graph holds the recorded commands of an OpenCL device
    "src/tune/",            // measures kernels of an OpenCL device
    "src/device/mod.rs",    // a `Device` gets its properties from its OpenCL context
    "src/device/stream.rs", // a `Stream` and an `Event` hold OpenCL objects
];

/// Files that may change a storage's version counter. Other code must call `backend::launch`, which updates the counters of the
/// outputs.
const VERSIONS: &[&str] = &["src/storage/", "src/backend/"];

/// Rooms whose code may use only the crate's public API.
pub const PUBLIC_ONLY: &[&str] = &["nn", "optim", "data", "io"];

/// The exceptions that are allowed today: a rule, a file, and the item or word in the file that breaks the rule. The list may only
/// shrink.
pub const EXCEPTIONS: &[(Rule, &str, &str)] = &[
    (Rule::Downwards, "src/error.rs", "crate::device::name"), // an error contains the device on which it happened
    (Rule::Downwards, "src/error.rs", "crate::layout::shape"), // shape errors contain shapes
    (Rule::OpenClTypes, "src/lib.rs", "crate::device::opencl"), // re-exports `Kernel` for user-defined kernels
];

/// The number of files in the largest circle of imports, an upper limit that may only be lowered.
pub const LARGEST_CIRCLE: usize = 5;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rule {
    Downwards,
    DeviceKind,
    OpenClTypes,
    Backends,
    Published,
    Versions,
}

impl Rule {
    /// Returns the rule in words, and how to fix a violation.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Downwards => {
                "imports go down only; move the item to a lower room, or pass it in from above (order: ROOMS in \
                 tests/architecture/rules.rs)"
            }
            Self::DeviceKind => {
                "only device/, storage/ and backend/mod.rs distinguish devices; call the `Backend`, or ask the device for a \
                 property such as `has_queues`"
            }
            Self::OpenClTypes => {
                "OpenCL's types stay in device/opencl, storage/driver and backend/opencl; move the code there"
            }
            Self::Backends => {
                "backend/cpu and backend/opencl do not import each other; share it through backend/problem"
            }
            Self::Published => "nn, optim, data and io use `pub` items by `pub` paths only; publish the item first",
            Self::Versions => {
                "version counters are changed by `backend::launch` and `backend::fill`; launch through them"
            }
        }
    }
}

/// A violation of a rule in a file.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Violation {
    pub rule: Rule,
    pub file: String,
    /// The imported item or the word that violates the rule.
    pub target: String,
    pub line: usize,
}

/// Returns a message for each violation that is not one of `exceptions`, and for each exception that is no longer needed.
pub fn complaints(violations: &[Violation], exceptions: &[(Rule, &str, &str)]) -> Vec<String> {
    let is = |v: &Violation, e: &(Rule, &str, &str)| (v.rule, &v.file[..], &v.target[..]) == *e;
    let new = violations.iter().filter(|v| !exceptions.iter().any(|e| is(v, e)));
    let new = new.map(|v| format!("{}:{} has {}: {}.", v.file, v.line, v.target, v.rule.advice()));
    let outdated = exceptions.iter().filter(|e| !violations.iter().any(|v| is(v, e)));
    let outdated = outdated.map(|e| format!("{} no longer has {}: delete the line of EXCEPTIONS.", e.1, e.2));
    new.chain(outdated).collect()
}

/// Finds all violations, sorted and without duplicates.
pub fn violations(sources: &Sources, crates: &Crate, imports: &[Import]) -> Vec<Violation> {
    let mut all: Vec<Violation> = imports.iter().flat_map(of_import).collect();
    all.extend(methods::violations(crates, imports));
    for (rule, word, places) in [(Rule::Versions, "bump_version", VERSIONS), (Rule::DeviceKind, "is_cpu", ASKS_CPU)] {
        for (file, text) in sources.iter().filter(|(file, _)| !within(file, places)) {
            let tokens = text.parse().unwrap_or_else(|e| panic!("{file}: {e}"));
            let mut lines = Vec::new();
            find_word(tokens, word, &mut lines);
            let violation = |line| Violation { rule, file: file.clone(), target: word.into(), line };
            all.extend(lines.into_iter().map(violation));
        }
    }
    all.sort();
    all.dedup();
    all
}

/// Returns the violations caused by an import.
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

/// Collects the line numbers at which an identifier occurs, also inside macros.
fn find_word(tokens: TokenStream, word: &str, lines: &mut Vec<usize>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => find_word(group.stream(), word, lines),
            TokenTree::Ident(ident) if ident == word => lines.push(ident.span().start().line),
            _ => {}
        }
    }
}

/// Whether file `from` may import file `to`.
fn downwards(from: &str, to: &str) -> bool {
    let (from, to) = (room(from), room(to));
    let circle = CIRCLES.iter().any(|circle| circle.contains(&from) && circle.contains(&to));
    from == to || circle || level(from) < level(to)
}

/// Returns the index in [`ROOMS`] of the line that contains a room.
fn level(room: &str) -> usize {
    let found = ROOMS.iter().position(|level| level.contains(&room));
    found.unwrap_or_else(|| panic!("`{room}` is in no room: give it a line of ROOMS in tests/architecture/rules.rs"))
}

/// Returns the room of a file: the folder or file directly in src.
pub fn room(file: &str) -> &str {
    let inside = file.strip_prefix("src/").unwrap_or(file);
    inside.split('/').next().unwrap_or(inside).trim_end_matches(".rs")
}

/// Returns the module path of a file, such as `crate::ops::reduce`.
pub fn module_of(file: &str) -> String {
    let inside = file.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    format!("crate::{}", inside.replace('/', "::"))
}

fn within(file: &str, places: &[&str]) -> bool {
    places.iter().any(|place| file.starts_with(place))
}
