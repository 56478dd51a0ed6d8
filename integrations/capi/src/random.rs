//! Random number generators.

use claystone::Generator;
use claystone::ops::Seed;

use crate::pointers::{borrow, handle, output, release};
use crate::status::{ClaystoneStatus, Fault, guard};

/// A handle on a random number generator: a seed and the number of draws made from it. One generator serves every device. Functions that
/// take a generator use the process's default generator for null.
pub struct ClaystoneGenerator(pub(crate) Generator);

/// Returns the generator of a handle, or the default generator for null.
///
/// # Safety
/// `pointer` is null or a live handle.
unsafe fn generator(pointer: *const ClaystoneGenerator) -> Result<Generator, Fault> {
    if pointer.is_null() {
        return Ok(Generator::current());
    }
    // SAFETY: the caller upholds this function's contract.
    Ok(unsafe { borrow(pointer, "generator")? }.0.clone())
}

/// Makes a generator with this seed. To make an operation draw from it, pass it as an argument of the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_generator_new(
    seed: u64,
    generator: *mut *mut ClaystoneGenerator,
) -> ClaystoneStatus {
    guard("claystone_generator_new", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let output = unsafe { output(generator, "generator")? };
        output.write(handle(ClaystoneGenerator(Generator::new(seed))));
        Ok(())
    })
}

/// Releases a handle on a generator; null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_generator_release(generator: *mut ClaystoneGenerator) {
    // SAFETY: the caller promises an unreleased handle.
    unsafe { release("claystone_generator_release", generator) }
}

/// Sets the seed and the number of draws of a generator; 0 draws restarts its sequence. PyTorch's `manual_seed` and `set_state`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_generator_set_state(
    generator_handle: *const ClaystoneGenerator,
    seed: u64,
    draws: u64,
) -> ClaystoneStatus {
    guard("claystone_generator_set_state", || {
        // SAFETY: the caller promises a pointer that is null or a live handle.
        let generator = unsafe { generator(generator_handle)? };
        generator.set_state(Seed { key: seed, stream: draws });
        Ok(())
    })
}

/// Gets the seed of a generator and the number of draws made from it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_generator_state(
    generator_handle: *const ClaystoneGenerator,
    seed: *mut u64,
    draws: *mut u64,
) -> ClaystoneStatus {
    guard("claystone_generator_state", || {
        // SAFETY: the caller promises a pointer that is null or a live handle, and pointers that are valid for writing.
        let (generator, seed, draws) =
            unsafe { (generator(generator_handle)?, output(seed, "seed")?, output(draws, "draws")?) };
        let state = generator.state();
        seed.write(state.key);
        draws.write(state.stream);
        Ok(())
    })
}
