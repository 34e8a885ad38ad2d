"""What every fault has in common: a pair that serves before, and must serve again after."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import httpx

from pd.client import Client
from pd.faults_asking import Crowd, Ended, ask
from pd.faults_deck import SHORT, Deck
from pd.faults_pair import LOADS, Clients, Pair, wait_until_free
from pd.netns import PERFECT
from pd.waiting import wait_until

OFFER_TTL_S: Final = 6.0
LEASE_S: Final = 4.0
REQUEST_TIMEOUT_S: Final = 8.0
SLACK_S: Final = 5.0
TIMING: Final = {
    "offer_ttl_s": OFFER_TTL_S,
    "lease_s": LEASE_S,
    "request_timeout_s": REQUEST_TIMEOUT_S,
}
RELEASE_S: Final = max(OFFER_TTL_S, LEASE_S) + 1.0  # a tick, a step of vLLM, a poll of ours
SERVE_AGAIN_S: Final = 30.0
CROWD: Final = 20
WAIT_S: Final = 20.0
Where = Literal["local", "network"]


class Scene:
    """A fault while it happens: what it uses, and what came of it."""

    def __init__(self, pair: Pair, deck: Deck, clients: Clients) -> None:
        """Nothing has happened yet."""
        self.pair = pair
        self.deck = deck
        self.clients = clients
        self.crowd = Crowd(CROWD)
        self.ended: list[Ended] = []
        self.found: list[str] = []
        """What is not as it should be, beside answers and leaks."""

    def expect(self, holds: bool, otherwise: str) -> None:  # noqa: FBT001 - as in an assertion
        """Note what does not hold, and go on."""
        if not holds:
            self.found.append(otherwise)

    def expect_soon(self, condition: Callable[[], bool], otherwise: str) -> None:
        """The same for what may take a moment."""
        self.expect(wait_until(condition, WAIT_S, interval_s=0.02), otherwise)

    def collect(self) -> None:
        """Wait for all requests that were sent."""
        self.ended += self.crowd.results()

    def expect_free(self, client: Client, within_s: float) -> None:
        """An engine shall hold no block soon."""
        held, seconds = wait_until_free(client, within_s)
        self.expect(not held, f"{client.url} holds {held} blocks after {seconds:.1f} s")


@dataclass(frozen=True)
class Fault:
    """One fault. `deadline_s` is what each request has, from when it was sent to its end."""

    name: str
    where: Where
    happens: Callable[[Scene], None]
    deadline_s: float = REQUEST_TIMEOUT_S + SLACK_S

    @property
    def about(self) -> str:
        """In one line."""
        return (self.happens.__doc__ or "").splitlines()[0]


@dataclass(frozen=True)
class Report:
    """What came of a fault."""

    fault: str
    deadline_s: float
    ended: tuple[Ended, ...] = ()
    loads: int = 0
    leaked: tuple[int, int] = (0, 0)
    serves_after_s: float | None = None
    found: tuple[str, ...] = field(default=())

    def count(self, kind: str) -> int:
        """How many requests ended so."""
        return sum(ended.kind == kind for ended in self.ended)

    @property
    def longest_s(self) -> float:
        """Of all requests."""
        return max((ended.seconds for ended in self.ended), default=0.0)

    @property
    def verdict(self) -> str:
        """Empty if all is well, else what is not."""
        leaks = zip(("prefill", "decode"), self.leaked, strict=True)
        late = sum(e.kind == "late" or e.seconds > self.deadline_s for e in self.ended)
        troubles = [
            *self.found,
            *([f"{self.count('wrong')} wrong answers"] if self.count("wrong") else []),
            *([f"{late} had not ended after {self.deadline_s:g} s"] if late else []),
            *(f"{blocks} blocks leaked on {engine}" for engine, blocks in leaks if blocks),
            *(["does not serve again"] if self.serves_after_s is None else []),
        ]
        return "; ".join(troubles)


def run_fault(fault: Fault, pair: Pair, deck: Deck) -> Report:
    """Let it happen to a pair that serves, and look what is left."""
    before, loads, leaked, serves_after = 0.0, 0, (0, 0), None
    with Clients(pair, fault.deadline_s + 2) as clients:
        scene = Scene(pair, deck, clients)
        with _troubles_noted(scene):
            scene.expect(_serves(scene) is not None, "did not serve before")
            before = clients.loads()
            fault.happens(scene)
        scene.collect()
        _repair(scene)
        with _troubles_noted(scene):
            loads = _grown(before, clients.loads())
            serves_after = _serves(scene)
            leaked = _leaked(scene)
        _repair(scene)
        scene.crowd.close()
    ended, found = tuple(scene.ended), tuple(scene.found)
    return Report(fault.name, fault.deadline_s, ended, loads, leaked, serves_after, found)


@contextlib.contextmanager
def _troubles_noted(scene: Scene) -> Iterator[None]:
    """What a fault's own steps run into is part of the outcome."""
    try:
        yield
    except (RuntimeError, httpx.HTTPError) as error:
        scene.found.append(f"{type(error).__name__}: {error}".splitlines()[0])


def _repair(scene: Scene) -> None:
    """What a fault left broken; an engine that ended by itself should not have."""
    if scene.pair.wire is not None:
        scene.pair.wire.quality = PERFECT
    for engine in (scene.pair.prefill, scene.pair.decode):
        if engine.is_running():
            engine.thaw()
        else:
            scene.found.append(f"{engine.name} ended by itself")
            engine.kill()
            engine.revive()


def _serves(scene: Scene) -> float | None:
    """Seconds until a request is answered from KV that was read; None if none is for too long."""
    begin = time.monotonic()
    clients = scene.clients
    while time.monotonic() - begin < SERVE_AGAIN_S:
        (question,) = scene.deck.draw(SHORT, 1)
        before = clients.target.counters()
        scene.ended.append(ask(question, partial(clients.apart, question)))
        if clients.target.counters_after(before, LOADS).get(LOADS, 0.0) > 0:
            return time.monotonic() - begin
    return None


def _leaked(scene: Scene) -> tuple[int, int]:
    """Blocks that both engines still hold when all offers and leases have long ended."""
    on_prefill, _ = wait_until_free(scene.clients.source, RELEASE_S + SLACK_S)
    on_decode, _ = wait_until_free(scene.clients.target, SLACK_S)
    return on_prefill, on_decode


def _grown(before: float, after: float) -> int:
    """A restarted engine counts from zero."""
    return round(after - before if after >= before else after)
