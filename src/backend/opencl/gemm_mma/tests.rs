use super::*;
use crate::Shape;
use crate::backend::opencl::kernels::hashed_values;
use crate::tensor::Layout;

const HOPPER: TensorCores = TensorCores { local: 200 << 10, wgmma: true };
const OTHER: TensorCores = TensorCores { local: 97 << 10, wgmma: false };

/// Returns the kernel that is chosen on 132 compute units for row-major matrices. Rows of the left matrix end with `pad` elements of
/// padding, and the left matrix begins at element `first` of its buffer.
fn choose([m, n, k]: [usize; 3], dtype: DType, pad: usize, first: usize, cores: TensorCores) -> Option<Mma> {
    let layout = |rows: usize, cols: usize, pad: usize| Layout {
        shape: Shape::from([rows, cols]),
        strides: [(cols + pad) as isize, 1].into_iter().collect(),
        offset: 0,
    };
    let (a, b, out) = (layout(m, k, pad), layout(k, n, 0), layout(m, n, 0));
    let plan = GemmPlan::new(&a, &b, &out.shape, &[&out]);
    let at = |first| BufferMatrix { dtype, first };
    Mma::choose(&plan, 3, at(first), at(0), (132, 256), || cores)
}

#[test]
fn choose_takes_the_largest_tile_that_occupies_the_device() {
    let tile = |sizes, dtype, cores| {
        let mma = choose(sizes, dtype, 0, 0, cores).unwrap();
        assert!(mma.local_memory() <= cores.local);
        (mma.tile.m, mma.tile.n, mma.tile.wgmma)
    };
    assert_eq!(tile([2048; 3], DType::F16, HOPPER), (128, 256, true));
    assert_eq!(tile([1024, 2048, 64], DType::BF16, HOPPER), (128, 128, true));
    assert_eq!(tile([2048; 3], DType::F32, HOPPER), (128, 128, true));
    assert_eq!(tile([1024; 3], DType::F32, HOPPER), (128, 64, true));
    assert_eq!(tile([512; 3], DType::F32, HOPPER), (128, 64, true));
    assert_eq!(tile([2048; 3], DType::F16, OTHER), (128, 128, false));
    assert_eq!(tile([2048; 3], DType::F32, OTHER), (128, 128, false));
}

#[test]
fn few_output_channels_get_tiles_for_few_rows() {
    let tile = |[m, n, k]: [usize; 3], dtype, cores| {
        let [a, b, out] = [[m, k], [k, n], [m, n]].map(|dims| Layout::contiguous(dims.into()));
        let plan = GemmPlan::new(&a, &b, &out.shape, &[&out]);
        let kind = (dtype, planes(dtype));
        let mma = Mma::choose_for_windows(&plan, kind, (WindowsOperand::Columns, true), (132, 256), || cores)?;
        assert!(mma.local_memory() <= cores.local && mma.a.along_k && mma.b.along_k);
        Some((mma.tile.m, mma.tile.n, mma.tile.wgmma))
    };
    assert_eq!(tile([64, 100_000, 576], DType::F16, HOPPER), Some((64, 128, true)));
    assert_eq!(tile([72, 100_000, 576], DType::BF16, HOPPER), Some((128, 256, true)));
    assert_eq!(tile([64, 100_000, 576], DType::F32, HOPPER), Some((64, 128, true)));
    assert_eq!(tile([64, 100_000, 576], DType::F16, OTHER), Some((64, 64, false)));
    assert_eq!(tile([7, 100_000, 576], DType::F16, HOPPER), None);
    assert_eq!(tile([64, 100_000, 24], DType::F16, HOPPER), None);
    assert_eq!(tile([64, 100_000, 576], DType::F64, HOPPER), None);
    assert_eq!(tile([64, 100_000, 576], DType::F16, TensorCores::default()), None);
}

#[test]
fn windows_on_the_left_get_narrow_tiles() {
    let tile = |[m, n, k]: [usize; 3], dtype, cores| {
        let [a, b, out] = [[m, k], [k, n], [m, n]].map(|dims| Layout::contiguous(dims.into()));
        let plan = GemmPlan::new(&a, &b, &out.shape, &[&out]);
        let kind = (dtype, planes(dtype));
        let mma = Mma::choose_for_windows(&plan, kind, (WindowsOperand::Left, false), (132, 256), || cores).unwrap();
        assert!(mma.a.along_k && !mma.b.along_k);
        (mma.tile.m, mma.tile.n, mma.tile.k)
    };
    assert_eq!(tile([100_000, 64, 576], DType::F16, HOPPER), (128, 64, 64));
    assert_eq!(tile([100_000, 256, 576], DType::F16, HOPPER), (128, 256, 64));
    assert_eq!(tile([100_000, 256, 64], DType::F16, HOPPER), (128, 128, 32));
    assert_eq!(tile([100_000, 64, 64], DType::BF16, HOPPER), (128, 64, 64));
    assert_eq!(tile([100_000, 64, 576], DType::F32, HOPPER), (128, 64, 32));
    assert_eq!(tile([100_000, 64, 576], DType::F16, OTHER), (64, 64, 64));
}

