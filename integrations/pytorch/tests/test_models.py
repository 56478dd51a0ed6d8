"""Small models of torchvision and transformers with random weights: in the median of three seeds, the losses of three training steps equal those of
PyTorch's CPU within 2e-5, without operators on the CPU. With one seed an activation within 1e-7 of 0 may have another sign, as it may in f64, which
changes the gradients behind it by 1 %."""

import unittest
from statistics import median

import torch
import torchvision
import transformers
from torch.nn.functional import cross_entropy

import claystone_torch

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}


def losses(device, seed, make, inputs, loss):
    torch.manual_seed(seed)
    model = make().to(device).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # random numbers differ between devices
    inputs = [x.to(device) for x in inputs()]
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for _ in range(3):
        optimiser.zero_grad()
        value = loss(model, *inputs)
        value.backward()
        optimiser.step()
        found.append(value.item())
    return found


class Models(unittest.TestCase):
    def same(self, make, inputs, loss):
        claystone_torch.reset_fallbacks()
        pairs = [[losses(device, seed, make, inputs, loss) for device in ("cpu", "claystone")] for seed in range(3)]
        for step in range(3):
            differences = [abs(a[step] - b[step]) / max(1, abs(a[step])) for a, b in pairs]
            # The first loss has no gradient behind it, so it has to agree with every seed.
            typical = max if step == 0 else median
            self.assertLess(typical(differences), 2e-5, f"losses on the CPU and on claystone for each seed: {pairs}")
        self.assertTrue(all(expected[0] != expected[-1] for expected, _ in pairs))
        self.assertEqual(claystone_torch.fallbacks(), {})

    def image(self, make, size):
        self.same(make, lambda: (torch.randn(4, 3, size, size), torch.arange(4)), lambda model, x, y: cross_entropy(model(x), y))

    def text(self, make):
        self.same(make, lambda: (torch.randint(50, (2, 12)),), lambda model, x: model(input_ids=x, labels=x).loss)

    def test_resnet18(self):
        self.image(lambda: torchvision.models.resnet18(num_classes=10), 64)

    def test_mobilenet_v3(self):
        self.image(lambda: torchvision.models.mobilenet_v3_small(num_classes=10), 64)

    def test_vit(self):
        self.image(lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10), 32)

    def test_gpt2(self):
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=50, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
        self.text(lambda: transformers.GPT2LMHeadModel(config))

    def test_bert(self):
        config = transformers.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SMALL)
        self.text(lambda: transformers.BertForMaskedLM(config))

    def test_llama(self):
        self.text(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **SMALL)))

    def test_mixtral(self):
        for experts in ("eager", "grouped_mm", "batched_mm"):
            config = transformers.MixtralConfig(num_key_value_heads=1, num_local_experts=4, output_router_logits=True, experts_implementation=experts, **SMALL)
            self.text(lambda: transformers.MixtralForCausalLM(config))

    def test_t5(self):
        config = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2, vocab_size=50, dropout_rate=0, decoder_start_token_id=0)
        self.text(lambda: transformers.T5ForConditionalGeneration(config))


if __name__ == "__main__":
    unittest.main()
