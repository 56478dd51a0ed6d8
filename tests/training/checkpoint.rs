//! State dicts and checkpoints. A resumed training run must give the same bits as an uninterrupted run.

use std::path::Path;

use claystone::io::{self, Stateful};
use claystone::nn::{Activation, AveragedModel, BatchNorm1d, Dropout, Linear, Module, Sequential, StateDict};
use claystone::optim::*;
use claystone::{DType, Device, Generator, Result, Tensor, with_generator};

use crate::common::each_device;

/// A training run. Each step draws random numbers and changes the learning rate, the loss scale and the running statistics.
struct Run {
    net: Sequential,
    ema: AveragedModel<Sequential>,
    adam: AdamW,
    scheduler: Scheduler,
    scaler: GradScaler,
    generator: Generator,
    epoch: usize,
    losses: Vec<f64>,
}

impl Run {
    fn new(seed: u64, dtype: DType, device: Device) -> Result<Run> {
        let generator = Generator::new(seed);
        let (mut net, ema) = with_generator(&generator, || {
            Ok::<_, claystone::Error>((
                Run::net(dtype, device)?,
                AveragedModel::ema(Run::net(DType::F32, device)?, 0.9)?,
            ))
        })?;
        let mut adam = AdamW::grouped(net.named_parameters_mut(""), |name, _| AdamWConfig {
            weight_decay: if name.ends_with("bias") { 0.0 } else { 0.1 },
            lr: 0.02,
            ..Default::default()
        })?;
        assert_eq!(adam.rules().count(), 2);
        let scheduler = Scheduler::new(&mut adam, ExponentialLr { gamma: 0.9 })?;
        let scaler = GradScaler::new(GradScalerConfig { init_scale: 64.0, growth_interval: 2, ..Default::default() })?;
        Ok(Run { net, ema, adam, scheduler, scaler, generator, epoch: 0, losses: Vec::new() })
    }

    fn net(dtype: DType, device: Device) -> Result<Sequential> {
        Ok(Sequential::new()
            .push(Linear::new(4, 8, (dtype, device))?.with_activation(Activation::Relu))
            .push(BatchNorm1d::new(8, (dtype, device))?)
            .push(Dropout::new(0.3)?)
            .push(Linear::new(8, 2, (dtype, device))?))
    }

    fn save(&self, path: &Path) -> Result<()> {
        io::save_checkpoint(
            path,
            &[
                ("model", &self.net),
                ("ema", &self.ema),
                ("optimizer", &self.adam),
                ("scheduler", &self.scheduler),
                ("scaler", &self.scaler),
                ("generator", &self.generator),
                ("epoch", &self.epoch),
                ("losses", &self.losses),
            ],
        )
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        io::load_checkpoint(
            path,
            &mut [
                ("model", &mut self.net),
                ("ema", &mut self.ema),
                ("optimizer", &mut self.adam),
                ("scheduler", &mut self.scheduler),
                ("scaler", &mut self.scaler),
                ("generator", &mut self.generator),
                ("epoch", &mut self.epoch),
                ("losses", &mut self.losses),
            ],
        )
    }

    fn train_to(&mut self, epochs: usize, dtype: DType, device: Device) -> Result<()> {
        while self.epoch < epochs {
            let loss = with_generator(&self.generator, || {
                let x = Tensor::randn([16, 4], (dtype, device))?;
                self.net.forward(&x)?.square()?.mean((), false)
            })?;
            self.adam.zero_grad();
            self.scaler.scale(&loss)?.backward()?;
            self.scaler.step(&mut self.adam)?;
            self.scaler.update();
            self.ema.update_parameters(&self.net)?;
            self.scheduler.step(&mut self.adam)?;
            self.losses.push(loss.to_dtype(DType::F64)?.item()?);
            self.epoch += 1;
        }
        Ok(())
    }
}

/// Returns the names, dtypes, shapes and bits of all tensors.
fn bits(state: &StateDict) -> Vec<(String, DType, Vec<usize>, Vec<u64>)> {
    let bits = |t: &Tensor| -> Vec<u64> {
        let wide = t.to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
        wide.into_iter().map(f64::to_bits).collect()
    };
    state.iter().map(|(n, t)| (n.to_string(), t.dtype(), t.shape().dims().to_vec(), bits(t))).collect()
}

#[test]
fn resumed_runs_give_the_same_bits() {
    each_device(|device| {
        for dtype in [DType::F32, DType::BF16] {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("run.safetensors");
            let mut whole = Run::new(3, dtype, device).unwrap();
            whole.train_to(4, dtype, device).unwrap();
            whole.save(&file).unwrap();
            whole.train_to(9, dtype, device).unwrap();
            // The run starts from a different seed, so equal bits show that all state comes from the file.
            let mut resumed = Run::new(77, dtype, device).unwrap();
            resumed.load(&file).unwrap();
            assert_eq!((resumed.epoch, resumed.losses.len()), (4, 4));
            resumed.train_to(9, dtype, device).unwrap();
            assert_eq!(whole.losses, resumed.losses, "{dtype} on {device}");
            assert_eq!(bits(&Module::state_dict(&whole.net)), bits(&Module::state_dict(&resumed.net)));
            assert_eq!(bits(&Module::state_dict(&whole.ema)), bits(&Module::state_dict(&resumed.ema)));
            assert_eq!(
                bits(&Optimizer::state_dict(&whole.adam).unwrap()),
                bits(&Optimizer::state_dict(&resumed.adam).unwrap())
            );
            assert_eq!(whole.adam.learning_rates(), resumed.adam.learning_rates());
            assert_eq!(whole.scaler.get_scale(), resumed.scaler.get_scale());
            assert!(whole.scaler.get_scale() > 64.0, "the scaler has grown");
            assert_eq!(whole.generator.state(), resumed.generator.state());
        }
    });
}

