//! Graphs fuse several formulas into one launch and omit unused formulas. The values equal those of eager calls.

use claystone::device::count_launches;
use claystone::{DType, Graph, Result, Tensor};

use crate::common::{opencl, scattered, values};

/// A function of a 12 x 20 matrix, and the number of commands in the function's graph.
struct Case {
    name: &'static str,
    commands: usize,
    work: fn(&Tensor) -> Result<Vec<Tensor>>,
}

const fn case(name: &'static str, commands: usize, work: fn(&Tensor) -> Result<Vec<Tensor>>) -> Case {
    Case { name, commands, work }
}

const CASES: [Case; 22] = [
    case("a chain", 1, |x| Ok(vec![x.add_scalar(1)?.mul_scalar(2)?.relu()?])),
    case("a chain of views", 1, |x| {
        Ok(vec![x.narrow(1, 1, 12)?.t()?.exp()?.add(&x.narrow(1, 3, 12)?)?.mul(&x.narrow(0, 2, 1)?.narrow(1, 0, 12)?)?])
    }),
    case("both operands", 1, |x| Ok(vec![x.add_scalar(1)?.mul(&x.mul_scalar(3)?)?])),
    case("the same result twice", 1, |x| {
        let t = x.add_scalar(1)?;
        Ok(vec![t.mul(&t)?])
    }),
    case("a result that is kept", 2, |x| {
        let t = x.add_scalar(1)?;
        Ok(vec![t.relu()?, t])
    }),
    case("a result of which a view is kept", 2, |x| {
        let t = x.add_scalar(1)?;
        Ok(vec![t.relu()?, t.narrow(0, 3, 2)?])
    }),
    case("two readers", 3, |x| {
        let t = x.exp()?;
        Ok(vec![t.add_scalar(1)?, t.mul_scalar(2)?])
    }),
    case("a reader that nobody needs", 1, |x| {
        let t = x.exp()?;
        t.mul_scalar(2)?;
        Ok(vec![t.add_scalar(1)?])
    }),
    case("another kind of reader", 2, |x| Ok(vec![x.exp()?.sum(0, false)?])),
    case("in place", 1, |x| {
        let t = x.add_scalar(1)?;
        t.mul_scalar_(2)?.add_(x)?;
        Ok(vec![t])
    }),
    case("in place, and seen before", 3, |x| {
        let t = x.add_scalar(1)?;
        let seen = t.narrow(0, 1, 4)?.relu()?;
        t.mul_scalar_(2)?;
        Ok(vec![t, seen])
    }),
    case("in place of a part", 2, |x| {
        let t = x.add_scalar(1)?;
        t.narrow(0, 1, 4)?.mul_scalar_(2)?;
        Ok(vec![t])
    }),
    case("an operand that changes in between", 3, |x| {
        let t = x.add_scalar(1)?;
        x.mul_scalar_(0.5)?;
        Ok(vec![t.relu()?])
    }),
    case("an operand that a copy changes in between", 3, |x| {
        let t = x.add_scalar(1)?;
        x.narrow(0, 0, 1)?.zero_()?;
        Ok(vec![t.relu()?])
    }),
    case("an operand that the reader overwrites", 1, |x| {
        let t = x.add_scalar(1)?;
        x.mul_(&t)?;
        Ok(vec![])
    }),
    case("an operand that the reader overwrites elsewhere", 2, |x| {
        let t = x.narrow(0, 1, 11)?.add_scalar(1)?;
        x.narrow(0, 0, 11)?.mul_(&t)?;
        Ok(vec![])
    }),
    case("a row that the reader overwrites", 3, |x| {
        let t = x.narrow(0, 3, 1)?.add(&Tensor::ones_like(x)?)?;
        x.mul_(&t)?;
        Ok(vec![])
    }),
    case("another shape", 2, |x| Ok(vec![x.exp()?.reshape([240])?.mul_scalar(2)?])),
    case("a broadcast result", 2, |x| Ok(vec![x.narrow(0, 0, 1)?.exp()?.add(x)?])),
    case("a result of halves", 2, |x| Ok(vec![x.to_dtype(DType::BF16)?.to_dtype(DType::F32)?])),
    case("operands of halves", 2, |x| {
        let half = x.to_dtype(DType::BF16)?;
        Ok(vec![half.to_dtype(DType::F32)?.mul_scalar(3)?.add(&half)?, half])
    }),
    case("what nobody needs", 0, |x| {
        x.exp()?.mul_scalar(2)?.add_scalar_(1)?;
        Ok(vec![])
    }),
];

