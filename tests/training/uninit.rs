//! Modules that are created without memory and get their values from a file.

use claystone::device::count_launches;
use claystone::nn::{
    self, BatchNorm2d, Buffer, Conv2d, ConvTranspose1d, Embedding, GroupNorm, InstanceNorm2d, LayerNorm, Linear, Lstm,
    LstmCell, Module, MultiheadAttention, PRelu, RmsNorm, RnnOptions, StateDict, Transformer, TransformerOptions, init,
};
use claystone::optim::{AdamW, AdamWConfig};
use claystone::{ConvOptions, ConvTransposeOptions, DType, Device, Generator, Result, Tensor, io};

use crate::common::{each_device, in_own_process};

/// A module with parameters from every initializer (direct, or followed by operations), and a table that is computed on the host.
struct Own {
    composed: Tensor,
    filled: Vec<Tensor>,
    steps: Buffer,
    table: Tensor,
}

impl Own {
    fn new(device: Device) -> Result<Own> {
        let empty = || Tensor::empty([6, 4], device);
        let filled: Vec<Tensor> = (0..9).map(|_| empty()).collect::<Result<_>>()?;
        init::constant_(&filled[0], 3.0)?;
        init::uniform_(&filled[1], -1.0, 1.0)?;
        init::normal_(&filled[2], 0.0, 0.02)?;
        init::trunc_normal_(&filled[3], 0.0, 1.0, -2.0, 2.0)?;
        init::kaiming_uniform_(&filled[4], 0.0, init::Fan::In)?;
        init::xavier_normal_(&filled[5], 1.0)?;
        init::orthogonal_(&filled[6], 1.0)?;
        filled[7].uniform_(0.0, 1.0)?.narrow(0, 2, 3)?.copy_(&Tensor::ones(4, device)?)?;
        filled[8].exponential_(1.0)?.t()?.zero_()?;
        let composed = Tensor::randn([8, 4], device)?.mul_scalar(0.02)?.add(&Tensor::full(4, 1.0, device)?)?;
        Ok(Own {
            composed: composed.requires_grad_(true)?,
            filled,
            steps: Buffer(Tensor::randint(0, 9, 3, (DType::I64, device))?),
            table: Tensor::arange(0, 8, 1, (DType::F32, device))?.mul_scalar(0.5)?.sin()?,
        })
    }
}

impl Module for Own {
    claystone::parts!(composed, filled, steps; table);
}

struct Net {
    own: Own,
    linear: Linear,
    embedding: Embedding,
    conv: Conv2d,
    transposed: ConvTranspose1d,
    batch: BatchNorm2d,
    instance: InstanceNorm2d,
    layer: LayerNorm,
    group: GroupNorm,
    rms: RmsNorm,
    prelu: PRelu,
    attention: MultiheadAttention,
    lstm: Lstm,
    cell: LstmCell,
    transformer: Transformer,
}

impl Net {
    fn new(device: Device) -> Result<Net> {
        let options = TransformerOptions { dim_feedforward: 16, ..TransformerOptions::default() };
        Ok(Net {
            own: Own::new(device)?,
            linear: Linear::new(40, 30, device)?,
            embedding: Embedding::new(50, 8, device)?.with_padding_idx(3)?,
            conv: Conv2d::new(3, 8, [3, 3], ConvOptions::default(), device)?,
            transposed: ConvTranspose1d::new(4, 2, [3], ConvTransposeOptions::default(), device)?,
            batch: BatchNorm2d::new(7, device)?,
            instance: InstanceNorm2d::new(5, device).with_affine()?.with_running_stats()?,
            layer: LayerNorm::new(&[9], device)?,
            group: GroupNorm::new(2, 6, device)?,
            rms: RmsNorm::new(&[11], device)?,
            prelu: PRelu::new(3, 0.25, device)?,
            attention: MultiheadAttention::new(8, 2, device)?,
            lstm: Lstm::new(5, 6, RnnOptions::default(), device)?,
            cell: LstmCell::new(5, 6, device)?,
            transformer: Transformer::new(8, 2, [1, 1], options, device)?,
        })
    }
}

