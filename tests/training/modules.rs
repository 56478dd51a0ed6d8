//! Modules with several inputs and a state, and summaries of modules.

use claystone::nn::{
    AveragedModel, Dropout, Embedding, Forward, Linear, Lstm, LstmCell, Module, MultiheadAttention, RnnOptions,
    Sequential, summary,
};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::{DType, Device, Result, Tensor, io};

/// A decoder that maps a token and a state to scores and the next state.
struct Decoder {
    embedding: Embedding,
    cells: Vec<LstmCell>,
    dropout: Option<Dropout>,
    head: Box<dyn Module>,
    bias: Tensor,
}

type State = Vec<(Tensor, Tensor)>;

impl Decoder {
    fn new() -> Result<Decoder> {
        Ok(Decoder {
            embedding: Embedding::new(7, 3, Device::Cpu)?,
            cells: vec![LstmCell::new(3, 4, Device::Cpu)?, LstmCell::new(4, 4, Device::Cpu)?],
            dropout: Some(Dropout::new(0.1)?),
            head: Box::new(Sequential::new().push(Linear::new(4, 7, Device::Cpu)?)),
            bias: Tensor::zeros(7, Device::Cpu)?,
        })
    }
}

impl Module for Decoder {
    claystone::parts!(embedding, cells, dropout, head, bias);
}

impl Forward<(&Tensor, Option<&State>)> for Decoder {
    type Output = (Tensor, State);

    fn call(&self, (token, state): (&Tensor, Option<&State>)) -> Result<(Tensor, State)> {
        let (mut x, mut next) = (self.embedding.forward(token)?, Vec::new());
        for (i, cell) in self.cells.iter().enumerate() {
            next.push(cell.call((&x, state.map(|s| &s[i])))?);
            x = next[i].0.shallow_clone();
        }
        let x = self.dropout.as_ref().map_or_else(|| Ok(x.shallow_clone()), |d| d.forward(&x))?;
        Ok((self.head.forward(&x)?.add(&self.bias)?, next))
    }
}

#[test]
fn modules_with_a_state_can_be_trained_saved_and_averaged() {
    let mut net = Decoder::new().unwrap();
    net.eval();
    let token = Tensor::from_slice(&[1i64, 5], 2, Device::Cpu).unwrap();
    let (first, state) = net.call((&token, None)).unwrap();
    let (second, _) = net.call((&token, Some(&state))).unwrap();
    assert_eq!(first.shape().dims(), [2, 7]);
    assert!(!first.equal(&second).unwrap(), "the state counts");

    let mut sgd =
        Sgd::new(net.parameters_mut().into_iter().filter(|p| p.requires_grad()).collect(), SgdConfig::default())
            .unwrap();
    net.call((&token, Some(&state))).unwrap().0.square().unwrap().sum((), false).unwrap().backward().unwrap();
    sgd.step().unwrap();
    let after = net.call((&token, None)).unwrap().0;
    assert!(!after.equal(&first).unwrap());

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("net.safetensors");
    io::save_checkpoint(&file, &[("model", &net)]).unwrap();
    let mut other = Decoder::new().unwrap();
    other.eval();
    io::load_checkpoint(&file, &mut [("model", &mut other)]).unwrap();
    assert!(other.call((&token, None)).unwrap().0.equal(&after).unwrap());

    let average = AveragedModel::swa(Decoder::new().unwrap()).unwrap();
    average.update_parameters(&net).unwrap();
    average.eval();
    assert!(average.call((&token, None)).unwrap().0.equal(&after).unwrap());
    let error = net.forward(&token).unwrap_err().to_string();
    assert_eq!(
        error,
        "Decoder: the module is not a function of one tensor: use Forward::call, or the module's own method"
    );
}

#[test]
fn layers_accept_states_and_several_inputs() {
    let lstm = Lstm::new(3, 5, RnnOptions::default(), Device::Cpu).unwrap();
    let x = Tensor::randn([4, 2, 3], Device::Cpu).unwrap();
    let (out, state) = lstm.call((&x, None)).unwrap();
    let (want, _) = lstm.run(&x, Some(&state)).unwrap();
    assert!(out.equal(&lstm.forward(&x).unwrap()).unwrap());
    assert!(lstm.call((&x, Some(&state))).unwrap().0.equal(&want).unwrap());
    let attention = MultiheadAttention::new(8, 2, Device::Cpu).unwrap();
    let [q, k, v] = [3, 5, 5].map(|n| Tensor::randn([2, n, 8], Device::Cpu).unwrap());
    let want = attention.attend(&q, &k, &v, Default::default()).unwrap().0;
    assert!(attention.call((&q, &k, &v)).unwrap().equal(&want).unwrap());
}

