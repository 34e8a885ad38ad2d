"""Prefill answers before it has computed: a seam in vLLM's engine client, where front ends meet.

Every front end (HTTP, gRPC, Dynamo, Ray) calls `AsyncLLM`. It has tokenized and checked the prompt
before `_add_request`, and knows the data-parallel rank afterwards. So the answer has an ordinary
ticket with the hash of the prompt. The engine gets a promise (`early/answers.py`), computes behind
the answer, and offers the KV under the promised nonce.

The address of each rank comes from the engine by a utility call, and from the tickets in the
engine's own answers, which the front end of a request that was answered early does not get.
"""

import asyncio
import functools
import math
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any, Final

from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

from nixl_kv.connector.own import answers_early, has_ours, log_like_vllm, own_config
from nixl_kv.connector.prefill import Address
from nixl_kv.connector.vllm_config import PARAMS, MediaReader, prompt_of_client
from nixl_kv.early.answers import PROMISE, OpenAnswers, open_promise, seal_promise
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import REQUEST_LINES, LimitedLog, TicketRefused, get_logger, shown_id
from nixl_kv.ids import Nonce, new_nonce
from nixl_kv.protocol.params import why_unbounded
from nixl_kv.protocol.ticket import FIELD, Ticket

logger = get_logger(__name__)

Add = Callable[..., Awaitable[None]]

ADDRESS: Final = "nixl_kv_address"
"""The method of vLLM's `EngineCore` that `scheduler_hooks.py` adds."""

# A request is not answered early, because its engine has not told its address. A utility call waits
# for the engine's current step. The request is in its queue meanwhile.
ASK_S: Final = 1.0

# An API server asks an engine without early answers for its address again. The cache may have been
# reset, or the weights replaced. Such a question takes 1 ms.
CURRENT_S: Final = 1.0

NO_ADDRESS: Final = "the engine drains, or has not told its address"
FAILED: Final = "request %s is not answered early: %s"


@dataclass(eq=False)
class _Rank:
    """One data-parallel rank, which is an engine with an address of its own."""

    identity: bytes
    open: OpenAnswers
    address: Address | None = None
    told_at: float = -math.inf  # when the address was current, in monotonic seconds
    asking: asyncio.Future[None] | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether to ask for the address: no answer of the engine will tell another one soon."""
        is_old = not len(self.open) and time.monotonic() > self.told_at + CURRENT_S
        return self.address is None or is_old

    def set_address(self, address: Address | None) -> None:
        self.address, self.told_at = address, time.monotonic()


class _Exchange:
    """One request with a promise. vLLM puts the engine's own output into the collector."""

    def __init__(
        self,
        request: EngineCoreRequest,
        queue: RequestOutputCollector,
        on_answer: Callable[["_Exchange", Any], None],
    ) -> None:
        self.request_id = request.request_id
        self.nonce: Nonce = new_nonce()
        self.rank: _Rank | None = None  # once the front end has its answer
        self.has_ended = False  # in the engine
        self._put = queue.put
        self._on_answer = on_answer
        setattr(queue, "put", self._take)  # noqa: B010 - of one object

    def answer(self, answer: RequestOutput, rank: _Rank) -> None:
        self.rank = rank
        self._put(answer)

    def _take(self, answer: Any) -> None:
        self.has_ended |= isinstance(answer, Exception) or bool(answer.finished)
        if self.rank is None:
            self._put(answer)
        self._on_answer(self, answer)  # raises nothing: vLLM's output handler would end


