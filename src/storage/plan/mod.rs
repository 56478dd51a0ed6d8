//! Plans: placing the blocks of a recorded step offline, knowing when each one lives.
//!
//! An allocator that serves requests one by one cannot know which block will be freed next to which. A step that
//! repeats tells: [`place`] takes the lifetimes of all its blocks and finds offsets for them in one arena that is as
//! small as a search of under a second makes it, often exactly the peak of live bytes.

mod exact;
mod greedy;
mod orders;
mod search;

pub use search::{Lifetime, Placement, place};
