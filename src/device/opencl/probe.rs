//! Probes for device features that no query reports: builds a small kernel and checks its result. Each device is probed once, at
//! first need, and the result is cached on disk with the programs.

use std::ptr;

use half::{bf16, f16};

use super::driver::{ClBuffer, call};
use super::program::{self, SM_90A};
use super::queues::SERVICE_STREAM;
use super::retry::retry_if;
use super::{ClDevice, ClError};
use crate::device::DeviceKind;
use crate::{Error, Result};

const PROBE: &str = include_str!("../../../kernels/probe.cl");

/// The tensor core features that inline PTX can use on a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TensorCores {
    /// The local memory that kernels with `mma.sync`, `ldmatrix` and `cp.async` may use, in bytes; 0 without tensor cores.
    pub(crate) local: usize,
    pub(crate) wgmma: bool,
}

/// The levels that are probed, best first. Drivers promise 48 KiB of local memory and grant more.
const LEVELS: [TensorCores; 3] = [
    TensorCores { local: 200 << 10, wgmma: true },
    TensorCores { local: 148 << 10, wgmma: false },
    TensorCores { local: 97 << 10, wgmma: false },
];

/// Returns the best level that works; `None` if failed calls leave the result unknown.
pub(super) fn probe(device: &ClDevice) -> Option<TensorCores> {
    // Devices that do not accept PTX cannot build the kernels, so they are not probed.
    if device.info().kind == DeviceKind::Cpu || !device.description.reports_compute_capability {
        return Some(TensorCores::default());
    }
    let (mut failed, mut level) = (false, None);
    let works = |level| retry_if(|e| !matches!(e, Error::Build { .. }), || multiplies_correctly(device, level));
    let known = program::cached_probe(device, PROBE, || {
        level = LEVELS.iter().position(|&level| match works(level) {
            Ok(right) => right,
            Err(error) => {
                failed |= !matches!(error, Error::Build { .. });
                false
            }
        });
        // A failure may only be a lack of memory, so a device without a working level, or with a failed call, is not cached.
        level.filter(|_| !failed).map(|at| vec![at as u8])
    });
    let level = known.and_then(|known| Some(usize::from(*known.first()?))).or(level);
    let level = level.and_then(|at| LEVELS.get(at)).copied();
    tracing::debug!(device = %device.device(), ?level, failed, "tensor cores");
    level.or_else(|| (!failed).then(TensorCores::default))
}

/// True if the probe kernel, built with this level's local memory, computes the right product.
fn multiplies_correctly(device: &ClDevice, level: TensorCores) -> Result<bool> {
    let value = |i: usize| ((i * i + 3 * i) % 11) as f32 - 5.0;
    // Two pairs of matrices, in f16 and in bf16: A is [64, 16], B is [16, 8] transposed.
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
    let source = format!("{}#define LOCAL {}\n{PROBE}", if level.wgmma { SM_90A } else { "" }, level.local);
    let kernel = device.build("probe", &source, "probe")?;
    let filled = |bytes: &[u8]| -> Result<ClBuffer> {
        let buffer = device.create_buffer(bytes.len()).map_err(|e| device.error(e))?;
        device.write(bytes, (&buffer, 0))?;
        Ok(buffer)
    };
    let out = vec![0u8; size_of_val(&want[..])];
    let buffers = [filled(&bits(&a))?, filled(&bits(&b))?, filled(&out)?];
    // Not counted as a launch, and without fault reports, because the probe is not an operation of this thread.
    let out = device.submit_and_wait(SERVICE_STREAM, out, |q, out, event| {
        for (i, buffer) in buffers.iter().enumerate() {
            let mem = buffer.mem();
            let value = ptr::from_ref(&mem).cast();
            call!(clSetKernelArg(kernel.raw, i as u32, size_of_val(&mem), value))?;
        }
        let (size, none, to) = (128usize, ptr::null(), out.as_mut_ptr().cast());
        let (mem, n, unasked) = (buffers[2].mem(), out.len(), ptr::null_mut());
        call!(clEnqueueNDRangeKernel(q.raw, kernel.raw, 1, none, &size, &size, 0, ptr::null(), unasked))?;
        call!(clEnqueueReadBuffer(q.raw, mem, 0, 0, n, to, 0, ptr::null(), event))
    });
    let out = out.map_err(|e: ClError| device.error(e))?;
    Ok(out.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).eq(want))
}

#[cfg(test)]
mod tests {
    use super::super::tests::devices;
    use super::*;

    #[test]
    fn processors_are_not_probed_for_tensor_cores() {
        for device in devices() {
            let before = device.programs.builds();
            let cores = device.tensor_cores();
            assert_eq!(device.tensor_cores(), cores);
            if device.info().kind == DeviceKind::Cpu {
                assert_eq!((cores, device.programs.builds()), (TensorCores::default(), before));
            }
        }
    }
}
