//! Errors that kernels find: a bad index, an integer division by zero.
//!
//! A kernel cannot return an error, and asking after every launch would make each one wait. So a kernel records the
//! first fault in four words of device memory, and whoever waits for the device anyway reads them too.

use super::{ClBuffer, ClDevice};
use crate::{Error, Result};

/// What word 0 of the fault buffer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Fault {
    /// An index beyond its dimension.
    Index = 1,
    /// An integer divided by zero.
    DivisionByZero = 2,
    /// A class label beyond the number of classes.
    Label = 3,
}

/// Bytes of the fault buffer: code, index (low and high word), size of the dimension.
pub(super) const BYTES: usize = 16;

/// The error that the words record, if any.
pub(super) fn decode(words: [i32; 4]) -> Option<Error> {
    let index = i64::from(words[2]) << 32 | i64::from(words[1] as u32);
    let size = words[3] as u32 as usize;
    let out_of_range = |op| Error::IndexOutOfRange { op, index, size };
    match words[0] {
        0 => None,
        2 => Some(Error::DivisionByZero { op: "div" }),
        3 => Some(out_of_range("cross_entropy")),
        _ => Some(out_of_range("gather")),
    }
}

impl ClDevice {
    /// Four words `{code, index low, index high, size}` of device memory, all zero until a kernel that is given this
    /// buffer records a [`Fault`]: the first one wins, by `atomic_cmpxchg` on word 0. It comes back as the error of
    /// the next read, blocking copy or finish, and the words are zero again.
    pub(crate) fn fault_buffer(&self) -> &ClBuffer {
        &self.fault
    }

    /// Turns what was read from the fault buffer into a result, and clears the buffer when something was there.
    pub(super) fn report(&self, words: [i32; 4]) -> Result<()> {
        match decode(words) {
            None => Ok(()),
            Some(error) => {
                self.write_words(&[0; 4])?;
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_errors() {
        assert!(decode([0, 5, 5, 5]).is_none());
        assert!(matches!(decode([1, -3, -1, 10,]), Some(Error::IndexOutOfRange { index: -3, size: 10, .. })));
        assert!(matches!(
            decode([1, 7, 1, -1]),
            Some(Error::IndexOutOfRange { index: 0x1_0000_0007, size: 0xffff_ffff, .. })
        ));
        assert!(matches!(decode([Fault::DivisionByZero as i32, 0, 0, 0]), Some(Error::DivisionByZero { .. })));
        assert!(matches!(
            decode([Fault::Label as i32, 12, 0, 10]),
            Some(Error::IndexOutOfRange { op: "cross_entropy", index: 12, .. })
        ));
    }
}
