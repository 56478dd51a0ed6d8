//! Classes, levels, trials, and the lines of the file.

use super::*;

/// Choices that a device of this family may have.
pub(in super::super) fn some(family: Family) -> Chosen {
    let rows = PARAMETERS.iter().enumerate().filter(|(_, row)| row.families.contains(&family));
    let knobs = rows.map(|(i, row)| (Subject::Knob(i), SizeClass::of([i, 1 << 20]), row.choices[0]));
    let groups = [0, u64::MAX].map(|id| (Subject::Group(id), SizeClass::of([1000]), 96));
    knobs.chain(groups).map(|(subject, class, value)| ((subject, class), value)).collect()
}

pub(in super::super) fn are_allowed(chosen: &Chosen) -> bool {
    chosen.iter().all(|((subject, _), &value)| subject.allows(value))
}

#[test]
fn sizes_near_each_other_are_of_one_class() {
    assert_eq!(SizeClass::of([1024, 3]), SizeClass::of([2047, 2]));
    assert_ne!(SizeClass::of([1024]), SizeClass::of([1023]));
    assert_eq!(SizeClass::of([0]), SizeClass::of([1]));
    assert_ne!(SizeClass::of([1, 2]), SizeClass::of([2, 1]));
}

/// Every level tries what the one below it does, and all that it tries is allowed.
#[test]
fn each_level_tries_more() {
    for default in [1, 64, 256, 1024] {
        let trial = |level| Trial::new(default, groups(level, default)).candidates;
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
    assert_eq!(Trial::new(64, groups(Level::Fast, 64)).candidates.len(), 5);
}

/// Runs a trial to its end with candidates that take so long.
fn run(default: usize, others: &[usize], micros: impl Fn(usize, usize) -> f64) -> (usize, usize) {
    let mut trial = Trial::new(default, others.to_vec());
    for launch in 0.. {
        let value = trial.next();
        if let Some(chosen) = trial.note(value, micros(value, launch)) {
            return (chosen, launch + 1);
        }
    }
    unreachable!("a trial ends")
}

#[test]
fn the_fastest_is_chosen_if_it_is_worth_it() {
    let (chosen, launches) = run(64, &[32, 128, 256], |value, _| if value == 128 { 90.0 } else { 100.0 });
    assert_eq!((chosen, launches), (128, 4 * (ROUNDS + 1) + 2 * (FINAL + 1)));
    // Not by less than 3 %, and then there is no final.
    let (chosen, launches) = run(64, &[32, 128], |value, _| if value == 128 { 98.0 } else { 100.0 });
    assert_eq!((chosen, launches), (64, 3 * (ROUNDS + 1)));
    // The first launch of a candidate does not count, nor does one that was disturbed.
    let slow = |value, launch| if launch < 2 || launch % 11 == 9 { 1e6 } else { [100.0, 80.0][value / 128] };
    assert_eq!(run(64, &[128], slow).0, 128);
    // One that was fast by chance is not faster in the final.
    let lucky = |value, launch| if value == 128 && launch < 2 * (ROUNDS + 1) { 50.0 } else { 100.0 };
    assert_eq!(run(64, &[128], lucky).0, 64);
}

/// What a graph records is the default, without a time and without a plan that would be kept, and the trial goes on later.
#[test]
fn a_launch_that_may_not_try_has_the_default() {
    let choices = Choices::new(Level::Fast, Chosen::new());
    let of = (Subject::Group(1), SizeClass::of([1000]));
    let choice = |may_try| preparing(|| choices.choice(of, 64, || may_try, |_| vec![128]));
    let (value, trial) = choice(false);
    assert!(value == 64 && trial.is_some_and(|trial| !trial.is_timed));
    for expected in [64, 128] {
        let (value, trial) = choice(true);
        let trial = trial.filter(|trial| trial.is_timed).unwrap();
        assert_eq!((value, trial.value), (expected, expected));
        choices.note(trial, 1.0);
    }
    // Outside of a launch nothing is tried.
    assert_eq!(choices.choice(of, 64, || true, |_| vec![128]), 64);
}

#[test]
fn what_is_written_is_read_back_and_nothing_else() {
    for family in [Family::Processor, Family::Gpu] {
        let (all, none) = (some(family), Chosen::new());
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
            text.lines().last().unwrap().into(), // twice
            String::new(),
        ];
        for wrong in wrong {
            let error = read(text.replacen(first, &wrong, 1).lines(), family).unwrap_err();
            assert!(error.contains("is no choice"), "{wrong}: {error}");
        }
        for wrong in [text.clone() + "more\n", text.replace("choices ", "choices 1"), text.replace("choices", "")] {
            assert!(read(wrong.lines(), family).is_err(), "{wrong}");
        }
    }
}

#[test]
fn other_families_parameters_are_no_choices() {
    assert!(read(write(&some(Family::Gpu)).lines(), Family::Processor).is_err());
}
