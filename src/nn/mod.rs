//! Layers, and the traits of modules. Layers are short compositions of tensor operations.
//!
//! A layer owns its parameters, which are [`Tensor`] leaves, and maps a tensor to a tensor. The trait is [`Module`]. A module lists its
//! fields once, with [`parts!`](crate::parts). The list provides the parameters and their names (the same as in PyTorch), saving, loading,
//! and the switch between training and evaluation. Losses are methods of [`Tensor`] ([`Tensor::mse_loss`], [`Tensor::cross_entropy`]).
//!
//! The documentation of a function names only the errors that are particular to the function. Functions that create layers or copy
//! tensors also fail with [`Error::OutOfMemory`] and if the device fails, and layers with parameters fail with
//! [`Error::UnsupportedDType`] for dtypes that are not floats.

mod activation;
mod assign;
mod attention;
mod averaged;
mod boxed;
mod cache;
mod conv;
mod embedding;
mod forward;
pub mod functional;
pub mod init;
mod linear;
mod norm;
pub(crate) mod part;
mod pool;
mod quantized;
mod replace;
mod rnn;
mod rotary;
mod sampling;
mod sequential;
mod summary;
mod transformer;

use crate::io::Stateful;
pub use crate::io::{IncompatibleKeys, StateDict};
pub use crate::storage::uninit;
pub use activation::{Activation, Identity, LogSoftmax, PRelu, Softmax, Softmin};
pub use attention::{AttentionMasks, MultiheadAttention};
pub use averaged::AveragedModel;
pub use cache::{KvCache, KvCacheOptions};
pub use conv::{Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d};
pub use embedding::Embedding;
pub use forward::Forward;
pub use linear::Linear;
pub use norm::{
    BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, InstanceNorm, InstanceNorm1d, InstanceNorm2d,
    InstanceNorm3d, LayerNorm, RmsNorm,
};
pub use part::{Buffer, Mode, Part, Role};
pub use pool::{
    AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d, AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d,
    AvgPool1d, AvgPool2d, AvgPool3d, Flatten, MaxPool1d, MaxPool2d, MaxPool3d, PixelShuffle, PixelUnshuffle, Upsample,
};
pub use quantized::{QuantizedEmbedding, QuantizedLinear};
pub use rnn::{
    Gru, GruCell, Lstm, LstmCell, PackedSequence, Rnn, RnnCell, RnnOptions, pack_padded_sequence, pack_sequence,
    pad_packed_sequence, pad_sequence, unpack_sequence, unpad_sequence,
};
pub use rotary::{Angles, Rotary, RotaryOptions, RotaryPairs, RotaryScaling};
pub use sampling::{History, Sampler};
pub use sequential::{Checkpoint, Dropout, Dropout2d, Func, Sequential, func};
pub use summary::{LayerSummary, Summary, summary};
pub use transformer::{
    Transformer, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder, TransformerEncoderLayer,
    TransformerOptions,
};

use std::collections::HashSet;

use self::replace::{convert_tensors, replace_each};
use crate::autograd::checkpoint;
use crate::internal::Excerpt;
use crate::storage::Caller;
use crate::{DType, Device, Error, MemoryFormat, Result, Tensor};

