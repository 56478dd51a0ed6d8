//! The common implementation of all optimisers. It evaluates a rule's formula over the flat buffers of each parameter group.

use std::sync::{Arc, Mutex, MutexGuard};

use smallvec::SmallVec;

use super::flat::{CapturedStep, FlatParameters, Run, StepTensors, follow_conversions};
use super::rule::{Optimizer, Rule};
use crate::internal::{for_each_part, lock};
use crate::io::StateDict;
use crate::ops::MapInto;
use crate::storage::Caller;
use crate::{DType, Device, Error, Graph, Result, Scalar, Tensor, no_grad};

/// An optimiser whose step is defined by a [`Rule`]. [`super::Sgd`], [`super::AdamW`] and the others are aliases of this type.
pub struct Fused<R> {
    groups: Vec<Group<R>>,
}

/// A parameter group: parameters with their own hyperparameters.
struct Group<R> {
    flat: Arc<FlatParameters>,
    /// Parameters that were frozen when the group was made. They do not belong to the group, and a step fails once they are unfrozen.
    skipped: Vec<Tensor>,
    /// One flat buffer for each state of the rule.
    state: Vec<Tensor>,
    progress: Arc<Mutex<Progress<R>>>,
    /// Scratch memory for the numbers of an update, kept to avoid an allocation in each step.
    numbers: Vec<f64>,
    /// The launches of the last step. The next step reuses them if their tensors and rule are the same.
    launches: Vec<PreparedLaunch>,
    captured: CapturedUpdates,
}

/// The number of updates of each parameter in the current capture. The step count grows only at the end of each replay.
#[derive(Default)]
struct CapturedUpdates {
    id: Option<u64>,
    updates: Vec<i32>,
}

/// The hyperparameters and step counts of a group, shared with captured graphs.
struct Progress<R> {
    rule: R,
    /// For each parameter, the number of updates so far.
    steps: Vec<i32>,
}

impl<R: Rule> Progress<R> {
    /// Appends to `to` the rule's numbers for updating `run` after `ahead` more updates, without the factor of the gradients.
    fn numbers_to(&self, run: &Run, ahead: i32, to: &mut Vec<f64>) {
        self.rule.numbers_to(self.steps[run.parameters.start].saturating_add(ahead).saturating_add(1), to);
    }

    /// Returns an error unless all parameters of a captured run still have equal numbers, as one launch requires.
    fn check_equal_numbers(&self, run: &Run, ahead: i32) -> Result<()> {
        let numbers = |steps: i32| self.rule.numbers(steps.saturating_add(ahead).saturating_add(1));
        let mut steps = self.steps[run.parameters.clone()].iter().copied();
        let first = steps.next().unwrap_or_default();
        let op = R::NAME;
        invalid!(op if steps.any(|other| other != first && numbers(other) != numbers(first)),
            "parameters that the graph updates in one launch have had different numbers of steps since: capture it again");
        Ok(())
    }

    fn count_update(&mut self, run: &Run) {
        self.steps[run.parameters.clone()].iter_mut().for_each(|t| *t = t.saturating_add(1));
    }
}

/// A prepared launch that updates one run.
struct PreparedLaunch {
    run: Run,
    /// Whether gradients are multiplied by a factor. The factor is then the last of the launch's numbers.
    scaled: bool,
    numbers: usize,
    update: MapInto,
}

impl<R: Rule> Fused<R> {
    /// Takes over `parameters`: leaves that require a gradient, of one float dtype, on one device. They become views of one flat buffer
    /// and keep their values and gradients. Frozen parameters are skipped. If a skipped parameter is unfrozen later, steps fail until
    /// [`with_group`](Self::with_group) adds it. A parameter whose storage has another handle (another optimiser, a state dict, a tied
    /// layer) is not moved, so that every handle sees the updates. Each such parameter takes its own launch, unless they are adjacent.
    ///
    /// # Errors
    /// [`Error::Autograd`] for a parameter that is the result of an operation. [`Error::Invalid`] if no parameter is trainable or a
    /// hyperparameter is out of range. Errors for different dtypes or devices, and [`Error::OutOfMemory`].
    #[track_caller]
    pub fn new(parameters: Vec<&mut Tensor>, rule: R) -> Result<Fused<R>> {
        let _caller = Caller::enter();
        Ok(Fused { groups: vec![Group::new(parameters, rule)?] })
    }

