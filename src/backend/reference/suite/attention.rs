//! Tests of attention, its gradients, and the sizes of the blocks into which it is divided.

use super::{Side, Suite, View, numbers};
use crate::backend::opencl::gemm::tests::PRETEND_GPU;
use crate::backend::problem::attention::{AttentionBackward, FusedAttention};
use crate::device::DeviceKind;
use crate::expr::philox::Seed;
use crate::{DType, Result};

/// The batch size, the number of heads that share keys, of queries and of keys, the width of keys and the width of values.
type Sizes = [usize; 6];

/// The parameters of a case, besides its sizes.
#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: DType,
    view: View,
    mask: Option<DType>,
    causal: bool,
    dropout: f64,
}

/// A case without mask and dropout.
const PLAIN: Case = Case { dtype: DType::F32, view: View::Plain, mask: None, causal: false, dropout: 0.0 };

/// Replaces no elements; see [`compare_case`].
const NONE: [Option<f64>; 2] = [None; 2];

/// Compares one case. `of_q` and `of_k`, if given, replace an element of the second query and of the second key. Scores are small, as in trained
/// networks: with large scores, the largest score of a row would get all the weight, so the other keys would not be tested.
fn compare_case(suite: &mut Suite, case: Case, sizes: Sizes, [of_q, of_k]: [Option<f64>; 2]) -> Result<()> {
    let ([batch, heads, queries, keys, width, value_width], Case { dtype, view, .. }) = (sizes, case);
    let (of_queries, of_keys) = ([2, batch, heads, queries], [2, batch, 1, keys]);
    let mut made = |of: &[usize], last: usize| suite.tensor(view, &[of, &[last]].concat(), dtype, |r| numbers(r) / 8.0);
    let (q, k, v) = (made(&of_queries, width)?, made(&of_keys, width)?, made(&of_keys, value_width)?);
    let grad = made(&of_queries, value_width)?;
    for (t, special) in [(&q, of_q), (&k, of_k)] {
        special.map(|special| t.narrow(3, 1, 1)?.narrow(4, 0, 1)?.fill_(special).map(drop)).transpose()?;
    }
    let hidden = |r: &mut _| if numbers(r) > 2.0 { f64::NEG_INFINITY } else { numbers(r) / 4.0 };
    let shown = |r: &mut _| f64::from(u8::from(numbers(r) > -5.0));
    let mask = match case.mask {
        Some(DType::Bool) => Some(suite.tensor(view, &[batch, 1, queries, keys], DType::Bool, shown)?),
        Some(dtype) => Some(suite.tensor(View::Odd, &[queries, keys], dtype, hidden)?),
        None => None,
    };
    let seed = Seed { key: 7, stream: 3 };
    let n = width.max(value_width).max(keys).max(heads * queries);
    suite.compare(format!("{sizes:?}, {case:?}, {of_q:?}, {of_k:?}"), dtype, n, |side: &Side| {
        let (q, k, v, grad) = (side.upload(&q)?, side.upload(&k)?, side.upload(&v)?, side.upload(&grad)?);
        let scores = [2, batch, heads, queries, keys];
        let mask = mask.as_ref().map(|mask| side.upload(mask)).transpose()?;
        let mask = mask.map(|mask| mask.with_layout(mask.layout.broadcast_to(&scores.into())));
        let a = FusedAttention {
            q: &q,
            k: &k,
            v: &v,
            mask: mask.as_ref(),
            causal: case.causal,
            scale: 0.5,
            dropout: (case.dropout > 0.0).then_some((case.dropout, seed)),
        };
        let gradients = side.backend.has_attention(&a, true)?;
        if !gradients && !side.backend.has_attention(&a, false)? {
            return Ok(None);
        }
        // Results have the strides that operations give them: the heads are an inner dim.
        let room = |width| side.alloc_output([2, queries, batch, heads, width], dtype)?.permute(&[0, 2, 3, 1, 4]);
        let (out, dq) = (room(value_width)?, room(width)?);
        let logsumexp = side.alloc_output([2, batch, heads, queries], dtype.compute().dtype())?;
        let (dk, dv) = (side.alloc_output(k.shape(), dtype)?, side.alloc_output(v.shape(), dtype)?);
        side.backend.attention(&a, &out, &logsumexp)?;
        if !gradients {
            return Ok(Some(vec![out, logsumexp]));
        }
        let results = [&dq, &dk, &dv];
        let of = AttentionBackward { out: &out, logsumexp: &logsumexp, grad: &grad, results };
        side.backend.attention_backward(&a, &of)?;
        Ok(Some(vec![out, logsumexp, dq, dk, dv]))
    })
}

