//! Fusion of elementwise launches in a captured graph, and removal of launches whose results are unused.
//!
//! A formula ("the first") is fused into a later formula ("the second") if
//! - the first has one result, and the second reads it as the same view, with the shape of the second's results;
//! - nothing else can read that result: either no other command uses its storage afterwards and no handle on the storage is left at
//!   the end of the capture, or the second formula overwrites the result;
//! - the inputs of the first keep their values: no command in between writes them, and the second writes them at most element by
//!   element;
//! - storing the result does not round it: both formulas and the fused formula compute in the result's dtype;
//! - both draw random numbers from the same generator, if both draw any, and the first is not a constant;
//! - the first records no faults, and the fused formula is not too large ([`MAX_OPERANDS`], [`MAX_NODES`]).
//!
//! Fusion saves a launch, a store and a load, and keeps the bits of the results, because floating-point contraction is off. A formula is removed if
//! nothing can read any of its results. For other commands only their storages are known, and each command is assumed to read and write all of its
//! storages.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use crate::backend::opencl::map::{FORMULA_SINK, launch_formulas};
use crate::backend::problem::map::{Formulas, Params, compute_type_of_dtypes};
use crate::device::capture;
use crate::device::opencl::capture::{Changes, Recorder};
use crate::expr::philox::Seed;
use crate::expr::program::Program;
use crate::expr::{Dag, Leaf, with_leaves};
use crate::storage::{CapturedStorage, SegmentRange, Storage, StorageUses};
use crate::tensor::Layout;
use crate::{Compute, DType, Expr, Result, Scalar, Tensor};

/// The maximum number of operands of a fused formula. Operands are kernel arguments and need registers.
const MAX_OPERANDS: usize = 16;
/// The maximum number of scalars and seeds of a fused formula.
const MAX_SCALARS: usize = 48;

/// The maximum number of nodes of a fused formula. Larger formulas take too long to compile.
const MAX_NODES: usize = 96;

/// A tensor that a formula reads or writes.
#[derive(Clone)]
struct Operand {
    storage: Rc<CapturedStorage>,
    layout: Layout,
    dtype: DType,
}

impl Operand {
    fn from_tensor(t: &Tensor) -> Option<Operand> {
        let storage = Rc::new(CapturedStorage::from_storage(&t.storage)?);
        Some(Operand { storage, layout: t.layout.clone(), dtype: t.dtype })
    }

    fn storage_number(&self) -> u64 {
        self.storage.number()
    }

    fn bytes(&self) -> SegmentRange {
        let (first, last) = self.layout.bounds().unwrap_or((0, 0));
        let size = self.dtype.size();
        self.storage.bytes().part(first * size..(last + 1) * size)
    }

    /// True if both operands are the same view of the same storage.
    fn is_same_view(&self, other: &Operand) -> bool {
        self.storage_number() == other.storage_number() && self.dtype == other.dtype && self.layout == other.layout
    }

    /// True if one operand can be written element by element while the other is read element by element.
    fn can_overwrite_elementwise(&self, other: &Operand) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        !a.overlap(&b) || a == b && self.dtype == other.dtype && self.layout.same_layout(&other.layout, 1)
    }
}

/// The elementwise launch of one command, and the commands that were fused into it.
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

/// Records the formulas of this thread's capture until the recorder is dropped.
pub(super) struct FormulaRecorder(Rc<RefCell<Vec<Formula>>>);

impl FormulaRecorder {
    pub(super) fn start() -> FormulaRecorder {
        let recorder = FormulaRecorder(Rc::default());
        let formulas = Rc::clone(&recorder.0);
        FORMULA_SINK.set(Some(Box::new(move |launched, command| {
            formulas.borrow_mut().extend(Formula::from_launch(launched, command));
        })));
        recorder
    }
}

impl Drop for FormulaRecorder {
    fn drop(&mut self) {
        FORMULA_SINK.take();
    }
}

