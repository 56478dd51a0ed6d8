use claystone::distributed::{Group, ReduceOp};
use claystone::{DType, Device, Error, Generator, Tensor, with_generator};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::common::devices;

/// Runs `f` on `n` ranks and returns each rank's number and result. The ranks are threads whose devices alternate. In a job started by
/// `mpirun` the ranks are processes, and each process returns only its own result.
pub fn on_ranks<R: Send>(n: usize, f: impl Fn(&Group) -> claystone::Result<R> + Sync) -> Vec<(usize, R)> {
    #[cfg(feature = "mpi")]
    if let Some(world) = crate::mpi::world() {
        let group = world.split((world.rank() < n).then_some(0), 0).unwrap();
        return group.map(|group| (group.rank(), f(&group).unwrap())).into_iter().collect();
    }
    let all = devices();
    let on: Vec<Device> = (0..n).map(|rank| all[rank % all.len()]).collect();
    std::thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = Group::threads(&on)
            .unwrap()
            .into_iter()
            .map(|group| scope.spawn(move || (group.rank(), f(&group).unwrap())))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns a small integer, which every numeric dtype represents exactly.
fn value(rank: usize, i: usize) -> i64 {
    ((i * 7 + rank * 13) % 11) as i64
}

/// Returns the rank's tensor: contiguous, or a view of every second column.
fn tensor(rank: usize, n: usize, dtype: DType, device: Device, strided: bool) -> claystone::Result<Tensor> {
    let of = |i: usize| if dtype == DType::Bool { value(rank, i) % 2 } else { value(rank, i) };
    let values: Vec<i64> = (0..n).map(of).collect();
    let x = Tensor::from_slice(&values, n, Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
    if !strided {
        return Ok(x);
    }
    let wide = Tensor::zeros([n, 2], (dtype, device))?;
    let column = wide.narrow(1, 1, 1)?.squeeze(1)?;
    column.copy_(&x)?;
    Ok(column)
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_device(Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

fn reduced(op: ReduceOp, of: impl Iterator<Item = f64>) -> f64 {
    let of: Vec<f64> = of.collect();
    match op {
        ReduceOp::Sum => of.iter().sum(),
        ReduceOp::Mean => of.iter().sum::<f64>() / of.len() as f64,
        ReduceOp::Max => of.iter().copied().fold(f64::MIN, f64::max),
        ReduceOp::Min => of.iter().copied().fold(f64::MAX, f64::min),
    }
}

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

fn supports(op: ReduceOp, dtype: DType) -> bool {
    match op {
        ReduceOp::Sum => dtype != DType::Bool,
        ReduceOp::Mean => dtype.is_float(),
        _ => true,
    }
}

/// Returns element `i` of the rank's tensor.
fn own(dtype: DType, rank: usize, i: usize) -> f64 {
    (if dtype == DType::Bool { value(rank, i) % 2 } else { value(rank, i) }) as f64
}

#[test]
fn reductions_support_all_dtypes_sizes_and_strides() {
    for n in 1..=5 {
        for size in [0, 1, 15, 16, 17, 1009] {
            for dtype in DType::ALL {
                for op in OPS.into_iter().filter(|&op| supports(op, dtype)) {
                    let strided = size % 2 == 1;
                    let results = on_ranks(n, |group| {
                        let x = tensor(group.rank(), size, dtype, group.device(), strided)?;
                        group.all_reduce(&x, op)?;
                        Ok(values(&x))
                    });
                    // A mean of small integers is rounded once to half precision, which explains the tolerance.
                    let tolerance = if dtype == DType::BF16 { 0.04 } else { 0.01 };
                    for (_, result) in results {
                        for (i, got) in result.into_iter().enumerate() {
                            let want = reduced(op, (0..n).map(|rank| own(dtype, rank, i)));
                            assert!(
                                (got - want).abs() <= tolerance,
                                "{op:?} of {dtype}, {n} ranks, {i}: {got}, {want}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// A sum depends on the order of additions. All ranks must use the same order, and half-precision sums must be added in f32.
#[test]
fn reductions_give_the_same_bits_on_every_rank() {
    let n = 5;
    let size = 1 << 20;
    for dtype in [DType::F32, DType::BF16] {
        let of = |rank: usize| {
            let seed = Generator::new(rank as u64);
            with_generator(&seed, || Tensor::randn(size, Device::Cpu))?.to_dtype(dtype)
        };
        let every: Vec<Vec<f64>> = (0..n).map(|rank| values(&of(rank).unwrap())).collect();
        let sum = |i: usize| every[1..].iter().fold(every[0][i] as f32, |sum, rank| sum + rank[i] as f32);
        let want: Vec<u32> = match dtype {
            DType::BF16 => (0..size).map(|i| half::bf16::from_f32(sum(i)).to_f32().to_bits()).collect(),
            _ => (0..size).map(|i| sum(i).to_bits()).collect(),
        };
        for (rank, got) in on_ranks(n, |group| {
            let x = of(group.rank())?.to_device(group.device())?;
            group.all_reduce(&x, ReduceOp::Sum)?;
            x.to_device(Device::Cpu)?.to_dtype(DType::F32)?.to_vec::<f32>()
        }) {
            assert!(got.iter().zip(&want).all(|(got, want)| got.to_bits() == *want), "{dtype} on rank {rank}");
        }
    }
}

#[test]
fn reductions_keep_nan_and_infinities() {
    for (_, [sum, max, min]) in on_ranks(3, |group| {
        let x = Tensor::from_slice(&[1.0f32, f32::INFINITY, 2.0, -0.0], 4, Device::Cpu)?;
        if group.rank() == 1 {
            x.copy_(&Tensor::from_slice(&[f32::NAN, 1.0, f32::NEG_INFINITY, -0.0], 4, Device::Cpu)?)?;
        }
        let x = x.to_device(group.device())?;
        let (max, min) = (x.clone(), x.clone());
        group.all_reduce(&max, ReduceOp::Max)?;
        group.all_reduce(&min, ReduceOp::Min)?;
        group.all_reduce(&x, ReduceOp::Sum)?;
        Ok([values(&x), values(&max), values(&min)])
    }) {
        assert!(sum[0].is_nan() && max[0].is_nan() && min[0].is_nan());
        assert_eq!(
            (&sum[1..3], &max[1..3], &min[1..3]),
            (&[f64::INFINITY, f64::NEG_INFINITY][..], &[f64::INFINITY, 2.0][..], &[1.0, f64::NEG_INFINITY][..])
        );
        assert!(sum[3] == 0.0 && sum[3].is_sign_negative());
    }
}

#[test]
fn large_tensors_are_sent_in_slices() {
    let size = (9 << 20) / 4 + 3;
    let n = 3;
    let results = on_ranks(n, |group| {
        let x = tensor(group.rank(), size, DType::F32, group.device(), false)?;
        group.all_reduce(&x, ReduceOp::Sum)?;
        let y = tensor(group.rank(), size, DType::F32, group.device(), false)?;
        group.broadcast(&y, 2)?;
        let gathered = group.all_gather(&tensor(group.rank(), size, DType::F32, group.device(), false)?)?;
        let z = tensor(group.rank(), size * n, DType::F32, group.device(), false)?;
        Ok([
            values(&x),
            values(&y),
            values(&gathered),
            values(&group.reduce_scatter(&z, ReduceOp::Max)?),
            values(&group.all_to_all(&z)?),
        ])
    });
    for (rank, [sum, of_root, gathered, part, mixed]) in results {
        let own = |rank: usize, i: usize| value(rank, i) as f64;
        for i in (0..size).step_by(997).chain([size - 1]) {
            assert_eq!(sum[i], own(0, i) + own(1, i) + own(2, i));
            assert_eq!(of_root[i], own(2, i));
            let at = rank * size + i;
            assert_eq!(part[i], own(0, at).max(own(1, at)).max(own(2, at)));
            for p in 0..n {
                assert_eq!(gathered[p * size + i], own(p, i));
                assert_eq!(mixed[p * size + i], own(p, at));
            }
        }
    }
}

#[test]
fn split_groups_work_concurrently() {
    let results = on_ranks(5, |group| {
        let color = (group.rank() != 4).then_some(group.rank() as u32 % 2);
        let Some(half) = group.split(color, -(group.rank() as i64))? else { return Ok(None) };
        let x = Tensor::full(3, group.rank() as f32, group.device())?;
        half.all_reduce(&x, ReduceOp::Sum)?;
        let pair = half.split(Some(0), 0)?.expect("a color was given");
        pair.barrier()?;
        Ok(Some((half.rank(), half.size(), pair.rank(), values(&x))))
    });
    let of = |rank, sum: f64| Some((rank, 2, rank, vec![sum; 3]));
    let want = [of(1, 2.0), of(1, 4.0), of(0, 2.0), of(0, 4.0), None];
    for (rank, got) in results {
        assert_eq!(got, want[rank], "rank {rank}");
    }
}

#[test]
fn tensors_can_be_sent_and_received() {
    for (rank, got) in on_ranks(3, |group| {
        let x = Tensor::full([2, 3], group.rank() as f32, group.device())?;
        let (next, before) = ((group.rank() + 1) % 3, (group.rank() + 2) % 3);
        if group.rank() == 0 {
            group.send(&x, next)?;
            group.recv(&x.t()?, before)?;
        } else {
            let got = Tensor::zeros([2, 3], group.device())?;
            group.recv(&got, before)?;
            group.send(&got.add_scalar(1.0)?.t()?.contiguous()?.t()?, next)?;
            x.copy_(&got)?;
        }
        Ok(values(&x))
    }) {
        assert_eq!(got, [[2.0, 0.0, 1.0][rank]; 6], "rank {rank}");
    }
}

#[test]
fn several_collectives_can_be_pending() {
    for (_, sums) in on_ranks(2, |group| {
        let tensors: Vec<Tensor> =
            (0..20).map(|i| Tensor::full(100, i as f32, group.device())).collect::<Result<_, _>>()?;
        let work: Vec<_> =
            tensors.iter().map(|t| group.all_reduce_async(t, ReduceOp::Sum)).collect::<Result<_, _>>()?;
        work.into_iter().try_for_each(|work| work.wait())?;
        Ok(tensors.iter().map(values).collect::<Vec<_>>())
    }) {
        for (i, values) in sums.into_iter().enumerate() {
            assert_eq!(values, [2.0 * i as f64; 100]);
        }
    }
}

#[test]
fn invalid_arguments_are_errors_and_send_nothing() {
    on_ranks(2, |group| {
        let ints = Tensor::zeros(4, (DType::I64, group.device()))?;
        let mean = group.all_reduce(&ints, ReduceOp::Mean).unwrap_err();
        assert!(matches!(mean, Error::UnsupportedDType { op: "all_reduce", .. }), "{mean}");
        let odd = group.reduce_scatter(&Tensor::zeros(3, group.device())?, ReduceOp::Sum).unwrap_err();
        assert!(odd.to_string().contains("into 2 equal parts"), "{odd}");
        assert!(group.broadcast(&ints, 2).unwrap_err().to_string().contains("no rank 2"));
        assert!(group.send(&ints, group.rank()).unwrap_err().to_string().contains("itself"));
        let leaf = Tensor::zeros(2, group.device())?.requires_grad_(true)?;
        assert!(matches!(group.all_reduce(&leaf, ReduceOp::Sum), Err(Error::Autograd { .. })));
        let repeated = Tensor::zeros(1, group.device())?.expand(3)?;
        assert!(group.all_reduce(&repeated, ReduceOp::Sum).unwrap_err().to_string().contains("pass a clone()"));
        group.barrier()
    });
    assert!(Group::threads(&[]).is_err());
}

#[derive(Debug, Clone, Copy)]
enum Collective {
    Reduce(ReduceOp),
    Broadcast(usize),
    Gather,
    Scatter,
    AllToAll,
}

/// Returns a fixed seed for processes started by `mpirun`, because all processes must make the same calls.
fn seed() -> RngSeed {
    match std::env::var("CLAYSTONE_TEST_RANKS") {
        Ok(_) => RngSeed::Fixed(1),
        Err(_) => RngSeed::Random,
    }
}

/// The number of random sequences, each with 30 calls on average. PROPTEST_CASES=3400 makes a hundred thousand calls.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").map_or(12, |cases| cases.parse().expect("a number"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), rng_seed: seed(), ..ProptestConfig::default() })]

    /// Makes many successive calls of any kind in one group. A call must not receive messages of another call.
    #[test]
    fn any_sequence_of_collectives_matches_one_process(
        n in 1usize..=4,
        calls in prop::collection::vec((0u8..5, 0usize..4, 0usize..40, 0usize..9, any::<bool>()), 1..60),
    ) {
        let calls: Vec<_> = calls.into_iter().map(|(kind, x, size, dtype, strided)| {
            let dtype = DType::ALL[dtype];
            let op = if supports(OPS[x], dtype) { OPS[x] } else { ReduceOp::Max };
            let call = match kind {
                0 => Collective::Reduce(op),
                1 => Collective::Broadcast(x % n),
                2 => Collective::Gather,
                3 => Collective::Scatter,
                _ => Collective::AllToAll,
            };
            (call, if kind > 2 { size * n } else { size }, dtype, strided)
        }).collect();
        let results = on_ranks(n, |group| calls.iter().map(|&(call, size, dtype, strided)| {
            let x = tensor(group.rank(), size, dtype, group.device(), strided)?;
            Ok(values(&match call {
                Collective::Reduce(op) => { group.all_reduce(&x, op)?; x }
                Collective::Broadcast(root) => { group.broadcast(&x, root)?; x }
                Collective::Gather => group.all_gather(&x)?,
                Collective::Scatter => group.reduce_scatter(&x, ReduceOp::Min)?,
                Collective::AllToAll => group.all_to_all(&x)?,
            }))
        }).collect::<claystone::Result<Vec<_>>>());
        for (rank, results) in results {
            for (result, &(call, size, dtype, _)) in results.into_iter().zip(&calls) {
                let part = size / n;
                let want: Vec<f64> = match call {
                    Collective::Reduce(op) => (0..size).map(|i| reduced(op, (0..n).map(|r| own(dtype, r, i)))).collect(),
                    Collective::Broadcast(root) => (0..size).map(|i| own(dtype, root, i)).collect(),
                    Collective::Gather => (0..n * size).map(|i| own(dtype, i / size, i % size)).collect(),
                    Collective::Scatter => (0..part)
                        .map(|i| reduced(ReduceOp::Min, (0..n).map(|r| own(dtype, r, rank * part + i)))).collect(),
                    Collective::AllToAll => (0..size).map(|i| own(dtype, i / part, rank * part + i % part)).collect(),
                };
                prop_assert_eq!(result.len(), want.len());
                for (got, want) in result.into_iter().zip(want) {
                    prop_assert!((got - want).abs() <= 0.05, "{:?} of {}: {} {}", call, dtype, got, want);
                }
            }
        }
    }
}
