//! Generators of random numbers.

use claystone::Generator;
use claystone::ops::Seed;

use crate::pointers::{borrow, handle, output, release};
use crate::status::{ClaystoneStatus, Fault, guard};

/// A handle on a generator of random numbers: a seed and the number of draws made from it. One serves every device. Where a function
/// takes one, null is the process's own.
pub struct ClaystoneGenerator(pub(crate) Generator);

/// The generator of a handle, or the process's.
///
/// # Safety
/// It is null or a handle that lives.
unsafe fn generator(pointer: *const ClaystoneGenerator) -> Result<Generator, Fault> {
    if pointer.is_null() {
        return Ok(Generator::current());
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { borrow(pointer, "generator")? }.0.clone())
}

/// Makes a generator of this seed. To have an operation draw from it, give it as an argument of the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_generator_new(
    seed: u64,
    generator: *mut *mut ClaystoneGenerator,
) -> ClaystoneStatus {
    guard("claystone_generator_new", || {
        // SAFETY: good for writing, says the caller.
        let output = unsafe { output(generator, "generator")? };
        output.write(handle(ClaystoneGenerator(Generator::new(seed))));
        Ok(())
    })
}

/// Gives a handle on a generator back; null is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_generator_release(generator: *mut ClaystoneGenerator) {
    // SAFETY: a handle that was not released, says the caller.
    unsafe { release("claystone_generator_release", generator) }
}

/// Sets the seed and the number of draws that a generator goes on from: 0 for a new start. PyTorch's `manual_seed` and `set_state`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_generator_set_state(
    generator_handle: *const ClaystoneGenerator,
    seed: u64,
    draws: u64,
) -> ClaystoneStatus {
    guard("claystone_generator_set_state", || {
        // SAFETY: null or a handle that lives, says the caller.
        let generator = unsafe { generator(generator_handle)? };
        generator.set_state(Seed { key: seed, stream: draws });
        Ok(())
    })
}

/// The seed of a generator and the number of draws made from it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_generator_state(
    generator_handle: *const ClaystoneGenerator,
    seed: *mut u64,
    draws: *mut u64,
) -> ClaystoneStatus {
    guard("claystone_generator_state", || {
        // SAFETY: null or a handle that lives, and pointers that are good for writing, says the caller.
        let (generator, seed, draws) =
            unsafe { (generator(generator_handle)?, output(seed, "seed")?, output(draws, "draws")?) };
        let state = generator.state();
        seed.write(state.key);
        draws.write(state.stream);
        Ok(())
    })
}