impl Formula {
    fn from_launch(formulas: &Formulas, command: usize) -> Option<Formula> {
        let Formulas { op, inputs, params, program, outputs } = *formulas;
        let operands =
            |tensors: &[&Tensor]| tensors.iter().map(|t| Operand::from_tensor(t)).collect::<Option<Vec<_>>>();
        let base = match params.base {
            Some(base) => Some(Operand::from_tensor(base)?),
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
        compute_type_of_dtypes(&Program::new(&self.exprs), dtypes(&self.inputs), dtypes(&self.outputs))
    }

    fn can_fault(&self) -> bool {
        Program::new(&self.exprs).can_fault(self.compute())
    }

    /// Substitutes the expression of `first` for the input of this formula that reads its result.
    fn fused_with(&self, first: &Formula) -> Formula {
        let result = &first.outputs[0];
        let mut inputs: Vec<Operand> = Vec::new();
        let mut index_of = |operand: &Operand| {
            inputs.iter().position(|known| known.is_same_view(operand)).unwrap_or_else(|| {
                inputs.push(operand.clone());
                inputs.len() - 1
            })
        };
        let own: Vec<Option<usize>> =
            self.inputs.iter().map(|o| (!o.is_same_view(result)).then(|| index_of(o))).collect();
        let others: Vec<usize> = first.inputs.iter().map(index_of).collect();
        let (scalars, seeds) = (self.scalars.len(), self.seeds.len());
        let substitute = with_leaves(&first.exprs, |leaf| match leaf {
            Leaf::Input(i) => Some(Expr::input(others[i])),
            Leaf::Scalar(i) => Some(Expr::scalar(scalars + i)),
            Leaf::Number { index, whole } => Some(Expr::number_argument(scalars + index, whole)),
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

    /// Launches this formula on new tensors over the memory of its operands.
    fn launch(&self) -> Result<()> {
        let mut storages: HashMap<u64, Storage> = HashMap::new();
        let mut reopen = |o: &Operand| {
            let storage = match storages.get(&o.storage_number()) {
                Some(storage) => storage.clone(),
                None => o.storage.new_handle()?,
            };
            storages.insert(o.storage_number(), storage.clone());
            Ok(Tensor::new(storage, o.layout.clone(), o.dtype))
        };
        let inputs = self.inputs.iter().map(&mut reopen).collect::<Result<Vec<_>>>()?;
        let outputs = self.outputs.iter().map(&mut reopen).collect::<Result<Vec<_>>>()?;
        let base = self.base.as_ref().map(reopen).transpose()?;
        let (inputs, outputs) = (inputs.iter().collect::<Vec<_>>(), outputs.iter().collect::<Vec<_>>());
        let params = Params { scalars: &self.scalars, seeds: &self.seeds, base: base.as_ref() };
        let program = Program::shared(&self.exprs);
        launch_formulas(&Formulas { op: self.op, inputs: &inputs, params, program: &program, outputs: &outputs })
    }
}

/// The kind of a captured command, with its index in the list of that kind.
#[derive(Clone, Copy, PartialEq)]
enum CommandKind {
    Formula(usize),
    /// A command that is not a formula. Consecutive such commands form a run, given by its index.
    Others(usize),
    Removed,
}

/// The commands of a capture.
struct CapturedCommands<'a> {
    command_kinds: Vec<CommandKind>,
    formulas: Vec<Formula>,
    /// The memory that each run of other commands uses.
    others: Vec<Vec<SegmentRange>>,
    /// The commands that use each storage. A run of other commands is represented by its first command.
    users: HashMap<u64, BTreeSet<usize>>,
    uses: &'a StorageUses,
}

impl FormulaRecorder {
    /// Returns the changes that fusion and removal make to the recorded commands. `uses` lists the storages of each command.
    pub(super) fn changes(&self, recorder: &Recorder, uses: &StorageUses) -> Changes {
        let mut changes = Changes::default();
        let Some(mut capture) = CapturedCommands::new(self.0.take(), uses, capture::command_count()) else {
            return changes;
        };
        capture.remove_unused_formulas(&mut changes.removed_commands);
        capture.fuse_formulas();
        for (i, formula) in capture.formulas.iter().enumerate() {
            let stays = capture.command_kinds[formula.command] == CommandKind::Formula(i);
            if !stays || formula.fused.is_empty() {
                continue;
            }
            // If a fused formula cannot be launched, the original commands stay.
            if let Some(command) = recorder.capture_single(|| formula.launch()) {
                changes.replaced_commands.push((formula.command, command));
                changes.removed_commands.extend(&formula.fused);
            }
        }
        changes
    }
}

impl CapturedCommands<'_> {
    /// Returns `None` if the storages of a command are not known.
    fn new(formulas: Vec<Formula>, uses: &StorageUses, commands: usize) -> Option<CapturedCommands<'_>> {
        let mut command_kinds = vec![CommandKind::Removed; commands];
        formulas.iter().enumerate().for_each(|(i, formula)| command_kinds[formula.command] = CommandKind::Formula(i));
        let (mut others, mut users): (Vec<Vec<SegmentRange>>, HashMap<u64, BTreeSet<usize>>) = Default::default();
        let mut rest = uses.uses.iter().peekable();
        // If a storage noted before a formula is not an operand of the formula, it belongs to the next command that is not a formula.
        let (mut first, mut pending) = (0, Vec::new());
        for command in 0..commands {
            while let Some(used) = rest.next_if(|used| used.command == command) {
                pending.push(used);
            }
            if let CommandKind::Formula(i) = command_kinds[command] {
                formulas[i].operands().for_each(|o| _ = users.entry(o.storage_number()).or_default().insert(command));
                pending.retain(|used| formulas[i].operands().all(|o| o.storage_number() != used.number));
                continue;
            }
            if command == 0 || matches!(command_kinds[command - 1], CommandKind::Formula(_)) {
                first = command;
                others.push(Vec::new());
            }
            command_kinds[command] = CommandKind::Others(others.len() - 1);
            let bytes = others.last_mut().expect("it was pushed");
            for used in pending.drain(..) {
                bytes.push(used.bytes.clone());
                users.entry(used.number).or_default().insert(first);
            }
            if bytes.is_empty() {
                return None;
            }
        }
        Some(CapturedCommands { command_kinds, formulas, others, users, uses })
    }

    /// True if nothing can read a storage after this command.
    fn is_dead_after(&self, number: u64, command: usize) -> bool {
        let last = self.users.get(&number).and_then(|users| users.last());
        self.uses.dropped.contains(&number) && last.is_none_or(|&last| last <= command)
    }

    /// Removes formulas whose results nothing can read, from the last to the first, because a removal may leave its inputs unused.
    fn remove_unused_formulas(&mut self, removed_commands: &mut Vec<usize>) {
        for formula in self.formulas.iter().rev() {
            let command = formula.command;
            if !formula.can_fault() && formula.outputs.iter().all(|o| self.is_dead_after(o.storage_number(), command)) {
                for operand in formula.operands() {
                    self.users.get_mut(&operand.storage_number()).map(|users| users.remove(&command));
                }
                self.command_kinds[command] = CommandKind::Removed;
                removed_commands.push(command);
            }
        }
    }

    /// Fuses each formula into the formula that reads its result, from the first to the last, so that a chain becomes one formula.
    fn fuse_formulas(&mut self) {
        for second in 0..self.formulas.len() {
            let command = self.formulas[second].command;
            while self.command_kinds[command] == CommandKind::Formula(second)
                && let Some((first, fused)) = self.find_fusion_into(second)
            {
                let removed = &self.formulas[first];
                for number in removed.operands().map(Operand::storage_number) {
                    self.users.get_mut(&number).map(|users| users.remove(&removed.command));
                }
                let result = removed.outputs[0].storage_number();
                self.users.get_mut(&result).map(|users| users.remove(&command));
                for number in fused.operands().map(Operand::storage_number) {
                    self.users.entry(number).or_default().insert(command);
                }
                self.command_kinds[removed.command] = CommandKind::Removed;
                self.formulas[second] = fused;
            }
        }
    }

    /// Returns the index of a formula that can be fused into formula `second`, and the fused formula.
    fn find_fusion_into(&self, second: usize) -> Option<(usize, Formula)> {
        let of = &self.formulas[second];
        of.inputs.iter().find_map(|read| {
            let before = self.users.get(&read.storage_number())?.range(..of.command).next_back()?;
            let CommandKind::Formula(first) = self.command_kinds[*before] else { return None };
            let fused = self.try_fuse(&self.formulas[first], of, read)?;
            Some((first, fused))
        })
    }

    fn try_fuse(&self, first: &Formula, second: &Formula, read: &Operand) -> Option<Formula> {
        let [result] = &first.outputs[..] else { return None };
        let of_result = |o: &&Operand| o.storage_number() == result.storage_number();
        let same_view = second.inputs.iter().chain(&second.outputs).filter(of_result).all(|o| o.is_same_view(result));
        if !result.is_same_view(read) || !same_view || result.layout.shape != second.outputs[0].layout.shape {
            return None;
        }
        let overwritten = second.outputs.iter().any(|o| o.is_same_view(result));
        if !overwritten && !self.is_dead_after(result.storage_number(), second.command) {
            return None;
        }
        if !first.inputs.iter().all(|input| self.keeps_value(input, first.command, second)) {
            return None;
        }
        // A fused formula has one base, which is added to all its seeds.
        let bases =
            [first, second].map(|f| (!f.seeds.is_empty()).then(|| f.base.as_ref().map(Operand::storage_number)));
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
        // Fusing a constant would fold it into an expression that is computed in another precision.
        let varies = first.exprs[0].as_const().is_none();
        (exact && fits && varies && first.compute() == compute && fused.compute() == compute).then_some(fused)
    }

    /// True if an input of the first formula, which is command `from`, still has its value when the fused formula runs.
    fn keeps_value(&self, input: &Operand, from: usize, second: &Formula) -> bool {
        let bytes = input.bytes();
        let written = |slot: &CommandKind| match slot {
            CommandKind::Formula(i) => self.formulas[*i].outputs.iter().any(|out| out.bytes().overlap(&bytes)),
            CommandKind::Others(i) => self.others[*i].iter().any(|used| used.overlap(&bytes)),
            CommandKind::Removed => false,
        };
        !self.command_kinds[from + 1..second.command].iter().any(written)
            && second.outputs.iter().all(|out| out.can_overwrite_elementwise(input))
    }
}
