"""The steps of vLLM's scheduler, around the real schedulers of the connector."""

import contextlib
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from msgspec import structs

from nixl_kv.connector.decode import DecodeScheduler
from nixl_kv.connector.paging import Paging, RequestBlocks
from nixl_kv.connector.prefill import PrefillScheduler
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import RemoteProtocolError
from nixl_kv.ids import EngineId, Nonce, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import Hint
from sim.cache import BLOCK_TOKENS
from sim.rank import Environment, Seat
from sim.repeatable import Violation
from sim.vllm import BlockManager, Forward, IssuedTicket, Request, Status

OTHERS: Final = RequestId("others")
CHUNK: Final = 6  # tokens of a prompt per step


@dataclass(eq=False)
class _Half:
    """The requests of one life of an engine that prefill, or that decode, and their blocks."""

    blocks: BlockManager
    seats: Sequence[Seat]
    admission: PrefillScheduler  # it hears of all requests, of both halves
    requests: dict[RequestId, Request] = field(default_factory=dict)

    def living(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.is_finished]

    def preempt(self, request: Request) -> None:
        """One that runs is computed again later."""
        if request.status is Status.RUNNING:
            self.blocks.free(request.request_id)
            request.status, request.num_computed_tokens = Status.PREEMPTED, 0
            request.local = 0

    def release(self, request: Request) -> None:
        self.blocks.free(request.request_id)
        del self.requests[request.request_id]


@dataclass
class _Step:
    scheduled: list[tuple[Request, int]] = field(default_factory=list)  # and how many tokens
    forwards: list[Forward] = field(default_factory=list)
    refused: list[Request] = field(default_factory=list)  # for lack of room, in order


@dataclass(eq=False)
class PrefillHalf(_Half):
    tickets: list[IssuedTicket] = field(default_factory=list)
    step: _Step = field(default_factory=_Step)

    def reset(self) -> None:
        """`PrefillScheduler.reset_cache`. New loads get no grants for older tickets."""
        address = self.admission.address
        if address is not None:
            self.admission.address = replace(address, epoch=address.epoch + 1)
        self.admission.reset_cache()

    def add(self, request: Request, pair: Nonce | None = None) -> None:
        self.requests[request.request_id] = request
        name, length = request.request_id, request.prompt.length
        self.admission.on_new_request(name, length, request.connector_prompt.hashes, pair)

    def schedule(self) -> list[Forward]:
        """A chunk of every prompt that has room."""
        self.step = step = _Step()
        for request in self.living():
            self._add_to(step, request)
        holding = [r for r in self.living() if self.blocks.table(r.request_id)]
        is_stuck = not step.scheduled and bool(holding)
        if is_stuck and not self.admission.has_pending_block_frees():
            self.preempt(holding[-1])  # others need its blocks, or it waits for all that it needs
        for request, count in step.scheduled:
            request.num_computed_tokens += count
        return step.forwards

    def pop_commands(self) -> list[events.Command]:
        return self.admission.build_connector_meta(
            (r.request_id, range(r.num_computed_tokens - count, r.num_computed_tokens))
            for r, count in self.step.scheduled
        )

    def update(self) -> None:
        """A request that has its whole answer ends; routers ask for one token."""
        for request, _ in self.step.scheduled:
            if not request.is_finished and request.num_computed_tokens == _end(request):
                self.finish(request, Status.FINISHED_LENGTH_CAPPED)
        self.step = _Step()

    def finish(self, request: Request, status: Status) -> None:
        """Its blocks stay if its ticket goes out."""
        request.status = status
        is_complete = status is Status.FINISHED_LENGTH_CAPPED
        keep, params = self.admission.request_finished(
            request.request_id,
            self.blocks.get_block_ids(request.request_id),
            reason="" if is_complete else f"it ended as {status.name}",
        )
        if not keep:
            self.release(request)
        elif params is None:
            raise Violation("no ticket", request.request_id)
        elif not request.is_early:
            self.tickets.append(IssuedTicket(params, request.prompt, self.seats[0].process.name))

    def expects_end(self, request: Request) -> bool:
        return request.is_finished

    def on_ends(self, requests: Iterable[RequestId], failed: set[RequestId]) -> None:
        """Blocks of offers that ended are free."""
        del failed
        ended = list(requests)
        self.admission.update_connector_output(ended)
        for request in ended:
            self.release(self.requests[request])

    def _add_to(self, step: _Step, request: Request) -> None:
        computed = request.num_computed_tokens
        count = min(CHUNK, _end(request) - computed)
        begins = request.status is not Status.RUNNING
        if begins and not self.admission.may_begin(request.request_id, request.prompt.length):
            step.refused.append(request)
            return
        if begins and not self.blocks.fits(_end(request)):
            return
        if not self.blocks.allocate(request.request_id, computed, computed + count):
            return
        if begins:
            request.status = Status.RUNNING
            self.admission.update_state_after_alloc(request.request_id)
            if step.refused:  # it would wait for ever if this went on
                overtaken = step.refused[0].request_id
                raise Violation("overtaken", f"{overtaken}, by {request.request_id}")
        step.scheduled.append((request, count))
        self.blocks.fill(request.request_id, request.prompt, computed + count)
        table = self.blocks.table(request.request_id)
        tokens = range(computed, min(computed + count, request.prompt.length))
        step.forwards.append(Forward(request.prompt, table, tokens))


