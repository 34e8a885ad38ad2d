"""New weights between prefill and decode: two real transfer engines, and their schedulers' halves.

The weights are what prefill writes into its cache: `compute(OLD)` or `compute(NEW)`.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from harness.local.memory import Fabric
from nixl_kv.ids import RequestId
from nixl_kv.keys import write_key_file
from nixl_kv.protocol.events import FailureKind, OfferEnd
from nixl_kv.protocol.load import State
from support.pair import MakeTransport
from support.scheduled_engine import TABLE, ScheduledEngine

OLD, NEW = 1, 2
WAIT_S: Final = 60.0


class Pair:
    """Prefill and decode."""

    def __init__(self, key_file: str, make_transport: MakeTransport) -> None:
        self.prefill = ScheduledEngine("prefill", key_file, make_transport)
        self.decode = ScheduledEngine("decode", key_file, make_transport)

    def offer(self, request: str, weights: int) -> dict[str, object]:
        """Prefill computes a prompt with these weights."""
        self.prefill.cache.fill(weights)
        return self.prefill.offer(request)

    def load(self, request: str, params: dict[str, object]) -> str | None:
        """Decode's request; why it was computed there, None if all was read."""
        refusal = self.decode.ask(request, params)
        if refusal is not None or self.decode.matched(request) == [0, False]:
            return refusal or "computed"
        return self.decode.failure(request)

    def wait_for(self, request: str, state: State) -> None:
        """Until decode's read is in this state."""
        machine = self.decode.local.ranks[0].parts.decode

        def is_there() -> bool:
            load = machine._by_request.get(RequestId(request))
            return load is not None and [read.state for read in load.reads.values()] == [state]

        self.decode.local.wait(is_there, WAIT_S)

    @property
    def has_read(self) -> bool:
        """Whether decode's blocks have what prefill's cache has now, in all of the prompt's."""
        theirs, ours = self.prefill.cache.blocks(TABLE[:2]), self.decode.cache.blocks(TABLE[:2])
        return bool(np.array_equal(theirs, ours))

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def pair(tmp_path: Path, memory: MakeTransport) -> Iterator[Pair]:
    write_key_file(tmp_path / "key")
    with contextlib.closing(Pair(str(tmp_path / "key"), memory)) as pair:
        yield pair


@pytest.mark.parametrize("order", ["decode first", "prefill first"])
def test_a_reset_of_both_leaves_nothing_of_the_old_weights(pair: Pair, order: str) -> None:
    """Tickets that are out, asks that are granted, and then all goes on with the new weights."""
    assert pair.load("d0", pair.offer("p0", OLD)) is None
    out, granted = pair.offer("p1", OLD), pair.offer("p2", OLD)
    assert pair.decode.ask("d2", granted) is None
    pair.wait_for("d2", State.GRANTED)
    engines = [pair.decode, pair.prefill]
    for engine in engines if order == "decode first" else reversed(engines):
        engine.reset()

    assert pair.decode.matched("d2") == [0, False]
    pair.decode.step()
    pair.prefill.step()
    refusal = pair.load("d1", out)
    assert refusal is not None
    assert "epoch is 0, from before this engine's cache was reset" in refusal
    assert pair.prefill.offer_end("p1") == OfferEnd.REVOKED.value
    assert pair.prefill.offer_end("p2") in (OfferEnd.REVOKED.value, OfferEnd.ABORTED.value)

    assert pair.load("d3", pair.offer("p3", NEW)) is None
    assert pair.has_read


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_labels_that_differ_read_nothing(pair: Pair, first: str) -> None:
    """One engine after the other gets new weights, while requests go on."""
    pair.prefill.reset("7")
    pair.decode.reset("7")
    assert pair.load("d0", pair.offer("p0", OLD)) is None
    before = pair.offer("p1", OLD)
    second = {"prefill": pair.decode, "decode": pair.prefill}[first]
    getattr(pair, first).reset("8")
    pair.prefill.step()
    pair.decode.step()

    ours, theirs = ("7", "8") if first == "prefill" else ("8", "7")
    refusal = pair.load("d2", pair.offer("p2", NEW if first == "prefill" else OLD))
    assert refusal == (
        f"kv_transfer_params: weights is {theirs!r}; this engine's weights are {ours!r}"
    )
    second.reset("8")
    pair.prefill.step()
    assert pair.load("d1", before) == (
        "kv_transfer_params: weights is '7'; this engine's weights are '8'"
    )
    assert pair.load("d3", pair.offer("p3", NEW)) is None
    assert pair.has_read


def test_a_read_under_way_does_not_outlive_the_reset(pair: Pair, fabric: Fabric) -> None:
    """It ends when nothing writes any more, and not well."""
    assert pair.load("d0", pair.offer("p0", OLD)) is None  # met, and its first reads are over
    assert pair.decode.ask("d1", pair.offer("p1", OLD)) is None
    fabric.reads_hang = True
    name = RequestId("d1")
    num_tokens, _ = pair.decode.matched("d1")
    pair.decode._decode.update_state_after_alloc(name, [TABLE], int(str(num_tokens)))
    pair.decode.step()
    pair.wait_for("d1", State.READING)
    pair.decode.reset()
    pair.decode.step()
    pair.decode.local.ranks[0].poll()
    assert name not in pair.decode.local.ranks[0].loads
    fabric.reads_hang = False
    failure = pair.decode.local.wait_failure("d1", WAIT_S)
    assert failure is not None
    assert FailureKind.DROPPED.value in failure
