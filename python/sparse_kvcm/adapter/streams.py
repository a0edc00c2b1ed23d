"""The stream that an engine works on."""

from __future__ import annotations


def current_stream(device: str) -> int:
    """Torch's current stream of a device, as the manager takes it; 0 on the CPU."""
    import torch

    if torch.device(device).type == "cpu":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)
