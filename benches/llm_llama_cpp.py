"""Compares examples/llm with llama.cpp on one model: `python benches/llm_llama_cpp.py MODEL.gguf [--device cpu] [--rounds 5]`.

Needs `pip install llama-cpp-python gguf` and `cargo build --release --example llm`. Prints

- the share of 500 positions of a text at which both have the same most likely token, and the greatest difference of logits as a part of
  their range. llama.cpp rounds activations to 8 bits for packed weights, so it also runs with the same weights in f32;
- the tokens per second of a prompt of 256 tokens and of 100 tokens after it, as medians of rounds in turns, on two threads.
"""

import argparse
import pathlib
import re
import statistics
import subprocess
import tempfile
import time

import gguf
import llama_cpp
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
PROGRAM = ROOT / "target/release/examples/llm"


def write_f32(source, target):
    """Writes a copy of a model with all weights in f32."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = 0 if field.name == "general.file_type" else field.contents()
        is_list = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(field.name, value, field.types[0], sub_type=field.types[-1] if is_list else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path, **options):
    return llama_cpp.Llama(str(path), n_ctx=1024, n_batch=512, n_threads=2, n_threads_batch=2, verbose=False, **options)


def run(model, device, text, *options):
    """Runs examples/llm; returns the tokens per second of the prompt and of the answer."""
    command = [PROGRAM, "--model", model, "--device", device, "--raw", "--temperature", "0", "--prompt", text, *options]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return [float(rate) for rate in re.search(r"prompt: .*?([\d.]+)/s; answer: .*?([\d.]+)/s", output).groups()]


def compare_logits(model, device, tokens, text, folder):
    ours = folder / "logits.npy"
    run(model, device, text, "--tokens", "1", "--cache", "f32", "--logits", ours)
    ours, f32 = np.load(ours), folder / "f32.gguf"
    write_f32(model, f32)
    for name, path in [("in f32", f32), ("packed", model)]:
        peer = load(path, logits_all=True, type_k=0, type_v=0)
        peer.eval(tokens)
        theirs = np.array(peer.scores[: len(tokens)])
        same = np.mean(theirs.argmax(1) == ours.argmax(1))
        error = np.max(np.abs(theirs - ours).max(1) / np.ptp(theirs, axis=1))
        print(f"llama.cpp {name}: the same most likely token at {same:.1%} of {len(tokens)} positions, greatest error {error:.1e} of the range")


def compare_speed(model, device, tokens, text, rounds):
    peer, rates = load(model), []
    for _ in range(rounds):
        peer.reset()
        begin = time.perf_counter()
        peer.eval(tokens)
        read = time.perf_counter()
        token = tokens[0]
        for _ in range(100):
            peer.eval([token])
            token = int(np.ctypeslib.as_array(llama_cpp.llama_get_logits(peer.ctx), (peer.n_vocab(),)).argmax())
        theirs = [len(tokens) / (read - begin), 100 / (time.perf_counter() - read)]
        rates.append(theirs + run(model, device, text, "--tokens", "101"))
    theirs, ours = np.median(np.array(rates).reshape(-1, 2, 2), 0)
    ratios = [statistics.median(row[i] / row[i + 2] for row in rates) for i in range(2)]
    for i, name in enumerate(["prompt", "answer"]):
        print(f"{name}: claystone {ours[i]:.1f} tokens/s, llama.cpp {theirs[i]:.1f} tokens/s, ratio of times {ratios[i]:.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    vocabulary = llama_cpp.Llama(args.model, vocab_only=True, verbose=False)
    source = (ROOT / "LICENSE-APACHE").read_text()[900:]
    tokens = vocabulary.tokenize(source.encode(), add_bos=False)
    texts = [vocabulary.detokenize(tokens[:n]).decode() for n in (500, 256)]
    with tempfile.TemporaryDirectory() as folder:
        compare_logits(args.model, args.device, tokens[:500], texts[0], pathlib.Path(folder))
    compare_speed(args.model, args.device, tokens[:256], texts[1], args.rounds)


main()
