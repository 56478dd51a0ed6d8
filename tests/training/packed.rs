//! Packed sequences through recurrent layers, and cells. Compared with f64 loops over each single sequence, and with PyTorch.

#[path = "../../examples/rnn/model.rs"]
mod model;

use std::cell::RefCell;

use claystone::autograd::{gradcheck, gradgradcheck};
use claystone::io::read_npz;
use claystone::nn::{
    Gru, GruCell, Linear, Lstm, LstmCell, Module, PackedSequence, Rnn, RnnCell, RnnOptions, StateDict,
    pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence, unpack_sequence, unpad_sequence,
};
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::{DType, Device, Error, Result, Tensor, manual_seed};
use model::{Batch, Classifier};
use ndarray::{Array3, Ix3, s};

use crate::common::{each_device, f64s, in_own_process, iota, values};
use crate::recurrent::{HIDDEN, INPUT, near, reference};

fn to_3d(t: &Tensor) -> Array3<f64> {
    f64s(t).into_dimensionality::<Ix3>().unwrap()
}

#[test]
fn packed_sequences_match_single_sequences() {
    let plain = RnnOptions::default();
    let deep = RnnOptions { num_layers: 2, bidirectional: true, ..plain };
    let projected = RnnOptions { proj_size: 3, bias: false, ..deep };
    each_device(|device| {
        manual_seed(7);
        for (options, lengths) in
            [(plain, &[2, 5, 1, 5][..]), (deep, &[3, 3]), (deep, &[1]), (deep, &[4, 3, 1]), (projected, &[1, 4, 2])]
        {
            let (n, steps) = (lengths.len(), *lengths.iter().max().unwrap());
            let slots = options.num_layers * if options.bidirectional { 2 } else { 1 };
            let output = if options.proj_size > 0 { options.proj_size } else { HIDDEN };
            let x = Tensor::randn(&[steps, n, INPUT], device).unwrap();
            let h = Tensor::randn(&[slots, n, output], device).unwrap();
            let c = Tensor::randn(&[slots, n, HIDDEN], device).unwrap();
            let given = [to_3d(&h), to_3d(&c)];
            let packed = pack_padded_sequence(&x, lengths, false, false).unwrap();
            assert_eq!(packed.lengths(), lengths);
            let unpacked = |packed: &PackedSequence| pad_packed_sequence(packed, false, 0.0, None).unwrap().0;
            near("packed and padded", &unpacked(&packed), &{
                let mut x = to_3d(&x);
                lengths.iter().enumerate().for_each(|(i, &length)| x.slice_mut(s![length.., i, ..]).fill(0.0));
                x
            });

            let lstm = Lstm::new(INPUT, HIDDEN, options, device).unwrap();
            let [y, last, cell] = reference("lstm", &lstm, options, &to_3d(&x), lengths, &given);
            let (out, state) = lstm.run_packed(&packed, Some(&(h.shallow_clone(), c.shallow_clone()))).unwrap();
            near("lstm", &unpacked(&out), &y);
            near("lstm's hidden state", &state.0, &last);
            near("lstm's cell state", &state.1, &cell);
            let whole = vec![steps; n];
            let [y, last, _] = reference("lstm", &lstm, options, &to_3d(&x), &whole, &given);
            let (out, state) = lstm.run(&x, Some(&(h.shallow_clone(), c.shallow_clone()))).unwrap();
            near("lstm of whole sequences", &out, &y);
            near("lstm's hidden state of whole sequences", &state.0, &last);
            if options.proj_size > 0 {
                continue;
            }
            let zeros = [Array3::zeros(given[0].raw_dim()), Array3::zeros(given[0].raw_dim())];
            for start in [None, Some(&h)] {
                let given = if start.is_some() { &given } else { &zeros };
                let gru = Gru::new(INPUT, HIDDEN, options, device).unwrap();
                let [y, last, _] = reference("gru", &gru, options, &to_3d(&x), lengths, given);
                let (out, state) = gru.run_packed(&packed, start).unwrap();
                near("gru", &unpacked(&out), &y);
                near("gru's state", &state, &last);
                let rnn = Rnn::new(INPUT, HIDDEN, options, device).unwrap().with_relu();
                let [y, last, _] = reference("relu", &rnn, options, &to_3d(&x), lengths, given);
                let (out, state) = rnn.run_packed(&packed, start).unwrap();
                near("relu", &unpacked(&out), &y);
                near("relu's state", &state, &last);
            }
        }
    });
}

