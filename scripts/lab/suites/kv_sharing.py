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

from lab.cluster.answers import LIKELY, Likeness, Question
from lab.cluster.client import Client
from lab.cluster.cluster import Cluster, pair_specs
from lab.cluster.engines import EngineSpec
from lab.cluster.metrics import FAILURES, LOADS, CountersSince, Loaded
from lab.cluster.models.files import ensure_tiny_model
from lab.cluster.models.gemma import FULL, Gemma4
from lab.cluster.pair import Pair
from lab.cluster.prompts import random_prompt
from lab.results import Results, Verdict, say_on_stderr, verdict_of

PATIENT: Final[Mapping[str, object]] = {"request_timeout_s": 60, "peer_timeout_s": 20}
"""Few cores are slow, also with signs of life."""
FAST_PREFILL: Final = "--kv-sharing-fast-prefill"
LENGTHS: Final = (5, 128, 129, 300, 400, 700, 1100)
SEED: Final = 40
BLOCK: Final = 128
"""Tokens: vLLM's choice on CPU."""
ELEMENT: Final = 4
"""Bytes, of float32."""
LAG_S: Final = 30.0
KV_CACHE_BYTES: Final = 256 << 20
MIB: Final = 2**20


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
    def verdict(self) -> Verdict:
        """Whether the answer is right, and exactly what the owning layers hold was read."""
        return verdict_of(
            "another answer" if self.answer == "other" else "",
            f"{self.loads} loads, {self.failures} failed" if self.loads != 1 else "",
            f"{self.nbytes} bytes, not {self.owned}" if self.nbytes != self.owned else "",
        )

    def cells(self) -> Mapping[str, str]:
        """See `lab.results.Result`."""
        return {
            "prompt\ntokens": str(self.tokens),
            "answer": self.answer,
            "MiB\nmoved": f"{self.nbytes / MIB:.2f}",
            "MiB the owning\nlayers hold": f"{self.owned / MIB:.2f}",
            "MiB all layers\nwould be": f"{self.unshared / MIB:.2f}",
            "saved\n%": f"{100 * (1 - self.nbytes / self.unshared):.1f}",
            "loads": str(self.loads),
            "verified": str(self.verified),
            "failed": str(self.failures),
        }


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


def sharing_specs(model: Path) -> tuple[EngineSpec, EngineSpec, EngineSpec]:
    """Prefill with the flag, decode without, and a single engine without."""
    prefill, decode = pair_specs(
        model, suffix="-sharing", kv_cache_bytes=KV_CACHE_BYTES, connector_config=PATIENT
    )
    single = EngineSpec("single-sharing", model, kv_cache_bytes=KV_CACHE_BYTES)
    return replace(prefill, extra_args=(FAST_PREFILL,)), decode, single


def measure(pair: Pair, single: Client, recipe: Gemma4, num_tokens: int) -> Row:
    """One prompt of that length, through the router."""
    prompt = random_prompt(num_tokens, SEED)
    question = Question(prompt, single.complete(prompt, logprobs=LIKELY))
    since = CountersSince(pair.to_decode)
    likeness = question.compare(pair.to_router.complete(prompt))
    changed = since.wait(lambda now: now[LOADS] + now[FAILURES] > 0, LAG_S)
    return row_of(recipe, num_tokens, likeness, Loaded.from_counters(changed))


def row_of(recipe: Gemma4, tokens: int, answer: Likeness, loaded: Loaded) -> Row:
    """Put together what was counted, and what should have been."""
    layers = layers_of(recipe)
    owned = held_bytes([layer for layer in layers if layer.owns], tokens)
    return Row(
        tokens,
        answer,
        loaded.loads,
        loaded.verified,
        loaded.failures,
        loaded.nbytes,
        owned,
        held_bytes(layers, tokens),
    )


def main() -> int:
    """Run; 0 only if all is well."""
    parser = argparse.ArgumentParser(
        prog="kv_sharing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    log_dir = parser.parse_args().log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-sharing-"))
    recipe = Gemma4()
    model = ensure_tiny_model(model=recipe)
    owning = recipe.layers - recipe.shared_layers
    results = Results(
        f"{recipe.layers} layers, of which {owning} own a cache; prefill with {FAST_PREFILL}",
        "prompts: right answer, and read exactly what the owning layers hold",
    )
    with Cluster(log_dir) as cluster:
        prefill, decode, alone = cluster.start(*sharing_specs(model))
        router = cluster.route([prefill], [decode])
        say_on_stderr("asking a single engine, and the router")
        with Pair(prefill, decode, router) as pair, Client(alone.url) as single:
            for length in LENGTHS:
                results.add(measure(pair, single, recipe, length))
    return results.print(len(LENGTHS))


if __name__ == "__main__":
    sys.exit(main())