/// The weight gradient of a convolution of 64 images of 256 x 14 x 14 with 3 x 3 windows.
#[test]
fn weight_gradients_use_wgmma_and_split_k() {
    let [a, b, out] = [[256, 12_544], [12_544, 2304], [256, 2304]].map(|dims| Layout::contiguous(dims.into()));
    let plan = GemmPlan::new(&a, &b, &out.shape, &[&out]);
    for dtype in [DType::F16, DType::F32] {
        let kind = (dtype, planes(dtype));
        let mma = Mma::choose_for_windows(&plan, kind, (WindowsOperand::Rows, false), (132, 256), || HOPPER).unwrap();
        assert!(mma.tile.wgmma && mma.parts(&plan, 132).count > 1, "{:?}", mma.tile);
    }
}

#[test]
fn products_of_few_tiles_use_split_k() {
    let parts = |[m, n, k]: [usize; 3], dtype, cores| {
        let mma = choose([m, n, k], dtype, 0, 0, cores).unwrap();
        let (a, out) = (Layout::contiguous([m, k].into()), Layout::contiguous([m, n].into()));
        let b = Layout::contiguous([k, n].into());
        let (plan, k_of_tile) = (GemmPlan::new(&a, &b, &out.shape, &[&out]), mma.tile.k);
        let SplitK { count, depth } = mma.parts(&plan, 132);
        // The parts together cover k, no part is empty, and all parts but the last are whole slices.
        assert!((count - 1) * depth < k && k <= count * depth && depth.is_multiple_of(k_of_tile), "{count} of {depth}");
        assert!(count == 1 || mma.tile_count(&plan) <= SplitK::MAX_TILES);
        count
    };
    for cores in [HOPPER, OTHER] {
        for dtype in [DType::F32, DType::BF16] {
            assert_eq!(parts([4096; 3], dtype, cores), 1);
            assert_eq!(parts([4096, 4096, 128], dtype, cores), 1);
            assert!(parts([256, 784, 8192], dtype, cores) >= 3);
            assert!(parts([10, 128, 8192], dtype, cores) >= 16);
            assert!((128..2000).step_by(56).all(|k| parts([64, 64, k], dtype, cores) >= 1));
        }
    }
}

#[test]
fn tensor_cores_need_aligned_and_large_enough_matrices() {
    let copy = |dtype, pad, first| choose([256; 3], dtype, pad, first, HOPPER).map(|mma| mma.a.copy);
    assert_eq!([0, 8, 4, 2, 1].map(|pad| copy(DType::F16, pad, 0)), [Some(16), Some(16), Some(8), Some(4), None]);
    assert_eq!([0, 8, 4, 2, 1].map(|first| copy(DType::F32, 0, first)), [16, 16, 16, 8, 4].map(Some));
    for (sizes, dtype) in [([7, 256, 256], DType::F16), ([256, 256, 31], DType::BF16), ([256, 256, 63], DType::F32)] {
        assert_eq!(choose(sizes, dtype, 0, 0, HOPPER), None);
    }
    assert_eq!(choose([256; 3], DType::F64, 0, 0, HOPPER), None);
    assert_eq!(choose([256; 3], DType::F16, 0, 0, TensorCores::default()), None);
}

#[test]
fn mma_kernels_have_different_keys() {
    use WindowsOperand::{Columns, ColumnsApart, Left, LeftApart, Rows, RowsApart};
    let halves = [&HALF_TILES[..], &[SHALLOW_K_AND_TILE.1], &FEW_ROWS_TILES[0][..2]].map(|tiles| (tiles, 1)).to_vec();
    let single =
        vec![(&FEW_ROWS_TILES[1][..2], 3), (&F32_TILES, 2), (&F32_TILES, 3), (&FEW_ROWS_TILES[2][..3], 1), (&TF32, 1)];
    for (dtype, kernels) in [(DType::F16, halves), (DType::F32, single)] {
        let mut keys = Vec::new();
        for (tiles, planes) in kernels {
            let sides =
                [16, 8, 4].into_iter().flat_map(|copy| [true, false].map(|along_k| MatrixAccess { along_k, copy }));
            for (&tile, a) in tiles.iter().flat_map(|tile| sides.clone().map(move |side| (tile, side))) {
                let b = MatrixAccess { along_k: !a.along_k, copy: 16 };
                let of = |windows| hashed_values(&Mma { dtype, planes, tile, a, b, windows });
                let windows = [Left, LeftApart, Columns, ColumnsApart, Rows, RowsApart];
                keys.extend([None].into_iter().chain(windows.map(Some)).map(of));
            }
        }
        let count = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), count, "{dtype}");
    }
}
