"""Which shapes of prefill and decode the matrix puts together.

An engine's shape is how many ranks share its KV cache and how they store it. Cells that need the
same engines stand together: the fewer engines are started, the sooner it is over.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pd.engines import Device
from pd.tiny_families import DeepseekV2, Gemma3, Gemma4, PaddedQwen3
from pd.tiny_model import Recipe, TinyModel


@dataclass(frozen=True)
class Shape:
    """How one engine cuts and stores its KV cache; None is vLLM's own choice."""

    tp: int = 1
    pp: int = 1
    block: int | None = None
    layout: str | None = None
    backend: str | None = None
    flags: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many workers, each with a part of the cache."""
        return self.tp * self.pp

    def __str__(self) -> str:
        """Short, for tables and names of logs."""
        parts = [f"tp{self.tp}"]
        parts += [f"pp{self.pp}"] if self.pp > 1 else []
        parts += [f"b{self.block}"] if self.block else []
        parts += [part for part in (self.layout, self.backend) if part]
        parts += [flag.strip("-") for flag in self.flags]
        return "-".join(parts)


@dataclass(frozen=True)
class Cell:
    """A prefill engine and a decode engine that shall understand each other, or shall not."""

    name: str
    prefill: Shape
    decode: Shape
    refused: str | None = None  # for what decode shall refuse, as a regular expression


@dataclass(frozen=True)
class Model:
    """What all engines of some cells serve."""

    name: str
    recipe: Recipe
    cells: Mapping[Device, Sequence[Cell]]
    cuda_dtype: str = "float16"  # eight times finer than bfloat16: fewer ties between tokens
    cpu_flags: tuple[str, ...] = ()  # of every engine


DEVICES: Final[Sequence[Device]] = ("cpu", "cuda")
TP1 = Shape()
TP2 = Shape(tp=2)
TP3 = Shape(tp=3)
PP2 = Shape(pp=2)
B64 = Shape(block=64)
B96 = Shape(block=96)
TP2_B64 = Shape(tp=2, block=64)
BHLNC = Shape(layout="BHLNC")
LBHNC = Shape(layout="LBHNC")
BLNHC = Shape(layout="BLNHC")
FLASHINFER = Shape(backend="FLASHINFER")
FAST = Shape(flags=("--kv-sharing-fast-prefill",))
BFLOAT16 = Shape(flags=("--dtype", "bfloat16"))

QWEN3_ON_CPU = (
    Cell("same", TP1, TP1),
    Cell("block-128-64", TP1, B64),
    Cell("block-64-128", B64, TP1),
    Cell("block-64-96", B64, B96),
    Cell("block-96-64", B96, B64),
    Cell("tp-1-2", TP1, TP2),
    Cell("tp-2-1", TP2, TP1),
    Cell("tp-2-2", TP2, TP2),
    Cell("tp2-block64-tp1-block128", TP2_B64, TP1),
    Cell("tp1-block128-tp2-block64", TP1, TP2_B64),
    Cell("pp-1-2", TP1, PP2),
    Cell("pp-2-1", PP2, TP1),
    Cell("pp2-tp2", PP2, TP2),
    Cell("tp2-pp2", TP2, PP2),
    Cell("dtype", BFLOAT16, TP1, refused="dtype"),
)
QWEN3_ON_CUDA = (
    Cell("same", TP1, TP1),
    Cell("flash-infer", TP1, FLASHINFER),
    Cell("infer-flash", FLASHINFER, TP1),
    Cell("layout-bhlnc-lbhnc", BHLNC, LBHNC),
    Cell("layout-lbhnc-bhlnc", LBHNC, BHLNC),
    Cell("layout-blnhc-lbhnc", BLNHC, LBHNC),
    Cell("layout-bhlnc-blnhc", BHLNC, BLNHC),
    Cell("infer-lbhnc", FLASHINFER, LBHNC),
    Cell("block-16-64", TP1, B64),
    Cell("block-64-16", B64, TP1),
    Cell("tp-1-2", TP1, TP2),
    Cell("tp-2-1", TP2, TP1),
    Cell("tp2-lbhnc", TP2, LBHNC),
    Cell("lbhnc-tp2", LBHNC, TP2),
    Cell("infer-tp2", FLASHINFER, TP2),
    Cell("tp2-infer", TP2, FLASHINFER),
    Cell("tp2-block64-tp1", TP2_B64, TP1),
    Cell("tp1-tp2-block64", TP1, TP2_B64),
    Cell("pp-1-2", TP1, PP2),
    Cell("pp-2-1", PP2, TP1),
    Cell("pp2-tp2", PP2, TP2),
    Cell("tp2-pp2", TP2, PP2),
)
BOTH_WAYS = (Cell("tp-1-2", TP1, TP2), Cell("tp-2-1", TP2, TP1))
SAME = Cell("same", TP1, TP1)
# vLLM 0.32's rotation for CPU takes the queries of MLA for contiguous, which they are not: what a
# prompt then means depends on how many tokens are computed at a time, also without a connector.
NATIVE_ROPE = ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}')

MODELS: Final[Sequence[Model]] = (
    Model("qwen3", TinyModel(), {"cpu": QWEN3_ON_CPU, "cuda": QWEN3_ON_CUDA}),
    Model("qwen3-kv1", TinyModel(kv_heads=1), {"cpu": BOTH_WAYS, "cuda": BOTH_WAYS}),
    Model(
        "qwen3-kv12",
        PaddedQwen3(heads=12, kv_heads=12, hidden=384, intermediate=768),
        {device: (Cell("tp-2-3", TP2, TP3), Cell("tp-3-2", TP3, TP2)) for device in DEVICES},
    ),
    Model(
        "gemma3",
        Gemma3(),
        {
            "cpu": (
                SAME,
                Cell("block-128-64", TP1, B64),
                Cell("block-64-128", B64, TP1),
                *BOTH_WAYS,
            ),
            "cuda": (SAME, Cell("block-16-64", TP1, B64), *BOTH_WAYS),
        },
        cuda_dtype="bfloat16",  # vLLM refuses float16 for it
    ),
    Model(
        "gemma4",
        Gemma4(),
        {
            device: (
                SAME,
                Cell("fast-prefill", FAST, TP1),
                Cell("fast-decode", TP1, FAST),
                *BOTH_WAYS,
            )
            for device in DEVICES
        },
    ),
    Model(
        "gemma4-two-heads",
        Gemma4(full_kv_heads=2, full_head_dim=128),
        {"cpu": (SAME, *BOTH_WAYS), "cuda": (SAME, *BOTH_WAYS)},
    ),
    Model(
        "gemma4-two-pages",
        Gemma4(full_kv_heads=2, full_head_dim=256),
        {"cpu": (SAME, Cell("block-128-64", TP1, B64), *BOTH_WAYS), "cuda": (SAME, *BOTH_WAYS)},
    ),
    Model(
        "mla",
        DeepseekV2(),
        {"cpu": (SAME, *BOTH_WAYS), "cuda": (SAME, *BOTH_WAYS)},
        cpu_flags=NATIVE_ROPE,
    ),
)
"""Sharing fast prefill skips what nobody reads: the KV of its own layers is whole all the same."""


def chosen(
    device: Device, names: Sequence[str], *, gpus: int
) -> Iterator[tuple[Model, list[Cell]]]:
    """The models and their cells, by `model`, `model/cell` or `cell`; all, if nothing is named.

    On GPUs each rank needs one of its own, so that some cells need more than there are.
    """
    for model in MODELS:
        cells = [
            cell
            for cell in model.cells.get(device, ())
            if (device == "cpu" or max(cell.prefill.ranks, cell.decode.ranks) <= gpus)
            and (not names or {model.name, cell.name, f"{model.name}/{cell.name}"} & set(names))
        ]
        if cells:
            yield model, cells


def batches(cells: Sequence[Cell], limit: int) -> Iterator[list[Cell]]:
    """Cells in order, as many at a time as their engines' ranks fit into the limit."""
    batch: list[Cell] = []
    for cell in cells:
        if batch and _ranks([*batch, cell]) > limit:
            yield batch
            batch = []
        batch.append(cell)
    if batch:
        yield batch


def needed(cells: Sequence[Cell]) -> list[tuple[Shape, int]]:
    """The engines of some cells, each once: a shape, and which of several of that shape."""
    return list(dict.fromkeys(engine for cell in cells for engine in engines_of(cell)))


def engines_of(cell: Cell) -> tuple[tuple[Shape, int], tuple[Shape, int]]:
    """Prefill and decode. No engine reads from itself."""
    return (cell.prefill, 0), (cell.decode, int(cell.prefill == cell.decode))


def _ranks(cells: Sequence[Cell]) -> int:
    return sum(shape.ranks for shape, _ in needed(cells))
