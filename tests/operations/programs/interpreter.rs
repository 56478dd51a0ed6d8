//! A simple model of tensors, views and in-place changes: a tensor is a list of positions in a shared list of numbers.

use std::cell::RefCell;
use std::rc::Rc;

/// A tensor. `at` contains the position of each element, in row-major order, in `list`, which views share.
#[derive(Clone)]
pub struct Value {
    list: Rc<RefCell<Vec<f64>>>,
    pub at: Vec<usize>,
    pub shape: Vec<usize>,
}

/// Returns all multi-indices of a shape, in row-major order.
fn indexes(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![Vec::new()], |all, &d| {
        all.iter().flat_map(|index| (0..d).map(|i| [&index[..], &[i]].concat())).collect()
    })
}

/// Returns the row-major position of a multi-index.
fn place(shape: &[usize], index: &[usize]) -> usize {
    shape.iter().zip(index).fold(0, |at, (d, i)| at * d + i)
}

/// Returns the indices in Python's `range(size)[start:end:step]`.
pub fn sliced(size: usize, start: isize, end: isize, step: isize) -> Vec<usize> {
    let n = size as isize;
    let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
    let clamped = |i: isize| (if i < 0 { i + n } else { i }).clamp(low, high.max(low));
    let (mut i, end) = (clamped(start), clamped(end));
    let mut picked = Vec::new();
    while if step > 0 { i < end } else { i > end } {
        picked.push(i as usize);
        i += step;
    }
    picked
}

/// Returns the broadcast shape of two shapes, or `None` if they do not broadcast.
pub fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let size = |s: &[usize], d: usize| if d + s.len() < rank { 1 } else { s[d + s.len() - rank] };
    (0..rank)
        .map(|d| match (size(a, d), size(b, d)) {
            (x, y) if x == y => Some(x),
            (1, y) => Some(y),
            (x, 1) => Some(x),
            _ => None,
        })
        .collect()
}

impl Value {
    pub fn new(shape: &[usize], list: Vec<f64>) -> Value {
        Value { at: (0..list.len()).collect(), list: Rc::new(RefCell::new(list)), shape: shape.to_vec() }
    }

    pub fn read(&self) -> Vec<f64> {
        let list = self.list.borrow();
        self.at.iter().map(|&i| list[i]).collect()
    }

    /// Sets the element at row-major index k to `f(k)`, for each k.
    pub fn write(&self, f: impl Fn(usize) -> f64) {
        let mut list = self.list.borrow_mut();
        self.at.iter().enumerate().for_each(|(k, &i)| list[i] = f(k));
    }

    /// Copies the elements to a new list.
    pub fn copied(&self) -> Value {
        Value::new(&self.shape, self.read())
    }

    pub fn map(&self, f: impl Fn(f64) -> f64) -> Value {
        Value::new(&self.shape, self.read().into_iter().map(f).collect())
    }

    pub fn zip(a: &Value, b: &Value, f: impl Fn(f64, f64) -> f64) -> Value {
        Value::new(&a.shape, a.read().into_iter().zip(b.read()).map(|(x, y)| f(x, y)).collect())
    }

    /// Whether the elements are consecutive in the list.
    pub fn in_order(&self) -> bool {
        self.at.windows(2).all(|two| two[1] == two[0] + 1)
    }

    /// Whether two elements have the same position in the list.
    pub fn repeats(&self) -> bool {
        let mut at = self.at.clone();
        at.sort_unstable();
        at.windows(2).any(|two| two[0] == two[1])
    }

    /// Returns a view of `shape` whose element at an index is this tensor's element at `source(index)`.
    fn view(&self, shape: Vec<usize>, source: impl Fn(&[usize]) -> Vec<usize>) -> Value {
        let at = indexes(&shape).iter().map(|index| self.at[place(&self.shape, &source(index))]).collect();
        Value { list: self.list.clone(), at, shape }
    }

    pub fn transpose(&self, a: usize, b: usize) -> Value {
        let mut shape = self.shape.clone();
        shape.swap(a, b);
        self.view(shape, |index| {
            let mut index = index.to_vec();
            index.swap(a, b);
            index
        })
    }

    /// Returns a view of the indices `picked` of dim d.
    pub fn pick(&self, d: usize, picked: &[usize]) -> Value {
        let mut shape = self.shape.clone();
        shape[d] = picked.len();
        self.view(shape, |index| {
            let mut index = index.to_vec();
            index[d] = picked[index[d]];
            index
        })
    }

    pub fn squeeze(&self, d: usize) -> Value {
        let mut value = self.clone();
        value.shape.remove(d);
        value
    }

    pub fn unsqueeze(&self, d: usize) -> Value {
        let mut value = self.clone();
        value.shape.insert(d, 1);
        value
    }

    pub fn expand(&self, shape: &[usize]) -> Value {
        let front = shape.len() - self.shape.len();
        self.view(shape.to_vec(), |index| {
            index[front..].iter().zip(&self.shape).map(|(&i, &d)| if d == 1 { 0 } else { i }).collect()
        })
    }

    /// Reduces the dims `dims` with `f`.
    pub fn fold(&self, dims: &[usize], keepdim: bool, f: impl Fn(&[f64]) -> f64) -> Value {
        let mut shape = self.shape.clone();
        dims.iter().for_each(|&d| shape[d] = 1);
        let mut lists = vec![Vec::new(); shape.iter().product()];
        for (index, x) in indexes(&self.shape).iter().zip(self.read()) {
            let mut to = index.clone();
            dims.iter().for_each(|&d| to[d] = 0);
            lists[place(&shape, &to)].push(x);
        }
        let folded = lists.iter().map(|list| f(list)).collect();
        if !keepdim {
            shape = (0..shape.len()).filter(|d| !dims.contains(d)).map(|d| shape[d]).collect();
        }
        Value::new(&shape, folded)
    }
}
