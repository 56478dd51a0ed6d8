//! Formulas of a graph that become one launch, and those that nobody needs.
//!
//! A formula is joined into a later one where
//! - it has one result, which the later one reads element by element: the same view, of the shape that the later one has;
//! - nobody else reads that result, and nobody can: no other command uses its storage from then on and no handle on it is left at the
//!   end of the capture, or the later formula overwrites it;
//! - what it reads is still there: no command in between writes to it, and the later one at most element by element;
//! - the result loses nothing by being stored: its dtype is the type that both, and the joined one, compute in;
//! - both draw their random numbers from the same generator, if both draw any, and the earlier one is not a constant;
//! - it records no faults, and the joined formula is not too large ([`MOST`], [`NODES`]).
//!
//! That is a launch, a store and a load less, and the same bits: contraction is off. A formula is left out where nobody uses any of
//! its results, and nobody can. Of commands that are no formulas it is known which storages they use, and not how: they count as
//! readers and writers of all of them.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use crate::backend::opencl::map;
use crate::backend::problem::map::{Formulas, Params, compute_type_of};
use crate::device::capture;
use crate::device::opencl::capture::{Command, Recorder};
use crate::expr::philox::Seed;
use crate::expr::program::Program;
use crate::expr::{Dag, Leaf, with_leaves};
use crate::storage::{Bytes, CapturedStorage, Storage, Uses};
use crate::tensor::Layout;
use crate::{Compute, DType, Expr, Result, Scalar, Tensor};

/// Operands and scalars of a joined formula, at most, of each: they are registers, and arguments of the kernel.
const MOST: usize = 16;

/// Nodes of a joined formula, at most: compilers take their time with longer ones.
const NODES: usize = 96;

/// What is to be changed of a recording.
#[derive(Default)]
pub(super) struct Changes {
    /// Launches to leave out.
    pub(super) left_out: Vec<usize>,
    /// Launches that take the place of others.
    pub(super) others: Vec<(usize, Command)>,
}

/// A tensor that a formula reads or writes.
#[derive(Clone)]
struct Operand {
    storage: Rc<CapturedStorage>,
    layout: Layout,
    dtype: DType,
}

impl Operand {
    fn of(t: &Tensor) -> Option<Operand> {
        let storage = Rc::new(CapturedStorage::of(&t.storage)?);
        Some(Operand { storage, layout: t.layout.clone(), dtype: t.dtype })
    }

    fn number(&self) -> u64 {
        self.storage.number()
    }

    fn bytes(&self) -> Bytes {
        let (first, last) = self.layout.bounds().unwrap_or((0, 0));
        let size = self.dtype.size();
        self.storage.bytes().part(first * size..(last + 1) * size)
    }

    /// Whether both are the same view of the same storage.
    fn is(&self, other: &Operand) -> bool {
        self.number() == other.number() && self.dtype == other.dtype && self.layout == other.layout
    }

    /// Whether one can be written element by element while the other is read so, although the storages may be others.
    fn is_clear_of(&self, other: &Operand) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        !a.overlap(&b) || a == b && self.dtype == other.dtype && self.layout.lies_like(&other.layout, 1)
    }
}

/// A launch of formulas, recorded at this command; joined ones take the place of several.
struct Formula {
    op: &'static str,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    exprs: Vec<Expr>,
    scalars: Vec<Scalar>,
    seeds: Vec<Seed>,
    base: Option<Operand>,
    command: usize,
    joined: Vec<usize>,
}

thread_local! {
    /// The formulas of the capture under way.
    static NOTED: RefCell<Vec<Formula>> = const { RefCell::new(Vec::new()) };
}

/// Has the formulas of this thread's capture noted; ends it on drop.
pub(super) struct Noting(());

impl Noting {
    pub(super) fn start() -> Noting {
        NOTED.take();
        Noting(())
    }
}

impl Drop for Noting {
    fn drop(&mut self) {
        NOTED.take();
    }
}

