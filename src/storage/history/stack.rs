//! Call stacks of events, captured as return addresses. Each different stack is kept once.
//!
//! Unwinding takes 100 to 250 ns a frame, too much for every event. So the frame sizes that unwinding finds are kept:
//! for each return address, the number of bytes by which the stack pointer rises on the return. With these sizes a
//! stack is walked again in a few ns a frame, because the return address is just below the caller's stack pointer.
//!
//! The result of a walk is used only if unwinding has found exactly the same addresses before. Other stacks, for
//! instance with a frame of varying size, are unwound again.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::hint::black_box;
use std::sync::{Arc, LazyLock, Mutex};

use super::super::thread;
use super::Frame;
use super::symbols::frames;
use crate::device::lock;

/// The number of innermost frames of a stack that are kept. About twenty of these frames may belong to this crate.
const MAX_DEPTH: usize = 64;

/// Maximum number of different stacks that are kept, at up to half a KiB each. Most programs have some hundreds of stacks.
const MAX_STACKS: usize = 1 << 16;

/// The number of a call stack in [`STACKS`]; 0 for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stack(u32);

/// The table of all stacks of the process.
static STACKS: LazyLock<Mutex<Stacks>> = LazyLock::new(|| Mutex::new(Stacks::new(MAX_STACKS)));

impl Stack {
    pub(super) const NONE: Stack = Stack(0);

    /// Captures the calling thread's stack. Returns [`Stack::NONE`] if [`MAX_STACKS`] different stacks were captured already.
    #[inline(never)] // a separate frame, so that the distance from `here` to the caller's frame is learned once
    pub(super) fn capture() -> Stack {
        let here = 0usize;
        let here = &raw const *black_box(&here) as usize;
        lock(&STACKS).capture(here)
    }

    /// Returns the frames of the program, without frames of this crate and the standard library, the innermost frame
    /// first. The first call reads the program's debug information.
    pub(super) fn frames(self) -> Vec<Frame> {
        let addresses = lock(&STACKS).addresses(self);
        addresses.map_or_else(Vec::new, |addresses| frames(&addresses))
    }

    /// Returns the number of captured stacks that were not kept because there were too many different ones.
    pub(super) fn lost() -> u64 {
        lock(&STACKS).lost
    }
}

/// All stacks of the process. They are kept as long as the process lives, because events of any device may refer to them.
struct Stacks {
    /// At index i, the return addresses of stack number i + 1.
    kept: Vec<Arc<[usize]>>,
    ids: HashMap<Arc<[usize]>, Stack, BuildHasherDefault<AddressHasher>>,
    sizes: FrameSizes,
    /// The maximum number of different stacks to keep.
    capacity: usize,
    lost: u64,
}

impl Stacks {
    fn new(capacity: usize) -> Stacks {
        Stacks { kept: Vec::new(), ids: HashMap::default(), sizes: FrameSizes::default(), capacity, lost: 0 }
    }

    fn addresses(&self, stack: Stack) -> Option<Arc<[usize]>> {
        self.kept.get((stack.0 as usize).checked_sub(1)?).cloned()
    }

    /// Captures the stack from the frame that contains `here` outwards, where `here` is an address in the frame of [`Stack::capture`].
    fn capture(&mut self, here: usize) -> Stack {
        let memory = StackMemory::above(here);
        let mut addresses = [0; MAX_DEPTH];
        let walked = memory.and_then(|memory| self.sizes.walk(memory, &mut addresses));
        if let Some(&known) = walked.and_then(|depth| self.ids.get(&addresses[..depth])) {
            return known;
        }
        if self.kept.len() == self.capacity {
            self.lost += 1;
            return Stack::NONE;
        }
        let frames = unwind(here);
        if let Some(memory) = memory {
            self.sizes.learn(memory, &frames);
        }
        self.intern(frames.into_iter().map(|(address, _)| address).collect())
    }

    /// Returns the number of a stack. Adds the stack to the table if it is new.
    fn intern(&mut self, addresses: Arc<[usize]>) -> Stack {
        if let Some(&known) = self.ids.get(&addresses) {
            return known;
        }
        self.kept.push(Arc::clone(&addresses));
        let id = Stack(self.kept.len() as u32);
        self.ids.insert(addresses, id);
        id
    }
}

/// Returns the return addresses and stack pointers of the frames around `here`, the innermost first.
fn unwind(here: usize) -> Vec<(usize, usize)> {
    let mut frames = Vec::with_capacity(MAX_DEPTH);
    backtrace::trace(|frame| {
        let (address, pointer) = (frame.ip() as usize, frame.sp() as usize);
        // Frames below `here` belong to this module. On platforms without stack pointers such frames are left out later, by their names.
        if address != 0 && (pointer == 0 || pointer > here) {
            frames.push((address, pointer));
        }
        frames.len() < MAX_DEPTH
    });
    frames
}

