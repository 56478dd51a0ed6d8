//! Launches with choices on trial.

use std::time::Instant;

use super::choices::{MAX_TUNED_GROUP_ITEMS, SizeClass, Subject, group_candidates, prepare_with_trials};
use super::level::Level;
use super::parameters::{PARAMETERS, TuningParameter};
use crate::Result;
use crate::device::capture::is_capturing;
use crate::device::opencl::{ClDevice, ClKernel};

impl ClDevice {
    /// Returns the value of a parameter for this size class: the choice for the class, or else the device's value.
    pub(crate) fn tuned_for(&self, knob: TuningParameter, class: SizeClass) -> usize {
        let default = self.tuned(knob);
        self.choice(Subject::TuningParameter(knob as usize), class, default, |level| {
            let choices = PARAMETERS[knob as usize].choices;
            let at = choices.iter().position(|&choice| choice == default).unwrap_or(0);
            match level {
                Level::Fast => choices[at.saturating_sub(1)..choices.len().min(at + 2)].to_vec(),
                _ => choices.to_vec(),
            }
        })
    }

    /// Returns the work-group size for a launch over `items` work-items: the choice for the size class, or else `default`. For kernels
    /// that run in groups of any size and check bounds.
    pub(crate) fn group_for(&self, kernel: &ClKernel, items: usize, default: usize) -> usize {
        let most = kernel.max_work_group().min(MAX_TUNED_GROUP_ITEMS);
        if kernel.has_fixed_group_size() || default > most {
            return default;
        }
        let most_useful = most.min(items.next_power_of_two());
        let candidates =
            |level| group_candidates(level, default).into_iter().filter(|&group| group <= most_useful).collect();
        self.choice(Subject::Group(kernel.id()), SizeClass::from_sizes([items]), default, candidates).min(most)
    }

    /// Returns the value of a choice for the launch that this thread prepares.
    fn choice(
        &self,
        subject: Subject,
        class: SizeClass,
        default: usize,
        candidates: impl FnOnce(Level) -> Vec<usize>,
    ) -> usize {
        // A recorded launch does not run, and so cannot be timed.
        let may_try = || !is_capturing(self.device());
        self.tuning().choices.choice((subject, class), default, may_try, candidates)
    }

    /// Prepares a launch and runs it, timed between idle streams if a choice is on trial. A launch that fails with a candidate, for
    /// example because the kernel needs too many resources, is repeated with the default. Returns the prepared launch, and whether
    /// it may be cached for similar launches.
    ///
    /// # Errors
    /// The errors of the launch with the default, or a lost device.
    pub(crate) fn launch_on_trial<P>(
        &self,
        prepare: impl Fn() -> Result<P>,
        launch: impl Fn(&P) -> Result<()>,
    ) -> Result<(P, bool)> {
        let (prepared, trial) = prepare_with_trials(&prepare);
        let run = |prepared: Result<P>| prepared.and_then(|prepared| launch(&prepared).map(|()| prepared));
        let Some(timed) = trial.filter(|trial| trial.is_timed) else {
            return Ok((run(prepared)?, trial.is_none()));
        };
        let stream = self.current_stream();
        self.drain_stream(stream)?;
        let from = Instant::now();
        let launched = run(prepared);
        let done =
            launched.as_ref().map_or(Ok(()), |_| self.drain_stream(stream).and_then(|()| self.take_failed(stream)));
        let micros = if launched.is_ok() && done.is_ok() { from.elapsed().as_secs_f64() * 1e6 } else { f64::INFINITY };
        if self.tuning().choices.record_time(timed, micros) {
            self.store_new_choices();
        }
        done?;
        Ok((launched.or_else(|_| run(prepare()))?, false))
    }

    pub(crate) fn level(&self) -> Level {
        self.tuning().choices.level()
    }

    /// Sets the tuning level of this process. Trials in progress start anew.
    pub(crate) fn set_level(&self, level: Level) {
        self.tuning().choices.set_level(level);
        self.tuning().invalidate_launches();
    }

    /// Enables or disables the choices in this process, and returns whether they were enabled.
    pub(crate) fn use_choices(&self, on: bool) -> bool {
        let before = self.tuning().choices.set_enabled(on);
        self.tuning().invalidate_launches();
        before
    }

    /// Returns every choice made: the subject's name, the logarithms of the sizes, and the value.
    pub(crate) fn chosen(&self) -> Vec<(String, Vec<u32>, usize)> {
        let all = self.tuning().choices.chosen().into_iter();
        all.map(|((subject, class), value)| (subject.name(), class.logarithms(), value)).collect()
    }

    pub(crate) fn on_trial(&self) -> usize {
        self.tuning().choices.on_trial()
    }
}
