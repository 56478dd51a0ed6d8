use half::{bf16, f16};

use super::integers::{Integer, Widen};
use super::*;

const fn place(offset: usize, row: isize, col: isize) -> MatrixLayout {
    MatrixLayout { offset, row, col }
}

#[test]
fn matrices_beyond_their_slices_are_refused() {
    let (a, b) = ([1f32; 6], [1f32; 6]);
    let mut out = [0f32; 4];
    let mut try_with = |o, pa, pb| gemm((2, 2, 3), (&mut out, o), (&a, pa), (&b, pb));
    let (o, pa, pb) = (place(0, 2, 1), place(0, 3, 1), place(0, 2, 1));
    assert!(try_with(o, pa, pb).is_ok());
    assert!(try_with(o, place(1, 3, 1), pb).is_err(), "one past the end");
    assert!(try_with(o, place(2, 3, -1), pb).is_ok(), "flipped");
    assert!(try_with(o, place(1, 3, -1), pb).is_err(), "one before the start");
    assert!(try_with(o, pa, place(0, isize::MAX, 1)).is_err(), "overflow");
    assert!(try_with(place(0, 1, 1), pa, pb).is_err(), "elements that coincide");
    assert!(try_with(place(0, 0, 1), pa, pb).is_err(), "a broadcast result");
    assert!(try_with(place(0, 1, 2), pa, pb).is_ok(), "transposed");
}

/// Checks every layout of every operand, at sizes around tiles, blocks and vectors of all kernels, on one thread and on all threads.
#[test]
fn products_match_f64() {
    let number = |i: usize| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5;
    let sizes = [
        (8, 8, 8),
        (9, 17, 11),
        (13, 33, 8),
        (24, 31, 16),
        (10, 128, 300),
        (65, 100, 90),
        (128, 8, 513),
        (100, 65, 2051),
        (47, 1100, 1030),
        (1040, 9, 1024),
        (25, 40, 4103),
        (20, 48, 600),
        (300, 272, 1000),
        (1040, 96, 850),
        (300, 272, 1024),
        (100, 65, 2080),
        (33, 47, 4160),
        (8, 16, 32),
        (1, 1, 1),
        (1, 4163, 20),
        (2, 33, 131),
        (3, 40, 8),
        (7, 1203, 17),
        (5, 1, 100),
        (70, 2, 41),
        (900, 6, 1030),
    ];
    for (m, n, k) in sizes {
        let x: Vec<f32> = (0..3 + m * k).map(number).collect();
        let y: Vec<f32> = (0..5 + k * n).map(|i| number(i + 71)).collect();
        for layout in 0..8 {
            let place = |bit: usize, offset: usize, rows: usize, cols: usize| match layout >> bit & 1 {
                0 => place(offset, cols as isize, 1),
                _ => place(offset, 1, rows as isize),
            };
            let (a, b, c) = (place(0, 3, m, k), place(1, 5, k, n), place(2, 7, m, n));
            let at = |p: MatrixLayout, i: usize, j: usize| {
                (p.offset as isize + i as isize * p.row + j as isize * p.col) as usize
            };
            let halves: Vec<f16> = y.iter().map(|&y| f16::from_f32(y)).collect();
            let [x_bf16, y_bf16] = [&x, &y].map(|x| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<bf16>>());
            let forms = [
                (Floats::F32(&x), Floats::F32(&y)),
                (Floats::BF16(&x_bf16), Floats::F16(&halves)),
                (Floats::BF16(&x_bf16), Floats::BF16(&y_bf16)),
            ];
            for (form, (left, right)) in forms.into_iter().enumerate() {
                let mut out = vec![f32::NAN; 7 + m * n];
                gemm_f32((m, n, k), &mut out, left, right, std::iter::once([a, b, c])).unwrap();
                assert!(out[..7].iter().all(|x| x.is_nan()), "written before the result");
                if layout & 4 == 0 && supports_pieces((m, n, k)) {
                    in_pieces_it_is_the_same((m, n, k), &out[7..], (left, a), (right, b));
                }
                let (left, right) = (left.widened(), right.widened());
                for i in (0..m).step_by(1 + m / 40) {
                    for j in (0..n).step_by(1 + n / 40) {
                        let product = |p| f64::from(left[at(a, i, p)]) * f64::from(right[at(b, p, j)]);
                        let (want, got) = ((0..k).map(product).sum::<f64>(), f64::from(out[at(c, i, j)]));
                        let error = (got - want).abs();
                        assert!(
                            error <= 1e-6 * k as f64,
                            "{m} x {k} x {n}, {layout}, {form}: ({i}, {j}) is {got}, not {want}"
                        );
                    }
                }
                assert!(out[7..].iter().all(|x| x.is_finite()), "{m} x {k} x {n}: an element was not written");
            }
        }
    }
}

