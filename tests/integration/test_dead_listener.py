"""A prefill rank that ran out of descriptors can be read again: real NIXL, two processes.

UCX closes a listening socket for good when accept() finds no free descriptor.
"""

import os
import resource
import subprocess
import sys
import time

import pytest

from support.processes import SideProcess, running, wait_for

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl

FREE = (3, 2, 1)
"""Descriptors that prefill has left: enough for the control plane, and too few for UCX."""
each_way = pytest.mark.parametrize(
    "tls", [pytest.param("", marks=pytest.mark.slow), "tcp"], ids=["shared memory", "tcp"]
)

SCARCE = """
import random, resource
from nixl_kv.config import Config
from nixl_kv.errors import TransportError
from nixl_kv.transport.nixl import nixl_transport
from nixl_kv.transport.ports import num_descriptors
random_ = random.Random(1)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
refused = 0
for _ in range(20):
    free = random_.randrange(1, 40)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors() + free, hard))
    try:
        nixl_transport(Config(), "DRAM").close()
    except TransportError as error:
        assert "raise `ulimit -n`" in str(error), error
        refused += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    nixl_transport(Config(), "DRAM").close()
print("refused", refused)
"""


def starve(prefill: SideProcess, tls: str) -> None:
    """A reader connects while prefill has no descriptors left."""
    limits = resource.prlimit(prefill.pid, resource.RLIMIT_NOFILE)
    for free in FREE:
        with running("decode", tls) as other:
            low = prefill.usage().descriptors + free
            resource.prlimit(prefill.pid, resource.RLIMIT_NOFILE, (low, limits[1]))
            other.load(prefill.offer())  # over some network interface it may work
    resource.prlimit(prefill.pid, resource.RLIMIT_NOFILE, limits)


@each_way
def test_prefill_notices_that_no_peer_can_connect_and_begins_another_life(tls: str) -> None:
    with running("prefill", tls) as prefill:
        starve(prefill, tls)
        totals = wait_for(prefill.totals, lambda counts: counts.get("replaced_agents", 0) > 0)
        assert totals.get("replaced_agents closed_listener") == 1
        with running("decode", tls) as decode:
            assert decode.load(prefill.offer()) is None


ABORTS = pytest.mark.xfail(
    reason="UCX 1.23 may abort decode: known failures in docs/faults.md", strict=False
)


@pytest.mark.parametrize(
    "tls",
    [pytest.param("", marks=[pytest.mark.slow, ABORTS]), "tcp"],
    ids=["shared memory", "tcp"],
)
def test_decode_leaves_a_peer_alone_that_answers_and_cannot_be_read(tls: str) -> None:
    """Nothing is collected for its loads, and most of them fail at once."""
    with (
        running("prefill", tls, is_checked=False) as prefill,
        running("decode", tls) as decode,
    ):
        starve(prefill, tls)
        decode.remember()
        before = decode.usage()
        failures, seconds = list[str](), list[float]()
        until = time.monotonic() + 6.0
        while time.monotonic() < until or len(failures) < 20:
            begun = time.monotonic()
            failures.append(decode.load(prefill.offer()) or "")
            seconds.append(time.monotonic() - begun)
        assert all(failures), "a load was read"
        tried = [detail for detail in failures if "reading prefill rank 0 failed" in detail]
        assert len(tried) <= 8
        assert len(failures) > 2 * len(tried)
        assert "answers but cannot be read" in failures[-1]
        assert decode.totals()["unusable_peers"] == 1
        after = wait_for(decode.usage, lambda now: now.descriptors <= before.descriptors + 8)
        assert after.descriptors <= before.descriptors + 8, f"{before}, {after}; {len(tried)} tries"


@each_way
def test_after_descriptors_were_scarce_agents_can_be_made_again(tls: str) -> None:
    """UCX that runs out of them while it opens a worker would hang when it opens the next one."""
    env = dict(os.environ, UCX_LOG_LEVEL="fatal")
    if tls:
        env.update(UCX_TLS=tls, UCX_NET_DEVICES="lo")
    command = [sys.executable, "-c", SCARCE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines()[-1] == "refused 20"
