"""The faults: what is done to a pair of engines while requests go on."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from harness.cluster.answers import Question
from harness.cluster.client import WANT_TICKET, Answer, Client, Ticket
from harness.cluster.engines import Engine
from harness.cluster.metrics import (
    OFFERS,
    OFFERS_UNCLAIMED,
    PREEMPTIONS,
    QUEUED,
    CountersSince,
)
from harness.cluster.netns import PERFECT, Quality
from harness.cluster.prompts import random_prompt
from suites.faults.questions import LONG, SHORT, TALK
from suites.faults.scene import RELEASE_S, SLACK_S, WAIT_S, Ended, Fault, Scene, ask

OFFER_ENDS: Final = tuple(
    f"vllm:nixl_kv_offers_{end}_total"
    for end in ("read", "unclaimed", "not_needed", "aborted", "revoked", "expired", "lost")
)

# --- clients that hang up

HANG_UPS: Final = 30
UNHEARD_SEED: Final = 10_000
"""Of prompts whose answers nobody waits for."""
SOONEST_S: Final = 0.03
"""Decode has heard of the request by then, where nothing else runs."""
LEGS: Final = 2.0
"""After so many times what decode needs for a first token, it has read the KV, and generates."""
LONG_ANSWER: Final = 200
ATTEMPTS: Final = 4
"""For each hang-up: on a busy machine a client may be gone before decode has heard of it."""


def hang_up(scene: Scene, times: int = HANG_UPS) -> None:
    """Clients disconnect before, during and after the transfer, and while prefill computes."""
    heard, before = 0, scene.loads()
    latest_s = LEGS * seconds_on_decode(scene)
    for number in range(times * ATTEMPTS):
        late = number // times  # who was not heard tries again, and stays for longer
        after_s = SOONEST_S + (latest_s - SOONEST_S) * (number % times) / times + 0.2 * late
        prompt = random_prompt(LONG.num_words, UNHEARD_SEED + number)
        if number % 3 == 0:
            hang_up_on_prefill(scene, prompt, after_s)
        heard += hang_up_on_decode(scene, prompt, after_s)
        if heard == times:
            break
    scene.expect(heard == times, f"decode has heard of {heard} of {times} requests")
    scene.expect(scene.loads() > before + 1, "all were gone before the KV was read")


def seconds_on_decode(scene: Scene) -> float:
    """How long decode needs for the first token of a long prompt that it reads, here and now."""
    prompt = random_prompt(LONG.num_words, UNHEARD_SEED - 1)
    ticket = scene.pair.to_prefill.ticket(prompt)
    begin = time.monotonic()
    scene.pair.decode_with(ticket, prompt, 1)
    return time.monotonic() - begin


def hang_up_on_prefill(scene: Scene, prompt: str, after_s: float) -> None:
    """The client of a router that went away while prefill computes."""
    source = scene.pair.to_prefill
    source.disconnect_early(prompt, after_s, kv_transfer_params=WANT_TICKET)
    scene.ended.append(Ended("left", after_s))
    scene.expect_free(source, WAIT_S)


def hang_up_on_decode(scene: Scene, prompt: str, after_s: float) -> bool:
    """Whether decode has heard of the request: then it let go of the offer, at once."""
    pair, since = scene.pair, CountersSince(scene.pair.to_prefill)
    ticket = pair.to_prefill.ticket(prompt)
    pair.to_decode.disconnect_early(
        prompt, after_s, kv_transfer_params=ticket, max_tokens=LONG_ANSWER
    )
    scene.ended.append(Ended("left", after_s))
    changed = since.wait(
        lambda now: 0 < now[OFFERS] <= sum(now[end] for end in OFFER_ENDS), WAIT_S, step=True
    )
    scene.expect(any(changed[end] for end in OFFER_ENDS), "prefill's offer has no end")
    scene.expect_free(pair.to_prefill, WAIT_S)
    scene.expect_free(pair.to_decode, WAIT_S)
    return not changed[OFFERS_UNCLAIMED]


# --- clients of a router that go on while an engine restarts

LOAD: Final = 200
AT_A_TIME: Final = 8
BEFORE: Final = 40
AFTER: Final = 30
AFTER_AN_ERROR_S: Final = 2.0
"""A client's manners, which also make the load last over a restart."""
ROUTED_S: Final = 30.0


