"""Prompts with pictures, whatever decode has of them: the right answer or an error, never another.

A LLaVA reads 64 tokens of each picture. All prompts are new, and the picture stands in their first
block: KV of a stand-in in decode's prefix cache would change later answers.
"""

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

import httpx
import pytest

from harness.cluster.client import (
    Answer,
    BrokenStreamError,
    Client,
    Messages,
    NoTicketError,
    RefusedError,
    Ticket,
)
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST, NO_TORCHVISION, Engine, python_path
from harness.cluster.metrics import (
    FAILURES,
    LOADS,
    PREEMPTIONS,
    PREFIX,
    RUNNING,
    TICKETS_MISSING,
    TICKETS_REFUSED,
    CountersSince,
)
from harness.cluster.models.families import Llava
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.pictures import Part, picture, said, stand_in
from harness.cluster.prompts import random_prompt
from harness.cluster.tickets import sealed, values
from harness.cluster.waiting import wait_until
from nixl_kv.protocol.ticket import FIELD
from support.engines import (
    EVENT_S,
    PATIENT,
    Accounts,
    connected,
    expect,
    expect_free,
    started,
    without_connector,
)
from support.nixl_kv_command import nixl_kv

pytestmark = pytest.mark.e2e

BLOCK: Final = 128
BEFORE: Final = 40  # words before a picture
AFTER: Final = 60  # and after it
NUM_TOKENS: Final = 1 + BEFORE + Llava().image_tokens + AFTER + 1  # between `user` and `assistant`
ANSWER: Final = 8
TALK: Final = 150  # so long that an engine can be asked to preempt the request
FAILS: Final = "an error"
MAY_NOT: Final = "decode may not compute it"
"""In the line that decode logs of a request that fails."""
FAILED: Final = f"{PREFIX}failed_requests_total"
SETTINGS: Final = ("auto", "ticket")
SEEDS = itertools.count(960_000)


_Given = TypeVar("_Given")


class Has(enum.Enum):
    """Decode's knowledge of a picture."""

    PICTURE = "the picture"
    STAND_IN = "stand-in embeddings"
    NAMED_STAND_IN = "stand-in embeddings under the picture's uuid"
    PLACEHOLDERS = "placeholder tokens alone"
    OTHER = "another picture"


@dataclass(frozen=True)
class Scene:
    """A new prompt with a picture, and what decode has of it."""

    seed: int
    has: Has
    uuid: str | None = None

    @property
    def whole(self) -> "Scene":
        """The same prompt where decode has the picture."""
        return replace(self, has=Has.PICTURE)

    @property
    def messages(self) -> Messages:
        """The messages of the client and of prefill."""
        return self._show(picture(self.seed, self.uuid))

    def ask(
        self,
        client: Client,
        ids: Sequence[int] = (),
        num_tokens: int = ANSWER,
        *,
        is_streamed: bool = False,
        **extra: object,
    ) -> str:
        """The tokens of the answer to what decode has; FAILS if it is an error."""
        try:
            if self.has is Has.PLACEHOLDERS:
                complete = client.stream if is_streamed else client.complete
                return plain(complete(list(ids), num_tokens, **extra))
            chat = client.stream_chat if is_streamed else client.chat
            return plain(chat(self._show(self._on_decode()), num_tokens, **extra))
        except BrokenStreamError:
            return FAILS
        except RefusedError as error:
            if error.status != httpx.codes.INTERNAL_SERVER_ERROR:
                raise
            return FAILS

    def _on_decode(self) -> Part:
        if self.has is Has.OTHER:
            return picture(self.seed + 1_000_000)
        if self.has in (Has.STAND_IN, Has.NAMED_STAND_IN):
            return stand_in(3.0, self.uuid)
        return picture(self.seed, self.uuid)

    def _show(self, part: Part) -> Messages:
        return said(random_prompt(BEFORE, self.seed), part, random_prompt(AFTER, self.seed))


def plain(answer: Answer) -> str:
    """All tokens. The text would lack the special ones."""
    return " ".join(token.strip() for token in answer.tokens)


def scenes() -> list[Scene]:
    return [new_scene(has) for has in Has]


