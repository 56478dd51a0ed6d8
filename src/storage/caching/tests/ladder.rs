//! The rungs, the callbacks and the error.
