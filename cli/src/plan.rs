//! Offline placement: the arena that holds all blocks of a trace whose lifetimes are known in advance.

use std::collections::BTreeMap;
use std::time::Duration;

use claystone::storage::plan::{Lifetime, place};

use crate::trace::Trace;

/// Searches a placement within `budget`, checks it, and returns the bytes of its arena.
pub fn arena(trace: &Trace, alignment: usize, budget: Duration) -> Result<u64, String> {
    let lifetimes = trace.lifetimes();
    let placement = place(&lifetimes, alignment as u64, budget);
    check_placement(&lifetimes, &placement.offsets, placement.arena, alignment as u64)?;
    Ok(placement.arena)
}

/// Checks that every block is aligned, inside the arena, and disjoint from all blocks that are live at the same time.
fn check_placement(lifetimes: &[Lifetime], offsets: &[u64], arena: u64, alignment: u64) -> Result<(), String> {
    if offsets.len() != lifetimes.len() {
        return Err(format!("the plan places {} of {} blocks", offsets.len(), lifetimes.len()));
    }
    // Ends sort before starts: a block may reuse the memory of a block that ends at the same event.
    let mut moments: Vec<(u64, bool, usize)> = (lifetimes.iter().zip(0..))
        .flat_map(|(life, block)| [(life.start, true, block), (life.end, false, block)])
        .collect();
    moments.sort_unstable();
    let mut live: BTreeMap<u64, usize> = BTreeMap::new(); // the live blocks, by offset
    for (_, starts, block) in moments {
        let (from, to) = (offsets[block], offsets[block].saturating_add(lifetimes[block].bytes));
        if !starts {
            live.remove(&from);
            continue;
        }
        if to > arena || from % alignment != 0 {
            return Err(format!("the plan places block {block} at {from}..{to} of {arena}, alignment {alignment}"));
        }
        let before = live.range(..to).next_back();
        if let Some((at, other)) = before.filter(|&(&at, &other)| at + lifetimes[other].bytes > from) {
            return Err(format!("the plan places block {block} at {from}..{to} and block {other}, live too, at {at}"));
        }
        live.insert(from, block);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn life(start: u64, end: u64, bytes: u64) -> Lifetime {
        Lifetime { start, end, bytes }
    }

    #[test]
    fn valid_plans_are_accepted() {
        let lives = [life(0, 2, 1000), life(1, 4, 600), life(2, 5, 300)];
        assert_eq!(check_placement(&lives, &[0, 1024, 0], 2048, 512), Ok(()));
        assert_eq!(check_placement(&lives, &[1024, 0, 1024], 2024, 1), Ok(()));
    }

    #[test]
    fn invalid_plans_are_rejected() {
        let lives = [life(0, 3, 1000), life(1, 4, 600), life(2, 5, 300)];
        let says = |offsets: &[u64], arena, what| {
            let error = check_placement(&lives, offsets, arena, 512).unwrap_err();
            assert!(error.contains(what), "{error}");
        };
        says(&[0, 1024], 4096, "2 of 3 blocks");
        says(&[0, 512, 2048], 4096, "block 1 at 512..1112 and block 0");
        says(&[512, 0, 2048], 4096, "block 1 at 0..600 and block 0");
        says(&[0, 1024, 0], 4096, "block 2 at 0..300 and block 0");
        says(&[0, 1024, 2048], 2048, "block 2 at 2048..2348 of 2048");
        says(&[0, 1100, 2048], 4096, "alignment 512");
    }
}
