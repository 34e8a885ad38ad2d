"""A prefill engine loads what another engine has cached. The test is its workers and the owner."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
from msgspec.structs import replace
from vllm.config import KVTransferConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from nixl_kv.connector import unpromised
from nixl_kv.connector.conversations import NO_HOOKS
from nixl_kv.connector.conversations.content import OWNER
from nixl_kv.connector.conversations.finding import Finder, hashes_by
from nixl_kv.connector.legs import SOURCE
from nixl_kv.connector.stats import RankReports
from nixl_kv.connector.vllm_config import (
    content_facts,
    draft_facts,
    model_facts,
    parse_config,
)
from nixl_kv.connector.worker import WorkerMetadata
from nixl_kv.conversations.finding import FIND_S, MIN_TOKENS
from nixl_kv.engine.directory import DirectoryServer, describe_engine
from nixl_kv.engine.probe import probe_ticket
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import Endpoint, EngineId, Nonce, RequestId, new_nonce
from nixl_kv.protocol.events import (
    CancelLoad,
    Failure,
    FailureKind,
    OfferEnd,
    OfferEnded,
    PrepareLoad,
    PrepareOffer,
    PublishOffer,
    StartLoad,
)
from nixl_kv.protocol.messages import ContentFacts, Find, Found
from nixl_kv.protocol.ticket import FIELD
from nixl_kv.transport.zmq import ZmqControl
from support.polling import wait_until
from support.records import landed, rank_description, teller, ticket_for
from support.vllm_scheduler import (
    BLOCK,
    WANT_TICKET,
    SteppedScheduler,
    hooked,
    load_reported,
    make_config,
    make_request,
    multi,
    ours,
)

FIRST: Final = list(range(4 * BLOCK))
"""The prompt of a conversation's first turn."""
NEXT: Final = [*FIRST, *range(1000, 1000 + MIN_TOKENS + 40)]
"""The second turn's: the answer, and more."""
HELD: Final = 21
"""Blocks of it that the owner has."""
RUN: Final = b"sealed"


class Owner:
    """The directory of an engine that has cached the first `num_blocks` blocks of any prompt."""

    def __init__(self, facts: ContentFacts, model: dict[str, str]) -> None:
        self.num_blocks = self.epoch = 0
        self.asked: list[Find] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.server = DirectoryServer(ZmqControl(), "127.0.0.1", 0, find=self._find)
        self.description = describe_engine(
            EngineId("owner"), model, ParallelShape(1, 1), [rank_description()], content=facts
        )
        self.server.publish(self.description)
        self.server.start()

    @property
    def endpoint(self) -> Endpoint:
        return self.server.endpoint

    def _find(self, find: Find) -> Found:
        self.may_answer.wait(30.0)
        self.asked.append(find)
        num_blocks = min(max(0, self.num_blocks - find.first_block), len(find.hashes))
        return Found(
            incarnation=self.description.incarnation,
            nonce=find.nonce,
            num_blocks=num_blocks,
            offer=new_nonce(),
            run=RUN if num_blocks else b"",
            epoch=self.epoch,
            weights=find.weights,
        )