/// A layer or a network: a function of one tensor, with parameters. For other inputs, see [`Forward`]. A module owns its tensors and
/// has no borrowed fields.
///
/// ```
/// use claystone::nn::{Conv2d, Linear, Module};
/// use claystone::{ConvOptions, Device, Result, Tensor};
///
/// struct Net {
///     conv: Conv2d,
///     fc: Linear,
/// }
///
/// impl Module for Net {
///     claystone::parts!(conv, fc);
///
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         self.fc.forward(&self.conv.forward(x)?.relu()?.flatten(1, -1)?)
///     }
/// }
///
/// let conv = Conv2d::new(1, 4, [3, 3], ConvOptions::default(), Device::Cpu)?;
/// let net = Net { conv, fc: Linear::new(4 * 36, 10, Device::Cpu)? };
/// assert_eq!(net.forward(&Tensor::zeros(&[2, 1, 8, 8], Device::Cpu)?)?.shape().dims(), [2, 10]);
/// let names: Vec<String> = net.named_parameters("").into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["conv.weight", "conv.bias", "fc.weight", "fc.bias"]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub trait Module: boxed::AnyModule + Send + Sync + 'static {
    /// Computes the result for a batch `x`. Operations are recorded if parameters or `x` require gradients. A module with several inputs or
    /// with a recurrent state does not implement this method, but [`Forward`]. Fails as the operations inside do: for incompatible shapes,
    /// dtypes or devices, or too little memory. Fails with [`crate::Error::Invalid`] if the module is not a function of one tensor.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _ = x;
        let reason = "the module is not a function of one tensor: use Forward::call, or the module's own method";
        Err(Error::invalid(self.type_name(), reason))
    }

    /// Calls `visitor` with the name (after `prefix`), the role and the handle of each tensor of the module, in a fixed order.
    /// The macro [`parts!`](crate::parts) implements this method and the next four.
    fn visit<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor));

    /// Does the same as [`Module::visit`], with mutable access to the tensors.
    fn visit_mut<'a>(&'a mut self, prefix: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor));

    /// Switches all layers to training (`true`) or evaluation (`false`), as in PyTorch's `train(mode)`. Dropout and batch norm depend on it.
    fn set_training(&self, training: bool);

    /// Returns another module that shares this module's tensors, like [`Tensor::shallow_clone`]: an optimiser step on one module is visible
    /// in the other. Each module has its own switch between training and evaluation.
    /// [`Module::try_clone`] copies the tensors instead.
    ///
    /// ```
    /// use claystone::nn::{Linear, Module};
    /// use claystone::{Device, Tensor, autograd::checkpoint};
    /// let layer = Linear::new(4, 4, Device::Cpu)?;
    /// let (twin, copy) = (layer.shallow_clone(), layer.try_clone()?);
    /// layer.weight().detach().fill_(0)?;
    /// assert!(twin.weight().equal(layer.weight())? && !copy.weight().equal(layer.weight())?);
    /// let x = Tensor::ones([2, 4], Device::Cpu)?;
    /// let y = checkpoint(move |x| twin.forward(&x[0]), &[&x])?; // a closure owns what it computes with
    /// y.sum((), false)?.backward()?;
    /// assert!(layer.weight().grad().is_some());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    fn shallow_clone(&self) -> Self
    where
        Self: Sized;

    /// Calls `visitor` with each submodule and the submodule's name after `prefix`. A module comes before its own submodules.
    fn visit_modules<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
        let _ = (prefix, visitor);
    }

    /// Switches to training (PyTorch's `train()`). New modules are in training.
    fn train(&self) {
        self.set_training(true);
    }

    /// Switches to evaluation (PyTorch's `eval()`): dropout does nothing, and batch norms use their running statistics.
    fn eval(&self) {
        self.set_training(false);
    }

    /// Returns the parameters in a fixed order.
    fn parameters(&self) -> Vec<&Tensor> {
        self.named_parameters("").into_iter().map(|(_, t)| t).collect()
    }

    /// Returns the parameters for an optimiser, which may move them into a flat buffer. A tied parameter is returned once.
    fn parameters_mut(&mut self) -> Vec<&mut Tensor> {
        self.named_parameters_mut("").into_iter().map(|(_, t)| t).collect()
    }

    /// Does the same as [`Module::named_parameters`], with mutable access. [`crate::optim::Fused::grouped`] makes parameter groups by name.
    fn named_parameters_mut(&mut self, prefix: &str) -> Vec<(String, &mut Tensor)> {
        let (mut out, mut seen) = (Vec::new(), HashSet::new());
        self.visit_mut(prefix, &mut |name, role, t| {
            out.extend(is_new_parameter(role, t, &mut seen).then_some((name, t)));
        });
        out
    }

    /// Returns the parameters under PyTorch's dotted names, after `prefix`. A tied parameter is returned once, under its first name.
    fn named_parameters(&self, prefix: &str) -> Vec<(String, &Tensor)> {
        let (mut out, mut seen) = (Vec::new(), HashSet::new());
        self.visit(prefix, &mut |name, role, t| out.extend(is_new_parameter(role, t, &mut seen).then_some((name, t))));
        out
    }

    /// Returns the tensors that are saved but not trained, such as running statistics, with their names.
    fn named_buffers(&self, prefix: &str) -> Vec<(String, &Tensor)> {
        let mut out = Vec::new();
        self.visit(prefix, &mut |name, role, t| out.extend((role == Role::Buffer).then_some((name, t))));
        out
    }

    /// Returns the submodules with their names (PyTorch's `named_modules`, without the module itself). A module precedes its submodules.
    fn named_modules(&self, prefix: &str) -> Vec<(String, &dyn Module)> {
        let mut out = Vec::new();
        self.visit_modules(prefix, &mut |name, module| out.push((name, module)));
        out
    }

    /// Returns the name of the module's type, such as `Linear`.
    fn type_name(&self) -> &'static str {
        let path = std::any::type_name::<Self>();
        let path = path.split('<').next().unwrap_or(path);
        path.rsplit("::").next().unwrap_or(path)
    }

    /// Returns the number of elements of all parameters together.
    fn parameter_count(&self) -> usize {
        self.parameters().iter().map(|p| p.numel()).sum()
    }

    /// Freezes (`false`) or unfreezes (`true`) all parameters, for every handle on them (PyTorch's `requires_grad_`). An optimiser skips
    /// frozen parameters, and keeps their state until they are trained again. Fails with [`crate::Error::Autograd`] for a parameter that is
    /// the result of a recorded operation, and with [`crate::Error::UnsupportedDType`] for a parameter that has integers.
    ///
    /// ```
    /// use claystone::nn::{Linear, Module};
    /// use claystone::optim::{AdamW, AdamWConfig, Optimizer};
    /// use claystone::Device;
    /// let (mut backbone, mut head) = (Linear::new(4, 4, Device::Cpu)?, Linear::new(4, 2, Device::Cpu)?);
    /// backbone.requires_grad_(false)?;
    /// let mut both = vec![&mut backbone, &mut head];
    /// let trained = both.iter_mut().flat_map(|layer| layer.trainable_parameters_mut()).collect();
    /// assert_eq!(AdamW::new(trained, AdamWConfig::default())?.parameters().len(), 2);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    fn requires_grad_(&mut self, requires_grad: bool) -> Result<()> {
        replace_each(self, |role, t| match t.leaf_id() {
            _ if role == Role::Buffer => Ok(t.shallow_clone()),
            Some(_) => t.set_requires_grad(requires_grad).map(|()| t.shallow_clone()),
            None => t.shallow_clone().requires_grad_(requires_grad),
        })
    }

    /// Returns [`Module::parameters_mut`] without frozen parameters.
    fn trainable_parameters_mut(&mut self) -> Vec<&mut Tensor> {
        self.parameters_mut().into_iter().filter(|p| p.requires_grad()).collect()
    }

    /// Clears the gradients of all parameters.
    fn zero_grad(&self) {
        self.parameters().into_iter().for_each(Tensor::zero_grad);
    }

    /// Returns parameters and buffers under PyTorch's names. The returned tensors share the module's memory and are outside the graph.
    ///
    /// ```
    /// use claystone::nn::{BatchNorm2d, Module};
    /// use claystone::Device;
    /// let norm = BatchNorm2d::new(3, Device::Cpu)?;
    /// let state = norm.state_dict();
    /// let names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"];
    /// assert_eq!(state.names().collect::<Vec<_>>(), names);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    fn state_dict(&self) -> StateDict {
        let mut out = Vec::new();
        self.visit("", &mut |name, _, t| out.push((name, t.detach())));
        out.into_iter().collect()
    }

    /// Copies the module and all its tensors (Python's `copy.deepcopy(model)`), for example as a target network or for
    /// [`AveragedModel::ema`]. Parameters that are tied stay tied. Gradients are not copied.
    ///
    /// ```
    /// use claystone::nn::{AveragedModel, Linear, Module};
    /// use claystone::Device;
    /// let net = Linear::new(4, 2, Device::Cpu)?;
    /// let target = net.try_clone()?;
    /// let ema = AveragedModel::ema(net.try_clone()?, 0.999)?;
    /// assert!(target.weight().equal(net.weight())? && !target.weight().shares_storage(ema.module().weight()));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    fn try_clone(&self) -> Result<Self>
    where
        Self: Sized,
    {
        let _caller = Caller::enter();
        let mut copy = self.shallow_clone();
        replace_each(&mut copy, |_, t| t.detach().try_clone()?.requires_grad_(t.requires_grad()))?;
        Ok(copy)
    }

    /// Computes [`Module::forward`], but keeps only `x` for backward. Backward then computes the forward pass again, see [`checkpoint`].
    /// The layer [`Checkpoint`] does this for the layer inside. Fails as [`Module::forward`] does.
    #[track_caller]
    fn forward_checkpointed(&self, x: &Tensor) -> Result<Tensor>
    where
        Self: Sized,
    {
        let _caller = Caller::enter();
        let module = self.shallow_clone();
        checkpoint(move |x| module.forward(&x[0]), &[x])
    }

    /// Copies the values of `state` into the tensors with the same names, from any device and any float dtype. If `strict`, missing and
    /// unknown names are an error; otherwise they are returned and all other tensors are loaded. All checks come before the first change.
    /// Fails with [`crate::Error::Invalid`] for a tensor whose shape differs and, if `strict`, for names that differ, and with
    /// [`crate::Error::Partial`] if the device fails after some tensors were copied.
    fn load_state_dict(&self, state: &StateDict, strict: bool) -> Result<IncompatibleKeys> {
        let (op, own) = ("load_state_dict", self.state_dict());
        let keys = assign::check_state(op, &own, state, strict)?;
        let lacks_memory = |(name, t): &(&str, &Tensor)| t.is_uninit() && state.get(name).is_some();
        invalid!(op if let Some((name, _)) = own.iter().find(lacks_memory),
            "{} was made in nn::uninit and has no memory: use assign_state_dict", Excerpt(name));
        assign::copy_values(op, &own, state)?;
        Ok(keys)
    }

    /// Like [`Module::load_state_dict`], but tensors made in [`uninit`](fn@uninit) are replaced by the tensors of `state` (PyTorch's
    /// `load_state_dict(assign=True)`), so that the weights are in memory only once. A tensor of `state` is converted if its dtype or
    /// device differs, and copied if it has other handles. Fails as [`Module::load_state_dict`] does. If not `strict`, tensors without a
    /// value in `state` remain without memory; using such a tensor is an error that contains its name.
    ///
    /// ```
    /// use claystone::nn::{self, Linear, Module};
    /// use claystone::{DType, Device, io};
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("layer.safetensors");
    /// io::save(&path, &Linear::new(3, 2, Device::Cpu)?.state_dict())?;
    /// let mut layer = nn::uninit(|| Linear::new(3, 2, (DType::BF16, Device::Cpu)))?;
    /// layer.assign_state_dict(io::load(&path, Device::Cpu)?, true)?;
    /// assert_eq!(layer.weight().dtype(), DType::BF16);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    fn assign_state_dict(&mut self, state: StateDict, strict: bool) -> Result<IncompatibleKeys> {
        let own = self.state_dict();
        assign::assign_values("assign_state_dict", own, state, strict, |f| {
            self.visit_mut("", &mut |name, _, t| f(name, t))
        })
    }

    /// Moves all tensors and their gradients to a device. An optimiser of the parameters moves its state at its next step. Fails with
    /// [`crate::Error::NoDevice`] and [`crate::Error::OutOfMemory`]. After an error some tensors are moved; another call moves the rest.
    #[track_caller]
    fn to_device(&mut self, device: Device) -> Result<()> {
        let _caller = Caller::enter();
        convert_tensors(self, true, |t| t.to_device(device))
    }

    /// Converts all float tensors and their gradients. An optimiser of the parameters converts its state at its next step. Fails with
    /// [`crate::Error::UnsupportedDType`] if `dtype` is an integer type, and otherwise as [`Module::to_device`] does.
    #[track_caller]
    fn to_dtype(&mut self, dtype: DType) -> Result<()> {
        let _caller = Caller::enter();
        dtype.check_float("to_dtype")?;
        convert_tensors(self, true, |t| if t.dtype().is_float() { t.to_dtype(dtype) } else { Ok(t.detach()) })
    }

    /// Converts the weights that have the format's number of dims (four or five), and their gradients, to a memory format (PyTorch's
    /// `model.to(memory_format=torch.channels_last)`). Layers then keep the format of channels-last images, and convolutions on tensor
    /// cores need no copies. Values, names and saved files stay the same. Call it before creating an optimiser: an existing optimiser
    /// follows at its next step, but then no longer updates all parameters in one launch. Fails as [`Module::to_device`] does.
    ///
    /// ```
    /// use claystone::nn::{Activation, BatchNorm2d, Conv2d, Module, Sequential};
    /// use claystone::{ConvOptions, Device, MemoryFormat, Tensor};
    /// let conv = Conv2d::new(3, 8, [3, 3], ConvOptions::default(), Device::Cpu)?;
    /// let mut net = Sequential::new().push(conv).push(BatchNorm2d::new(8, Device::Cpu)?).push(Activation::Relu);
    /// net.to_memory_format(MemoryFormat::ChannelsLast)?;
    /// let images = Tensor::zeros([2, 3, 8, 8], Device::Cpu)?.to_memory_format(MemoryFormat::ChannelsLast)?;
    /// assert_eq!(net.forward(&images)?.shape().dims(), [2, 8, 6, 6]);
    /// assert!(net.parameters()[0].is_contiguous_in(MemoryFormat::ChannelsLast));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    fn to_memory_format(&mut self, format: MemoryFormat) -> Result<()> {
        let _caller = Caller::enter();
        let rank = match format {
            MemoryFormat::ChannelsLast => Some(4),
            MemoryFormat::ChannelsLast3d => Some(5),
            MemoryFormat::Contiguous => None,
        };
        let concerned = |t: &Tensor| rank.is_none_or(|rank| t.rank() == rank);
        convert_tensors(self, false, |t| if concerned(t) { t.to_memory_format(format) } else { Ok(t.detach()) })
    }
}

/// True if `t` is a parameter whose leaf is not in `seen`. Tied parameters have the same leaf, so only the first is new.
fn is_new_parameter(role: Role, t: &Tensor, seen: &mut HashSet<u64>) -> bool {
    role == Role::Parameter && t.leaf_id().is_none_or(|leaf| seen.insert(leaf))
}

/// A checkpoint stores a module as its state dict. Loading is strict.
impl<M: Module> Stateful for M {
    fn state_dict(&self) -> Result<StateDict> {
        Ok(Module::state_dict(self))
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let state = state.iter().map(|(name, t)| (name.to_string(), t.detach())).collect();
        let own = Module::state_dict(self);
        assign::assign_values("load_state_dict", own, state, true, |f| self.visit_mut("", &mut |name, _, t| f(name, t)))
            .map(|_| ())
    }
}
