"""Layers that share the cache of earlier ones: is only that moved which a layer owns?

The model is a tiny Gemma4, whose last layers have no cache of their own. Prefill runs with
--kv-sharing-fast-prefill and computes nothing in these layers but for a prompt's last token; decode
runs without. Prompts go through the router and are compared with a single engine.

The exit status is 0 only if every answer is the same, every prompt's KV was read, and decode read
exactly the bytes that the owning layers hold for the blocks that it wants.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.table import Table

from pd.asking import LIKELY, TIES, Likeness, likeness
from pd.client import Client, Counters
from pd.cluster import CPU_DTYPE, Cluster, ClusterSpec, one_pair, say_on_stderr
from pd.console import console
from pd.prompts import random_prompt
from pd.tiny_families import FULL, Gemma4
from pd.tiny_model import ensure_tiny_model

# Few cores are slow, also with signs of life.
PATIENT: Final[Mapping[str, object]] = {"request_timeout_s": 60, "peer_timeout_s": 20}
DECODE_CONFIG: Final[Mapping[str, object]] = {**PATIENT}
"""The connector's, of the decode engine."""
FAST_PREFILL: Final = "--kv-sharing-fast-prefill"
LENGTHS: Final = (5, 128, 129, 300, 400, 700, 1100)
SEED: Final = 40
BLOCK: Final = 128
"""Tokens: vLLM's choice on CPU."""
ELEMENT: Final = 4
"""Bytes, of float32."""
MIB: Final = 2**20
WIDTH: Final = 120
LOADS: Final = "vllm:nixl_kv_loads_total"
VERIFIED: Final = "vllm:nixl_kv_loads_verified_total"
FAILURES: Final = "vllm:nixl_kv_load_failures_total"
NBYTES: Final = "vllm:nixl_kv_bytes_read_total"


@dataclass(frozen=True)
class Layer:
    """One layer: the bytes of a token's K and V, the window in tokens (0: all), whose cache."""

    token_bytes: int
    window: int
    owns: bool


@dataclass(frozen=True)
class Row:
    """What came of one prompt. Bytes: what was read, what the owning layers hold, all layers."""

    tokens: int
    answer: Likeness
    loads: int
    verified: int
    failures: int
    nbytes: int
    owned: int
    unshared: int

    @property
    def good(self) -> bool:
        """Whether all is as it should be."""
        read = (self.loads, self.failures, self.nbytes) == (1, 0, self.owned)
        return read and self.answer != "other"


def layers_of(recipe: Gemma4) -> list[Layer]:
    """All layers, also those that have no cache of their own."""
    kinds = recipe.config(vocab_size=0)["layer_types"]
    full = [kind == FULL for kind in kinds] if isinstance(kinds, list) else []
    sliding_bytes = 2 * recipe.kv_heads * recipe.head_dim * ELEMENT
    full_bytes = 2 * recipe.full_kv_heads * recipe.full_head_dim * ELEMENT
    owning = recipe.layers - recipe.shared_layers
    return [
        Layer(
            full_bytes if is_full else sliding_bytes, 0 if is_full else recipe.window, at < owning
        )
        for at, is_full in enumerate(full)
    ]


def held_bytes(layers: Sequence[Layer], tokens: int) -> int:
    """What layers hold of a prompt that decode wants: whole blocks of all tokens but the last.

    Decode computes that one itself; in it, a layer with a window looks back as far as that.
    """
    last = -(-(tokens - 1) // BLOCK)
    return sum(layer.token_bytes * BLOCK * (last - _first_block(layer, tokens)) for layer in layers)


def _first_block(layer: Layer, tokens: int) -> int:
    return max(0, tokens - layer.window) // BLOCK if layer.window else 0


def sharing_pair(model: Path) -> ClusterSpec:
    """Prefill with the flag, decode without, and a single engine without."""
    pair = one_pair(model, "nixl-kv", single=True)
    prefill = [
        replace(spec, connector_config=PATIENT, extra_args=(FAST_PREFILL,)) for spec in pair.prefill
    ]
    decode = [replace(spec, connector_config=DECODE_CONFIG) for spec in pair.decode]
    return ClusterSpec(prefill, decode, pair.single)


def measure(cluster: Cluster, recipe: Gemma4, lengths: Sequence[int]) -> list[Row]:
    """One prompt of each length, one after another.

    Raises:
        ValueError: if the cluster has no single engine to compare with.
    """
    if cluster.single is None:
        raise ValueError("single: there must be one")
    with (
        Client(cluster.single.url) as single,
        Client(cluster.router_url) as router,
        Client(cluster.decode[0].url) as decode,
    ):
        rows = []
        for length in lengths:
            prompt = random_prompt(length, SEED)
            expected = single.complete(prompt, logprobs=LIKELY)
            before = decode.counters()
            answer = router.complete(prompt)
            same = likeness(expected, answer, TIES[CPU_DTYPE])
            changed = decode.counters_after(before, LOADS)
            rows.append(row_of(recipe, length, answer=same, changed=changed))
    return rows


def row_of(recipe: Gemma4, tokens: int, *, answer: Likeness, changed: Counters) -> Row:
    """Put together what was counted, and what should have been."""
    layers = layers_of(recipe)
    loads, verified, failures, nbytes = (
        round(changed.get(name, 0.0)) for name in (LOADS, VERIFIED, FAILURES, NBYTES)
    )
    owned = held_bytes([layer for layer in layers if layer.owns], tokens)
    return Row(tokens, answer, loads, verified, failures, nbytes, owned, held_bytes(layers, tokens))


def print_rows(recipe: Gemma4, rows: Sequence[Row]) -> None:
    """A table, one row for each prompt and one for all."""
    owning = recipe.layers - recipe.shared_layers
    title = f"{recipe.layers} layers, of which {owning} own a cache; prefill with {FAST_PREFILL}"
    table = Table(title=title)
    for heading in (
        "prompt\ntokens",
        "answer",
        "MiB\nmoved",
        "MiB the owning\nlayers hold",
        "MiB all layers\nwould be",
        "saved\n%",
        "loads",
        "verified",
        "failed",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(str(row.tokens), row.answer, *_sums([row]))
    table.add_section()
    right = sum(row.answer != "other" for row in rows)
    table.add_row("all", f"{right}/{len(rows)}", *_sums(rows))
    console(WIDTH).print(table)


def _sums(rows: Sequence[Row]) -> list[str]:
    moved = sum(row.nbytes for row in rows)
    unshared = sum(row.unshared for row in rows)
    return [
        f"{moved / MIB:.2f}",
        f"{sum(row.owned for row in rows) / MIB:.2f}",
        f"{unshared / MIB:.2f}",
        f"{100 * (1 - moved / unshared):.1f}",
        str(sum(row.loads for row in rows)),
        str(sum(row.verified for row in rows)),
        str(sum(row.failures for row in rows)),
    ]


def main() -> int:
    """Run; 0 only if all is well."""
    parser = argparse.ArgumentParser(
        prog="kv_sharing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    log_dir = parser.parse_args().log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-sharing-"))
    recipe = Gemma4()
    with Cluster(sharing_pair(ensure_tiny_model(model=recipe)), log_dir=log_dir) as cluster:
        say_on_stderr("asking a single engine, and the router")
        rows = measure(cluster, recipe, LENGTHS)
    print_rows(recipe, rows)
    good = sum(row.good for row in rows)
    print(f"{good}/{len(rows)} prompts: right answer, and read exactly what the owning layers hold")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
