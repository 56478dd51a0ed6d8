//! Schedules and weight averages, compared with values of PyTorch that `tests/data/training.py` wrote.

use claystone::io::{self, Stateful};
use claystone::nn::{AveragedModel, BatchNorm1d, Linear, Module, Sequential, StateDict};
use claystone::optim::*;
use claystone::{DType, Device, Tensor};

use crate::common::{each_device, f64s};

const STEPS: usize = 40;

fn reference(name: &str) -> Tensor {
    let all = io::load("tests/data/training.npz", Device::Cpu).unwrap();
    all.get(name).unwrap().shallow_clone()
}

/// Returns an optimizer with two groups and the initial rates of the reference.
fn optimizer() -> Sgd {
    let leaf = || Tensor::zeros(1, Device::Cpu).unwrap().requires_grad_(true).unwrap();
    let config = |lr| SgdConfig { lr, ..Default::default() };
    let sgd = Sgd::new(vec![&mut leaf()], config(0.5)).unwrap();
    sgd.with_group(vec![&mut leaf()], config(0.02)).unwrap()
}

fn assert_rates(name: &str, rates: &[Vec<f64>]) {
    let want = f64s(&reference(name));
    assert_eq!(want.len(), 2 * STEPS);
    for (i, (got, want)) in rates.iter().flatten().zip(want).enumerate() {
        assert!((got - want).abs() <= 1e-12 * want.abs(), "{name}, step {}: {got} instead of {want}", i / 2);
    }
}

#[test]
fn schedules_match_pytorch() {
    let follows = |name: &str, schedule: Box<dyn Schedule>| {
        let mut sgd = optimizer();
        let mut scheduler =
            Scheduler::new(&mut sgd, move |base: f64, step: usize| schedule.learning_rate(base, step)).unwrap();
        let mut rates = Vec::new();
        for _ in 0..STEPS {
            rates.push(sgd.learning_rates());
            scheduler.step(&mut sgd).unwrap();
        }
        assert_rates(name, &rates);
    };
    follows("restarts", Box::new(CosineAnnealingWarmRestarts::new(7)));
    follows("restarts_mult", Box::new(CosineAnnealingWarmRestarts { t_0: 3, t_mult: 2, eta_min: 0.01 }));
    let one_cycle = OneCycleLr::new(0.5, STEPS);
    follows("one_cycle", Box::new(one_cycle));
    let linear = OneCycleLr {
        pct_start: 0.25,
        anneal_strategy: AnnealStrategy::Linear,
        div_factor: 10.0,
        final_div_factor: 100.0,
        ..one_cycle
    };
    follows("one_cycle_linear", Box::new(linear));
    follows("one_cycle_three_phase", Box::new(OneCycleLr { three_phase: true, ..one_cycle }));
    // The rising phase has only one step. PyTorch divides by zero in this case.
    let short = OneCycleLr { pct_start: 0.1, ..OneCycleLr::new(0.5, 10) };
    assert_eq!([0, 9, 20].map(|t| short.learning_rate(1.0, t)), [0.5, 0.5 / 25.0 / 1e4, 0.5 / 25.0 / 1e4]);
}

#[test]
fn reduce_lr_on_plateau_matches_pytorch_and_can_be_resumed() {
    let metrics = f64s(&reference("metrics"));
    let follows = |name: &str, config: ReduceLrOnPlateauConfig| {
        let mut sgd = optimizer();
        let mut plateau = ReduceLrOnPlateau::new(config).unwrap();
        let mut rates = Vec::new();
        for metric in &metrics {
            rates.push(sgd.learning_rates());
            plateau.step(&mut sgd, *metric).unwrap();
            let mut later = ReduceLrOnPlateau::new(config).unwrap();
            Stateful::load_state_dict(&mut later, &plateau.state_dict().unwrap()).unwrap();
            assert_eq!(later, plateau);
            plateau = later;
        }
        assert_rates(name, &rates);
    };
    let plain = ReduceLrOnPlateauConfig::default();
    follows("plateau", ReduceLrOnPlateauConfig { patience: 2, ..plain });
    let cooldown = ReduceLrOnPlateauConfig {
        factor: 0.5,
        patience: 1,
        threshold: 0.05,
        threshold_mode: ThresholdMode::Abs,
        cooldown: 3,
        min_lr: 0.01,
        ..plain
    };
    follows("plateau_cooldown", cooldown);
    let max = ReduceLrOnPlateauConfig { mode: PlateauMode::Max, ..plain };
    follows("plateau_max", ReduceLrOnPlateauConfig { factor: 0.3, patience: 3, threshold: 0.01, ..max });
    let abs = ReduceLrOnPlateauConfig { patience: 0, threshold_mode: ThresholdMode::Abs, eps: 1e-3, ..max };
    follows("plateau_max_abs", abs);
    let error = ReduceLrOnPlateau::new(ReduceLrOnPlateauConfig { factor: 1.0, ..plain }).unwrap_err().to_string();
    assert_eq!(error, "ReduceLrOnPlateau::new: factor is 1, it must be at least 0 and below 1");
}

#[test]
fn averages_of_weights_match_pytorch() {
    let weights = reference("weights");
    each_device(|device| {
        for (name, decay) in [("ema", Some(0.9)), ("swa", None)] {
            let linear = || Linear::new(3, 4, device).unwrap().without_bias();
            let averaged = |module| match decay {
                Some(decay) => AveragedModel::ema(module, decay).unwrap(),
                None => AveragedModel::swa(module).unwrap(),
            };
            let (layer, mut average, want) = (linear(), averaged(linear()), reference(name));
            for step in 0..weights.shape().dims()[0] {
                layer.weight().detach().copy_(&weights.i(step).unwrap().to_device(device).unwrap()).unwrap();
                average.update_parameters(&layer).unwrap();
                // A new average must continue from the saved state of the old average.
                let later = averaged(linear());
                later.load_state_dict(&Module::state_dict(&average), true).unwrap();
                average = later;
                let want = f64s(&want.i(step).unwrap());
                for (got, want) in f64s(average.module().weight()).iter().zip(want) {
                    assert!((got - want).abs() < 1e-6, "{name}, update {step} on {device}: {got} instead of {want}");
                }
            }
        }
    });
}

#[test]
fn averages_include_buffers_and_may_be_in_f32() {
    each_device(|device| {
        let net = |dtype: DType| Sequential::new().push(BatchNorm1d::new(2, (dtype, device)).unwrap());
        let (model, average) = (net(DType::BF16), AveragedModel::ema(net(DType::F32), 0.999).unwrap());
        let state = Module::state_dict(&model);
        average.update_parameters(&model).unwrap();
        state.get("0.running_mean").unwrap().fill_(3.0).unwrap();
        state.get("0.weight").unwrap().fill_(2.0).unwrap();
        average.update_parameters(&model).unwrap();
        let averages: StateDict = Module::state_dict(&average);
        assert!(f64s(averages.get("module.0.running_mean").unwrap()).iter().all(|x| *x == 3.0));
        let weight = f64s(averages.get("module.0.weight").unwrap())[0];
        assert!((weight - 1.001).abs() < 1e-6, "{weight} on {device}");
        assert_eq!(averages.get("n_averaged").unwrap().item::<i64>().unwrap(), 2);
    });
    let layer = |n| Linear::new(3, n, Device::Cpu).unwrap();
    let error = AveragedModel::swa(layer(4)).unwrap().update_parameters(&layer(5)).unwrap_err().to_string();
    let want = "the average has weight of shape [4, 3] where the model has weight of shape [5, 3]: give both the same architecture";
    assert!(error.ends_with(want), "{error}");
}
