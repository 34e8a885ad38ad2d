"""What every fault has in common: a pair that serves before, and must serve again after."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import httpx

from harness.cluster.answers import Question
from harness.cluster.client import Answer, Client
from harness.cluster.engines import Engine
from harness.cluster.metrics import LOADS, CountersSince, wait_until_free
from harness.cluster.netns import PERFECT, Quality, Wire
from harness.cluster.pair import Pair
from harness.cluster.router import Router
from harness.cluster.waiting import wait_until
from lab.results import Verdict, verdict_of
from suites.faults.questions import SHORT, Questions

OFFER_TTL_S: Final = 6.0
LEASE_S: Final = 4.0
REQUEST_TIMEOUT_S: Final = 8.0
SLACK_S: Final = 5.0
"""Few cores do all of this beside other work."""
RELEASE_S: Final = max(OFFER_TTL_S, LEASE_S) + 1.0
"""What is held for others is free then: with a tick, a step of vLLM, a look of ours."""
SERVE_AGAIN_S: Final = 60.0
WAIT_S: Final = 60.0
"""For what must happen, however busy the machine is."""
CROWD: Final = 20
NUM_BLOCKS: Final = 81
"""Of either engine: few enough to run out."""
LONGEST_ERROR: Final = 200

Where = Literal["local", "network"]
Kind = Literal["right", "error", "wrong", "late", "left"]


@dataclass(frozen=True)
class Stage:
    """Where faults happen: two engines on one machine, behind a router, or on two hosts."""

    prefill: Engine
    decode: Engine
    router: Router | None = None
    wire: Wire | None = None
    """It joins them if they are two hosts."""


@dataclass(frozen=True)
class Ended:
    """How a request ended: `late` when its client lost patience, `left` when it just hung up."""

    kind: Kind
    seconds: float
    words: str = ""
    single_s: float = 0.0
    """What a single engine took for the same, which is long on a busy machine."""


def ask(question: Question, complete: Callable[[], Answer]) -> Ended:
    """One request: its answer is compared, its error is noted, and nothing is raised."""
    begin = time.monotonic()
    kind, words = _ask(question, complete)
    return Ended(kind, time.monotonic() - begin, words, question.expected.seconds)


def _ask(question: Question, complete: Callable[[], Answer]) -> tuple[Kind, str]:
    try:
        answer = complete()
    except httpx.TimeoutException as error:
        return "late", type(error).__name__
    except (RuntimeError, httpx.HTTPError) as error:
        return "error", f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
    if answer.finish_reason == "abort":
        return "error", "finish_reason: abort"
    if question.compare(answer) == "other":
        return "wrong", repr(answer.text[:LONGEST_ERROR])
    return "right", ""


class Scene:
    """A fault while it happens: what it uses, and what came of it."""

    def __init__(self, stage: Stage, questions: Questions, pair: Pair) -> None:
        """Nothing has happened yet."""
        self.stage = stage
        self.questions = questions
        self.pair = pair
        self.ended: list[Ended] = []
        self.troubles: list[str] = []
        """What is not as it should be, beside answers and leaks."""
        self._crowd = ThreadPoolExecutor(CROWD)
        self._waiting: list[Future[Ended]] = []

    def send(self, question: Question, complete: Callable[[], Answer]) -> None:
        """Begin one request, beside others."""
        self._waiting.append(self._crowd.submit(ask, question, complete))

    def send_to_pair(self, question: Question) -> None:
        """Begin one request as a router does: prefill, then decode."""
        self.send(question, partial(self.pair.complete, question.prompt, question.num_tokens))

    def send_to(self, client: Client, question: Question) -> None:
        """Begin one request to one of the engines, without a ticket."""
        self.send(question, partial(client.complete, question.prompt, question.num_tokens))

    def collect(self) -> None:
        """Wait for all requests that were sent."""
        waiting, self._waiting = self._waiting, []
        self.ended += [future.result() for future in waiting]

    def close(self) -> None:
        """Wait for all threads."""
        self._crowd.shutdown()

    def expect(self, holds: bool, otherwise: str) -> None:  # noqa: FBT001 - as in an assertion
        """Note what does not hold, and go on."""
        if not holds:
            self.troubles.append(otherwise)

    def expect_soon(self, condition: Callable[[], bool], otherwise: str) -> None:
        """The same for what happens after a while."""
        self.expect(wait_until(condition, WAIT_S, interval_s=0.02), otherwise)

    def expect_free(self, client: Client, within_s: float) -> None:
        """An engine shall hold no block soon."""
        begin = time.monotonic()
        held = wait_until_free(client, NUM_BLOCKS, within_s)
        seconds = time.monotonic() - begin
        self.expect(not held, f"{client.url} holds {held} blocks after {seconds:.1f} s")

    def loads(self) -> float:
        """How many requests have read their KV since decode was started."""
        return self.pair.to_decode.counters().get(LOADS, 0.0)

    def set_wire(self, quality: Quality) -> None:
        """How the wire is from now on."""
        self.wire.quality = quality

    @property
    def wire(self) -> Wire:
        """Between two hosts."""
        if self.stage.wire is None:
            raise RuntimeError("needs two hosts")
        return self.stage.wire


@dataclass(frozen=True)
class Fault:
    """One fault. `deadline_s` is what each request has, beside what a single engine took for it."""

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
    """Blocks that prefill and decode still held at the end."""
    serves_after_s: float | None = None
    troubles: tuple[str, ...] = ()

    def count(self, kind: Kind) -> int:
        """How many requests ended so."""
        return sum(ended.kind == kind for ended in self.ended)

    @property
    def longest_s(self) -> float:
        """Of all requests."""
        return max((ended.seconds for ended in self.ended), default=0.0)

    @property
    def verdict(self) -> Verdict:
        """Whether all ended in time, and right or with an error, and nothing is left."""
        wrong = self.count("wrong")
        late = sum(
            one.kind == "late" or one.seconds > self.deadline_s + one.single_s for one in self.ended
        )
        leaks = zip(("prefill", "decode"), self.leaked, strict=True)
        return verdict_of(
            *self.troubles,
            f"{wrong} wrong answers" if wrong else "",
            f"{late} had not ended after {self.deadline_s:g} s" if late else "",
            *(f"{blocks} blocks leaked on {engine}" for engine, blocks in leaks if blocks),
            "does not serve again" if self.serves_after_s is None else "",
        )

    def cells(self) -> Mapping[str, str]:
        """See `lab.results.Result`."""
        after = self.serves_after_s
        return {
            "fault": self.fault,
            "requests": str(len(self.ended)),
            "right": str(self.count("right")),
            "error": str(self.count("error")),
            "wrong": str(self.count("wrong")),
            "left": str(self.count("left")),
            "read": str(self.loads),
            "longest s": f"{self.longest_s:.1f}",
            "deadline s": f"{self.deadline_s:g}",
            "leaked P/D": "/".join(map(str, self.leaked)),
            "serves after s": "-" if after is None else f"{after:.1f}",
        }


def run_fault(fault: Fault, stage: Stage, questions: Questions) -> Report:
    """Let it happen to a pair that serves, and look what is left."""
    before, loads, leaked, serves_after = 0.0, 0, (0, 0), None
    patience_s = fault.deadline_s + WAIT_S
    with Pair(stage.prefill, stage.decode, stage.router, timeout_s=patience_s) as pair:
        scene = Scene(stage, questions, pair)
        with _troubles_noted(scene):
            scene.expect(_serves(scene) is not None, "did not serve before")
            before = scene.loads()
            fault.happens(scene)
        scene.collect()
        with _troubles_noted(scene):
            _repair(scene)
            loads = _growth(before, scene.loads())
            serves_after = _serves(scene)
            leaked = _leaked(scene)
        with _troubles_noted(scene):
            _repair(scene)
        scene.close()
    ended, troubles = tuple(scene.ended), tuple(scene.troubles)
    return Report(fault.name, fault.deadline_s, ended, loads, leaked, serves_after, troubles)


@contextlib.contextmanager
def _troubles_noted(scene: Scene) -> Iterator[None]:
    """What a fault's own steps run into is part of the outcome."""
    try:
        yield
    except (RuntimeError, httpx.HTTPError) as error:
        scene.troubles.append(f"{type(error).__name__}: {error}".splitlines()[0])


