//! Handles on modules: handles with shared tensors, copies, checkpoints and frozen parameters.

use claystone::autograd::{CustomOp, OpContext, checkpoint};
use claystone::nn::*;
use claystone::optim::*;
use claystone::{DType, Device, Generator, Result, Tensor, io, manual_seed, no_grad, ops, with_generator};

use crate::common::{each_device, f64s, in_own_process, vec};

/// A module with fields that are not tensors: `Copy` values, cloned values and an enum.
struct Block {
    up: Linear,
    scale: Tensor,
    drop: Dropout,
    down: Box<Linear>,
    shape: Kind,
    power: i32,
    notes: Vec<String>,
}

#[derive(Clone, PartialEq, Debug)]
enum Kind {
    Plain,
}

impl Module for Kind {
    claystone::parts!(; self);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }
}

impl Module for Block {
    claystone::parts!(up, scale, drop, down, shape; notes);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let h = self.drop.forward(&self.up.forward(x)?)?.mul(&self.scale)?.pow_scalar(self.power)?;
        self.shape.forward(&x.add(&self.down.forward(&h)?)?)
    }
}

fn block(device: Device) -> Block {
    Block {
        up: Linear::new(4, 8, device).unwrap(),
        scale: Tensor::full(8, 0.5, device).unwrap().requires_grad_(true).unwrap(),
        drop: Dropout::new(0.5).unwrap(),
        down: Box::new(Linear::new(8, 4, device).unwrap()),
        shape: Kind::Plain,
        power: 2,
        notes: vec!["a".into()],
    }
}

fn backward(net: &impl Module, x: &Tensor) {
    net.zero_grad();
    net.forward(x).unwrap().square().unwrap().sum((), false).unwrap().backward().unwrap();
}

fn gradients(net: &impl Module) -> Vec<Vec<f32>> {
    net.parameters().iter().map(|p| vec(&p.grad().unwrap())).collect()
}

#[test]
fn handles_share_tensors_and_copies_do_not() {
    each_device(|device| {
        let mut net = Sequential::new().push(block(device)).push(Linear::new(4, 2, device).unwrap());
        let (twin, copy) = (net.shallow_clone(), net.try_clone().unwrap());
        twin.eval();
        net.train();
        let ids = |net: &Sequential| net.parameters().iter().map(|p| p.leaf_id()).collect::<Vec<_>>();
        assert_eq!(ids(&net), ids(&twin));
        assert!(ids(&copy).iter().zip(ids(&net)).all(|(a, b)| a.is_some() && *a != b));
        let x = Tensor::ones([3, 4], device).unwrap();
        copy.eval();
        let before = vec(&twin.forward(&x).unwrap());
        assert_eq!(before, vec(&copy.forward(&x).unwrap()), "on {device}");
        assert_ne!(before, vec(&twin.forward(&x.mul_scalar(2).unwrap()).unwrap()));
        // Each handle must have its own training mode.
        let dropped = (0..20).any(|_| vec(&net.forward(&x).unwrap()) != before);
        assert!(dropped && vec(&twin.forward(&x).unwrap()) == before);
        let mut sgd = Sgd::new(net.parameters_mut(), SgdConfig { lr: 0.1, ..Default::default() }).unwrap();
        backward(&twin, &x);
        sgd.step().unwrap();
        net.eval();
        let after = vec(&net.forward(&x).unwrap());
        assert!(after == vec(&twin.forward(&x).unwrap()) && after != before, "on {device}");
        assert_eq!(before, vec(&copy.forward(&x).unwrap()), "on {device}");
    });
}

