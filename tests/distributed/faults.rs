use claystone::distributed::{Group, ReduceOp};
use claystone::{Device, Error, Tensor};

/// What each of three ranks' calls say when rank 1 does `f` instead of its part.
fn others(f: impl Fn(Group) + Send + Sync) -> Vec<Error> {
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
fn a_rank_that_panics_is_named_and_nobody_hangs() {
    let told = others(|_group| panic!("as this test wants"));
    assert_eq!(told.len(), 2);
    for e in told {
        assert!(matches!(e, Error::Rank { op: "all_reduce", rank: 1, .. }), "{e}");
        assert!(e.to_string().contains("panicked"), "{e}");
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    for e in others(drop) {
        assert!(matches!(e, Error::Rank { op: "all_reduce", rank: 1, .. }), "{e}");
        assert!(e.to_string().contains("has left the group"), "{e}");
    }
}

#[test]
fn other_sizes_are_told_where_they_arrive() {
    let told = others(|group| {
        let x = Tensor::ones(2000, group.device()).unwrap();
        assert!(group.all_reduce(&x, ReduceOp::Sum).is_err());
        // What the others sent is not taken for an answer to the next call.
        assert!(group.all_reduce(&Tensor::ones(1000, group.device()).unwrap(), ReduceOp::Sum).is_err());
    });
    assert!(told.iter().any(|e| e.to_string().contains("bytes where")), "{told:?}");
}
