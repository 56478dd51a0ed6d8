"""Device arguments."""

import torch


def index_of(device):
    """The index of a device argument: an int, a string or a torch.device; the current device for None. ValueError for another device type."""
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "claystone":
        raise ValueError(f"expected a device claystone, got {device}")
    return torch.accelerator.current_device_index() if device.index is None else device.index
