//! Launch plans: everything about the launches of an operation except its buffers and scalars.
//!
//! An operation chooses its kernel, sizes and arguments once for each combination of operand layouts, and the
//! [`launch_cache`](crate::backend::opencl::launch_cache) stores the plan. A plan refers to a tensor by its index in the list that each call passes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use smallvec::SmallVec;

use crate::backend::opencl::checked_indices;
use crate::backend::opencl::kernels::{BufferView, scalar_arg};
use crate::backend::problem::map::Params;
use crate::device::opencl::{ARRIVAL_COUNTERS, Arg, ClDevice, ClKernel};
use crate::{Compute, DType, Result, Tensor};

/// The launches of one operation. Several launches share one scratch tensor.
pub(crate) struct LaunchPlan {
    device: &'static ClDevice,
    /// The number of elements and the dtype of the scratch tensor. Each call allocates the scratch tensor and appends it to the list of tensors.
    scratch: Option<(usize, DType)>,
    launches: SmallVec<[KernelLaunch; 1]>,
    /// The list index of the tensor whose indices the kernels check, and the number of that check in [`checked_indices`].
    indices: Option<(usize, u64)>,
}

/// The launch of one kernel, without its buffers, offsets and scalars, which each call fills in.
pub(crate) struct KernelLaunch {
    kernel: Arc<ClKernel>,
    global: usize,
    local: usize,
    /// The list indices of the tensors whose buffers are passed to the kernel. [`Argument`]s and [`DeferredWord`]s index into this vector.
    buffers: Vec<usize>,
    arguments: Vec<Argument>,
    /// The words of all structs that are passed to the kernel by value.
    words: Vec<i64>,
    /// Words that each call fills in, as pairs of an index into `words` and the value to fill in.
    pub(super) deferred: Vec<(usize, DeferredWord)>,
}

/// One argument of a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Argument {
    Buffer(u32),
    /// The offset of a tensor in its buffer plus `skip` elements, in units of `unit` elements.
    Offset {
        of: u32,
        unit: u32,
        skip: isize,
    },
    /// An argument with the same value at every call.
    Fixed(Arg<'static>),
    /// A struct made of `words`, from the first index to the second.
    Words(u32, u32),
    /// The first `n` scalars of the call, one argument each, converted to the compute type.
    Scalars(usize, Compute),
    /// The first `n` seeds of the call, two arguments each: key and stream.
    Seeds(usize),
    /// The buffer in which kernels record faults.
    Faults,
    /// The buffer with the counters of finished work-groups.
    Arrivals,
    /// The index of the current stream's first counter in the buffer that [`Arrivals`](Self::Arrivals) passes.
    FirstArrival,
}

/// The value of a word that each call fills in.
#[derive(Clone, Copy)]
pub(crate) enum DeferredWord {
    /// The offset of a tensor in its buffer, in elements.
    Offset(usize),
    /// The index of the current stream's first counter of finished work-groups.
    FirstArrival,
}

impl LaunchPlan {
    pub(crate) fn single(device: &'static ClDevice, launch: KernelLaunch) -> LaunchPlan {
        LaunchPlan::new(device, None, [launch])
    }

    /// Makes a plan of several launches, which run in order. `scratch` is the number of elements and the dtype of a scratch tensor.
    pub(crate) fn new(
        device: &'static ClDevice,
        scratch: Option<(usize, DType)>,
        launches: impl IntoIterator<Item = KernelLaunch>,
    ) -> LaunchPlan {
        LaunchPlan { device, scratch, launches: launches.into_iter().collect(), indices: None }
    }

    /// Declares that the kernels fault only if tensor `k` holds an index out of range. Indices that passed this check before need no second
    /// check.
    pub(crate) fn with_index_check(self, k: usize) -> LaunchPlan {
        static CHECKS: AtomicU64 = AtomicU64::new(1);
        LaunchPlan { indices: Some((k, CHECKS.fetch_add(1, Relaxed))), ..self }
    }

    /// True if tensor `k` of the list is passed to a kernel.
    pub(crate) fn uses_tensor(&self, k: usize) -> bool {
        self.launches.iter().any(|launch| launch.buffers.contains(&k))
    }

    /// Launches the plan on tensors with the layouts for which the plan was made.
    pub(crate) fn launch(&self, tensors: &[&Tensor], params: Params) -> Result<()> {
        let unknown = self
            .indices
            .and_then(|(k, check)| Some((k, checked_indices::begin_check(self.device, tensors[k], check)?)));
        let may_fault = self.indices.is_none() || unknown.is_some();
        let launch = |tensors: &[&Tensor]| {
            self.launches.iter().try_for_each(|launch| launch.launch(self.device, tensors, params, may_fault))
        };
        match self.scratch {
            None => launch(tensors)?,
            Some((count, dtype)) => {
                let scratch = Tensor::empty_with_shape(count, dtype, self.device.device())?;
                launch(&tensors.iter().copied().chain([&scratch]).collect::<SmallVec<[&Tensor; 8]>>())?;
            }
        }
        if let Some((k, unknown)) = unknown {
            checked_indices::note_launch(self.device, tensors[k], unknown);
        }
        Ok(())
    }
}