impl Module for Net {
    claystone::parts!(
        own,
        linear,
        embedding,
        conv,
        transposed,
        batch,
        instance,
        layer,
        group,
        rms,
        prelu,
        attention,
        lstm,
        cell,
        transformer
    );
}

/// Returns the result of `f`, and the peak of requested bytes on the device minus the requested bytes at the start.
fn with_peak_bytes<R>(device: Device, f: impl FnOnce() -> R) -> (R, i64) {
    device.reset_peak_stats().unwrap();
    let bytes = || device.memory_stats().unwrap().requested_bytes;
    let before = bytes().current;
    let result = f();
    (result, bytes().peak as i64 - before as i64)
}

fn bytes(state: &StateDict) -> i64 {
    state.iter().map(|(_, t)| (t.numel() * t.dtype().size()) as i64).sum()
}

#[test]
fn modules_without_memory_adopt_loaded_tensors() {
    // Memory statistics and the random generator are shared by the process.
    if !in_own_process("uninit::modules_without_memory_adopt_loaded_tensors") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("net.safetensors");
    each_device(|device| {
        let saved = Net::new(device).unwrap().state_dict();
        io::save(&path, &saved).unwrap();
        let table = Own::new(device).unwrap().table;
        let drawn = Generator::current().state();
        let ((made, launches), peak) = with_peak_bytes(device, || count_launches(|| nn::uninit(|| Net::new(device))));
        let mut net = made.unwrap();
        assert_eq!(Generator::current().state(), drawn, "no random number");
        assert!(net.state_dict().iter().all(|(_, t)| t.is_uninit()));
        // The table is not a parameter, so it is computed as usual: 8 numbers and two operations.
        assert!(launches <= 3 && peak <= 1024, "{launches} launches, {peak} bytes");
        assert_eq!(net.own.table.to_vec::<f32>().unwrap(), table.to_vec::<f32>().unwrap());

        let (loaded, peak) = with_peak_bytes(device, || io::load(&path, device).unwrap());
        let wanted = bytes(&saved);
        assert!((wanted..=wanted + 1024).contains(&peak), "{peak} bytes for {wanted}");
        let handles: Vec<usize> = loaded.iter().map(|(_, t)| t.storage().allocation() as *const _ as usize).collect();
        let ((keys, launches), peak) =
            with_peak_bytes(device, || count_launches(|| net.assign_state_dict(loaded, true)));
        assert_eq!((keys.unwrap().missing_keys.len(), launches, peak), (0, 0, 0), "nothing is copied");
        let state = net.state_dict();
        assert_eq!(state.names().collect::<Vec<_>>(), saved.names().collect::<Vec<_>>());
        for (name, t) in saved.iter() {
            assert!(state.get(name).unwrap().equal(t).unwrap(), "{name}");
            assert!(handles.contains(&(state.get(name).unwrap().storage().allocation() as *const _ as usize)));
        }
        // Loaded parameters must be trainable.
        net.linear
            .forward(&Tensor::ones([2, 40], device).unwrap())
            .unwrap()
            .sum((), false)
            .unwrap()
            .backward()
            .unwrap();
        assert_eq!(net.linear.bias().unwrap().grad().unwrap().to_vec::<f32>().unwrap(), [2.0; 30]);
        assert!(!net.own.filled[0].requires_grad() && net.own.composed.requires_grad());
    });
}

