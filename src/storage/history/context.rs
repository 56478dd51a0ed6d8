//! The contexts of events: call stacks, and names for the work of a thread.

use std::collections::{HashMap, VecDeque};
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use super::super::thread;
use super::snapshot::{Annotation, Frame, Stage};
use super::stack::Stack;
use super::{caller, now_us};
use crate::device::{OnDrop, lock, profiler};

/// The origin of an event: the call stack, the line that called the crate (see [`Caller`](super::Caller)), and the
/// names given to [`with_context`]. Copying and storing a context allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context {
    stack: Stack,
    names: NamePath,
    caller: Option<&'static Location<'static>>,
}

/// The nested names that a thread was inside of, given by the index of the innermost name's node in the tree of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct NamePath(u32);

/// All names ever used, as a tree: each name is a child of the enclosing name. Programs have few names, so none is
/// removed. The first node is the root, which has no name.
static NAME_TREE: LazyLock<Mutex<Vec<Node>>> = LazyLock::new(|| Mutex::new(vec![Node::default()]));

/// A node of the tree of names.
#[derive(Default)]
struct Node {
    parent: u32,
    name: Arc<str>,
    children: HashMap<Arc<str>, NamePath>,
}

impl Context {
    /// A context without information: no stack, no line and no names.
    pub const NONE: Context = Context { stack: Stack::NONE, names: NamePath::NONE, caller: None };

    /// Returns a context with the names that the calling thread is inside of, and without a stack.
    pub fn current() -> Context {
        Context { names: NamePath::current(), ..Context::NONE }
    }

    #[inline]
    pub(super) fn with_stack() -> Context {
        Context { stack: Stack::capture(), ..Context::current() }
    }

    /// Adds the program's line that called the crate.
    pub(super) fn with_caller(self) -> Context {
        Context { caller: thread::get(|state| &state.caller), ..self }
    }

    /// Returns the frames, the innermost first. First comes the stack without frames of this crate and the standard
    /// library, or the line that called the crate if no stack was captured. Then follows one frame per name.
    pub fn frames(self) -> Arc<[Frame]> {
        let mut frames = self.stack.frames();
        if let Some(location) = self.caller {
            caller::add_caller_line(&mut frames, location);
        }
        let name = |name| Frame { filename: String::new(), line: 0, name };
        frames.into_iter().chain(self.names.list().into_iter().map(name)).collect()
    }

    /// Returns the names joined by slashes, the outermost first; empty if there are none.
    pub(super) fn path(self) -> String {
        let mut names = self.names.list();
        names.reverse();
        names.join("/")
    }
}

/// A cache of the frames of contexts, because most events have one of a few contexts.
#[derive(Default)]
pub(super) struct FrameCache(HashMap<Context, Arc<[Frame]>>);

impl FrameCache {
    pub(super) fn resolve(&mut self, context: Context) -> Arc<[Frame]> {
        Arc::clone(self.0.entry(context).or_insert_with(|| context.frames()))
    }
}

impl NamePath {
    const NONE: NamePath = NamePath(0);

    fn current() -> NamePath {
        NamePath(thread::get(|state| &state.names))
    }

    /// Returns the names, the innermost first.
    fn list(mut self) -> Vec<String> {
        let tree = lock(&NAME_TREE);
        let mut names = Vec::new();
        while self != NamePath::NONE {
            let node = &tree[self.0 as usize];
            names.push(node.name.to_string());
            self = NamePath(node.parent);
        }
        names
    }

    /// Returns the node of `name` inside the name `self`. Adds the node on first use.
    fn child(self, name: &str) -> NamePath {
        let mut tree = lock(&NAME_TREE);
        if let Some(&names) = tree[self.0 as usize].children.get(name) {
            return names;
        }
        let (names, name): (_, Arc<str>) = (NamePath(tree.len() as u32), name.into());
        tree[self.0 as usize].children.insert(Arc::clone(&name), names);
        tree.push(Node { parent: self.0, name, ..Node::default() });
        names
    }
}