def new_scene(has: Has) -> Scene:
    seed = next(SEEDS)
    return Scene(seed, has, f"picture {seed}" if has is Has.NAMED_STAND_IN else None)


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> Iterator[Mapping[str, Engine]]:
    """They have no key, so that a test can change tickets."""
    prefill, decode = pair_specs(
        ensure_tiny_model(model=Llava()),
        suffix="-media",
        kv_cache_bytes=96 << 20,
        connector_config={**PATIENT, "insecure": True, "offer_ttl_s": 60},
        extra_args=(
            "--enable-mm-embeds",
            *("--limit-mm-per-prompt", '{"image": 3}'),
            *("--max-model-len", "1024"),
        ),
        extra_env={"PYTHONPATH": python_path(NO_TORCHVISION), "VLLM_SERVER_DEV_MODE": "1"},
    )
    decoding = {
        setting: replace(
            decode,
            name=f"{decode.name}-{setting}",
            connector_config={**decode.connector_config, "media": setting},
        )
        for setting in (*SETTINGS, "own")
    }
    specs = {
        "prefill": prefill,
        **decoding,
        "single": without_connector(decode, "single-media"),
    }
    with started(cluster, *specs.values()) as running:
        yield dict(zip(specs, running, strict=True))


@pytest.fixture(scope="module")
def single(engines: Mapping[str, Engine]) -> Iterator[Client]:
    with Client(engines["single"].url) as client:
        yield client


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(engines: Mapping[str, Engine], setting: str) -> Iterator[Pair]:
    with connected(engines["prefill"], engines[setting]) as pair:
        yield pair
        revoke(pair)  # rather than wait until the offers expire that no test claims
        expect_free(pair.to_decode)


# --- good tickets


SHOWN: Final[Mapping[str, Callable[[], list[Part | str]]]] = {
    "one picture": lambda: [words(40), picture(1), words(60)],
    "with a uuid": lambda: [words(40), picture(2, uuid="a picture"), words(60)],
    "the same again": lambda: [words(150), picture(1), words(60)],
    "two pictures": lambda: [picture(3), words(30), picture(4), words(90)],
    "three pictures over a block": lambda: [words(20), *map(picture, (1, 3, 5)), "ba be"],
    "one picture twice": lambda: [picture(6), picture(6), words(20)],
    "a picture first": lambda: [picture(7), words(100)],
    "a picture last": lambda: [words(200), picture(8)],
}


def words(count: int) -> str:
    return random_prompt(count, seed=next(SEEDS))


@pytest.mark.parametrize("name", SHOWN)
def test_pictures_are_loaded(pair: Pair, single: Client, name: str) -> None:
    messages, accounts = said(*SHOWN[name]()), Accounts(pair)
    expected = single.chat(messages, ANSWER)
    ticket, ids = pair.to_prefill.chat_ticket(messages)
    got = pair.to_decode.chat(messages, ANSWER, kv_transfer_params=ticket)
    assert got.tokens == expected.tokens
    accounts.expect_loaded(len(ids) - 1)


def test_the_same_text_with_other_pictures(pair: Pair, single: Client) -> None:
    """Neither engine mixes up their KV, and decode reads that of each."""
    before, after = words(BEFORE), words(AFTER)
    accounts = Accounts(pair)
    answers, loaded = set(), []
    for seed in (1, 2, 3):
        messages = said(before, picture(seed), after)
        expected = single.chat(messages, ANSWER)
        ticket, ids = pair.to_prefill.chat_ticket(messages)
        got = pair.to_decode.chat(messages, ANSWER, kv_transfer_params=ticket)
        assert got.tokens == expected.tokens
        answers.add(expected.text)
        loaded.append(len(ids) - 1)
    assert len(answers) == len(loaded), "the answer depends on the picture"
    accounts.expect_loaded(*loaded)


# --- tickets of every kind


class Leg(NamedTuple):
    """Prefill's leg of a request."""

    scene: Scene
    expected: str
    ticket: Ticket
    ids: list[int]


Spoil = Callable[[Pair, Leg], Any]
"""Gives the `kv_transfer_params` that decode gets instead of the ticket."""


@dataclass(frozen=True)
class Fault:
    """A fault of a ticket, or of its offer."""

    name: str
    spoil: Spoil = lambda _, leg: leg.ticket
    refused: str = ""  # why decode refuses the ticket, whatever it has of the picture
    has_hashes: bool = True  # decode can read which media prefill had
    is_loaded: bool = True  # a ticket that decode accepts
    during: Callable[[Pair], AbstractContextManager[object]] = nullcontext  # prefill's legs
    after: Callable[[Pair], object] = nullcontext  # them

    def failure(self, setting: str, has: Has) -> str:
        """Why a request fails; '' if its answer is right."""
        if setting == "auto" and not self.refused and has not in (Has.PICTURE, Has.NAMED_STAND_IN):
            return "media"
        may_compute = setting == "auto" and has is Has.PICTURE and self.has_hashes
        is_good = not self.refused and self.is_loaded
        return "" if is_good or may_compute else self.refused or "load"


