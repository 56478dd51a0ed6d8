//! `arange` and `linspace` on OpenCL: `kernels/sequence.cl`.

use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/sequence.cl");

/// The number of elements that a GPU work-item computes.
const PER_ITEM: usize = 8;

/// Writes the sequence to a new vector. Returns false if the sequence needs doubles and the device has no doubles.
pub(crate) fn write_sequence(values: Sequence, out: &Tensor) -> Result<bool> {
    let (device, count) = (out.cl_device()?, out.numel());
    let float = matches!(values, Sequence::Float { .. });
    if (out.dtype == DType::F64 || float) && !device.info().fp64 {
        return Ok(false);
    }
    // CPU compilers vectorise across work-items, not within a work-item.
    let per_item = if device.info().kind == DeviceKind::Cpu { 1 } else { PER_ITEM };
    let config = kernel_config! { "T" => out.dtype, "PER_ITEM" => per_item, "FLOAT" => float };
    let kernel = config.kernel(device, "sequence", "sequence", &[TEMPLATE])?;
    let y = out.device_view()?;
    let [start, step, end] = match values {
        Sequence::Int { start, step } => [start, step, 0].map(Arg::I64),
        Sequence::Float { start, step, end, .. } => [start, step, end].map(Arg::F64),
    };
    let middle = if let Sequence::Float { middle, .. } = values { middle } else { count };
    launch_tuned(device, &kernel, &args![y; count, start, step, middle, end], count.div_ceil(per_item))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use crate::device::{count_launches, opencl};
    use crate::{DType, Device, Result, Scalar, Tensor};

    /// Devices must compute the same bits as the host, for lengths just below and above multiples of the work-group size.
    #[test]
    fn sequences_have_the_hosts_bits() {
        let whole: [(i64, i64); 4] = [(0, 1), (-3, 7), (300, -1), (i64::MAX - 5, 1 << 60)];
        for device in (0..opencl::count()).map(Device::OpenCL) {
            for n in [0, 1, 2, 63, 64, 65, 511, 512, 513, 5003] {
                for dtype in DType::ALL.into_iter().filter(|&t| t != DType::F64 || device.info().unwrap().fp64) {
                    let all = |device| -> Vec<Result<Tensor>> {
                        let mut made = vec![
                            Tensor::linspace(-1.7, 300.1, n, (dtype, device)),
                            Tensor::linspace(250.0, 1.5, n, (dtype, device)),
                            Tensor::linspace(5.0, f64::from(f32::MIN_POSITIVE), n, (dtype, device)),
                            Tensor::arange(-0.3, n as f64 * 0.0999 - 0.3, 0.1, (dtype, device)),
                        ];
                        for (start, step) in whole {
                            // Saturates at the largest i64, because the sum could overflow.
                            let end = Scalar::Int(start.saturating_add(step.saturating_mul(n as i64)));
                            made.push(Tensor::arange(start, end, step, (dtype, device)));
                        }
                        made
                    };
                    for (i, made) in all(device).into_iter().zip(all(Device::Cpu)).enumerate() {
                        let (got, right) = match made {
                            (Ok(got), Ok(right)) => (got.to_device(Device::Cpu).unwrap(), right),
                            (Err(_), Err(_)) => continue, // the sequence is out of the dtype's range on both devices
                            made => panic!("{i}: {n} of {dtype} on {device}: {made:?}"),
                        };
                        assert!(got.equal(&right).unwrap(), "{i}: {n} of {dtype} on {device}: {got} for {right}");
                    }
                }
            }
        }
    }

    /// A sequence must be computed on the device, in a single launch.
    #[test]
    fn a_sequence_is_one_launch() {
        for device in (0..opencl::count()).map(Device::OpenCL) {
            let (made, launches) = count_launches(|| Tensor::arange(0, 1 << 20, 1, (DType::I64, device)).unwrap());
            assert_eq!(launches, 1);
            assert_eq!(made.sum((), false).unwrap().item::<i64>().unwrap(), (1 << 39) - (1 << 19));
        }
    }
}
