//! Huge pages: one page fault at the first access instead of 512. The operating system may decline.

/// The size of the usual huge page of x86 and Arm, in bytes.
#[cfg(all(target_os = "linux", not(miri)))]
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Requests huge pages for memory that has not been touched yet.
#[cfg_attr(not(all(target_os = "linux", not(miri))), allow(unused_variables))]
pub(crate) fn advise_huge<T>(memory: &mut [T]) {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        let (start, bytes, page) = (memory.as_mut_ptr().cast::<u8>(), size_of_val(memory), page_bytes());
        let inside = start.align_offset(page).min(bytes);
        let whole = (bytes - inside) / page * page;
        if whole >= HUGE_PAGE_BYTES {
            // SAFETY: whole pages inside borrowed memory; only the mapping changes, not the contents.
            unsafe { libc::madvise(start.wrapping_add(inside).cast(), whole, libc::MADV_HUGEPAGE) };
        }
    }
}

/// Returns the size of the kernel's pages in bytes, a power of two.
#[cfg(all(target_os = "linux", not(miri)))]
pub(crate) fn page_bytes() -> usize {
    // SAFETY: only queries a number, which the C library knows without a system call.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}
