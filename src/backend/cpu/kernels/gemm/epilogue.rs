//! The epilogues that kernels apply in registers.

/// The epilogue of an `m` x `n` product, applied to its elements before they are written.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KernelEpilogue<S> {
    /// No epilogue.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Nothing,
    /// Adds a row of `n` elements to every row.
    Add(S),
    /// Adds a row of `n` elements to every row, then applies ReLU.
    AddRelu(S),
    /// Multiplies by the gradient of ReLU, given an operand of `m * n` elements: by 0 where the operand's element is at most 0, else by
    /// 1.
    ReluGrad(S),
}

#[cfg(target_arch = "x86_64")]
impl<S> KernelEpilogue<S> {
    /// Converts the operand: `row` converts a row of `n` elements, `elements` an operand of the result's size.
    pub(super) fn map<T>(self, row: impl FnOnce(S) -> T, elements: impl FnOnce(S) -> T) -> KernelEpilogue<T> {
        match self {
            KernelEpilogue::Nothing => KernelEpilogue::Nothing,
            KernelEpilogue::Add(x) => KernelEpilogue::Add(row(x)),
            KernelEpilogue::AddRelu(x) => KernelEpilogue::AddRelu(row(x)),
            KernelEpilogue::ReluGrad(x) => KernelEpilogue::ReluGrad(elements(x)),
        }
    }
}
