use proptest::prelude::*;

use super::*;

/// Makes a step of `length` events. Each storage is `(bytes, start, end)`, in 1/1000 of the step, above a base of other memory. Of
/// `recipes` storages, each second one has a recipe that reads the storage before.
fn step(length: usize, storages: &[(u64, usize, usize)], base: &[u64], recipes: usize) -> StepUses {
    let mut curve: Vec<u64> = (0..=length).map(|i| base[i % base.len()]).collect();
    let at = |share: usize| share * (length - 1) / 1000;
    let idle = storages.iter().enumerate().map(|(ordinal, &(bytes, a, b))| {
        let (from, until) = (at(a.min(b)), at(a.max(b)));
        curve[from..=until + 1].iter_mut().for_each(|sum| *sum += bytes); // in memory before and after the idle time
        let again =
            (ordinal < recipes && ordinal % 2 == 1).then_some(Cost { traffic: bytes % 4, temporary: bytes / 4 });
        Move { ordinal, bytes, from, until, again }
    });
    let idle: Vec<Move> = idle.collect();
    let reads: Vec<(usize, usize)> =
        idle.iter().filter(|m| m.again.is_some()).map(|m| (m.ordinal, m.ordinal - 1)).collect();
    StepUses::new(Device::Cpu, curve, idle, &reads)
}

/// Returns the step's curve under a budget, from the drops and moves and not from the decision's own curve.
fn curve_under(uses: &StepUses, budget: &Budget) -> Vec<u64> {
    let mut curve = uses.curve.clone();
    for m in &budget.moves {
        assert!(m.from < m.until, "{m:?}");
        (m.from + 1..=m.until).for_each(|i| curve[i] -= m.bytes);
    }
    for m in uses.candidates.iter().filter(|m| budget.drops.contains_key(&m.ordinal)) {
        assert!(m.again.is_some() && m.from < m.until, "{m:?}");
        (m.from + 1..=m.until).for_each(|i| curve[i] -= m.bytes);
    }
    curve
}

fn ordinals(budget: &Budget) -> Vec<usize> {
    let mut all: Vec<usize> = budget.moves.iter().map(|m| m.ordinal).chain(budget.drops.keys().copied()).collect();
    all.sort_unstable();
    all
}

proptest! {
    #[test]
    fn a_smaller_budget_moves_more_and_never_needs_more(
        length in 2usize..200,
        storages in prop::collection::vec((1u64..1 << 20, 0usize..=1000, 0usize..=1000), 0..60),
        base in prop::collection::vec(0u64..1 << 20, 1..20),
        recipes in 0usize..60,
    ) {
        let uses = step(length, &storages, &base, recipes);
        let (peak, smallest) = (uses.peak(), uses.smallest_budget());
        prop_assert!(smallest <= peak);
        let mut before: Option<Budget> = None;
        for i in 0..=12 {
            let bytes = smallest + (peak - smallest) * i / 12;
            let budget = memory_budget(&uses, bytes).unwrap();
            prop_assert_eq!(peak_of(&curve_under(&uses, &budget)).min(peak), budget.expected_peak);
            prop_assert!(budget.expected_peak <= bytes);
            let all = budget.recomputed_bytes + budget.moved_bytes + budget.kept_bytes;
            prop_assert_eq!(all, storages.iter().map(|s| s.0).sum::<u64>());
            if let Some(smaller) = before {
                prop_assert!(smaller.expected_peak <= budget.expected_peak);
                let (more, fewer) = (ordinals(&smaller), ordinals(&budget));
                prop_assert!(fewer.iter().all(|ordinal| more.contains(ordinal)), "{:?} {:?}", more, fewer);
            }
            before = Some(budget);
        }
        prop_assert!(before.is_some_and(|budget| ordinals(&budget).is_empty()), "the recorded peak needs no move");
        if let Some(less) = smallest.checked_sub(1) {
            let error = memory_budget(&uses, less).unwrap_err().to_string();
            prop_assert!([less, smallest, peak].iter().all(|n| error.contains(&n.to_string())), "{}", error);
        }
    }
}

#[test]
fn the_longest_idle_storage_moves_first_and_returns_ahead_of_its_use() {
    let bytes = MIN_MOVED_BYTES;
    let uses = step(101, &[(bytes, 100, 900), (bytes, 200, 800), (1, 0, 1000)], &[1000], 0);
    let budget = memory_budget(&uses, uses.peak() - 1).unwrap();
    assert_eq!((ordinals(&budget), budget.moved_bytes), (vec![0], bytes));
    // The peak ends after event 80, so the storage can return at once, but at most 16 events before event 90.
    assert_eq!((budget.moves[0].from, budget.moves[0].until), (10, 81));
    assert_eq!(ordinals(&memory_budget(&uses, uses.smallest_budget()).unwrap()), [0, 1, 2]);
    let text = budget.to_string();
    assert!(text.contains("again, 1 of 65536 bytes move, 65537 bytes stay"), "{text}");
}

#[test]
fn storages_with_recipes_are_dropped_before_others_move() {
    let bytes = MIN_MOVED_BYTES;
    let base: Vec<u64> = (0..=101).map(|i| if (30..70).contains(&i) { 4 * bytes } else { 0 }).collect();
    let uses = step(101, &[(bytes, 0, 1000), (bytes, 200, 800)], &base, 2);
    let budget = memory_budget(&uses, uses.peak() - 1).unwrap();
    assert_eq!((ordinals(&budget), budget.recomputed_bytes, budget.moved_bytes), (vec![1], bytes, 0));
    assert!(budget.to_string().contains("1 saved storages of 65536 bytes are computed again, 0 of 0 bytes move"));
    // The storage that the recipe reads is back when the recipe runs.
    let both = memory_budget(&uses, uses.smallest_budget()).unwrap();
    assert!(ordinals(&both) == [0, 1] && both.moves[0].until <= 80, "{both:?}");
}
