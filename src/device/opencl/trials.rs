//! Choices on trial in a device's launches.

use std::time::Instant;

use super::ClDevice;
use super::choices::{LARGEST_GROUP, SizeClass, Subject, groups, preparing};
use super::driver::ClKernel;
use super::parameters::{Knob, PARAMETERS};
use crate::Result;
use crate::device::capture::is_capturing;
use crate::device::level::Level;

impl ClDevice {
    /// The value of a parameter for sizes of this class: what was chosen for them, else the device's.
    pub(crate) fn tuned_for(&self, knob: Knob, class: SizeClass) -> usize {
        let default = self.tuned(knob);
        self.choice(Subject::Knob(knob as usize), class, default, |level| {
            let choices = PARAMETERS[knob as usize].choices;
            let at = choices.iter().position(|&choice| choice == default).unwrap_or(0);
            match level {
                Level::Fast => choices[at.saturating_sub(1)..choices.len().min(at + 2)].to_vec(),
                _ => choices.to_vec(),
            }
        })
    }

    /// The work-items a group of a kernel that runs in groups of any size and checks its bounds, over so many work-items:
    /// what was chosen for as many, else `default`.
    pub(crate) fn group_for(&self, kernel: &ClKernel, items: usize, default: usize) -> usize {
        let most = kernel.max_work_group().min(LARGEST_GROUP);
        if kernel.is_of_one_size() || default > most {
            return default;
        }
        let most_useful = most.min(items.next_power_of_two());
        let candidates = |level| groups(level, default).into_iter().filter(|&group| group <= most_useful).collect();
        self.choice(Subject::Group(kernel.id()), SizeClass::of([items]), default, candidates).min(most)
    }

    fn choice(
        &self,
        subject: Subject,
        class: SizeClass,
        default: usize,
        candidates: impl FnOnce(Level) -> Vec<usize>,
    ) -> usize {
        // What is recorded is not run, and so not timed.
        let may_try = || !is_capturing(self.device());
        self.tuning().choices.choice((subject, class), default, may_try, candidates)
    }

    /// Prepares a launch and launches it, with what is on trial for it: that is timed, with an idle stream before and after. What
    /// fails with a candidate, whose kernel may need more than the device has, is done with the default. Gives what was
    /// prepared, and whether it can be kept for launches like this one.
    ///
    /// # Errors
    /// Those of the default, or a lost device.
    pub(crate) fn launch_on_trial<P>(
        &self,
        prepare: impl Fn() -> Result<P>,
        launch: impl Fn(&P) -> Result<()>,
    ) -> Result<(P, bool)> {
        let (prepared, trial) = preparing(&prepare);
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
        if self.tuning().choices.note(timed, micros) {
            self.chosen_anew();
        }
        done?;
        Ok((launched.or_else(|_| run(prepare()))?, false))
    }

    /// How much is tried.
    pub(crate) fn level(&self) -> Level {
        self.tuning().choices.level()
    }

    /// Changes it for this process. What is on trial begins anew.
    pub(crate) fn set_level(&self, level: Level) {
        self.tuning().choices.set_level(level);
        self.tuning().changed();
    }

    /// Whether choices are used from now on, in this process; gives whether they were.
    pub(crate) fn use_choices(&self, on: bool) -> bool {
        let before = self.tuning().choices.use_them(on);
        self.tuning().changed();
        before
    }

    /// Every choice that was made: of what, for which logarithms of sizes.
    pub(crate) fn chosen(&self) -> Vec<(String, Vec<u32>, usize)> {
        let all = self.tuning().choices.chosen().into_iter();
        all.map(|((subject, class), value)| (subject.name(), class.logarithms(), value)).collect()
    }

    /// How many choices are on trial.
    pub(crate) fn on_trial(&self) -> usize {
        self.tuning().choices.on_trial()
    }
}
