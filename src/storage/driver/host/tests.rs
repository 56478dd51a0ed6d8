use super::*;

safe_methods!(Host);

impl Host {
    fn relocate(&self, moves: &[(At<'_>, At<'_>, usize)]) -> Result<()> {
        // SAFETY: no other thread uses the memory in these tests.
        unsafe { Driver::relocate(self, moves) }.map(|done| assert!(done))
    }
}

fn host() -> Host {
    Host::new(&Config::default())
}

fn address(memory: &Memory) -> usize {
    match &memory.0 {
        MemoryKind::Host(m) => m.start().addr().get(),
        _ => panic!("the host makes host memory"),
    }
}

#[test]
fn segments_are_aligned_zeroed_and_keep_written_bytes() {
    let host = host();
    let largest = if cfg!(miri) { 5000 } else { (5 << 20) + 3 };
    for bytes in
        [1, 511, 4096, HUGE_PAGE_BYTES.min(1 << 21) - 1, 1 << 21, largest].into_iter().filter(|n| *n <= largest)
    {
        let memory = host.create(bytes).unwrap();
        assert_eq!(address(&memory) % ALIGNMENT, 0);
        let mut read = vec![1; bytes];
        host.read((&memory, 0), &mut read).unwrap();
        assert!(read.iter().all(|byte| *byte == 0), "{bytes}");
        let written: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
        host.write(&written, (&memory, 0)).unwrap();
        host.copy(StreamId::DEFAULT, (&memory, 0), (&memory, bytes / 2), bytes / 4).unwrap();
        host.read((&memory, 0), &mut read).unwrap();
        assert_eq!(read[..bytes / 2], written[..bytes / 2]);
        assert_eq!(read[bytes / 2..][..bytes / 4], written[..bytes / 4]);
        assert!(host.read((&memory, 1), &mut read).is_err() && host.read((&memory, usize::MAX), &mut read).is_err());
    }
}

#[test]
fn a_segment_larger_than_the_address_space_is_an_error() {
    let host = host();
    assert!(matches!(host.create(host.largest_segment()), Err(Failure::HostMemory)));
    assert!(matches!(host.create(usize::MAX), Err(Failure::HostMemory)));
    assert!(host.reserve(usize::MAX).is_none() && host.reserve(usize::MAX / 4).is_none());
}

#[test]
fn ordinary_memory_cannot_grow() {
    let host = host();
    let memory = host.create(1000).unwrap();
    assert!(matches!(host.extend(&memory, 0, 1000), Err(Failure::Other(Error::Invalid { .. }))));
    host.shrink(&memory, 0, 1000);
    host.write(&[1; 1000], (&memory, 0)).unwrap();
}

#[cfg(all(target_os = "linux", not(miri)))]
mod reserved {
    use super::*;

    /// Returns how many bytes of the range are resident in memory, as the kernel reports.
    fn resident(memory: &Memory, from: usize, to: usize) -> usize {
        let page = host().page();
        let mut pages = vec![0u8; (to - from) / page];
        let start = std::ptr::without_provenance_mut(address(memory) + from);
        // SAFETY: the call queries addresses of the memory, and writes one byte per page to `pages`.
        assert_eq!(unsafe { libc::mincore(start, to - from, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|page| *page & 1 == 1).count() * page
    }

    #[test]
    fn reserved_memory_is_committed_and_released_page_by_page() {
        let (host, page) = (host(), host().page());
        let all = 64 << 30; // more than the machine's memory: only addresses are reserved
        let memory = host.reserve(all).unwrap();
        assert_eq!(address(&memory) % page, 0);
        let mut byte = [1];
        assert!(host.read((&memory, 0), &mut byte).is_err(), "nothing is committed");
        host.extend(&memory, 0, 4 * page).unwrap();
        assert_eq!(resident(&memory, 0, 4 * page), 0, "nor is there memory before it is touched");
        host.write(&vec![7; 4 * page], (&memory, 0)).unwrap();
        assert_eq!(resident(&memory, 0, 4 * page), 4 * page);
        assert!(host.write(&[7], (&memory, 4 * page)).is_err());
        // Committing more pages keeps the address and the contents of the first pages.
        host.extend(&memory, 4 * page, 8 * page).unwrap();
        host.write(&[9], (&memory, 8 * page - 1)).unwrap();
        host.read((&memory, 4 * page - 1), &mut byte).unwrap();
        assert_eq!(byte, [7]);
        // Released pages have no memory, and are zero when committed again.
        host.shrink(&memory, page, 3 * page);
        assert_eq!(resident(&memory, page, 3 * page), 0);
        assert!(
            host.read((&memory, page), &mut byte).is_err() && host.read((&memory, 3 * page - 1), &mut byte).is_err()
        );
        let mut two = vec![0; page + 1];
        assert!(host.read((&memory, 0), &mut two).is_err(), "half of it");
        host.read((&memory, 3 * page), &mut byte).unwrap();
        assert_eq!(byte, [7]);
        host.extend(&memory, page, 3 * page).unwrap();
        host.read((&memory, page), &mut byte).unwrap();
        assert_eq!(byte, [0]);
        // For a range of partial pages, `extend` commits all the pages, and `shrink` releases none.
        host.extend(&memory, 100 * page + 1, 100 * page + 2).unwrap();
        host.write(&vec![3; page], (&memory, 100 * page)).unwrap();
        host.shrink(&memory, 100 * page + 1, 101 * page);
        host.read((&memory, 101 * page - 1), &mut byte).unwrap();
        assert_eq!(byte, [3]);
        host.extend(&memory, all - page, all).unwrap();
        host.write(&[1], (&memory, all - 1)).unwrap();
        assert!(host.extend(&memory, all, all + page).is_err());
        assert!(host.extend(&memory, page, 0).is_err());
        host.extend(&memory, page, page).unwrap();
    }

    #[test]
    fn a_dropped_segment_releases_its_addresses() {
        let (host, page) = (host(), host().page());
        let at = {
            let memory = host.reserve(16 << 30).unwrap();
            host.extend(&memory, 0, page).unwrap();
            address(&memory)
        };
        let mut pages = [0u8; 1];
        // SAFETY: the call queries one address, and writes one byte.
        let known =
            unsafe { libc::mincore(std::ptr::without_provenance_mut(at + (8 << 30)), page, pages.as_mut_ptr()) };
        assert_eq!((known, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::ENOMEM)));
    }
}

#[test]
fn relocation_releases_the_source_memory() {
    let host = host();
    let huge = if HUGE_PAGE_BYTES == usize::MAX { 4096 } else { HUGE_PAGE_BYTES };
    let (bytes, offset) = (3 * huge + 1000, 512);
    let [from, to] = [offset + bytes, bytes].map(|n| host.create(n).unwrap());
    let values: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    host.write(&values, (&from, offset)).unwrap();
    let beyond = ((&from, 0), (&to, 0), bytes + 1000);
    assert!(host.relocate(&[((&from, offset), (&to, 0), bytes), beyond]).is_err());
    let mut found = vec![0; bytes];
    host.read((&from, offset), &mut found).unwrap();
    assert!(found == values, "nothing happens unless all of it can");
    host.relocate(&[((&from, offset), (&to, 0), bytes)]).unwrap();
    host.read((&to, 0), &mut found).unwrap();
    assert!(found == values);
    let is_there = |at: usize| host.read((&from, at), &mut [0]).is_ok();
    assert_eq!([0, huge, 2 * huge].map(is_there), [true, host.page() == 0, host.page() == 0]);
}
