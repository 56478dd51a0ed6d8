//! Tiles of bf16 products by AMX, which multiplies matrices of 16 rows of 16 pairs (of bf16 elements adjacent along k). The standard
//! library's AMX functions are not stable, so the instructions are in inline assembly.
//!
//! A tile of the result is four AMX registers. The left matrix is read in rows of pairs, in place or packed that way. The number of
//! steps is a multiple of [`PAIRS_PER_ROW`].

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;

use super::kernel::{Tile, V16, Vector, write_row};

/// The number of pairs in each row of a register.
pub(super) const PAIRS_PER_ROW: usize = 16;
const REGISTER_ROWS: usize = 16;

/// Asks the processor whether it has AMX for bf16, and the operating system for permission to use AMX.
pub(super) fn is_available() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    // Leaf 0 returns the highest supported leaf. On a processor without leaf 7, CPUID would return the bits of another leaf.
    let features = if __cpuid_count(0, 0).eax >= 7 { __cpuid_count(7, 0).edx } else { 0 };
    features & AMX_BF16 != 0 && features & AMX_TILE != 0 && crate::device::cpu::has_avx512() && is_permitted()
}

/// Asks the operating system for permission to use AMX; true if granted.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes no pointers, and only makes the kernel save larger registers for threads that use them.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The operand of `ldtilecfg`: the number of rows of each register, and the number of bytes in a row.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
    // The next fields are read by `compute_tile`, not by `ldtilecfg`: the number of blocks of steps, and byte jumps between repetitions.
    blocks: usize,
    a_jump: isize,
    b_jump: isize,
}

/// Computes a tile of `R` rows and `N` vectors.
///
/// # Safety
/// The requirements of [`TileKernel`](super::kernel::TileKernel). `a` has rows of pairs, the number of steps is a multiple of
/// [`PAIRS_PER_ROW`], and AMX [is available](is_available).
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn compute_tile<const R: usize, const N: usize>(t: &Tile) {
    debug_assert!(t.times > 0 && t.k > 0 && t.k.is_multiple_of(PAIRS_PER_ROW));
    let (first, second) = (R.min(REGISTER_ROWS), if R > REGISTER_ROWS { R - REGISTER_ROWS } else { R });
    let (blocks, a_jump, b_jump) = (t.k / PAIRS_PER_ROW, t.a_jump, t.b_jump);
    let (bytes, rows) = ([0; 16], [0; 16]);
    let mut config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], bytes, rows, blocks, a_jump, b_jump };
    for (i, rows) in [first, first, second, second, first, second, REGISTER_ROWS, REGISTER_ROWS].into_iter().enumerate()
    {
        (config.bytes[i], config.rows[i]) = (64, rows as u8);
    }
    let mut sums = [[0f32; 2 * REGISTER_ROWS]; 2 * REGISTER_ROWS];
    // A tile with fewer rows or one vector computes existing rows or vectors twice; the second results are not written.
    let below = if R > REGISTER_ROWS { REGISTER_ROWS as isize * t.a_row } else { 0 };
    let beside = if N > 1 { REGISTER_ROWS } else { 0 };
    // SAFETY: the caller's promise: every register reads rows and steps of the operands; the sums have room for four registers.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "mov {steps}, [{config} + 64]",
            "3:",
            "tileloadd tmm4, [{a} + {a_row}]",
            "tileloadd tmm6, [{b} + {b_step}]",
            "tileloadd tmm7, [{c} + {b_step}]",
            "tileloadd tmm5, [{d} + {a_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 64",
            "add {d}, 64",
            "add {b}, {b_next}",
            "add {c}, {b_next}",
            "dec {steps}",
            "jnz 3b",
            "add {a}, [{config} + 72]",
            "add {d}, [{config} + 72]",
            "add {b}, [{config} + 80]",
            "add {c}, [{config} + 80]",
            "dec {times}",
            "jnz 2b",
            "mov {steps}, 128",
            "tilestored [{sums} + {steps}], tmm0",
            "tilestored [{sums} + {steps} + 64], tmm1",
            "tilestored [{sums} + {steps} + 2048], tmm2",
            "tilestored [{sums} + {steps} + 2112], tmm3",
            "tilerelease",
            config = in(reg) &raw const config,
            a = inout(reg) t.a => _,
            d = inout(reg) t.a.wrapping_byte_offset(below) => _,
            a_row = in(reg) t.a_row,
            b = inout(reg) t.b => _,
            c = inout(reg) t.b.wrapping_add(beside) => _,
            b_step = in(reg) t.b_step,
            b_next = in(reg) PAIRS_PER_ROW as isize * t.b_step,
            times = inout(reg) t.times => _,
            steps = out(reg) _,
            sums = in(reg) sums.as_mut_ptr(),
            out("tmm0") _,
            out("tmm1") _,
            out("tmm2") _,
            out("tmm3") _,
            out("tmm4") _,
            out("tmm5") _,
            out("tmm6") _,
            out("tmm7") _,
            options(nostack),
        );
        for (i, sums) in sums[..R].iter().enumerate() {
            let sums = std::array::from_fn(|j| V16::load(sums.as_ptr().add(j * V16::LANES)));
            write_row::<V16, N>(t, i, sums);
        }
    }
}
