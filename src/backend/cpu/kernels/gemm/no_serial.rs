//! Replaces `serial.rs` on processors without kernels of this crate: [`SerialGemm`] has no value, so convolutions use other products.

use crate::backend::cpu::kernels::gemm::Floats;
use crate::device::cpu::blocks::Block;

#[derive(Clone, Copy)]
pub(crate) enum SerialGemm {}

#[allow(dead_code)] // read by kernels only
pub(crate) enum LeftMatrix<'a> {
    Panels(&'a [f32]),
    Rows { data: &'a [f32], stride: usize },
    Halves { data: &'a [u16], stride: usize },
}

#[allow(dead_code)] // read by kernels only
pub(crate) struct RightMatrix<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) times: usize,
    pub(crate) jump: usize,
}

impl SerialGemm {
    pub(crate) fn for_f32() -> Option<SerialGemm> {
        None
    }

    pub(crate) fn for_pairs(_k: usize) -> Option<SerialGemm> {
        None
    }

    pub(crate) fn elements_per_step(self) -> usize {
        match self {}
    }

    pub(crate) fn round_steps(self, _most: usize) -> usize {
        match self {}
    }

    pub(crate) fn panel_strides(self, _rows: usize, _steps: usize) -> [usize; 2] {
        match self {}
    }

    pub(crate) fn panel_rows(self, _m: usize) -> usize {
        match self {}
    }

    pub(crate) fn tile_columns(self) -> usize {
        match self {}
    }

    pub(crate) fn padded_width(self, _n: usize) -> usize {
        match self {}
    }

    pub(crate) fn packed_len(self, _n: usize, _count: usize) -> usize {
        match self {}
    }

    pub(crate) fn multiply(
        self,
        _: (usize, usize, usize),
        _: LeftMatrix,
        _: RightMatrix,
        _: &mut Block<f32>,
        _add: bool,
    ) {
        match self {}
    }

    pub(crate) fn pack_columns(self, _: Floats, _: (usize, usize), _: (usize, usize), _to: &mut [f32]) {
        match self {}
    }
}