/// Compares gradients of `inputs` and of all parameters with finite differences. If `twice`, also compares second derivatives.
fn check<M: Module>(module: M, inputs: &[&Tensor], twice: bool, f: impl Fn(&M, &[Tensor]) -> Result<Tensor>) {
    let parameters: Vec<Tensor> = module.parameters().into_iter().map(Tensor::detach).collect();
    let all: Vec<Tensor> = inputs.iter().copied().chain(&parameters).map(Tensor::shallow_clone).collect();
    let module = RefCell::new(module);
    let with_parameters = |given: &[Tensor]| {
        let (inputs, parameters) = given.split_at(inputs.len());
        let mut next = parameters.iter();
        module.borrow_mut().visit_mut("", &mut |_, _, t| *t = next.next().unwrap().shallow_clone());
        f(&module.borrow(), inputs)
    };
    gradcheck(with_parameters, &all, 1e-6).unwrap();
    if twice {
        gradgradcheck(with_parameters, &all, 1e-6).unwrap();
    }
}

#[test]
fn gradients_of_packed_sequences_match_differences() {
    let at = (DType::F64, Device::Cpu);
    let sum = |packed: &PackedSequence, states: &[&Tensor]| {
        let (out, _) = pad_packed_sequence(packed, true, 0.5, None)?;
        states.iter().try_fold(out.square()?.sum((), false)?, |sum, t| sum.add(&t.sin()?.sum((), false)?))
    };
    let options = RnnOptions { bidirectional: true, ..RnnOptions::default() };
    for lengths in [&[1, 2][..], &[2, 3, 1]] {
        let (n, twice) = (lengths.len(), lengths.len() == 2);
        let x = Tensor::randn(&[n, 3, 1], at).unwrap();
        let [h, c] = [(); 2].map(|()| Tensor::randn(&[2, n, 2], at).unwrap());
        let packed = |x: &Tensor| pack_padded_sequence(x, lengths, true, false);
        check(Gru::new(1, 2, options, at).unwrap(), &[&x, &h], twice, |gru, t| {
            let (out, h) = gru.run_packed(&packed(&t[0])?, Some(&t[1]))?;
            sum(&out, &[&h])
        });
        check(Rnn::new(1, 2, options, at).unwrap(), &[&x, &h], twice, |rnn, t| {
            let (out, h) = rnn.run_packed(&packed(&t[0])?, Some(&t[1]))?;
            sum(&out, &[&h])
        });
        for proj_size in [0, 1] {
            let lstm = Lstm::new(1, 2, RnnOptions { proj_size, ..options }, at).unwrap();
            let h = if proj_size > 0 { h.narrow(2, 0, 1).unwrap() } else { h.shallow_clone() };
            check(lstm, &[&x, &h, &c], twice, |lstm, t| {
                let state = (t[1].shallow_clone(), t[2].shallow_clone());
                let (out, (h, c)) = lstm.run_packed(&packed(&t[0])?, Some(&state))?;
                sum(&out, &[&h, &c])
            });
        }
    }
}

