//! Lets users add operations by name, or replace built-in operations on the CPU or on OpenCL.
//!
//! A replacement runs wherever the method is called, inside this crate too. Its gradient is computed by the built-in operation, which
//! runs again in the backward pass, unless the replacement has a gradient function. While nothing is registered, the check costs a method
//! one relaxed atomic load.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, RwLock};

use smallvec::SmallVec;

use crate::autograd::{Gradients, Saved};
pub use crate::device::name::Backend;
use crate::ops::dispatch::arguments::Argument;
use crate::ops::dispatch::operation::Operation;
use crate::ops::dispatch::parameters::Slots;
use crate::sync;
use crate::{Error, Result, Tensor, autograd};

type Forward = dyn Fn(&[Option<&Tensor>], &[Argument]) -> Result<Vec<Tensor>> + Send + Sync;
type Backward = dyn Fn(&[&Tensor], &[Argument], &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync;

/// A user's implementation of an operation on one kind of device.
#[derive(Clone)]
pub struct Implementation {
    forward: Arc<Forward>,
    backward: Option<Arc<Backward>>,
    /// Whether an optional tensor may be left out while a later tensor is given.
    accepts_gaps: bool,
}

impl Implementation {
    /// Creates an implementation from a function. The function receives the tensors that are given and the arguments, in the order of the
    /// method's parameters.
    ///
    /// The function runs outside the graph. If the function calls the operation that it replaces, the built-in code runs. The built-in
    /// code also runs if the caller leaves out a tensor before one that is given; use [`with_optional`](Self::with_optional) for
    /// such calls.
    pub fn new(
        forward: impl Fn(&[&Tensor], &[Argument]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
    ) -> Implementation {
        let given =
            move |tensors: &[Option<&Tensor>], arguments: &[Argument]| forward(&present_tensors(tensors), arguments);
        Implementation { accepts_gaps: false, ..Implementation::with_optional(given) }
    }

    /// Creates an implementation like [`new`](Self::new), but the function receives one entry for each tensor parameter: `None` for a
    /// tensor that is left out.
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
        Implementation { forward: Arc::new(forward), backward: None, accepts_gaps: true }
    }

    /// Adds a gradient function. The function receives the given inputs, the arguments and the gradient of the first result, and returns
    /// one gradient for each input, or `None` for an input without a gradient.
    pub fn with_backward(
        self,
        backward: impl Fn(&[&Tensor], &[Argument], &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Implementation {
        Implementation { backward: Some(Arc::new(backward)), ..self }
    }
}

fn present_tensors<'a>(tensors: &[Option<&'a Tensor>]) -> SmallVec<[&'a Tensor; 6]> {
    tensors.iter().copied().flatten().collect()
}

/// Keeps an implementation registered until this handle is dropped.
#[derive(Debug)]
#[must_use = "dropping the Registration unregisters the implementation"]
pub struct Registration {
    name: &'static str,
    backend: Backend,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // The removed closures are dropped only after the lock on the registry is released, because they may own another `Registration`,
        // whose drop takes the lock.
        let removed = sync::write(&REGISTRY.implementations).remove(&(self.name, self.backend));
        if removed.is_some() {
            REGISTRY.count.fetch_sub(1, Ordering::Release);
        }
    }
}

/// A registered implementation and the built-in operation that it replaces, if any.
#[derive(Clone)]
struct RegisteredImplementation {
    implementation: Implementation,
    built_in: Option<&'static Operation>,
}