#[test]
fn every_layer_supports_handles() {
    let device = Device::Cpu;
    let conv = Conv2d::new(3, 4, [3, 3], Default::default(), device).unwrap();
    let images = Tensor::randn([2, 3, 8, 8], device).unwrap();
    let rows = Tensor::randn([5, 2, 6], device).unwrap();
    let options = RnnOptions { num_layers: 2, bidirectional: true, ..Default::default() };
    fn boxed(layer: impl Module + 'static) -> Box<dyn Module> {
        Box::new(layer)
    }
    let encoder = TransformerEncoderLayer::new(6, 2, TransformerOptions::default(), device).unwrap();
    let layers = [
        (boxed(conv), &images),
        (boxed(BatchNorm2d::new(3, device).unwrap()), &images),
        (boxed(GroupNorm::new(3, 3, device).unwrap()), &images),
        (boxed(InstanceNorm2d::new(3, device)), &images),
        (boxed(Flatten::default()), &images),
        (boxed(Activation::Gelu), &images),
        (boxed(func(|x| x.exp())), &images),
        (boxed(LayerNorm::new(&[6], device).unwrap()), &rows),
        (boxed(RmsNorm::new(&[6], device).unwrap()), &rows),
        (boxed(Lstm::new(6, 4, options, device).unwrap()), &rows),
        (boxed(MultiheadAttention::new(6, 2, device).unwrap()), &rows),
        (boxed(encoder), &rows),
        (boxed(Checkpoint::new(Linear::new(6, 2, device).unwrap())), &rows),
    ];
    for (layer, x) in &layers {
        layer.eval();
        let want = layer.forward(x).unwrap();
        let (twin, copy) = (layer.shallow_clone(), layer.try_clone().unwrap());
        let name = layer.type_name();
        assert!(
            twin.forward(x).unwrap().equal(&want).unwrap() && copy.forward(x).unwrap().equal(&want).unwrap(),
            "{name}"
        );
        let tensors = |m: &dyn Module| m.state_dict().into_iter().map(|(_, t)| t).collect::<Vec<_>>();
        let pairs = |other: &dyn Module| tensors(&**layer).into_iter().zip(tensors(other)).collect::<Vec<_>>();
        assert!(pairs(&*twin).iter().all(|(a, b)| a.shares_storage(b)), "{name}");
        assert!(pairs(&*copy).iter().all(|(a, b)| !a.shares_storage(b)), "{name}");
        assert_eq!(twin.named_parameters("")[..].len(), layer.parameters().len());
        let trained = |m: &dyn Module| m.parameters().iter().map(|p| p.requires_grad()).collect::<Vec<_>>();
        assert_eq!(trained(&*copy), trained(&**layer), "{name}");
    }
}

struct Tied {
    one: Linear,
    other: Linear,
}

impl Module for Tied {
    claystone::parts!(one, other);
}

#[test]
fn tied_parameters_stay_tied_in_copies_and_when_frozen() {
    let one = Linear::new(2, 2, Device::Cpu).unwrap();
    let mut net = Tied { other: one.shallow_clone(), one };
    assert_eq!(net.parameters().len(), 2);
    let copy = net.try_clone().unwrap();
    assert!(copy.parameters().len() == 2 && copy.one.weight().shares_storage(copy.other.weight()));
    net.requires_grad_(false).unwrap();
    assert_eq!((net.parameters().len(), net.trainable_parameters_mut().len()), (2, 0));
    net.requires_grad_(true).unwrap();
    assert_eq!((net.parameters().len(), net.trainable_parameters_mut().len()), (2, 2));
    // The layer's parameters here are tensors that never required gradients.
    let plain = |layer: &Linear| layer.weight().detach();
    struct Plain(Vec<Tensor>);
    impl Module for Plain {
        fn visit<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
            Part::visit_field(&self.0, prefix, visitor);
        }
        fn visit_mut<'a>(&'a mut self, prefix: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
            Part::visit_field_mut(&mut self.0, prefix, visitor);
        }
        fn set_training(&self, _: bool) {}
        fn shallow_clone(&self) -> Plain {
            Plain(Part::clone_handle(&self.0))
        }
    }
    let mut net = Plain(vec![plain(&net.one), plain(&net.other), plain(&copy.one)]);
    net.requires_grad_(true).unwrap();
    assert_eq!(net.trainable_parameters_mut().len(), 2);
}

