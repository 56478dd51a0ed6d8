//! Launch plans: everything about the launches of an operation except its buffers and scalars.
//!
//! An operation chooses its kernel, its sizes and its arguments once for each layout of its operands, and the
//! [`launch_cache`](crate::backend::opencl::launch_cache) keeps the plan. A plan names its tensors by their index in a list that every call passes.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::backend::opencl::checked_indices;
use crate::backend::opencl::kernels::BufferView;
use crate::backend::opencl::map::scalar_arg;
use crate::backend::problem::map::Params;
use crate::device::opencl::{ARRIVALS, Arg, ClDevice, ClKernel};
use crate::{Compute, DType, Result, Tensor};

/// The launches of one operation: one, or several that share scratch memory.
pub(crate) struct LaunchPlan {
    device: &'static ClDevice,
    /// The elements of a scratch tensor that is allocated for each call; it is the last of the list.
    scratch: Option<(usize, DType)>,
    launches: SmallVec<[KernelLaunch; 1]>,
    /// The tensor whose indices the kernels check, and the number of that check in [`checked_indices`].
    indices: Option<(usize, u64)>,
}

/// A launch of one kernel.
pub(crate) struct KernelLaunch {
    kernel: Arc<ClKernel>,
    global: usize,
    local: usize,
    /// The indices, in the list, of the tensors that the kernel is given; [`Argument`]s and [`Word`]s index into this.
    buffers: Vec<usize>,
    arguments: Vec<Argument>,
    /// The words of the structs that are passed by value.
    words: Vec<i64>,
    /// The words that each call provides, and their indices in `words`.
    deferred: Vec<(usize, Word)>,
}

/// An argument of the kernel.
#[derive(Clone, Copy)]
enum Argument {
    Buffer(u32),
    /// The offset of a tensor in its buffer plus `skip` elements, divided by `unit`.
    Offset {
        of: u32,
        unit: u32,
        skip: isize,
    },
    /// An argument that is the same at every call.
    Fixed(Arg<'static>),
    /// A struct of this range of words.
    Words(u32, u32),
    /// So many scalars of the call, an argument each.
    Scalars(u32, Compute),
    /// So many seeds of the call, each a key and a stream.
    Seeds(u32),
    /// The buffer in which kernels record faults.
    Faults,
    /// The buffer of counters of finished work-groups, and the index of the first counter of the current stream.
    Arrivals,
    FirstArrival,
}

/// A word that each call provides.
#[derive(Clone, Copy)]
pub(crate) enum Word {
    /// The offset of a tensor in its buffer, in elements.
    First(usize),
    FirstArrival,
}

impl LaunchPlan {
    /// A plan of one launch.
    pub(crate) fn one(device: &'static ClDevice, launch: KernelLaunch) -> LaunchPlan {
        LaunchPlan::new(device, None, [launch])
    }

    /// A plan of launches in this order, with a scratch tensor of so many elements.
    pub(crate) fn new(
        device: &'static ClDevice,
        scratch: Option<(usize, DType)>,
        launches: impl IntoIterator<Item = KernelLaunch>,
    ) -> LaunchPlan {
        LaunchPlan { device, scratch, launches: launches.into_iter().collect(), indices: None }
    }

    /// Declares that the only faults of its kernels are indices of tensor `k` that are out of range, so that known indices need no check.
    pub(crate) fn checking(self, k: usize) -> LaunchPlan {
        LaunchPlan { indices: Some((k, checked_indices::new_number())), ..self }
    }

    /// Whether a kernel is given tensor `k` of the list.
    pub(crate) fn uses(&self, k: usize) -> bool {
        self.launches.iter().any(|launch| launch.buffers.contains(&k))
    }

    /// Launches it with these tensors, which have the layouts that it was prepared for.
    pub(crate) fn launch(&self, tensors: &[&Tensor], params: Params) -> Result<()> {
        let unknown =
            self.indices.and_then(|(k, check)| Some((k, checked_indices::unknown(self.device, tensors[k], check)?)));
        let may_fault = self.indices.is_none() || unknown.is_some();
        let launch = |tensors: &[&Tensor]| {
            self.launches.iter().try_for_each(|launch| launch.launch(self.device, tensors, params, may_fault))
        };
        match self.scratch {
            None => launch(tensors)?,
            Some((count, dtype)) => {
                let scratch = Tensor::empty_like_shape(count, dtype, self.device.device())?;
                launch(&tensors.iter().copied().chain([&scratch]).collect::<SmallVec<[&Tensor; 8]>>())?;
            }
        }
        if let Some((k, unknown)) = unknown {
            checked_indices::launched(self.device, tensors[k], unknown);
        }
        Ok(())
    }
}

impl KernelLaunch {
    /// A launch of at least `global` work-items in groups of `local`, to which arguments are added in order.
    pub(crate) fn new(kernel: Arc<ClKernel>, global: usize, local: usize) -> KernelLaunch {
        let (buffers, arguments, words, deferred) = Default::default();
        KernelLaunch { kernel, global, local, buffers, arguments, words, deferred }
    }