class Engine(SteppedScheduler):
    """A prefill engine that reads conversations."""

    def __init__(self, *, is_async: bool = False, **extra: Any) -> None:
        transfer = KVTransferConfig(**ours(**{"conversations": "on", **extra}))
        config = make_config(transfer, 128, is_async=is_async, max_num_batched_tokens=512)
        super().__init__(config, hooked(config))
        self.describe()
        self.end(self.vllm.schedule())
        self.end(self.vllm.schedule())
        settings = parse_config(config)
        self.model, self.facts = model_facts(config), content_facts(config, settings)
        assert draft_facts(config) == {}
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.connector.stats.count = self._count

    @property
    def finder(self) -> Finder:
        (finder,) = [part for part in self.connector._parts if isinstance(part, Finder)]
        return finder

    def _count(self, name: str, amount: float = 1, *labels: str) -> None:
        self.counts[(name, *labels)] += int(amount)

    @property
    def sought(self) -> dict[str, int]:
        return {key[1]: count for key, count in self.counts.items() if key[0] == "sought_requests"}

    def step(self, **reported: Any) -> tuple[list[Any], list[Any], SchedulerOutput]:
        """The commands for the workers, the outputs, and what vLLM has scheduled."""
        output = self.vllm.schedule()
        return output.kv_connector_metadata.commands, self.end(output, **reported), output

    def turn(self, name: str, tokens: Sequence[int], reader: Endpoint) -> None:
        """Compute and offer a prompt, which an engine with this directory reads."""
        self.step(**read_by(name, self.offer(name, tokens), reader))
        assert name not in self.vllm.requests

    def offer(self, name: str, tokens: Sequence[int]) -> Nonce:
        self.add(name, tokens, WANT_TICKET)
        while name in self.vllm.requests and not self.vllm.requests[name].is_finished():
            self.step()
        commands, _, _ = self.step()
        (publish,) = [one for one in commands if isinstance(one, PublishOffer)]
        return publish.nonce

    def seek(self, name: str = "next", tokens: Sequence[int] = NEXT, **params: Any) -> Request:
        request = self.add(name, tokens, {**WANT_TICKET, **params})
        commands, _, output = self.step()
        assert not output.num_scheduled_tokens
        assert not any(isinstance(one, StartLoad) for one in commands)
        assert self.connector.aside == {name}
        return request

    def await_load(self) -> tuple[PrepareLoad, StartLoad]:
        """Step until the load of the found blocks begins."""
        begun: list[Any] = []

        def has_begun() -> bool:
            commands, _, output = self.step()
            assert not output.num_scheduled_tokens, "the owner did not answer in time"
            begun.extend(one for one in commands if isinstance(one, PrepareLoad | StartLoad))
            return bool(begun)

        wait_until(has_begun)
        prepare, start = begun
        return prepare, start

    def await_computed(self) -> SchedulerOutput:
        found: list[SchedulerOutput] = []

        def computes() -> bool:
            _, _, output = self.step()
            found.append(output)
            return bool(output.num_scheduled_tokens)

        wait_until(computes)
        return found[-1]


def read_by(name: str, nonce: Nonce, reader: Endpoint | None) -> dict[str, Any]:
    """The workers' reports when decode has read an offer."""
    reports = RankReports()
    about = (EngineId("owner"), 0.0, reader)
    reports.add([OfferEnded(nonce, RequestId(name), OfferEnd.READ, *about)])
    return {"finished_sending": {name}, "kv_connector_worker_meta": WorkerMetadata({}, reports)}


FENCED: Final = Failure(FailureKind.FENCED, "the owner has reused the blocks")

Make = Callable[..., Engine]
Own = Callable[..., Owner]
Met = Callable[..., tuple[Engine, Owner]]