    /// Adds a parameter group with its own hyperparameters, dtype and device (PyTorch's `add_param_group`). A step has a launch per group.
    /// Fails as [`Fused::new`] does, and with [`Error::Invalid`] for a parameter that is already in another group.
    ///
    /// ```
    /// use claystone::optim::{AdamW, AdamWConfig, Optimizer};
    /// use claystone::{Device, Tensor};
    /// let leaf = || Tensor::ones(&[2], Device::Cpu)?.requires_grad_(true);
    /// let (mut weight, mut bias) = (leaf()?, leaf()?);
    /// let plain = AdamWConfig { weight_decay: 0.0, lr: 1e-2, ..AdamWConfig::default() };
    /// let adamw = AdamW::new(vec![&mut weight], AdamWConfig::default())?.with_group(vec![&mut bias], plain)?;
    /// assert_eq!(adamw.learning_rates(), [1e-3, 1e-2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn with_group(mut self, parameters: Vec<&mut Tensor>, rule: R) -> Result<Fused<R>> {
        let _caller = Caller::enter();
        let mine: Vec<&Tensor> = self.parameters().into_iter().filter(|q| q.numel() > 0).collect();
        let taken = |p: &Tensor| p.numel() > 0 && mine.iter().any(|q| q.shares_storage(p) && q.offset() == p.offset());
        let op = R::NAME;
        invalid!(op if let Some(p) = parameters.iter().find(|p| taken(p)),
            "a parameter of shape {} is already in another group", p.shape());
        let group = Group::new(parameters, rule)?;
        let is_added = |p: &Tensor| group.flat.parameters().any(|added| added.leaf_id() == current_handle(p).leaf_id());
        self.groups.iter_mut().for_each(|g| g.skipped.retain(|p| !is_added(p)));
        self.groups.push(group);
        Ok(self)
    }

    /// Creates groups from named parameters, such as those of [`Module::named_parameters_mut`](crate::nn::Module::named_parameters_mut).
    /// The closure `rule` returns the hyperparameters of a parameter. Parameters with equal hyperparameters, dtype and device form a group.
    /// Parameters that are not passed, such as those of a frozen layer, are not changed. Fails as [`Fused::new`] does.
    ///
    /// ```
    /// use claystone::Device;
    /// use claystone::nn::{LayerNorm, Linear, Module, Sequential};
    /// use claystone::optim::{AdamW, AdamWConfig, Optimizer};
    /// let mut net = Sequential::new().push(Linear::new(4, 4, Device::Cpu)?).push(LayerNorm::new(&[4], Device::Cpu)?);
    /// let adamw = AdamW::grouped(net.named_parameters_mut(""), |name, p| {
    ///     // Biases and norms are not decayed, and the last layer learns faster.
    ///     let weight_decay = if p.rank() < 2 { 0.0 } else { 0.01 };
    ///     let lr = if name.starts_with("1.") { 1e-2 } else { 1e-3 };
    ///     AdamWConfig { lr, weight_decay, ..Default::default() }
    /// })?;
    /// let groups: Vec<(f64, f64)> = adamw.rules().map(|rule| (rule.lr, rule.weight_decay)).collect();
    /// assert_eq!(groups, [(1e-3, 0.01), (1e-3, 0.0), (1e-2, 0.0)]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn grouped<'a>(
        parameters: impl IntoIterator<Item = (String, &'a mut Tensor)>,
        rule: impl Fn(&str, &Tensor) -> R,
    ) -> Result<Fused<R>>
    where
        R: PartialEq,
    {
        let _caller = Caller::enter();
        let (mut groups, mut skipped): (Vec<(R, Vec<&mut Tensor>)>, _) = (Vec::new(), Vec::new());
        for (name, p) in parameters {
            if !current_handle(p).requires_grad() {
                skipped.push(p.shallow_clone());
                continue;
            }
            let rule = rule(&name, p);
            let alike = |q: &Tensor| (q.dtype(), q.device()) == (p.dtype(), p.device());
            match groups.iter_mut().find(|(known, group)| *known == rule && group.first().is_some_and(|q| alike(q))) {
                Some((_, group)) => group.push(p),
                None => groups.push((rule, vec![p])),
            }
        }
        if groups.is_empty() {
            return Err(no_trainable_parameters(R::NAME, skipped.len()));
        }
        let none = Fused { groups: Vec::new() };
        let mut made = groups.into_iter().try_fold(none, |made, (rule, group)| made.with_group(group, rule))?;
        made.groups[0].skipped.extend(skipped);
        Ok(made)
    }

    /// Returns the hyperparameters of each group.
    pub fn rules(&self) -> impl Iterator<Item = R> {
        self.groups.iter().map(|g| g.progress().rule.clone())
    }
}

