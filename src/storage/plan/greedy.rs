//! Greedy placement in one pass: each block goes into the tightest remaining gap. The starting point of the search,
//! and the only pass if there are many blocks.

use super::search::Item;

/// A block with an assigned offset.
#[derive(Clone, Copy)]
struct PlacedBlock {
    offset: u64,
    top: u64,
    start: usize,
    end: usize,
}

/// Assigns offsets to `items` in the order `order`. Each item goes into the smallest gap that holds it between the
/// blocks alive at the same time, or above those blocks.
pub(super) fn best_fit(items: &[Item], order: &[usize]) -> Vec<u64> {
    let mut offsets = vec![0; items.len()];
    let mut placed: Vec<PlacedBlock> = Vec::with_capacity(items.len()); // sorted by offset
    for &index in order {
        let item = &items[index];
        let mut best: Option<(u64, u64)> = None; // (gap, offset)
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
        placed.insert(at, PlacedBlock { offset, top: offset + item.size, start: item.start, end: item.end });
    }
    offsets
}
