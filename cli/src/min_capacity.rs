//! The smallest device on which a trace runs.

use crate::measure::{Setup, peak_with_capacity};
use crate::trace::Trace;

/// Number of larger capacities that are tested before an answer is accepted.
const PROBES: u64 = 16;

/// Returns the smallest capacity of a simulated device that survives `passes` passes, to within 0.1 % of the requested peak.
///
/// Binary search assumes that more memory never hurts, which no allocator guarantees. Therefore capacities between the answer
/// and the reservation of an unlimited run are tested as well. If such a capacity fails, the search continues above it.
pub fn min_capacity(setup: &Setup, trace: &Trace, passes: u32) -> Result<u64, String> {
    let survives = |capacity| Ok::<bool, String>(peak_with_capacity(setup, trace, passes, Some(capacity))?.is_some());
    let enough = crate::measure::peak_with_capacity(setup, trace, passes, None)?.ok_or("no device is large enough")?;
    search(trace.peak_requested, enough, survives)
}

/// Searches for the smallest sufficient capacity, between `least`, below which every run fails, and `enough`, assumed to suffice.
fn search(least: u64, enough: u64, mut survives: impl FnMut(u64) -> Result<bool, String>) -> Result<u64, String> {
    let mut most = enough.max(least);
    while !survives(most)? {
        most = most.checked_mul(2).ok_or("no device is large enough")?;
    }
    let tolerance = (least / 1000).max(1);
    let (mut fails, mut answer) = (least.saturating_sub(1), most);
    loop {
        while answer - fails > tolerance && answer > least {
            // Test `least` itself first, so that the answer is exact if the peak of the requested bytes suffices.
            let middle = if fails < least { least } else { fails + (answer - fails) / 2 };
            match survives(middle)? {
                true => answer = middle,
                false => fails = middle,
            }
        }
        // Test in descending order, so that the capacity tested before a failing one is known to survive.
        let step = (most - answer) / PROBES;
        let (mut above, mut gap) = (most, None);
        for capacity in (1..PROBES).rev().map(|probe| answer + probe * step).filter(|_| step > 0) {
            if !survives(capacity)? {
                gap = Some(capacity);
                break;
            }
            above = capacity;
        }
        match gap {
            Some(capacity) => (fails, answer) = (capacity, above),
            None => return Ok(answer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::search;

    fn found(least: u64, enough: u64, survives: impl Fn(u64) -> bool) -> u64 {
        search(least, enough, |capacity| Ok(survives(capacity))).unwrap()
    }

    #[test]
    fn the_answer_is_exact_to_a_thousandth() {
        for threshold in [1_000_000, 1_000_001, 1_234_567, 2_999_999, 3_000_000] {
            let answer = found(1_000_000, 3_000_000, |capacity| capacity >= threshold);
            assert!((threshold..=threshold + 1000).contains(&answer), "{threshold}: {answer}");
        }
        assert_eq!(found(1_000_000, 3_000_000, |_| true), 1_000_000);
        assert_eq!(found(10, 40, |capacity| capacity >= 17), 17);
    }

    #[test]
    fn the_search_continues_above_the_uncapped_reservation() {
        let answer = found(1000, 1000, |capacity| capacity >= 5000);
        assert!((5000..=5001).contains(&answer), "{answer}");
    }

    #[test]
    fn capacities_above_the_answer_are_tested() {
        let survives = |capacity| capacity >= 1_100_000 && !(2_000_000..2_300_000).contains(&capacity);
        let answer = found(1_000_000, 3_000_000, survives);
        assert!((2_300_000..=2_301_000).contains(&answer), "{answer}");
    }
}
