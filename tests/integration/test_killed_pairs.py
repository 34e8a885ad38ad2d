"""Prefill or decode is killed at a random moment of each phase of a pair: real NIXL, two processes.

Each side does for one rank what vLLM does: prefill computes a prompt in chunks behind its ticket,
and decode computes a prompt whose load has failed. Afterwards decode must have the prompt's bytes,
and neither side may keep anything. NIXL_KV_KILLS is the number of kills in each case.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest

from harness.local.caches import Sizes
from harness.local.engine import CONTEXT, HOST, parts_of
from nixl_kv.config import Config
from nixl_kv.early.part import EarlyPart
from nixl_kv.early.slots import EarlySlots
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import RequestId, new_nonce
from nixl_kv.protocol import events
from nixl_kv.protocol.ticket import Ticket
from support.processes import WAIT_S, Side, SideProcess, transport

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = [pytest.mark.nixl, pytest.mark.slow]

KILLS: Final = int(os.environ.get("NIXL_KV_KILLS", "1"))
SIZES: Final = Sizes(layers=2, blocks=33, heads=1, tokens=16, key=2**13, value=2**13)
CHUNKS: Final = 4  # of 4 MiB
CONFIG: Final = Config(host=HOST, offer_ttl_s=3.0, lease_s=3.0, request_timeout_s=10.0)
LOADED: Final = "loaded"
MOST_ATTEMPTS: Final = 5
MOMENT_S: Final = 0.02  # of a phase that does not end by itself


class PairSide(Side):
    """A side whose prompts have KV of their own: bytes of another prompt are wrong."""

    def __init__(self, role: str, tls: str) -> None:
        import nixl_kv.transport.nixl as module  # noqa: PLC0415 - only where NIXL is

        module.UCX_ENGINE_CONFIG += ",NET_DEVICES=lo" + (f",TLS={tls}" if tls else "")  # type: ignore[misc]
        super().__init__(role, transport, SIZES, CONFIG)
        (self.rank,) = self.engine.ranks
        self.per_chunk = len(self.table) // CHUNKS

    def kv(self, prompt: int) -> Any:
        """Both engines compute this of a prompt."""
        return np.roll(self.expected, prompt, axis=-1)

    def has(self, prompt: int) -> bool:
        return bool(np.array_equal(self.cache.view[:, 1:], self.kv(prompt)[:, 1:]))

    def blocks(self, chunk: int) -> slice:
        return slice(1 + chunk * self.per_chunk, 1 + (chunk + 1) * self.per_chunk)

    def settle(self) -> None:
        """Until nothing is left of any request."""
        parts = self.rank.parts
        prefill, decode = parts.prefill, parts.decode

        def is_settled() -> bool:
            asks = sum(len(part.asks) for part in parts_of(parts, EarlyPart))
            held = prefill.offers or asks or decode.loads or parts.agents.is_busy
            free = len(prefill.free_slots) + sum(map(len, parts_of(parts, EarlySlots)))
            return not held and free == parts.slots.count

        self.engine.wait(is_settled, WAIT_S)

    # prefill

    def pair(self) -> Ticket:
        return self.engine.ticket(new_nonce(), self.tokens)

    def expect(self, prompt: int, ticket: Ticket) -> None:
        """The request has arrived."""
        self.engine.submit(events.ExpectOffer(ticket.nonce, RequestId(f"p{prompt}"), CONTEXT))

    def compute(self, prompt: int, ticket: Ticket, chunk: int) -> None:
        """A step, but for its end."""
        table = Table.of(self.table[: (chunk + 1) * self.per_chunk])
        offer = events.PrepareOffer(
            *(ticket.nonce, RequestId(f"p{prompt}"), CONTEXT, self.tokens, (table,)),
            is_written=False,
            is_early=True,
            in_parts=True,
            computed=self.computed(chunk),
        )
        self.engine.submit(offer)
        self.cache.view[:, self.blocks(chunk)] = self.kv(prompt)[:, self.blocks(chunk)]

    def mark(self, ticket: Ticket, chunk: int) -> None:
        """Its end."""
        self.engine.submit(events.MarkWritten(ticket.nonce, self.computed(chunk)))

    def computed(self, chunk: int) -> int | None:
        return None if chunk == CHUNKS - 1 else self.tokens * (chunk + 1) // CHUNKS

    def publish(self, prompt: int, ticket: Ticket) -> None:
        """The request has finished."""
        self.engine.submit(events.PublishOffer(ticket.nonce, RequestId(f"p{prompt}")))

    def wait_end(self, prompt: int) -> str:
        """How its offer ended; its blocks are free then."""
        return self.engine.wait_offer(f"p{prompt}", WAIT_S)[0].value

    # decode

    def ask(self, prompt: int, ticket: Ticket) -> None:
        self.cache.memory[...] = 0
        self.engine.prepare_load(f"d{prompt}", ticket, is_early=True)

    def wait_queued(self) -> None:
        decode = self.rank.parts.decode
        self.engine.wait(lambda: any(load.told == "queued" for load in decode.loads), WAIT_S)

    def start_load(self, prompt: int) -> None:
        """Give the request blocks, once they are of use."""
        self.engine.wait(lambda: f"d{prompt}" in self.rank.ready, WAIT_S)
        self.engine.start_load(f"d{prompt}", [self.table], range(self.tokens))

    def wait_landed(self, chunk: int, share: float) -> None:
        """Until that share of a chunk is there, or more."""
        last = self.cache.view[:, self.blocks(chunk), 0, -1, -1]
        self.engine.wait(lambda: np.count_nonzero(last) >= share * last.size, WAIT_S)

    def answer(self, prompt: int) -> str:
        """The prompt's KV, read or computed; why it was computed."""
        (ended,) = self.engine.wait_load(f"d{prompt}", WAIT_S)
        if ended.failure is None:
            return LOADED
        self.cache.view[:, 1:] = self.kv(prompt)[:, 1:]
        return ended.failure.kind.value


