//! Activations, instance norms and transformers, with PyTorch's weights and expected values. tests/data/layers.py wrote these values.

use claystone::nn::{
    Activation, AttentionMasks, Forward, Identity, InstanceNorm2d, LogSoftmax, Module, PRelu, Softmax, Softmin,
    StateDict, Transformer, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder, TransformerEncoderLayer,
    TransformerOptions,
};
use claystone::{Device, Tensor, io};

use crate::common::{each_device, values};

pub struct Values {
    all: StateDict,
}

impl Values {
    fn on(device: Device) -> Values {
        Values::read("tests/data/layers.npz", device)
    }

    pub fn read(path: &str, device: Device) -> Values {
        Values { all: io::load(path, device).unwrap() }
    }

    pub fn get(&self, name: &str) -> Tensor {
        self.all.get(name).unwrap_or_else(|| panic!("{name}")).shallow_clone()
    }

    /// Checks that values differ by at most 1e-5 times the largest expected magnitude.
    pub fn near(&self, name: &str, got: &Tensor) {
        let want = self.get(name);
        assert_eq!(got.shape(), want.shape(), "{name}");
        let (got, want) = (values(got), values(&want));
        let most = want.iter().fold(1.0, |m: f64, v| m.max(v.abs()));
        let far = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(far <= 1e-5 * most, "{name} is {far} off, of {most}");
    }

    pub fn load(&self, name: &str, module: &mut impl Module) {
        let state = self.all.clone().split(&format!("{name}.state")).0;
        module.load_state_dict(&state, true).unwrap();
    }

    /// Checks a module's result and the gradients of all its parameters.
    pub fn check(&self, name: &str, module: &impl Module, result: &Tensor) {
        self.near(&format!("{name}.result"), result);
        result.square().unwrap().sum((), false).unwrap().backward().unwrap();
        for (parameter, t) in module.named_parameters(&format!("{name}.grad")) {
            self.near(&parameter, &t.grad().unwrap_or_else(|| panic!("{parameter}")));
        }
    }
}

#[test]
fn activations_match_pytorch() {
    each_device(|device| {
        let all = Values::on(device);
        let x = all.get("x");
        for (name, slopes) in [("prelu", 1), ("prelu_channels", 4)] {
            let mut prelu = PRelu::new(slopes, 0.25, device).unwrap();
            all.load(name, &mut prelu);
            all.check(name, &prelu, &prelu.forward(&x).unwrap());
        }
        let layers: [(&str, &dyn Module); 7] = [
            ("leaky_relu", &Activation::LeakyRelu(0.2)),
            ("elu", &Activation::Elu(1.5)),
            ("softplus", &Activation::Softplus),
            ("gelu_tanh", &Activation::GeluTanh),
            ("softmax", &Softmax(1)),
            ("log_softmax", &LogSoftmax(-1)),
            ("softmin", &Softmin(2)),
        ];
        for (name, layer) in layers {
            all.near(&format!("{name}.result"), &layer.forward(&x).unwrap());
        }
        assert!(Identity.forward(&x).unwrap().shares_storage(&x));
    });
}

#[test]
fn instance_norms_match_pytorch() {
    each_device(|device| {
        let all = Values::on(device);
        let x = all.get("x");
        let mut affine = InstanceNorm2d::new(4, device).with_affine().unwrap();
        all.load("instance", &mut affine);
        all.check("instance", &affine, &affine.forward(&x).unwrap());

        let tracked = InstanceNorm2d::new(4, device).with_running_stats().unwrap().with_momentum(0.3).with_eps(1e-3);
        assert!(tracked.parameters().is_empty());
        all.near("tracked.first", &tracked.forward(&x).unwrap());
        tracked.forward(&x.affine(2, 1).unwrap()).unwrap();
        let buffers = tracked.named_buffers("tracked.state");
        assert_eq!(buffers.len(), 3);
        buffers.iter().for_each(|(name, t)| all.near(name, t));
        tracked.eval();
        all.near("tracked.result", &tracked.forward(&x).unwrap());
    });
}

#[test]
fn transformers_match_pytorch() {
    let small = TransformerOptions { dim_feedforward: 6, dropout: 0.0, ..TransformerOptions::default() };
    let gelu = TransformerOptions { activation: Activation::Gelu, layer_norm_eps: 1e-3, norm_first: true, ..small };
    each_device(|device| {
        let all = Values::on(device);
        let (source, target) = (all.get("source"), all.get("target"));
        let (padding, later) = (all.get("padding"), all.get("later"));
        let padded = AttentionMasks { key_padding_mask: Some(&padding), ..AttentionMasks::default() };
        let causal = AttentionMasks { attn_mask: Some(&later), ..AttentionMasks::default() };
        for (name, options) in [("post", small), ("pre", gelu), ("plain", TransformerOptions { bias: false, ..small })]
        {
            let mut encoder = TransformerEncoderLayer::new(4, 2, options, device).unwrap();
            let of = format!("{name}.encoder");
            all.load(&of, &mut encoder);
            all.check(&of, &encoder, &encoder.encode(&source, padded).unwrap());

            let mut decoder = TransformerDecoderLayer::new(4, 2, options, device).unwrap();
            let of = format!("{name}.decoder");
            all.load(&of, &mut decoder);
            all.check(&of, &decoder, &decoder.decode(&target, &source, causal, padded).unwrap());

            let mut net = Transformer::new(4, 2, [2, 1], options, device).unwrap();
            let of = format!("{name}.transformer");
            all.load(&of, &mut net);
            let memory = net.encoder.encode(&source, padded).unwrap();
            all.check(&of, &net, &net.decoder.decode(&target, &memory, causal, padded).unwrap());
        }
    });
}

/// Without masks, [`Forward::call`] must give the same result as the named methods. Final norms are optional.
#[test]
fn transformers_can_be_called_without_masks() {
    let options = TransformerOptions { dim_feedforward: 5, ..TransformerOptions::default() };
    each_device(|device| {
        let [source, target] = [5, 4].map(|n| Tensor::randn(&[2, n, 4], device).unwrap());
        let encoder = TransformerEncoder::new(vec![TransformerEncoderLayer::new(4, 2, options, device).unwrap()]);
        let decoder = TransformerDecoder::new(vec![TransformerDecoderLayer::new(4, 2, options, device).unwrap()]);
        let net = Transformer { encoder, decoder };
        assert_eq!(net.named_parameters("").last().unwrap().0, "decoder.layers.0.norm3.bias");
        let all = AttentionMasks::default();
        // In training, dropout must make two results differ.
        assert!(!net.call((&source, &target)).unwrap().equal(&net.call((&source, &target)).unwrap()).unwrap());
        net.eval();
        let memory = net.encoder.forward(&source).unwrap();
        assert!(memory.equal(&net.encoder.encode(&source, all).unwrap()).unwrap());
        let want = values(&net.decoder.decode(&target, &memory, all, all).unwrap());
        assert_eq!(values(&net.decoder.call((&target, &memory)).unwrap()), want);
        assert_eq!(values(&net.call((&source, &target)).unwrap()), want);
        let error = net.forward(&source).unwrap_err().to_string();
        assert_eq!(
            error,
            "Transformer: the module is not a function of one tensor: use Forward::call, or the module's own method"
        );
        assert!(TransformerEncoderLayer::new(5, 2, options, device).is_err());
        assert!(TransformerEncoderLayer::new(4, 2, TransformerOptions { dropout: 2.0, ..options }, device).is_err());
    });
}
