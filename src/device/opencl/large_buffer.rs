//! Buffers larger than the driver's promised maximum (`CL_DEVICE_MAX_MEM_ALLOC_SIZE`).
//!
//! Larger buffers are requested all the same: NVIDIA's driver promises a quarter of the memory and grants all of it. Intel's and
//! Qualcomm's drivers need a special flag or property.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::Ordering::Relaxed;

use opencl3::memory::CL_MEM_READ_WRITE;
use opencl3::types::cl_mem_flags;

use super::discovery::LargeBuffers;
use super::driver::{ClBuffer, create};
use super::errors::{ClError, Class};
use super::{ClDevice, exit, tuning};

const CL_MEM_ALLOW_UNRESTRICTED_SIZE_INTEL: cl_mem_flags = 1 << 23;
/// Makes Intel's compiler compute offsets in 64 bits, as required for programs that use a buffer of more than 4 GiB.
const WIDE_OFFSETS: &str = "-cl-intel-greater-than-4GB-buffer-required ";
/// The size in bytes above which offsets need more than 32 bits.
const FOUR_GIB: u64 = 4 << 30;
/// The property `CL_LARGE_BUFFER_QCOM` of the extension `cl_qcom_large_buffer`, switched on.
const LARGE_BUFFER_QCOM: [u64; 3] = [0x41A6, 1, 0];

impl ClDevice {
    /// Creates a buffer of `bytes` (not zero). The driver may allocate the memory only at the buffer's first use: see
    /// [`commit`](Self::commit).
    pub(crate) fn create_buffer(&self, bytes: usize) -> Result<ClBuffer, ClError> {
        self.check_alive("clCreateBuffer")?; // the error of a lost device must not be tested again
        self.new_buffer(CL_MEM_READ_WRITE, bytes, ptr::null_mut()).map_err(|e| self.detect_loss(e))
    }

    /// Creates a buffer with these flags, over `host` unless null.
    pub(super) fn new_buffer(&self, flags: cl_mem_flags, bytes: usize, host: *mut c_void) -> Result<ClBuffer, ClError> {
        self.check_alive("clCreateBuffer")?;
        let (promised, how) = (self.info().largest_buffer, self.description.large_buffers);
        let is_beyond = promised > 0 && bytes as u64 > promised;
        let plain = |flags| exit::call(|| create!(clCreateBuffer(self.context, flags, bytes, host)));
        let asked = match how {
            LargeBuffers::Intel if is_beyond => plain(flags | CL_MEM_ALLOW_UNRESTRICTED_SIZE_INTEL),
            LargeBuffers::Qualcomm if is_beyond => {
                let properties = LARGE_BUFFER_QCOM.as_ptr();
                exit::call(|| create!(clCreateBufferWithProperties(self.context, properties, flags, bytes, host)))
            }
            _ => plain(flags),
        };
        let mem = match asked {
            // Another driver for the same device may lack the flag and the property.
            Err(e) if is_beyond && how != LargeBuffers::Plain && e.classify() == Class::Other => plain(flags),
            asked => asked,
        }?;
        self.note_buffer(bytes, is_beyond);
        Ok(ClBuffer::new(mem, bytes))
    }

    /// Makes later builds of programs use 64-bit offsets if a buffer of this size requires them.
    pub(super) fn note_buffer(&self, bytes: usize, is_beyond: bool) {
        let is_wide = self.description.large_buffers == LargeBuffers::Intel && (is_beyond || bytes as u64 > FOUR_GIB);
        if is_wide && !self.wide_offsets.swap(true, Relaxed) {
            tuning::kernels_changed();
        }
    }

    /// True if programs need 64-bit offsets, and so differ from programs built before.
    pub(crate) fn has_wide_offsets(&self) -> bool {
        self.wide_offsets.load(Relaxed)
    }

    /// Returns the compiler option for 64-bit offsets, if they are needed.
    pub(super) fn offsets_option(&self) -> &'static str {
        if self.has_wide_offsets() { WIDE_OFFSETS } else { "" }
    }
}