def _end(request: Request) -> int:
    """All tokens but the answer's last are computed."""
    return request.prompt.length + request.steps_left - 1


@dataclass(eq=False)
class DecodeHalf(_Half):
    connector: DecodeScheduler = field(kw_only=True)
    received: set[RequestId] = field(default_factory=set)
    void: set[RequestId] = field(default_factory=set)  # under way when the cache was reset
    failed: set[RequestId] = field(default_factory=set)
    running: list[Request] = field(default_factory=list)

    def add(self, request: Request, found: bytes = b"") -> None:
        """`found`: what another engine has of it; see `events.PrepareLoad`."""
        self.requests[request.request_id] = request
        with contextlib.suppress(RemoteProtocolError):
            self.connector.on_new_request(request.connector_prompt, request.kv_transfer_params)
        commands = self.connector._commands
        for place, command in enumerate(commands if found else ()):
            if isinstance(command, events.PrepareLoad) and command.request == request.request_id:
                commands[place] = structs.replace(command, found=found)

    def schedule(self) -> list[Forward]:
        """Continue running requests, park loads, and start requests that have room."""
        self.running, forwards = [], []
        for request in self.living():
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._unpark(request)
            if request.status in (Status.WAITING, Status.PREEMPTED):
                self._admit(request)
            if request.status is Status.RUNNING:
                forwards.append(self._run(request))
        return forwards

    def reset(self) -> None:
        """`DecodeScheduler.reset_cache`. No earlier load may end well, and none may begin."""
        parked = {r.request_id for r in self.living() if r.status is Status.WAITING_FOR_REMOTE_KVS}
        self.void |= parked - self.received
        self.connector.reset_cache()
        for request in self.living():
            name = request.request_id
            if self.connector.get_num_new_matched_tokens(name, 0) != (0, False):
                raise Violation("KV from before a reset", f"{name} would still be loaded")

    def pop_commands(self) -> list[events.Command]:
        return self.connector.build_connector_meta()

    def update(self) -> None:
        for request in self.running:
            request.steps_left -= 1
            if request.steps_left <= 0 and not request.is_finished:
                self._check(request, request.prompt.length)
                self.finish(request, Status.FINISHED_LENGTH_CAPPED)

    def finish(self, request: Request, status: Status) -> None:
        """The blocks of a load stay until it ends."""
        name = request.request_id
        is_loading = request.status is Status.WAITING_FOR_REMOTE_KVS and name not in self.received
        for loads in (self.received, self.failed, self.void):
            loads.discard(name)
        request.status = status
        self.connector.request_finished(name)
        if not is_loading:
            self.release(request)

    def expects_end(self, request: Request) -> bool:
        return request.is_finished or request.status is Status.WAITING_FOR_REMOTE_KVS

    def on_ends(self, requests: Iterable[RequestId], failed: set[RequestId]) -> None:
        """Unpark requests. Loads that were held back are reported again, as failed."""
        again = self.connector.pop_held_back()
        held_back = self.connector.update_connector_output(requests, failed)
        for name in [*again, *(name for name in requests if name not in held_back)]:
            request, failed = self.requests[name], failed | set(again)
            if name in self.void and name not in failed:
                raise Violation("KV from before a reset", f"{name} counts as loaded")
            self.void.discard(name)
            if request.is_finished:
                self.release(request)
                continue
            if request.status is not Status.WAITING_FOR_REMOTE_KVS or name in self.received:
                raise Violation("ended twice", name)
            self.received.add(name)
            if name in failed:
                self.failed.add(name)
                request.num_computed_tokens = 0

    def end_landed(self, hints: Iterable[Hint]) -> None:
        """Unpark requests whose loads have landed on all ranks; before a step."""
        engine = EngineId(self.seats[0].process.name)
        for name in self.connector.take_landed(hints, engine, len(self.seats)):
            if self.requests[name].status is not Status.WAITING_FOR_REMOTE_KVS:
                raise Violation("unexpected end", f"{name}, which does not load")
            if name in self.void:
                raise Violation("KV from before a reset", f"{name} counts as loaded")
            self.received.add(name)

    @property
    def has_good_loads(self) -> bool:
        """Whether requests are parked whose load was reported, and is good."""
        return self.received > self.failed

    def _unpark(self, request: Request) -> None:
        name = request.request_id
        if name not in self.received:
            return
        self.received.remove(name)
        request.status = Status.WAITING
        if name in self.failed:
            self.failed.remove(name)
            self.blocks.free(name)
            request.local = 0
        else:
            self._check(request, request.num_computed_tokens)
            self.blocks.fill(name, request.prompt, request.num_computed_tokens)

    def _admit(self, request: Request) -> None:
        name, load, parks = request.request_id, 0, False
        if request.num_computed_tokens == 0:
            self.admission.may_begin(request.request_id, request.prompt.length)
            matched, parks = self.connector.get_num_new_matched_tokens(name, request.local)
            if matched is None:
                return  # it waits without blocks
            load = matched
        computed = max(request.num_computed_tokens, request.local) + load
        wanted = computed if parks else request.prompt.length + 1
        is_first = not self.blocks.table(name)
        if not self.blocks.allocate(name, computed, wanted):
            if not self.running:  # give up its loaded blocks rather than wait
                self.blocks.free(name)
                request.num_computed_tokens = request.local = 0
            return
        table = self.blocks.table(name)
        if is_first and request.local:  # what its own cache has of it
            for cache in [seat.cache for seat in self.seats]:
                cache.write(request.prompt, table, range(request.local))
        self.admission.update_state_after_alloc(request.request_id)
        self.connector.update_state_after_alloc(name, [table], load)
        request.num_computed_tokens = computed
        request.status = Status.WAITING_FOR_REMOTE_KVS if parks else Status.RUNNING

    def _run(self, request: Request) -> Forward:
        self.running.append(request)
        tokens = range(request.num_computed_tokens, request.prompt.length)
        request.num_computed_tokens = request.prompt.length
        self.blocks.fill(request.request_id, request.prompt, request.prompt.length)
        return Forward(request.prompt, self.blocks.table(request.request_id), tokens)

    def _check(self, request: Request, num_tokens: int) -> None:
        """Every token that vLLM counts as computed has its own bytes."""
        table = self.blocks.table(request.request_id)
        for rank, cache in enumerate(seat.cache for seat in self.seats):
            wrong = cache.wrong_tokens(request.prompt, table, range(num_tokens))
            if wrong:
                detail = f"{request.request_id}, rank {rank}: tokens {wrong}"
                raise Violation("wrong bytes", detail)


