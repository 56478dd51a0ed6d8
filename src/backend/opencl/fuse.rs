//! Fusion of the elementwise launches of a captured graph, and elimination of those whose results are not used.
//!
//! A formula is fused into a later one where
//! - it has one result, which the later one reads as the same view, with the shape of its own results;
//! - nothing else can read that result: no other command uses its storage afterwards and no handle on it is left at the end of the
//!   capture, or the later formula overwrites it;
//! - its inputs keep their values: no command in between writes to them, and the later formula at most element by element;
//! - storing the result would not round it: both formulas and the fused one compute in its dtype;
//! - both draw their random numbers from the same generator, if both draw any, and the earlier one is not a constant;
//! - it records no faults, and the fused formula is not too large ([`MAX_OPERANDS`], [`MAX_NODES`]).
//!
//! Fusion saves a launch, a store and a load, and gives the same bits, because contraction is off. A formula is removed where nothing
//! can read any of its results. Of other commands only the storages are known: they count as reading and writing all of them.

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

/// The most operands, and the most scalars and seeds, of a fused formula: they are kernel arguments and registers.
const MAX_OPERANDS: usize = 16;
const MAX_SCALARS: usize = 48;

/// The most nodes of a fused formula: longer ones take too long to compile.
const MAX_NODES: usize = 96;

/// The changes to a recording.
#[derive(Default)]
pub(super) struct Changes {
    /// The commands to remove.
    pub(super) left_out: Vec<usize>,
    /// Commands with the fused launches that replace them.
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

    /// Whether one can be written element by element while the other is read element by element.
    fn is_clear_of(&self, other: &Operand) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        !a.overlap(&b) || a == b && self.dtype == other.dtype && self.layout.lies_like(&other.layout, 1)
    }
}

/// The elementwise launch of a command, with the commands that were fused into it.
struct Formula {
    op: &'static str,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    exprs: Vec<Expr>,
    scalars: Vec<Scalar>,
    seeds: Vec<Seed>,
    base: Option<Operand>,
    command: usize,
    fused: Vec<usize>,
}

thread_local! {
    /// The formulas of this thread's capture.
    static RECORDED: RefCell<Vec<Formula>> = const { RefCell::new(Vec::new()) };
}

/// Records the formulas of this thread's capture until it is dropped.
pub(super) struct FormulaRecorder(());

impl FormulaRecorder {
    pub(super) fn start() -> FormulaRecorder {
        RECORDED.take();
        FormulaRecorder(())
    }
}

impl Drop for FormulaRecorder {
    fn drop(&mut self) {
        RECORDED.take();
    }
}

/// Launches formulas during a capture, and records them.
pub(super) fn record(formulas: &Formulas, launch: impl FnOnce() -> Result<()>) -> Result<()> {
    let command = capture::commands();
    launch()?;
    // Where operands were copied first there are several commands, which are not changed.
    if capture::commands() == command + 1
        && let Some(formula) = Formula::of(formulas, command)
    {
        RECORDED.with_borrow_mut(|recorded| recorded.push(formula));
    }
    Ok(())
}