/// The error of long sums is at most half of the error of products that are added one by one.
#[test]
fn long_sums_are_added_in_blocks() {
    let (n, k) = (40, 8192);
    let hash = |i: usize| (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let made = |seed: usize, count: usize| -> Vec<f32> {
        let scrambled = (0..count).map(|i| hash(hash(seed + i) as usize >> 20) >> 40);
        scrambled.map(|x| x as f32 / (1 << 23) as f32 - 1.0).collect()
    };
    for m in [1, 4, 7, 30] {
        let (x, y) = (made(0, m * k), made(1 << 30, k * n));
        for b in [place(0, n as isize, 1), place(0, 1, k as isize)] {
            let mut out = vec![f32::NAN; m * n];
            let layouts = [place(0, k as isize, 1), b, place(0, n as isize, 1)];
            gemm_f32((m, n, k), &mut out, Floats::F32(&x), Floats::F32(&y), std::iter::once(layouts)).unwrap();
            let [mut error, mut one_by_one] = [0.0; 2];
            for (e, &got) in out.iter().enumerate() {
                let pairs = (0..k).map(|p| (x[e / n * k + p], y[b.index_of(p, e % n)]));
                let want: f64 = pairs.clone().map(|(x, y)| f64::from(x) * f64::from(y)).sum();
                error += (f64::from(got) - want).powi(2);
                one_by_one += (f64::from(pairs.fold(0.0, |sum: f32, (x, y)| x.mul_add(y, sum))) - want).powi(2);
            }
            assert!(4.0 * error <= one_by_one, "{m} x {k} x {n}, columns {}: {error:e}, {one_by_one:e}", b.col);
        }
    }
}

fn in_pieces_it_is_the_same(
    size: (usize, usize, usize),
    whole: &[f32],
    a: (Floats, MatrixLayout),
    b: (Floats, MatrixLayout),
) {
    let mut outs = [vec![f32::NAN; whole.len()], vec![f32::NAN; whole.len()]];
    let layouts = [[a.1, b.1, place(0, size.1 as isize, 1)]];
    gemm_into(size, &mut outs.each_mut().map(|out| &mut out[..]), (a.0, b.0), &layouts, |first, product, outs| {
        outs[0].copy_from_slice(product);
        outs[1].iter_mut().enumerate().for_each(|(i, number)| *number = (first + i) as f32);
    })
    .unwrap();
    assert!(outs[0] == whole, "{size:?} in pieces");
    assert!(outs[1].iter().enumerate().all(|(i, &number)| number == i as f32), "{size:?}: the numbers of elements");
    let short = gemm_into(size, &mut [&mut outs[0][1..]], (a.0, b.0), &layouts, |_, _, _| ());
    assert!(short.is_err(), "a result that is too short");
}

#[test]
fn partitions_prefer_pieces_of_whole_tiles() {
    let cut = |threads, size: (usize, usize)| partition_for(threads, size, size.0, |_| size.1);
    assert_eq!(cut(2, (1024, 784)), (2, 1));
    assert_eq!(cut(2, (64, 784)), (1, 2));
    assert_eq!(cut(16, (1024, 1024)), (4, 4));
    assert_eq!(cut(16, (64, 64)), (4, 4), "less wide than a tile");
    assert_eq!(cut(16, (8, 4096)), (1, 16));
}

/// The epilogue is applied exactly once, after the last step along k, for any k and for tiles of every width.
#[test]
fn epilogues_are_applied_once() {
    let number = |i: usize| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5;
    for (m, n, k) in [(8, 8, 8), (13, 33, 1030), (47, 110, 5000), (300, 49, 2500), (47, 110, 4128), (75, 49, 96)] {
        let (x, y): (Vec<f32>, Vec<f32>) = ((0..m * k).map(number).collect(), (0..k * n).map(number).collect());
        let x_bf16: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        let y_bf16: Vec<bf16> = y.iter().map(|&y| bf16::from_f32(y)).collect();
        let (row, each): (Vec<f32>, Vec<f32>) = ((0..n).map(number).collect(), (3..3 + m * n).map(number).collect());
        let (a, b) = (place(0, k as isize, 1), place(0, n as isize, 1));
        for (left, right) in [(Floats::F32(&x), Floats::F32(&y)), (Floats::BF16(&x_bf16), Floats::BF16(&y_bf16))] {
            let mut plain = vec![f32::NAN; m * n];
            gemm_f32((m, n, k), &mut plain, left, right, std::iter::once([a, b, b])).unwrap();
            let finishes =
                [KernelEpilogue::Add(&row[..]), KernelEpilogue::AddRelu(&row), KernelEpilogue::ReluGrad(&each)];
            for (kind, finish) in finishes.into_iter().enumerate() {
                let mut out = vec![f32::NAN; m * n];
                if !gemm_with_epilogue((m, n, k), &mut out, (left, a), (right, b), finish).unwrap() {
                    continue; // there are no kernels for this processor
                }
                for (i, (&got, &sum)) in out.iter().zip(&plain).enumerate() {
                    let want = match kind {
                        0 => sum + row[i % n],
                        1 => (sum + row[i % n]).max(0.0),
                        _ => sum * f32::from(each[i] > 0.0),
                    };
                    assert!(got == want, "{m} x {k} x {n}, {kind}: {i} is {got}, not {want}");
                }
            }
            let mut out = vec![0.0; m * n];
            let short = gemm_with_epilogue((m, n, k), &mut out, (left, a), (right, b), KernelEpilogue::Add(&row[1..]));
            assert!(short.is_err() || matches!(short, Ok(false)), "a row that is too short");
        }
    }
}

/// The row sums of the left matrix are correct whether they precede or follow the product in memory, and whether the left matrix is
/// packed or read in place.
#[test]
fn row_sums_are_computed_with_the_product() {
    let number = |i: usize| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5;
    for (m, n, k) in [(8, 8, 8), (10, 128, 1024), (13, 33, 1030), (47, 1100, 2100), (300, 272, 1000)] {
        let x: Vec<f32> = (0..m * k).map(number).collect();
        let y: Vec<f32> = (0..k * n).map(|i| number(i + 71)).collect();
        let (a, b) = (Floats::F32(&x), Floats::F32(&y));
        for (transposed, [sums, first]) in
            [(true, [0, m + 3]), (true, [m * n + 3, 3]), (false, [0, m + 3]), (true, [4, 3])]
        {
            let at = if transposed { place(0, 1, m as isize) } else { place(0, k as isize, 1) };
            let places = [at, place(0, n as isize, 1), place(first, n as isize, 1)];
            let mut out = vec![f32::NAN; m * n + m + 3];
            let made = gemm_with_row_sums((m, n, k), &mut out, (a, b), places, sums).unwrap();
            let mut alone = vec![f32::NAN; out.len()];
            gemm_f32((m, n, k), &mut alone, a, b, std::iter::once(places)).unwrap();
            assert!(out[first..first + m * n] == alone[first..first + m * n], "{m} x {k} x {n}");
            assert_eq!(made, transposed && sums != 4 && supports_pieces((8, 8, 8)), "{m} x {k} x {n}");
            for i in 0..m {
                let want: f64 = (0..k).map(|p| f64::from(x[i * at.row as usize + p * at.col as usize])).sum();
                match made {
                    true => assert!((f64::from(out[sums + i]) - want).abs() <= 1e-6 * k as f64, "{m} x {k}: sum {i}"),
                    false => assert_eq!(out[sums + i].to_bits(), alone[sums + i].to_bits(), "{m} x {k}: {i}"),
                }
            }
        }
    }
}

/// bf16 matrices with strides of every kind and sign, read in place or packed.
#[test]
fn bf16_products_with_any_strides_match_f64() {
    let number = |i: usize| bf16::from_f32(((i * 7919) % 1009) as f32 / 1009.0 - 0.5);
    for (m, n, k) in [(29, 43), (3, 43), (29, 1)].into_iter().flat_map(|(m, n)| [8, 9, 64, 77].map(|k| (m, n, k))) {
        let x: Vec<bf16> = (0..4 * 80 * 80).map(number).collect();
        let strides = [(81, 1), (-81, 1), (79, -1), (160, 2), (2, 161), (-1, 80), (1, -79), (0, 1), (1, 0)];
        for (a, b) in strides.into_iter().flat_map(|a| strides.map(|b| (a, b))) {
            // The smallest offset for which no element comes before the slice when strides are negative.
            let of = |(row, col): (isize, isize), rows: usize, cols: usize| {
                let before = (-row).max(0) as usize * (rows - 1) + (-col).max(0) as usize * (cols - 1);
                place(before, row, col)
            };
            let (a, b) = (of(a, m, k), of(b, k, n));
            let mut out = vec![f32::NAN; m * n];
            let places = std::iter::once([a, b, place(0, n as isize, 1)]);
            gemm_f32((m, n, k), &mut out, Floats::BF16(&x), Floats::BF16(&x), places).unwrap();
            let at = |p: MatrixLayout, i: usize, j: usize| {
                f64::from(x[(p.offset as isize + i as isize * p.row + j as isize * p.col) as usize])
            };
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let want: f64 = (0..k).map(|p| at(a, i, p) * at(b, p, j)).sum();
                assert!((f64::from(out[i * n + j]) - want).abs() <= 1e-6 * k as f64, "{a:?} {b:?} {k}: ({i}, {j})");
            }
        }
    }
}

