//! Elementwise launches as they were prepared before: a thread's next launch of the same formula over operands that lie in
//! the same way is looked up, not worked out again.

use std::cell::RefCell;
use std::rc::Rc;

use smallvec::SmallVec;

use super::expr::Expr;
use super::opencl_map::Prepared;
use crate::tensor::Layout;
use crate::{DType, Device, Tensor};

/// Places of a thread's table. A launch has one place it can be in.
const PLACES: usize = 256;

/// A launch, by everything that was looked at to prepare it: of operands, all but where their storages are.
struct Memo {
    device: Device,
    exprs: SmallVec<[Expr; 2]>,
    /// Inputs, then outputs.
    operands: SmallVec<[(DType, Layout); 4]>,
    /// Whether an output is an input, too.
    in_place: bool,
    prepared: Rc<Prepared>,
}

thread_local! {
    static TABLE: RefCell<Vec<Option<Memo>>> = const { RefCell::new(Vec::new()) };
}

fn place(exprs: &[Expr], inputs: &[&Tensor], outputs: &[&Tensor], in_place: bool) -> usize {
    let of = |hash: u64, t: &&Tensor| {
        let sizes = t.shape().dims().iter().zip(t.strides());
        sizes.fold(hash ^ t.dtype as u64, |h, (&n, &s)| {
            (h.rotate_left(9) ^ n as u64 ^ (s as u64) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        })
    };
    let hash = exprs.iter().fold(in_place.into(), |hash: u64, e| e.hash_value() ^ hash.rotate_left(7));
    (outputs.iter().fold(inputs.iter().fold(hash, of), of) >> 40) as usize % PLACES
}

/// Whether an output is a view of an input, too.
pub(super) fn in_place<'a>(mut inputs: impl Iterator<Item = &'a Tensor>, outputs: &[&Tensor]) -> bool {
    inputs.any(|t| outputs.iter().any(|out| t.shares_storage(out)))
}

/// What was prepared for a launch like this one. None as well where an input has to be copied first.
pub(super) fn find(device: Device, exprs: &[Expr], inputs: &[&Tensor], outputs: &[&Tensor]) -> Option<Rc<Prepared>> {
    let alike = |tensors: &[&Tensor], known: &[(DType, Layout)]| {
        let mut pairs = tensors.iter().zip(known);
        tensors.len() == known.len()
            && pairs.all(|(t, (dtype, layout))| t.dtype == *dtype && t.device() == device && t.layout == *layout)
    };
    let in_place = in_place(inputs.iter().copied(), outputs);
    // A storage that is read and written through different views is looked at anew.
    let clear = |t: &&Tensor| {
        outputs.iter().all(|out| !t.shares_storage(out) || (t.layout == out.layout && t.dtype == out.dtype))
    };
    let found = TABLE.try_with(|table| {
        let table = table.try_borrow().ok()?;
        let memo = table.get(place(exprs, inputs, outputs, in_place))?.as_ref()?;
        let (read, written) = memo.operands.split_at_checked(inputs.len())?;
        let same = (memo.device, memo.in_place) == (device, in_place)
            && memo.exprs[..] == *exprs
            && alike(inputs, read)
            && alike(outputs, written);
        same.then(|| Rc::clone(&memo.prepared))
    });
    found.ok().flatten().filter(|_| !in_place || inputs.iter().all(clear))
}

/// Remembers a launch of which no input was copied, in place of one that may have been there.
pub(super) fn keep(device: Device, exprs: &[Expr], inputs: &[&Tensor], outputs: &[&Tensor], prepared: Prepared) {
    let operands = inputs.iter().chain(outputs).map(|t| (t.dtype, t.layout.clone())).collect();
    let in_place = in_place(inputs.iter().copied(), outputs);
    let prepared = Rc::new(prepared);
    let memo = Memo { device, exprs: exprs.iter().cloned().collect(), operands, in_place, prepared };
    let _ = TABLE.try_with(|table| {
        if let Ok(mut table) = table.try_borrow_mut() {
            if table.is_empty() {
                table.resize_with(PLACES, || None);
            }
            table[place(exprs, inputs, outputs, in_place)] = Some(memo);
        }
    });
}

/// Forgets this thread's launches: a parameter that they were prepared with has changed.
pub(crate) fn forget() {
    let _ = TABLE.try_with(|table| table.try_borrow_mut().map(|mut table| table.clear()));
}
