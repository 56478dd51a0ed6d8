//! Replays of a dry run's events on simulated devices of other sizes, and the search for the smallest device that suffices.

use std::sync::Arc;

use super::super::allocator::Allocator;
use super::super::block::Block;
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

impl Recorded {
    /// Replays the events through an allocator, calls `at_end`, and frees the remaining blocks. Returns the line of the request for which
    /// memory did not suffice; `None` if all were served.
    pub(super) fn replay(&self, allocator: &dyn Allocator, at_end: impl FnOnce()) -> Result<Option<Site>> {
        let mut live: Vec<Option<Block>> = (0..self.numbers()).map(|_| None).collect();
        let failed = self.events.iter().find_map(|event| match *event {
            Event::Allocate { block, requested, site, stream, .. } => {
                let line = self.sites[site as usize];
                let made = thread::with(|state| &state.caller, line, || allocator.allocate(requested as usize, stream));
                made.map(|made| live[block as usize] = Some(made)).err().map(|error| (line, error))
            }
            Event::Free { block, .. } => {
                live[block as usize].take().into_iter().for_each(|block| allocator.deallocate(block));
                None
            }
            Event::Role { .. } => None,
        });
        at_end();
        live.into_iter().flatten().for_each(|block| allocator.deallocate(block));
        match failed {
            Some((line, Error::OutOfMemory { .. })) => Ok(Some(line)),
            Some((_, error)) => Err(error),
            None => Ok(None),
        }
    }

    /// Returns the blocks at the peak of allocated bytes, by source line and by role.
    pub(super) fn at_peak(&self) -> (Vec<LiveMemory>, [(Role, u64); 5]) {
        let (mut most, mut peak, mut allocated) = (0, 0, 0);
        for (i, event) in self.events.iter().enumerate() {
            match event {
                Event::Allocate { size, .. } => allocated += size,
                Event::Free { size, .. } => allocated -= size,
                Event::Role { .. } => {}
            }
            // Roles are given to a block right after its allocation.
            if allocated > most || allocated == most && peak == i {
                (most, peak) = (allocated, i + 1);
            }
        }
        let mut live = vec![(0, 0, Role::Temporary); self.numbers()];
        for event in &self.events[..peak] {
            match *event {
                Event::Allocate { block, size, site, .. } => live[block as usize] = (size, site, Role::Temporary),
                Event::Free { block, .. } => live[block as usize].0 = 0,
                Event::Role { block, role } => live[block as usize].2 = role,
            }
        }
        // Blocks may get a lasting role after the peak, as a gradient does that was the peak's last allocation.
        let mut is_freed = vec![false; live.len()];
        for event in &self.events[peak..] {
            match *event {
                Event::Free { block, .. } => is_freed[block as usize] = true,
                Event::Role { block, role } if !is_freed[block as usize] && role.is_lasting() => {
                    live[block as usize].2 = role;
                }
                _ => {}
            }
        }
        live.retain(|(size, ..)| *size > 0);
        let frames: Vec<Arc<[Frame]>> =
            self.sites.iter().map(|&site| frame_of_site(site).into_iter().collect()).collect();
        let sites = group_by_call_site(live.iter().map(|(size, site, _)| (&frames[*site as usize], *size)));
        let of_role = |role| live.iter().filter(|block| block.2 == role).map(|block| block.0).sum();
        (sites, Role::ALL.map(|role| (role, of_role(role))))
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
