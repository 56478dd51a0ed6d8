//! Random numbers of graphs: a captured draw counts from a base in device memory, which each replay sets to where the generator
//! is, so that replays draw what the captured calls would draw.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Generator;
use crate::autograd::rng_replay::Drawn;
use crate::backend;
use crate::device::capture;
use crate::expr::philox::Seed;
use crate::storage::Captured;
use crate::{DType, Device, Result, Tensor};

/// What a capture has drawn of one generator.
struct Draws {
    generator: Generator,
    /// The generator's key and stream at the start of a replay.
    base: Arc<Tensor>,
    count: Arc<AtomicU64>,
}

thread_local! {
    /// Of the capture with this number: one for each generator.
    static DRAWS: RefCell<(u64, Vec<Draws>)> = const { RefCell::new((0, Vec::new())) };
}

/// The next draw of the capture that this thread is in.
pub(super) fn next(generator: &Generator, device: Device) -> Result<Drawn> {
    DRAWS.with_borrow_mut(|(capture, all)| {
        if *capture != capture::number() {
            (*capture, *all) = (capture::number(), Vec::new());
        }
        if !all.iter().any(|draws| Arc::ptr_eq(&draws.generator.0, &generator.0)) {
            all.push(begin(generator, device)?);
        }
        let draws = all.iter().find(|draws| Arc::ptr_eq(&draws.generator.0, &generator.0)).expect("it was pushed");
        let seed = Seed { key: 0, stream: draws.count.fetch_add(1, Relaxed) };
        Ok(Drawn { seed, base: Some(Arc::clone(&draws.base)) })
    })
}

/// Has each replay bring the generator's state to the device, and take from the generator what it draws.
fn begin(generator: &Generator, device: Device) -> Result<Draws> {
    let base = Arc::new(Captured::outside(|| Tensor::empty_like_shape(2, DType::I64, device))?);
    let draws = Draws { generator: generator.clone(), base, count: Arc::default() };
    let (generator, base, count) = (draws.generator.clone(), Arc::clone(&draws.base), Arc::clone(&draws.count));
    let bring = move || {
        let Seed { key, stream } = generator.take(count.load(Relaxed));
        // A fill of one pattern, as writes from the host wait.
        let state = bytemuck::cast::<[u64; 2], [u8; 16]>([key, stream]);
        backend::launch([&*base], |_| base.storage.fill(base.layout.offset * size_of::<i64>(), state.len(), &state))
    };
    capture::on_replay(Box::new(bring), Box::new(|| ()));
    Ok(draws)
}
