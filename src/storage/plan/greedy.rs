//! One pass over the blocks, each put into the tightest gap that is left for it: the search's starting point, and all
//! there is time for when blocks are many.

use super::search::Item;

/// A block already placed.
#[derive(Clone, Copy)]
struct Placed {
    offset: u64,
    top: u64,
    start: usize,
    end: usize,
}

/// Offsets for `items`, placed in the order `order`: each into the smallest gap that holds it between the blocks alive
/// at the same time, or above them.
pub(super) fn best_fit(items: &[Item], order: &[usize]) -> Vec<u64> {
    let mut offsets = vec![0; items.len()];
    let mut placed: Vec<Placed> = Vec::with_capacity(items.len()); // by offset
    for &index in order {
        let item = &items[index];
        let mut best: Option<(u64, u64)> = None; // gap, offset
        let mut top = 0;
        for other in placed.iter().filter(|other| other.start < item.end && item.start < other.end) {
            let gap = other.offset.saturating_sub(top);
            if gap >= item.size && best.is_none_or(|(smallest, _)| gap < smallest) {
                best = Some((gap, top));
            }
            top = top.max(other.top);
        }
        let offset = best.map_or(top, |(_, offset)| offset);
        offsets[index] = offset;
        let at = placed.partition_point(|other| other.offset <= offset);
        placed.insert(at, Placed { offset, top: offset + item.size, start: item.start, end: item.end });
    }
    offsets
}
