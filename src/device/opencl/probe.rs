//! What a device can do beyond OpenCL C: found out by building a small kernel and checking what it computes, for no query
//! tells. Asked once a device, at first need; the answer is kept beside the programs for the next process.

use std::ptr;

use half::{bf16, f16};

use super::driver::{ClBuffer, call};
use super::program::SM_90A;
use super::queues::SERVICE;
use super::retry::retry_if;
use super::{ClDevice, ClError};
use crate::device::DeviceKind;
use crate::{Error, Result};

const PROBE: &str = include_str!("../../../kernels/probe.cl");

/// What inline PTX for tensor cores can do on a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TensorCores {
    /// Bytes of local memory that kernels with `mma.sync`, `ldmatrix` and `cp.async` may use; 0: there are none.
    pub(crate) local: usize,
    /// Whether `wgmma` works as well.
    pub(crate) wgmma: bool,
}

/// What is asked for, best first. Drivers promise 48 KiB of local memory and have more.
const LEVELS: [TensorCores; 3] = [
    TensorCores { local: 200 << 10, wgmma: true },
    TensorCores { local: 148 << 10, wgmma: false },
    TensorCores { local: 97 << 10, wgmma: false },
];

impl ClDevice {
    /// What tensor cores there are. The first call builds and runs small kernels, except where there cannot be any, unless an
    /// earlier process has. Where a call of the driver fails meanwhile there are none for now: a later call tries again.
    pub(crate) fn tensor_cores(&self) -> TensorCores {
        self.tensor_cores.get(|| self.probe()).copied().unwrap_or_default()
    }

    /// Whether kernels may use FENCE: then the work-group of a launch that comes last finds what the others have written. Where compilers
    /// take PTX, and on processors that stand in for such a device in tests.
    pub(crate) fn has_fence(&self) -> bool {
        self.stands_in_with_fence() || self.tensor_cores().local > 0
    }

    /// Whether it is a processor that runs the kernels of such a device: with `CLAYSTONE_KERNELS=gpu+fence`.
    pub(super) fn stands_in_with_fence(&self) -> bool {
        let kernels = || std::env::var("CLAYSTONE_KERNELS").is_ok_and(|k| k == "gpu+fence");
        self.info().kind == DeviceKind::Accelerator && kernels()
    }

    /// The best level that works; `None` where a failure leaves that open.
    fn probe(&self) -> Option<TensorCores> {
        // Others are not given what they could not build.
        if self.info().kind == DeviceKind::Cpu || !self.found.tells_capability {
            return Some(TensorCores::default());
        }
        let (mut failed, mut level) = (false, None);
        let works = |level| retry_if(|e| !matches!(e, Error::Build { .. }), || self.multiplies(level));
        let known = self.remembered(PROBE, || {
            level = LEVELS.iter().position(|&level| match works(level) {
                Ok(right) => right,
                Err(error) => {
                    failed |= !matches!(error, Error::Build { .. });
                    false
                }
            });
            // A device without any, or where one failed, may only have been short of memory.
            level.filter(|_| !failed).map(|at| vec![at as u8])
        });
        let level = known.and_then(|known| Some(usize::from(*known.first()?))).or(level);
        let level = level.and_then(|at| LEVELS.get(at)).copied();
        tracing::debug!(device = %self.device(), ?level, failed, "tensor cores");
        level.or_else(|| (!failed).then(TensorCores::default))
    }

    /// Whether the kernel, which builds and runs with this much local memory, is right.
    fn multiplies(&self, level: TensorCores) -> Result<bool> {
        let value = |i: usize| ((i * i + 3 * i) % 11) as f32 - 5.0;
        // Two of each: in f16 and in bf16. A is [64, 16], B [16, 8] the other way round.
        let (a, b): (Vec<f32>, Vec<f32>) = ((0..2 * 1024).map(value).collect(), (7..7 + 2 * 128).map(value).collect());
        let bits = |x: &[f32]| -> Vec<u8> {
            let (first, second) = x.split_at(x.len() / 2);
            let first = first.iter().map(|&v| f16::from_f32(v).to_bits());
            first.chain(second.iter().map(|&v| bf16::from_f32(v).to_bits())).flat_map(u16::to_le_bytes).collect()
        };
        let product = |matrix: usize, i: usize, j: usize| -> f32 {
            (0..16).map(|k| a[matrix * 1024 + i * 16 + k] * b[matrix * 128 + j * 16 + k]).sum()
        };
        let want: Vec<f32> = (0..1024).map(|e| product(e / 512, e / 8 % 64, e % 8)).collect();
        Ok(self.run_probe(level, &bits(&a), &bits(&b), want.len())? == want)
    }

    fn run_probe(&self, level: TensorCores, a: &[u8], b: &[u8], results: usize) -> Result<Vec<f32>> {
        let source = format!("{}#define LOCAL {}\n{PROBE}", if level.wgmma { SM_90A } else { "" }, level.local);
        let kernel = self.build("probe", &source, "probe")?;
        let filled = |bytes: &[u8]| -> Result<ClBuffer> {
            let buffer = self.create_buffer(bytes.len()).map_err(|e| self.error(e))?;
            self.write(bytes, (&buffer, 0))?;
            Ok(buffer)
        };
        let out = vec![0u8; results * size_of::<f32>()];
        let buffers = [filled(a)?, filled(b)?, filled(&out)?];
        // Neither counted as a launch nor told of faults: it is no operation of this thread's.
        let out = self.submit_and_wait(SERVICE, out, |q, out, event| {
            for (i, buffer) in buffers.iter().enumerate() {
                let mem = buffer.mem();
                let value = ptr::from_ref(&mem).cast();
                call!(clSetKernelArg(kernel.raw(), i as u32, size_of_val(&mem), value))?;
            }
            let (size, none, to) = (128usize, ptr::null(), out.as_mut_ptr().cast());
            let (mem, n, unasked) = (buffers[2].mem(), out.len(), ptr::null_mut());
            call!(clEnqueueNDRangeKernel(q.raw, kernel.raw(), 1, none, &size, &size, 0, ptr::null(), unasked))?;
            call!(clEnqueueReadBuffer(q.raw, mem, 0, 0, n, to, 0, ptr::null(), event))
        });
        let out = out.map_err(|e: ClError| self.error(e))?;
        Ok(out.chunks_exact(4).map(|v| f32::from_le_bytes([v[0], v[1], v[2], v[3]])).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::devices;
    use super::*;

    #[test]
    fn a_processor_is_not_asked() {
        for device in devices() {
            let before = device.builds();
            let cores = device.tensor_cores();
            assert_eq!(device.tensor_cores(), cores);
            if device.info().kind == DeviceKind::Cpu {
                assert_eq!((cores, device.builds()), (TensorCores::default(), before));
            }
        }
    }
}
