//! Huge pages: one page fault at the first access instead of 512. The operating system may decline.

#[cfg(all(target_os = "linux", not(miri)))]
pub(crate) use linux::{HUGE_PAGE_BYTES, advise_huge, page_bytes};

/// Requests huge pages for memory that has not been touched yet.
#[cfg(not(all(target_os = "linux", not(miri))))]
pub(crate) fn advise_huge<T>(_: &mut [T]) {}

#[cfg(all(target_os = "linux", not(miri)))]
mod linux {
    use std::sync::OnceLock;

    /// The size of the usual huge page of x86 and Arm, in bytes.
    pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

    /// Requests huge pages for memory that has not been touched yet.
    pub(crate) fn advise_huge<T>(memory: &mut [T]) {
        let (start, bytes) = (memory.as_mut_ptr().cast::<u8>(), size_of_val(memory));
        let inside = start.align_offset(page_bytes()).min(bytes);
        let whole = (bytes - inside) / page_bytes() * page_bytes();
        if whole >= HUGE_PAGE_BYTES {
            // SAFETY: whole pages inside borrowed memory; only the mapping changes, not the contents.
            unsafe { libc::madvise(start.wrapping_add(inside).cast(), whole, libc::MADV_HUGEPAGE) };
        }
    }

    /// Returns the size of the kernel's pages in bytes, a power of two.
    pub(crate) fn page_bytes() -> usize {
        static PAGE: OnceLock<usize> = OnceLock::new();
        *PAGE.get_or_init(|| {
            // SAFETY: only queries a number.
            usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
        })
    }
}