def having(**fields: object) -> Spoil:
    """Other values in the string."""
    return lambda _, leg: sealed(leg.ticket, list((values(leg.ticket) | fields).values()))


def of_version_9(_: Pair, leg: Leg) -> Ticket:
    return sealed(leg.ticket, list(values(leg.ticket).values()), version=9)


def from_keyed_engine(_: Pair, leg: Leg) -> Ticket:
    version, _, payload = leg.ticket[FIELD].split(".")
    return leg.ticket | {FIELD: f"{version}.{'0' * 32}.{payload}"}


def without_string(_: Pair, leg: Leg) -> Ticket:
    return {name: value for name, value in leg.ticket.items() if name != FIELD}


def use(pair: Pair, leg: Leg) -> Ticket:
    """Decode loads with it before."""
    # vLLM's frontend would give the engine the picture if it had seen that under the uuid.
    scene = leg.scene if leg.scene.has is Has.NAMED_STAND_IN else leg.scene.whole
    assert scene.ask(pair.to_decode, leg.ids, kv_transfer_params=leg.ticket) == leg.expected
    return leg.ticket


def gives_tickets(client: Client) -> bool:
    try:
        client.chat_ticket([{"role": "user", "content": "Is there one?"}])
    except NoTicketError:
        return False
    return True


@contextmanager
def draining(pair: Pair) -> Iterator[None]:
    at = f"--at {HOST}:{pair.prefill.side_port} --insecure"
    assert nixl_kv("drain", at).exit_code == 0
    # Prefill's API server hears of it with an answer of the engine, or when it asks again.
    assert wait_until(lambda: not gives_tickets(pair.to_prefill), EVENT_S)
    yield
    assert nixl_kv("drain", at, "--undo").exit_code == 0


def revoke(pair: Pair) -> None:
    """Prefill ends its offers."""
    pair.to_prefill.reset_prefix_cache(reset_external=True)
    expect_free(pair.to_prefill)