def restart_prefill_under_load(scene: Scene, load: int = LOAD) -> None:
    """Prefill is killed and restarted while 200 requests come through the router."""
    restart_under_load(scene, scene.stage.prefill, load)


def restart_decode_under_load(scene: Scene, load: int = LOAD) -> None:
    """Decode is killed and restarted while 200 requests come through the router."""
    restart_under_load(scene, scene.stage.decode, load)


def restart_under_load(scene: Scene, victim: Engine, size: int) -> None:
    """Kill it when some requests have ended, and restart it; most of the others come meanwhile."""
    first, last = (scene.questions.draw(SHORT, count) for count in (size - AFTER, AFTER))
    load = _Load(scene.pair.to_router)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        ended = pool.map(load.ask, first)
        load.enough.wait()
        victim.kill()
        victim.restart()
        scene.ended += ended
        scene.ended += pool.map(load.ask, last)


class _Load:
    """Many clients of one router."""

    def __init__(self, router: Client) -> None:
        self.enough = threading.Event()
        """Set when the first requests have ended."""
        self._router = router
        self._left = iter(range(BEFORE))

    def ask(self, question: Question) -> Ended:
        """One request; a client that got an error pauses before its next."""
        complete = partial(self._router.complete, question.prompt, question.num_tokens)
        ended = ask(question, complete)
        if next(self._left, None) is None:
            self.enough.set()
        if ended.kind != "right":
            time.sleep(AFTER_AN_ERROR_S)
        return ended


# --- tickets that come late, and caches that are full

LATE: Final = 3
FILLING: Final = 8
"""Of 12 blocks each, more than a cache of 80 has."""
TALKERS: Final = 12
"""Of 3 blocks each, which grow to 6."""
TICKETS: Final = 5
GENERATING: Final = 16
"""Likewise, which is more than there are."""


@dataclass(frozen=True)
class Early:
    """A request that prefill has served, and decode has not seen yet."""

    question: Question
    ticket: Ticket

    def send(self, scene: Scene) -> None:
        """Let decode see it."""
        prompt, num_tokens = self.question.prompt, self.question.num_tokens
        scene.send(self.question, lambda: scene.pair.decode_with(self.ticket, prompt, num_tokens))


def prefilled(scene: Scene, questions: Sequence[Question]) -> list[Early]:
    """Tickets for these questions."""
    return [Early(one, scene.pair.to_prefill.ticket(one.prompt)) for one in questions]


def late_ticket(scene: Scene) -> None:
    """Offers run out, prefill uses the blocks for others, then decode gets the tickets."""
    questions, filling = (scene.questions.draw(LONG, count) for count in (LATE, FILLING))
    since = CountersSince(scene.pair.to_prefill)
    late = prefilled(scene, questions)
    changed = since.wait(lambda now: now[OFFERS_UNCLAIMED] >= LATE, WAIT_S, step=True)
    scene.expect(changed[OFFERS_UNCLAIMED] >= LATE, "no offer ran out")
    for question in filling:
        scene.send_to(scene.pair.to_prefill, question)
    scene.collect()
    for request in late:
        request.send(scene)
    scene.collect()
    for request in late:  # again, without a ticket: is there a stale byte in decode's cache?
        scene.send_to(scene.pair.to_decode, request.question)
        scene.collect()


