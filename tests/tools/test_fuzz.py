"""A few seconds of scripts/fuzz: mutated inputs end in a value or in the documented error."""

import itertools
import mmap
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fuzz.decoders import execute as execution
from fuzz.decoders import inputs
from fuzz.decoders.execute import execute
from fuzz.decoders.fuzzer import build, fuzz, minimal
from fuzz.decoders.mutate import mutate_bytes, mutate_tree
from fuzz.decoders.rank import ENDPOINTS, BrokenPromiseError, RankUnderTest, map_memory
from fuzz.decoders.samples import KINDS, sample
from fuzz.decoders.targets import Target, targets
from nixl_kv.errors import RemoteProtocolError
from nixl_kv.protocol import messages
from nixl_kv.protocol.events import FailureKind

SECONDS = 0.4  # for each target
LONG_SECONDS = 20.0
SEED = 7
BUSY_SECONDS = 5.0  # the limit where many tests share the cores


@pytest.fixture(scope="module", autouse=True)
def memory() -> None:
    map_memory()


@pytest.fixture(params=targets(), ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    return chosen


@pytest.mark.parametrize(
    "seconds", [SECONDS, pytest.param(LONG_SECONDS, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_no_mutated_input_crashes(
    target: Target, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "MAX_SECONDS", BUSY_SECONDS)
    findings = fuzz(target, seconds, SEED)
    assert {what: crash.data.hex() for what, crash in findings.crashes.items()} == {}
    assert findings.executions >= len(target.seeds)


def test_some_seed_is_accepted(target: Target) -> None:
    """Were all refused at once, the mutations of them would reach nothing."""
    assert any(is_accepted(target, seed) for seed in target.seeds)


def is_accepted(target: Target, seed: bytes) -> bool:
    try:
        target.run(seed)
    except target.allowed:
        return False
    return True


def test_same_steps_give_the_same_input(target: Target) -> None:
    steps = [1, 2, 3, 4]
    assert build(target, 0, steps) == build(target, 0, steps)


def test_crash_is_detected_and_counted() -> None:
    def run(data: bytes) -> None:
        if data != b"hello":
            raise LookupError

    findings = fuzz(Target("bad", run, [b"hello"]), SECONDS, SEED)
    (crash,) = findings.crashes.values()
    assert crash.what.startswith("LookupError at test_fuzz.py:")
    assert crash.data != b"hello"
    assert findings.repeats[crash.what] >= 1


def test_crash_is_made_smaller() -> None:
    """A decoder that cannot stand the byte 7: one step makes it, those around it are left out."""

    def run(data: bytes) -> None:
        if 7 in data:
            raise LookupError

    target = Target("bad", run, [b"hello"])

    def is_bad(*steps: int) -> bool:
        return 7 in build(target, 0, steps)

    bad = next(step for step in itertools.count() if is_bad(step))
    before = next(step for step in itertools.count() if not is_bad(step) and is_bad(step, bad))
    after = next(step for step in itertools.count() if not is_bad(step) and is_bad(bad, step))
    crash = execute(target, build(target, 0, [bad])).crash
    assert crash is not None
    assert minimal(target, 0, [before, bad, after], crash=crash) == build(target, 0, [bad])


def test_slow_decoder_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "MAX_SECONDS", 0.01)
    slow = Target("slow", lambda _data: sum(range(3_000_000)), [b""])
    assert execute(slow, b"").crash == "took more than 0.01 s"


def test_greedy_decoder_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "MAX_BYTES", 40 << 20)

    def run(_data: bytes) -> None:
        """Not by malloc, which may have so much left of an earlier test."""
        with mmap.mmap(-1, 80 << 20) as memory:
            memory.write(b"x" * len(memory))

    greedy = Target("greedy", run, [b""])
    assert execute(greedy, b"").crash == "took more than 40 MiB"


# --- the rank under test


def decoded(conversation: bytes) -> list[tuple[int, bytes]]:
    """Where each message comes from, and the message."""
    parts: list[tuple[int, Any]] = msgspec.msgpack.decode(conversation)
    return [(number, msgspec.msgpack.encode(message)) for number, message in parts]


def answered(number: int) -> RankUnderTest:
    """A rank that was given the answers with a digest of that number, to its end."""
    with_digest = [one for one in inputs.answers() if b"\xabDigestReply" in one]
    with RankUnderTest() as rank:
        for endpoint, payload in decoded(with_digest[number]):
            rank.answer(ENDPOINTS[endpoint], payload)
        rank.finish()
    return rank


def test_load_is_verified_with_the_right_digest() -> None:
    (load,) = answered(0).loads
    assert load.verified
    assert load.failure is None


def test_load_is_corrupt_with_a_wrong_digest() -> None:
    (load,) = answered(1).loads
    assert load.failure is not None
    assert load.failure.kind is FailureKind.CORRUPT


def test_questions_are_answered_with_grants_digests_and_status() -> None:
    kinds = []
    for conversation in inputs.questions():
        with RankUnderTest() as rank:
            for _, payload in decoded(conversation):
                rank.ask(payload)
            rank.finish()
        kinds.append([type(decode_any(reply)).__name__ for reply in rank.replies])
    assert kinds == [
        ["Grant", "HeartbeatReply"],
        ["Grant"],
        ["Grant", "DigestReply"],
        ["Grant", "DigestReply", "DigestReply", "DigestReply", "HeartbeatReply"],
        ["Grant", "PackReply", "PackReply", "PackReply", "HeartbeatReply"],
        ["Status", "Grant", "Status"],
    ]


def test_load_that_is_not_reported_is_noticed() -> None:
    rank = answered(0)
    rank.loads.clear()
    with pytest.raises(BrokenPromiseError, match="reported 0 times"):
        rank.check()


def test_verified_bytes_that_differ_are_noticed() -> None:
    rank = answered(0)
    rank.cache[2, 5, 1, 2] ^= 1
    with pytest.raises(BrokenPromiseError, match="is not what prefill has"):
        rank.check()


def test_write_into_another_block_is_noticed() -> None:
    rank = answered(0)
    rank.cache[2, 6, 1, 2] ^= 1
    with pytest.raises(BrokenPromiseError, match="blocks of another request"):
        rank.check()


# --- samples and mutations

DECODERS = (
    messages.decode_to_engine,
    messages.decode_to_rank,
    messages.decode_answer,
    messages.decode_to_tool,
)


def decode_any(payload: bytes) -> object:
    """What the one decoder returns that accepts it; a refusal may come to two."""
    values = [attempt(decode, payload) for decode in DECODERS]
    decoded_ones = [value for value in values if value is not None]
    assert len(decoded_ones) == (2 if b"VersionRefusal" in payload else 1)
    return decoded_ones[0]


def attempt(decode: Callable[[bytes], object], payload: bytes) -> object:
    try:
        return decode(payload)
    except RemoteProtocolError:
        return None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_sample_of_each_message_is_accepted_by_one_decoder(kind: type) -> None:
    message: Any = sample(kind)
    assert decode_any(messages.encode(message)) == message


def test_mutations_change_something_and_leave_the_original() -> None:
    tree = {"a": [1, "text", b"bytes", [1.5, None]], "b": True}
    original = {"a": [1, "text", b"bytes", [1.5, None]], "b": True}
    chances = [random.Random(number) for number in range(200)]  # noqa: S311
    changed = [mutate_tree(rng, tree) for rng in chances]
    assert tree == original
    assert sum(other != tree for other in changed) > 150
    assert any(mutate_bytes(rng, b"") for rng in chances)
