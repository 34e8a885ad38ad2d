"""What do messages, time and peers cost a rank that holds much and knows many?

The machines alone, without sockets, hold 100 to 10,000 requests of a tenth as many engines, each
of eight ranks: the CPU time of a message of each kind, and of a tick when nothing is due. Then, in
time that is counted and does not pass: 200 engines that are joined at 50 a second, 50 ms each; and
one lease of 0.1 s beside 800 of 5 s. At last a control plane over ZMQ that meets thousands of
endpoints, five hundred at a time, and hears from each: its open files. And a whole rank with its
thread and its sockets that meets fleets of engines (`lab.bench.fleet`).
"""

import argparse
import gc
import itertools
import statistics
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from lab.bench.events import cost
from lab.bench.fleet import (
    CONTEXT,
    FACTS,
    LEASE_S,
    TABLES,
    Cost,
    FleetEngine,
    address,
    grant_of,
    hex32,
    layouts,
    measure,
    open_files,
)
from lab.local.memory import Fabric, MemoryTransport
from lab.results import Figures, Results, say_on_stderr, verdict_of
from lab.sim.data_plane import Background
from nixl_kv.config import Config
from nixl_kv.geometry.match import Route
from nixl_kv.ids import (
    Claim,
    Endpoint,
    EngineId,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    endpoint_at,
)
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.decode import DecodeMachine
from nixl_kv.protocol.prefill import PrefillMachine
from nixl_kv.reading.peers import RemotePeers
from nixl_kv.reading.replace import Agents
from nixl_kv.transport.base import FromEndpoint, Lost, PeerName
from nixl_kv.transport.zmq import ZmqControl

TP: Final = 8
RENEW_S: Final = Config(lease_s=LEASE_S).renew_interval_s
SAMPLES: Final = 200
ROUNDS: Final = 5
MOST_GROWTH: Final = 1.5
"""Of what a message costs with 10,000 requests held, over 100."""

MOST_GAP_S: Final = 1.0
"""Between two renewals that are due each 0.8 s."""
MOST_IDLE_PERCENT: Final = 0.1
MOST_RENEWS: Final = 1000
AT_A_TIME: Final = 500
"""Endpoints that are talked to at the same time."""
ANSWERS_S: Final = 60.0
"""For all of these to answer, on a busy machine."""

PORT: Final = 7000
"""Of engines that are only spoken of."""
READER_LIFE: Final = Incarnation("7" * 32)
READER: Final = messages.Reader(engine=EngineId("d"), incarnation=READER_LIFE, rank=Rank(0))
LAYOUT: Final = layouts(1)[0]
SHARES: Final = {region.layer: (0, 1) for group in LAYOUT.groups for region in group.regions}


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much."""
    parser.add_argument("--held", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--endpoints", type=int, default=10_000, help="to meet, over ZMQ")
    parser.add_argument(
        "--engines", type=int, nargs="*", default=[10, 100, 1000], help="of a fleet"
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[1, TP], help="ranks of each engine")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw costs against numbers")


def run(options: argparse.Namespace) -> int:
    """A row for each figure."""
    results = Results("what grows with a fleet", "figures are as they should be", options.json)
    costs = growth(options.held)
    rows = [*map(growth_row, costs), *storm(), short_lease(), *endpoints(options.endpoints)]
    for row in rows:
        results.add(row)
    fleets = []
    for tp, engines in itertools.product(options.tp, options.engines):
        fleets.append(measure(engines, tp))
        say_on_stderr(f"  {fleets[-1]}")
        results.add(fleet_row(fleets[-1]))
    if options.plot is not None:
        draw(costs, fleets, options.plot)
    return results.print(len(rows) + len(fleets))


def fleet_row(fleet: Cost) -> Figures:
    """What a fleet may cost, whatever its size."""
    too_much = [
        f"{value:g} {what}, allowed: {most:g}"
        for what, value, most in (
            ("% of a core when idle", fleet.idle_percent, MOST_IDLE_PERCENT),
            ("s between renewals", fleet.longest_gap_s, LEASE_S / 2),
            ("links when idle", fleet.links_idle, 0),
        )
        if value > most
    ]
    return Figures(fleet.figures(), verdict_of(*too_much))


def draw(costs: Sequence["Growth"], fleets: Sequence[Cost], path: Path) -> None:
    """Cost against number, both logarithmic: what does not grow is level."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only who wants a plot needs it

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    machines, sockets = figure.subplots(1, 2)
    for each in costs:
        style = "-" if each.what.startswith("decode") else "--"
        machines.plot(each.held, each.us, style, marker="o", label=each.what)
    machines.set(xlabel="requests held", ylabel="us CPU", title="a message, a tick")
    for tp in dict.fromkeys(fleet.tp for fleet in fleets):
        of_tp = [fleet for fleet in fleets if fleet.tp == tp]
        numbers = [fleet.engines * tp for fleet in of_tp]
        for what, values in (
            ("meet", [fleet.meet_ms * 1e3 for fleet in of_tp]),
            ("held, a second", [fleet.held_us for fleet in of_tp]),
        ):
            label = f"{what}, {tp} ranks an engine"
            sockets.plot(numbers, values, marker="o", label=label)
    sockets.set(xlabel="endpoints", ylabel="us CPU for each", title="over ZMQ, with all threads")
    for axes in (machines, sockets):
        axes.set(xscale="log", yscale="log")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(path)