#[test]
fn cells_match_layers_of_one_step() {
    each_device(|device| {
        manual_seed(5);
        let x = Tensor::randn(&[3, 2, INPUT], device).unwrap();
        let at = |t: isize| x.select(0, t).unwrap();
        // A layer's parameters have the names of the cell's parameters, plus a suffix.
        let moved = |cell: &dyn Module| -> StateDict {
            cell.state_dict().iter().map(|(name, t)| (format!("{name}_l0"), t.shallow_clone())).collect()
        };
        macro_rules! compare {
            ($layer:ident $cell:expr) => {{
                let cell = $cell;
                let layer = $layer::new(INPUT, HIDDEN, RnnOptions::default(), device).unwrap();
                layer.load_state_dict(&moved(&cell), true).unwrap();
                let (out, _) = layer.run(&x, None).unwrap();
                assert!(cell.forward(&at(0)).unwrap().allclose(&out.select(0, 0).unwrap(), 1e-5, 1e-6, false).unwrap());
                (cell, layer, out)
            }};
        }
        let close = |a: &Tensor, b: &Tensor| assert!(a.allclose(b, 1e-5, 1e-6, false).unwrap());
        let (cell, _, out) = compare!(Rnn RnnCell::new(INPUT, HIDDEN, device).unwrap());
        let h = (0..3).fold(None, |h: Option<Tensor>, t| Some(cell.run(&at(t), h.as_ref()).unwrap())).unwrap();
        close(&h, &out.select(0, 2).unwrap());
        let (cell, _, out) = compare!(Gru GruCell::new(INPUT, HIDDEN, device).unwrap());
        let h = (0..3).fold(None, |h: Option<Tensor>, t| Some(cell.run(&at(t), h.as_ref()).unwrap())).unwrap();
        close(&h, &out.select(0, 2).unwrap());
        let (cell, layer, out) = compare!(Lstm LstmCell::new(INPUT, HIDDEN, device).unwrap());
        let state = (0..3).fold(None, |s: Option<(Tensor, Tensor)>, t| Some(cell.run(&at(t), s.as_ref()).unwrap()));
        let (h, c) = state.unwrap();
        close(&h, &out.select(0, 2).unwrap());
        close(&c, &layer.run(&x, None).unwrap().1.1.select(0, 0).unwrap());
        // The input is a single vector without a batch dimension.
        let one = cell.run(&at(0).select(0, 1).unwrap(), None).unwrap().0;
        close(&one, &out.select(0, 0).unwrap().select(0, 1).unwrap());
    });
    let names = |m: &dyn Module| m.named_parameters("").into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let cell = LstmCell::new(2, 3, Device::Cpu).unwrap();
    assert_eq!(names(&cell), ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]);
    assert_eq!(names(&cell.without_bias()), ["weight_ih", "weight_hh"]);
    let options = RnnOptions { proj_size: 2, bidirectional: true, ..RnnOptions::default() };
    let names = names(&Lstm::new(2, 3, options, Device::Cpu).unwrap());
    assert_eq!((&names[4][..], &names[9][..]), ("weight_hr_l0", "weight_hr_l0_reverse"));
}

#[test]
fn unpacking_restores_sequences() {
    each_device(|device| {
        let sequences = [2, 4, 1].map(|length| iota(&[length, 2], device).add_scalar(length as f32).unwrap());
        for batch_first in [false, true] {
            let padded = pad_sequence(&sequences, batch_first, -1).unwrap();
            let dims = if batch_first { [3, 4, 2] } else { [4, 3, 2] };
            assert_eq!(padded.shape().dims(), dims);
            for (a, b) in unpad_sequence(&padded, &[2, 4, 1], batch_first).unwrap().iter().zip(&sequences) {
                assert!(a.equal(b).unwrap());
            }
            let packed = pack_padded_sequence(&padded, &[2, 4, 1], batch_first, false).unwrap();
            let same = pack_sequence(&sequences, false).unwrap();
            assert!(packed.data().equal(same.data()).unwrap());
            assert_eq!((packed.batch_sizes(), same.batch_sizes()), (&[3, 2, 1, 1][..], &[3, 2, 1, 1][..]));
            let (again, lengths) = pad_packed_sequence(&packed, batch_first, -1, None).unwrap();
            assert!(again.equal(&padded).unwrap());
            assert_eq!(lengths, [2, 4, 1]);
        }
        let host = pack_sequence(&sequences, false).unwrap().to_device(Device::Cpu).unwrap();
        for (a, b) in unpack_sequence(&host).unwrap().iter().zip(&sequences) {
            assert!(a.equal(&b.to_device(Device::Cpu).unwrap()).unwrap());
        }
        // Sequences that are already sorted must keep their order.
        let sorted = pack_sequence(&[&sequences[1], &sequences[0]], true).unwrap();
        assert!(sorted.sorted_indices().is_none() && sorted.lengths() == [4, 2]);
    });
}