impl<R: Rule> Group<R> {
    fn new(mut parameters: Vec<&mut Tensor>, rule: R) -> Result<Group<R>> {
        rule.check()?;
        follow_conversions(&mut parameters);
        let (parameters, frozen): (Vec<_>, Vec<_>) = parameters.into_iter().partition(|p| p.requires_grad());
        if parameters.is_empty() {
            return Err(no_trainable_parameters(R::NAME, frozen.len()));
        }
        let skipped = frozen.into_iter().map(|p| p.shallow_clone()).collect();
        let flat = Arc::new(FlatParameters::new(R::NAME, parameters)?);
        let state = rule.state().iter().map(|(_, start)| flat.state(*start)).collect::<Result<_>>()?;
        let progress = Arc::new(Mutex::new(Progress { rule, steps: vec![0; flat.count()] }));
        Ok(Group {
            flat,
            skipped,
            state,
            progress,
            numbers: Vec::new(),
            launches: Vec::new(),
            captured: CapturedUpdates::default(),
        })
    }

    fn progress(&self) -> MutexGuard<'_, Progress<R>> {
        lock(&self.progress)
    }

    /// Returns the runs to update. If the module was converted, switches to its new parameters first.
    fn runs(&mut self) -> Result<SmallVec<[Run; 1]>> {
        let op = R::NAME;
        no_gradient!(op if let Some(p) = self.skipped.iter().find(|p| current_handle(p).requires_grad()),
            "a parameter of shape {} was frozen when the optimiser was made and is trained now: add it with with_group(), or \
             give the optimiser only trainable_parameters_mut()", p.shape());
        // During a capture the master is not refreshed here: each replay does so before it runs. A captured refresh would round the master again.
        let capture = Graph::capture_id(self.flat.device);
        if capture.is_none() {
            self.flat.refresh()?;
        }
        if capture.is_some() && capture != self.captured.id {
            self.captured = CapturedUpdates { id: capture, updates: vec![0; self.flat.count()] };
        }
        let runs = {
            let Progress { rule, steps } = &*self.progress();
            let updates = |i: usize| if capture.is_some() { self.captured.updates[i] } else { 0 };
            let step = |i: usize| steps[i].saturating_add(updates(i));
            let next = |i: usize| rule.numbers(step(i).saturating_add(1));
            self.flat.runs(|a, b| step(a) == step(b) || next(a) == next(b))?
        };
        match runs {
            Some(runs) => Ok(runs),
            None => {
                self.follow_conversion()?;
                self.runs()
            }
        }
    }

    /// Switches to the leaves that replaced this group's leaves in a conversion, and converts the state to their dtype and device.
    fn follow_conversion(&mut self) -> Result<()> {
        let mut now: Vec<Tensor> = self.flat.parameters().map(Tensor::shallow_clone).collect();
        let flat = FlatParameters::new(R::NAME, now.iter_mut().collect()).map_err(|e| match e {
            Error::DTypeMismatch { .. } | Error::DeviceMismatch { .. } => {
                let hint = "convert all parameters of a group alike, or make a group for each dtype and device";
                Error::invalid(R::NAME, format!("parts of the model were converted since the last step: {hint} ({e})"))
            }
            e => e,
        })?;
        let converted = |state: &Tensor| flat.convert_state(&self.flat, state);
        self.state = self.state.iter().map(converted).collect::<Result<_>>()?;
        flat.adopt_master(&self.flat)?;
        self.flat = Arc::new(flat);
        self.launches.clear();
        Ok(())
    }

    /// Updates the weights of `runs`, with gradients multiplied by `factor`. If the device captures a graph, the graph captures the updates.
    fn step(&mut self, runs: SmallVec<[Run; 1]>, factor: f64) -> Result<()> {
        if Graph::is_capturing(self.flat.device) {
            return runs.into_iter().try_for_each(|run| self.capture(run, factor));
        }
        let progress = Arc::clone(&self.progress);
        let mut progress = lock(&progress);
        for_each_part(R::NAME, runs.into_iter().enumerate(), |(i, run)| {
            self.numbers.clear();
            progress.numbers_to(&run, 0, &mut self.numbers);
            self.numbers.push(factor);
            let (scaled, numbers) = (factor != 1.0, self.numbers.len());
            if !self.launches.get(i).is_some_and(|l| l.run == run && (l.scaled, l.numbers) == (scaled, numbers)) {
                self.launches.truncate(i);
                let update = self.update(&progress.rule, &run, scaled, numbers, &[])?;
                self.launches.push(PreparedLaunch { run: run.clone(), scaled, numbers, update });
            }
            launch(&self.launches[i].update, &self.numbers)?;
            progress.count_update(&run);
            Ok(())
        })?;
        self.flat.note_update();
        Ok(())
    }

    /// Captures a run's update, which reads its numbers from device memory. Before each replay, the numbers of that step are copied there.
    fn capture(&mut self, run: Run, factor: f64) -> Result<()> {
        let (device, dtype) = (self.flat.device, self.flat.state_dtype());
        let rule = self.progress().rule.clone();
        let count = rule.numbers(1).len() + 1;
        let empty = |_| Tensor::empty((), (dtype, device));
        let on_device = Graph::outside(|| (0..count).map(empty).collect::<Result<Vec<_>>>())?;
        let copy_numbers = MapInto::new(R::NAME, Vec::new(), count, shallow_clones(&on_device), |_, s| s.to_vec())?;
        let captured = CapturedStep::new(&self.flat);
        self.update(&rule, &run, factor != 1.0, 0, &on_device)?.launch(&[])?;
        captured.captured();
        let ahead = self.captured.updates[run.parameters.start];
        self.captured.updates[run.parameters.clone()].iter_mut().for_each(|updates| *updates += 1);
        let (captured, progress) = (Arc::new(captured), Arc::clone(&self.progress));
        let before = {
            let (captured, progress, run) = (Arc::clone(&captured), Arc::clone(&progress), run.clone());
            move || {
                no_grad(|| {
                    captured.flat.refresh()?;
                    let mut numbers = Vec::with_capacity(count);
                    let progress = lock(&progress);
                    progress.check_equal_numbers(&run, ahead)?;
                    progress.numbers_to(&run, ahead, &mut numbers);
                    drop(progress);
                    numbers.push(factor);
                    launch(&copy_numbers, &numbers)
                })
            }
        };
        Graph::on_replay(device, before, move || {
            lock(&progress).count_update(&run);
            captured.flat.note_update();
        })
    }

    /// Prepares the update of a run. Its numbers are `given` scalars, passed at launch, or the tensors `on_device` of one element each.
    fn update(&self, rule: &R, run: &Run, scaled: bool, given: usize, on_device: &[Tensor]) -> Result<MapInto> {
        let StepTensors { weights, grads, rounded } = self.flat.step_tensors(run)?;
        let state = self.state.iter().map(|s| self.flat.state_slice(run, s)).collect::<Result<Vec<_>>>()?;
        let own = [weights.shallow_clone(), grads].into_iter().chain(shallow_clones(&state));
        let inputs: Vec<Tensor> = own.chain(shallow_clones(on_device)).collect();
        let halves = rounded.is_some();
        let outputs: Vec<Tensor> = [weights].into_iter().chain(shallow_clones(&state)).chain(rounded).collect();
        MapInto::new(R::NAME, inputs, given, outputs, |x, s| {
            let (x, read) = x.split_at(2 + state.len());
            let (factor, s) = if on_device.is_empty() { s } else { read }.split_last().expect("the factor");
            let grad = if scaled { &x[1] * factor } else { x[1].clone() };
            let (w, state) = rule.update(&x[0], &grad, &x[2..], s);
            let rounded = halves.then(|| w.clone());
            std::iter::once(w).chain(state).chain(rounded).collect()
        })
    }

    /// Returns the state as named tensors. `first` is the position of the group's first parameter among those of all groups.
    fn state(&self, first: usize) -> Result<Vec<(String, Tensor)>> {
        let (mut out, names) = (Vec::new(), self.progress().rule.state());
        for i in 0..self.flat.count() {
            for ((name, _), flat) in names.iter().zip(&self.state) {
                out.push((format!("state.{}.{name}", first + i), self.flat.parameter_state(flat, i)?));
            }
            if let Some(master) = &self.flat.master {
                out.push((format!("state.{}.master", first + i), self.flat.parameter_state(master, i)?));
            }
        }
        Ok(out)
    }
}