type ImplementationMap = HashMap<(&'static str, Backend), RegisteredImplementation>;

/// The registered implementations, and their number, which every operation reads.
struct Registry {
    count: AtomicUsize,
    implementations: LazyLock<RwLock<ImplementationMap>>,
}

static REGISTRY: Registry = Registry { count: AtomicUsize::new(0), implementations: LazyLock::new(RwLock::default) };

thread_local! {
    /// Names of the operations whose replacements are running on this thread. Nested calls of these operations use the built-in code.
    static RUNNING_REPLACEMENTS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f`. Until `f` returns, calls of the operation `name` on this thread use the built-in code.
fn with_built_in<R>(name: &'static str, f: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            RUNNING_REPLACEMENTS.with_borrow_mut(|names| _ = names.pop());
        }
    }
    RUNNING_REPLACEMENTS.with_borrow_mut(|names| names.push(name));
    let _leave = Leave;
    f()
}

/// Registers `implementation` for `backend`. `built_in` is the operation that the implementation replaces, if any.
pub(crate) fn add_implementation(
    name: &'static str,
    backend: Backend,
    implementation: Implementation,
    built_in: Option<&'static Operation>,
) -> Result<Registration> {
    let mut table = sync::write(&REGISTRY.implementations);
    invalid!("register" if table.contains_key(&(name, backend)),
        "{name} already has an implementation for {backend:?}: drop its Registration first");
    table.insert((name, backend), RegisteredImplementation { implementation, built_in });
    REGISTRY.count.fetch_add(1, Ordering::Release);
    Ok(Registration { name, backend })
}

/// Returns the static name under which an implementation is registered for `backend`.
pub(crate) fn registered_name(name: &str, backend: Backend) -> Option<&'static str> {
    sync::read(&REGISTRY.implementations).keys().find(|(n, b)| (*n, *b) == (name, backend)).map(|(n, _)| *n)
}

/// Calls the registered implementation of `op` for the device of the first tensor, and records its results in the graph.
/// Returns `None` if there is no implementation, and the method continues with the built-in code.
#[inline]
pub(crate) fn call_replacement<'a, T: Copy + Into<Option<&'a Tensor>>>(
    op: &'static str,
    inputs: &[T],
    arguments: impl FnOnce() -> Vec<Argument>,
) -> Result<Option<Vec<Tensor>>> {
    if REGISTRY.count.load(Ordering::Relaxed) == 0 {
        return Ok(None);
    }
    match find_replacement(op, inputs) {
        Some((entry, inputs)) => run_replacement(op, &inputs, entry, arguments()).map(Some),
        None => Ok(None),
    }
}

/// Finds the replacement of an operation on the device of its inputs. Returns `None` inside a call of this replacement.
#[cold]
fn find_replacement<'a, T: Copy + Into<Option<&'a Tensor>>>(
    op: &'static str,
    inputs: &[T],
) -> Option<(RegisteredImplementation, Slots<'a>)> {
    let inputs: Slots = inputs.iter().map(|&t| t.into()).collect();
    let key = (op, Backend::from(inputs.iter().flatten().next()?.device()));
    if RUNNING_REPLACEMENTS.with_borrow(|names| names.contains(&op)) {
        return None;
    }
    let entry = sync::read(&REGISTRY.implementations).get(&key).cloned()?;
    let has_gap = inputs.iter().skip_while(|t| t.is_some()).any(|t| t.is_some());
    (entry.implementation.accepts_gaps || !has_gap).then_some((entry, inputs))
}

// This function is not generic over the closure that creates the arguments, because about 200 operations call it, and each would compile
// a copy.
#[cold]
fn run_replacement(
    op: &'static str,
    slots: &[Option<&Tensor>],
    entry: RegisteredImplementation,
    arguments: Vec<Argument>,
) -> Result<Vec<Tensor>> {
    let RegisteredImplementation { implementation, built_in: operation } = entry;
    let inputs = &present_tensors(slots)[..];
    let detached: Vec<Option<Tensor>> = slots.iter().map(|t| t.map(Tensor::detach)).collect();
    let refs: Slots = detached.iter().map(Option::as_ref).collect();
    let outs = with_built_in(op, || (implementation.forward)(&refs, &arguments))?;
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
        // A view of an input would get a second node in the graph, so views are copied.
        let out = if inputs.iter().any(|t| t.shares_storage(&out)) { out.deep_copy(false)? } else { out.detach() };
        let saved: Vec<Saved> = inputs.iter().map(|t| Saved::new(t)).collect();
        let (arguments, present, backward) = (arguments.clone(), present.clone(), implementation.backward.clone());
        Ok(autograd::record(op, out, inputs, move |ctx| {
            let inputs = saved.iter().map(|s| s.get(op).map(Tensor::detach)).collect::<Result<Vec<_>>>()?;
            let grad = ctx.grad()?;
            let wanted: Vec<bool> = (0..inputs.len()).map(|i| ctx.needs_gradient(i)).collect();
            if let Some(backward) = backward.as_ref().filter(|_| k == 0) {
                return custom_gradients(op, &**backward, &inputs, &arguments, &grad);
            }
            let invalid = |reason: String| Err(Error::Autograd { op, reason });
            let Some(operation) = operation else {
                return invalid("its registered implementation has no backward: give it one with_backward".into());
            };
            // The built-in operation runs again with the inputs that were given.
            let leaves = inputs.into_iter().zip(wanted).map(|(t, wanted)| t.requires_grad_(wanted));
            let leaves = leaves.collect::<Result<Vec<_>>>()?;
            let mut given = leaves.iter();
            let slots: Slots = present.iter().map(|&present| if present { given.next() } else { None }).collect();
            let outs = autograd::enable_grad(|| with_built_in(op, || operation.call_method(&slots, &arguments)))?;
            let Some(out) = outs.get(k) else {
                let results = outs.len();
                return invalid(format!(
                    "its registered implementation gives result {k}, and the operation has {results}"
                ));
            };
            out.backward_with(&grad)?;
            Ok(leaves.iter().map(Tensor::grad).collect())
        }))
    };
    outs.into_iter().enumerate().map(track).collect()
}

fn custom_gradients(
    op: &'static str,
    backward: &Backward,
    inputs: &[Tensor],
    arguments: &[Argument],
    grad: &Tensor,
) -> Result<Gradients> {
    let gradients = with_built_in(op, || backward(&inputs.iter().collect::<Vec<_>>(), arguments, grad))?;
    let alike = |g: &Tensor, x: &Tensor| (g.shape(), g.dtype(), g.device()) == (x.shape(), x.dtype(), x.device());
    let fits = |(g, x): (&Option<Tensor>, &Tensor)| g.as_ref().is_none_or(|g| alike(g, x));
    if gradients.len() != inputs.len() || !gradients.iter().zip(inputs).all(fits) {
        let reason = "the backward of its registered implementation has to give one gradient for each input, of its \
                      shape and dtype and on its device";
        return Err(Error::Autograd { op, reason: reason.into() });
    }
    Ok(gradients.into_iter().map(|g| g.map(|g| g.detach())).collect())
}

/// `return_replacement!("name", [tensors], arguments ...);` at the beginning of a method calls a registered implementation, if there is
/// one, and returns its result. The tensors are `Option`s if a tensor may be left out before a tensor that is given. A closure that
/// creates the arguments is written after a `;`. With `op = ` before the name, the macro declares a variable `op` that holds the name.
///
/// Memory allocated from here to the end of the method is attributed to the caller's line, because the method is `#[track_caller]`.
macro_rules! return_replacement {
    ($name:ident = $op:expr, $($rest:tt)*) => {
        let $name: &'static str = $op;
        $crate::ops::dispatch::registry::return_replacement!($name, $($rest)*);
    };
    ($op:expr, $inputs:expr; $arguments:expr) => {
        let _caller = $crate::storage::Caller::enter();
        if let Some(results) = $crate::ops::dispatch::registry::call_replacement($op, &$inputs, $arguments)? {
            return $crate::ops::dispatch::results::FromResults::from_results(results);
        }
    };
    ($op:expr, $inputs:expr $(, $argument:expr)* $(,)?) => {
        $crate::ops::dispatch::registry::return_replacement!($op, $inputs; || vec![$($argument.into()),*]);
    };
}

pub(crate) use return_replacement;