#[test]
fn assigned_values_are_converted_or_copied_if_needed() {
    each_device(|device| {
        let saved = Linear::new(4, 3, (DType::F16, Device::Cpu)).unwrap();
        let mut layer = nn::uninit(|| Linear::new(4, 3, device)).unwrap();
        // The module that provides the state must keep its own tensors.
        layer.assign_state_dict(saved.state_dict(), true).unwrap();
        let mut same = nn::uninit(|| Linear::new(4, 3, (DType::F16, Device::Cpu))).unwrap();
        same.assign_state_dict(saved.state_dict(), true).unwrap();
        let before = saved.weight().to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap();
        saved.weight().detach().zero_().unwrap();
        assert_eq!((layer.weight().dtype(), layer.weight().device()), (DType::F32, device));
        assert_eq!(layer.weight().to_vec::<f32>().unwrap(), before);
        assert_eq!(same.weight().to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap(), before);
        // Views of one storage must be copied to separate row-major tensors.
        let both = Tensor::arange(0, 24, 1, (DType::F32, device)).unwrap().reshape([4, 6]).unwrap();
        let part = both.t().unwrap().narrow(0, 0, 3).unwrap();
        let entries =
            [("weight".to_string(), part.shallow_clone()), ("bias".into(), Tensor::zeros(3, device).unwrap())];
        let mut layer = nn::uninit(|| Linear::new(4, 3, device)).unwrap();
        layer.assign_state_dict(entries.into_iter().collect(), true).unwrap();
        assert!(layer.weight().is_contiguous() && layer.weight().equal(&part).unwrap());
        // Frozen parameters must stay frozen, and can be made trainable later.
        let mut frozen = nn::uninit(|| Linear::new(4, 3, device)).unwrap();
        frozen.requires_grad_(false).unwrap();
        frozen.assign_state_dict(layer.state_dict(), true).unwrap();
        assert!(!frozen.weight().requires_grad() && frozen.weight().equal(&part).unwrap());
        frozen.requires_grad_(true).unwrap();
        assert!(frozen.weight().requires_grad());
        // Parameters that have memory must keep it: the other module's values are copied, as by load_state_dict.
        let place = layer.weight().shallow_clone();
        layer.assign_state_dict(Linear::new(4, 3, device).unwrap().state_dict(), true).unwrap();
        assert!(layer.weight().shares_storage(&place));
    });
}

/// A module with two handles on one parameter, which is trainable or not.
struct Tied {
    first: Tensor,
    second: Tensor,
}

impl Tied {
    fn new(device: Device, trained: bool) -> Result<Tied> {
        let first = Tensor::randn([3, 2], device)?.requires_grad_(trained)?;
        Ok(Tied { second: first.shallow_clone(), first })
    }
}

impl Module for Tied {
    claystone::parts!(first, second);
}

#[test]
fn tied_parameters_stay_tied_for_either_name_in_the_file() {
    each_device(|device| {
        for (trained, name) in [(true, "first"), (true, "second"), (false, "first"), (false, "second")] {
            let mut net = nn::uninit(|| Tied::new(device, trained)).unwrap();
            let entry = (name.to_string(), Tensor::ones([3, 2], device).unwrap());
            let keys = net.assign_state_dict([entry].into_iter().collect(), false).unwrap();
            assert_eq!(keys.missing_keys.len(), 1);
            assert!(net.first.shares_storage(&net.second) && net.first.leaf_id() == net.second.leaf_id());
            assert_eq!((net.second.to_vec::<f32>().unwrap(), net.first.requires_grad()), (vec![1.0; 6], trained));
        }
    });
}