# --- messages and ticks


@dataclass
class Decode:
    """A decode rank's machine, and the asks that it has sent."""

    machine: DecodeMachine
    asks: list[events.Send] = field(default_factory=list)

    @classmethod
    def holding(cls, num_requests: int, num_engines: int, tp: int = TP) -> "Decode":
        """So many requests of engines of `tp` ranks have been asked for, in second 0."""
        one = cls(
            DecodeMachine(
                READER,
                lambda _event: None,
                lambda *_: (),
                timeout_s=30,
                renew_interval_s=RENEW_S,
                bytes_per_token=1,
            )
        )
        for request in range(num_requests):
            one.prepare(FleetEngine(request % num_engines, tp, PORT), request)
        return one

    def prepare(self, engine: FleetEngine, request: int) -> None:
        """A request comes; its engine describes itself at once if it is new."""
        actions = self.machine.handle(engine.prepare_load(request), 0.0)
        if any(isinstance(getattr(one, "message", None), messages.Describe) for one in actions):
            routes = tuple(Route(Rank(rank), (Rank(0),), SHARES) for rank in range(engine.tp))
            joined = events.PeerFits(engine.key, engine.description(), routes)
            actions = self.machine.handle(joined, 0.0)
        self.asks += [a for a in actions if isinstance(a, events.Send)]

    def grants(self, shortest_s: float = LEASE_S) -> Iterator[events.Answered]:
        """The answers to all asks, in their order; the first lease is the shortest."""
        for number, sent in enumerate(self.asks):
            ask = sent.message
            if isinstance(ask, messages.Ask):
                grant = grant_of(ask, LEASE_S if number else shortest_s, slot=number % 64)
                yield events.Answered(sent.endpoint, grant)


def cpu_us(steps: Sequence[Callable[[], object]]) -> float:
    """CPU time of a step, in microseconds: the lower quartile of batches of ten.

    Without garbage collections, which are spread over as many steps as there are objects; and not
    the median, since a core that is shared with another process's thread is half as fast.
    """
    times = []
    gc.collect()
    gc.disable()
    for batch in (steps[first : first + 10] for first in range(0, len(steps), 10)):
        begin = time.thread_time()
        for step in batch:
            step()
        times.append((time.thread_time() - begin) / len(batch))
    gc.enable()
    return statistics.quantiles(times, n=4)[0] * 1e6