#[test]
fn invalid_packing_is_an_error() {
    let x = Tensor::ones(&[2, 4, 3], Device::Cpu).unwrap();
    let said = |result: Result<PackedSequence>, words: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(words), "{error}");
    };
    said(pack_padded_sequence(&x, &[4, 0], true, false), "sequence 1 is empty");
    said(pack_padded_sequence(&x, &[2, 4], true, true), "enforce_sorted = false");
    said(pack_padded_sequence(&x, &[2, 5], true, false), "sequence 1 has length 5");
    said(pack_padded_sequence(&x, &[4], true, false), "1 lengths for 2 sequences");
    said(pack_padded_sequence(&x.narrow(0, 0, 0).unwrap(), &[], true, false), "there are no sequences");
    said(pack_padded_sequence(&x.flatten(0, -1).unwrap(), &[1], true, false), "[N, L, ..]");
    said(pack_sequence::<Tensor>(&[], true), "there are no sequences");
    let packed = pack_padded_sequence(&x, &[4, 2], true, true).unwrap();
    said(packed.map(|data| data.narrow(0, 0, 5)), "instead of 6 rows");
    assert_eq!(PackedSequence::new(packed.data(), packed.batch_sizes().to_vec()).unwrap().lengths(), packed.lengths());
    for sizes in [vec![], vec![3, 2], vec![2, 4], vec![6, 0], vec![usize::MAX, 7]] {
        said(PackedSequence::new(packed.data(), sizes), "add up to the rows");
    }
    assert!(pad_packed_sequence(&packed, true, 0.0, Some(3)).is_err());
    assert!(unpad_sequence(&x, &[1, 5], true).is_err() && pad_sequence::<Tensor>(&[], true, 0.0).is_err());
    let gru = Gru::new(2, 3, RnnOptions::default(), Device::Cpu).unwrap();
    assert!(matches!(gru.run_packed(&packed, None), Err(Error::Invalid { op: "Gru::run_packed", .. })));
    let gru = Gru::new(3, 3, RnnOptions::default(), Device::Cpu).unwrap();
    let wrong = Tensor::zeros(&[1, 3, 3], Device::Cpu).unwrap();
    assert!(matches!(gru.run_packed(&packed, Some(&wrong)), Err(Error::ShapeMismatch { .. })));
    let project = |proj_size| RnnOptions { proj_size, ..RnnOptions::default() };
    assert!(Gru::new(2, 3, project(2), Device::Cpu).is_err() && Lstm::new(2, 3, project(3), Device::Cpu).is_err());
    let cell = GruCell::new(2, 3, Device::Cpu).unwrap();
    assert!(matches!(cell.forward(&x), Err(Error::Invalid { op: "GruCell::forward", .. })));
    let batch = Tensor::ones(&[4, 2], Device::Cpu).unwrap();
    assert!(matches!(cell.run(&batch, Some(&wrong)), Err(Error::ShapeMismatch { op: "GruCell::run", .. })));
    assert!(GruCell::new(2, 0, Device::Cpu).is_err());
}

/// The network of tests/data/recurrent.py.
struct Net {
    lstm: Lstm,
    fc: Linear,
    gru: Gru,
    rnn: Rnn,
    proj: Lstm,
    lstm_cell: LstmCell,
    gru_cell: GruCell,
    rnn_cell: RnnCell,
}

impl Net {
    fn new(device: Device) -> Result<Net> {
        let deep = RnnOptions { num_layers: 2, bidirectional: true, batch_first: true, ..RnnOptions::default() };
        Ok(Net {
            lstm: Lstm::new(6, 5, deep, device)?,
            fc: Linear::new(10, 3, device)?,
            gru: Gru::new(6, 5, deep, device)?,
            rnn: Rnn::new(6, 5, deep, device)?,
            proj: Lstm::new(6, 5, RnnOptions { proj_size: 3, ..deep }, device)?,
            lstm_cell: LstmCell::new(6, 5, device)?,
            gru_cell: GruCell::new(6, 5, device)?,
            rnn_cell: RnnCell::new(6, 5, device)?.with_relu(),
        })
    }
}

impl Module for Net {
    claystone::parts!(lstm, fc, gru, rnn, proj, lstm_cell, gru_cell, rnn_cell);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.fc.forward(x)
    }
}

