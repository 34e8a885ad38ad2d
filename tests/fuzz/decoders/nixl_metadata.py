"""NIXL's own decoder of a peer's metadata, in a child process, since it is C++ and may not survive.

The child's agents use shared memory alone, so that a mutated address leads nowhere.
"""

import multiprocessing
import os
import random
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Final

from typing_extensions import Self

from fuzz.decoders.execute import Caught
from fuzz.decoders.fuzzer import as_argument
from fuzz.decoders.mutate import mutate_bytes
from nixl_kv.errors import TransportError

ENVIRONMENT: Final = {"UCX_TLS": "posix,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}
MAX_INPUTS = 200
"""Of one child, so that what one input left behind does not count against later ones for long."""

NAME = "nixl"
DIED = "the process died"


class Child:
    """A process that adds peers by the metadata that it is sent."""

    def __init__(self) -> None:
        """Start it and wait for its own valid metadata."""
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.metadata = self._pipe.recv_bytes()

    def __enter__(self) -> Self:
        """It ends with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def outcome(self, metadata: bytes) -> str:
        """What one input ended in, in words."""
        try:
            self._pipe.send_bytes(metadata)
            return self._pipe.recv_bytes().decode()
        except (OSError, EOFError):
            self._process.join()
            return f"{DIED} with status {self._process.exitcode}"


def fuzz_nixl(seconds: float, *, seed: int) -> int:
    """Run for so long; 1 if a child died."""
    rng = random.Random(seed)  # noqa: S311 - the same inputs every time
    outcomes: Counter[str] = Counter()
    deaths: dict[str, bytes] = {}
    started_at = time.monotonic()
    while time.monotonic() - started_at < seconds:
        with Child() as child:
            for _ in range(MAX_INPUTS):
                data = child.metadata
                for _ in range(rng.randint(1, 3)):
                    data = mutate_bytes(rng, data)
                outcome = child.outcome(data)
                outcomes[outcome] += 1
                if outcome.startswith(DIED):
                    deaths.setdefault(outcome, data)
                    break
    print(f"NIXL: {outcomes.total()} inputs in {time.monotonic() - started_at:.0f} s")
    for outcome, count in outcomes.most_common():
        print(f"{count:8} {outcome}")
    for outcome, data in deaths.items():
        print(f"\n{outcome}: {len(data)} bytes, perhaps after others, do it")
        print(f"scripts/fuzz --replay {NAME} {as_argument(data)}")
    return int(bool(deaths))


def replay_nixl(data: bytes) -> int:
    """One input, in a fresh process; 1 if it dies of it."""
    with Child() as child:
        outcome = child.outcome(data)
    print(outcome)
    return int(outcome.startswith(DIED))


def serve(pipe: Connection) -> None:
    """The child: an agent adds what is sent, and forgets it."""
    os.environ |= ENVIRONMENT
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)

    from nixl_kv.transport.nixl import (  # noqa: PLC0415 - NIXL is loaded in the child alone
        UCX_OPTIONS,
        NixlTransport,
    )

    # Shared memory alone cannot tell that a peer died.
    options = {**UCX_OPTIONS, "ucx_error_handling_mode": "none"}
    described, agent = (NixlTransport(ucx_options=options) for _ in range(2))
    pipe.send_bytes(described.metadata())
    while True:
        data = pipe.recv_bytes()
        caught = Caught()
        with caught:
            agent.drop_peer(agent.add_peer(data))
        pipe.send_bytes(_words(caught.error).encode())


def _words(error: BaseException | None) -> str:
    if error is None:
        return "accepted"
    if isinstance(error, TransportError):
        return f"refused: {type(error.__cause__).__name__}"
    return f"NOT TRANSLATED: {type(error).__name__}"