/// Returns the current leaf of a parameter: `p` itself, or the leaf that replaced `p` in a conversion.
fn current_handle(p: &Tensor) -> Tensor {
    p.successor().unwrap_or_else(|| p.shallow_clone())
}

/// Returns the error for a group without trainable parameters. `frozen` is the number of frozen parameters passed to the function.
fn no_trainable_parameters(op: &'static str, frozen: usize) -> Error {
    match frozen {
        0 => Error::invalid(op, "there are no parameters"),
        _ => {
            Error::invalid(op, "no parameter requires a gradient: call requires_grad_(true) on them or on their module")
        }
    }
}

fn launch(formula: &MapInto, numbers: &[f64]) -> Result<()> {
    let mut scalars: SmallVec<[Scalar; 10]> = SmallVec::new();
    numbers.iter().for_each(|&x| scalars.push(Scalar::Float(x)));
    formula.launch(&scalars)
}

fn shallow_clones(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

fn host_number(dtype: DType, value: impl Into<Scalar>) -> Result<Tensor> {
    Tensor::full((), value, (dtype, Device::default()))
}

impl<R: Rule> Optimizer for Fused<R> {
    #[track_caller]
    fn step_scaled(&mut self, factor: f64) -> Result<()> {
        let _caller = Caller::enter();
        no_grad(|| {
            // All groups are checked before the first group is updated, so that a failed check changes nothing.
            let runs = self.groups.iter_mut().map(Group::runs).collect::<Result<SmallVec<[_; 2]>>>()?;
            for_each_part(R::NAME, self.groups.iter_mut().zip(runs), |(group, runs)| group.step(runs, factor))
        })
    }

    fn zero_grad(&self) {
        self.groups.iter().flat_map(|g| g.flat.parameters()).for_each(Tensor::zero_grad);
    }

    fn parameters(&self) -> Vec<&Tensor> {
        self.groups.iter().flat_map(|g| g.flat.parameters()).collect()
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.groups.iter().map(|g| g.progress().rule.learning_rate()).collect()
    }

    fn set_learning_rates(&mut self, rates: &[f64]) -> Result<()> {
        let op = R::NAME;
        invalid!(op if rates.len() != self.groups.len(), "{} learning rates for {} groups", rates.len(), self.groups.len());
        self.groups.iter().zip(rates).for_each(|(g, &lr)| g.progress().rule.set_learning_rate(lr));
        Ok(())
    }

    fn state_dict(&self) -> Result<StateDict> {
        let mut dict = StateDict::new();
        let mut first = 0;
        for group in &self.groups {
            group.state(first)?.into_iter().for_each(|(name, t)| dict.insert(name, t));
            for (i, &step) in group.progress().steps.iter().enumerate() {
                dict.insert(format!("state.{}.step", first + i), host_number(DType::I64, step)?);
            }
            first += group.flat.count();
        }
        for (g, group) in self.groups.iter().enumerate() {
            let lr = host_number(DType::F64, group.progress().rule.learning_rate())?;
            dict.insert(format!("param_groups.{g}.lr"), lr);
        }
        Ok(dict)
    }

    #[track_caller]
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let _caller = Caller::enter();
        for group in &mut self.groups {
            if group.flat.parameters().any(|p| p.successor().is_some()) {
                group.follow_conversion()?;
            }
        }
        state.check_against(R::NAME, &self.state_dict()?)?;
        let number = |name: String| state.get(&name).expect("checked").to_dtype(DType::F64)?.item::<f64>();
        let (mut first, mut tensors, mut numbers) = (0, Vec::new(), Vec::new());
        for (g, group) in self.groups.iter().enumerate() {
            let of_group = first..first + group.flat.count();
            let steps =
                of_group.map(|i| Ok(number(format!("state.{i}.step"))? as i32)).collect::<Result<Vec<i32>>>()?;
            tensors.extend(group.state(first)?);
            first += steps.len();
            numbers.push((steps, number(format!("param_groups.{g}.lr"))?));
        }
        no_grad(|| {
            for_each_part("load_state_dict", tensors, |(name, tensor)| {
                tensor.copy_(&state.get(&name).expect("checked").to_device(tensor.device())?).map(|_| ())
            })
        })?;
        for (group, (steps, lr)) in self.groups.iter().zip(numbers) {
            let mut progress = group.progress();
            progress.rule.set_learning_rate(lr);
            progress.steps = steps;
            group.flat.note_update();
        }
        Ok(())
    }
}