@dataclass
class Scene:
    """Both processes, and one request at a time, which goes on from where it is."""

    tls: str
    random: random.Random
    sides: dict[str, Any] = field(default_factory=dict)
    prompt: int = 0
    ticket: Ticket | None = None
    chunk: int = 0  # the next that prefill computes
    done: set[str] = field(default_factory=set)

    @property
    def prefill(self) -> Any:
        return self.sides["prefill"]

    @property
    def decode(self) -> Any:
        return self.sides["decode"]

    def start(self, side: str) -> None:
        self.sides[side] = SideProcess(PairSide, side, self.tls)

    def begin(self) -> None:
        self.prompt, self.chunk, self.done = self.prompt + 1, 0, set()
        self.ticket = self.prefill.pair()

    def once(self, side: str, call: str, *arguments: object) -> None:
        if call not in self.done:
            self.done.add(call)
            getattr(self.sides[side], call)(self.prompt, *arguments)

    def arrive(self) -> None:
        """On prefill."""
        self.once("prefill", "expect", self.ticket)

    def ask(self) -> None:
        self.once("decode", "ask", self.ticket)

    def queue(self) -> None:
        """Both have the request; which has it first varies."""
        for call in self.random.sample([self.arrive, self.ask], 2):
            call()
        self.decode.wait_queued()

    def step(self) -> None:
        self.prefill.compute(self.prompt, self.ticket, self.chunk)
        self.once("decode", "start_load")
        self.prefill.mark(self.ticket, self.chunk)
        self.chunk += 1

    def steps(self, count: int) -> None:
        """Decode reads each chunk before the next one is computed."""
        self.queue()
        for _ in range(count):
            self.step()
            self.decode.wait_landed(self.chunk - 1, 1.0)

    def finish(self) -> None:
        """The rest of prefill's request."""
        self.arrive()
        while self.chunk < CHUNKS:
            self.prefill.compute(self.prompt, self.ticket, self.chunk)
            self.prefill.mark(self.ticket, self.chunk)
            self.chunk += 1
        self.prefill.publish(self.prompt, self.ticket)

    def answer(self) -> str:
        """Whether decode has read or computed the prompt. It must have the right bytes."""
        self.ask()
        self.once("decode", "start_load")
        outcome = str(self.decode.answer(self.prompt))
        assert self.decode.has(self.prompt), outcome
        return outcome

    def expect_load(self) -> None:
        """A request is read, now or soon."""
        outcomes = list[str]()
        while outcomes[-1:] != [LOADED]:
            assert len(outcomes) < MOST_ATTEMPTS, outcomes
            self.begin()
            self.ask()
            self.finish()
            outcomes.append(self.answer())
            self.prefill.wait_end(self.prompt)
        for side in self.sides.values():
            side.settle()


def unasked(scene: Scene) -> None:
    """Prefill has the request, or not yet."""
    if scene.random.randrange(2):
        scene.arrive()


def computing(scene: Scene) -> None:
    """Some chunks are proven, and the next is not."""
    scene.steps(scene.random.randrange(CHUNKS))
    scene.prefill.compute(scene.prompt, scene.ticket, scene.chunk)


def reading(scene: Scene) -> None:
    scene.steps(scene.random.randrange(CHUNKS))
    scene.step()
    scene.decode.wait_landed(scene.chunk - 1, scene.random.uniform(0.01, 0.5))


def answered(scene: Scene) -> None:
    scene.steps(CHUNKS)
    assert scene.answer() == LOADED


PHASES: Final[dict[str, Callable[[Scene], None]]] = {
    "before the ask": unasked,
    "while queued": Scene.queue,
    "between chunks": computing,
    "reading a chunk": reading,
    "after the last chunk": lambda scene: scene.steps(CHUNKS),
    "after the answer": answered,
}
BRIEF: Final = ("reading a chunk", "after the last chunk")  # over before a pause would be


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["shm", "tcp"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_the_answer_is_right_and_nothing_is_kept(victim: str, phase: str, tls: str) -> None:
    scene = Scene(tls, random.Random(f"{victim} {phase} {tls}"))  # noqa: S311 - the same each time
    outcomes, answer_s, free_s = Counter[str](), [0.0], [0.0]
    try:
        for side in ("prefill", "decode"):
            scene.start(side)
        scene.expect_load()
        for _ in range(KILLS):
            scene.begin()
            PHASES[phase](scene)
            if phase not in BRIEF:
                time.sleep(scene.random.uniform(0, MOMENT_S))
            scene.sides[victim].kill()
            begin = time.monotonic()
            if victim == "decode":  # prefill goes on; the client tries again, now or later
                scene.finish()
                is_later = scene.random.randrange(2)
                if is_later:
                    scene.prefill.wait_end(scene.prompt)
                    free_s.append(time.monotonic() - begin)
                scene.start(victim)
                scene.done -= {"ask", "start_load"}
                begin = time.monotonic()
            outcomes[scene.answer()] += 1
            answer_s.append(time.monotonic() - begin)
            if victim == "decode":
                scene.prefill.wait_end(scene.prompt)
            else:
                scene.start(victim)
                assert scene.decode.has(scene.prompt), "bytes have landed late"
            scene.expect_load()
        for side in scene.sides.values():
            side.leave()
    finally:
        for side in scene.sides.values():
            side.kill()
    about = f"answered within {max(answer_s):.2f} s, blocks free within {max(free_s):.1f} s"
    print(f"{victim} killed {phase}, {tls or 'shm'}: {KILLS} right, {dict(outcomes)}, {about}")
