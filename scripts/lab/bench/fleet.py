"""A decode rank and a fleet of prefill engines, over ZMQ: what do those that it meets cost?

The fleet is one process that says what prefill engines say, and has no memory: each engine, and
each of its ranks, has an address of its own in 127.0.0.0/8. The rank is a whole transfer engine
with its thread and sockets, whose data plane does nothing. It meets so many engines, holds a
request of each, of so many at a time, gives all back, and is idle.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import psutil

from lab.bench.timing import cpu_share
from lab.cluster.waiting import wait_or_fail
from lab.local.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.config import Config
from nixl_kv.engine.engine import RankSpec, TransferEngine
from nixl_kv.errors import RemoteProtocolError
from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import (
    Claim,
    EngineId,
    Generation,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    endpoint_at,
    engine_incarnation,
)
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport import ports
from nixl_kv.transport.base import FromPeer, PeerName, Received
from nixl_kv.transport.zmq import ZmqControl

MODEL: Final = ModelShape(32, 8, (256, 256), "bfloat16")
FACTS: Final = {"model": "of the bench"}
CONTEXT: Final = "0" * 32
TABLES: Final = (Table(0, bytes(4 * 7)),)
LEASE_S: Final = 5.0
HELD_S: Final = 5.0
IDLE_S: Final = 5.0
WAIT_S: Final = 120.0
AT_A_TIME: Final = 50
"""Engines that are met at the same time."""
MOST_HELD: Final = 1000
"""Endpoints: beyond that, the first engines are released, and others take their turn."""
POLL_S: Final = 0.02
OWN_FILES: Final = 4
"""Of a rank that has a link for the first time: sockets that stay."""


def hex32(number: int) -> str:
    """A name of 32 digits."""
    return f"{number:032x}"


def address(number: int, part: int) -> str:
    """Of an engine's directory (part 1), or of its rank (part 10 + rank)."""
    return f"127.{part}.{number // 250}.{number % 250 + 1}"


@cache
def layouts(tp: int) -> list[CacheLayout]:
    """Of the ranks of an engine."""
    return build_layouts(MODEL, EngineShape(tp=tp, num_blocks=1000))


@dataclass(frozen=True)
class FleetEngine:
    """One prefill engine of the fleet; all of them listen on one port."""

    number: int
    tp: int
    port: int

    @property
    def incarnation(self) -> Incarnation:
        """Of its one life."""
        return engine_incarnation(map(self._incarnation_of, range(self.tp)))

    @property
    def key(self) -> events.PeerKey:
        """How decode names it."""
        ticket = self.ticket(0)
        return events.PeerKey(ticket.engine, ticket.incarnation, ticket.endpoint)

    def description(self) -> messages.Description:
        """Whatever it is asked for."""
        ranks = tuple(
            messages.RankDescription(
                incarnation=self._incarnation_of(rank),
                endpoint=endpoint_at(address(self.number, 10 + rank), self.port),
                agent=b"agent",
                slots=messages.Slots(address=4096, count=64),
                layout=layout,
            )
            for rank, layout in enumerate(layouts(self.tp))
        )
        return messages.Description(
            incarnation=self.incarnation,
            engine=EngineId(str(self.number)),
            model=FACTS,
            shape=ParallelShape(self.tp, 1),
            ranks=ranks,
        )

    def prepare_load(self, request: int) -> events.PrepareLoad:
        """Of one of its prompts."""
        name, claim = RequestId(str(request)), Claim(hex32(request))
        return events.PrepareLoad(name, self.ticket(request), claim)

    def ticket(self, request: int) -> Ticket:
        """For this prompt."""
        return Ticket(
            engine=EngineId(str(self.number)),
            host=address(self.number, 1),
            port=self.port,
            incarnation=self.incarnation,
            nonce=Nonce(hex32(request)),
            num_tokens=100,
            context=CONTEXT,
        )

    def _incarnation_of(self, rank: int) -> Incarnation:
        return Incarnation(hex32(self.number * 100 + rank + 1))


def grant_of(ask: messages.Ask, lease_s: float = LEASE_S, slot: int = 0) -> messages.Grant:
    """What a rank of the fleet answers."""
    return messages.Grant(
        incarnation=ask.incarnation,
        nonce=ask.nonce,
        claim=ask.claim,
        reader=ask.reader,
        lease_s=lease_s,
        tables=TABLES,
        slot=slot,
        generation=Generation(b"\1" * 16),
    )