#[test]
fn packed_results_match_pytorch() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/recurrent.npz");
    each_device(|device| {
        let all = read_npz(file, device).unwrap();
        let get = |name: &str| all.get(name).unwrap_or_else(|| panic!("{name}")).shallow_clone();
        let near = |name: &str, got: &Tensor, within: f64| {
            let right = get(name);
            assert_eq!(got.shape(), right.shape(), "{name}");
            let far = values(got).iter().zip(values(&right)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < within, "{name}: off by {far}");
        };
        let net = Net::new(device).unwrap();
        let weights = all.iter().filter_map(|(name, t)| Some((name.strip_prefix("net.")?.to_string(), t.detach())));
        net.load_state_dict(&weights.collect(), true).unwrap();

        let x = get("x").requires_grad_(true).unwrap();
        let integers = |name: &str| get(name).to_vec::<i64>().unwrap();
        let lengths: Vec<usize> = integers("lengths").iter().map(|&length| length as usize).collect();
        let packed = pack_padded_sequence(&x, &lengths, true, false).unwrap();
        near("data", packed.data(), 1e-9);
        let sizes: Vec<i64> = packed.batch_sizes().iter().map(|&size| size as i64).collect();
        assert_eq!(sizes, integers("batch_sizes"));
        assert_eq!(packed.sorted_indices().unwrap().to_vec::<i64>().unwrap(), integers("sorted_indices"));
        assert_eq!(packed.unsorted_indices().unwrap().to_vec::<i64>().unwrap(), integers("unsorted_indices"));

        let (out, (h, c)) = net.lstm.run_packed(&packed, None).unwrap();
        near("lstm.out", out.data(), 1e-6);
        near("lstm.h", &h, 1e-6);
        near("lstm.c", &c, 1e-6);
        let ends = [2, 3].map(|slot| h.select(0, slot).unwrap());
        let logits = net.fc.forward(&Tensor::cat(&ends, 1).unwrap()).unwrap();
        near("logits", &logits, 1e-6);
        let labels = Tensor::from_slice(&[0i64, 1, 2, 0, 1], 5, device).unwrap();
        let loss = logits.cross_entropy(&labels).unwrap();
        near("loss", &loss, 1e-6);
        loss.backward().unwrap();
        near("grad.x", &x.grad().unwrap(), 1e-6);
        let mut compared = 0;
        for (name, t) in net.lstm.named_parameters("grad").iter().filter(|(name, _)| all.get(name).is_some()) {
            near(name, &t.grad().unwrap(), 1e-6);
            compared += 1;
        }
        assert_eq!(compared, 8);

        let h0 = get("h0");
        let padded = |packed| pad_packed_sequence(packed, true, -2.0, Some(10)).unwrap().0;
        let (out, h) = net.gru.run_packed(&packed, Some(&h0)).unwrap();
        near("gru.padded", &padded(&out), 1e-6);
        near("gru.h", &h, 1e-6);
        let (out, h) = net.rnn.run_packed(&packed, Some(&h0)).unwrap();
        near("rnn.padded", &padded(&out), 1e-6);
        near("rnn.h", &h, 1e-6);
        let (out, (h, c)) = net.proj.run(&x, Some(&(h0.narrow(2, 0, 3).unwrap(), h0.shallow_clone()))).unwrap();
        near("proj.out", &out, 1e-6);
        near("proj.h", &h, 1e-6);
        near("proj.c", &c, 1e-6);
        let (first, state) = (x.select(1, 0).unwrap(), [0, 1].map(|slot| h0.select(0, slot).unwrap()));
        let (h, c) = net.lstm_cell.run(&first, Some(&(state[0].shallow_clone(), state[1].shallow_clone()))).unwrap();
        near("lstm_cell.h", &h, 1e-6);
        near("lstm_cell.c", &c, 1e-6);
        near("gru_cell.h", &net.gru_cell.run(&first, Some(&state[0])).unwrap(), 1e-6);
        near("rnn_cell.h", &net.rnn_cell.run(&first, Some(&state[0])).unwrap(), 1e-6);
    });
}

/// Trains the example `rnn` with tiny sizes.
#[test]
fn the_rnn_example_learns() {
    // The default random generator is shared by the process.
    if !in_own_process("packed::the_rnn_example_learns") {
        return;
    }
    each_device(|device| {
        for dtype in [DType::F32, DType::BF16] {
            manual_seed(1);
            let mut net = Classifier::new(16, (dtype, device)).unwrap();
            let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig { lr: 2e-2, ..Default::default() }).unwrap();
            let losses: Vec<f64> = (0..80)
                .map(|_| {
                    let Batch(symbols, lengths, classes) = Batch::random(32, 6, device).unwrap();
                    adam.zero_grad();
                    let logits = net.classify(&symbols, &lengths).unwrap();
                    let loss = logits.cross_entropy(&classes).unwrap();
                    loss.backward().unwrap();
                    adam.step().unwrap();
                    values(&loss)[0]
                })
                .collect();
            let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
            let (start, end) = (mean(&losses[..5]), mean(&losses[75..]));
            assert!(end < 0.5 * start, "{start} to {end} on {device} in {dtype}");
        }
        let net = Classifier::new(16, device).unwrap();
        let symbols = Batch::random(3, 5, device).unwrap().0;
        assert_eq!(net.forward(&symbols).unwrap().shape().dims(), [3, 4]);
    });
}
