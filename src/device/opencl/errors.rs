//! OpenCL's error codes: their names, and what they mean for the device.

/// A driver call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClError {
    /// The API function, `clEnqueueReadBuffer`.
    pub call: &'static str,
    /// What it returned.
    pub code: i32,
    /// The device does not answer any more: set by [`ClDevice`](super::ClDevice) after it has asked it again.
    pub lost: bool,
    /// Whether the commands that it was about are over cannot be known: the device is lost, and what host memory they may
    /// use is never released.
    pub unfinished: bool,
}

/// What a failed call means to its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// No room: giving memory back and trying again may help.
    OutOfMemory,
    /// No buffer of this size can exist on the device, however empty it is.
    TooBig,
    /// Nothing will ever run on the device again.
    Lost,
    /// A mistake in the call, or in the driver.
    Other,
}

/// CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST: for a command that failed after it was accepted, and nobody knows why.
pub(super) const FAILED_LATE: i32 = -14;

/// NVIDIA's own code for a kernel that touched memory that is not its own.
const NVIDIA_ILLEGAL_ACCESS: i32 = -9999;

impl ClError {
    pub(crate) const fn new(call: &'static str, code: i32) -> ClError {
        ClError { call, code, lost: false, unfinished: false }
    }

    /// The code by name.
    pub(crate) fn name(&self) -> &'static str {
        match self.code {
            NVIDIA_ILLEGAL_ACCESS => "NVIDIA_ILLEGAL_MEMORY_ACCESS (-9999)",
            code => opencl3::error_codes::error_text(code),
        }
    }

    /// What the code means. `CL_OUT_OF_RESOURCES` (-5) is taken for memory, unless the device has since been found lost.
    pub(crate) fn classify(&self) -> Class {
        match self.code {
            _ if self.lost || self.unfinished || self.is_fatal() => Class::Lost,
            -6..=-4 => Class::OutOfMemory,
            -61 | -40 => Class::TooBig, // CL_INVALID_BUFFER_SIZE, CL_INVALID_IMAGE_SIZE
            _ => Class::Other,
        }
    }

    /// The driver has no such function (-2001: nor the loader; -59: an OpenCL 1.1 device behind a newer loader).
    pub(super) fn is_missing(&self) -> bool {
        matches!(self.code, -2001 | -59)
    }

    /// Codes that drivers give for nothing but a fault: the context was terminated (-1121), the kernel was (-1108), or
    /// NVIDIA's -9999.
    pub(super) fn is_fatal(&self) -> bool {
        matches!(self.code, -1108 | -1121 | NVIDIA_ILLEGAL_ACCESS)
    }

    /// Codes that a fault as well as something harmless can give: ask the device again before believing either. -5 is
    /// also a kernel that wants too much local memory, -14 an event that failed; a queue or a context that has worked
    /// before (-36, -34) is gone, or this one call was refused.
    pub(super) fn is_suspicious(&self) -> bool {
        matches!(self.code, -5 | -14 | -34 | -36) || opencl3::error_codes::error_text(self.code) == "UNKNOWN_ERROR"
    }

    /// Whether the same call may succeed a moment later. Otherwise the code is an answer: there is nothing of that kind
    /// (-1, -1001), no such query, platform or device (-30, -32, -33), no such function, or no library (-2000).
    pub(super) fn is_transient(&self) -> bool {
        !(self.lost
            || self.is_fatal()
            || self.is_missing()
            || matches!(self.code, -1 | -30 | -32 | -33 | -1001 | -2000))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_name() {
        let unnamed: Vec<i32> =
            (-19..=0).chain(-72..=-30).filter(|&c| ClError::new("x", c).name() == "UNKNOWN_ERROR").collect();
        assert!(unnamed.is_empty(), "{unnamed:?}");
        assert_eq!(ClError::new("x", -54).name(), "CL_INVALID_WORK_GROUP_SIZE");
        assert_eq!(ClError::new("x", -1001).name(), "CL_PLATFORM_NOT_FOUND_KHR");
        assert!(ClError::new("x", -9999).name().contains("-9999"));
        assert_eq!(ClError::new("x", -123_456).name(), "UNKNOWN_ERROR");
    }

    #[test]
    fn out_of_memory_is_not_lost() {
        for (code, class) in [(-4, Class::OutOfMemory), (-5, Class::OutOfMemory), (-6, Class::OutOfMemory)] {
            assert_eq!(ClError::new("x", code).classify(), class);
        }
        assert_eq!(ClError::new("x", -61).classify(), Class::TooBig);
        assert_eq!(ClError::new("x", -36).classify(), Class::Other, "before the device was asked again");
        assert_eq!(ClError { lost: true, ..ClError::new("x", -36) }.classify(), Class::Lost);
        assert_eq!(ClError::new("x", -9999).classify(), Class::Lost);
        assert_eq!(ClError { lost: true, ..ClError::new("x", -5) }.classify(), Class::Lost);
        assert_eq!(ClError::new("x", -54).classify(), Class::Other);
    }

    #[test]
    fn failures_are_told_from_answers() {
        for code in [-4, -5, -6, -11, -14, -36, -58, -61] {
            assert!(ClError::new("x", code).is_transient(), "{code}");
        }
        for code in [-1, -30, -59, -1001, -2000, -2001, -9999] {
            assert!(!ClError::new("x", code).is_transient(), "{code}");
        }
    }
}
