"""What the launcher runs on, and which GPUs each engine gets."""

import ast
import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.cluster.engines import Device

CPU_BACKENDS: Final = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")
OTHER_DEVICES: Final = ("ROCM_", "XPU_", "NO_ATTENTION", "CUSTOM", "TORCH_SDPA")
REGISTRY: Final = "v1/attention/backends/registry.py"


@dataclass(frozen=True)
class Machine:
    """A device, its GPUs as CUDA_VISIBLE_DEVICES names them, and vLLM's attention backends."""

    device: Device = "cpu"
    gpus: tuple[str, ...] = ()
    backends: tuple[str, ...] = CPU_BACKENDS


def detect(env: Mapping[str, str]) -> Machine:
    """Ask torch; imported here, since it takes seconds."""
    import torch  # noqa: PLC0415 - see above

    if not torch.cuda.is_available():
        return Machine()
    count = torch.cuda.device_count()
    named = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpus = named[:count] if any(named) else [str(number) for number in range(count)]
    return Machine("cuda", tuple(gpus), cuda_backends())


def cuda_backends() -> tuple[str, ...]:
    """The names that vLLM knows, read from its source: importing it takes seconds more."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return ()
    source = (Path(vllm.origin).parent / REGISTRY).read_text(encoding="utf-8")
    names = members(source, "AttentionBackendEnum")
    return tuple(name for name in names if not name.startswith((*CPU_BACKENDS, *OTHER_DEVICES)))


def members(source: str, enumeration: str) -> list[str]:
    """The names that a class of a module's source gives values to."""
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    lines = (line for node in classes if node.name == enumeration for line in node.body)
    targets = (line.targets[0] for line in lines if isinstance(line, ast.Assign))
    return [target.id for target in targets if isinstance(target, ast.Name)]


def assign(gpus: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, ...]]:
    """The GPUs of engines with so many ranks each, in their order, wrapping round; none on CPU.

    No GPU comes twice in one engine as long as none has more ranks than there are GPUs.
    """
    turn = itertools.cycle(gpus)
    return [tuple(itertools.islice(turn, size)) for size in sizes] if gpus else [()] * len(sizes)
