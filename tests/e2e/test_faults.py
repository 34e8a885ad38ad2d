"""Engines that are killed, stopped, cut off and crowded out. Clients hang up in test_soak.py.

Each fault happens to a pair of engines that serves. Every request must end in time, with a single
engine's answer or with an error. Then neither engine holds a block, and decode reads KV again.
Faults of the network, and those that hit a transfer halfway, happen between network namespaces.
"""

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest

from harness.cluster.answers import Question, questions_of
from harness.cluster.client import Answer, Client, Ticket
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Engine, EngineSpec
from harness.cluster.metrics import (
    LOADS,
    OFFERS_UNCLAIMED,
    PREEMPTIONS,
    QUEUED,
    CountersSince,
)
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.netns import ADDRESSES, PERFECT, Namespace, Quality, Wire
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until
from support.asking import Ended, Load, ask, judge, kinds
from support.engines import EVENT_S, expect_free, started

pytestmark = [pytest.mark.e2e, pytest.mark.faults]
slow = pytest.mark.slow
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and `ip` of iproute2"
)

OFFER_TTL_S = 6.0
LEASE_S = 4.0
REQUEST_TIMEOUT_S = 8.0
SLACK_S = 5.0  # few cores do all of this
DEADLINE_S = REQUEST_TIMEOUT_S + SLACK_S
"""The limit of each request, beyond a single engine's time for it."""
PATIENCE_S = 180.0  # of a client
RELEASE_S = max(OFFER_TTL_S, LEASE_S) + 1.0 + SLACK_S
NUM_BLOCKS = 81  # few enough to run out
CONFIG: Mapping[str, Any] = {
    "offer_ttl_s": OFFER_TTL_S,
    "lease_s": LEASE_S,
    "request_timeout_s": REQUEST_TIMEOUT_S,
    "offer_share": 0.9,  # the caches are small, and offers are to last until a fault has hit them
}
NETWORK: Mapping[str, Any] = {"insecure": True, "peers": [ADDRESSES]}
SEEDS = itertools.count(900)  # no engine has seen a prompt before, so its KV must be read


class Kind(NamedTuple):
    """Prompts of one length, and the length of the answers."""

    num_words: int
    answer: int


SHORT = Kind(num_words=200, answer=16)
LONG = Kind(num_words=1500, answer=16)  # 12 MiB of KV and 12 blocks
TALK = Kind(num_words=300, answer=400)  # decode generates for seconds; 3 blocks grow to 6


class Scene:
    """A pair of engines while a fault happens to it, and the requests that it gets."""

    def __init__(self, pair: Pair, single: Client, wire: Wire | None = None) -> None:
        self.pair = pair
        self.single = single
        self.wire = wire
        self.ended: list[tuple[Question, Ended]] = []
        self._crowd = ThreadPoolExecutor(20)
        self._waiting: list[tuple[Question, Future[Ended]]] = []

    def draw(self, kind: Kind, count: int) -> list[Question]:
        """New questions. Draw them before a fault begins: the single engine takes its time."""
        prompts = [random_prompt(kind.num_words, next(SEEDS)) for _ in range(count)]
        return questions_of(self.single, prompts, kind.answer)

    def send(self, question: Question, complete: Callable[..., Answer] | None = None) -> None:
        """Begin one request: to prefill, then decode, or as `complete` does."""
        complete = complete or self.pair.complete
        call = partial(complete, question.prompt, question.num_tokens)
        self._waiting.append((question, self._crowd.submit(ask, call)))

    def collect(self) -> None:
        """Wait for all requests that were sent."""
        self.ended += [(question, future.result()) for question, future in self._waiting]
        self._waiting.clear()

    def loads(self) -> float:
        """How many requests have read their KV since decode was started."""
        return self.pair.to_decode.counters().get(LOADS, 0.0)

    def set_wire(self, quality: Quality) -> None:
        if self.wire is not None:
            self.wire.quality = quality

    def repair(self) -> None:
        """For the next fault."""
        self.set_wire(PERFECT)
        for engine in self.pair.engines:
            if engine.is_running():
                engine.resume()
            else:
                engine.kill()
                engine.restart()
        self.collect()
        self._crowd.shutdown()