/// Infinities and NaN affect only their own rows and columns of the result: the padding of the last pair and the last tile must not
/// spread them. Subnormal numbers may be treated as zeros.
#[test]
fn special_bf16_values_affect_only_their_elements() {
    let sizes = [(13, 35), (7, 35), (1, 70), (35, 3)];
    let cases = sizes.into_iter().flat_map(|(m, n)| [8, 9, 64, 1027].map(|k| (m, n, k)));
    for ((m, n, k), transposed) in cases.flat_map(|size| [(size, false), (size, true)]) {
        let mut a = vec![bf16::ONE; m * k];
        let mut b = vec![bf16::from_f32(2.0); k * n];
        let at_a = |i: usize, p: usize| if transposed { p * m + i } else { i * k + p };
        let at_b = |p: usize, j: usize| if transposed { j * k + p } else { p * n + j };
        a[at_a(2 % m, k - 1)] = bf16::INFINITY;
        a[at_a(5 % m, 0)] = bf16::NAN;
        a[at_a(7 % m, k - 2)] = bf16::NEG_INFINITY;
        a[at_a(7 % m, 1)] = bf16::INFINITY;
        b[at_b(k - 1, n - 1)] = bf16::ZERO;
        b[at_b(3, 4 % n)] = bf16::NEG_INFINITY;
        a[at_a(12 % m, 3)] = bf16::ZERO;
        let places = match transposed {
            false => [place(0, k as isize, 1), place(0, n as isize, 1), place(0, n as isize, 1)],
            true => [place(0, 1, m as isize), place(0, 1, k as isize), place(0, n as isize, 1)],
        };
        let mut out = vec![0f32; m * n];
        let size = (m, n, k);
        gemm_f32(size, &mut out, Floats::BF16(&a), Floats::BF16(&b), std::iter::once(places)).unwrap();
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let want: f64 = (0..k).map(|p| f64::from(a[at_a(i, p)]) * f64::from(b[at_b(p, j)])).sum();
            let got = f64::from(out[i * n + j]);
            assert!(
                got == want || (got.is_nan() && want.is_nan()),
                "{k} {transposed}: ({i}, {j}) is {got}, not {want}"
            );
        }
        let small = f32::from_bits(0x0040_0000);
        let scale = 2f32.powi(120);
        a.fill(bf16::from_f32(small));
        b.fill(bf16::from_f32(scale));
        gemm_f32(size, &mut out, Floats::BF16(&a), Floats::BF16(&b), std::iter::once(places)).unwrap();
        assert!(out.iter().all(|&x| x == 0.0 || x == k as f32 * small * scale), "{k} {transposed}: {}", out[0]);
    }
}