/// Launches formulas, and notes what was recorded.
pub(super) fn noted(formulas: &Formulas, launch: impl FnOnce() -> Result<()>) -> Result<()> {
    let command = capture::commands();
    launch()?;
    // Where operands were copied first there are several commands, which stay as they are.
    if capture::commands() == command + 1
        && let Some(formula) = Formula::of(formulas, command)
    {
        NOTED.with_borrow_mut(|noted| noted.push(formula));
    }
    Ok(())
}

impl Formula {
    fn of(formulas: &Formulas, command: usize) -> Option<Formula> {
        let Formulas { op, inputs, params, exprs, outputs } = *formulas;
        let operands = |tensors: &[&Tensor]| tensors.iter().map(|t| Operand::of(t)).collect::<Option<Vec<_>>>();
        let base = match params.base {
            Some(base) => Some(Operand::of(base)?),
            None => None,
        };
        let (scalars, seeds, exprs) = (params.scalars.to_vec(), params.seeds.to_vec(), exprs.to_vec());
        let (inputs, outputs) = (operands(inputs)?, operands(outputs)?);
        Some(Formula { op, inputs, outputs, exprs, scalars, seeds, base, command, joined: Vec::new() })
    }

    fn operands(&self) -> impl Iterator<Item = &Operand> {
        self.inputs.iter().chain(&self.outputs).chain(&self.base)
    }

    fn compute(&self) -> Compute {
        let dtypes = |operands: &[Operand]| operands.iter().map(|o| o.dtype).collect::<Vec<_>>().into_iter();
        compute_type_of(&Program::new(&self.exprs), dtypes(&self.inputs), dtypes(&self.outputs))
    }

    fn can_fault(&self) -> bool {
        Program::new(&self.exprs).can_fault(self.compute())
    }

    /// This one with the formula of `first`, whose result it reads, in the place of that result.
    fn with(&self, first: &Formula) -> Formula {
        let result = &first.outputs[0];
        let mut inputs: Vec<Operand> = Vec::new();
        let mut place = |operand: &Operand| {
            inputs.iter().position(|known| known.is(operand)).unwrap_or_else(|| {
                inputs.push(operand.clone());
                inputs.len() - 1
            })
        };
        let own: Vec<Option<usize>> = self.inputs.iter().map(|o| (!o.is(result)).then(|| place(o))).collect();
        let others: Vec<usize> = first.inputs.iter().map(place).collect();
        let (scalars, seeds) = (self.scalars.len(), self.seeds.len());
        let joined = with_leaves(&first.exprs, |leaf| match leaf {
            Leaf::Input(i) => Some(Expr::input(others[i])),
            Leaf::Scalar(i) => Some(Expr::scalar(scalars + i)),
            Leaf::Uniform(i) => Some(Expr::uniform(seeds + i)),
            Leaf::Normal(i) => Some(Expr::normal(seeds + i)),
            Leaf::Bits(i) => Some(Expr::bits(seeds + i)),
            Leaf::Const(_) => None,
        });
        let exprs = with_leaves(&self.exprs, |leaf| match leaf {
            Leaf::Input(i) => Some(own[i].map_or_else(|| joined[0].clone(), Expr::input)),
            _ => None,
        });
        Formula {
            op: self.op,
            inputs,
            outputs: self.outputs.clone(),
            exprs,
            scalars: self.scalars.iter().chain(&first.scalars).copied().collect(),
            seeds: self.seeds.iter().chain(&first.seeds).copied().collect(),
            base: self.base.clone().or_else(|| first.base.clone()),
            command: self.command,
            joined: self.joined.iter().chain(&first.joined).copied().chain([first.command]).collect(),
        }
    }