pub(super) fn attention(suite: &mut Suite) -> Result<()> {
    use DType::{BF16, Bool, F16, F32, F64};
    // CPU devices would decline, so here they run the GPU kernels. They run only some of the cases, because each program takes seconds to compile.
    PRETEND_GPU.set(true);
    let kinds = suite.sides.iter().map(|side| Ok(side.device.info()?.kind)).collect::<Result<Vec<_>>>()?;
    let all = kinds.contains(&DeviceKind::DiscreteGpu) || kinds.contains(&DeviceKind::Accelerator);
    let masked = Case { causal: true, mask: Some(F32), ..PLAIN };
    // The second case has few queries and many keys, so several work-groups share the keys.
    compare_case(suite, PLAIN, [2, 1, 17, 33, 5, 3], NONE)?;
    compare_case(suite, masked, [2, 4, 2, 517, 8, 8], NONE)?;
    let half = Case { dtype: F16, view: View::Odd, mask: Some(Bool), dropout: 0.25, ..PLAIN };
    compare_case(suite, half, [2, 2, 19, 37, 16, 8], NONE)?;
    for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        compare_case(suite, PLAIN, [1, 1, 17, 9, 8, 8], [Some(special), None])?;
        compare_case(suite, PLAIN, [1, 1, 17, 9, 8, 8], [None, Some(special)])?;
    }
    // Several blocks of queries and of keys of the CPU's attention.
    suite.runs_on_opencl = false;
    let mask = Case { dtype: F16, view: View::Gapped, mask: Some(Bool), causal: true, ..PLAIN };
    for case in [PLAIN, Case { causal: true, ..PLAIN }, mask] {
        compare_case(suite, case, [1, 2, 301, 523, 8, 24], NONE)?;
    }
    compare_case(suite, PLAIN, [1, 1, 17, 523, 8, 8], [None, Some(f64::NAN)])?;
    compare_case(suite, Case { mask: Some(F64), ..PLAIN }, [2, 1, 33, 300, 1, 1], NONE)?;
    suite.runs_on_opencl = all;
    // Sizes just below and above tiles of 8 to 64 queries and 8 to 32 keys.
    for sizes in [[1, 1, 1, 1, 1, 1], [1, 1, 65, 31, 32, 32], [1, 3, 5, 7, 33, 2], [1, 1, 1, 1031, 16, 16]] {
        compare_case(suite, PLAIN, sizes, NONE)?;
        compare_case(suite, Case { causal: true, ..PLAIN }, sizes, NONE)?;
    }
    for (dtype, view) in [(F16, View::Odd), (BF16, View::Gapped), (F64, View::Plain), (F16, View::Plain)] {
        for (mask, causal) in [(Some(Bool), false), (Some(dtype), true), (None, true)] {
            compare_case(suite, Case { dtype, view, mask, causal, ..PLAIN }, [2, 2, 19, 37, 16, 8], NONE)?;
        }
    }
    for width in [96, 256] {
        compare_case(suite, PLAIN, [1, 1, 9, 11, width, 64], NONE)?;
    }
    compare_case(suite, Case { dropout: 0.25, ..masked }, [1, 2, 33, 29, 8, 8], NONE)?;
    PRETEND_GPU.set(false);
    Ok(())
}

/// Checks that block sizes are not zero. They do not affect results, so nothing is compared.
pub(super) fn attention_blocking(suite: &mut Suite) -> Result<()> {
    suite.compare("memory", DType::F32, 0, |side| {
        for (memory, cheap) in [(0, false), (1 << 20, true), (1 << 40, false)] {
            let blocking = side.backend.attention_blocking(memory, cheap);
            assert!(
                blocking.min_queries > 0 && (memory == 0 || blocking.block_bytes > 0 && blocking.unblocked_bytes > 0)
            );
        }
        Ok(Some(vec![]))
    })
}