def preempted_prefill(scene: Scene) -> None:
    """Prefill's cache runs out under prompts that it goes on to generate from, for a while."""
    questions = scene.questions.draw(TALK, GENERATING)
    since = CountersSince(scene.pair.to_prefill)
    for question in questions:
        scene.send(question, partial(generate_and_decode, scene, question))
    scene.collect()
    scene.expect(since.changed()[PREEMPTIONS] > 0, "prefill preempted nothing")


def generate_and_decode(scene: Scene, question: Question) -> Answer:
    """Both engines generate all of it; what prefill generates lets its cache run out."""
    ticket = scene.pair.to_prefill.ticket(question.prompt, question.num_tokens)
    return scene.pair.decode_with(ticket, question.prompt, question.num_tokens)


def crowded_decode(scene: Scene) -> None:
    """Decode's cache is full of long generations, and tickets wait longer than an offer lasts."""
    talkers, late = scene.questions.draw(TALK, TALKERS), scene.questions.draw(LONG, TICKETS)
    for question in talkers:
        scene.send_to(scene.pair.to_decode, question)
    for request in prefilled(scene, late):
        request.send(scene)
    scene.expect_soon(
        lambda: scene.pair.to_decode.counters()[QUEUED] > 0, "no ticket waited on decode"
    )
    scene.collect()


# --- processes that are killed, stopped and restarted, before, during and after a transfer

SLOW: Final = Quality(rate=40e6)
"""A LONG one takes 2.5 s."""
UNDER_WAY: Final = 2 << 20
"""Bytes, of 12 MiB for each of two."""
ENOUGH: Final = 2
"""Requests of each kind."""
TALKED: Final = 150
"""Tokens that decode still generates when it has read."""


def three_moments(scene: Scene) -> Sequence[Early]:
    """Requests after their transfer and during it; returned are those before it."""
    wire = scene.stage.wire
    talk, *long = (scene.questions.draw(kind, ENOUGH) for kind in (TALK, LONG, LONG))
    early, during = (prefilled(scene, questions) for questions in long)
    loads = scene.loads()
    for question in talk:
        scene.send_to_pair(question.cut(TALKED))
    scene.expect_soon(lambda: scene.loads() >= loads + ENOUGH, "decode read nothing before")
    if wire is not None:
        wire.quality = SLOW
    carried = wire.carried if wire is not None else 0
    for request in during:
        request.send(scene)
    if wire is not None:
        scene.expect_soon(lambda: wire.carried > carried + UNDER_WAY, "no transfer was under way")
    return early


def strike_prefill(
    scene: Scene, strike: Callable[[], object], repair: Callable[[], object]
) -> None:
    """Decode lives: every request ends, and right, while prefill does not answer."""
    early = three_moments(scene)
    strike()
    for request in early:
        request.send(scene)
    scene.collect()
    repair()


def strike_decode(scene: Scene, strike: Callable[[], object], repair: Callable[[], object]) -> None:
    """Prefill lives: its blocks come back while decode does not answer."""
    early = three_moments(scene)
    strike()
    scene.expect_free(scene.pair.to_prefill, RELEASE_S + SLACK_S)
    repair()
    for request in early:
        request.send(scene)
    scene.collect()


def kill_prefill(scene: Scene) -> None:
    """SIGKILL of all processes of prefill, and a restart."""
    strike_prefill(scene, scene.stage.prefill.kill, scene.stage.prefill.restart)


def stop_prefill(scene: Scene) -> None:
    """SIGSTOP of prefill, and SIGCONT when every request has ended or is too late."""
    strike_prefill(scene, scene.stage.prefill.suspend, scene.stage.prefill.resume)


def restart_prefill(scene: Scene) -> None:
    """SIGTERM of prefill and a restart, while decode knows its former life."""
    strike_prefill(scene, scene.stage.prefill.stop, scene.stage.prefill.restart)


def kill_decode(scene: Scene) -> None:
    """SIGKILL of all processes of decode, and a restart."""
    strike_decode(scene, scene.stage.decode.kill, scene.stage.decode.restart)


