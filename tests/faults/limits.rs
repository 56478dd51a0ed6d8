//! Devices with small limits. An error must name the limit that is too small. The smallest allowed limits must give the same results.

use std::time::Duration;

use claystone::ops::ConvOptions;
use claystone::{DType, Device, Interpolation, Result, Tensor};

use crate::stand_in::{self, Faults, Kind};

/// Returns the output after `found: ` of a child process whose device has these limits.
fn found(test: &str, kind: Kind, limits: &[(&str, &str)]) -> String {
    let ended = stand_in::run(test, kind, limits, Duration::from_secs(300));
    let line = ended.text.lines().find_map(|line| line.split_once("found: "));
    line.unwrap_or_else(|| panic!("{:?}: {}", ended.status, ended.text)).1.to_owned()
}

#[test]
fn devices_below_the_limits_report_the_missing_limit() {
    const TEST: &str = "limits::devices_below_the_limits_report_the_missing_limit";
    if Faults::here().is_some() {
        match Device::OpenCL(0).info() {
            Ok(info) => println!("found: {} {}", info.max_work_group, info.local_memory),
            Err(e) => println!("found: {e}"),
        }
        return;
    }
    let found = |kind, group, local| {
        found(
            TEST,
            kind,
            &[("POCL_DEVICES", "basic"), ("STAND_IN_WORK_GROUP", group), ("STAND_IN_LOCAL_MEMORY", local)],
        )
    };
    assert_eq!(found(Kind::DiscreteGpu, "32", "16384"), "32 16384");
    assert_eq!(found(Kind::Real, "1", "0"), "1 0", "processors need neither");
    let lacks = found(Kind::DiscreteGpu, "31", "16384");
    assert!(lacks.contains("(0:0 has work-groups of 31 work-items, and kernels need 32)"), "{lacks}");
    let lacks = found(Kind::DiscreteGpu, "32", "16383");
    assert!(lacks.contains("(0:0 has 16383 bytes of local memory, and kernels need 16384)"), "{lacks}");
}

/// Runs every family of kernels on enough rows and results for several of the largest work-groups. The smallest allowed limits must
/// suffice. So must the small work-groups to which Mesa's driver limits some kernels.
#[test]
fn the_smallest_allowed_limits_suffice() {
    const TEST: &str = "limits::the_smallest_allowed_limits_suffice";
    if Faults::here().is_none() {
        let least = [("STAND_IN_WORK_GROUP", "32"), ("STAND_IN_LOCAL_MEMORY", "16384")];
        for (kind, limits) in [
            (Kind::DiscreteGpu, &least[..]),
            (Kind::Real, &[("STAND_IN_KERNEL_GROUP", "32")]),
            (Kind::Real, &[("STAND_IN_KERNEL_GROUP", "1")]),
        ] {
            assert_eq!(found(TEST, kind, limits), "the same", "{kind:?} {limits:?}");
        }
        return;
    }
    let pairs = families(Device::OpenCL(0)).unwrap().into_iter().zip(families(Device::Cpu).unwrap());
    for (i, (got, right)) in pairs.enumerate() {
        let [got, right] = [got, right].map(|t| t.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap());
        let same = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-3 * (1.0 + b.abs());
        assert!(got.len() == right.len() && got.iter().zip(&right).all(same), "result {i}");
    }
    println!("found: the same");
}

fn families(device: Device) -> Result<Vec<Tensor>> {
    // All elements differ, so that selections such as `topk` are unique and equal on every device.
    let n = 5 << 13;
    let mixed = Tensor::arange(0, n, 1, (DType::I64, device))?.mul_scalar(7919)?.remainder_scalar(n)?;
    let x = mixed.to_dtype(DType::F32)?.div_scalar(n)?.reshape([1 << 13, 5])?;
    let (lines, wide) = (x.t()?, x.reshape([4, n as usize / 4])?);
    let index = Tensor::from_slice(&[4i64, 0, 2], 3, device)?;
    let labels = mixed.narrow(0, 0, 1 << 13)?.remainder_scalar(5)?;
    let (image, weight) = (x.narrow(0, 0, 20)?.reshape([1, 1, 10, 10])?, x.narrow(0, 20, 9)?.narrow(1, 0, 1)?);
    let logits = x.detach().requires_grad_(true)?;
    let rows = wide.detach().requires_grad_(true)?;
    let loss = logits.cross_entropy(&labels)?;
    let normal = rows.layer_norm(&[n as usize / 4], None, None, 1e-5)?;
    loss.add(&normal.mul(&wide)?.sum((), false)?)?.backward()?;
    let (sorted, indices) = lines.sort(1, false)?;
    let (top, _) = wide.topk(7, 1, true)?;
    let (greatest, _) = lines.cummax(1)?;
    Ok(vec![
        x.index_select(1, &index)?,
        x.index_add(0, &labels, &x)?,
        labels.one_hot(5)?,
        Tensor::linspace(0.0, 1.0, 1000, (DType::F32, device))?,
        x.sum((), false)?,
        x.sum(1, false)?,
        x.sum(0, false)?,
        wide.argmax(1, false)?,
        lines.cumsum(1)?,
        x.cumsum(0)?,
        greatest,
        x.softmax(1)?,
        lines.softmax(1)?,
        lines.logsumexp(1, false)?,
        sorted,
        indices,
        top,
        wide.median(1, false)?.0,
        x.gt(&x.flip(0)?)?.nonzero()?,
        wide.std(1, 1, false)?,
        lines.contiguous()?.add(&lines)?,
        lines.matmul(&x)?,
        x.narrow(0, 0, 100)?.matmul(&lines.narrow(1, 0, 130)?)?,
        lines.narrow(0, 0, 1)?.matmul(&x)?,
        image.interpolate(&[15, 7], Interpolation::Linear { align_corners: false })?,
        image.conv2d(&weight.contiguous()?.reshape([1, 1, 3, 3])?, None, ConvOptions::default())?,
        image.max_pool2d([2, 2], Default::default())?,
        loss.detach(),
        normal.detach(),
        logits.grad().expect("it took part"),
        rows.grad().expect("it took part"),
    ])
}
