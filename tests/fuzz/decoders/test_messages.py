"""Mutated messages and layouts give a value or the documented error, in bounded time and memory.

NIXL_KV_SEED=381 NIXL_KV_SECONDS=0 pytest -m "not slow" tests/fuzz/decoders    one seed again
NIXL_KV_SECONDS=600 pytest -m "not slow" tests/fuzz/decoders                   more, from seed 1 on

The mutations are our own, not of hypothesis or atheris: of 8 mistakes planted into decoders and
machines they found 5 in 12 s of CPU time each, atheris 3.0 found 2, and hypothesis 6.170 found 1.
"""

import contextlib
import itertools
import logging
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from fuzz.decoders.exchange import Exchange
from fuzz.decoders.mutate import mutate
from fuzz.decoders.samples import KINDS, sample
from harness.local.caches import Cache, Sizes
from harness.local.engine import HAS_VERIFY, HOST_PATHS
from harness.local.model_layouts import PACKED
from nixl_kv.errors import IncompatiblePeer, RemoteProtocolError
from nixl_kv.geometry import match
from nixl_kv.geometry.layout import CacheLayout, Part, Span, Table
from nixl_kv.geometry.plan import plan
from nixl_kv.ids import Rank
from nixl_kv.protocol import messages
from support.seeds import seed_or

SEED = seed_or(1)
SECONDS = float(os.environ.get("NIXL_KV_SECONDS", "2"))
MAX_CPU_S = 5.0  # many tests may share the cores
MAX_BYTES = 500 << 20
CHANGED = 0.15  # share of the messages: of about fifteen of an exchange, one or two, or a few
OTHER_KIND = 0.1  # share of these that are of any kind

LARGE = Cache(Sizes(layers=36, blocks=1024, heads=8, tokens=16, key=64, value=64)).layout()
"""A model of 8 billion parameters with small heads. Its memory is mapped, not touched."""

ROOM = (Span(1, 2**62),)
REFUSALS = (IncompatiblePeer, msgspec.MsgspecError, ValueError, RecursionError)
"""A remote layout may end in these; the handshake catches all of them."""

DECODERS: Mapping[str, Callable[[bytes], object]] = {
    name: decode for name, decode in vars(messages).items() if name.startswith("decode")
}
Run = Callable[[random.Random], object]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def fuzz(run: Run, seconds: float) -> None:
    """Run seeds for so long, and at least one."""
    ends_at, peak = time.monotonic() + seconds, peak_bytes()
    for seed in itertools.count(SEED):
        began = time.thread_time()
        try:
            run(random.Random(seed))  # noqa: S311 - the same inputs every time
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        assert time.thread_time() - began < MAX_CPU_S, f"seed {seed}"
        assert peak_bytes() - peak < MAX_BYTES, f"seed {seed}"
        if time.monotonic() >= ends_at:
            return


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


durations = pytest.mark.parametrize(
    "seconds", [SECONDS, pytest.param(60.0, marks=pytest.mark.slow)], ids=["some", "many"]
)


@durations
@pytest.mark.parametrize("path", HOST_PATHS)
def test_a_peer_that_says_anything_breaks_no_promise(path: str, seconds: float) -> None:
    fuzz(lambda rng: Exchange(path, partial(changed, rng)).run(), seconds)


def changed(rng: random.Random, message: bytes) -> Sequence[bytes]:
    """Mostly the message; or a mutation, before it, after it, or instead of it."""
    if rng.random() > CHANGED:
        return [message]
    is_other = rng.random() < OTHER_KIND
    mutated = mutate(rng, messages.encode(sample(rng.choice(KINDS))) if is_other else message)
    for name, decode in DECODERS.items():
        # A worker of the same engine may also end in these.
        with contextlib.suppress(RemoteProtocolError, *REFUSALS * (name == "decode_rank")):
            decode(mutated)
    return rng.choice(([mutated], [mutated, message], [message, mutated]))


@pytest.mark.parametrize("path", HOST_PATHS)
def test_messages_that_are_not_changed_are_understood(path: str) -> None:
    exchange = Exchange(path).run()
    assert exchange.load is not None
    assert exchange.load.verified == HAS_VERIFY
    assert {"Describe", "Description", "Ask", "Grant", "Heartbeat"} <= set(exchange.kinds)
    digests = {"DigestRequest", "DigestReply"}
    assert digests & set(exchange.kinds) == (digests if HAS_VERIFY else set())
    assert ("PackRequest" in exchange.kinds) == (path == "staged")


# --- layouts of peers


@durations
def test_a_layout_that_says_anything_is_planned_or_refused(seconds: float) -> None:
    layouts = [msgspec.msgpack.encode(layout) for layout in sample_layouts()]

    def run(rng: random.Random) -> None:
        with contextlib.suppress(*REFUSALS):
            plan_reads(mutate(rng, rng.choice(layouts)))

    for layout in layouts:
        assert plan_reads(layout)
    fuzz(run, seconds)


def plan_reads(layout: bytes) -> bool:
    """Plan reads of a cache that says this of itself; False if the two do not fit."""
    theirs = msgspec.msgpack.decode(layout, type=CacheLayout)
    if match.layout_mismatches([LARGE], [theirs]):
        return False
    (route, *_) = match.routes(Rank(0), [match.holdings(LARGE)], [match.holdings(theirs)])
    table = Table.of(range(1, 65))
    local, remote = ([table] * len(layout.groups) for layout in (LARGE, theirs))
    plan(LARGE, theirs, route.share).reads(local, remote, range(64))
    return True


def sample_layouts() -> Iterator[CacheLayout]:
    """In so much room that other numbers of theirs fit as well."""
    sizes = Sizes(layers=36, blocks=64, heads=8, tokens=16, key=64, value=64)
    for order in PACKED:
        yield replace(Cache(sizes, order).layout(), spans=ROOM)
    for tokens in (4, 128):
        yield replace(Cache(replace(sizes, tokens=tokens)).layout(), spans=ROOM)
    yield with_transposed_parts(replace(Cache(sizes).layout(), spans=ROOM))


def with_transposed_parts(layout: CacheLayout) -> CacheLayout:
    """Each token's content in pieces of two bytes, as where K is transposed within a block."""
    (group,) = layout.groups
    parts = tuple(
        Part(part.offset * group.block_size, 2, part.length // 2, group.block_size * 2, 2)
        for part in group.regions[0].parts
    )
    regions = tuple(replace(region, parts=parts) for region in group.regions)
    return replace(layout, groups=(replace(group, regions=regions),))
