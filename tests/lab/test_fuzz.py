"""A few seconds of scripts/fuzz: mutated inputs end in a value or in the documented error."""

import random

import msgspec
import pytest
from pd.fuzz_mutate import mutate_bytes, mutate_tree
from pd.fuzz_run import build, execute, fuzz
from pd.fuzz_samples import KINDS, sample
from pd.fuzz_targets import Target, targets
from pd.fuzz_world import BrokenPromiseError, Worker, from_endpoint, from_peer, map_memory

from nixl_kv.protocol.events import Why
from nixl_kv.protocol.messages import decode_answer, decode_to_engine, decode_to_rank, encode

SECONDS = 0.4  # for each target
SEED = 7
BUSY_SECONDS = 5.0  # the limit where many tests share the cores


@pytest.fixture(scope="module", autouse=True)
def memory() -> None:
    map_memory()


@pytest.fixture(params=targets(), ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.param
    return found


def test_nothing_crashes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd.fuzz_run.MOST_SECONDS", BUSY_SECONDS)
    findings = fuzz(target, SECONDS, SEED)
    assert {what: crash.data.hex() for what, crash in findings.crashes.items()} == {}
    assert findings.executions >= len(target.seeds)


def test_the_seeds_are_taken(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they refused at once, the mutations of them would reach nothing."""
    monkeypatch.setattr("pd.fuzz_run.MOST_SECONDS", BUSY_SECONDS)
    assert [execute(target, seed).crash for seed in target.seeds] == [None] * len(target.seeds)
    assert any(taken(target, seed) for seed in target.seeds)


def taken(target: Target, seed: bytes) -> bool:
    try:
        target.run(seed)
    except target.allowed:
        return False
    return True


def test_the_same_seed_gives_the_same_inputs(target: Target) -> None:
    steps = [1, 2, 3, 4]
    assert build(target, 0, steps) == build(target, 0, steps)


def test_crashes_are_found_and_made_smaller() -> None:
    """A decoder that cannot stand the byte 7."""

    def run(data: bytes) -> None:
        if 7 in data:
            raise LookupError

    findings = fuzz(Target("bad", run, [b"\xa5hello"]), SECONDS, SEED)
    (crash,) = findings.crashes.values()
    assert "LookupError at test_fuzz.py" in crash.what
    assert 7 in crash.data


def test_a_slow_decoder_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd.fuzz_run.MOST_SECONDS", 0.01)
    slow = Target("slow", lambda _data: sum(range(3_000_000)), [b""])
    assert execute(slow, b"").crash == "took more than 0.01 s"


def test_a_greedy_decoder_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd.fuzz_run.MOST_BYTES", 40 << 20)
    greedy = Target("greedy", lambda _data: len(b"x" * (80 << 20)), [b""])
    assert execute(greedy, b"").crash == "took more than 40 MiB"


def test_a_load_that_is_never_reported_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    worker.receive([])
    monkeypatch.setattr(worker, "_results", [])
    with pytest.raises(BrokenPromiseError, match="reported 0 times"):
        worker._check()


def verified(worker: Worker, number: int) -> list[bool]:
    """What the worker reports of its one load, after the seed with that number of proofs."""
    (seeds,) = (target.seeds for target in targets() if target.name == "decode worker")
    proving = [seed for seed in seeds if b"\xa5Proof" in seed]
    messages = msgspec.msgpack.decode(proving[number])
    worker.receive([from_endpoint(msgspec.msgpack.encode(message), at) for at, message in messages])
    return [load.verified for load in worker.loads]


def test_a_seed_ends_in_a_load_that_is_verified_and_another_in_one_that_is_corrupt() -> None:
    good, corrupt = Worker(), Worker()
    assert verified(good, 0) == [True]
    assert verified(corrupt, 1) == [False]
    (failed,) = corrupt.loads
    assert failed.failure is not None
    assert failed.failure.why is Why.CORRUPT


def test_seeds_are_answered_with_proofs() -> None:
    (seeds,) = (target.seeds for target in targets() if target.name == "prefill worker")
    kinds = []
    for seed in seeds:
        worker = Worker()
        worker.receive(
            [from_peer(msgspec.msgpack.encode(m)) for _, m in msgspec.msgpack.decode(seed)]
        )
        kinds.append([type(decode_answer(reply)).__name__ for reply in worker._control.replies])
    assert kinds == [
        ["Grant", "Renewed"],
        ["Grant"],
        ["Grant", "Proof"],
        ["Grant", "Proof", "Proof", "Proof", "Renewed"],
    ]


def test_bytes_that_are_called_verified_and_differ_are_noticed() -> None:
    worker = Worker()
    assert verified(worker, 0) == [True]
    worker._cache[2, 5, 1, 2] ^= 1
    with pytest.raises(BrokenPromiseError, match="is not what prefill has"):
        worker._check()


def test_every_message_has_a_sample() -> None:
    decoders = (decode_answer, decode_to_engine, decode_to_rank)
    for message in map(sample, KINDS):
        payload = encode(message)
        found = [decoded for decode in decoders if (decoded := attempt(decode, payload))]
        assert found == [message]


def attempt(decode: object, payload: bytes) -> object:
    try:
        return decode(payload)  # type: ignore[operator]
    except Exception:  # noqa: BLE001 - which error is another test's affair
        return None


def test_mutations_change_something_and_leave_the_original() -> None:
    tree = {"a": [1, "text", b"bytes", [1.5, None]], "b": True}
    copy = {"a": [1, "text", b"bytes", [1.5, None]], "b": True}
    chances = [random.Random(number) for number in range(200)]  # noqa: S311
    changed = [mutate_tree(rng, tree) for rng in chances]
    assert tree == copy
    assert sum(other != tree for other in changed) > 150
    assert any(mutate_bytes(rng, b"") for rng in chances)