def expect_soon(condition: Callable[[], bool], otherwise: str) -> None:
    assert wait_until(condition, EVENT_S, interval_s=0.02), otherwise


def expect_loads(scene: Scene) -> None:
    """A request is answered from KV that was read, now or soon."""

    def has_read() -> bool:
        (question,) = scene.draw(SHORT, 1)
        since = CountersSince(scene.pair.to_decode)
        scene.send(question)
        scene.collect()
        return since.wait_for(LOADS, timeout_s=1.0)[LOADS] > 0

    assert wait_until(has_read, EVENT_S), "no KV is read"


def local_specs() -> tuple[EngineSpec, EngineSpec]:
    """Prefill and decode on one machine. They keep their engine ids over restarts."""
    prefill, decode = pair_specs(
        ensure_tiny_model(),
        suffix="-local",
        num_blocks=NUM_BLOCKS,
        kv_cache_bytes=128 << 20,
        connector_config=CONFIG,
    )
    return replace(prefill, engine_id=prefill.name), replace(decode, engine_id=decode.name)


@pytest.fixture(scope="module")
def local(cluster: Cluster, base_engines: tuple[Engine, ...]) -> Iterator[Pair]:
    """On one machine, behind a router."""
    del base_engines  # which are started before
    with started(cluster, *local_specs()) as (prefill, decode):
        router = cluster.route([prefill], [decode])
        with Pair(prefill, decode, router, timeout_s=PATIENCE_S) as pair:
            yield pair


@pytest.fixture(scope="module")
def network(cluster: Cluster, base_engines: tuple[Engine, ...]) -> Iterator[tuple[Pair, Wire]]:
    """On two hosts that a wire joins, where UCX has nothing but TCP."""
    del base_engines  # which are started before
    with Namespace("kv-prefill", 1) as first, Namespace("kv-decode", 2) as second:
        specs = [
            replace(
                spec,
                name=f"{spec.role}-network",
                host=host,
                connector_config={**CONFIG, **NETWORK, "host": host.wire_address},
            )
            for spec, host in zip(local_specs(), (first, second), strict=True)
        ]
        with (
            Wire(first, second) as wire,
            started(cluster, *specs) as (prefill, decode),
            Pair(prefill, decode, timeout_s=PATIENCE_S) as pair,
        ):
            yield pair, wire


def survive(scene: Scene, fault: Callable[[Scene], None], deadline_s: float) -> None:
    try:
        expect_loads(scene)
        fault(scene)
        scene.collect()
        assert all(engine.is_running() for engine in scene.pair.engines)
        expect_loads(scene)
        expect_free(scene.pair.to_prefill)
        expect_free(scene.pair.to_decode)
        expect_ended(scene, deadline_s)
    finally:
        scene.repair()


def expect_ended(scene: Scene, deadline_s: float) -> None:
    counted = kinds(scene.ended)
    longest_s = max(ended.seconds - question.expected.seconds for question, ended in scene.ended)
    print(f"{counted['right']} of {counted.total()} right, longest {longest_s:+.1f} s")
    assert [kind for kind in counted if kind.startswith("wrong")] == []
    assert longest_s < deadline_s


# --- clients of a router that go on while an engine restarts


def restart_under_load(scene: Scene, role: str) -> None:
    """An engine is killed and restarted while clients ask through the router."""
    prefill, decode = scene.pair.engines
    victim = prefill if role == "prefill" else decode
    with Load(scene.pair.to_router.complete, clients=8) as load:
        load.wait(20)
        victim.kill()
        victim.restart()
        load.wait(20)
    scene.ended += judge(scene.single, load.ended)


# --- tickets that come late, and caches that are full


