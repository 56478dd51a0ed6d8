//! Stands in for `alone.rs` on processors without kernels of this crate: [`Alone`] has no value, so convolutions use products.

use crate::device::cpu::blocks::Block;
use crate::device::cpu::gemm::Floats;

/// Kernels that do not exist.
#[derive(Clone, Copy)]
pub(crate) enum Alone {}

/// The left matrix of a product.
#[allow(dead_code)] // read by kernels only
pub(crate) enum Left<'a> {
    Panels(&'a [f32]),
    Rows { data: &'a [f32], stride: usize },
    Halves { data: &'a [u16], stride: usize },
}

/// The right matrix of a product.
#[allow(dead_code)] // read by kernels only
pub(crate) struct Right<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) times: usize,
    pub(crate) jump: usize,
}

impl Alone {
    pub(crate) fn get() -> Option<Alone> {
        None
    }

    pub(crate) fn of_pairs(_k: usize) -> Option<Alone> {
        None
    }

    pub(crate) fn of_step(self) -> usize {
        match self {}
    }

    pub(crate) fn whole_steps(self, _most: usize) -> usize {
        match self {}
    }

    pub(crate) fn panel(self, _rows: usize, _steps: usize) -> [usize; 2] {
        match self {}
    }

    pub(crate) fn rows(self, _m: usize) -> usize {
        match self {}
    }

    pub(crate) fn columns(self) -> usize {
        match self {}
    }

    pub(crate) fn whole(self, _n: usize) -> usize {
        match self {}
    }

    pub(crate) fn room(self, _n: usize, _count: usize) -> usize {
        match self {}
    }

    pub(crate) fn multiply(self, _: (usize, usize, usize), _: Left, _: Right, _: &mut Block<f32>, _add: bool) {
        match self {}
    }

    pub(crate) fn lay_out(self, _: Floats, _: (usize, usize), _: (usize, usize), _to: &mut [f32]) {
        match self {}
    }
}