# --- the fleet's process


class Fleet:
    """Answers for all engines; counts grants, and how long each reader's rank was not renewed."""

    def __init__(self, tp: int) -> None:
        """Listen, with room for all connections that the process may have."""
        ports.MAX_CONNECTIONS = 1 << 20  # type: ignore[misc]
        ports.SHARE_OF_DESCRIPTORS = 1  # type: ignore[misc]
        self._control = ZmqControl()
        self.port = self._control.listen("0.0.0.0", 0)  # noqa: S104 - 127.0.0.0/8 is all loopback
        self._tp = tp
        self._renewed_at: dict[Incarnation, float] = {}
        self._grants = 0
        self._longest_s = 0.0

    def turn(self) -> None:
        """Wait for messages, and answer them."""
        for item in self._control.poll(None):
            if isinstance(item, FromPeer):
                for answer in self._answers(item.payload):
                    self._control.reply(item.route, messages.encode(answer))

    def report(self) -> str:
        """What was counted by now."""
        return json.dumps({"grants": self._grants, "longest_s": self._longest_s})

    def _answers(self, payload: bytes) -> Iterable[messages.Answer]:
        try:
            message = messages.decode_to_rank(payload)
        except RemoteProtocolError:
            question = messages.decode_to_engine(payload)
            if isinstance(question, messages.Describe):
                yield FleetEngine(int(question.engine), self._tp, self.port).description()
            return
        match message:
            case messages.Ask():
                self._grants += 1
                yield grant_of(message)
            case messages.Renew():
                now = time.monotonic()
                before = self._renewed_at.get(message.incarnation, now)
                self._longest_s = max(self._longest_s, now - before)
                self._renewed_at[message.incarnation] = now
                yield messages.Renewed(
                    incarnation=message.incarnation,
                    reader=message.reader,
                    number=message.number,
                    lost=(),
                )
            case messages.Release():
                self._renewed_at.pop(message.incarnation, None)


def main() -> None:
    """The fleet's process: prints its port, and a report for each line that it reads."""
    fleet = Fleet(int(sys.argv[1]))
    print(fleet.port, flush=True)

    def report() -> None:
        for _ in sys.stdin:
            print(fleet.report(), flush=True)

    threading.Thread(target=report, daemon=True).start()
    while True:
        fleet.turn()


# --- the rank's process


class NoTransport:
    """A data plane that takes everything and moves nothing: reads end at once."""

    def warm_up_pieces(self, _: object) -> int:
        """There are no connections."""
        return 1

    def register(self, *_: object) -> None:
        """Nothing."""

    def rehearse(self, *_: object) -> None:
        """Nothing."""

    def metadata(self) -> bytes:
        """Nothing."""
        return b""

    def add_peer(self, metadata: bytes) -> PeerName:
        """Nothing."""
        return PeerName(metadata.decode())

    def drop_peer(self, peer: PeerName) -> None:
        """Nothing."""

    def prepare(self, *_: object) -> object:
        """Nothing."""
        return None

    def read(self, *_: object) -> object:
        """Nothing."""
        return None

    def stop(self, _: object) -> bool:
        """It has ended."""
        return False

    def poll(self, _: object) -> bool:
        """It has ended."""
        return True

    def progress(self) -> None:
        """Nothing."""

    def tidy(self) -> bool:
        """There are no connections."""
        return False

    def close(self) -> None:
        """Nothing."""


