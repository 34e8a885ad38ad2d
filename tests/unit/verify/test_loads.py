"""Verified loads of two stepped ranks, from the offer to the report."""

import logging

import numpy as np
import pytest

from nixl_kv.protocol.events import FailureKind, OfferEnd
from nixl_kv.verify.queue import DigestQueue
from support.digest_caches import SlowDigester
from support.stepped import Stepped, World

TABLE, OTHER_TABLE = [7, 3, 4], [2, 9, 1]


def queue_of(rank: Stepped) -> DigestQueue:
    digests = rank.parts.digests
    assert isinstance(digests, DigestQueue)
    return digests


def started(world: World) -> None:
    world.decode.prepare_load(1, world.prefill.offer(1, TABLE, 11))

    def is_granted() -> bool:
        load = world.decode.load(1)
        return load is not None and load.lacks_only_blocks

    world.until(is_granted)
    world.decode.start_load(1, OTHER_TABLE, 11, verify=True)


@pytest.mark.parametrize("polls", [0, 3], ids="lands at poll {}".format)
@pytest.mark.parametrize("steps", [0, 3], ids="digest of {} steps".format)
def test_a_good_load_is_verified(
    world: World, polls: int, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    world.fabric.polls = polls
    queue_of(world.prefill)._digester = SlowDigester(steps, 0.0)
    started(world)
    world.run(20)
    assert caplog.messages == [], "a good load has nothing to say"
    load = world.decode.ended_load()
    assert (load.failure, load.verified, load.num_tokens) == (None, True, 11)
    assert world.prefill.ended_offer() == ("p1", OfferEnd.READ)
    read, expected = world.decode.cache.blocks(OTHER_TABLE), world.prefill.cache.blocks(TABLE)
    assert np.array_equal(read, expected)


def test_bytes_that_changed_before_they_are_compared_fail_the_load(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    queue_of(world.decode)._digester = SlowDigester(3, 0.0)
    started(world)
    world.decode.turn()
    world.decode.cache.view[1, OTHER_TABLE[0]] += 1
    with caplog.at_level(logging.WARNING, logger="nixl_kv"):
        world.run(20)
    failure = world.decode.failed_load()
    assert failure.kind is FailureKind.CORRUPT
    assert "layer.1" in failure.detail


def test_a_rank_that_cannot_digest_fails_what_is_to_be_verified(world: World) -> None:
    world.prefill.parts.digests._digester = None
    started(world)
    for _ in range(10):  # it is asked more than once
        world.clock.now += 1.0
        world.run(2)
    assert world.decode.failed_load().kind is FailureKind.DENIED