def stop_decode(scene: Scene) -> None:
    """SIGSTOP of decode until prefill has freed its blocks, and SIGCONT."""
    strike_decode(scene, scene.stage.decode.suspend, scene.stage.decode.resume)


def restart_decode(scene: Scene) -> None:
    """SIGTERM of decode, and a restart."""
    strike_decode(scene, scene.stage.decode.stop, scene.stage.decode.restart)


# --- a wire that is slow, loses packets, or is cut

REQUESTS: Final = 6
CUT: Final = Quality(up=False)
CRAWLING: Final = Quality(rate=16e6)
"""A LONG one takes 6.3 s: longer than a lease, or an offer."""
BLINK_S: Final = 1.0


def cut_wire(scene: Scene) -> None:
    """All packets are lost and nobody is told; when every request has ended, they pass again."""
    strike_prefill(scene, partial(scene.set_wire, CUT), partial(scene.set_wire, PERFECT))


def blink(scene: Scene) -> None:
    """All packets of one second are lost, before, during and after transfers."""
    early = three_moments(scene)
    scene.set_wire(CUT)
    for request in early:
        request.send(scene)
    time.sleep(BLINK_S)
    scene.set_wire(PERFECT)
    scene.collect()


def interface_down(scene: Scene) -> None:
    """Prefill's interface goes down; when every request has ended, it comes up again."""
    strike_prefill(scene, scene.stage.prefill.unplug, scene.stage.prefill.plug)


def delay(scene: Scene) -> None:
    """Packets take 2 ms each way."""
    ask_over(scene, Quality(delay_s=0.002))


def lose_1_percent(scene: Scene) -> None:
    """Of a hundred packets one is lost."""
    ask_over(scene, Quality(loss=0.01))


def lose_5_percent(scene: Scene) -> None:
    """Of a hundred packets five are lost."""
    ask_over(scene, Quality(loss=0.05))


def ask_over(scene: Scene, quality: Quality) -> None:
    """Requests of both lengths, all at once; all are to be read in spite of the wire."""
    long, talk = (scene.questions.draw(kind, REQUESTS // 2) for kind in (LONG, TALK))
    loads = scene.loads()
    scene.set_wire(quality)
    for question in long + talk:
        scene.send_to_pair(question)
    scene.collect()
    read = scene.loads() - loads
    scene.expect(read == REQUESTS, f"{read:g} of {REQUESTS} were read")


def crawl(scene: Scene) -> None:
    """A read takes longer than a lease, and longer than an offer lasts."""
    (question,) = scene.questions.draw(LONG, 1)
    loads = scene.loads()
    scene.set_wire(CRAWLING)
    scene.send_to_pair(question)
    scene.collect()
    scene.expect(scene.loads() > loads, "the slow read was given up")


FAULTS: Final = (
    Fault("hang-up", "local", hang_up),
    Fault("load-kill-prefill", "local", restart_prefill_under_load, deadline_s=ROUTED_S),
    Fault("load-kill-decode", "local", restart_decode_under_load, deadline_s=ROUTED_S),
    Fault("late-ticket", "local", late_ticket),
    Fault("preempted-prefill", "local", preempted_prefill, deadline_s=60.0),
    Fault("crowded-decode", "local", crowded_decode, deadline_s=60.0),
    Fault("kill-prefill", "network", kill_prefill),
    Fault("stop-prefill", "network", stop_prefill),
    Fault("restart-prefill", "network", restart_prefill),
    Fault("kill-decode", "network", kill_decode),
    Fault("stop-decode", "network", stop_decode, deadline_s=30.0),
    Fault("restart-decode", "network", restart_decode),
    Fault("cut-wire", "network", cut_wire),
    Fault("interface-down", "network", interface_down),
    Fault("blink", "network", blink),
    Fault("delay", "network", delay),
    Fault("lose-1-percent", "network", lose_1_percent),
    Fault("lose-5-percent", "network", lose_5_percent),
    Fault("crawl", "network", crawl),
)
