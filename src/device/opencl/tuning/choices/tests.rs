//! Tests of size classes, levels, trials, and the lines of the file.

use super::*;

/// Returns choices that a device of this family allows.
pub(in super::super) fn sample_choices(family: Family) -> Chosen {
    let rows = PARAMETERS.iter().enumerate().filter(|(_, row)| row.families.contains(&family));
    let knobs = rows.map(|(i, row)| (Subject::TuningParameter(i), SizeClass::from_sizes([i, 1 << 20]), row.choices[0]));
    let groups = [0, u64::MAX].map(|id| (Subject::Group(id), SizeClass::from_sizes([1000]), 96));
    knobs.chain(groups).map(|(subject, class, value)| ((subject, class), value)).collect()
}

pub(in super::super) fn are_allowed(chosen: &Chosen) -> bool {
    chosen.iter().all(|((subject, _), &value)| subject.allows(value))
}

#[test]
fn similar_sizes_share_a_class() {
    assert_eq!(SizeClass::from_sizes([1024, 3]), SizeClass::from_sizes([2047, 2]));
    assert_ne!(SizeClass::from_sizes([1024]), SizeClass::from_sizes([1023]));
    assert_eq!(SizeClass::from_sizes([0]), SizeClass::from_sizes([1]));
    assert_ne!(SizeClass::from_sizes([1, 2]), SizeClass::from_sizes([2, 1]));
}

/// Every level must try all candidates of the level below, and every candidate must be an allowed value.
#[test]
fn each_level_tries_more_candidates() {
    for default in [1, 64, 256, 1024] {
        let trial = |level| Trial::new(default, group_candidates(level, default)).candidates;
        let values = |level| trial(level).into_iter().map(|(value, _)| value).collect::<Vec<_>>();
        assert_eq!(values(Level::None), [default]);
        let counts = Level::ALL.map(|level| values(level).len());
        assert!(counts.is_sorted(), "{counts:?}");
        assert!(counts[4] > counts[3] && counts[3] > counts[2] && counts[1] > 1, "{counts:?}");
        for (less, more) in [(Level::Normal, Level::Wide), (Level::Wide, Level::Heavy)] {
            assert!(values(less).iter().all(|value| values(more).contains(value)), "{default}: {less}");
        }
        assert!(values(Level::Heavy).iter().all(|&value| Subject::Group(0).allows(value)), "{default}");
        assert_eq!(values(Level::Heavy)[0], default);
    }
    assert_eq!(Trial::new(64, group_candidates(Level::Fast, 64)).candidates.len(), 5);
}

/// Runs a trial to its end with given launch times. Returns the choice and the number of launches.
fn run_trial(default: usize, others: &[usize], micros: impl Fn(usize, usize) -> f64) -> (usize, usize) {
    let mut trial = Trial::new(default, others.to_vec());
    for launch in 0.. {
        let value = trial.next();
        if let Some(chosen) = trial.record_time(value, micros(value, launch)) {
            return (chosen, launch + 1);
        }
    }
    unreachable!("a trial ends")
}

#[test]
fn the_fastest_candidate_wins_if_clearly_faster() {
    let (chosen, launches) = run_trial(64, &[32, 128, 256], |value, _| if value == 128 { 90.0 } else { 100.0 });
    assert_eq!((chosen, launches), (128, 4 * (TRIAL_ROUNDS + 1) + 2 * (FINAL_LAUNCHES + 1)));
    // A gain of less than 3 % must not replace the default, and needs no final comparison.
    let (chosen, launches) = run_trial(64, &[32, 128], |value, _| if value == 128 { 98.0 } else { 100.0 });
    assert_eq!((chosen, launches), (64, 3 * (TRIAL_ROUNDS + 1)));
    // A candidate's first launch must not count, and single outliers must not matter.
    let slow = |value, launch| if launch < 2 || launch % 11 == 9 { 1e6 } else { [100.0, 80.0][value / 128] };
    assert_eq!(run_trial(64, &[128], slow).0, 128);
    // A candidate that was fast by chance must not win the final comparison.
    let lucky = |value, launch| if value == 128 && launch < 2 * (TRIAL_ROUNDS + 1) { 50.0 } else { 100.0 };
    assert_eq!(run_trial(64, &[128], lucky).0, 64);
}

/// A launch recorded by a graph must use the default without a time and without caching, and the trial goes on later.
#[test]
fn a_launch_without_trials_uses_the_default() {
    let choices = Choices::new(Level::Fast);
    let of = (Subject::Group(1), SizeClass::from_sizes([1000]));
    let choice = |may_try| prepare_with_trials(|| choices.choice(of, 64, || may_try, |_| vec![128]));
    let (value, trial) = choice(false);
    assert!(value == 64 && trial.is_some_and(|trial| !trial.is_timed));
    for expected in [64, 128] {
        let (value, trial) = choice(true);
        let trial = trial.filter(|trial| trial.is_timed).unwrap();
        assert_eq!((value, trial.value), (expected, expected));
        choices.record_time(trial, 1.0);
    }
    // Outside of a prepared launch, there must be no trials.
    assert_eq!(choices.choice(of, 64, || true, |_| vec![128]), 64);
}

#[test]
fn written_choices_read_back_and_others_fail() {
    for family in [Family::Processor, Family::Gpu] {
        let (all, none) = (sample_choices(family), Chosen::new());
        for chosen in [&all, &none] {
            assert_eq!(read(write(chosen).lines(), family).as_ref(), Ok(chosen));
        }
        let text = write(&all);
        let first = text.lines().nth(1).unwrap();
        let name = first.split(' ').next().unwrap();
        let wrong = [
            format!("{name} 0000000000000000 7"),
            format!("{name} 000000000000000 {}", all.values().next().unwrap()),
            format!("{name} 0000000000000000"),
            format!("{first} 1"),
            "group_0 0000000000000000 64".into(),
            "group_0000000000000000 0000000000000000 0".into(),
            "group_0000000000000000 0000000000000000 1025".into(),
            text.lines().last().unwrap().into(), // a duplicate line
            String::new(),
        ];
        for wrong in wrong {
            let error = read(text.replacen(first, &wrong, 1).lines(), family).unwrap_err();
            assert!(error.contains("is not a valid choice"), "{wrong}: {error}");
        }
        for wrong in [text.clone() + "more\n", text.replace("choices ", "choices 1"), text.replace("choices", "")] {
            assert!(read(wrong.lines(), family).is_err(), "{wrong}");
        }
    }
}

#[test]
fn choices_of_another_family_are_refused() {
    assert!(read(write(&sample_choices(Family::Gpu)).lines(), Family::Processor).is_err());
}