#[test]
fn unrequested_parts_are_ignored_and_mismatched_parts_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.safetensors");
    let run = Run::new(1, DType::F32, Device::Cpu).unwrap();
    run.save(&file).unwrap();
    let mut other = Run::new(2, DType::F32, Device::Cpu).unwrap();
    io::load_checkpoint(&file, &mut [("model", &mut other.net)]).unwrap();
    assert_eq!(bits(&Module::state_dict(&other.net)), bits(&Module::state_dict(&run.net)));

    let error = |parts: &mut [(&str, &mut dyn Stateful)]| io::load_checkpoint(&file, parts).unwrap_err().to_string();
    let mut epoch = 5usize;
    let missing = error(&mut [("epoch", &mut epoch), ("teacher", &mut 0.5f64)]);
    assert!(missing.contains("run.safetensors: there is no part teacher, only "), "{missing}");
    assert!(missing.contains("scheduler") && epoch == 5, "nothing was loaded");
    let mut small = Linear::new(2, 2, Device::Cpu).unwrap();
    let wrong = error(&mut [("model", &mut small)]);
    assert!(wrong.contains("part model: the state has other names: missing [\"weight\""), "{wrong}");
    let number = error(&mut [("losses", &mut epoch)]);
    assert!(number.contains("part losses: the state has 0 values, not one number"), "{number}");
    let clash = io::save_checkpoint(&file, &[("a", &1.0f64), ("a.b", &2.0f64)]).unwrap_err().to_string();
    assert!(clash.contains("part a.b is below part a"), "{clash}");
}

#[test]
fn load_state_dict_names_the_mismatched_tensor() {
    let net = |n| Sequential::new().push(Linear::new(3, n, Device::Cpu).unwrap());
    let error = net(4).load_state_dict(&Module::state_dict(&net(5)), true).unwrap_err().to_string();
    let want = "load_state_dict: 0.weight has shape [4, 3] here and [5, 3] in the state: give both the same sizes";
    assert_eq!(error, want);
}

#[test]
fn numbers_tensors_and_generators_can_be_parts() {
    let generator = Generator::new(u64::MAX - 1);
    with_generator(&generator, || Tensor::rand(1, Device::Cpu)).unwrap();
    let state = StateDict::from_parts(&[
        ("whole", &u64::MAX),
        ("negative", &i64::MIN),
        ("float", &-0.1f64),
        ("flag", &true),
        ("history", &vec![1.0, f64::INFINITY]),
        ("order", &Tensor::arange(0, 4, 1, (DType::I64, Device::Cpu)).unwrap()),
        ("generator", &generator),
    ])
    .unwrap();
    let (mut whole, mut negative, mut float, mut flag, mut history) = (0u64, 0i64, 0.0f64, false, vec![]);
    let (mut order, mut later) = (Tensor::zeros(4, (DType::I64, Device::Cpu)).unwrap(), Generator::new(0));
    let load = |order: &mut Tensor, parts: &mut [(&str, &mut dyn Stateful)]| -> Result<()> {
        state.load_parts(parts)?;
        state.load_parts(&mut [("order", order)])
    };
    let parts: &mut [(&str, &mut dyn Stateful)] = &mut [
        ("whole", &mut whole),
        ("negative", &mut negative),
        ("float", &mut float),
        ("flag", &mut flag),
        ("history", &mut history),
        ("generator", &mut later),
    ];
    load(&mut order, parts).unwrap();
    assert_eq!((whole, negative, float, flag), (u64::MAX, i64::MIN, -0.1, true));
    assert_eq!((history, order.to_vec::<i64>().unwrap()), (vec![1.0, f64::INFINITY], vec![0, 1, 2, 3]));
    assert_eq!(later.state(), generator.state());
    let mut wrong = Tensor::zeros(3, (DType::I64, Device::Cpu)).unwrap();
    let error = state.load_parts(&mut [("order", &mut wrong)]).unwrap_err().to_string();
    assert!(error.contains("part order: it has shape [3] here and [4] in the state"), "{error}");
}

#[test]
fn cloned_states_have_separate_memory() {
    let layer = Linear::new(2, 2, Device::Cpu).unwrap();
    let (shared, copy) = (Module::state_dict(&layer), Module::state_dict(&layer).clone());
    let before = bits(&copy);
    shared.get("weight").unwrap().fill_(3.0).unwrap();
    assert_eq!(layer.weight().to_vec::<f32>().unwrap(), [3.0; 4]);
    assert_eq!(bits(&copy), before);
}