#[test]
fn products_in_one_slice_use_their_offsets() {
    let x: Vec<f32> = (0..2 * 64).map(|i| i as f32).collect();
    let mut out = vec![0f32; 2 * 64];
    // These 8 x 8 products have a scaled identity as one operand.
    let one: Vec<f32> = (0..64).map(|i| if i % 9 == 0 { 3.0 } else { 0.0 }).collect();
    let places = [0, 64].map(|at| [place(at, 8, 1), place(0, 8, 1), place(64 - at, 8, 1)]);
    gemm_f32((8, 8, 8), &mut out, Floats::F32(&x), Floats::F32(&one), places.into_iter()).unwrap();
    assert!((0..64).all(|i| out[64 + i] == 3.0 * x[i] && out[i] == 3.0 * x[64 + i]));
    let wrong = [[place(65, 8, 1), place(0, 8, 1), place(0, 8, 1)]];
    assert!(gemm_f32((8, 8, 8), &mut out, Floats::F32(&x), Floats::F32(&one), wrong.into_iter()).is_err());
}

#[test]
fn pieces_cover_the_result() {
    for n in [1, 7, 8, 9, 100, 1024] {
        for pieces in 1..9 {
            assert_eq!((piece_start(n, pieces, 0), piece_start(n, pieces, pieces)), (0, n));
            assert!((0..pieces).all(|i| piece_start(n, pieces, i) <= piece_start(n, pieces, i + 1)));
        }
    }
}

