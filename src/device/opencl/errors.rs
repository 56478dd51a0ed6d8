//! OpenCL's error codes: names, and consequences for the device.

/// A failed driver call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClError {
    /// The API function, such as `clEnqueueReadBuffer`.
    pub call: &'static str,
    /// The returned code.
    pub code: i32,
    /// True if the device no longer answers: set by [`ClDevice`](super::ClDevice) after a test read.
    pub lost: bool,
    /// True if it cannot be known whether the call's commands are over. The device is then lost, and the host memory that the
    /// commands may use is never released.
    pub unfinished: bool,
}

/// The consequence of a failed call for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Not enough memory: releasing memory and trying again may help.
    OutOfMemory,
    /// A buffer of this size cannot exist on the device, even if all memory is free.
    TooBig,
    /// No command can run on the device any more.
    Lost,
    /// An error in the call, or in the driver.
    Other,
}

/// CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST: the code for a command that failed after it was accepted, for unknown reasons.
pub(super) const FAILED_LATE: i32 = -14;

/// NVIDIA's code for a kernel that accessed memory outside its buffers.
const NVIDIA_ILLEGAL_ACCESS: i32 = -9999;

impl ClError {
    pub(crate) const fn new(call: &'static str, code: i32) -> ClError {
        ClError { call, code, lost: false, unfinished: false }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self.code {
            NVIDIA_ILLEGAL_ACCESS => "NVIDIA_ILLEGAL_MEMORY_ACCESS (-9999)",
            code => opencl3::error_codes::error_text(code),
        }
    }

    /// Classifies the code. `CL_OUT_OF_RESOURCES` (-5) counts as out of memory, unless the device is known to be lost.
    pub(crate) fn classify(&self) -> Class {
        match self.code {
            _ if self.lost || self.unfinished || self.is_fatal() => Class::Lost,
            -6..=-4 => Class::OutOfMemory,
            -61 | -40 => Class::TooBig, // CL_INVALID_BUFFER_SIZE, CL_INVALID_IMAGE_SIZE
            _ => Class::Other,
        }
    }

    /// True if the function is missing (-2001: in the library; -59: in an OpenCL 1.1 device behind a newer loader).
    pub(super) fn is_missing(&self) -> bool {
        matches!(self.code, -2001 | -59)
    }

    /// True for codes that only a fault causes: the context was terminated (-1121), the kernel was terminated (-1108), or
    /// NVIDIA's -9999.
    pub(super) fn is_fatal(&self) -> bool {
        matches!(self.code, -1108 | -1121 | NVIDIA_ILLEGAL_ACCESS)
    }

    /// True for codes that a fault can cause, but also a harmless failure, so that the device must be tested: -5 also means too
    /// much local memory, and -14 a failed event. -36 and -34 mean that a queue or context is gone, or only that this call was refused.
    pub(super) fn is_suspicious(&self) -> bool {
        matches!(self.code, -5 | -14 | -34 | -36) || opencl3::error_codes::error_text(self.code) == "UNKNOWN_ERROR"
    }

    /// True if the same call may succeed a moment later. Other codes are final answers: there is no such thing (-1, -1001), no such
    /// query, platform or device (-30, -32, -33), no such function, or no library (-2000).
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
    fn out_of_memory_does_not_count_as_lost() {
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
    fn transient_failures_are_distinguished_from_answers() {
        for code in [-4, -5, -6, -11, -14, -36, -58, -61] {
            assert!(ClError::new("x", code).is_transient(), "{code}");
        }
        for code in [-1, -30, -59, -1001, -2000, -2001, -9999] {
            assert!(!ClError::new("x", code).is_transient(), "{code}");
        }
    }
}