#[test]
fn summaries_count_each_parameter_once() {
    let net = Decoder::new().unwrap();
    let table = summary(&net);
    let lines: Vec<_> = table.layers.iter().map(|l| (l.depth, &l.name[..], l.type_name, l.parameters)).collect();
    let cell = |inputs: usize| 4 * 4 * (inputs + 4) + 2 * 4 * 4;
    let want = [
        (0, "", "Decoder", 21 + cell(3) + cell(4) + 35 + 7),
        (1, "embedding", "Embedding", 21),
        (1, "cells.0", "LstmCell", cell(3)),
        (1, "cells.1", "LstmCell", cell(4)),
        (1, "dropout", "Dropout", 0),
        (1, "head", "Sequential", 35),
        (2, "head.0", "Linear", 35),
    ];
    assert_eq!(lines, want);
    // The decoder's own bias is a plain tensor that does not require a gradient, so it is not counted as trainable.
    assert_eq!((table.parameters, table.trainable), (want[0].3, want[0].3 - 7));
    let shapes = |i: usize| table.layers[i].shapes.iter().map(|(n, s)| format!("{n} {s}")).collect::<Vec<_>>();
    assert_eq!(
        (shapes(0), shapes(5), shapes(6)),
        (vec!["bias [7]".into()], vec![], vec!["weight [7, 4]".into(), "bias [7]".into()])
    );
    assert_eq!((table.buffers, table.nbytes), (0, 4 * table.parameters));

    let half = Linear::new(2, 2, (DType::BF16, Device::Cpu)).unwrap();
    let twice = Sequential::new().push(half).push(Sequential::new());
    assert_eq!(summary(&twice).nbytes, 12);
    let names: Vec<String> = twice.named_modules("net").into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["net.0", "net.1"]);
    assert!(
        summary(&twice).to_string().ends_with("6 parameters, 6 of them trainable; 0 numbers in buffers; 12 bytes\n")
    );
}

/// A module whose fields have the names of a PyTorch file: a dotted name, a Rust keyword and an empty name.
struct Renamed {
    query: Linear,
    r#type: Embedding,
    list: Vec<Linear>,
    inner: Dense,
}

struct Dense {
    dense: Linear,
}

impl Module for Dense {
    claystone::parts!(dense);
}

impl Module for Renamed {
    claystone::parts!(query as "self.query", r#type, list as "attention.list", inner as "",);
}

#[test]
fn fields_have_the_names_given_to_parts() {
    let linear = || Linear::new(2, 2, Device::Cpu).unwrap().without_bias();
    let r#type = Embedding::new(3, 2, Device::Cpu).unwrap();
    let inner = Dense { dense: linear() };
    let mut net = Renamed { query: linear(), r#type, list: vec![linear(), linear()], inner };
    let tensors =
        ["self.query.weight", "type.weight", "attention.list.0.weight", "attention.list.1.weight", "dense.weight"];
    assert_eq!(net.state_dict().names().collect::<Vec<_>>(), tensors);
    let names: Vec<String> = net.named_parameters_mut("bert").into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, tensors.map(|name| format!("bert.{name}")));
    let modules: Vec<String> = net.named_modules("").into_iter().map(|(name, _)| name).collect();
    assert_eq!(modules, ["self.query", "type", "attention.list.0", "attention.list.1", "", "dense"]);
    let table = summary(&net);
    let lines: Vec<_> = table.layers.iter().map(|l| (l.depth, &l.name[..], l.type_name)).collect();
    let want = [
        (0, "", "Renamed"),
        (1, "self.query", "Linear"),
        (1, "type", "Embedding"),
        (1, "attention.list.0", "Linear"),
        (1, "attention.list.1", "Linear"),
        (1, "dense", "Linear"),
    ];
    assert_eq!(lines, want);
    let renamed = net.state_dict().rename(|name| name.replace("self.", "")).unwrap();
    assert!(renamed.get("query.weight").unwrap().shares_storage(net.query.weight()));
    assert_eq!(renamed.len(), 5);
    let error = net.state_dict().rename(|name| name.replace("list.0", "list.1")).unwrap_err().to_string();
    let want = "StateDict::rename: attention.list.1.weight is the second entry that becomes attention.list.1.weight";
    assert_eq!(error, want);
}
