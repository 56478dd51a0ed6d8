use std::cell::Cell;

thread_local! {
    /// The limits of images that a test pretends to have.
    pub(super) static LIMITS: Cell<Option<[usize; 2]>> = const { Cell::new(None) };
}
