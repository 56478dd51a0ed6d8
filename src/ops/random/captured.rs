//! Random numbers in captured graphs.
//!
//! The stream of a captured draw is an offset from a base in device memory. Each replay first sets the base to the current state of the
//! generator, so that a replay draws the numbers that the captured calls would draw.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Generator;
use crate::autograd::RandomSource;
use crate::device::capture;
use crate::expr::philox::Seed;
use crate::ops::dispatch::prelude::*;
use crate::storage::CapturedMemory;

/// The draws that one capture makes from one generator.
struct CapturedDraws {
    generator: Generator,
    /// The generator's key and stream at the start of a replay, in device memory.
    base: Arc<Tensor>,
    count: Arc<AtomicU64>,
}

thread_local! {
    /// The id of the last capture, and its draws from each generator.
    static DRAWS: RefCell<(u64, Vec<CapturedDraws>)> = const { RefCell::new((0, Vec::new())) };
}

/// Returns the random source for the next draw in the capture that this thread is recording.
pub(super) fn next_draw(generator: &Generator, device: Device) -> Result<RandomSource> {
    DRAWS.with_borrow_mut(|(capture, all)| {
        if *capture != capture::capture_id() {
            (*capture, *all) = (capture::capture_id(), Vec::new());
        }
        if !all.iter().any(|draws| Arc::ptr_eq(&draws.generator.0, &generator.0)) {
            all.push(begin_draws(generator, device)?);
        }
        let draws = all.iter().find(|draws| Arc::ptr_eq(&draws.generator.0, &generator.0)).expect("it was pushed");
        let seed = Seed { key: 0, stream: draws.count.fetch_add(1, Relaxed) };
        Ok(RandomSource { seed, base: Some(Arc::clone(&draws.base)) })
    })
}

/// Registers a hook that runs before each replay. The hook copies the generator's state to the device, and advances the generator by the
/// number of captured draws.
fn begin_draws(generator: &Generator, device: Device) -> Result<CapturedDraws> {
    let base = Arc::new(CapturedMemory::run_outside_pool(|| Tensor::empty_with_shape(2, DType::I64, device))?);
    let draws = CapturedDraws { generator: generator.clone(), base, count: Arc::default() };
    let (generator, base, count) = (draws.generator.clone(), Arc::clone(&draws.base), Arc::clone(&draws.count));
    let copy_state = move || {
        let Seed { key, stream } = generator.take(count.load(Relaxed));
        // The state is written by a fill with one pattern, because a write from host memory would wait for the device.
        let state = bytemuck::cast::<[u64; 2], [u8; 16]>([key, stream]);
        backend::launch([&*base], |_| base.storage.fill(base.layout.offset * size_of::<i64>(), state.len(), &state))
    };
    capture::on_replay(Box::new(copy_state), Box::new(|| ()));
    Ok(draws)
}
