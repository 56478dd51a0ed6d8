use claystone::distributed::{Group, ReduceOp};
use claystone::{Device, Error, Tensor};

/// Returns the errors of ranks 0 and 2, which call a collective while rank 1 runs `f` instead.
fn errors_of_other_ranks(f: impl Fn(Group) + Send + Sync) -> Vec<Error> {
    let groups = Group::threads(&[Device::Cpu; 3]).unwrap();
    std::thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let x = Tensor::ones(1000, group.device()).unwrap();
                    group.all_reduce(&x, ReduceOp::Sum).unwrap();
                    match group.rank() {
                        1 => {
                            f(group);
                            None
                        }
                        _ => Some(group.all_reduce(&x, ReduceOp::Sum).unwrap_err()),
                    }
                })
            })
            .collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()?).collect()
    })
}

#[test]
fn panicking_ranks_are_named_and_no_rank_hangs() {
    let message = errors_of_other_ranks(|_group| panic!("as this test wants"));
    assert_eq!(message.len(), 2);
    for e in message {
        assert!(matches!(e, Error::Rank { op: "all_reduce", rank: 1, .. }), "{e}");
        assert!(e.to_string().contains("panicked"), "{e}");
    }
}

#[test]
fn leaving_ranks_are_named() {
    for e in errors_of_other_ranks(drop) {
        assert!(matches!(e, Error::Rank { op: "all_reduce", rank: 1, .. }), "{e}");
        assert!(e.to_string().contains("has left the group"), "{e}");
    }
}

#[test]
fn mismatched_sizes_are_errors_at_the_receiver() {
    let message = errors_of_other_ranks(|group| {
        let x = Tensor::ones(2000, group.device()).unwrap();
        assert!(group.all_reduce(&x, ReduceOp::Sum).is_err());
        // The data that other ranks have sent must not be taken for data of the next call.
        assert!(group.all_reduce(&Tensor::ones(1000, group.device()).unwrap(), ReduceOp::Sum).is_err());
    });
    assert!(message.iter().any(|e| e.to_string().contains("bytes where")), "{message:?}");
}