def tickets_of(scene: Scene, questions: list[Question]) -> list[tuple[Question, Ticket]]:
    """Questions that prefill has served, and decode has not seen yet."""
    return [(one, scene.pair.to_prefill.ticket(one.prompt)) for one in questions]


def send_all(scene: Scene, tickets: list[tuple[Question, Ticket]]) -> None:
    """Let decode see them."""
    for question, ticket in tickets:
        scene.send(question, partial(scene.pair.decode_with, ticket))


def late_ticket(scene: Scene) -> None:
    """Offers run out, prefill uses the blocks for others, then decode gets the tickets."""
    late, filling = scene.draw(LONG, 3), scene.draw(LONG, 8)
    since = CountersSince(scene.pair.to_prefill)
    tickets = tickets_of(scene, late)
    changed = since.wait(lambda now: now[OFFERS_UNCLAIMED] >= len(late), EVENT_S, step=True)
    assert changed[OFFERS_UNCLAIMED] == len(late)
    for question in filling:
        scene.send(question, scene.pair.to_prefill.complete)
    scene.collect()
    send_all(scene, tickets)
    scene.collect()
    for question in late:  # again, without a ticket: is there a stale byte in decode's cache?
        scene.send(question, scene.pair.to_decode.complete)
        scene.collect()


def preempted_prefill(scene: Scene) -> None:
    """Prefill's cache runs out under prompts that it goes on to generate from, for a while."""
    since = CountersSince(scene.pair.to_prefill)
    for question in scene.draw(TALK, 16):
        scene.send(question, partial(generate_twice, scene.pair))
    scene.collect()
    assert since.changed()[PREEMPTIONS] > 0


def generate_twice(pair: Pair, prompt: str, num_tokens: int) -> Answer:
    ticket = pair.to_prefill.ticket(prompt, num_tokens)
    return pair.decode_with(ticket, prompt, num_tokens)


def crowded_decode(scene: Scene) -> None:
    """Decode's cache is full of long generations, and tickets wait longer than an offer lasts."""
    talkers, late = scene.draw(TALK, 12), scene.draw(LONG, 5)
    for question in talkers:
        scene.send(question, scene.pair.to_decode.complete)
    send_all(scene, tickets_of(scene, late))
    expect_soon(lambda: scene.pair.to_decode.counters()[QUEUED] > 0, "no ticket waited on decode")
    scene.collect()


# --- engines that are killed, stopped and restarted, before, during and after a transfer

SLOW = Quality(rate=40e6)  # a LONG prompt takes 2.5 s
UNDER_WAY = 2 << 20  # bytes, of 12 MiB for each of two
CUT = Quality(up=False)
CRAWLING = Quality(rate=16e6)  # a LONG prompt takes 6.3 s: longer than a lease, or an offer

Strike = Callable[[Engine], None]


def three_moments(scene: Scene) -> list[tuple[Question, Ticket]]:
    """Requests after their transfer and during it; returned are those before it."""
    talk, *long = scene.draw(TALK, 2), scene.draw(LONG, 2), scene.draw(LONG, 2)
    early, during = (tickets_of(scene, questions) for questions in long)
    loads = scene.loads()
    for question in talk:
        scene.send(question.cut(150))
    expect_soon(lambda: scene.loads() >= loads + 2, "decode read nothing before")
    scene.set_wire(SLOW)
    carried = scene.wire.carried if scene.wire else 0
    send_all(scene, during)
    if (wire := scene.wire) is not None:
        expect_soon(lambda: wire.carried > carried + UNDER_WAY, "no transfer was under way")
    return early


def strike_prefill(scene: Scene, strike: Strike, repair: Strike) -> None:
    """Decode lives: every request ends while prefill does not answer."""
    early = three_moments(scene)
    strike(scene.pair.prefill)
    send_all(scene, early)
    scene.collect()
    repair(scene.pair.prefill)


