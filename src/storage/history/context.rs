//! Names for what a thread is doing, which take the place of a stack.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use super::now_us;
use super::snapshot::{Annotation, Frame, Stage};
use crate::device::{lock, profiler};

/// The names a thread was inside of, as one number: copying and storing it allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context(u32);

/// All contexts ever entered, as a tree: a context is its parent and a name. Programs have few, so none is removed.
#[derive(Default)]
struct Tree {
    /// Of context i + 1.
    nodes: Vec<(Context, String)>,
    ids: HashMap<(Context, String), Context>,
}

static TREE: LazyLock<Mutex<Tree>> = LazyLock::new(Mutex::default);

thread_local! {
    static CURRENT: Cell<Context> = const { Cell::new(Context::NONE) };
}

impl Context {
    /// Outside of any [`with_context`].
    pub const NONE: Context = Context(0);

    /// The calling thread's.
    pub fn current() -> Context {
        // Blocks may be freed by destructors of thread-locals, when this one is gone.
        CURRENT.try_with(Cell::get).unwrap_or(Context::NONE)
    }

    /// One frame a name, the innermost first, as stacks are written.
    pub fn frames(self) -> Arc<[Frame]> {
        self.names().into_iter().map(|name| Frame { filename: String::new(), line: 0, name }).collect()
    }

    /// The names joined by slashes, the outermost first; empty for none.
    pub(super) fn path(self) -> String {
        let mut names = self.names();
        names.reverse();
        names.join("/")
    }

    fn names(mut self) -> Vec<String> {
        let tree = lock(&TREE);
        let mut names = Vec::new();
        while self != Context::NONE {
            let (parent, name) = &tree.nodes[self.0 as usize - 1];
            names.push(name.clone());
            self = *parent;
        }
        names
    }

    fn child(self, name: &str) -> Context {
        let mut tree = lock(&TREE);
        let key = (self, name.to_owned());
        if let Some(&context) = tree.ids.get(&key) {
            return context;
        }
        tree.nodes.push(key.clone());
        let context = Context(tree.nodes.len() as u32);
        tree.ids.insert(key, context);
        context
    }
}

/// Runs `f`; every event of this thread that is recorded meanwhile carries `name`, as frame and as PyTorch's
/// `compile_context`. Nested names are joined by slashes. Each name is remembered for the life of the process: use few.
///
/// ```
/// use claystone::storage::{History, HistoryOptions, TraceAction, with_context};
/// let history = History::new();
/// history.record_memory_history(HistoryOptions::default())?;
/// with_context("forward", || with_context("layer 1", || history.record(TraceAction::Alloc, 0, 512, 0)));
/// assert_eq!(history.entries()[0].compile_context, "forward/layer 1");
/// assert_eq!(history.entries()[0].frames[0].name, "layer 1");
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn with_context<R>(name: &str, f: impl FnOnce() -> R) -> R {
    let outer = Context::current();
    let inner = outer.child(name);
    CURRENT.set(inner);
    let profiled = profiler::set_annotation(inner.0, name_of);
    let _restore = OnDrop(|| {
        CURRENT.set(outer);
        profiler::set_annotation(profiled, name_of);
    });
    f()
}

/// The name of a context by its number.
fn name_of(number: u32) -> String {
    Context(number).path()
}

/// The number of histories that are recording. Spans are kept only while there are any.
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

/// Runs `f`; snapshots of every device show when it began and ended under `name` (PyTorch's `external_annotations`).
/// Recorded while some allocator's history is on; the latest 50,000 spans of the process are kept.
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
    let record = profiler::Record::begin(profiler::Kind::Annotation, name.to_owned(), None);
    let outer = record.annotation;
    profiler::set_annotation(Context(outer).child(name).0, name_of);
    let _restore = OnDrop(|| _ = profiler::set_annotation(outer, name_of));
    let _span = profiler::Span::new(record);
    f()
}

fn in_history<R>(name: &str, f: impl FnOnce() -> R) -> R {
    if RECORDING.load(Ordering::Relaxed) == 0 {
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