FAULTS: Final = (
    Fault("nothing"),
    Fault("prefill drains", refused="not_offered", during=draining),
    Fault("another wire version", of_version_9, "version", has_hashes=False),
    Fault("a MAC, but no key", from_keyed_engine, "key", has_hashes=False),
    Fault("another label", having(weights="step 8"), "weights"),
    Fault("another prompt", having(context="0" * 32), "prompt"),
    Fault("not a ticket", lambda *_: {FIELD: "x"}, "malformed", has_hashes=False),
    Fault("no string", without_string, "malformed", has_hashes=False),
    Fault("used", use, "used"),
    Fault("revoked", after=revoke, is_loaded=False),
    Fault("no listener", having(port=1), is_loaded=False),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_an_answer_is_right_or_an_error(
    pair: Pair, single: Client, setting: str, fault: Fault
) -> None:
    """Whatever decode has of the picture, and whatever is wrong with the ticket."""
    asked = scenes()
    expected = all_at_once(lambda scene: scene.whole.ask(single), asked)
    with fault.during(pair):
        legs = ask_prefill(pair, asked, expected)
    fault.after(pair)
    params = [fault.spoil(pair, leg) for leg in legs]
    since, start = CountersSince(pair.to_decode), pair.decode.log_size()

    def ask(leg: Leg, params: Any) -> str:
        return leg.scene.ask(pair.to_decode, leg.ids, kv_transfer_params=params)

    answers = all_at_once(ask, legs, params)
    failures = {leg.scene.has: fault.failure(setting, leg.scene.has) for leg in legs}
    expect_answers(legs, answers, failures)
    reasons = Counter(filter(None, failures.values()))
    is_loaded = not fault.refused and fault.is_loaded
    loads = list(failures.values()).count("") if is_loaded else 0
    counted = expect(since, failed(reasons) | {LOADS: loads})
    assert counted[FAILED] == reasons.total()
    lines = [line for line in pair.decode.log_text(start).splitlines() if MAY_NOT in line]
    assert len(lines) == reasons.total()
    keeps = setting == "auto"  # blocks of such requests in decode's prefix cache
    are_cached = [keeps and (answer != FAILS or fault.spoil is use) for answer in answers]
    expect_good(pair, legs, are_cached)


def test_a_preempted_request_is_right_or_an_error(pair: Pair, single: Client, setting: str) -> None:
    """Decode has loaded its KV, and loses it."""
    asked = [one for one in scenes() if Fault("").failure(setting, one.has) == ""]
    expected = all_at_once(lambda scene: scene.whole.ask(single, num_tokens=TALK), asked)
    legs = ask_prefill(pair, asked, expected)
    since = CountersSince(pair.to_decode)

    def ask(leg: Leg) -> str:
        client, params = pair.to_decode, leg.ticket
        return leg.scene.ask(client, leg.ids, TALK, is_streamed=True, kv_transfer_params=params)

    with ThreadPoolExecutor(len(legs)) as pool:
        asking = [pool.submit(ask, leg) for leg in legs]
        running = pair.to_decode.counters
        assert wait_until(lambda: running()[RUNNING] == len(legs), EVENT_S, interval_s=0.02)
        pair.to_decode.reset_prefix_cache(reset_running_requests=True)
        answers = [each.result() for each in asking]
    failures = {
        leg.scene.has: "" if setting == "auto" and leg.scene.has is Has.PICTURE else "preempted"
        for leg in legs
    }
    expect_answers(legs, answers, failures)
    reasons = Counter(filter(None, failures.values()))
    expect(since, failed(reasons) | {PREEMPTIONS: len(legs), LOADS: len(legs)})
    expect_good(pair, legs, [answer != FAILS for answer in answers])


def test_a_stream_ends_with_an_error(pair: Pair) -> None:
    for has in (Has.STAND_IN, Has.PLACEHOLDERS):  # a chat, and token ids
        scene = new_scene(has)
        _, ids = pair.to_prefill.chat_ticket(scene.messages)
        params = {FIELD: "x"}
        got = scene.ask(pair.to_decode, ids, is_streamed=True, kv_transfer_params=params)
        assert got == FAILS


def test_without_parameters_decode_is_any_engine(pair: Pair, single: Client) -> None:
    since = CountersSince(pair.to_decode)
    for scene in scenes():
        _, ids = pair.to_prefill.chat_ticket(scene.messages)
        assert scene.ask(pair.to_decode, ids) == scene.ask(single, ids) != FAILS
    counted = since.wait_for(TICKETS_MISSING, len(Has), EVENT_S)
    assert (counted[TICKETS_MISSING], counted[FAILED]) == (len(Has), 0)


def test_decode_computes_its_own_pictures_if_the_operator_says_so(
    engines: Mapping[str, Engine], single: Client
) -> None:
    """A refused or failed ticket does not matter, whichever picture decode has."""
    with connected(engines["prefill"], engines["own"]) as pair:
        since = CountersSince(pair.to_decode)
        for spoil in (having(), having(port=1), lambda *_: {FIELD: "x"}):
            for has in (Has.PICTURE, Has.OTHER):
                (leg,) = ask_prefill(pair, [new_scene(has)], [""])
                params = spoil(pair, leg)
                got = leg.scene.ask(pair.to_decode, leg.ids, kv_transfer_params=params)
                assert got == leg.scene.ask(single, leg.ids) != FAILS
        expect(since, {LOADS: 1, FAILURES: 1, TICKETS_REFUSED: 4, FAILED: 0})
        revoke(pair)
        expect_free(pair.to_decode)


def ask_prefill(pair: Pair, asked: Sequence[Scene], expected: Sequence[str]) -> list[Leg]:
    def ask(scene: Scene, expected: str) -> Leg:
        return Leg(scene, expected, *pair.to_prefill.chat_ticket(scene.messages))

    return all_at_once(ask, asked, expected)


def all_at_once(ask: Callable[..., _Given], *arguments: Sequence[Any]) -> list[_Given]:
    with ThreadPoolExecutor(len(Has)) as pool:
        return list(pool.map(ask, *arguments))


def expect_answers(
    legs: Sequence[Leg], answers: Sequence[str], failures: Mapping[Has, str]
) -> None:
    def outcome(leg: Leg, answer: str) -> str:
        return "right" if answer == leg.expected else answer

    came = {leg.scene.has: outcome(leg, answer) for leg, answer in zip(legs, answers, strict=True)}
    assert came == {has: FAILS if why else "right" for has, why in failures.items()}


def failed(reasons: Mapping[str, int]) -> dict[str, float]:
    return {f"{FAILED}{{reason={reason}}}": count for reason, count in reasons.items()}


def expect_good(pair: Pair, legs: Sequence[Leg], are_cached: Sequence[bool]) -> None:
    """The same prompts with the pictures and good tickets: all are loaded, and answers right."""
    accounts = Accounts(pair)

    def ask(leg: Leg) -> str:
        return leg.scene.whole.ask(pair.to_decode, leg.ids, kv_transfer_params=leg.ticket)

    again = ask_prefill(pair, [leg.scene for leg in legs], [leg.expected for leg in legs])
    answers = all_at_once(ask, again)
    assert [leg.expected.split()[:ANSWER] for leg in legs] == [one.split() for one in answers]
    accounts.expect_loaded(*(NUM_TOKENS - 1 - BLOCK * is_cached for is_cached in are_cached))
