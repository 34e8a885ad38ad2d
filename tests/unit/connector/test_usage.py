"""Cached tokens in clients' answers, by vLLM's own schedulers; the test is all workers."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.metrics.stats import PrefillStats, PromptTokenStats
from vllm.v1.request import RequestStatus

from nixl_kv.connector.stats import RankReports
from nixl_kv.connector.usage import CachedTokens, count_cached
from nixl_kv.connector.worker import WorkerMetadata
from nixl_kv.early.answers import PROMISE, seal_promise
from nixl_kv.ids import Nonce, RequestId, new_nonce
from nixl_kv.protocol.events import (
    Failure,
    FailureKind,
    OfferEnd,
    OfferEnded,
    PrepareLoad,
    PrepareOffer,
    StartLoad,
)
from support.records import hex32, landed, teller, ticket_for
from support.vllm_scheduler import (
    BLOCK,
    WANT_TICKET,
    SteppedScheduler,
    hooked,
    load_reported,
    make_config,
    make_request,
    ours,
)

NUM_BLOCKS: Final = 96
FIRST: Final = list(range(202))
LONGER: Final = list(range(302))
LOCAL: Final = 202 // BLOCK * BLOCK
FAILED: Final = Failure(FailureKind.DENIED, "denied")


@dataclass
class Told:
    """Numbers of a prompt that the front end gets: for its client, and for vLLM's metrics."""

    cached: int
    created: int  # tokens that were added to the prefix cache
    by_source: dict[str, int]
    external_hits: int


class Engine(SteppedScheduler):
    """One of vLLM's schedulers; without a role it has no connector."""

    def __init__(self, role: str = "", *, overlap: str = "off", limit: int = 1024) -> None:
        transfer = KVTransferConfig(**ours(role, overlap=overlap)) if role else None
        config = make_config(transfer, NUM_BLOCKS, max_num_batched_tokens=limit)
        super().__init__(config, hooked(config))
        self.ticket: Any = None  # of the latest answer
        self.offered: list[int] = []  # cached tokens, by each `PrepareOffer`
        self._count = itertools.count()
        self._hits = 0
        self._make_stats = self.vllm.make_stats
        setattr(self.vllm, "make_stats", self._note_hits)  # noqa: B010 - of one object
        if role:
            self.describe()

    def _note_hits(self, *given: Any, **named: Any) -> Any:
        stats = self._make_stats(*given, **named)
        if stats is not None and stats.connector_prefix_cache_stats is not None:
            self._hits += stats.connector_prefix_cache_stats.hits
        return stats

    def step(self, **reported: Any) -> tuple[list[Any], list[PrefillStats]]:
        """The commands for its workers, and what the front end hears of prompts."""
        output = self.vllm.schedule()
        commands = getattr(output.kv_connector_metadata, "commands", [])
        self.offered += [each.num_cached for each in commands if isinstance(each, PrepareOffer)]
        outputs = self.end(output, **reported)
        self.ticket = next((each.kv_transfer_params for each in outputs), None) or self.ticket
        return commands, [each.prefill_stats for each in outputs if each.prefill_stats]

    def begin(self, tokens: Sequence[int], params: object = None) -> str:
        name = f"r{next(self._count)}"
        self._hits = 0
        self.add(name, tokens, params)
        return name

    def finish(self, **reported: Any) -> Told:
        """Steps until the only request has ended; the workers report this with the first one."""
        found: list[PrefillStats] = []
        while self.vllm.get_num_unfinished_requests():
            found += self.step(**reported)[1]
            reported = {}
        (stats,) = found
        counted = PromptTokenStats()
        counted.update_from_output(stats)
        by_source = {name: counted.get_by_source(name) for name in counted.ALL_SOURCES}
        created = stats.num_cache_creation_tokens
        return Told(stats.num_cached_tokens, created, by_source, self._hits)

    def run(self, tokens: Sequence[int], params: object = None) -> Told:
        """A request, to its end. If it was offered, decode has read it at once."""
        name = self.begin(tokens, params)
        told = self.finish()
        if params is not None:
            reports = RankReports()
            reports.add([OfferEnded(Nonce(hex32(1)), RequestId(name), OfferEnd.READ)])
            metadata = WorkerMetadata({}, reports)
            self.step(finished_sending={name}, kv_connector_worker_meta=metadata)
        return told

    def start_load(self, tokens: Sequence[int], params: object) -> tuple[PrepareLoad, StartLoad]:
        self.begin(tokens, params)
        found: dict[type, Any] = {}
        while StartLoad not in found:
            found |= {type(each): each for each in self.step()[0]}
            if found[PrepareLoad].ticket.is_early:
                self.connector._decode.on_ready([found[PrepareLoad].request])
        return found[PrepareLoad], found[StartLoad]

    def load(
        self,
        tokens: Sequence[int],
        params: object,
        num_cached: int | None,
        failure: Failure | None = None,
        *,
        is_told: bool = False,
    ) -> Told:
        """A load whose grants had this number. It may be told between steps."""
        prepare, start = self.start_load(tokens, params)
        if is_told:
            reader = teller(engine=self.connector._engine_id)
            hint = landed(hint_key=prepare.hint_key, reader=reader, num_cached=num_cached)
            self.connector._directory._hints.append(hint)
        number = None if failure else num_cached
        reported = load_reported(start.request, start.num_tokens, failure, num_cached=number)
        return self.finish(**reported)