/// Gradients must equal those of the same network without checkpoints, including dropout.
#[test]
fn checkpointed_modules_give_the_same_gradients() {
    each_device(|device| {
        let net = block(device);
        let kept = Checkpoint::new(net.shallow_clone());
        let x = Tensor::ones([3, 4], device).unwrap();
        with_generator(&Generator::new(5), || backward(&net, &x));
        let want = gradients(&net);
        with_generator(&Generator::new(5), || backward(&kept, &x));
        assert_eq!(gradients(&net), want, "on {device}");
        let names = |m: &dyn Module| m.named_parameters("").into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(&kept), names(&net));
        // The checkpointed module has several inputs.
        let cell = LstmCell::new(4, 3, device).unwrap();
        let twin = cell.shallow_clone();
        let h = checkpoint(move |x| Ok(twin.run(&x[0], None)?.0), &[&x]).unwrap();
        h.sum((), false).unwrap().backward().unwrap();
        assert!(cell.parameters().iter().all(|p| p.grad().is_some()));
    });
}

fn adamw() -> AdamWConfig {
    AdamWConfig { lr: 0.1, ..Default::default() }
}

#[test]
fn optimizers_skip_frozen_parameters_until_they_are_trainable() {
    each_device(|device| {
        for dtype in [DType::F32, DType::BF16] {
            let made = || {
                let first = Linear::new(4, 4, (dtype, device)).unwrap();
                let second = Linear::new(4, 2, (dtype, device)).unwrap();
                Tied { one: first, other: second }
            };
            let forward = |net: &Tied, x: &Tensor| net.other.forward(&net.one.forward(x)?);
            let x = Tensor::ones([3, 4], (dtype, device)).unwrap();
            let mut net = made();
            let mut optimizer = AdamW::new(net.parameters_mut(), adamw()).unwrap();
            let mut step = |net: &Tied| {
                forward(net, &x).unwrap().square().unwrap().sum((), false).unwrap().backward().unwrap();
                optimizer.step().unwrap();
            };
            step(&net);
            // The gradients of this step stay set, but the optimizer must ignore gradients of frozen parameters.
            let weights = |net: &Tied| [f64s(net.one.weight()), f64s(net.other.weight())];
            let before = weights(&net);
            net.one.requires_grad_(false).unwrap();
            step(&net);
            let frozen = weights(&net);
            assert!(frozen[0] == before[0] && frozen[1] != before[1], "{dtype} on {device}");
            assert!(!net.one.forward(&x).unwrap().requires_grad());
            net.one.requires_grad_(true).unwrap();
            step(&net);
            assert_ne!(weights(&net)[0], before[0], "{dtype} on {device}");
        }
    });
}

#[test]
fn modules_converted_while_frozen_can_be_trained() {
    let device = Device::Cpu;
    let mut net = Linear::new(4, 2, device).unwrap();
    let mut optimizer = AdamW::new(net.parameters_mut(), adamw()).unwrap();
    net.requires_grad_(false).unwrap();
    net.to_dtype(DType::F64).unwrap();
    assert!(!net.weight().requires_grad());
    net.requires_grad_(true).unwrap();
    let before = f64s(net.weight());
    backward(&net, &Tensor::ones([3, 4], (DType::F64, device)).unwrap());
    optimizer.step().unwrap();
    assert_ne!(f64s(net.weight()), before);
}