impl Formula {
    fn of(formulas: &Formulas, command: usize) -> Option<Formula> {
        let Formulas { op, inputs, params, program, outputs } = *formulas;
        let operands = |tensors: &[&Tensor]| tensors.iter().map(|t| Operand::of(t)).collect::<Option<Vec<_>>>();
        let base = match params.base {
            Some(base) => Some(Operand::of(base)?),
            None => None,
        };
        let (scalars, seeds, exprs) = (params.scalars.to_vec(), params.seeds.to_vec(), program.exprs().to_vec());
        let (inputs, outputs) = (operands(inputs)?, operands(outputs)?);
        Some(Formula { op, inputs, outputs, exprs, scalars, seeds, base, command, fused: Vec::new() })
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

    /// This formula with that of `first` substituted for its input that is the result of `first`.
    fn fused_with(&self, first: &Formula) -> Formula {
        let result = &first.outputs[0];
        let mut inputs: Vec<Operand> = Vec::new();
        let mut index_of = |operand: &Operand| {
            inputs.iter().position(|known| known.is(operand)).unwrap_or_else(|| {
                inputs.push(operand.clone());
                inputs.len() - 1
            })
        };
        let own: Vec<Option<usize>> = self.inputs.iter().map(|o| (!o.is(result)).then(|| index_of(o))).collect();
        let others: Vec<usize> = first.inputs.iter().map(index_of).collect();
        let (scalars, seeds) = (self.scalars.len(), self.seeds.len());
        let substitute = with_leaves(&first.exprs, |leaf| match leaf {
            Leaf::Input(i) => Some(Expr::input(others[i])),
            Leaf::Scalar(i) => Some(Expr::scalar(scalars + i)),
            Leaf::Number { index, whole } => Some(Expr::number(scalars + index, whole)),
            Leaf::Uniform(i) => Some(Expr::uniform(seeds + i)),
            Leaf::Normal(i) => Some(Expr::normal(seeds + i)),
            Leaf::Bits(i) => Some(Expr::bits(seeds + i)),
            Leaf::Const(_) => None,
        });
        let exprs = with_leaves(&self.exprs, |leaf| match leaf {
            Leaf::Input(i) => Some(own[i].map_or_else(|| substitute[0].clone(), Expr::input)),
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
            fused: self.fused.iter().chain(&first.fused).copied().chain([first.command]).collect(),
        }
    }

    /// Launches it on tensors made anew over the memory of its operands.
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
        let program = Program::of(&self.exprs);
        map::launch(&Formulas { op: self.op, inputs: &inputs, params, program: &program, outputs: &outputs })
    }
}

/// The kind of a command.
#[derive(Clone, Copy, PartialEq)]
enum Slot {
    Formula(usize),
    /// A command of this run of consecutive commands that are not formulas.
    Others(usize),
    Removed,
}

/// The commands of a capture.
struct Capture<'a> {
    slots: Vec<Slot>,
    formulas: Vec<Formula>,
    /// The memory that each run of other commands uses.
    others: Vec<Vec<Bytes>>,
    /// The commands that use a storage; a run of other commands is represented by its first.
    users: HashMap<u64, BTreeSet<usize>>,
    uses: &'a Uses,
}

impl FormulaRecorder {
    /// The changes to the recorded commands, whose storages are given by `uses`.
    pub(super) fn changes(&self, recorder: &Recorder, uses: &Uses) -> Changes {
        let mut changes = Changes::default();
        let Some(mut capture) = Capture::new(RECORDED.take(), uses, capture::commands()) else { return changes };
        capture.leave_out(&mut changes.left_out);
        capture.fuse();
        for (i, formula) in capture.formulas.iter().enumerate() {
            let stays = capture.slots[formula.command] == Slot::Formula(i);
            if !stays || formula.fused.is_empty() {
                continue;
            }
            // A fused formula that cannot be launched is not used.
            if let Some(command) = recorder.apart(|| formula.launch()) {
                changes.others.push((formula.command, command));
                changes.left_out.extend(&formula.fused);
            }
        }
        changes
    }
}

