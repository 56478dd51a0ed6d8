"""What the benches of training steps save, for their peers in PyTorch."""

import json
import struct

import torch

DTYPES = {"F32": torch.float32, "I64": torch.int64}


def tensors(path):
    """Those of a safetensors file: the length of a JSON header, the header, and the bytes."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    return {
        name: torch.frombuffer(data[slice(*at["data_offsets"])], dtype=DTYPES[at["dtype"]]).reshape(at["shape"])
        for name, at in header.items()
    }


def compare(losses, theirs):
    apart = ((losses - theirs[: len(losses)]) / losses).abs().max()
    print(f"losses of {len(losses)} steps are apart by at most {apart:.2%}")