@pytest.fixture
def make(engines_of: Callable[[type[Engine]], Make], monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr("nixl_kv.conversations.finding.FIND_S", 30.0)  # a busy machine is slow
    return engines_of(Engine)


@pytest.fixture
def own() -> Iterator[Own]:
    owners: list[Owner] = []

    def new(engine: Engine, num_blocks: int = 0, **changes: Any) -> Owner:
        facts, model = replace(engine.facts, **changes), engine.model
        owners.append(Owner(facts, model))
        owners[-1].num_blocks = num_blocks
        return owners[-1]

    yield new
    for owner in owners:
        owner.may_answer.set()
        owner.server.stop()


@pytest.fixture
def met(make: Make, own: Own) -> Met:
    """Makes an engine, and an owner that has read its first turn."""

    def new(num_blocks: int = HELD, **settings: Any) -> tuple[Engine, Owner]:
        engine = make(**settings)
        owner = own(engine, num_blocks=num_blocks)
        engine.turn("first", FIRST, owner.endpoint)
        return engine, owner

    return new


def cold(engine: Engine) -> None:
    assert engine.vllm.kv_cache_manager.reset_prefix_cache()


# --- a request from the question to its offer


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
def test_the_next_turn_loads_what_the_reader_of_the_last_one_has(
    met: Met, *, is_async: bool, is_cold: bool
) -> None:
    engine, owner = met(is_async=is_async)
    if is_cold:
        cold(engine)
    local = 0 if is_cold else len(FIRST)
    request = engine.seek()
    prepare, start = engine.await_load()
    assert (prepare.ticket.endpoint, prepare.found) == (owner.endpoint, RUN)
    assert (start.begin, start.end) == (local, HELD * BLOCK)
    (find,) = owner.asked
    hashes = make_request("hash", NEXT).block_hashes
    assert (find.first_block, list(find.hashes)) == (local // BLOCK, hashes[local // BLOCK :])

    engine.step(**load_reported("next", start.num_tokens))
    commands: list[Any] = []
    outputs: list[Any] = []
    while not request.is_finished():
        more, ended, output = engine.step()
        commands, outputs = commands + more, outputs + ended
        if output.num_scheduled_tokens:
            assert output.num_scheduled_tokens == {"next": len(NEXT) - HELD * BLOCK}
    (offer,) = [one for one in commands if isinstance(one, PrepareOffer)]
    assert (offer.num_tokens, offer.num_cached) == (len(NEXT), HELD * BLOCK)
    (output,) = [one for one in outputs if one.finish_reason]
    assert FIELD in output.kv_transfer_params
    assert output.prefill_stats.num_cached_tokens == HELD * BLOCK
    assert engine.sought == {"read": 1}
    assert engine.counts["found_tokens",] == HELD * BLOCK - local
    assert ("loads", "loaded", "") not in engine.counts
    assert ("loaded_tokens",) not in engine.counts

    (publish,) = [one for one in engine.step()[0] if isinstance(one, PublishOffer)]
    engine.step(**read_by("next", publish.nonce, owner.endpoint))
    assert not engine.vllm.requests
    assert engine.free_blocks == engine.idle


def test_a_question_takes_one_step_and_its_load_two_more(met: Met) -> None:
    """An answer counts from the next step on, however soon it has come."""
    engine, _ = met()
    engine.seek()
    wait_until(lambda: bool(engine.finder.owners.answers))
    commands, _, _ = engine.step()
    (start,) = [one for one in commands if isinstance(one, StartLoad)]
    _, _, output = engine.step(**load_reported("next", start.num_tokens))  # the earliest report
    assert not output.num_scheduled_tokens
    assert "next" in engine.step()[2].num_scheduled_tokens


BURST: Final = ["n0", "n1", "n2", "n3"]


def burst(engine: Engine) -> tuple[list[StartLoad], SchedulerOutput]:
    """Requests with one prompt, until some of them are loaded or computed in a step."""
    cold(engine)
    for name in BURST:
        engine.add(name, NEXT, WANT_TICKET)
    begun: list[tuple[list[StartLoad], SchedulerOutput]] = []

    def has_begun() -> bool:
        commands, _, output = engine.step()
        begun.append(([one for one in commands if isinstance(one, StartLoad)], output))
        return bool(begun[-1][0] or output.num_scheduled_tokens)

    wait_until(has_begun)
    return begun[-1]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_requests_with_one_prompt_share_one_load(met: Met, *, is_async: bool) -> None:
    """Requests with n > 1, or a burst: afterwards the others find it in this engine's cache."""
    engine, owner = met(is_async=is_async)
    (start,), _ = burst(engine)
    before = engine.free_blocks
    for _ in range(3):
        commands, _, output = engine.step()
        assert not output.num_scheduled_tokens
        assert not [one for one in commands if isinstance(one, StartLoad | PrepareLoad)]
    assert len(owner.asked) == 1
    engine.step(**load_reported(start.request, start.num_tokens))
    computed: Counter[str] = Counter()
    for _ in range(8):
        computed.update(engine.step()[2].num_scheduled_tokens)
    last = len(NEXT) % BLOCK
    assert computed == {"n0": len(NEXT) - HELD * BLOCK, "n1": last, "n2": last, "n3": last}
    assert before - engine.free_blocks == 1 + len(BURST), "the full block that n0 has computed"
    assert len(owner.asked) == 1
    assert engine.sought == {"read": 1}


def test_requests_with_one_prompt_share_what_the_first_computes(met: Met) -> None:
    """If the owner has nothing, they hit the first one's blocks in the same step, as ever."""
    engine, owner = met(num_blocks=0)
    _, output = burst(engine)
    assert output.num_scheduled_tokens == {"n0": len(NEXT)} | dict.fromkeys(
        BURST[1:], len(NEXT) % BLOCK
    )
    assert len(owner.asked) == 1


@pytest.mark.parametrize("end", ["failed", "aborted", "reset"])
def test_requests_that_wait_for_another_ones_load_outlive_it(met: Met, end: str) -> None:
    engine, _ = met()
    (start,), _ = burst(engine)
    assert start.request == "n0"
    match end:
        case "failed":
            engine.step(**load_reported("n0", start.num_tokens, FENCED))
        case "aborted":
            engine.vllm.finish_requests("n0", RequestStatus.FINISHED_ABORTED)
        case "reset":
            engine.connector.reset_cache()
    begun: set[str] = set()

    def have_begun() -> bool:
        commands, _, output = engine.step()
        begun.update(one.request for one in commands if isinstance(one, StartLoad))
        begun.update(output.num_scheduled_tokens)
        return begun.issuperset(BURST[1:])

    wait_until(have_begun)
    assert not engine.connector.aside


def test_a_request_that_waits_for_another_one_may_end_first(met: Met) -> None:
    engine, _ = met()
    (start,), _ = burst(engine)
    engine.vllm.finish_requests(BURST[1:], RequestStatus.FINISHED_ABORTED)
    engine.step(**load_reported("n0", start.num_tokens))
    assert engine.await_computed().num_scheduled_tokens == {"n0": len(NEXT) - HELD * BLOCK}
    assert not engine.connector.aside
    finds = engine.finder.finds
    assert not finds._firsts
    assert not finds._states


def test_chunks_of_a_request_that_was_loaded_in_part_are_offered(make: Make, own: Own) -> None:
    """Like those of any request: the load does not count as another connector's."""
    engine = make()
    engine.vllm.scheduler_config.max_num_batched_tokens = engine.vllm.max_num_scheduled_tokens = 32
    owner = own(engine, num_blocks=17)
    nonce = new_nonce()
    prefill = engine.connector._prefill
    engine.finder.finds.table.learn(make_request("h", FIRST).block_hashes, owner.endpoint)
    engine.add("next", NEXT, WANT_TICKET)
    prefill._awaited["next"].promised = nonce
    _, start = engine.await_load()
    engine.step(**load_reported("next", start.num_tokens))
    offers: list[PrepareOffer] = []
    while not offers or offers[-1].computed is not None:
        commands, _, _ = engine.step()
        offers += [one for one in commands if isinstance(one, PrepareOffer)]
    left = len(NEXT) - 17 * BLOCK
    steps = range(17 * BLOCK + 32, len(NEXT), 32)
    assert [offer.computed for offer in offers] == [*steps, None], left
    assert all(offer.in_parts for offer in offers)


def test_an_owner_that_has_nothing_costs_one_question(met: Met) -> None:
    engine, owner = met(num_blocks=0)
    engine.seek()
    output = engine.await_computed()
    assert output.num_scheduled_tokens == {"next": len(NEXT) - len(FIRST)}
    assert engine.sought == {"none": 1}
    assert len(owner.asked) == 1


def test_a_find_is_computed_if_the_own_hit_before_it_has_gone(met: Met) -> None:
    engine, owner = met()
    owner.may_answer.clear()
    engine.seek()
    cold(engine)
    owner.may_answer.set()
    commands: list[Any] = []
    scheduled: dict[str, int] = {}

    def computes() -> bool:
        more, _, output = engine.step()
        commands.extend(more)
        scheduled.update(output.num_scheduled_tokens)
        return bool(scheduled)

    wait_until(computes)
    assert scheduled == {"next": len(NEXT)}
    assert not [one for one in commands if isinstance(one, StartLoad)]
    assert CancelLoad(RequestId("next")) in commands


def test_a_lost_load_is_computed(met: Met) -> None:
    engine, owner = met(on_load_failure="fail")
    request = engine.seek()
    _, start = engine.await_load()
    engine.step(**load_reported("next", start.num_tokens, FENCED))
    output = engine.await_computed()
    assert output.num_scheduled_tokens == {"next": len(NEXT) - len(FIRST)}
    assert engine.sought == {"lost": 1}
    assert not [key for key in engine.counts if key[0] in ("load_failures", "recomputed_requests")]
    assert len(owner.asked) == 1, "it is not asked for again"
    while not request.is_finished():
        engine.step()
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.parametrize("hangs", ["the owner", "the thread that asks"])
def test_without_an_answer_a_request_is_computed_in_time(
    met: Met, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    engine, owner = met()
    monkeypatch.setattr("nixl_kv.conversations.finding.FIND_S", FIND_S)
    if hangs == "the owner":
        owner.may_answer.clear()
    else:
        engine.finder.finds.ask = lambda _: None
    engine.seek()
    engine.await_computed()
    assert engine.sought == {"late": 1}


@pytest.mark.parametrize("end", ["abort", "reset"])
def test_a_request_that_ends_while_it_is_sought_leaves_nothing(met: Met, end: str) -> None:
    engine, owner = met()
    owner.may_answer.clear()
    request = engine.seek()
    if end == "abort":
        engine.vllm.finish_requests("next", RequestStatus.FINISHED_ABORTED)
    else:
        assert engine.vllm.reset_prefix_cache(reset_connector=True)
        engine.await_computed()
    owner.may_answer.set()
    wait_until(lambda: bool(engine.finder.owners.answers))
    while not request.is_finished():
        engine.step()
    engine.step()
    assert not engine.connector.aside
    assert not len(engine.finder.finds)
    if end == "abort":
        assert not engine.vllm.requests
        assert engine.free_blocks == engine.idle


# --- new weights without a label


def test_after_a_reset_no_owner_is_known_that_read_an_offer_before(met: Met) -> None:
    engine, owner = met()
    assert engine.vllm.reset_prefix_cache(reset_connector=True)
    engine.add("next", NEXT, WANT_TICKET)
    assert engine.step()[2].num_scheduled_tokens == {"next": len(NEXT)}
    assert not owner.asked


def test_the_reader_of_an_offer_from_before_a_reset_is_not_asked(make: Make, own: Own) -> None:
    engine = make()
    owner = own(engine, num_blocks=HELD)
    nonce = engine.offer("first", FIRST)
    engine.vllm.reset_prefix_cache(reset_connector=True)  # the own blocks are still offered
    engine.step(**read_by("first", nonce, owner.endpoint))
    engine.add("next", NEXT, WANT_TICKET)
    assert engine.step()[2].num_scheduled_tokens == {"next": len(NEXT) - len(FIRST)}
    assert not owner.asked


@pytest.mark.parametrize("num_blocks", [0, HELD], ids=["none", "found"])
def test_after_a_reset_an_owner_that_answered_before_must_reset_too(
    make: Make, own: Own, num_blocks: int
) -> None:
    """A router may name it, so it is asked."""
    engine = make()
    owner = own(engine, num_blocks=num_blocks)
    ticket = probe_ticket(
        EngineId("owner"), owner.description.incarnation, owner.server.host, owner.server.port
    )
    named = {OWNER: engine.connector._trust.seal(ticket)[FIELD]}

    def ask(name: str, first: int) -> None:
        """Let it be named for a prompt that this engine has not cached."""
        engine.seek(name, [first, *NEXT], **named)

    ask("before", 1)
    if num_blocks:
        _, start = engine.await_load()
        engine.step(**load_reported("before", start.num_tokens))
        engine.step()
    else:
        engine.await_computed()
    assert engine.connector.reset_cache()
    owner.num_blocks = HELD
    ask("old", 2)
    assert "old" in engine.await_computed().num_scheduled_tokens
    assert engine.sought == ({"none": 1, "read": 1} if num_blocks else {"none": 2})

    owner.epoch += 1
    ask("new", 3)
    prepare, _ = engine.await_load()
    assert prepare.ticket.epoch == 1


# --- vLLM frees blocks at the end of a load, and again at that of an offer (vllm#56089)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("failed", [False, True], ids=["loaded", "failed"])
def test_a_request_that_is_aborted_during_its_load_is_freed_once(
    met: Met, *, is_async: bool, failed: bool
) -> None:
    engine, _ = met(is_async=is_async)
    engine.seek()
    _, start = engine.await_load()
    engine.vllm.finish_requests("next", RequestStatus.FINISHED_ABORTED)
    commands, _, _ = engine.step()
    assert not [one for one in commands if isinstance(one, PublishOffer)]
    engine.step(**load_reported("next", start.num_tokens, FENCED if failed else None))
    engine.step()
    assert not engine.vllm.requests
    assert engine.free_blocks == engine.idle
    assert engine.connector._prefill.num_offers == 0
    assert not engine.finder.finds._states
    assert engine.sought == {"lost": 1}
    assert not engine.counts["found_tokens",]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_request_that_is_aborted_after_its_load_is_freed_once(met: Met, overlap: str) -> None:
    """With `overlap`, vLLM hears of the load sooner than the workers report it."""
    engine, _ = met(overlap=overlap)
    engine.seek()
    prepare, start = engine.await_load()
    reported = load_reported("next", start.num_tokens)
    if overlap == "on":
        hint = landed(hint_key=prepare.hint_key, reader=teller(0, engine.connector._engine_id))
        engine.connector._directory._hints.append(hint)
    else:
        engine.step(**reported)
        reported = {}
    output = engine.vllm.schedule()
    assert "next" in output.num_scheduled_tokens
    engine.vllm.finish_requests("next", RequestStatus.FINISHED_ABORTED)
    engine.end(output, **reported)
    engine.step()
    assert engine.sought == {"read": 1}
    assert not engine.finder.finds._states
    assert not engine.vllm.requests
    assert engine.free_blocks == engine.idle


# --- whom to ask


def test_an_engine_does_not_ask_itself(make: Make) -> None:
    """A router may send both legs of a request to one engine."""
    engine = make()
    engine.turn("first", FIRST, engine.connector._directory.endpoint)
    engine.add("next", NEXT, WANT_TICKET)
    assert engine.step()[2].num_scheduled_tokens == {"next": len(NEXT) - len(FIRST)}


def test_a_reader_outside_peers_is_not_asked(make: Make, own: Own) -> None:
    """A reader states its address itself."""
    engine = make(peers=["10.0.0.0/8"])
    engine.turn("first", FIRST, own(engine, num_blocks=HELD).endpoint)
    engine.add("next", NEXT, WANT_TICKET)
    assert engine.step()[2].num_scheduled_tokens == {"next": len(NEXT) - len(FIRST)}


@pytest.mark.parametrize("value", ["forged", 7, None, "12..AAAA"])
def test_other_words_are_ignored(make: Make, value: object) -> None:
    engine = make()
    engine.add("next", NEXT, {**WANT_TICKET, OWNER: value})
    assert engine.step()[2].num_scheduled_tokens == {"next": len(NEXT)}
    assert engine.sought == {"refused": 1}


@pytest.mark.parametrize(
    ("peers", "changes", "asks"),
    [
        (["127.0.0.0/8"], {}, True),
        (["127.0.0.0/8"], {"remote_port": "PORT"}, True),
        (["10.0.0.0/8"], {}, False),
        (None, {}, False),
        (["127.0.0.0/8"], {"remote_host": "localhost"}, False),
        (["127.0.0.0/8"], {"remote_port": 0}, False),
        (["127.0.0.0/8"], {"remote_port": None}, False),
        (["127.0.0.0/8"], {"remote_host": ["127.0.0.1"]}, False),
    ],
)
def test_a_host_that_a_client_names_counts_if_peers_contains_it(
    make: Make, own: Own, peers: list[str] | None, changes: dict[str, Any], *, asks: bool
) -> None:
    engine = make(**({} if peers is None else {"peers": peers}))
    owner = own(engine, num_blocks=HELD)
    named = {"remote_host": owner.server.host, "remote_port": owner.server.port} | changes
    if named["remote_port"] == "PORT":
        named["remote_port"] = str(owner.server.port)
    source: dict[str, Any] = {SOURCE: {"kv_request_id": "r", **named}}
    if asks:
        engine.seek(**source)
        engine.await_load()
    else:
        engine.add("next", NEXT, {**WANT_TICKET, **source})
        assert engine.step()[2].num_scheduled_tokens == {"next": len(NEXT)}


def test_a_prompt_that_is_computed_for_itself_may_be_read_too(make: Make, own: Own) -> None:
    """A conversation that has moved: llm-d's router names the engine that had it before."""
    engine = make(peers=["127.0.0.0/8"])
    owner = own(engine, num_blocks=HELD)
    source = {"remote_host": owner.server.host, "remote_port": owner.server.port}
    engine.add("next", NEXT, {SOURCE: source})
    prepare, _ = engine.await_load()
    assert prepare.ticket.endpoint == owner.endpoint


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"cache_salt": "tenant"}, id="another salt"),
        pytest.param({"resumable": True}, id="more input may follow"),
    ],
)
def test_other_requests_are_not_sought(met: Met, more: dict[str, Any]) -> None:
    engine, owner = met()
    engine.add("next", NEXT, WANT_TICKET, **more)
    _, _, output = engine.step()
    assert "next" in output.num_scheduled_tokens
    assert not owner.asked