#[test]
fn missing_values_are_errors_that_name_the_parameter() {
    each_device(|device| {
        let x = Tensor::ones([2, 4], device).unwrap();
        let made = || nn::uninit(|| Linear::new(4, 3, device)).unwrap();
        let weight = || [("weight".to_string(), Tensor::ones([3, 4], device).unwrap())].into_iter().collect();
        let mut net = made();
        let message = |e: claystone::Error| e.to_string();
        let error = message(net.assign_state_dict(weight(), true).unwrap_err());
        assert!(error.contains("missing [\"bias\"]"), "{error}");
        assert!(net.weight().is_uninit(), "nothing is loaded after an error");
        assert_eq!(net.assign_state_dict(weight(), false).unwrap().missing_keys, ["bias"]);
        let error = message(net.forward(&x).unwrap_err());
        assert!(error.contains("bias") && error.contains("assign_state_dict"), "{error}");

        let mut net = made();
        let wrong = [("weight".to_string(), x.shallow_clone()), ("bias".into(), Tensor::ones(3, device).unwrap())];
        assert!(net.assign_state_dict(wrong.into_iter().collect(), true).is_err());
        // Every use of the elements of a tensor without memory must be an error.
        assert!(net.load_state_dict(&Linear::new(4, 3, device).unwrap().state_dict(), true).is_err());
        let w = net.weight().detach();
        assert!(w.to_vec::<f32>().is_err() && w.item::<f32>().is_err() && w.to_host::<f32>().is_err());
        assert!(w.fill_(1.0).is_err() && w.copy_(&Tensor::ones([3, 4], device).unwrap()).is_err());
        assert!(x.copy_(&w.narrow(0, 0, 2).unwrap()).is_err());
        assert!(w.try_clone().is_err() && w.to_dtype(DType::F16).is_err() && w.sum((), false).is_err());
        assert!(w.matmul(&x.t().unwrap()).is_err() && x.matmul(&w.t().unwrap()).is_err() && w.sort(0, false).is_err());
        assert!(Tensor::cat(&[x.shallow_clone(), w.shallow_clone()], 0).is_err() && w.cumsum(0).is_err());
        assert!(init::orthogonal_(&w, 1.0).is_err() && init::normal_(&w, 0.0, 1.0).is_err());
        assert!(w.shallow_clone().into_host::<f32>().is_err() && net.state_dict().get("weight").unwrap().is_uninit());
        assert!(io::save(std::env::temp_dir().join("claystone_uninit.safetensors"), &net.state_dict()).is_err());
        assert!(AdamW::new(net.parameters_mut(), AdamWConfig::default()).is_err());
        assert!(net.to_dtype(DType::BF16).is_err() && net.parameter_count() == 15);
        assert_eq!(w.view([4, 3]).unwrap().shape().dims(), [4, 3]);
        assert!(x.equal(&Tensor::ones([2, 4], device).unwrap()).unwrap(), "others are as they were");
        assert!(format!("{w}").contains("no values"), "{w}");

        // Inside `uninit`, initialising a tensor that has values must be an error.
        let real = Tensor::from_slice(&[1.0f32; 8], [2, 4], device).unwrap();
        assert!(nn::uninit(|| init::normal_(&real, 0.0, 1.0)).is_err());
        assert!(nn::uninit(|| real.mul(&Tensor::ones(4, device)?)).unwrap().is_uninit());
        assert_eq!(nn::uninit(|| real.mul_scalar(2)).unwrap().to_vec::<f32>().unwrap(), [2.0; 8]);
        assert!(nn::uninit(|| Linear::new(4, 3, (DType::I32, device))).is_err());
        assert!(!Tensor::ones(2, device).unwrap().is_uninit(), "the scope has ended");
    });
    let missing = Device::OpenCL(99);
    assert!(nn::uninit(|| Tensor::zeros(3, missing)).is_err());
    assert!(std::panic::catch_unwind(|| nn::uninit(|| panic!("in the scope"))).is_err());
    assert!(!Tensor::ones(2, Device::Cpu).unwrap().is_uninit(), "the scope has ended");
}

#[test]
fn checkpoints_load_into_modules_without_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.safetensors");
    let saved = Linear::new(4, 3, Device::Cpu).unwrap();
    io::save_checkpoint(&path, &[("model", &saved)]).unwrap();
    each_device(|device| {
        let mut net = nn::uninit(|| Linear::new(4, 3, device)).unwrap();
        io::load_checkpoint(&path, &mut [("model", &mut net)]).unwrap();
        assert_eq!(net.weight().to_vec::<f32>().unwrap(), saved.weight().to_vec::<f32>().unwrap());
    });
}