#[test]
fn an_empty_sum_is_zero() {
    let mut out = [7f64; 6];
    gemm((2, 2, 0), (&mut out, place(0, 3, 1)), (&[], place(0, 0, 1)), (&[], place(0, 2, 1))).unwrap();
    assert_eq!(out, [0.0, 0.0, 7.0, 0.0, 0.0, 7.0]);
}

/// Left matrices given as rows of f32, as rows of bf16 and as panels, at sizes around tiles, vectors and pairs.
#[test]
#[cfg(target_arch = "x86_64")]
fn single_threaded_products_match_f64() {
    use crate::device::cpu::blocks::Block;
    use serial::{LeftMatrix, RightMatrix, SerialGemm};

    let kernels = [SerialGemm::for_f32(), SerialGemm::for_pairs(8), SerialGemm::for_pairs(64)];
    for kernels in kernels.into_iter().flatten() {
        let high = kernels.panel_rows(usize::MAX);
        let (steps, wide) = (kernels.elements_per_step(), kernels.tile_columns());
        let columns = [1, wide / 2 - 1, wide / 2, wide / 2 + 1, wide - 1, wide, wide + 1, 97];
        let sizes = [1, high - 1, high, high + 1, 37].into_iter().flat_map(|m| columns.map(|n| (m, n)));
        for ((m, n), count) in sizes.flat_map(|size| [1, 2, 3, 17, 64, 75].map(|count| (size, count))) {
            let number = |i: usize| bf16::from_f32(((i * 7919) % 1009) as f32 / 1009.0 - 0.5);
            let mut x: Vec<bf16> = (0..m * count).map(number).collect();
            let mut y: Vec<bf16> = (0..n * count).map(|i| number(i + 5)).collect();
            let last = x.len() - 1;
            (x[last], x[0], y[n / 2 * count]) = (bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY);
            let k = count.div_ceil(steps);
            let bits = |i: usize, p: usize| {
                let at = |p: usize| if p < count { u32::from(x[i * count + p].to_bits()) } else { 0 };
                f32::from_bits(if steps == 2 { at(2 * p) | at(2 * p + 1) << 16 } else { at(p) << 16 })
            };
            let rows = kernels.panel_rows(m);
            let mut panels = vec![f32::NAN; m * k];
            for (i, p) in (0..m).flat_map(|i| (0..k).map(move |p| (i, p))) {
                let first = i / rows * rows;
                let [across, along] = kernels.panel_strides(rows.min(m - first), k);
                panels[first * k + (i - first) * across + p * along] = bits(i, p);
            }
            let in_rows: Vec<f32> = (0..m).flat_map(|i| (0..k).map(move |p| (i, p))).map(|(i, p)| bits(i, p)).collect();
            let mut right =
                vec![f32::NAN; kernels.packed_len(n, count).max(kernels.packed_len(wide, count)) * n.div_ceil(wide)];
            let of_panel = right.len() / n.div_ceil(wide);
            for (panel, to) in right.chunks_exact_mut(of_panel).enumerate() {
                let n = wide.min(n - panel * wide);
                kernels.pack_columns(Floats::BF16(&y), (panel * wide * count, count), (n, count), to);
            }
            for (left, add) in [
                (LeftMatrix::Panels(&panels[..]), false),
                (LeftMatrix::Rows { data: &in_rows, stride: k }, true),
                (LeftMatrix::Halves { data: bytemuck::cast_slice(&x), stride: count }, false),
            ] {
                if matches!(left, LeftMatrix::Halves { .. }) && (steps == 1 || count % 2 > 0) {
                    continue;
                }
                let mut out = vec![0.5f32; m * n];
                for (panel, data) in right.chunks_exact(of_panel).enumerate() {
                    let (first, wide) = (panel * wide, wide.min(n - panel * wide));
                    let right = RightMatrix { data, stride: kernels.padded_width(wide), times: 1, jump: 0 };
                    let to = &mut Block::new(&mut out[first..], m, wide, n);
                    kernels.multiply((m, wide, k), left, right, to, add);
                }
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let products = (0..count).map(|p| f64::from(x[i * count + p]) * f64::from(y[j * count + p]));
                    let (got, want) = (f64::from(out[i * n + j]), products.sum::<f64>() + if add { 0.5 } else { 0.0 });
                    let same = got == want || (got.is_nan() && want.is_nan()) || (got - want).abs() <= 1e-5;
                    assert!(same, "{m} x {count} x {n}, {steps}: ({i}, {j}) is {got}, not {want}");
                }
            }
        }
    }
}

