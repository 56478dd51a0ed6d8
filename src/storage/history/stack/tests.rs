use super::*;

/// Captures a stack `depth` calls deeper, with frames whose size depends on `wide`.
#[inline(never)]
fn deeper(depth: usize, wide: bool) -> Stack {
    let stack = match depth {
        0 => Stack::capture(),
        _ if wide => wider(depth),
        _ => deeper(depth - 1, wide),
    };
    black_box(stack) // work after the call, so that the compiler does not turn the call into a jump
}

#[inline(never)]
fn wider(depth: usize) -> Stack {
    let room = black_box([depth; 100]);
    black_box(deeper(room[1] - 1, true))
}

/// True if the frame is this function of this file. Line tables give names without their paths.
fn is(frame: &Frame, name: &str) -> bool {
    frame.filename.ends_with("stack/tests.rs") && frame.name.rsplit("::").next() == Some(name)
}

/// A stack captured again equals the stack that unwinding finds, whatever stacks were captured in between.
#[test]
fn captured_stacks_agree_with_unwinding() {
    let depths = if cfg!(miri) { 3 } else { 30 };
    let capture = |depth: usize| deeper(depth, depth.is_multiple_of(3));
    let rounds: Vec<Vec<Stack>> = (0..4).map(|_| (0..depths).map(capture).collect()).collect();
    let first = &rounds[0];
    assert!(rounds.iter().all(|round| round == first), "from the same line");
    let different: std::collections::HashSet<_> = first.iter().collect();
    assert_eq!(different.len(), depths);
    let count = |stack: Stack| stack.frames().iter().filter(|f| is(f, "deeper")).count();
    assert_eq!(first.iter().map(|stack| count(*stack)).collect::<Vec<_>>(), (1..=depths).collect::<Vec<_>>());
}

#[test]
fn every_thread_has_its_stack() {
    let here = deeper(2, false).frames();
    let there = std::thread::spawn(move || deeper(2, false)).join().map(Stack::frames).unwrap();
    assert!(here[..3].iter().chain(&there[..3]).all(|frame| is(frame, "deeper")), "{here:?} {there:?}");
    assert!(is(&here[3], "every_thread_has_its_stack"), "{here:?}");
    // The stack of the other thread begins with the closure, so it has no frames of the spawning thread.
    assert!(here.iter().chain(&there).all(|frame| frame.filename.ends_with("stack/tests.rs")), "{here:?} {there:?}");
    assert!(!there.iter().any(|frame| is(frame, "every_thread_has_its_stack")), "{there:?}");
}

#[test]
fn the_table_is_bounded() {
    let mut stacks = Stacks::new(2);
    let here = 0usize;
    let here = &raw const *black_box(&here) as usize;
    let known = stacks.capture(here);
    assert_ne!(known, Stack::NONE);
    assert_eq!(stacks.intern([1, 2].into()), Stack(2));
    assert_eq!((stacks.capture(here + 1), stacks.lost), (Stack::NONE, 1), "another stack, as its start differs");
    assert_eq!(stacks.kept.len(), 2);
    assert_eq!(stacks.addresses(Stack(2)).as_deref(), Some(&[1, 2][..]));
    assert_eq!((stacks.addresses(Stack::NONE), stacks.addresses(Stack(3))), (None, None));
}

#[test]
fn frames_of_varying_size_are_not_walked() {
    let words = [0_usize; 64];
    let low = black_box(&words).as_ptr() as usize;
    let memory = StackMemory::above(low).filter(|_| cfg!(all(target_os = "linux", target_arch = "x86_64")));
    let Some(memory) = memory else { return };
    let mut sizes = FrameSizes::default();
    sizes.learn(memory, &[(0, low + 16), (0, low + 48)]);
    assert_eq!(sizes.0[&START], VARIES, "the same address with two distances");
    assert_eq!(sizes.walk(memory, &mut [0; MAX_DEPTH]), None);
    let mut sizes = FrameSizes::default();
    sizes.learn(memory, &[(7, low + 16)]);
    assert_eq!((sizes.0[&START], sizes.0[&7]), (VARIES, OUTERMOST), "there is no such return address");
    assert!(memory.return_address(memory.end + 8).is_none() && memory.return_address(low).is_none());
    black_box(&words);
}
