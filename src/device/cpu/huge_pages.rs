//! Huge pages: one fault at the first touch instead of 512. The kernel is free to give none.

#[cfg(all(target_os = "linux", not(miri)))]
pub(crate) use linux::{HUGE, advise_huge, page};

/// Asks for huge pages under memory that has not been touched yet.
#[cfg(not(all(target_os = "linux", not(miri))))]
pub(crate) fn advise_huge<T>(_: &mut [T]) {}

#[cfg(all(target_os = "linux", not(miri)))]
mod linux {
    use std::sync::OnceLock;

    /// Bytes of x86's and Arm's usual huge page.
    pub(crate) const HUGE: usize = 2 << 20;

    /// Asks for huge pages under memory that has not been touched yet.
    pub(crate) fn advise_huge<T>(memory: &mut [T]) {
        let (start, bytes) = (memory.as_mut_ptr().cast::<u8>(), size_of_val(memory));
        let inside = start.align_offset(page()).min(bytes);
        let whole = (bytes - inside) / page() * page();
        if whole >= HUGE {
            // SAFETY: whole pages inside memory that is borrowed; changes nothing but how they are found.
            unsafe { libc::madvise(start.wrapping_add(inside).cast(), whole, libc::MADV_HUGEPAGE) };
        }
    }

    /// Bytes of the kernel's pages, a power of two.
    pub(crate) fn page() -> usize {
        static PAGE: OnceLock<usize> = OnceLock::new();
        *PAGE.get_or_init(|| {
            // SAFETY: only asks.
            usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
        })
    }
}