/// Runs `f`. Every event that this thread records during the call carries `name`: in PyTorch's field `compile_context`, and as a frame that
/// encloses the frames of the event's stack. Nested names are joined by slashes. Each name is kept for the life of the process, so use few.
///
/// ```
/// use claystone::storage::{History, HistoryOptions, TraceAction, with_context};
/// let history = History::new();
/// history.record_memory_history(HistoryOptions::default())?;
/// with_context("forward", || with_context("layer 1", || history.record(TraceAction::Alloc, 0, 512, 0)));
/// assert_eq!(history.entries()[0].compile_context, "forward/layer 1");
/// assert!(history.entries()[0].frames.iter().any(|frame| frame.name == "layer 1"));
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn with_context<R>(name: &str, f: impl FnOnce() -> R) -> R {
    let outer = NamePath::current();
    let inner = outer.child(name);
    thread::replace(|state| &state.names, inner.0);
    // During profiling, names of `annotate` may enclose this name.
    let annotation = match profiler::annotation() {
        around if around == outer.0 => inner,
        around => NamePath(around).child(name),
    };
    let profiled = profiler::set_annotation(annotation.0, names_of);
    let _restore = OnDrop(|| {
        thread::replace(|state| &state.names, outer.0);
        profiler::set_annotation(profiled, names_of);
    });
    f()
}

/// Sets the name that encloses all later events of this thread, as a call of [`with_context`] around the rest of the thread would
/// (PyTorch's `_set_memory_metadata`). An empty name removes the name. Inside of `with_context` the name lasts until that call returns.
///
/// ```
/// use claystone::storage::{History, HistoryOptions, TraceAction, set_context, with_context};
/// let history = History::new();
/// history.record_memory_history(HistoryOptions::default())?;
/// set_context("epoch 1");
/// with_context("forward", || history.record(TraceAction::Alloc, 0, 512, 0));
/// set_context("");
/// assert_eq!(history.entries()[0].compile_context, "epoch 1/forward");
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn set_context(name: &str) {
    let names = if name.is_empty() { NamePath::NONE } else { NamePath::NONE.child(name) };
    thread::replace(|state| &state.names, names.0);
}

/// Returns the names of the node with this number, the innermost name first.
fn names_of(number: u32) -> Vec<String> {
    NamePath(number).list()
}

/// The number of histories that are recording. Spans and callers' lines are recorded only while this number is above 0.
static RECORDING: AtomicUsize = AtomicUsize::new(0);

/// The latest starts and ends of spans in the whole process.
static SPANS: Mutex<VecDeque<(String, Stage, u64)>> = Mutex::new(VecDeque::new());

/// The number of starts and ends to keep.
const MAX_SPANS: usize = 100_000;

/// Counts how many histories are recording: adds one if `on`, else subtracts one.
pub(in crate::storage) fn count_recording(on: bool) {
    if on {
        RECORDING.fetch_add(1, Ordering::Relaxed);
    } else {
        RECORDING.fetch_sub(1, Ordering::Relaxed);
    }
}

#[inline]
pub(super) fn is_recording() -> bool {
    RECORDING.load(Ordering::Relaxed) != 0
}

/// Runs `f`, and shows its start and end under `name` in the snapshots of every device (PyTorch's
/// `external_annotations`). Spans are recorded while any allocator's history is recording; the latest 50,000 spans of
/// the process are kept.
///
/// During [profiling](crate::profiler) the span is an event of the profile, and everything that this thread records
/// during the call carries `name`. Each name is then kept for the life of the process, so use few.
///
/// ```
/// let four = claystone::storage::annotate("forward", || 2 + 2);
/// assert_eq!(four, 4);
/// ```
pub fn annotate<R>(name: &str, f: impl FnOnce() -> R) -> R {
    if profiler::is_on() {
        return run_in_profile(name, || run_in_history(name, f));
    }
    run_in_history(name, f)
}

/// Runs `f` as a span of the profile, whose records carry the name.
fn run_in_profile<R>(name: &str, f: impl FnOnce() -> R) -> R {
    let outer = profiler::annotation();
    profiler::set_annotation(NamePath(outer).child(name).0, names_of);
    let _restore = OnDrop(|| _ = profiler::set_annotation(outer, names_of));
    let _span = profiler::span(profiler::RecordKind::Annotation, "", None, 0, 0);
    f()
}

/// Runs `f` as a span of the history, if one is recording.
fn run_in_history<R>(name: &str, f: impl FnOnce() -> R) -> R {
    if !is_recording() {
        return f();
    }
    record_span_edge(name, Stage::Start);
    let _end = OnDrop(|| record_span_edge(name, Stage::End));
    f()
}

fn record_span_edge(name: &str, stage: Stage) {
    let mut spans = lock(&SPANS);
    if spans.len() == MAX_SPANS {
        spans.pop_front();
    }
    spans.push_back((name.to_owned(), stage, now_us()));
}

/// Returns the spans recorded by [`annotate`], in the form that a snapshot of the device with this number contains.
pub fn annotations(device: u32) -> Vec<Annotation> {
    let annotation = |(name, stage, time_us): &(String, Stage, u64)| Annotation {
        name: name.clone(),
        stage: *stage,
        device,
        time_us: *time_us,
    };
    lock(&SPANS).iter().map(annotation).collect()
}
