"""An engine reads what another one has cached and reuses meanwhile: real NIXL, two processes.

The owner's steps give blocks to other prompts, a few milliseconds apart, and nothing pins any. Each
block of each prompt has bytes of its own. A load is good with all of its own bytes, or it fails.
"""

import hashlib
import os
import random
import threading
import time
from collections import Counter
from typing import Final

import msgspec
import numpy as np
import pytest

from harness.local.caches import Bytes, Cache, Sizes
from harness.local.engine import CONTEXT, HOST, LocalEngine, part_of
from nixl_kv.config import Config
from nixl_kv.conversations.index import ContentIndex
from nixl_kv.conversations.part import ContentPart
from nixl_kv.conversations.runs import new_key, seal
from nixl_kv.engine.trust import Trust
from nixl_kv.ids import ANY_INCARNATION, EngineId, RequestId, endpoint_at, new_claim, new_nonce
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.base import FromEndpoint
from support.processes import WAIT_S, SideProcess, transport

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl

LAYERS, HEADS, TOKENS, BYTES = 2, 2, 16, 1 << 11
BLOCKS, LENGTH, PROMPTS = 40, 6, 12  # of the owner's cache, of a prompt in blocks, and in all
STEP_S: Final = (0.0005, 0.004)
SECONDS: Final = 5.0
MANY_SECONDS: Final = float(os.environ.get("NIXL_KV_SECONDS", "60"))
CONFIG: Final = Config(host=HOST, conversations="on", lease_s=5.0, request_timeout_s=30.0)


