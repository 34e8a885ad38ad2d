"""Memory on a GPU, for `scratch`."""

import torch


def allocate(num_bytes: int, device: int) -> tuple[int, object]:
    """Its address on this GPU, and who keeps it.

    Raises:
        RuntimeError: if there is no such GPU, or no memory left on it.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{device}")
    return memory.data_ptr(), memory