#[test]
fn chains_are_fused_with_the_same_values() {
    for device in opencl() {
        for Case { name, commands, work } in CASES {
            let (x, other) = (scattered(&[12, 20], 3.0, device), scattered(&[12, 20], 3.0, device));
            let (graph, results) = Graph::capture(device, || work(&other)).unwrap();
            let ((), launches) = count_launches(|| graph.replay().unwrap());
            assert!(launches <= graph.commands() as u64, "{name}");
            let want = work(&x).unwrap();
            for (got, want) in results.iter().chain([&other]).zip(want.iter().chain([&x])) {
                assert_eq!(values(got), values(want), "{name} on {device}");
            }
            assert_eq!(graph.commands(), commands, "{name} on {device}");
            graph.replay().unwrap();
            let want = work(&x).unwrap();
            for (got, want) in results.iter().chain([&other]).zip(want.iter().chain([&x])) {
                assert_eq!(values(got), values(want), "{name} again on {device}");
            }
        }
    }
}

/// A pseudo-random generator for the choices of a program.
struct Choices(u64);

impl Choices {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// Runs random operations on 16 x 16 matrices. Some results are dropped in between, so that later results reuse their memory.
fn program(choices: &mut Choices, outside: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut tensors: Vec<Tensor> = outside.iter().map(Tensor::shallow_clone).collect();
    for _ in 0..4 + choices.below(20) {
        let [a, b] = [0; 2].map(|_| tensors[choices.below(tensors.len())].shallow_clone());
        let made = match choices.below(12) {
            0 => a.mul_scalar(0.75)?,
            1 => a.add(&b)?,
            2 => a.sub(&b.t()?)?,
            3 => a.tanh()?,
            4 => a.maximum(&b.narrow(0, choices.below(16), 1)?)?,
            5 => a.matmul(&b)?.mul_scalar(0.05)?,
            6 => b.sum(0, true)?.mul_scalar(0.1)?.add(&a)?,
            7 => a.add_scalar_(0.25)?.shallow_clone(),
            8 => {
                let rows = (choices.below(8), choices.below(8));
                a.narrow(0, rows.0, 8)?.mul_(&b.narrow(0, rows.1, 8)?)?;
                a
            }
            9 => b.softmax(1)?,
            10 => a.to_dtype(DType::F16)?.to_dtype(DType::F32)?.t()?,
            _ => a.copy_(&b.mul_scalar(0.5)?)?.shallow_clone(),
        };
        drop(b);
        tensors.push(made);
        while tensors.len() > 4 {
            tensors.swap_remove(choices.below(tensors.len()));
        }
    }
    Ok(tensors)
}

#[test]
fn random_graphs_match_eager_calls() {
    for device in opencl() {
        let (mut captured, mut called) = (0, 0);
        for seed in 0..150 {
            let outside = || [1.0, 2.0].map(|scale| scattered(&[16, 16], scale, device));
            let (mine, others) = (outside(), outside());
            let (graph, results) = Graph::capture(device, || program(&mut Choices(seed), &mine)).unwrap();
            for round in 0..2 {
                graph.replay().unwrap();
                let (want, launches) = count_launches(|| program(&mut Choices(seed), &others).unwrap());
                for (got, want) in results.iter().chain(&mine).zip(want.iter().chain(&others)) {
                    let bits = |t: &Tensor| values(t).into_iter().map(f64::to_bits).collect::<Vec<_>>();
                    assert_eq!(bits(got), bits(want), "program {seed}, round {round}, on {device}");
                }
                called += launches;
            }
            captured += count_launches(|| graph.replay().unwrap()).1;
        }
        println!("{device}: {} launches called, {captured} replayed", called / 2);
        assert!(captured < called / 2);
    }
}