class EarlyAnswers:
    """Those of one engine client. Everything runs on its event loop."""

    def __init__(self, client: AsyncLLM) -> None:
        log_like_vllm()
        # vLLM shuts a client down once nothing refers to it; its output handler must not.
        self._get_client = weakref.ref(client)
        config, _ = own_config(client.vllm_config)
        self._trust = Trust.of(config)
        self._for_in_tree = config.in_tree_decode
        self._media = MediaReader.of(client.vllm_config)
        self._seats: int = client.vllm_config.scheduler_config.max_num_seqs
        self._ranks: dict[bytes, _Rank] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio's own references are weak
        self._log = LimitedLog(logger, time.monotonic, lines=REQUEST_LINES)
        self._listen()

    async def add(
        self, add: Add, request: EngineCoreRequest, queue: RequestOutputCollector, *others: Any
    ) -> None:
        """Call vLLM's `add`, and answer the request if that is possible."""
        exchange = None
        try:
            exchange = self._promise(request, queue)
            if exchange is not None:
                await asyncio.sleep(0)  # lets the questions about addresses precede the request
        except Exception as error:  # noqa: BLE001 - the engine answers it
            self._log.warning(FAILED, shown_id(request.request_id), repr(error))
        await add(*others)
        if exchange is None:
            return
        try:
            await self._answer(exchange, request)
        except Exception as error:  # noqa: BLE001 - as above
            self._log.warning(FAILED, shown_id(request.request_id), repr(error))

    def _promise(
        self, request: EngineCoreRequest, queue: RequestOutputCollector
    ) -> _Exchange | None:
        """Promise the engine's offer a nonce; None if the engine must answer this request."""
        fields = _fields(request)
        if PROMISE in fields:
            _replace(request, {key: fields[key] for key in fields if key != PROMISE})
        if fields.get("do_remote_decode") is not True or self._is_late(request):
            return None
        if request.request_id in self._client.output_processor.request_states:
            return None  # a further part of a streamed input
        for identity in self._client.engine_core.core_engines:
            rank = self._rank(identity)
            if rank.is_outdated:
                rank.address = None
                self._begin_to_ask(rank)
        exchange = _Exchange(request, queue, self._on_answer)
        _replace(request, {**fields, PROMISE: self._seal(exchange)})
        return exchange

    def _seal(self, exchange: _Exchange) -> str:
        return seal_promise(exchange.nonce, self._trust.ticket_key)

    def _is_late(self, request: EngineCoreRequest) -> bool:
        """Whether the engine must answer: decode's answer lacks something, or the ticket would."""
        params = request.sampling_params
        if params is None or params.max_tokens != 1 or params.n != 1:
            return True
        if params.logprobs is not None or params.prompt_logprobs is not None:
            return True
        if request.resumable or request.abort_immediately:
            return True
        if request.prompt_embeds is not None:  # they take long to hash
            return True
        # The engine has the sizes of media that it has cached, on which positions depend.
        reader, features = self._media, request.mm_features or ()
        if reader is not None and reader.has_geometry and any(not one.data for one in features):
            return True
        return bool(why_unbounded(_fields(request)))

    async def _answer(self, exchange: _Exchange, request: EngineCoreRequest) -> None:
        rank = self._rank_of(exchange.request_id)
        if rank is None:
            return
        address = await self._address_of(rank)
        state = self._client.output_processor.request_states.get(exchange.request_id)
        if exchange.has_ended or state is None:
            return
        why = NO_ADDRESS if address is None else rank.open.why_late()
        if address is None or why:
            self._log.info(FAILED, shown_id(exchange.request_id), why, about=why)
            return
        answer = self._answer_with(
            self._ticket(request, state.prompt_len, exchange, address), state
        )
        rank.open.begin(exchange.request_id)
        exchange.answer(answer, rank)

    def _ticket(
        self, request: EngineCoreRequest, num_tokens: int, exchange: _Exchange, address: Address
    ) -> Ticket:
        prompt = prompt_of_client(request, num_tokens, self._media)
        context, media = prompt.hashes(exchange.nonce)
        return Ticket(
            **asdict(address),
            nonce=exchange.nonce,
            num_tokens=num_tokens,
            context=context,
            media=media,
            is_early=True,
        )

    def _answer_with(self, ticket: Ticket, state: RequestState) -> Any:
        """VLLM's own output of a request that has ended without a token."""
        params = self._trust.seal(ticket, for_in_tree=self._for_in_tree)
        # The engine has not counted them. Dynamo would tell its client of 0.
        cached: Any = state.num_cached_tokens
        uncounted: Any = None
        state.num_cached_tokens = uncounted
        try:
            answer: Any = state.make_request_output(
                [], None, FinishReason.LENGTH, None, kv_transfer_params=params
            )
        finally:
            state.num_cached_tokens = cached
        # vLLM's list is that of the request, which gets its token before the front end may look.
        answer.outputs[0].token_ids = []
        return answer

    # --- ranks

    @property
    def _client(self) -> Any:
        return self._get_client()

    @property
    def _has_balancer(self) -> bool:
        """Whether vLLM chooses one of several engines for each request."""
        return len(self._client.engine_core.core_engines) > 1

    def _rank_of(self, request_id: str) -> _Rank | None:
        """The engine that computes a request. None: it has ended already."""
        core = self._client.engine_core
        identity = core.reqs_in_flight.get(request_id) if self._has_balancer else core.core_engine
        return None if identity is None else self._rank(identity)

    def _rank(self, identity: bytes) -> _Rank:
        if identity not in self._ranks:
            self._ranks[identity] = _Rank(identity, OpenAnswers(self._seats, time.monotonic))
        return self._ranks[identity]

    async def _address_of(self, rank: _Rank) -> Address | None:
        if rank.address is None:
            await asyncio.wait({self._begin_to_ask(rank)}, timeout=ASK_S)
        return rank.address

    def _begin_to_ask(self, rank: _Rank) -> asyncio.Future[None]:
        if rank.asking is None:
            rank.asking = asyncio.ensure_future(self._ask(rank))
        return rank.asking

    async def _ask(self, rank: _Rank) -> None:
        try:
            core = self._client.engine_core
            found = await core._call_utility_async(ADDRESS, engine=rank.identity)  # noqa: SLF001 - no other names the rank
            rank.set_address(None if found is None else self._address_of_own(found))
        except Exception as error:  # noqa: BLE001 - requests are answered by the engine
            self._log.warning("the engine does not tell its address: %s", repr(error))
        finally:
            rank.asking = None

    def _address_of_own(self, found: dict[str, Any]) -> Address:
        """Raises TicketRefused if the engine has another key, as another machine may."""
        open_promise(found.pop(PROMISE), self._trust.ticket_key)
        return Address(**found)

    def _listen(self) -> None:
        """Hear of each step of the engine. A balancer's ranks are heard by their own answers."""
        processor, ranks = self._client.output_processor, self._ranks
        note = processor.update_scheduler_stats

        @functools.wraps(note)
        def note_and_hear(scheduler_stats: Any) -> None:
            note(scheduler_stats)
            for rank in ranks.values() if len(ranks) == 1 else ():
                rank.open.hear()

        processor.update_scheduler_stats = note_and_hear

    # --- the engine's own answers

    def _on_answer(self, exchange: _Exchange, answer: Any) -> None:
        try:
            if exchange.has_ended and exchange.rank is not None:
                self._note_end(exchange, exchange.rank, answer)
        except Exception as error:  # noqa: BLE001 - the top of ours in vLLM's output handler
            self._log.warning("an early answer's end was lost: %s", repr(error))

    def _note_end(self, exchange: _Exchange, rank: _Rank, answer: Any) -> None:
        if not rank.open.end(exchange.request_id):  # an earlier output has ended it
            return
        is_refused = isinstance(answer, Exception)  # as by a paused engine of vLLM 0.33
        ends = [] if is_refused else [one.finish_reason for one in answer.outputs]
        if is_refused or "error" in ends:
            rank.address = None
            self._withdraw(exchange, rank)
        if is_refused:
            return
        if "abort" not in ends:  # which a front end may have done itself
            rank.open.hear()
        if told := self._address_in(answer.kv_transfer_params):
            rank.set_address(told)
        else:  # it may drain, or decode has released the offer
            self._begin_to_ask(rank)

    def _address_in(self, params: Any) -> Address | None:
        if not isinstance(params, Mapping) or FIELD not in params:
            return None
        try:
            ticket = self._trust.open_own({FIELD: params[FIELD]})
        except TicketRefused as error:
            self._log.warning("cannot read this engine's ticket: %s", error)
            return None
        return Address(
            ticket.engine,
            ticket.incarnation,
            ticket.host,
            ticket.port,
            ticket.epoch,
            ticket.weights,
        )

    def _withdraw(self, exchange: _Exchange, rank: _Rank) -> None:
        """The request may never have come to the engine, and decode waits for it."""
        if self._client.errored:
            return
        ranks: list[bytes] = self._client.engine_core.core_engines
        if rank.identity not in ranks:
            return
        to = {"data_parallel_rank": ranks.index(rank.identity)}
        task = asyncio.ensure_future(
            self._client.notify_kv_transfer_request_rejected(
                f"early-{uuid.uuid4().hex}",
                {"do_remote_decode": True, PROMISE: self._seal(exchange)},
                **(to if self._has_balancer else {}),
            )
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def wrap_client(client_class: Any = AsyncLLM) -> None:
    """Make vLLM's engine client answer early. Wraps it once."""
    add = client_class._add_request  # noqa: SLF001 - no public place knows the rank
    if getattr(add, "answers_early", False):
        return

    @functools.wraps(add)
    async def add_request(
        self: Any, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any
    ) -> None:
        early = _early_of(self)
        given = (self, request, prompt, parent_req, index, queue)
        if early is None or parent_req is not None:
            await add(*given)
        else:
            await early.add(add, request, queue, *given)

    setattr(add_request, "answers_early", True)  # noqa: B010 - mypy knows no such attribute
    client_class._add_request = add_request  # noqa: SLF001 - as above


def _early_of(client: Any) -> EarlyAnswers | None:
    kept = vars(client)
    if "nixl_kv_early" not in kept:
        kept["nixl_kv_early"] = None
        try:
            if has_ours(client.vllm_config) and answers_early(client.vllm_config):
                kept["nixl_kv_early"] = EarlyAnswers(client)
        except Exception as error:  # noqa: BLE001 - the engine answers each request
            logger.warning("this API server answers no request early: %s", repr(error))
    early: EarlyAnswers | None = kept["nixl_kv_early"]
    return early


def _fields(request: EngineCoreRequest) -> Mapping[str, Any]:
    given = getattr(request.sampling_params, "extra_args", None) or {}
    fields = given.get(PARAMS)
    return fields if isinstance(fields, Mapping) else {}


def _replace(request: EngineCoreRequest, fields: Mapping[str, Any]) -> None:
    # A copy, because other requests may have the same object.
    changed: Any = copy(request.sampling_params)
    changed.extra_args = {**(changed.extra_args or {}), PARAMS: dict(fields)}
    request.sampling_params = changed