/// For each return address, the number of bytes by which the stack pointer rises to the next return address.
#[derive(Default)]
struct FrameSizes(HashMap<usize, u32, BuildHasherDefault<AddressHasher>>);

/// Key used in place of a return address for the start of walks, in the frame of [`Stack::capture`].
const START: usize = 0;
/// Value used in place of a size for the outermost frame.
const OUTERMOST: u32 = 0;
/// Value used in place of a size that varies or is unknown.
const VARIES: u32 = u32::MAX;

impl FrameSizes {
    /// Walks the stack and writes its addresses. Returns the depth, or `None` if a frame's size is not known.
    fn walk(&self, memory: StackMemory, addresses: &mut [usize; MAX_DEPTH]) -> Option<usize> {
        let (mut address, mut pointer) = (START, memory.low);
        for (depth, slot) in addresses.iter_mut().enumerate() {
            match *self.0.get(&address)? {
                OUTERMOST => return Some(depth),
                VARIES => return None,
                size => pointer += size as usize,
            }
            address = memory.return_address(pointer)?;
            *slot = address;
        }
        Some(MAX_DEPTH)
    }

    /// Remembers the frame sizes that unwinding has found.
    fn learn(&mut self, memory: StackMemory, frames: &[(usize, usize)]) {
        let mut learn = |address, size| {
            let known = self.0.entry(address).or_insert(size);
            if *known != size {
                *known = VARIES;
            }
        };
        let mut inner = (START, memory.low);
        for &(address, pointer) in frames {
            let size = pointer.checked_sub(inner.1).and_then(|size| u32::try_from(size).ok());
            let found = memory.return_address(pointer) == Some(address);
            learn(inner.0, size.filter(|_| found).unwrap_or(VARIES));
            inner = (address, pointer);
        }
        if frames.len() < MAX_DEPTH {
            learn(inner.0, OUTERMOST);
        }
    }
}

/// The calling thread's stack, from an address in one of its frames up to its end.
#[derive(Clone, Copy)]
struct StackMemory {
    low: usize,
    end: usize,
}

impl StackMemory {
    /// Returns the stack from the address `low` up. Returns `None` if the thread runs on a stack other than its own, such as a
    /// coroutine's, or if walks are not supported.
    fn above(low: usize) -> Option<StackMemory> {
        let (start, end) = thread::get(|state| &state.stack_bounds).unwrap_or_else(|| {
            let bounds = stack_bounds();
            thread::replace(|state| &state.stack_bounds, Some(bounds));
            bounds
        });
        (start..end).contains(&low).then_some(StackMemory { low, end })
    }

    /// Returns the return address of a frame, given the stack pointer of the frame's caller.
    fn return_address(self, pointer: usize) -> Option<usize> {
        let at = pointer.checked_sub(size_of::<usize>()).filter(|at| at.is_multiple_of(align_of::<usize>()))?;
        (self.low <= at && pointer <= self.end).then(|| read(self, at))
    }
}

#[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
fn read(memory: StackMemory, at: usize) -> usize {
    debug_assert!(memory.low <= at && at + size_of::<usize>() <= memory.end);
    let word: usize;
    // SAFETY: the word is between a live frame of this thread and the end of its stack, memory that stays mapped as
    // long as the thread runs. The word may belong to any variable, so it is read by inline assembly, whose reads the
    // compiler makes no assumptions about.
    unsafe {
        std::arch::asm!("mov {}, qword ptr [{}]", out(reg) word, in(reg) at, options(readonly, nostack, preserves_flags));
    }
    word
}

#[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
fn stack_bounds() -> (usize, usize) {
    let mut attributes = std::mem::MaybeUninit::<libc::pthread_attr_t>::uninit();
    let (mut start, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: the attributes are read and destroyed only after the first call has written them; other calls write to local variables.
    let got = unsafe {
        libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) == 0 && {
            let got = libc::pthread_attr_getstack(attributes.as_ptr(), &mut start, &mut size) == 0;
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
            got
        }
    };
    if got { (start as usize, start as usize + size) } else { (0, 0) }
}

/// Returns no bounds: on other platforms return addresses or bounds are stored differently, so each stack is unwound.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64", not(miri))))]
fn stack_bounds() -> (usize, usize) {
    (0, 0)
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64", not(miri))))]
fn read(_: StackMemory, _: usize) -> usize {
    0
}

/// Hashes an address with a rotation and a multiplication.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.write_u64(u64::from_le_bytes(*word)));
        rest.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        // A hash map selects the bucket by the low bits, which without this step depend on few bits of the address.
        self.0 ^ (self.0 >> 32)
    }
}

#[cfg(test)]
mod tests;