impl KernelLaunch {
    /// Makes a launch of at least `global` work-items, in work-groups of `local`. Arguments are added afterwards, in order.
    pub(crate) fn new(kernel: Arc<ClKernel>, global: usize, local: usize) -> KernelLaunch {
        let (buffers, arguments, words, deferred) = Default::default();
        KernelLaunch { kernel, global, local, buffers, arguments, words, deferred }
    }

    /// Adds the buffer of tensor `k`, and returns its index among the buffers of this launch.
    pub(crate) fn push_buffer(&mut self, k: usize) -> usize {
        self.buffers.push(k);
        self.arguments.push(Argument::Buffer((self.buffers.len() - 1) as u32));
        self.buffers.len() - 1
    }

    /// Adds two arguments: the buffer of tensor `k`, and the tensor's offset in that buffer.
    pub(crate) fn push_tensor(&mut self, k: usize) {
        self.push_tensor_at(k, 0, 1);
    }

    /// Like [`push_tensor`](Self::push_tensor), but adds `skip` elements to the offset and passes the offset in units of `unit` elements.
    pub(crate) fn push_tensor_at(&mut self, k: usize, skip: isize, unit: usize) {
        let of = self.push_buffer(k) as u32;
        self.arguments.push(Argument::Offset { of, unit: unit as u32, skip });
    }

    pub(crate) fn push(&mut self, argument: Argument) {
        self.arguments.push(argument);
    }

    /// Adds arguments with the same values at every call.
    pub(crate) fn push_fixed(&mut self, args: impl IntoIterator<Item = Arg<'static>>) {
        self.arguments.extend(args.into_iter().map(Argument::Fixed));
    }

    /// Adds a struct made of `words` as one argument.
    pub(crate) fn push_words(&mut self, words: impl IntoIterator<Item = i64>) {
        let from = self.words.len() as u32;
        self.words.extend(words);
        self.arguments.push(Argument::Words(from, self.words.len() as u32));
    }

    fn launch(&self, device: &'static ClDevice, tensors: &[&Tensor], params: Params, may_fault: bool) -> Result<()> {
        let mut views: SmallVec<[BufferView; 10]> = SmallVec::new();
        for &k in &self.buffers {
            match tensors[k].device_view() {
                Ok(view) => views.push(view),
                Err(error) => return Err(error),
            }
        }
        let first_arrival = || device.current_stream().index() * ARRIVAL_COUNTERS;
        let mut filled: SmallVec<[i64; 64]> = SmallVec::new();
        let words = match self.deferred[..] {
            [] => &self.words[..],
            _ => {
                filled.extend_from_slice(&self.words);
                for &(word, what) in &self.deferred {
                    filled[word] = match what {
                        DeferredWord::Offset(of) => views[of].first_element() as i64,
                        DeferredWord::FirstArrival => first_arrival() as i64,
                    };
                }
                &filled[..]
            }
        };
        let mut args: SmallVec<[Arg; 32]> = SmallVec::new();
        for argument in &self.arguments {
            let arg = match *argument {
                Argument::Buffer(of) => views[of as usize].buffer(),
                Argument::Offset { of, unit, skip } => {
                    let first = views[of as usize].first_element().wrapping_add_signed(skip);
                    Arg::U64(if unit == 1 { first } else { first / unit as usize } as u64)
                }
                Argument::Fixed(arg) => arg,
                Argument::Words(from, to) => Arg::Bytes(bytemuck::cast_slice(&words[from as usize..to as usize])),
                Argument::Scalars(count, compute) => {
                    let scalars = params.scalars.iter().take(count);
                    scalars.for_each(|&s| args.push(scalar_arg(compute, s))); // a loop, because `extend` would be an out-of-line call
                    continue;
                }
                Argument::Seeds(count) => {
                    let seeds = params.seeds.iter().take(count);
                    args.extend(seeds.flat_map(|seed| [Arg::U64(seed.key), Arg::U64(seed.stream)]));
                    continue;
                }
                Argument::Faults if may_fault => device.faults(),
                Argument::Faults => device.no_faults(),
                Argument::Arrivals => Arg::Buffer(device.arrival_counters()?),
                Argument::FirstArrival => Arg::U32(first_arrival() as u32),
            };
            args.push(arg);
        }
        device.launch(&self.kernel, &args, &[self.global], &[self.local])
    }
}
