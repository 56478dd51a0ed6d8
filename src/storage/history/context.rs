//! Where in a program events happen: call stacks, and names for what a thread is doing.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use super::snapshot::{Annotation, Frame, Stage};
use super::stack::Stack;
use super::{caller, now_us};
use crate::device::{lock, profiler};

/// Where in a program something happened: the call stack, the line that called the crate (see [`Caller`](super::Caller)), and the
/// names given to [`with_context`]. Copying and storing it allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context {
    stack: Stack,
    names: Names,
    caller: Option<&'static Location<'static>>,
}

/// The names a thread was inside of, as one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Names(u32);

/// All names ever entered, as a tree: each below those around it. Programs have few, so none is removed. The first node is
/// the root, which has no name.
static TREE: LazyLock<Mutex<Vec<Node>>> = LazyLock::new(|| Mutex::new(vec![Node::default()]));

#[derive(Default)]
struct Node {
    parent: u32,
    name: Arc<str>,
    children: HashMap<Arc<str>, Names>,
}

thread_local! {
    static CURRENT: Cell<Names> = const { Cell::new(Names::NONE) };
}

impl Context {
    /// Nothing is known: no stack, and outside of any [`with_context`].
    pub const NONE: Context = Context { stack: Stack::NONE, names: Names::NONE, caller: None };

    /// The calling thread's names.
    pub fn current() -> Context {
        Context { names: Names::current(), ..Context::NONE }
    }

    /// The calling thread's names and its stack.
    #[inline]
    pub(super) fn with_stack() -> Context {
        Context { stack: Stack::capture(), ..Context::current() }
    }

    /// With the line that called the crate.
    pub(super) fn with_caller(self) -> Context {
        Context { caller: caller::current(), ..self }
    }

    /// The frames of the stack, the innermost first, without those of this crate and the standard library, or the line that
    /// called the crate where no stack was captured; then one frame a name, the innermost first.
    pub fn frames(self) -> Arc<[Frame]> {
        let mut frames = self.stack.frames();
        if let Some(location) = self.caller {
            caller::add_to(&mut frames, location);
        }
        let name = |name| Frame { filename: String::new(), line: 0, name };
        frames.into_iter().chain(self.names.list().into_iter().map(name)).collect()
    }

    /// The names joined by slashes, the outermost first; empty for none.
    pub(super) fn path(self) -> String {
        self.names.path()
    }
}

/// The frames of many contexts, of which most are the same.
#[derive(Default)]
pub(super) struct Frames(HashMap<Context, Arc<[Frame]>>);

impl Frames {
    pub(super) fn of(&mut self, context: Context) -> Arc<[Frame]> {
        Arc::clone(self.0.entry(context).or_insert_with(|| context.frames()))
    }
}

impl Names {
    const NONE: Names = Names(0);

    fn current() -> Names {
        // Blocks may be freed by destructors of thread-locals, when this one is gone.
        CURRENT.try_with(Cell::get).unwrap_or(Names::NONE)
    }

    /// The innermost first.
    fn list(mut self) -> Vec<String> {
        let tree = lock(&TREE);
        let mut names = Vec::new();
        while self != Names::NONE {
            let node = &tree[self.0 as usize];
            names.push(node.name.to_string());
            self = Names(node.parent);
        }
        names
    }

    /// Joined by slashes, the outermost first.
    fn path(self) -> String {
        let mut names = self.list();
        names.reverse();
        names.join("/")
    }

    fn child(self, name: &str) -> Names {
        let mut tree = lock(&TREE);
        if let Some(&names) = tree[self.0 as usize].children.get(name) {
            return names;
        }
        let (names, name): (_, Arc<str>) = (Names(tree.len() as u32), name.into());
        tree[self.0 as usize].children.insert(Arc::clone(&name), names);
        tree.push(Node { parent: self.0, name, ..Node::default() });
        names
    }
}

/// Runs `f`; every event of this thread that is recorded meanwhile carries `name`, as PyTorch's `compile_context` and as a
/// frame around those of its stack. Nested names are joined by slashes. Each name is remembered for the life of the process:
/// use few.
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
    let outer = Names::current();
    let inner = outer.child(name);
    CURRENT.set(inner);
    // While something is profiled, names of `annotate` may be around this one.
    let annotation = match profiler::annotation() {
        around if around == outer.0 => inner,
        around => Names(around).child(name),
    };
    let profiled = profiler::set_annotation(annotation.0, names_of);
    let _restore = OnDrop(|| {
        CURRENT.set(outer);
        profiler::set_annotation(profiled, names_of);
    });
    f()
}

/// The names of a context by its number, the innermost first.
fn names_of(number: u32) -> Vec<String> {
    Names(number).list()
}

/// The number of histories that are recording. Spans and callers' lines are kept only while there are any.
static RECORDING: AtomicUsize = AtomicUsize::new(0);

/// Begins and ends of spans, of the whole process.
static SPANS: Mutex<VecDeque<(String, Stage, u64)>> = Mutex::new(VecDeque::new());

/// How many begins and ends are kept.
const MAX_SPANS: usize = 100_000;

pub(super) fn count_recording(on: bool) {
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

/// Runs `f`; snapshots of every device show when it began and ended under `name` (PyTorch's `external_annotations`).
/// Recorded while some allocator's history is on; the latest 50,000 spans of the process are kept. While something is
/// [profiled](crate::profiler) it is an event of the profile, and everything of this thread that is recorded meanwhile carries
/// `name`; then each name is remembered for the life of the process: use few.
///
/// ```
/// let four = claystone::storage::annotate("forward", || 2 + 2);
/// assert_eq!(four, 4);
/// ```
pub fn annotate<R>(name: &str, f: impl FnOnce() -> R) -> R {
    if profiler::is_on() {
        return profiled(name, || in_history(name, f));
    }
    in_history(name, f)
}

/// Runs `f` as a span of the profile, whose records carry the name.
fn profiled<R>(name: &str, f: impl FnOnce() -> R) -> R {
    let mut record = profiler::Record::begin(profiler::Kind::Annotation(0), "", None);
    let outer = record.annotation;
    let inner = Names(outer).child(name).0;
    record.kind = profiler::Kind::Annotation(inner);
    profiler::set_annotation(inner, names_of);
    let _restore = OnDrop(|| _ = profiler::set_annotation(outer, names_of));
    let _span = profiler::Span::new(record);
    f()
}

fn in_history<R>(name: &str, f: impl FnOnce() -> R) -> R {
    if !is_recording() {
        return f();
    }
    mark(name, Stage::Start);
    let _end = OnDrop(|| mark(name, Stage::End));
    f()
}

fn mark(name: &str, stage: Stage) {
    let mut spans = lock(&SPANS);
    if spans.len() == MAX_SPANS {
        spans.pop_front();
    }
    spans.push_back((name.to_owned(), stage, now_us()));
}

/// The spans recorded so far by [`annotate`], as a snapshot of the device of this number has them.
pub fn annotations(device: u32) -> Vec<Annotation> {
    let annotation = |(name, stage, time_us): &(String, Stage, u64)| Annotation {
        name: name.clone(),
        stage: *stage,
        device,
        time_us: *time_us,
    };
    lock(&SPANS).iter().map(annotation).collect()
}

/// Runs its function when dropped, and so also when `f` panics.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)()
    }
}