def _repair(scene: Scene) -> None:
    """What a fault left broken; an engine that ended by itself should not have."""
    if scene.stage.wire is not None:
        scene.stage.wire.quality = PERFECT
    for engine in (scene.stage.prefill, scene.stage.decode):
        if engine.is_running():
            engine.resume()
        else:
            scene.troubles.append(f"{engine.name} ended by itself")
            engine.kill()
            engine.restart()


def _serves(scene: Scene) -> float | None:
    """Seconds until a request is answered from KV that was read; None if none is for too long."""
    begin = time.monotonic()
    while time.monotonic() - begin < SERVE_AGAIN_S:
        (question,) = scene.questions.draw(SHORT, 1)
        since = CountersSince(scene.pair.to_decode)
        complete = partial(scene.pair.complete, question.prompt, question.num_tokens)
        scene.ended.append(ask(question, complete))
        if since.wait_for(LOADS, timeout_s=1.0)[LOADS] > 0:
            return time.monotonic() - begin
    return None


def _leaked(scene: Scene) -> tuple[int, int]:
    """Blocks that both engines still hold when all offers and leases have long ended."""
    on_prefill = wait_until_free(scene.pair.to_prefill, NUM_BLOCKS, WAIT_S)
    return on_prefill, wait_until_free(scene.pair.to_decode, NUM_BLOCKS, WAIT_S)


def _growth(before: float, after: float) -> int:
    """A restarted engine counts from zero."""
    return round(after - before if after >= before else after)