/// Matrices include one with gaps, one with negative strides, and one with more steps along k than are packed at a time.
#[test]
fn integer_products_wrap() {
    fn check<E: Widen<D::Sum> + Into<i64>, D: Integer + PartialEq + std::fmt::Debug>(of: impl Fn(i64) -> (E, D)) {
        for (m, n, k) in [(1, 1, 0), (3, 300, 4), (40, 3, 3), (9, 270, 261), (1, 7, 9000), (500, 2, 40), (8, 8, 33)] {
            let layouts = |rows: usize, columns: usize| {
                let last = rows.max(1) * columns.max(1) - 1;
                [
                    place(0, columns as isize, 1),
                    place(1, 1, rows as isize),
                    place(2, 2 * columns as isize + 3, 2),
                    place(last, -(columns as isize), -1),
                ]
            };
            let numbers = |n: usize, seed: usize| -> Vec<E> {
                (0..n).map(|i| of((((i + seed) * 2_654_435_761) >> 7) as i64).0).collect()
            };
            let room = |rows: usize, columns: usize| rows.max(1) * (2 * columns + 3) + 3;
            let (x, y) = (numbers(room(m, k), 1), numbers(room(k, n), 5));
            for (l, a) in layouts(m, k).into_iter().enumerate() {
                for b in layouts(k, n) {
                    let c = layouts(m, n)[l % 3];
                    let mut out = vec![of(77).1; room(m, n)];
                    gemm_integers((m, n, k), &mut out, &x, &y, std::iter::once([a, b, c])).unwrap();
                    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                        let products =
                            (0..k).map(|p| x[a.index_of(i, p)].into().wrapping_mul(y[b.index_of(p, j)].into()));
                        let want = of(products.fold(0, i64::wrapping_add)).1;
                        assert_eq!(out[c.index_of(i, j)], want, "{m} x {k} x {n}, {a:?} {b:?} {c:?}: ({i}, {j})");
                    }
                    let written = out.iter().filter(|&&x| x != of(77).1).count();
                    assert!(written <= m * n, "{m} x {k} x {n}: written outside");
                }
            }
        }
    }
    check::<u8, u8>(|x| (x as u8, x as u8));
    check::<u8, i64>(|x| (x as u8, x));
    check::<i32, i32>(|x| (x as i32, x as i32));
    check::<u32, u32>(|x| (x as u32, x as u32));
    check::<i64, i64>(|x| (x << 30, x));
}

