"""NIXL's own decoder of a peer's metadata, in a child process, since it is C++ and may not survive.

The child's agents use shared memory alone, so that a mutated address leads nowhere.
"""

import contextlib
import os
import random
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import IO, Final

from typing_extensions import Self

from lab.fuzz.execute import Caught
from lab.fuzz.fuzzer import as_argument
from lab.fuzz.mutate import mutate_bytes
from nixl_kv.errors import TransportError

LENGTH: Final = struct.Struct("<I")
REPLY_BYTES = 60
ENVIRONMENT: Final = {"UCX_TLS": "posix,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}
MAX_INPUTS = 200
"""Of one child, so that what one input left behind does not count against later ones for long."""

NAME = "nixl"
DIED = "the process died"


class Child:
    """A process that adds peers by the metadata that it is sent."""

    def __init__(self) -> None:
        """Start it and wait for its own valid metadata."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lab.fuzz.nixl_metadata"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | ENVIRONMENT,
        )
        (length,) = LENGTH.unpack(_read(self._pipes[1], LENGTH.size))
        self.metadata = _read(self._pipes[1], length)

    def __enter__(self) -> Self:
        """It ends with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def outcome(self, metadata: bytes) -> str:
        """What one input ended in, in words."""
        try:
            self._pipes[0].write(LENGTH.pack(len(metadata)) + metadata)
            self._pipes[0].flush()
            return _read(self._pipes[1], REPLY_BYTES).decode().rstrip()
        except (BrokenPipeError, EOFError):
            return f"{DIED} with status {self._process.wait()}"

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")
        return self._process.stdin, self._process.stdout


def fuzz_nixl(seconds: float, *, seed: int, crash_dir: Path | None) -> int:
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
        print(f"scripts/fuzz --replay {NAME} {as_argument(data, crash_dir)}")
    return int(bool(deaths))


def replay_nixl(data: bytes) -> int:
    """One input, in a fresh process; 1 if it dies of it."""
    with Child() as child:
        outcome = child.outcome(data)
    print(outcome)
    return int(outcome.startswith(DIED))


def _read(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve() -> None:
    """The child: an agent adds what is sent, and forgets it."""
    # What C++ prints on stdout must not come between the replies.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    from nixl_kv.transport.nixl import (  # noqa: PLC0415 - NIXL is loaded in the child alone
        UCX_OPTIONS,
        NixlTransport,
    )

    # Shared memory alone cannot tell that a peer died.
    options = {**UCX_OPTIONS, "ucx_error_handling_mode": "none"}
    described, agent = (NixlTransport(ucx_options=options) for _ in range(2))
    metadata = described.metadata()
    out.write(LENGTH.pack(len(metadata)) + metadata)
    out.flush()
    while header := sys.stdin.buffer.read(LENGTH.size):
        data = sys.stdin.buffer.read(*LENGTH.unpack(header))
        caught = Caught()
        with caught:
            agent.drop_peer(agent.add_peer(data))
        out.write(_words(caught.error).encode().ljust(REPLY_BYTES))
        out.flush()


def _words(error: BaseException | None) -> str:
    if error is None:
        return "accepted"
    if isinstance(error, TransportError):
        return f"refused: {type(error.__cause__).__name__}"
    return f"NOT TRANSLATED: {type(error).__name__}"


if __name__ == "__main__":
    serve()