class EngineScheduler:
    """The scheduler of one life of an engine: one half, or both, on the same blocks."""

    def __init__(
        self, seats: Sequence[Seat], blocks: BlockManager, environment: Environment
    ) -> None:
        self.blocks = blocks
        config, clock = environment.config, environment.clock
        pagings = [Paging(0, BLOCK_TOKENS, blocks.window)]
        trust = Trust.of(config)
        decode = DecodeScheduler(
            pagings,
            trust.check,
            verify=config.verify,
            clock=clock,
            draw=Random(0).random,  # noqa: S311 - not a secret
        )
        prefill = PrefillScheduler(
            RequestBlocks(pagings, seats[0].cache.num_blocks, blocks),
            config.offer_share,
            trust.seal,
            writes_late=environment.writes_late,
            in_parts=True,
            is_decoding=lambda: decode.is_in_use,
            clock=clock,
        )
        self.prefill = PrefillHalf(blocks, seats, prefill)
        self.decode = DecodeHalf(blocks, seats, prefill, connector=decode)
        self._halves = (self.prefill, self.decode)
        blocks.on_free = prefill.on_free

    def __repr__(self) -> str:
        return ", ".join(f"{r.request_id} {r.status.name}" for r in self.requests.values())

    @property
    def requests(self) -> Mapping[RequestId, Request]:
        return ChainMap(self.prefill.requests, self.decode.requests)

    def living(self) -> list[Request]:
        return [request for half in self._halves for request in half.living()]

    def schedule(self) -> tuple[list[events.Command], list[Forward]]:
        """Begin a step: its commands, prefill's first, and its forwards."""
        forwards = [forward for half in self._halves for forward in half.schedule()]
        return [command for half in self._halves for command in half.pop_commands()], forwards

    def update(self) -> None:
        for half in self._halves:
            half.update()

    def expects_end(self, request: RequestId) -> bool:
        known = self.requests.get(request)
        if self.decode.connector.is_told(request):
            return True
        return known is not None and self._half_of(known).expects_end(known)

    def on_ends(self, requests: Iterable[RequestId], failed: set[RequestId]) -> None:
        requests = set(requests)
        requests -= self.decode.connector.pop_told(requests)
        if not requests <= self.requests.keys():
            raise Violation("unexpected report", f"{sorted(requests - self.requests.keys())}")
        for half in self._halves:
            half.on_ends([each for each in sorted(requests) if each in half.requests], failed)

    def abort(self, request: Request) -> None:
        self._half_of(request).finish(request, Status.FINISHED_ABORTED)

    def preempt(self, request: Request) -> None:
        self._half_of(request).preempt(request)

    def reset(self) -> None:
        """vLLM's `reset_prefix_cache` of the connector, without a pause: requests go on."""
        self.prefill.reset()
        self.decode.reset()

    def is_offer(self, request: Request) -> bool:
        return self._half_of(request) is self.prefill and request.is_finished

    def is_load(self, request: Request) -> bool:
        is_parked = request.status is Status.WAITING_FOR_REMOTE_KVS
        return self._half_of(request) is self.decode and (request.is_finished or is_parked)

    def occupy(self) -> None:
        held = len(self.blocks.table(OTHERS))
        wanted = BLOCK_TOKENS * (held + len(self.blocks.block_pool.free))
        self.blocks.allocate(OTHERS, 0, wanted)

    def vacate(self) -> None:
        self.blocks.free(OTHERS)

    def _half_of(self, request: Request) -> PrefillHalf | DecodeHalf:
        return next(half for half in self._halves if request.request_id in half.requests)
