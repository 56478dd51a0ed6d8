//! Users add operations by name, or replace built-in ones for the CPU or for OpenCL, from outside the crate.
//!
//! A replacement computes what the method computes, wherever it is called from. The gradient stays the built-in one, recomputed in
//! backward, unless the replacement brings its own. While nothing is registered, a method pays one relaxed load.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use smallvec::SmallVec;

use crate::autograd::{Gradients, Saved};
use crate::ops::dispatch::arguments::Argument;
use crate::ops::dispatch::checks::invalid;
use crate::ops::dispatch::operation::Operation;
use crate::ops::dispatch::parameters::Slots;
use crate::{Device, Error, Result, Tensor, autograd};

/// The devices that an implementation is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// [`Device::Cpu`].
    Cpu,
    /// Every [`Device::OpenCL`].
    OpenCL,
}

impl From<Device> for Backend {
    fn from(device: Device) -> Backend {
        if device.is_cpu() { Backend::Cpu } else { Backend::OpenCL }
    }
}

type Forward = dyn Fn(&[Option<&Tensor>], &[Argument]) -> Result<Vec<Tensor>> + Send + Sync;
type Backward = dyn Fn(&[&Tensor], &[Argument], &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync;

/// What an operation does on a device.
#[derive(Clone)]
pub struct Implementation {
    forward: Arc<Forward>,
    backward: Option<Arc<Backward>>,
    /// Whether a tensor may be left out before one that is given.
    gaps: bool,
}

impl Implementation {
    /// From tensors and arguments (in the order of the method's parameters) to results. It is called outside the graph;
    /// operations in it that would come back to it run what is built in, as do calls that leave a tensor out before one that
    /// they give: [`with_optional`](Self::with_optional) is for these.
    pub fn new(
        forward: impl Fn(&[&Tensor], &[Argument]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
    ) -> Implementation {
        let given = move |tensors: &[Option<&Tensor>], arguments: &[Argument]| forward(&given(tensors), arguments);
        Implementation { gaps: false, ..Implementation::with_optional(given) }
    }

    /// [`new`](Self::new) from all tensors that the operation may take, `None` where one is left out.
    ///
    /// ```
    /// use claystone::ops::{self, Backend, Implementation};
    /// use claystone::{Device, Tensor};
    /// let only_bias = Implementation::with_optional(|x, _| Ok(vec![x[2].or(x[0]).unwrap().shallow_clone()]));
    /// let _kept = ops::register("instance_norm", Backend::Cpu, only_bias)?;
    /// let (x, bias) = (Tensor::zeros(&[1, 2, 3], Device::Cpu)?, Tensor::ones(&[2], Device::Cpu)?);
    /// assert_eq!(x.instance_norm(None, Some(&bias), 1e-5)?.to_vec::<f32>()?, [1.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn with_optional(
        forward: impl Fn(&[Option<&Tensor>], &[Argument]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
    ) -> Implementation {
        Implementation { forward: Arc::new(forward), backward: None, gaps: true }
    }

    /// With a gradient of its own: from the inputs that are given, the arguments and the gradient of the (first) result to the
    /// gradients of these inputs, None for those that have none.
    pub fn with_backward(
        self,
        backward: impl Fn(&[&Tensor], &[Argument], &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Implementation {
        Implementation { backward: Some(Arc::new(backward)), ..self }
    }
}

/// The tensors that are not left out.
fn given<'a>(tensors: &[Option<&'a Tensor>]) -> SmallVec<[&'a Tensor; 6]> {
    tensors.iter().copied().flatten().collect()
}

/// An implementation is in force as long as this lives.
#[derive(Debug)]
#[must_use = "dropped, it takes the implementation away again"]
pub struct Registration {
    name: &'static str,
    backend: Backend,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Its captures are dropped after the lock is released: they may hold another Registration.
        let removed = write().remove(&(self.name, self.backend));
        if removed.is_some() {
            REGISTERED.fetch_sub(1, Ordering::Release);
        }
    }
}

/// An implementation, and the operation of its name that is built in, if there is one.
#[derive(Clone)]
struct Entry {
    implementation: Implementation,
    built_in: Option<&'static Operation>,
}

type Table = HashMap<(&'static str, Backend), Entry>;

static TABLE: LazyLock<RwLock<Table>> = LazyLock::new(RwLock::default);
static REGISTERED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The operations whose implementations are running: called again inside, they are the built-in ones.
    static RUNNING: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` with what is built in under `name`.
fn built_in<R>(name: &'static str, f: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            RUNNING.with_borrow_mut(|names| _ = names.pop());
        }
    }
    RUNNING.with_borrow_mut(|names| names.push(name));
    let _leave = Leave;
    f()
}

/// Registers `implementation` for the devices of `backend`, in the place of `built_in` if that is given.
pub(crate) fn insert(
    name: &'static str,
    backend: Backend,
    implementation: Implementation,
    built_in: Option<&'static Operation>,
) -> Result<Registration> {
    let mut table = write();
    invalid!("register" if table.contains_key(&(name, backend)),
        "{name} already has an implementation for {backend:?}: drop its Registration first");
    table.insert((name, backend), Entry { implementation, built_in });
    REGISTERED.fetch_add(1, Ordering::Release);
    Ok(Registration { name, backend })
}

/// The name as it was registered for `backend`, if it was.
pub(crate) fn registered(name: &str, backend: Backend) -> Option<&'static str> {
    read().keys().find(|(n, b)| (*n, *b) == (name, backend)).map(|(n, _)| *n)
}

fn write() -> RwLockWriteGuard<'static, Table> {
    TABLE.write().unwrap_or_else(PoisonError::into_inner)
}

fn read() -> RwLockReadGuard<'static, Table> {
    TABLE.read().unwrap_or_else(PoisonError::into_inner)
}

/// What a registered implementation of `op` makes of these, on the device of the first; None where there is none: the
/// method goes on. Recorded in the graph like the operation itself.
#[inline]
pub(crate) fn replacement<'a, T: Copy + Into<Option<&'a Tensor>>>(
    op: &'static str,
    inputs: &[T],
    arguments: impl FnOnce() -> Vec<Argument>,
) -> Result<Option<Vec<Tensor>>> {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return Ok(None);
    }
    match entry_for(op, inputs) {
        Some((entry, inputs)) => replace(op, &inputs, entry, arguments()).map(Some),
        None => Ok(None),
    }
}

/// What replaces an operation on the device of its inputs, unless it is the replacement that calls it.
#[cold]
fn entry_for<'a, T: Copy + Into<Option<&'a Tensor>>>(op: &'static str, inputs: &[T]) -> Option<(Entry, Slots<'a>)> {
    let inputs: Slots = inputs.iter().map(|&t| t.into()).collect();
    let key = (op, Backend::from(inputs.iter().flatten().next()?.device()));
    if RUNNING.with_borrow(|names| names.contains(&op)) {
        return None;
    }
    let entry = read().get(&key).cloned()?;
    let has_gap = inputs.iter().skip_while(|t| t.is_some()).any(|t| t.is_some());
    (entry.implementation.gaps || !has_gap).then_some((entry, inputs))
}

// Not generic over the closure that makes the arguments: some 200 operations call it.
#[cold]
fn replace(op: &'static str, slots: &[Option<&Tensor>], entry: Entry, arguments: Vec<Argument>) -> Result<Vec<Tensor>> {
    let Entry { implementation, built_in: operation } = entry;
    let inputs = &given(slots)[..];
    let detached: Vec<Option<Tensor>> = slots.iter().map(|t| t.map(Tensor::detach)).collect();
    let refs: Slots = detached.iter().map(Option::as_ref).collect();
    let outs = built_in(op, || (implementation.forward)(&refs, &arguments))?;
    invalid!(op if outs.is_empty(), "its registered implementation gave no result");
    if !autograd::is_tracked(inputs) {
        return Ok(outs.into_iter().map(|t| t.detach()).collect());
    }
    let differentiable = operation.map_or(implementation.backward.is_some(), |op| op.is_differentiable());
    let arguments = Arc::new(arguments);
    let present: SmallVec<[bool; 6]> = slots.iter().map(Option::is_some).collect();
    let track = |(k, out): (usize, Tensor)| {
        if !out.dtype().is_float() || !differentiable {
            return Ok(out.detach());
        }
        // A view of an input would have a place in the graph beside that of the input.
        let out = if inputs.iter().any(|t| t.shares_storage(&out)) { out.copied(false)? } else { out.detach() };
        let saved: Vec<Saved> = inputs.iter().map(|t| Saved::new(t)).collect();
        let (arguments, present, backward) = (arguments.clone(), present.clone(), implementation.backward.clone());
        Ok(autograd::record(op, out, inputs, move |ctx| {
            let inputs = saved.iter().map(|s| s.get(op).map(Tensor::detach)).collect::<Result<Vec<_>>>()?;
            let grad = ctx.grad()?;
            let wanted: Vec<bool> = (0..inputs.len()).map(|i| ctx.needs(i)).collect();
            match &backward {
                Some(backward) if k == 0 => own_gradients(op, &**backward, &inputs, &arguments, &grad),
                _ => {
                    let leaves = inputs.into_iter().zip(wanted).map(|(t, wanted)| t.requires_grad_(wanted));
                    built_in_gradients(
                        op,
                        operation,
                        k,
                        &leaves.collect::<Result<Vec<_>>>()?,
                        &present,
                        &arguments,
                        &grad,
                    )
                }
            }
        }))
    };
    outs.into_iter().enumerate().map(track).collect()
}

fn own_gradients(
    op: &'static str,
    backward: &Backward,
    inputs: &[Tensor],
    arguments: &[Argument],
    grad: &Tensor,
) -> Result<Gradients> {
    let gradients = built_in(op, || backward(&inputs.iter().collect::<Vec<_>>(), arguments, grad))?;
    let alike = |g: &Tensor, x: &Tensor| (g.shape(), g.dtype(), g.device()) == (x.shape(), x.dtype(), x.device());
    let fits = |(g, x): (&Option<Tensor>, &Tensor)| g.as_ref().is_none_or(|g| alike(g, x));
    if gradients.len() != inputs.len() || !gradients.iter().zip(inputs).all(fits) {
        let reason = "the backward of its registered implementation has to give one gradient for each input, of its \
                      shape and dtype and on its device";
        return Err(Error::Autograd { op, reason: reason.into() });
    }
    Ok(gradients.into_iter().map(|g| g.map(|g| g.detach())).collect())
}

/// The gradient of result `k` by what is built in, computed again from the inputs, which are the tensors that are present.
fn built_in_gradients(
    op: &'static str,
    operation: Option<&'static Operation>,
    k: usize,
    leaves: &[Tensor],
    present: &[bool],
    arguments: &[Argument],
    grad: &Tensor,
) -> Result<Gradients> {
    let Some(operation) = operation else {
        let reason = "its registered implementation has no backward: give it one with_backward";
        return Err(Error::Autograd { op, reason: reason.into() });
    };
    let mut inputs = leaves.iter();
    let slots: Slots = present.iter().map(|&present| if present { inputs.next() } else { None }).collect();
    let outs = autograd::enable_grad(|| built_in(op, || operation.run(&slots, arguments)))?;
    let Some(out) = outs.get(k) else {
        let reason = format!("its registered implementation gives result {k}, and the operation has {}", outs.len());
        return Err(Error::Autograd { op, reason });
    };
    out.backward_with(grad)?;
    Ok(leaves.iter().map(Tensor::grad).collect())
}

/// `replaced!("name", [tensors], arguments ...);` at the beginning of a method: returns what a registered implementation
/// makes of it, where there is one. The tensors are `Option`s where one may be left out before others. A closure that makes the
/// arguments comes after a `;`, and `op = ` before the name makes a variable of it. What is allocated from there to the end of the
/// method, which is `#[track_caller]`, is of its caller's line.
macro_rules! replaced {
    ($name:ident = $op:expr, $($rest:tt)*) => {
        let $name: &'static str = $op;
        $crate::ops::dispatch::registry::replaced!($name, $($rest)*);
    };
    ($op:expr, $inputs:expr; $arguments:expr) => {
        let _caller = $crate::storage::Caller::enter();
        if let Some(results) = $crate::ops::dispatch::registry::replacement($op, &$inputs, $arguments)? {
            return $crate::ops::dispatch::results::FromResults::from_results(results);
        }
    };
    ($op:expr, $inputs:expr $(, $argument:expr)* $(,)?) => {
        $crate::ops::dispatch::registry::replaced!($op, $inputs; || vec![$($argument.into()),*]);
    };
}

pub(crate) use replaced;