#[test]
fn optimizers_own_only_trainable_parameters() {
    let device = Device::Cpu;
    let mut net = Tied { one: Linear::new(4, 4, device).unwrap(), other: Linear::new(4, 2, device).unwrap() };
    net.one.requires_grad_(false).unwrap();
    let x = Tensor::ones([3, 4], device).unwrap();
    let step = |net: &Tied, optimizer: &mut dyn Optimizer| {
        net.other.forward(&net.one.forward(&x)?)?.sum((), false)?.backward()?;
        optimizer.step()
    };
    let mut optimizers = vec![
        AdamW::new(net.parameters_mut(), adamw()).unwrap(),
        AdamW::grouped(net.named_parameters_mut(""), |_, _| adamw()).unwrap(),
    ];
    for optimizer in &mut optimizers {
        assert_eq!(optimizer.parameters().len(), 2);
        let before = [vec(net.one.weight()), vec(net.other.weight())];
        step(&net, optimizer).unwrap();
        assert!(vec(net.one.weight()) == before[0] && vec(net.other.weight()) != before[1]);
    }
    // The error must name a trainable parameter that the optimizer does not own.
    net.one.requires_grad_(true).unwrap();
    for mut optimizer in optimizers {
        let error = step(&net, &mut optimizer).unwrap_err().to_string();
        assert!(
            error.contains("of shape [4, 4] was frozen when the optimiser was made") && error.contains("with_group()")
        );
        let mut optimizer = optimizer.with_group(net.one.parameters_mut(), adamw()).unwrap();
        let before = vec(net.one.weight());
        step(&net, &mut optimizer).unwrap();
        assert_ne!(vec(net.one.weight()), before);
        net.one.requires_grad_(false).unwrap();
        net.one.requires_grad_(true).unwrap();
    }
    net.requires_grad_(false).unwrap();
    let error = AdamW::new(net.parameters_mut(), adamw()).err().unwrap().to_string();
    assert!(error.contains("no parameter requires a gradient: call requires_grad_(true)"), "{error}");
}

/// A linear layer with a low-rank adapter.
struct Lora {
    base: Linear,
    lora_a: Linear,
    lora_b: Linear,
}

impl Module for Lora {
    claystone::parts!(base as "", lora_a, lora_b);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.base.forward(x)?.add(&self.lora_b.forward(&self.lora_a.forward(x)?)?)
    }
}

#[test]
fn adapters_can_be_trained_and_saved_separately() {
    each_device(|device| {
        let folder = tempfile::tempdir().unwrap();
        let (full, adapters) = (folder.path().join("full.safetensors"), folder.path().join("lora.safetensors"));
        let base = Linear::new(8, 8, device).unwrap();
        io::save(&full, &base.state_dict()).unwrap();
        let made = || {
            let mut base = Linear::new(8, 8, device).unwrap();
            base.load_state_dict(&io::load(&full, device).unwrap(), true).unwrap();
            base.requires_grad_(false).unwrap();
            let without_bias = |a, b| Linear::new(a, b, device).unwrap().without_bias();
            let net = Lora { base, lora_a: without_bias(8, 2), lora_b: without_bias(2, 8) };
            no_grad(|| net.lora_b.weight().zero_().map(drop)).unwrap();
            net
        };
        let mut net = made();
        let mut optimizer = AdamW::new(net.trainable_parameters_mut(), adamw()).unwrap();
        assert_eq!(optimizer.parameters().iter().map(|p| p.numel()).sum::<usize>(), 32);
        let x = Tensor::ones([3, 8], device).unwrap();
        for _ in 0..2 {
            backward(&net, &x);
            optimizer.step().unwrap();
        }
        assert_eq!(vec(net.base.weight()), vec(base.weight()), "on {device}");
        assert!(net.base.weight().grad().is_none());
        io::save(&adapters, &net.state_dict().filter(|name| name.contains("lora_"))).unwrap();
        let saved = io::load(&adapters, device).unwrap();
        assert_eq!(saved.names().collect::<Vec<_>>(), ["lora_a.weight", "lora_b.weight"]);
        let other = made();
        let keys = other.load_state_dict(&saved, false).unwrap();
        assert_eq!(keys.missing_keys, ["weight", "bias"]);
        assert_eq!(vec(&other.forward(&x).unwrap()), vec(&net.forward(&x).unwrap()));
    });
}

/// The number of rows and of columns of each weight.
const SIDE: usize = 128;
/// The number of weights.
const WEIGHT_COUNT: usize = 16;
/// The total size of all weights, in bytes.
const WEIGHT_BYTES: usize = 4 * SIDE * SIDE * WEIGHT_COUNT;

/// A custom operation that multiplies by all weights. Its backward writes gradients into gradient slots.
struct ProductOfAll;