Make = Callable[..., Engine]


@pytest.fixture
def make(engines_of: Callable[[type[Engine]], Make]) -> Make:
    return engines_of(Engine)


def early_ticket(prefill: Engine, prompt: list[int]) -> tuple[Any, Any]:
    """The ticket, and the promise that prefill gets with the request."""
    nonce, trust = new_nonce(), prefill.connector._trust
    address = asdict(prefill.connector._prefill.address)
    ticket = ticket_for(prompt, nonce, is_early=True, **address)
    return trust.seal(ticket), {PROMISE: seal_promise(nonce, trust.ticket_key)}


PROMPTS: Final = {
    "a new prompt": ([], [], FIRST),
    "a longer one than before": ([FIRST], [FIRST], LONGER),
    "cached on prefill only": ([FIRST], [], LONGER),
    "cached on decode only": ([], [FIRST], LONGER),
    "the same again": ([FIRST], [FIRST], FIRST),
}


@pytest.mark.parametrize("is_told", [False, True], ids=["with a step", "between steps"])
@pytest.mark.parametrize("is_early", [False, True], ids=["ticket", "early ticket"])
@pytest.mark.parametrize("limit", [1024, 64], ids=["one step", "chunks"])
@pytest.mark.parametrize(("on_prefill", "on_decode", "prompt"), PROMPTS.values(), ids=PROMPTS)
def test_a_client_gets_the_number_of_tokens_that_prefill_had_cached(
    make: Make,
    on_prefill: list[list[int]],
    on_decode: list[list[int]],
    prompt: list[int],
    limit: int,
    *,
    is_early: bool,
    is_told: bool,
) -> None:
    """A single engine with prefill's cache says the same. Metrics count as before."""
    single, prefill = make(limit=limit), make("kv_producer", limit=limit)
    decode = make("kv_consumer", overlap="on" if is_told else "off")
    for earlier in on_prefill:
        single.run(earlier)
        prefill.run(earlier, WANT_TICKET)
    for earlier in on_decode:
        decode.run(earlier)
    prefill.offered.clear()
    early, promise = early_ticket(prefill, prompt)
    prefill.run(prompt, WANT_TICKET | (promise if is_early else {}))
    expected = single.run(prompt)
    num_parts = -(-(len(prompt) - expected.cached) // limit) if is_early else 1
    assert prefill.offered == [expected.cached] * num_parts, "with each grant"

    told = decode.load(
        prompt, early if is_early else prefill.ticket, prefill.offered[-1], is_told=is_told
    )
    assert (told.cached, told.created) == (expected.cached, expected.created)
    local = LOCAL if on_decode else 0
    external = len(prompt) - 1 - local
    sources = {"local_compute": 1, "local_cache_hit": local, "external_kv_transfer": external}
    assert (told.by_source, told.external_hits) == (sources, external)


def test_a_request_that_decode_computes_has_its_own_number(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    decode.run(FIRST)
    prefill.run(LONGER, WANT_TICKET)
    told = decode.load(LONGER, prefill.ticket, 7, FAILED)
    assert told.cached == LOCAL
    assert told.by_source["local_compute"] == len(LONGER) - LOCAL


def test_no_number_of_a_peer_exceeds_the_prompt(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    prefill.run(FIRST, WANT_TICKET)
    assert decode.load(FIRST, prefill.ticket, 2**31 - 1).cached == len(FIRST)


def test_a_load_whose_ranks_read_nothing_changes_nothing(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    prefill.run(FIRST, WANT_TICKET)
    assert decode.load(FIRST, prefill.ticket, None).cached == len(FIRST) - 1


def test_an_aborted_load_leaves_nothing(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    prefill.run(FIRST, WANT_TICKET)
    _, start = decode.start_load(FIRST, prefill.ticket)
    decode.vllm.finish_requests(start.request, RequestStatus.FINISHED_ABORTED)
    assert not decode.connector._cached._loading


@pytest.mark.parametrize("is_taken", [False, True], ids=["no record", "an output has left"])
def test_a_vllm_without_the_record_is_left_alone(*, is_taken: bool) -> None:
    request = make_request("r", FIRST)
    cached = CachedTokens()
    if is_taken:
        request.take_prefill_stats()
    else:
        del request.prefill_stats
    assert count_cached(request) is None
    cached.on_start(request)
    cached.on_loaded(RequestId("r"), 5)
    assert not cached._loading