def test_decode_tells_the_router_where_the_kv_is(make: Make) -> None:
    """Only if its own request has come with a ticket."""
    engine = make()
    params = ticket_for(FIRST, new_nonce(), host="127.0.0.1").params(None)
    engine.add("d", FIRST, params)
    engine.step()
    engine.step(**load_reported("d", len(FIRST) - 1))
    _, outputs, _ = engine.step()
    (output,) = outputs
    assert output.kv_transfer_params["do_remote_decode"] is True
    named = output.kv_transfer_params[OWNER]
    head = engine.connector._trust.check({FIELD: named}).head()
    directory = engine.connector._directory
    assert (head.host, head.port) == (directory.host, directory.port)
    engine.add("plain", [1, 2, 3])
    _, outputs, _ = engine.step()
    assert [output.kv_transfer_params for output in outputs] == [None]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_in_a_multi_connector_it_asks_only_if_vllm_computes_what_fails(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(multi(ours(conversations="on"), policy=policy), 64)
    engine = SteppedScheduler(config, hooked(config))
    (connector,) = engine.vllm._connectors  # type: ignore[attr-defined]
    (finder,) = [part for part in connector._parts if isinstance(part, Finder)]
    assert finder.may_ask == (policy == "recompute")
    assert not finder.owns_source
    assert ("set kv_load_failure_policy" in caplog.text) == (policy == "fail")


@pytest.mark.parametrize("lacks", ["plugins", "overlap"])
def test_without_hooks_a_request_fails_by_vllms_policy_and_nothing_is_asked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """Else vLLM would compute what must fail, and only the hooks could end it."""
    transfer = KVTransferConfig(**ours(conversations="on", on_load_failure="fail"))
    config = make_config(transfer, 64)
    off = unpromised.is_off
    if lacks == "overlap":
        monkeypatch.setattr(
            unpromised, "is_off", lambda part: part is unpromised.OVERLAP or off(part)
        )
    engine = SteppedScheduler(config, None if lacks == "plugins" else hooked(config))
    engine.describe()
    assert transfer.kv_load_failure_policy == "fail"
    assert not any(isinstance(part, Finder) for part in engine.connector._parts)
    lines = [record.getMessage() for record in caplog.records if "hooks over" in record.message]
    assert lines == [NO_HOOKS]

    engine.end(engine.vllm.schedule())
    request = engine.add("bad", FIRST, ticket_for(NEXT, new_nonce()).params(None))
    engine.end(engine.vllm.schedule())
    engine.end(engine.vllm.schedule(), **load_reported("bad", 0, FENCED))
    assert request.status is RequestStatus.FINISHED_ERROR
    engine.connector.shutdown()


# --- hashes of another engine


@pytest.fixture
def hash_with() -> Iterator[Callable[..., list[bytes]]]:
    """The hashes that an engine with these settings makes of a prompt."""
    before = dict(os.environ)

    def make_hashes(request: Request, facts: ContentFacts) -> list[bytes]:
        os.environ["PYTHONHASHSEED"] = facts.seed
        function = get_hash_fn_by_name(facts.algorithm)
        kv_cache_utils.init_none_hash(function)
        hasher = kv_cache_utils.get_request_block_hasher(facts.block_size, function)
        other = make_request("other", list(request.prompt_token_ids or ()))
        other.cache_salt = request.cache_salt
        other._block_hasher = None
        other.block_hashes = []
        return list(hasher(other))

    yield make_hashes
    os.environ.clear()
    os.environ.update(before)
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))