def decode_costs(held: int) -> dict[str, float]:
    """Of a decode rank that reads `held` requests from a tenth as many engines."""
    decode = Decode.holding(held, max(1, held // 10))
    machine, grants = decode.machine, list(decode.grants())
    for grant in grants[SAMPLES:]:
        machine.handle(grant, 0.1)
    costs = {"grant": cpu_us([partial(machine.handle, one, 0.1) for one in grants[:SAMPLES]])}
    costs["tick, nothing due"] = cpu_us([lambda: machine.handle(events.Tick(), 0.11)] * SAMPLES)
    renewed = [
        events.Answered(
            sent.endpoint,
            messages.Renewed(
                incarnation=sent.message.incarnation,
                reader=READER,
                number=1 << 40,
                lost=(),
            ),
        )
        for sent in decode.asks[:SAMPLES]
        if isinstance(sent.message, messages.Ask)
    ]
    costs["renewed"] = cpu_us([partial(machine.handle, each, 0.2) for each in renewed])
    cancels = [events.CancelLoad(RequestId(str(n))) for n in range(min(held, SAMPLES))]
    costs["cancel"] = cpu_us([partial(machine.handle, cancel, 0.3) for cancel in cancels])
    return costs


def prefill_costs(held: int) -> dict[str, float]:
    """Of a prefill rank with as many grants, each to another reader."""
    machine = PrefillMachine(
        Incarnation(hex32(9)),
        lambda _event: None,
        num_slots=held + SAMPLES,
        offer_ttl_s=60,
        lease_s=LEASE_S,
        hold_s=60,
    )

    def offer(number: int) -> None:
        nonce, request = Nonce(hex32(number)), RequestId(f"p{number}")
        machine.handle(events.PrepareOffer(nonce, request, CONTEXT, 100, TABLES), 0.0)
        machine.handle(events.PublishOffer(nonce, request), 0.0)

    def names(number: int) -> dict[str, object]:
        reader = messages.Reader(
            engine=EngineId(f"d{number}"), incarnation=READER_LIFE, rank=Rank(0)
        )
        return {"incarnation": hex32(9), "reader": reader}

    def asked(number: int, message: messages.ToRank) -> Callable[[], object]:
        event = events.Asked(b"%d" % number, message)
        return lambda: machine.handle(event, 0.1)

    def ask(number: int) -> Callable[[], object]:
        claim, nonce = Claim(hex32(number)), Nonce(hex32(number))
        of = {"nonce": nonce, "claim": claim, "context": CONTEXT, "number": 1, "readers": (0,)}
        return asked(number, messages.Ask(**names(number), **of))  # type: ignore[arg-type]

    for number in range(held + SAMPLES):
        offer(number)
    for number in range(held):
        ask(number)()
    numbers = range(held, held + SAMPLES)
    costs = {"ask": cpu_us([ask(number) for number in numbers])}
    costs["renew"] = cpu_us(
        [
            asked(
                n,
                messages.Renew(**names(n), number=2, claims=(Claim(hex32(n)),), num_reading=0),  # type: ignore[arg-type]
            )
            for n in numbers
        ]
    )
    costs["tick, nothing due"] = cpu_us([lambda: machine.handle(events.Tick(), 0.2)] * SAMPLES)
    releases = [
        messages.Release(**names(n), nonce=hex32(n), claim=hex32(n), complete=True)  # type: ignore[arg-type]
        for n in numbers
    ]
    costs["release"] = cpu_us([asked(0, each) for each in releases])
    return costs


@dataclass(frozen=True)
class Growth:
    """CPU of one kind of step, by how many requests are held."""

    what: str
    held: Sequence[int]
    us: Sequence[float]


def growth_row(growth: Growth) -> Figures:
    """The last over the first."""
    numbers = ", ".join(f"{number:,}" for number in growth.held)
    costs = ", ".join(f"{us:.1f}" for us in growth.us)
    what = f"{growth.what}, us, with {numbers} held: {costs}"
    return cost(what, growth.us[-1] / growth.us[0], "times", MOST_GROWTH)


def growth(held: Sequence[int]) -> list[Growth]:
    """What each costs, by how many requests are held.

    Of rounds in turn the lowest: what else the machine does comes and goes in seconds.
    """
    rows: list[Growth] = []
    for side, measured in (("decode", decode_costs), ("prefill", prefill_costs)):
        rounds = [[measured(count) for count in held] for _ in range(ROUNDS)]
        for name in rounds[0][0]:
            costs = [min(each[number][name] for each in rounds) for number in range(len(held))]
            rows.append(Growth(f"{side}: {name}", held, costs))
    return rows


# --- peers that come, and leases that are short


class SlowTransport(MemoryTransport):
    """Whose clock goes on by what it takes NIXL to add a peer. It reads nothing."""

    def __init__(self, fabric: Fabric, clock: "CountedTime") -> None:
        super().__init__(fabric)
        self._clock = clock

    def add_peer(self, metadata: bytes) -> PeerName:
        """50 ms."""
        self._clock.now += 0.05
        return PeerName(metadata.decode())

    def prepare(self, *_arguments: object) -> object:  # type: ignore[override]
        """Nothing."""
        return None

    def read(self, *_arguments: object) -> object:  # type: ignore[override]
        """Nothing, which has landed at once."""
        return None

    def poll(self, _read: object) -> bool:
        """It has."""
        return True


@dataclass
class CountedTime:
    """A clock that goes when it is told to."""

    now: float = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def storm(num_peers: int = 200, rate: float = 50.0) -> list[Figures]:
    """Engines of one rank that come 50 a second: the longest turn, and time between renewals."""
    clock, fabric, turns, renewed_at = CountedTime(), Fabric(), [0.0], [0.0]
    decode = Decode.holding(1, 1, tp=1)
    decode.machine.handle(next(decode.grants()), 0.0)
    peers = RemotePeers(LAYOUT, Rank(0), FACTS)
    background = Background()
    agents = Agents(
        lambda: SlowTransport(fabric, clock),
        peers,
        defaultdict(float),
        clock=clock,
        make_background=lambda _count: background,
    )
    agents.open()
    joins = deque(
        (number / rate, events.JoinPeer(engine.key, engine.description()))
        for number, engine in enumerate(FleetEngine(n, 1, PORT) for n in range(1, num_peers + 1))
    )
    while joins or agents.is_busy:
        begin = clock.now
        while joins and joins[0][0] <= clock.now:
            agents.execute(joins.popleft()[1])
        agents.poll()
        turned_at = clock.now
        while background.waiting:
            background.work()
        sent = decode.machine.handle(events.Tick(), clock.now)
        if any(isinstance(getattr(a, "message", None), messages.Renew) for a in sent):
            renewed_at.append(clock.now)
        turns.append(turned_at - begin)
        clock.now += 0.001
    gap = max(after - before for before, after in itertools.pairwise(renewed_at))
    words = f"{num_peers} engines joined at {rate:g} a second, 50 ms each: longest"
    return [
        cost(f"{words} turn", max(turns), "s"),
        cost(f"{words} time between renewals", gap, "s", MOST_GAP_S),
    ]


def short_lease() -> Figures:
    """Renews of a second, where one of 800 leases is of 0.1 s."""
    decode = Decode.holding(100, 100)
    for grant in decode.grants(shortest_s=0.1):
        decode.machine.handle(grant, 0.1)
    sent, begin = 0, 2.0
    decode.machine.handle(events.Tick(), begin)
    while (due := decode.machine.next_due) is not None and due <= begin + 1:
        actions = decode.machine.handle(events.Tick(), due)
        sent += sum(isinstance(action, events.Send) for action in actions)
    return cost(f"{len(decode.asks)} leases, one of 0.1 s: renews", sent, "a second", MOST_RENEWS)


# --- endpoints over ZMQ

LISTENER: Final = """
from nixl_kv.transport.zmq import ZmqControl
control = ZmqControl()
print(control.listen("0.0.0.0", 0), flush=True)
while True:
    for item in control.poll(None):
        control.reply(item.route, item.payload)
"""
"""Each address of 127.0.0.0/8 is this machine: one port is as many endpoints as are wanted."""


def endpoints(count: int) -> list[Figures]:
    """A control that talks to so many endpoints in its life, and hears from each.

    Raises:
        TimeoutError: if an answer does not come.
    """
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True
    ) as child:
        port = int(next(iter(child.stdout or ())))
        control = ZmqControl()
        before, begin, most = open_files(), time.thread_time(), 0
        numbers = range(count)
        try:
            for first in numbers[::AT_A_TIME]:
                group = [
                    endpoint_at(address(number, 1), port)
                    for number in numbers[first : first + AT_A_TIME]
                ]
                talk(control, group)
                most = max(most, open_files() - before)
                for endpoint in group:
                    control.disconnect(endpoint)
            cpu = (time.thread_time() - begin) / count * 1e6
        finally:
            control.close()
            child.kill()
    what = f"{count:,} endpoints met, {AT_A_TIME} at a time:"
    return [
        cost(f"{what} open files at most", most, "files", 2 * AT_A_TIME),
        cost(f"{what} CPU", cpu, "us each"),
    ]


def talk(control: ZmqControl, group: Sequence[Endpoint]) -> None:
    """Ask each endpoint of a group, and hear its answer."""
    for endpoint in group:
        control.send(endpoint, endpoint.encode())
    silent, deadline = set(group), time.monotonic() + ANSWERS_S
    while silent:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(silent)} of {len(group)} endpoints do not answer")
        for item in control.poll(1.0):
            if isinstance(item, FromEndpoint) and item.payload == item.endpoint.encode():
                silent.discard(item.endpoint)
            elif isinstance(item, Lost) and item.endpoint in silent:  # too slow: a busy machine
                control.send(item.endpoint, item.endpoint.encode())
