//! Operations on channels-last tensors: values equal those of row-major tensors, the format is kept, and the number of launches does not
//! increase.

use claystone::device::count_launches;
use claystone::nn::{BatchNorm2d, Module};
use claystone::{
    AvgPoolOptions, BatchNormOptions, DType, Device, Generator, MaxPoolOptions, MemoryFormat, Result, Tensor,
    with_generator,
};

use crate::common::{each_device, iota, scattered, values};

const LAST: MemoryFormat = MemoryFormat::ChannelsLast;

type Operation<'a> = dyn Fn(&Tensor) -> Result<Tensor> + 'a;

fn last(t: &Tensor) -> Tensor {
    t.to_memory_format(LAST).unwrap()
}

/// Like [`compare`], and checks that channels-last operands take no more launches than row-major operands.
fn check(name: &str, device: Device, operands: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let [rows, own] = compare(name, device, operands, f);
    let fewer = own.iter().zip(&rows).all(|(own, rows)| own <= rows);
    assert!(fewer, "{name} on {device}: {own:?} launches forward and backward, row-major {rows:?}");
}

/// Compares an operation on row-major and channels-last operands: results, gradients and formats. Returns the numbers of launches
/// (forward and backward) for row-major and for channels-last operands.
fn compare(name: &str, device: Device, operands: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> [[u64; 2]; 2] {
    let run = |format: MemoryFormat| {
        let leaf = |t: &Tensor| {
            let t = if t.rank() == 4 { t.to_memory_format(format).unwrap() } else { t.shallow_clone() };
            if t.dtype().is_float() { t.detach().requires_grad_(true).unwrap() } else { t }
        };
        let leaves: Vec<Tensor> = operands.iter().map(leaf).collect();
        let (y, forward) = count_launches(|| f(&leaves).unwrap());
        let grad = scattered(y.shape().dims(), 3.0, device).to_dtype(y.dtype()).unwrap();
        let grad = if y.rank() == 4 { grad.to_memory_format(format).unwrap() } else { grad };
        let backward = if y.requires_grad() { count_launches(|| y.backward_with(&grad).unwrap()).1 } else { 0 };
        (y.detach(), leaves, [forward, backward])
    };
    let (right, right_leaves, launches) = run(MemoryFormat::Contiguous);
    let (y, leaves, own_launches) = run(LAST);
    let close = |what: &str, got: &Tensor, right: &Tensor| {
        // 16-bit results may be rounded to either of the two nearest numbers.
        let tolerance = if right.dtype().size() == 2 { 1e-3 } else { 1e-4 };
        let (got, right) = (values(got), values(right));
        let far = got.iter().zip(&right).position(|(a, b)| (a - b).abs() > tolerance * (1.0 + b.abs()));
        assert!(got.len() == right.len() && far.is_none(), "{name}, {what} on {device}: {far:?}");
    };
    close("result", &y, &right);
    assert!(right.is_contiguous(), "{name} on {device}: {:?}", right.strides());
    assert!(y.rank() != 4 || y.is_contiguous_in(LAST), "{name} on {device}: {:?}", y.strides());
    for (i, (leaf, right)) in leaves.iter().zip(&right_leaves).enumerate() {
        let (Some(grad), Some(right)) = (leaf.grad(), right.grad()) else { continue };
        close("gradient", &grad, &right);
        let kept = grad.rank() != 4 || grad.is_contiguous_in(LAST);
        assert!(kept, "{name}, gradient {i} on {device}: {:?}", grad.strides());
    }
    [launches, own_launches]
}

/// Returns two images, whose shapes are or are not multiples of vectors, and a tensor with one element per channel.
fn images(device: Device) -> impl Iterator<Item = [Tensor; 3]> {
    [[2, 16, 6, 8], [3, 5, 7, 4], [1, 32, 9, 3], [2, 64, 40, 33]].into_iter().map(move |shape| {
        let other = scattered(&shape, 5.0, device).flip(&[0, 1, 2, 3]).unwrap().contiguous().unwrap();
        [scattered(&shape, 4.0, device), other, scattered(&[1, shape[1], 1, 1], 2.0, device)]
    })
}

#[test]
fn elementwise_operations_keep_channels_last() {
    each_device(|device| {
        for [x, y, channel] in images(device) {
            check("relu", device, &[x.shallow_clone()], |t| t[0].relu());
            check("gelu", device, &[x.shallow_clone()], |t| t[0].gelu());
            check("add", device, &[x.shallow_clone(), y.shallow_clone()], |t| t[0].add(&t[1]));
            check("mul", device, &[x.shallow_clone(), y.shallow_clone()], |t| t[0].mul(&t[1]));
            // On GPUs, the gradient of `channel` is a column sum in one format and a row sum in the other, and may take one more
            // launch.
            compare("mul of channels", device, &[x.shallow_clone(), channel], |t| t[0].mul(&t[1]));
            check("map", device, &[x.shallow_clone(), y.shallow_clone()], |t| {
                Tensor::map(&[&t[0], &t[1]], |e| (&e[0] * &e[1]).tanh())
            });
            check("cast", device, &[x.shallow_clone()], |t| t[0].to_dtype(DType::F64));
            check("compared", device, &[x.shallow_clone(), y.shallow_clone()], |t| t[0].lt(&t[1]));
            check("where", device, &[x.gt_scalar(0).unwrap(), x.shallow_clone(), y.shallow_clone()], |t| {
                t[0].where_cond(&t[1], &t[2])
            });
            let joined = |t: &[Tensor]| Tensor::cat(&[&t[0], &t[1], &t[0]], 1);
            compare("cat", device, &[x.shallow_clone(), y.shallow_clone()], joined);
            check("cat of images", device, &[x.shallow_clone(), y], |t| Tensor::cat(&[&t[0], &t[1]], 0));
            check("in place", device, &[x.shallow_clone()], |t| {
                let y = t[0].mul_scalar(2)?;
                y.add_scalar_(1)?.relu_()?;
                Ok(y)
            });
        }
    });
}

#[test]
fn pools_keep_channels_last() {
    let max = MaxPoolOptions { stride: Some([2, 2]), padding: 1.into(), ..MaxPoolOptions::default() };
    let mean = AvgPoolOptions { stride: Some([2, 2]), padding: 1.into(), ..AvgPoolOptions::default() };
    each_device(|device| {
        for [x, ..] in images(device) {
            let x = [x];
            check("max_pool2d", device, &x, |t| t[0].max_pool2d([3, 3], max));
            check("max_pool2d without overlap", device, &x, |t| t[0].max_pool2d([2, 2], MaxPoolOptions::default()));
            check("avg_pool2d", device, &x, |t| t[0].avg_pool2d([3, 3], mean));
            check("adaptive_avg_pool2d", device, &x, |t| t[0].adaptive_avg_pool2d([3, 2]));
            check("adaptive_max_pool2d", device, &x, |t| t[0].adaptive_max_pool2d([2, 2]));
            check("global average", device, &x, |t| t[0].relu()?.adaptive_avg_pool2d([1, 1]));
            let (rows, places) = x[0].max_pool2d_with_indices([3, 3], max).unwrap();
            let (own, own_places) = last(&x[0]).max_pool2d_with_indices([3, 3], max).unwrap();
            assert_eq!(values(&own), values(&rows));
            assert_eq!(own_places.to_vec::<i64>().unwrap(), places.to_vec::<i64>().unwrap());
        }
    });
}

#[test]
fn norms_keep_channels_last() {
    each_device(|device| {
        for [x, y, channel] in images(device) {
            let c = x.shape().dims()[1];
            let (weight, bias) = (channel.reshape(c).unwrap(), channel.neg().unwrap().reshape(c).unwrap());
            let all = [x.shallow_clone(), weight.shallow_clone(), bias.shallow_clone()];
            let training = BatchNormOptions { training: true, ..BatchNormOptions::default() };
            // Forward and backward take two launches each, because a GPU with few groups of adjacent channels sums slices of the
            // rows first.
            let most = |n: u64, [_, own]: [[u64; 2]; 2]| assert!(own.iter().all(|&launches| launches <= n), "{own:?}");
            most(
                2,
                compare("batch_norm", device, &all, |t| {
                    t[0].batch_norm(BatchNormOptions { weight: Some(&t[1]), bias: Some(&t[2]), ..training })
                }),
            );
            most(2, compare("batch_norm without weight", device, &all[..1], |t| t[0].batch_norm(training)));
            for half in [DType::F16, DType::BF16] {
                // With f32 weights only x is converted to 16 bits, which takes one more launch.
                most(
                    3,
                    compare("batch_norm of halves", device, &all, |t| {
                        let x = t[0].detach().to_dtype(half)?.requires_grad_(true)?;
                        x.batch_norm(BatchNormOptions { weight: Some(&t[1]), bias: Some(&t[2]), ..training })
                    }),
                );
            }
            let (mean, var) = (bias.detach(), weight.square().unwrap().add_scalar(1).unwrap());
            // GPUs may take one more launch for the gradients of the weight and bias, which have one element per channel.
            compare("batch_norm in evaluation", device, &all, |t| {
                let (running_mean, running_var) = (Some(&mean), Some(&var));
                let (weight, bias) = (Some(&t[1]), Some(&t[2]));
                t[0].batch_norm(BatchNormOptions { running_mean, running_var, weight, bias, ..Default::default() })
            });
            // In a residual block, the gradient arrives in the result's format or in row-major order.
            compare("a residual block", device, &[x.shallow_clone(), y, weight, bias], |t| {
                t[0].batch_norm(BatchNormOptions { weight: Some(&t[2]), bias: Some(&t[3]), ..training })?
                    .add(&t[1])?
                    .relu()
            });
        }
        let norm = BatchNorm2d::new(5, device).unwrap();
        let x = scattered(&[4, 5, 6, 7], 4.0, device);
        let moved = |x: &Tensor| {
            let before = norm.state_dict().get("running_mean").unwrap().clone();
            norm.forward(x).unwrap();
            let after = norm.state_dict().get("running_mean").unwrap().clone();
            values(&after.sub(&before.mul_scalar(0.9).unwrap()).unwrap())
        };
        for (a, b) in moved(&x).iter().zip(moved(&last(&x))) {
            assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
    });
}

/// Checks gradients whose memory format differs from that of their tensor.
#[test]
fn gradients_in_another_format_are_converted() {
    each_device(|device| {
        let (x, grad) = (scattered(&[2, 6, 5, 7], 4.0, device), scattered(&[2, 6, 5, 7], 3.0, device));
        let max = MaxPoolOptions { stride: Some([1, 1]), padding: 1.into(), ..MaxPoolOptions::default() };
        let operations: [(&str, &Operation<'_>); 4] = [
            ("exp", &|x| x.exp()),
            ("batch_norm", &|x| x.batch_norm(BatchNormOptions { training: true, ..Default::default() })),
            ("max_pool2d", &|x| x.max_pool2d([3, 3], max)),
            ("mul", &|x| x.mul(&x.detach())),
        ];
        for (name, f) in operations {
            let gradient = |x: &Tensor, grad: &Tensor| {
                let x = x.detach().requires_grad_(true).unwrap();
                f(&x).unwrap().backward_with(grad).unwrap();
                values(&x.grad().unwrap())
            };
            let right = gradient(&x, &grad);
            for (x, grad) in [(&last(&x), &grad), (&x, &last(&grad)), (&last(&x), &last(&grad))] {
                let got = gradient(x, grad);
                assert!(got.iter().zip(&right).all(|(a, b)| (a - b).abs() < 1e-4 * (1.0 + b.abs())), "{name}");
            }
        }
    });
}

/// Custom operations and other layers give the same values, whatever the memory format of their input.
#[test]
fn values_do_not_depend_on_the_memory_format() {
    each_device(|device| {
        let x = iota(&[2, 3, 4, 5], device);
        let (y, right) = (last(&x).add_scalar(1).unwrap(), x.add_scalar(1).unwrap());
        assert!(y.is_contiguous_in(LAST) && !y.is_contiguous());
        assert_eq!(y.to_vec::<f32>().unwrap(), right.to_vec::<f32>().unwrap());
        assert_eq!(y.to_ndarray::<f32>().unwrap(), right.to_ndarray::<f32>().unwrap());
        assert_eq!(&y.to_host::<f32>().unwrap()[..], &right.to_host::<f32>().unwrap()[..]);
        assert_eq!(y.to_string(), right.to_string());
        for shape in [&[120][..], &[2, 60], &[6, 20], &[2, 3, 20], &[24, 5]] {
            assert_eq!(values(&y.reshape(shape).unwrap()), values(&right), "{shape:?}");
        }
        assert_eq!(values(&y.flatten(1, -1).unwrap()), values(&right));
        assert!(y.view([120]).is_err(), "as PyTorch's view");
        let mut bytes = Vec::new();
        y.write_to(&mut bytes).unwrap();
        assert_eq!(values(&Tensor::from_bytes(&bytes, [2, 3, 4, 5], device).unwrap()), values(&right));
        // Copies keep the memory format, also copies to other devices.
        for other in Device::all() {
            let there = y.to_device(other).unwrap();
            assert!(there.is_contiguous_in(LAST) && values(&there) == values(&right));
            let to = Tensor::zeros([2, 3, 4, 5], other).unwrap();
            for to in [last(&to), to] {
                if other == device || to.is_contiguous_in(LAST) {
                    to.copy_(&y).unwrap();
                    assert_eq!(values(&to), values(&right));
                }
            }
        }
        let (copy, launches) = count_launches(|| y.clone());
        assert!(copy.is_contiguous_in(LAST) && launches == 0 && values(&copy) == values(&right));
        for like in
            [y.empty_like(), y.zeros_like(), y.ones_like(), y.full_like(2), y.narrow(1, 1, 2).unwrap().zeros_like()]
        {
            assert!(like.unwrap().is_contiguous_in(LAST));
        }
        // The random number for an element depends on the element's index, not on its position in memory.
        let dropped = |x: &Tensor| values(&with_generator(&Generator::new(7), || x.dropout(0.5)).unwrap());
        assert_eq!(dropped(&y), dropped(&right));
        let sums =
            |t: &Tensor| [&[0isize][..], &[1], &[2, 3], &[0, 2, 3]].map(|dims| values(&t.sum(dims, false).unwrap()));
        assert_eq!(sums(&y), sums(&right));
        let error = y.add_(&iota(&[2, 3, 4, 4], device)).unwrap_err().to_string();
        assert!(error.contains("[2, 3, 4, 5]") && error.contains("[2, 3, 4, 4]"), "{error}");
    });
}

#[test]
fn results_take_the_format_of_the_first_operand() {
    let volume = Tensor::zeros([2, 3, 4, 5, 6], Device::Cpu).unwrap();
    let last = volume.to_memory_format(MemoryFormat::ChannelsLast3d).unwrap();
    assert_eq!(last.strides(), [360, 1, 90, 18, 3]);
    assert!(last.sigmoid().unwrap().is_contiguous_in(MemoryFormat::ChannelsLast3d));
    assert!(last.contiguous().unwrap().is_contiguous());
    let error = volume.to_memory_format(LAST).unwrap_err().to_string();
    assert!(error.contains("channels_last needs 4 dims") && error.contains("[2, 3, 4, 5, 6]"), "{error}");
    assert_eq!("channels_last".parse::<MemoryFormat>().unwrap(), LAST);
    assert!("nhwc".parse::<MemoryFormat>().is_err());
    // As in PyTorch, the result has the memory format of the first operand.
    let (rows, last) = (Tensor::ones([2, 3, 4, 5], Device::Cpu).unwrap(), volume.select(4, 0).unwrap());
    let last = last.permute(&[0, 1, 2, 3]).unwrap().to_memory_format(LAST).unwrap();
    assert!(rows.add(&last).unwrap().is_contiguous() && last.add(&rows).unwrap().is_contiguous_in(LAST));
}

/// Compares values and gradients of operations along dims, whose results may have any memory format.
#[test]
fn operations_along_dims_match_row_major() {
    let operations: [(&str, &Operation); 19] = [
        ("softmax", &|x| x.softmax(1)),
        ("log_softmax", &|x| x.log_softmax(-1)),
        ("logsumexp", &|x| x.logsumexp(&[1][..], false)),
        ("logsumexp of two dims", &|x| x.logsumexp(&[1, 3][..], true)),
        ("sum", &|x| x.sum(&[1][..], false)),
        ("mean", &|x| x.mean(&[2, 3][..], true)),
        ("amax", &|x| x.amax(&[1][..], false)),
        ("var", &|x| x.var(&[1][..], 1, false)),
        ("vector_norm", &|x| x.vector_norm(2.0, &[1][..], false)),
        ("normalize", &|x| x.normalize(2.0, 1, 1e-12)),
        ("cumsum", &|x| x.cumsum(1)),
        ("cumprod", &|x| x.cumprod(2)),
        ("sort", &|x| Ok(x.sort(1, false)?.0)),
        ("topk", &|x| Ok(x.topk(2, 1, true)?.0)),
        ("layer_norm", &|x| x.layer_norm(&[5], None, None, 1e-5)),
        ("matmul", &|x| x.matmul(&x.transpose(-2, -1)?)),
        ("flip", &|x| x.flip(&[1, 3])),
        ("repeat", &|x| x.repeat(&[1, 2, 1, 1])),
        ("tril", &|x| x.tril(0)),
    ];
    each_device(|device| {
        let x = scattered(&[2, 3, 4, 5], 3.0, device);
        for (name, f) in &operations {
            let [right, own] = [MemoryFormat::Contiguous, LAST].map(|format| {
                let leaf = x.to_memory_format(format).unwrap().detach().requires_grad_(true).unwrap();
                let y = f(&leaf).unwrap();
                y.backward_with(&scattered(y.shape().dims(), 2.0, device)).unwrap();
                [values(&y.detach()), values(&leaf.grad().unwrap())]
            });
            for (what, (got, right)) in ["result", "gradient"].into_iter().zip(own.iter().zip(&right)) {
                let far = got.iter().zip(right).position(|(a, b)| (a - b).abs() > 1e-4 * (1.0 + b.abs()));
                assert!(got.len() == right.len() && far.is_none(), "{what} of {name} on {device}: {far:?}");
            }
        }
    });
}