impl Capture<'_> {
    /// None where the storages of a command are not known.
    fn new(formulas: Vec<Formula>, uses: &Uses, commands: usize) -> Option<Capture<'_>> {
        let mut slots = vec![Slot::Removed; commands];
        formulas.iter().enumerate().for_each(|(i, formula)| slots[formula.command] = Slot::Formula(i));
        let (mut others, mut users): (Vec<Vec<Bytes>>, HashMap<u64, BTreeSet<usize>>) = Default::default();
        let mut rest = uses.uses.iter().peekable();
        // Storages noted before a formula that are not its operands belong to the next other command.
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

    /// Whether nothing can read a storage after this command.
    fn is_dead_after(&self, number: u64, command: usize) -> bool {
        let last = self.users.get(&number).and_then(|users| users.last());
        self.uses.dropped.contains(&number) && last.is_none_or(|&last| last <= command)
    }

    /// Removes formulas whose results nothing can read, from the last to the first, because their inputs may then be unused, too.
    fn leave_out(&mut self, left_out: &mut Vec<usize>) {
        for formula in self.formulas.iter().rev() {
            let command = formula.command;
            if !formula.can_fault() && formula.outputs.iter().all(|o| self.is_dead_after(o.number(), command)) {
                for operand in formula.operands() {
                    self.users.get_mut(&operand.number()).map(|users| users.remove(&command));
                }
                self.slots[command] = Slot::Removed;
                left_out.push(command);
            }
        }
    }

    /// Fuses formulas into those that read their results, from the first to the last, so that chains become one formula.
    fn fuse(&mut self) {
        for second in 0..self.formulas.len() {
            let command = self.formulas[second].command;
            while self.slots[command] == Slot::Formula(second)
                && let Some((first, fused)) = self.fusion_into(second)
            {
                let removed = &self.formulas[first];
                for number in removed.operands().map(Operand::number) {
                    self.users.get_mut(&number).map(|users| users.remove(&removed.command));
                }
                let result = removed.outputs[0].number();
                self.users.get_mut(&result).map(|users| users.remove(&command));
                for number in fused.operands().map(Operand::number) {
                    self.users.entry(number).or_default().insert(command);
                }
                self.slots[removed.command] = Slot::Removed;
                self.formulas[second] = fused;
            }
        }
    }

    /// A formula that can be fused into this one, and the fused formula.
    fn fusion_into(&self, second: usize) -> Option<(usize, Formula)> {
        let of = &self.formulas[second];
        of.inputs.iter().find_map(|read| {
            let before = self.users.get(&read.number())?.range(..of.command).next_back()?;
            let Slot::Formula(first) = self.slots[*before] else { return None };
            let fused = self.fused(&self.formulas[first], of, read)?;
            Some((first, fused))
        })
    }

    fn fused(&self, first: &Formula, second: &Formula, read: &Operand) -> Option<Formula> {
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
        // A fused formula has one base, which is added to all of its seeds.
        let bases = [first, second].map(|f| (!f.seeds.is_empty()).then(|| f.base.as_ref().map(Operand::number)));
        if let [Some(a), Some(b)] = bases
            && a != b
        {
            return None;
        }
        let fused = second.fused_with(first);
        let compute = second.compute();
        let exact = matches!(
            (result.dtype, compute),
            (DType::F32, Compute::F32) | (DType::F64, Compute::F64) | (DType::I64, Compute::I64)
        );
        let fits = fused.inputs.len() + fused.outputs.len() <= MAX_OPERANDS
            && fused.scalars.len() + fused.seeds.len() <= MAX_SCALARS
            && Dag::new(&fused.exprs).nodes.len() <= MAX_NODES
            && !first.can_fault();
        // A constant would be folded into the fused expression, which is computed in another precision.
        let varies = first.exprs[0].as_const().is_none();
        (exact && fits && varies && first.compute() == compute && fused.compute() == compute).then_some(fused)
    }

    /// Whether an input of the first formula still has its value when the fused formula runs.
    fn is_kept(&self, input: &Operand, from: usize, second: &Formula) -> bool {
        let bytes = input.bytes();
        let written = |slot: &Slot| match slot {
            Slot::Formula(i) => self.formulas[*i].outputs.iter().any(|out| out.bytes().overlap(&bytes)),
            Slot::Others(i) => self.others[*i].iter().any(|used| used.overlap(&bytes)),
            Slot::Removed => false,
        };
        !self.slots[from + 1..second.command].iter().any(written)
            && second.outputs.iter().all(|out| out.is_clear_of(input))
    }
}