OWN: Final = ContentFacts(
    algorithm="sha256", seed="vllm-none-hash", block_size=BLOCK, vllm="0.32.0"
)


@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"block_size": 64}, {"seed": "7"}, {"algorithm": "sha256_cbor"}, {"vllm": "0.33.0"}],
    ids=str,
)
def test_hashes_are_those_of_the_other_engine(
    hash_with: Callable[..., list[bytes]], changes: dict[str, Any], salt: str | None
) -> None:
    request = make_request("r", NEXT, cache_salt=salt)
    theirs = replace(OWN, **changes)
    made = hashes_by(theirs, request, OWN)
    assert len(made) == len(NEXT) // theirs.block_size
    assert list(made) == hash_with(request, theirs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": "xxhash"}, "'xxhash'; allowed: sha256 or sha256_cbor"),
        ({"algorithm": "sha256_new"}, "'sha256_new'"),
        ({"block_size": 8}, "its blocks have 8 tokens; allowed: 16 or more"),
    ],
)
def test_hashes_that_cannot_be_made_are_refused_in_words(
    changes: dict[str, Any], words: str
) -> None:
    refusal = hashes_by(replace(OWN, **changes), make_request("r", NEXT), OWN)
    assert isinstance(refusal, str)
    assert words in refusal


def test_only_hashes_that_a_question_can_have_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nixl_kv.protocol.messages.MAX_HASHES", 4)
    theirs, request = replace(OWN, seed="7"), make_request("r", NEXT)
    assert len(hashes_by(theirs, request, OWN)) == 4
    assert len(hashes_by(theirs, request, OWN, begin=2 * BLOCK + 1)) == 6
    assert len(hashes_by(theirs, request, OWN, begin=4 * BLOCK)) == 8
    assert hashes_by(theirs, request, OWN, begin=5 * BLOCK) == ()


def test_media_are_not_asked_of_an_engine_with_stand_ins() -> None:
    request = make_request("r", NEXT)
    stand_ins = replace(OWN, has_stand_ins=True)
    assert hashes_by(stand_ins, request, OWN)
    request.mm_features = [object()]  # type: ignore[list-item]
    assert hashes_by(stand_ins, request, OWN) == ()
    assert hashes_by(OWN, request, OWN)
