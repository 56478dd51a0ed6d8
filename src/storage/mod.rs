//! Who owns the bytes.
