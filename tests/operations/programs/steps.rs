//! The steps of random programs, and their effect on single numbers.

use proptest::prelude::*;

use super::BOUND;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pair {
    Add,
    Sub,
    Mul,
    Maximum,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Single {
    Neg,
    Abs,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fold {
    Sum,
    Max,
    Min,
}

/// A step of a program. Fields that select a value are taken modulo the number of values, so that every program is valid.
#[derive(Debug, Clone)]
pub enum Step {
    /// Creates a tensor whose elements depend on the seed.
    New {
        shape: Vec<usize>,
        seed: u8,
    },
    Full {
        shape: Vec<usize>,
        value: i8,
    },
    Transpose {
        of: u8,
        a: u8,
        b: u8,
    },
    Narrow {
        of: u8,
        dim: u8,
        start: u8,
        len: u8,
    },
    Slice {
        of: u8,
        dim: u8,
        start: i8,
        end: i8,
        step: i8,
    },
    Select {
        of: u8,
        dim: u8,
        index: u8,
    },
    Unsqueeze {
        of: u8,
        dim: u8,
    },
    Squeeze {
        of: u8,
        dim: u8,
    },
    /// Expands dims of size 1, and optionally adds a leading dim.
    Expand {
        of: u8,
        size: u8,
        front: bool,
    },
    /// Flattens all dims. The result is a view if the elements are in order, otherwise a copy.
    Flatten {
        of: u8,
    },
    Clone {
        of: u8,
    },
    Pair {
        what: Pair,
        of: u8,
        with: u8,
    },
    Single {
        what: Single,
        of: u8,
    },
    /// Reduces the dims whose bits are set in `dims`.
    Fold {
        what: Fold,
        of: u8,
        dims: u8,
        keepdim: bool,
    },
    Fill {
        into: u8,
        value: i8,
    },
    Copy {
        into: u8,
        from: u8,
    },
    PairInPlace {
        what: Pair,
        into: u8,
        with: u8,
    },
    SingleInPlace {
        what: Single,
        into: u8,
    },
}

pub fn step() -> impl Strategy<Value = Step> {
    let shape = || prop::collection::vec(prop_oneof![1 => Just(0usize), 4 => Just(1), 8 => 2usize..6], 0..4);
    let pair = || prop_oneof![Just(Pair::Add), Just(Pair::Sub), Just(Pair::Mul), Just(Pair::Maximum)];
    let single = || prop_oneof![Just(Single::Neg), Just(Single::Abs)];
    let fold = prop_oneof![Just(Fold::Sum), Just(Fold::Max), Just(Fold::Min)];
    // Recent values are chosen more often. 0 is the last value.
    let t = || prop_oneof![2 => 0u8..3, 1 => any::<u8>()];
    let n = any::<u8>;
    prop_oneof![
        3 => (shape(), n()).prop_map(|(shape, seed)| Step::New { shape, seed }),
        1 => (shape(), -9i8..10).prop_map(|(shape, value)| Step::Full { shape, value }),
        3 => (t(), n(), n()).prop_map(|(of, a, b)| Step::Transpose { of, a, b }),
        2 => (t(), n(), n(), n()).prop_map(|(of, dim, start, len)| Step::Narrow { of, dim, start, len }),
        3 => (t(), n(), -7i8..7, -7i8..7, prop_oneof![Just(-2i8), Just(-1), Just(1), Just(2), Just(3)])
            .prop_map(|(of, dim, start, end, step)| Step::Slice { of, dim, start, end, step }),
        2 => (t(), n(), n()).prop_map(|(of, dim, index)| Step::Select { of, dim, index }),
        1 => (t(), n()).prop_map(|(of, dim)| Step::Unsqueeze { of, dim }),
        1 => (t(), n()).prop_map(|(of, dim)| Step::Squeeze { of, dim }),
        2 => (t(), 1u8..4, any::<bool>()).prop_map(|(of, size, front)| Step::Expand { of, size, front }),
        1 => t().prop_map(|of| Step::Flatten { of }),
        1 => t().prop_map(|of| Step::Clone { of }),
        5 => (pair(), t(), t()).prop_map(|(what, of, with)| Step::Pair { what, of, with }),
        1 => (single(), t()).prop_map(|(what, of)| Step::Single { what, of }),
        3 => (fold, t(), n(), any::<bool>())
            .prop_map(|(what, of, dims, keepdim)| Step::Fold { what, of, dims, keepdim }),
        1 => (t(), -9i8..10).prop_map(|(into, value)| Step::Fill { into, value }),
        2 => (t(), t()).prop_map(|(into, from)| Step::Copy { into, from }),
        4 => (pair(), t(), t()).prop_map(|(what, into, with)| Step::PairInPlace { what, into, with }),
        1 => (single(), t()).prop_map(|(what, into)| Step::SingleInPlace { what, into }),
    ]
}

/// Returns the numbers of [`Step::New`].
pub fn numbers(n: usize, seed: u8) -> Vec<f64> {
    (0..n).map(|i| ((i * 7 + usize::from(seed) * 13) % 19) as f64 - 9.0).collect()
}

pub fn pair(what: Pair, x: f64, y: f64) -> f64 {
    let made = match what {
        Pair::Add => x + y,
        Pair::Sub => x - y,
        Pair::Mul => x * y,
        Pair::Maximum => x.max(y),
    };
    made.clamp(-BOUND, BOUND) + 0.0 // adding 0 turns -0 into 0
}

pub fn single(what: Single, x: f64) -> f64 {
    match what {
        Single::Neg => 0.0 - x,
        Single::Abs => x.abs(),
    }
}
