//! Replays of a dry run's events on simulated devices of other sizes, and the search for the smallest device that suffices.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::allocator::Allocator;
use super::super::history::{Frame, LiveMemory, add_caller_line, group_by_call_site};
use super::super::thread;
use super::record::{Event, Recorded, Role, Site};
use crate::{Error, Result};

/// The number of larger capacities that are tested before an answer is accepted.
const PROBES: u64 = 16;

/// Returns the smallest capacity in bytes for which `survives` is true, to within 0.1 % of `least`, below which no run can survive.
/// `enough` is a capacity that should suffice. Returns `None` if no capacity suffices.
///
/// Binary search assumes that more memory never hurts, which no allocator guarantees. Therefore capacities between the answer
/// and `enough` are tested as well. If such a capacity fails, the search continues above it.
///
/// ```
/// use claystone::storage::min_capacity;
/// let survives = |bytes| Ok::<bool, claystone::Error>(bytes >= 17);
/// assert_eq!(min_capacity(10, 40, survives)?, Some(17));
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Errors of `survives`.
pub fn min_capacity<E>(
    least: u64,
    enough: u64,
    mut survives: impl FnMut(u64) -> Result<bool, E>,
) -> Result<Option<u64>, E> {
    let mut most = enough.max(least).max(1);
    while !survives(most)? {
        let Some(double) = most.checked_mul(2) else { return Ok(None) };
        most = double;
    }
    let tolerance = (least / 1000).max(1);
    let (mut fails, mut answer) = (least.saturating_sub(1), most);
    'search: loop {
        while answer - fails > tolerance && answer > least {
            // Test `least` itself first, so that the answer is exact if the peak of the requested bytes suffices.
            let middle = if fails < least { least } else { fails + (answer - fails) / 2 };
            if survives(middle)? { answer = middle } else { fails = middle }
        }
        // Test in descending order, so that the capacity tested before a failing one is known to survive.
        let (step, mut above) = ((most - answer) / PROBES, most);
        for capacity in (1..PROBES).rev().map(|probe| answer + probe * step).filter(|_| step > 0) {
            if !survives(capacity)? {
                (fails, answer) = (capacity, above);
                continue 'search;
            }
            above = capacity;
        }
        return Ok(Some(answer));
    }
}

/// A live block in a replay that only counts.
struct Counted {
    size: u64,
    site: u32,
    role: Role,
}

impl Recorded {
    /// Replays the events through an allocator, calls `at_end`, and frees the remaining blocks. Returns the line of the request for which
    /// memory did not suffice; `None` if all were served.
    pub(super) fn replay(&self, allocator: &dyn Allocator, at_end: impl FnOnce()) -> Result<Option<Site>> {
        let (mut live, mut blocks, mut ended) = (HashMap::new(), 0, Ok(None));
        for event in &self.events {
            match *event {
                Event::Allocate { requested, site, stream, .. } => {
                    let line = self.sites[site as usize];
                    match thread::with(|state| &state.caller, line, || allocator.allocate(requested as usize, stream)) {
                        Ok(block) => _ = live.insert(blocks, block),
                        Err(error) => {
                            ended =
                                if matches!(error, Error::OutOfMemory { .. }) { Ok(Some(line)) } else { Err(error) };
                            break;
                        }
                    }
                    blocks += 1;
                }
                Event::Free { block } => live.remove(&block).into_iter().for_each(|block| allocator.deallocate(block)),
                Event::Role { .. } => {}
            }
        }
        at_end();
        live.into_values().for_each(|block| allocator.deallocate(block));
        ended
    }

    /// Returns the blocks at the peak of allocated bytes, by source line and by role.
    pub(super) fn at_peak(&self) -> (Vec<LiveMemory>, [(Role, u64); 5]) {
        let (mut most, mut peak) = (0, 0);
        self.count_until(self.events.len(), |events, allocated| {
            // Roles are given to a block right after its allocation.
            if allocated > most || allocated == most && peak + 1 == events {
                (most, peak) = (allocated, events);
            }
        });
        let live = self.count_until(peak, |_, _| {});
        let frames: Vec<Arc<[Frame]>> =
            self.sites.iter().map(|&site| frame_of_site(site).into_iter().collect()).collect();
        let sites = group_by_call_site(live.values().map(|block| (&frames[block.site as usize], block.size)));
        let of_role = |role| live.values().filter(|block| block.role == role).map(|block| block.size).sum();
        (sites, Role::ALL.map(|role| (role, of_role(role))))
    }

    /// Counts the first `end` events. Calls `f` after each with the number of events so far and the allocated bytes. Returns the blocks
    /// that are live at the end.
    fn count_until(&self, end: usize, mut f: impl FnMut(usize, u64)) -> HashMap<u32, Counted> {
        let (mut live, mut blocks, mut allocated) = (HashMap::<u32, Counted>::new(), 0, 0);
        for (i, event) in self.events[..end].iter().enumerate() {
            match *event {
                Event::Allocate { size, site, .. } => {
                    live.insert(blocks, Counted { size, site, role: Role::Temporary });
                    (blocks, allocated) = (blocks + 1, allocated + size);
                }
                Event::Free { block } => allocated -= live.remove(&block).map_or(0, |block| block.size),
                Event::Role { block, role } => live.get_mut(&block).into_iter().for_each(|block| block.role = role),
            }
            f(i + 1, allocated);
        }
        live
    }
}

/// Returns the frame of a line; `None` if the line is unknown.
pub(super) fn frame_of_site(site: Site) -> Option<Frame> {
    let mut frames = Vec::new();
    add_caller_line(&mut frames, site?);
    frames.pop()
}

#[cfg(test)]
mod tests {
    use super::min_capacity;

    fn found(least: u64, enough: u64, survives: impl Fn(u64) -> bool) -> u64 {
        min_capacity(least, enough, |capacity| Ok::<bool, ()>(survives(capacity))).unwrap().unwrap()
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
        assert_eq!(min_capacity(1, 1, |_| Ok::<bool, ()>(false)), Ok(None));
    }

    #[test]
    fn capacities_above_the_answer_are_tested() {
        let survives = |capacity| capacity >= 1_100_000 && !(2_000_000..2_300_000).contains(&capacity);
        let answer = found(1_000_000, 3_000_000, survives);
        assert!((2_300_000..=2_301_000).contains(&answer), "{answer}");
    }
}