    /// Launches it on the memory that its operands had.
    fn launch(&self) -> Result<()> {
        let mut storages: HashMap<u64, Storage> = HashMap::new();
        let mut again = |o: &Operand| {
            let storage = match storages.get(&o.number()) {
                Some(storage) => storage.clone(),
                None => o.storage.again()?,
            };
            storages.insert(o.number(), storage.clone());
            Ok(Tensor::new(storage, o.layout.clone(), o.dtype))
        };
        let inputs = self.inputs.iter().map(&mut again).collect::<Result<Vec<_>>>()?;
        let outputs = self.outputs.iter().map(&mut again).collect::<Result<Vec<_>>>()?;
        let base = self.base.as_ref().map(again).transpose()?;
        let (inputs, outputs) = (inputs.iter().collect::<Vec<_>>(), outputs.iter().collect::<Vec<_>>());
        let params = Params { scalars: &self.scalars, seeds: &self.seeds, base: base.as_ref() };
        map::launch(&Formulas { op: self.op, inputs: &inputs, params, exprs: &self.exprs, outputs: &outputs })
    }
}

/// What is at the place of a command.
#[derive(Clone, Copy, PartialEq)]
enum Slot {
    Formula(usize),
    /// One of consecutive commands that are no formulas.
    Others(usize),
    Gone,
}

/// A capture, command by command.
struct Capture<'a> {
    slots: Vec<Slot>,
    formulas: Vec<Formula>,
    /// What commands use that are no formulas.
    others: Vec<Vec<Bytes>>,
    /// The commands that use a storage, of consecutive others the first.
    users: HashMap<u64, BTreeSet<usize>>,
    uses: &'a Uses,
}

impl Noting {
    /// What to change of the commands that were recorded, which use what is said here.
    pub(super) fn changes(&self, recorder: &Recorder, uses: &Uses) -> Changes {
        let mut changes = Changes::default();
        let Some(mut capture) = Capture::new(NOTED.take(), uses, capture::commands()) else { return changes };
        capture.leave_out(&mut changes.left_out);
        capture.join();
        for (i, formula) in capture.formulas.iter().enumerate() {
            let stays = capture.slots[formula.command] == Slot::Formula(i);
            if !stays || formula.joined.is_empty() {
                continue;
            }
            // What cannot be launched stays apart.
            if let Some(command) = recorder.apart(|| formula.launch()) {
                changes.others.push((formula.command, command));
                changes.left_out.extend(&formula.joined);
            }
        }
        changes
    }
}