def strike_decode(scene: Scene, strike: Strike, repair: Strike) -> None:
    """Prefill lives: its blocks come back while decode does not answer."""
    early = three_moments(scene)
    strike(scene.pair.decode)
    expect_free(scene.pair.to_prefill, RELEASE_S)
    repair(scene.pair.decode)
    send_all(scene, early)
    scene.collect()


def cut_wire(scene: Scene) -> None:
    """Lose all packets, unnoticed by the engines, until every request has ended."""
    strike_prefill(scene, lambda _: scene.set_wire(CUT), lambda _: scene.set_wire(PERFECT))


def blink(scene: Scene) -> None:
    """All packets of one second are lost, before, during and after transfers."""
    early = three_moments(scene)
    scene.set_wire(CUT)
    send_all(scene, early)
    time.sleep(1.0)
    scene.set_wire(PERFECT)
    scene.collect()


def ask_over(scene: Scene, quality: Quality, asked: tuple[Kind, ...] = (LONG, TALK) * 3) -> None:
    """Requests all at once; all are to be read in spite of the wire."""
    questions = [question for kind in asked for question in scene.draw(kind, 1)]
    loads = scene.loads()
    scene.set_wire(quality)
    for question in questions:
        scene.send(question)
    scene.collect()
    expect_soon(lambda: scene.loads() == loads + len(asked), "not all were read")


def fault(name: str, happens: Callable[..., None], *args: Any, **fields: Any) -> Any:
    """A case. `deadline_s` is what each request has beyond a single engine's time."""
    deadline_s = fields.pop("deadline_s", DEADLINE_S)
    return pytest.param(lambda scene: happens(scene, *args), deadline_s, id=name, **fields)


each = partial(pytest.mark.parametrize, ("happens", "deadline_s"))


@each(
    [
        fault("load-kill-prefill", restart_under_load, "prefill", deadline_s=30.0),
        fault("load-kill-decode", restart_under_load, "decode", deadline_s=30.0, marks=slow),
        fault("late-ticket", late_ticket, marks=slow),
        fault("preempted-prefill", preempted_prefill, deadline_s=60.0, marks=slow),
        fault("crowded-decode", crowded_decode, deadline_s=60.0, marks=slow),
    ]
)
def test_requests_end_right_and_nothing_leaks(
    local: Pair, single: Client, happens: Callable[[Scene], None], deadline_s: float
) -> None:
    survive(Scene(local, single), happens, deadline_s)


def test_prefill_has_its_blocks_back_when_decode_was_killed(local: Pair, single: Client) -> None:
    """Over shared memory; decode is not restarted."""
    scene = Scene(local, single)
    three_moments(scene)
    local.decode.kill()
    expect_free(local.to_prefill)
    scene.collect()
    expect_ended(scene, EVENT_S)


@slow
@needs_namespaces
@each(
    [
        fault("kill-prefill", strike_prefill, Engine.kill, Engine.restart),
        fault("stop-prefill", strike_prefill, Engine.suspend, Engine.resume),
        fault("restart-prefill", strike_prefill, Engine.stop, Engine.restart),
        fault("kill-decode", strike_decode, Engine.kill, Engine.restart),
        fault("stop-decode", strike_decode, Engine.suspend, Engine.resume, deadline_s=30.0),
        fault("restart-decode", strike_decode, Engine.stop, Engine.restart),
        fault("cut-wire", cut_wire),
        fault("blink", blink),
        fault("delay", ask_over, Quality(delay_s=0.002), deadline_s=30.0),
        fault("lose-1-percent", ask_over, Quality(loss=0.01), deadline_s=30.0),
        fault("lose-5-percent", ask_over, Quality(loss=0.05), deadline_s=30.0),
        fault("crawl", ask_over, CRAWLING, (LONG,)),
    ]
)
def test_requests_end_right_between_hosts_and_nothing_leaks(
    network: tuple[Pair, Wire], single: Client, happens: Callable[[Scene], None], deadline_s: float
) -> None:
    pair, wire = network
    survive(Scene(pair, single, wire), happens, deadline_s)