    /// Adds the buffer of tensor `k`, and gives its number among the launch's buffers.
    pub(crate) fn buffer(&mut self, k: usize) -> usize {
        self.buffers.push(k);
        self.arguments.push(Argument::Buffer((self.buffers.len() - 1) as u32));
        self.buffers.len() - 1
    }

    /// Adds the buffer of tensor `k` and the tensor's offset in it.
    pub(crate) fn tensor(&mut self, k: usize) {
        self.tensor_from(k, 0, 1);
    }

    /// [`tensor`](Self::tensor) with an offset of `skip` elements more, in units of so many elements.
    pub(crate) fn tensor_from(&mut self, k: usize, skip: isize, unit: usize) {
        let of = self.buffer(k) as u32;
        self.arguments.push(Argument::Offset { of, unit: unit as u32, skip });
    }

    /// Adds arguments that are the same at every call.
    pub(crate) fn args(&mut self, args: impl IntoIterator<Item = Arg<'static>>) {
        self.arguments.extend(args.into_iter().map(Argument::Fixed));
    }

    /// Adds a struct of these words.
    pub(crate) fn words(&mut self, words: impl IntoIterator<Item = i64>) {
        let from = self.words.len() as u32;
        self.words.extend(words);
        self.arguments.push(Argument::Words(from, self.words.len() as u32));
    }

    /// Has each call provide the word of this index.
    pub(crate) fn defer(&mut self, word: usize, what: Word) {
        self.deferred.push((word, what));
    }

    /// Adds so many scalars of the call in the compute type.
    pub(crate) fn scalars(&mut self, count: usize, compute: Compute) {
        self.arguments.push(Argument::Scalars(count as u32, compute));
    }

    /// Adds so many seeds of the call.
    pub(crate) fn seeds(&mut self, count: usize) {
        self.arguments.push(Argument::Seeds(count as u32));
    }

    /// Adds the buffer in which faults are recorded.
    pub(crate) fn faults(&mut self) {
        self.arguments.push(Argument::Faults);
    }

    /// Adds the counters of finished work-groups.
    pub(crate) fn arrivals(&mut self) {
        self.arguments.push(Argument::Arrivals);
    }

    /// Adds the index of the first of these counters for the current stream.
    pub(crate) fn first_arrival(&mut self) {
        self.arguments.push(Argument::FirstArrival);
    }

    fn launch(&self, device: &'static ClDevice, tensors: &[&Tensor], params: Params, may_fault: bool) -> Result<()> {
        let mut views: SmallVec<[BufferView; 10]> = SmallVec::new();
        for &k in &self.buffers {
            match tensors[k].device_view() {
                Ok(view) => views.push(view),
                Err(error) => return Err(error),
            }
        }
        let first_arrival = || device.current_stream().index() * ARRIVALS;
        let mut filled: SmallVec<[i64; 64]> = SmallVec::new();
        let words = match self.deferred[..] {
            [] => &self.words[..],
            _ => {
                filled.extend_from_slice(&self.words);
                for &(word, what) in &self.deferred {
                    filled[word] = match what {
                        Word::First(of) => views[of].first_element() as i64,
                        Word::FirstArrival => first_arrival() as i64,
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
                    let scalars = params.scalars.iter().take(count as usize);
                    scalars.for_each(|&s| args.push(scalar_arg(compute, s))); // `extend` is a call
                    continue;
                }
                Argument::Seeds(count) => {
                    let seeds = params.seeds.iter().take(count as usize);
                    args.extend(seeds.flat_map(|seed| [Arg::U64(seed.key), Arg::U64(seed.stream)]));
                    continue;
                }
                Argument::Faults if may_fault => device.faults(),
                Argument::Faults => device.no_faults(),
                Argument::Arrivals => Arg::Buffer(device.arrivals()?),
                Argument::FirstArrival => Arg::U32(first_arrival() as u32),
            };
            args.push(arg);
        }
        device.launch(&self.kernel, &args, &[self.global], &[self.local])
    }
}