impl Capture<'_> {
    /// None where it is not known what some command uses.
    fn new(formulas: Vec<Formula>, uses: &Uses, commands: usize) -> Option<Capture<'_>> {
        let mut slots = vec![Slot::Gone; commands];
        formulas.iter().enumerate().for_each(|(i, formula)| slots[formula.command] = Slot::Formula(i));
        let (mut others, mut users): (Vec<Vec<Bytes>>, HashMap<u64, BTreeSet<usize>>) = Default::default();
        let mut rest = uses.uses.iter().peekable();
        // What was asked for before a formula, and is none of its operands, may be used after it.
        let (mut first, mut pending) = (0, Vec::new());
        for command in 0..commands {
            while let Some(used) = rest.next_if(|used| used.command == command) {
                pending.push(used);
            }
            if let Slot::Formula(i) = slots[command] {
                formulas[i].operands().for_each(|o| _ = users.entry(o.number()).or_default().insert(command));
                pending.retain(|used| formulas[i].operands().all(|o| o.number() != used.number));
                continue;
            }
            if command == 0 || matches!(slots[command - 1], Slot::Formula(_)) {
                first = command;
                others.push(Vec::new());
            }
            slots[command] = Slot::Others(others.len() - 1);
            let bytes = others.last_mut().expect("it was pushed");
            for used in pending.drain(..) {
                bytes.push(used.bytes.clone());
                users.entry(used.number).or_default().insert(first);
            }
            if bytes.is_empty() {
                return None;
            }
        }
        Some(Capture { slots, formulas, others, users, uses })
    }

    /// Whether nobody needs what a storage holds after this command.
    fn is_dead_after(&self, number: u64, command: usize) -> bool {
        let last = self.users.get(&number).and_then(|users| users.last());
        self.uses.dropped.contains(&number) && last.is_none_or(|&last| last <= command)
    }

    /// Leaves formulas out whose results nobody needs, the last first: what only they read is not needed either.
    fn leave_out(&mut self, left_out: &mut Vec<usize>) {
        for formula in self.formulas.iter().rev() {
            let command = formula.command;
            if !formula.can_fault() && formula.outputs.iter().all(|o| self.is_dead_after(o.number(), command)) {
                for operand in formula.operands() {
                    self.users.get_mut(&operand.number()).map(|users| users.remove(&command));
                }
                self.slots[command] = Slot::Gone;
                left_out.push(command);
            }
        }
    }

    /// Joins formulas into those that read their results, the first first, so that chains become one.
    fn join(&mut self) {
        for second in 0..self.formulas.len() {
            let command = self.formulas[second].command;
            while self.slots[command] == Slot::Formula(second)
                && let Some((first, joined)) = self.joined_with_one(second)
            {
                let gone = &self.formulas[first];
                for number in gone.operands().map(Operand::number) {
                    self.users.get_mut(&number).map(|users| users.remove(&gone.command));
                }
                let result = gone.outputs[0].number();
                self.users.get_mut(&result).map(|users| users.remove(&command));
                for number in joined.operands().map(Operand::number) {
                    self.users.entry(number).or_default().insert(command);
                }
                self.slots[gone.command] = Slot::Gone;
                self.formulas[second] = joined;
            }
        }
    }

    /// A formula that can be joined into this one, and what comes of it.
    fn joined_with_one(&self, second: usize) -> Option<(usize, Formula)> {
        let of = &self.formulas[second];
        of.inputs.iter().find_map(|read| {
            let before = self.users.get(&read.number())?.range(..of.command).next_back()?;
            let Slot::Formula(first) = self.slots[*before] else { return None };
            let joined = self.joined(&self.formulas[first], of, read)?;
            Some((first, joined))
        })
    }

    fn joined(&self, first: &Formula, second: &Formula, read: &Operand) -> Option<Formula> {
        let [result] = &first.outputs[..] else { return None };
        let of_result = |o: &&Operand| o.number() == result.number();
        let same_view = second.inputs.iter().chain(&second.outputs).filter(of_result).all(|o| o.is(result));
        if !result.is(read) || !same_view || result.layout.shape != second.outputs[0].layout.shape {
            return None;
        }
        let overwritten = second.outputs.iter().any(|o| o.is(result));
        if !overwritten && !self.is_dead_after(result.number(), second.command) {
            return None;
        }
        if !first.inputs.iter().all(|input| self.is_kept(input, first.command, second)) {
            return None;
        }
        // Seeds that count from somewhere do so together.
        let bases = [first, second].map(|f| (!f.seeds.is_empty()).then(|| f.base.as_ref().map(Operand::number)));
        if let [Some(a), Some(b)] = bases
            && a != b
        {
            return None;
        }
        let joined = second.with(first);
        let compute = second.compute();
        let exact = matches!(
            (result.dtype, compute),
            (DType::F32, Compute::F32) | (DType::F64, Compute::F64) | (DType::I64, Compute::I64)
        );
        let fits = joined.inputs.len() + joined.outputs.len() <= MOST
            && joined.scalars.len() + joined.seeds.len() <= MOST
            && Dag::new(&joined.exprs).nodes.len() <= NODES
            && !first.can_fault();
        // A constant would be computed with when the formula is made, in another precision.
        let varies = first.exprs[0].as_const().is_none();
        (exact && fits && varies && first.compute() == compute && joined.compute() == compute).then_some(joined)
    }

    /// Whether what the first formula reads here is the same when the second one, in which it is joined, reads it.
    fn is_kept(&self, input: &Operand, from: usize, second: &Formula) -> bool {
        let bytes = input.bytes();
        let written = |slot: &Slot| match slot {
            Slot::Formula(i) => self.formulas[*i].outputs.iter().any(|out| out.bytes().overlap(&bytes)),
            Slot::Others(i) => self.others[*i].iter().any(|used| used.overlap(&bytes)),
            Slot::Gone => false,
        };
        !self.slots[from + 1..second.command].iter().any(written)
            && second.outputs.iter().all(|out| out.is_clear_of(input))
    }
}