impl CustomOp for ProductOfAll {
    fn name(&self) -> &'static str {
        "products"
    }

    fn forward(&self, ctx: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
        ctx.save_for_backward(inputs);
        inputs[1..].iter().try_fold(inputs[0].shallow_clone(), |x, w| x.matmul(w))
    }

    fn backward(&self, ctx: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let saved = ctx.saved_tensors()?;
        let mut inputs = vec![saved[0].shallow_clone()];
        for w in &saved[1..] {
            inputs.push(inputs[inputs.len() - 1].matmul(w)?);
        }
        let (mut grad, mut out) = (grad.shallow_clone(), vec![None; 0]);
        for i in (1..saved.len()).rev() {
            let x = inputs[i - 1].t()?;
            out.insert(
                0,
                Some(match ctx.grad_slot(i) {
                    Some(slot) => {
                        ops::call_into("matmul", &[Some(&x), Some(&grad)], &[], &[&slot])?;
                        slot
                    }
                    None => x.matmul(&grad)?,
                }),
            );
            grad = grad.matmul(&saved[i].t()?)?;
        }
        out.insert(0, None);
        Ok(out)
    }
}

/// A custom operation with a single product. Its backward does not use gradient slots.
struct Product;

impl CustomOp for Product {
    fn name(&self) -> &'static str {
        "product"
    }

    fn forward(&self, ctx: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
        ctx.save_for_backward(inputs);
        inputs[0].matmul(inputs[1])
    }

    fn backward(&self, ctx: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let saved = ctx.saved_tensors()?;
        Ok(vec![Some(grad.matmul(&saved[1].t()?)?), Some(saved[0].t()?.matmul(grad)?)])
    }
}

#[test]
fn gradients_of_an_optimizer_are_in_memory_once() {
    if !in_own_process("handles::gradients_of_an_optimizer_are_in_memory_once") {
        return;
    }
    each_device(|device| {
        let x = Tensor::randn([2, SIDE], device).unwrap();
        type Forward = fn(&Tensor, &[Tensor]) -> Result<Tensor>;
        let forwards: [(&str, Forward); 4] = [
            ("plain", |x, w| w.iter().try_fold(x.shallow_clone(), |x, w| x.matmul(w))),
            ("checkpoint", |x, w| {
                let w: Vec<Tensor> = w.iter().map(Tensor::shallow_clone).collect();
                checkpoint(move |x| w.iter().try_fold(x[0].shallow_clone(), |x, w| x.matmul(w)), &[x])
            }),
            ("custom", |x, w| Tensor::apply_op(ProductOfAll, &std::iter::once(x).chain(w).collect::<Vec<_>>())),
            ("customs", |x, w| w.iter().try_fold(x.shallow_clone(), |x, w| Tensor::apply_op(Product, &[&x, w]))),
        ];
        let mut want: Option<Vec<Vec<f64>>> = None;
        for (name, forward) in forwards {
            manual_seed(2);
            let weight = |_| Tensor::randn([SIDE, SIDE], device).unwrap().mul_scalar(0.1).unwrap();
            let mut weights: Vec<Tensor> = (0..WEIGHT_COUNT).map(|i| weight(i).requires_grad_(true).unwrap()).collect();
            let mut sgd = Sgd::new(weights.iter_mut().collect(), SgdConfig::default()).unwrap();
            for _ in 0..2 {
                sgd.zero_grad();
                let loss = forward(&x, &weights).unwrap().sum((), false).unwrap();
                device.synchronize().unwrap();
                device.reset_peak_stats().unwrap();
                let before = device.memory_stats().unwrap().allocated_bytes.current;
                loss.backward().unwrap();
                device.synchronize().unwrap();
                let more = (device.memory_stats().unwrap().allocated_bytes.peak - before) as usize;
                println!("{name} on {device}: {more} bytes beside gradients of {WEIGHT_BYTES}");
                assert!(more < WEIGHT_BYTES / 4, "{name} on {device}: {more} bytes beside gradients of {WEIGHT_BYTES}");
            }
            let got: Vec<Vec<f64>> = weights.iter().map(|w| f64s(&w.grad().unwrap()).into_iter().collect()).collect();
            let want = want.get_or_insert_with(|| got.clone());
            for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                assert!((got - want).abs() <= 1e-4 * (1.0 + want.abs()), "{name} on {device}: {got}, not {want}");
            }
            sgd.step().unwrap();
        }
    });
}