class TimedControl(ZmqControl):
    """Notes how long a turn takes, between two polls."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._polled_at = float("inf")

    def poll(self, timeout_s: float | None) -> list[Received]:
        """As any."""
        self.longest_s = max(self.longest_s, time.monotonic() - self._polled_at)
        received = super().poll(timeout_s)
        self._polled_at = time.monotonic()
        return received


@dataclass(frozen=True)
class Cost:
    """What a fleet cost a rank. CPU is of all threads of its process."""

    engines: int
    tp: int
    meet_ms: float
    """CPU for each endpoint: ask who it is (once an engine), plan, ask, be granted."""
    held_us: float
    """CPU a second for each endpoint that is held: to renew, and the answer."""
    idle_percent: float
    """Of a core, when all was given back and all links are closed."""
    longest_turn_s: float
    """Of the transfer thread, between two waits."""
    longest_gap_s: float
    """Between two renewals of one endpoint, while others are met and after."""
    files_held: int
    files_idle: int
    links_idle: int
    kib: float
    """Memory for each endpoint that was met, when idle."""

    def figures(self) -> dict[str, str | int | float]:
        """The row of a table."""
        return {
            "engines": self.engines,
            "tp": self.tp,
            "meet,\nms CPU an endpoint": self.meet_ms,
            "held,\nus CPU an endpoint\nand second": self.held_us,
            "idle,\n% of a core": self.idle_percent,
            "longest\nturn, s": self.longest_turn_s,
            "longest\nbetween renewals, s": self.longest_gap_s,
            "files\nheld": self.files_held,
            "files\nidle": self.files_idle,
            "links\nidle": self.links_idle,
            "KiB an\nendpoint": self.kib,
        }


def measure(num_engines: int, tp: int) -> Cost:
    """Meet them, hold, give back, be idle.

    Raises:
        TimeoutError: if something of it does not come about.
    """
    fleet = subprocess.Popen(
        [sys.executable, "-m", "lab.bench.fleet", str(tp)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    control = TimedControl()
    engine = TransferEngine(
        RankSpec(
            engine=EngineId("decode"),
            rank=Rank(0),
            layout=layouts(1)[0],
            model=FACTS,
            config=Config(request_timeout_s=WAIT_S, peer_timeout_s=60.0),
            host="127.0.0.1",
            is_prefill=False,
            is_decode=True,
            make_transport=NoTransport,
            make_control=lambda: control,
        )
    )
    try:
        return _measure(fleet, control, engine, num_engines=num_engines, tp=tp)
    finally:
        engine.stop()
        fleet.kill()
        fleet.communicate()


def _measure(
    fleet: "subprocess.Popen[str]",
    control: TimedControl,
    engine: TransferEngine,
    *,
    num_engines: int,
    tp: int,
) -> Cost:
    if fleet.stdout is None or fleet.stdin is None:
        raise RuntimeError("the fleet has no pipes")
    stdin, stdout = fleet.stdin, fleet.stdout

    def report() -> dict[str, Any]:
        stdin.write("\n")
        counted: dict[str, Any] = json.loads(stdout.readline())
        return counted

    port = int(stdout.readline())
    fleet_engines = [FleetEngine(number, tp, port) for number in range(num_engines)]
    num_endpoints = num_engines * tp
    engine.start()
    files, memory = open_files(), resident()
    begin = time.process_time()
    num_released = 0
    for first in range(0, num_engines, AT_A_TIME):
        group = fleet_engines[first : first + AT_A_TIME]
        while (first + len(group) - num_released) * tp > MOST_HELD:
            engine.submit([events.CancelLoad(RequestId(str(num_released)))])
            num_released += 1
        engine.submit([each.prepare_load(each.number) for each in group])
        granted = partial(have_granted, report, (first + len(group)) * tp)
        wait_or_fail(granted, WAIT_S, "not all have granted", interval_s=POLL_S)
    meet = time.process_time() - begin
    held = cpu_share(HELD_S)
    files_held, gap = open_files() - files, report()["longest_s"]
    held_numbers = range(num_released, num_engines)
    engine.submit([events.CancelLoad(RequestId(str(number))) for number in held_numbers])
    wait_or_fail(
        lambda: open_files() - files <= OWN_FILES, WAIT_S, "links stay open", interval_s=POLL_S
    )
    idle = cpu_share(IDLE_S)
    return Cost(
        engines=num_engines,
        tp=tp,
        meet_ms=meet / num_endpoints * 1e3,
        held_us=held / (num_engines - num_released) / tp * 1e6,
        idle_percent=100 * idle,
        longest_turn_s=control.longest_s,
        longest_gap_s=gap,
        files_held=files_held,
        files_idle=open_files() - files,
        links_idle=len(control.links()),
        kib=(resident() - memory) / 1024 / num_endpoints,
    )


def have_granted(report: Callable[[], dict[str, Any]], expected: int) -> bool:
    """Whether the fleet has sent so many grants by now."""
    return int(report()["grants"]) >= expected


def open_files() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def resident() -> int:
    """Bytes of memory of this process."""
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
