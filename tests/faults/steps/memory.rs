//! Steps that run out of memory, take snapshots of the allocator, and empty its cache.

use claystone::{Error, Result, Tensor, no_grad};

use super::{Run, Values, wrong_value_error};

pub(super) fn out_of_memory(run: &mut Run) -> Result<Values> {
    let x = run.ramp(500_000)?;
    match Tensor::zeros([3_000_000], run.device) {
        Err(Error::OutOfMemory { .. }) => {}
        Err(error) => return Err(error),
        Ok(_) => return Err(wrong_value_error("12 MB were had of 8 MiB".into())),
    }
    Ok(vec![x.mul_scalar(2)?.to_vec()?])
}

pub(super) fn snapshots(run: &mut Run) -> Result<Values> {
    let x = run.ramp(1000)?;
    let y = x.add_scalar(1)?;
    let snapshot = run.device.memory_snapshot()?;
    snapshot.to_json()?;
    snapshot.to_pickle()?;
    Ok(vec![y.to_vec()?])
}

pub(super) fn empty_cache(run: &mut Run) -> Result<Values> {
    let x = run.ramp(1000)?;
    let mut values = Values::new();
    for i in 1..4 {
        let y = no_grad(|| x.add_scalar(i))?;
        let large = Tensor::full([i as usize * 100_000], 2.0, run.device)?;
        run.device.empty_cache()?;
        values.extend([y.to_vec()?, large.to_vec()?]);
    }
    Ok(values)
}
