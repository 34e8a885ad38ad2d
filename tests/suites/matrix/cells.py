"""The cells of the matrix, read from YAML: pairs of engine shapes, and who judges them where."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from harness.cluster.engines import CPU_DTYPE, Device
from harness.cluster.models import FAMILIES
from harness.cluster.models.files import REPO
from harness.cluster.models.recipe import Family

CONFIG: Final = REPO / "configs" / "matrix.yaml"

JudgeName = Literal["answers", "accuracy"]


class MatrixError(ValueError):
    """The file is not of this form, or a name is asked for that is not in it."""


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How engines of one side cut and store their KV cache; None is vLLM's own choice."""

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    instances: int = 1
    block: int | None = None
    layout: str | None = None
    backend: str | None = None
    flags: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many workers an engine has, each with a cache."""
        return self.tp * self.pp * self.pcp

    def __str__(self) -> str:
        """Short, for tables and names of logs."""
        parts = [f"{self.instances}x"] if self.instances > 1 else []
        parts += [f"tp{self.tp}"]
        parts += [f"pp{self.pp}"] if self.pp > 1 else []
        parts += [f"pcp{self.pcp}"] if self.pcp > 1 else []
        parts += [f"b{self.block}"] if self.block else []
        parts += [part for part in (self.layout, self.backend) if part]
        parts += [flag.strip("-") for flag in self.flags]
        return "-".join(parts)


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefill and decode engines that shall understand each other, or shall not."""

    name: str
    about: str = ""
    prefill: Shape = Shape()
    decode: Shape = Shape()
    models: tuple[str, ...] = ("qwen3",)
    answers: tuple[Device, ...] = ("cpu", "cuda")
    accuracy: tuple[Device, ...] = ()
    refused: str | None = None
    """For what decode shall refuse, as a regular expression."""

    def devices(self, judge: JudgeName) -> tuple[Device, ...]:
        """Where a judge runs it."""
        return self.answers if judge == "answers" else self.accuracy

    def missing(self, judge: JudgeName, device: Device, num_gpus: int) -> str:
        """What a machine lacks to run it, in words; empty if nothing."""
        devices = self.devices(judge)
        if device not in devices:
            return f"needs {' or '.join(devices)}, this is {device}"
        wanted = max(self.prefill.ranks, self.decode.ranks)
        if device == "cuda" and wanted > num_gpus:  # each rank of an engine has its own
            return f"needs {wanted} GPUs, here are {num_gpus}"
        return ""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tiny model that all engines of a cell serve."""

    family: str
    numbers: dict[str, int] = msgspec.field(default_factory=dict)
    cpu_dtype: str = CPU_DTYPE
    cuda_dtype: str = "float16"
    """Eight times finer than bfloat16: fewer ties between tokens."""
    cpu_flags: tuple[str, ...] = ()
    cuda_flags: tuple[str, ...] = ()
    """Of every engine."""
    cuda_env: dict[str, str] = msgspec.field(default_factory=dict)
    devices: tuple[Device, ...] = ("cpu", "cuda")
    """For which vLLM has what it needs."""
    answer_tokens: int = 16

    def recipe(self) -> Family:
        """What its files are made from."""
        return FAMILIES[self.family](**self.numbers)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: dict[str, Model]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Matrix:
    """All models by name, and all cells in their order."""

    models: dict[str, Model]
    cells: tuple[Cell, ...]

    def of(self, judge: JudgeName, names: Sequence[str] = ()) -> list[Cell]:
        """The cells of a judge: those that are named, or all.

        Raises:
            MatrixError: for a name that none has.
        """
        cells = [cell for cell in self.cells if cell.devices(judge)]
        _check_names(names, [cell.name for cell in cells])
        return [cell for cell in cells if not names or cell.name in names]

    def by_model(self, names: Sequence[str] = ()) -> Iterator[tuple[str, list[Cell]]]:
        """The models and their cells, by `model`, `model/cell` or `cell`; all, if none is named.

        Raises:
            MatrixError: for a name that none has.
        """
        cells = {name: [c for c in self.of("answers") if name in c.models] for name in self.models}
        known = {f"{model}/{cell.name}" for model, mine in cells.items() for cell in mine}
        known |= {model for model, mine in cells.items() if mine}
        known |= {cell.name for mine in cells.values() for cell in mine}
        _check_names(names, sorted(known))
        for model, mine in cells.items():
            chosen = [
                cell
                for cell in mine
                if not names or {model, cell.name, f"{model}/{cell.name}"} & set(names)
            ]
            if chosen:
                yield model, chosen


def load(path: Path = CONFIG) -> Matrix:
    """All of a file.

    Raises:
        MatrixError: if it is not of this form; says where, and what is allowed.
    """
    try:
        file = msgspec.yaml.decode(path.read_text(encoding="utf-8"), type=_File)
        for name, model in file.models.items():
            _check(model.family in FAMILIES, name, f"no family {model.family!r}")
            model.recipe()
    except (OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise MatrixError(f"{path}: {error}") from error
    names = [cell.name for cell in file.cells]
    for cell in file.cells:
        _check(names.count(cell.name) == 1, cell.name, "each cell needs a name of its own")
        _check(set(cell.models) <= set(file.models), cell.name, f"models are {[*file.models]}")
        _check(not (cell.answers and _instances(cell)), cell.name, "answers: one engine a side")
        _check(not (cell.accuracy and _no_knob(cell)), cell.name, "accuracy: no pp, flags, refused")
    return Matrix(file.models, file.cells)


def _instances(cell: Cell) -> bool:
    return (cell.prefill.instances, cell.decode.instances) != (1, 1)


def _no_knob(cell: Cell) -> bool:
    """Whether it needs what the launcher has no knob for."""
    one_side = any(shape.pp > 1 or shape.flags for shape in (cell.prefill, cell.decode))
    return one_side or cell.refused is not None or cell.prefill.backend != cell.decode.backend


def _check(holds: Any, name: str, otherwise: str) -> None:
    if not holds:
        raise MatrixError(f"{name}: {otherwise}")


def _check_names(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise MatrixError(f"--only={name}: allowed are {', '.join(known)}")