/// Neither rows nor columns are contiguous, or k is small: no kernel reads such halves directly, so they are widened to f32.
#[test]
fn halves_without_a_kernel_are_widened_in_tiles() {
    let number = |i: usize| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5;
    for ((m, n, k), a, b) in [
        ((3, 9, 300_000), place(1, 2, 3), place(0, 3, 2)),
        ((70_000, 9, 4), place(3, 9, 2), place(0, 9, 1)),
        ((70_000, 9, 4), place(0, 4, 1), place(35, -9, -1)),
        ((9, 70_000, 5), place(0, 1, 9), place(2, 1, 70_000)),
    ] {
        let room = |p: MatrixLayout, rows: usize, columns: usize| {
            p.offset + rows * p.row.unsigned_abs() + columns * p.col.unsigned_abs() + 1
        };
        let x: Vec<f16> = (0..room(a, m, k)).map(|i| f16::from_f32(number(i))).collect();
        let y: Vec<bf16> = (0..room(b, k, n)).map(|i| bf16::from_f32(number(i))).collect();
        let (mut out, c) = (vec![f32::NAN; m * n], place(0, n as isize, 1));
        gemm_f32((m, n, k), &mut out, Floats::F16(&x), Floats::BF16(&y), std::iter::once([a, b, c])).unwrap();
        for i in (0..m).step_by(1 + m / 17) {
            for j in (0..n).step_by(1 + n / 7) {
                let product = |p| f64::from(x[a.index_of(i, p)]) * f64::from(y[b.index_of(p, j)]);
                let (want, got) = ((0..k).map(product).sum::<f64>(), f64::from(out[c.index_of(i, j)]));
                assert!((got - want).abs() <= 1e-6 * k as f64, "{m} x {k} x {n}: ({i}, {j}) is {got}, not {want}");
            }
        }
    }
}