def sizes(heads: int) -> Sizes:
    return Sizes(LAYERS, BLOCKS, heads, TOKENS, BYTES // 2, BYTES // 2)


def kv_of(prompt: int, place: int) -> Bytes:
    """One block of a prompt: [layer, head, token, byte]."""
    rng = np.random.default_rng((prompt, place))
    return rng.integers(0, 256, (LAYERS, HEADS, TOKENS, BYTES), dtype=np.uint8)


def hash_of(prompt: int, place: int) -> bytes:
    return hashlib.sha256(b"%d %d" % (prompt, place)).digest()


def use(tls: str) -> None:
    """Let UCX use these transports alone, over loopback; empty: all."""
    import nixl_kv.transport.nixl as module  # noqa: PLC0415 - only where NIXL is

    module.UCX_ENGINE_CONFIG += ",NET_DEVICES=lo" + (f",TLS={tls}" if tls else "")  # type: ignore[misc]


class Owner:
    """It has two ranks. Its steps are made by a thread, as vLLM's are."""

    def __init__(self, tls: str) -> None:
        use(tls)
        self.caches = [Cache(sizes(1), first_head=head) for head in range(HEADS)]
        self.kv = {(p, n): kv_of(p, n) for p in range(PROMPTS) for n in range(LENGTH)}
        self.blocks: dict[bytes, int] = {}
        self.hashes: dict[int, bytes] = {}
        self.index, self.key = ContentIndex(BLOCKS, self.blocks.get), new_key()
        layouts = [cache.layout() for cache in self.caches]
        self.engine = LocalEngine("owner", layouts, transport, config=CONFIG, find=self.find)
        self.engine.submit(events.SetContentKey(self.key))
        self.num_steps, self.is_over = 0, False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def port(self) -> int:
        return self.engine.directory.port

    def find(self, question: messages.Find) -> messages.Found:
        offer = new_nonce()
        run = self.index.find(question.hashes, question.first_block, question.weights)
        return messages.Found(
            incarnation=self.engine.description.incarnation,
            nonce=question.nonce,
            num_blocks=0 if run is None else len(run.block_ids),
            offer=offer,
            run=b"" if run is None else seal(run, offer, self.key),
            epoch=0,
            weights="",
        )

    def run(self) -> None:
        rng = random.Random(1)  # noqa: S311 - not a secret
        while not self.is_over:
            time.sleep(rng.uniform(*STEP_S))
            self.step(rng)

    def step(self, rng: random.Random) -> None:
        """A prompt is computed again, in other blocks, or no step computes anything."""
        prompt, count = rng.randrange(PROMPTS), rng.choice((0, 1, 3, LENGTH))
        ids = rng.sample(range(BLOCKS), count)
        for block in ids:
            named = self.hashes.pop(block, None)
            if named is not None and self.blocks.get(named) == block:
                del self.blocks[named]
        self.index.on_taken(ids)
        self.index.on_hashed(f"r{self.num_steps}", ids, None)
        for place, block in enumerate(ids):
            self.hashes[block] = hash_of(prompt, place)
            self.blocks[self.hashes[block]] = block
        taken = self.index.end_step()
        self.engine.submit(taken)
        for head, cache in enumerate(self.caches):
            for place, block in enumerate(ids):
                cache.view[:, block, 0] = self.kv[prompt, place][:, head]
        for rank in self.engine.ranks:
            rank.engine.end_step(lambda: None)
            rank.poll()
        self.num_steps += 1

    def steps(self) -> int:
        return self.num_steps

    def stop(self) -> tuple[int, list[str]]:
        """Make no further step; returns how many there were, and whatever is left."""
        self.is_over = True
        self.thread.join()
        ranks = self.engine.ranks
        parts = [part_of(rank.parts, ContentPart) for rank in ranks]
        self.engine.wait(
            lambda: (
                not any(len(part) + len(part.slots) for part in parts)
                and not any(rank.parts.prefill.offers for rank in ranks)
            ),
            WAIT_S,
        )
        left = [f"rank {n} reported {rank.offers}" for n, rank in enumerate(ranks) if rank.offers]
        return self.num_steps, left

    def close(self) -> None:
        self.engine.close()


class Reader:
    """One rank, which asks and loads one run after the other."""

    def __init__(self, tls: str, port: int) -> None:
        use(tls)
        self.cache = Cache(sizes(HEADS))
        self.kv = {(p, n): kv_of(p, n) for p in range(PROMPTS) for n in range(LENGTH)}
        self.engine = LocalEngine("reader", [self.cache.layout()], transport, config=CONFIG)
        self.owner, self.port = endpoint_at(HOST, port), port
        self.control = Trust.of(CONFIG).control()
        self.count = 0

    def close(self) -> None:
        self.control.close()
        self.engine.close()

    def find(self, prompt: int) -> messages.Found:
        question = messages.Find(
            incarnation=ANY_INCARNATION,
            engine=EngineId("owner"),
            nonce=new_nonce(),
            weights="",
            first_block=0,
            hashes=tuple(hash_of(prompt, place) for place in range(LENGTH)),
        )
        self.control.send(self.owner, messages.encode(question))
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for item in self.control.poll(1.0):
                assert isinstance(item, FromEndpoint), item
                answer = messages.decode_to_finder(item.payload)
                assert isinstance(answer, messages.Found)
                assert answer.nonce == question.nonce
                return answer
        raise TimeoutError

    def load(self, found: messages.Found) -> str:
        """Read all of it, into blocks that another prompt has written."""
        self.count += 1
        name, tokens = f"d{self.count}", found.num_blocks * TOKENS
        ticket = Ticket(
            engine=EngineId("owner"),
            host=HOST,
            port=self.port,
            incarnation=found.incarnation,
            nonce=found.offer,
            num_tokens=tokens,
            context=CONTEXT,
        )
        prepare = events.PrepareLoad(RequestId(name), ticket, new_claim(), found=found.run)
        self.engine.submit(prepare)
        self.engine.start_load(name, [list(range(found.num_blocks))], range(tokens))
        (ended,) = self.engine.wait_load(name, WAIT_S)
        return "good" if ended.failure is None else ended.failure.kind.value

    def finds(self, prompt: int) -> int:
        """How many blocks the owner has of it."""
        return self.find(prompt).num_blocks

    def load_changed(self, prompt: int) -> list[str]:
        """With another byte here and there."""
        found = self.find(prompt)
        ends = []
        for place in (0, len(found.run) // 2, len(found.run) - 1):
            run = bytearray(found.run)
            run[place] ^= 1
            ends.append(self.load(msgspec.structs.replace(found, run=bytes(run))))
        return ends

    def load_twice(self, prompt: int) -> list[str]:
        found = self.find(prompt)
        return [self.load(found), self.load(found)]

    def read(self, seconds: float) -> Counter[str]:
        """The ends of all loads; `wrong`, if one is good with other bytes."""
        ends, rng = Counter[str](), random.Random(2)  # noqa: S311 - not a secret
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            prompt = rng.randrange(PROMPTS)
            found = self.find(prompt)
            if not found.num_blocks:
                ends["nothing found"] += 1
                continue
            time.sleep(rng.choice((0.0, 0.0, 0.002, 0.01)))
            end = self.load(found)
            ends[end] += 1
            for place in range(found.num_blocks if end == "good" else 0):
                if not np.array_equal(self.cache.view[:, place], self.kv[prompt, place]):
                    ends["wrong"] += 1
        return ends


@pytest.mark.parametrize(
    "seconds", [SECONDS, pytest.param(MANY_SECONDS, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("tls", ["", "tcp"], ids=["any transport", "TCP"])
def test_a_load_of_cached_blocks_is_right_or_fails(tls: str, seconds: float) -> None:
    with SideProcess(Owner, tls) as owner, SideProcess(Reader, tls, owner.port()) as reader:
        ends: Counter[str] = reader.read(seconds)
        num_steps, left = owner.stop()
        print(dict(ends), num_steps, "steps")
        assert not left, "vLLM must not hear of it"
        assert not ends["wrong"]
        assert ends["good"] > 0
        assert ends["denied"] + ends["fenced"] > 0
        assert not ends.keys() - {"good", "denied", "fenced", "nothing found"}


def test_a_changed_or_used_answer_is_denied() -> None:
    with SideProcess(Owner, "") as owner, SideProcess(Reader, "", owner.port()) as reader:
        while owner.steps() < PROMPTS:
            time.sleep(STEP_S[0])
        owner.stop()
        prompt = next(each for each in range(PROMPTS) if reader.finds(each))
        assert reader.load_changed(prompt) == ["denied"] * 3
        assert reader.load_twice(prompt) == ["good", "denied"]
