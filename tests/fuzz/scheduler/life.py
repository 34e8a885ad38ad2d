"""A random life of an engine: requests come and go, and vLLM does all that it may do to them.

The model of the workers executes a step when it is scheduled, as a GPU's stream would: steps in
order, each behind those before. Loads land, and offers are read, when a step ends.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    KVConnectorOutput,
    ModelRunnerOutput,
)
from vllm.v1.request import Request, RequestStatus

from fuzz.scheduler.engine import LONGEST, Configuration, Engine
from fuzz.scheduler.memory import JUNK, Memory, entries_of, hashes
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import HintKey, RequestId
from nixl_kv.protocol import events
from support.records import landed
from support.vllm_scheduler import BLOCK, WANT_TICKET, make_request, num_free_blocks

STEP_S: Final = 0.1  # how much time passes for the connector in a step
NUM_STEPS: Final = 120  # after which no request arrives
MAX_MORE_STEPS: Final = 600  # after which all requests and offers must have ended
MAX_REQUESTS: Final = 10
SHARED: Final = 64  # tokens of two prompts, of which another connector loads the first ones
ROOM: Final = 172  # tokens of a request with its answer; the smallest cache has room for one
ANSWER: Final = 7  # every token of every answer, so that those of steps under way are known
MAX_OVERTAKEN: Final = 3
"""How many prefills may begin before one that came earlier and is as urgent.

One may pass where vLLM 0.33 aligns chunks for Mamba: what does not fit into a step is skipped.
"""


Draw: TypeAlias = Callable[[random.Random], Configuration]


class BrokenPromiseError(Exception):
    """The message says which promise and how."""


@dataclass
class _Offer:
    """A published offer, as the workers see it."""

    command: events.PrepareOffer
    is_claimed: bool = False
    is_revoked: bool = False


@dataclass(frozen=True)
class _Write:
    """The writes of a request in a step, by its block tables in that step."""

    request: Request
    tables: tuple[list[int], ...]
    tokens: range
    num_rejected: int  # of these tokens, the last ones: drafts


@dataclass(frozen=True)
class _Step:
    output: SchedulerOutput
    sampled: list[int]  # of each request, how many tokens it gets
    writes: list[_Write]
    landed: dict[str, bool]  # loads that had ended before it began, and whether they are good
    invalid: set[int]  # blocks that the other connector could not load within it


class Life:
    """`plant` puts a bug into it before it begins."""

    def __init__(
        self,
        seed: int,
        draw: Draw = Configuration.drawn,
        plant: Callable[["Life"], None] = lambda _: None,
    ) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - it guards no secret
        self.configuration = draw(self._rng)
        self.counts: Counter[str] = Counter()
        self._engine = Engine(self.configuration)
        self._vllm = self._engine.vllm
        self._groups = self.configuration.groups
        self._memory = Memory(self._groups)
        self._idle = num_free_blocks(self._vllm)
        self._steps: deque[_Step] = deque()  # under way
        self._max_steps = 2 if self.configuration.is_async else 1
        self._requests: dict[str, Request] = {}
        self._prepared: dict[str, events.PrepareOffer] = {}  # by nonce
        self._offers: dict[str, _Offer] = {}
        self._readable: dict[str, events.PrepareOffer] = {}  # parts, as of the latest step
        self._early: list[RequestId] = []  # loads that wait until prefill computes
        self._saves: dict[str, None] = {}
        self._on_stale_blocks: set[str] = set()  # requests whose KV vLLM itself has spoiled
        self._loads: dict[str, events.StartLoad] = {}
        self._hint_keys: dict[str, HintKey] = {}
        self._landed: dict[str, bool] = {}  # since the latest step has begun
        self._waiting: dict[str, int] = {}  # prefills to be offered: by how many overtaken
        self._pause_left = 0  # steps
        self._weights = 0  # how often a trainer has replaced them, on this engine and on prefill
        self._ticket_weights: dict[str, int] = {}  # by request
        plant(self)

    def run(self) -> None:
        """All of it."""
        try:
            for _ in range(NUM_STEPS):
                self._disturb()
                self._turn()
            self._end_calmly()
            self._check_idle()
        finally:
            self._engine.close()

    # --- what happens

    def _happens(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _disturb(self) -> None:
        if self._happens(0.4) and len(self._vllm.requests) < MAX_REQUESTS:
            self._arrive()
        if self.configuration.tier_loads and self._happens(0.3):
            self._arrive_beside_a_load()
        if self._happens(0.1):
            self._go_on_with_session()
        if self._happens(0.02):
            self._abort()
        if self._happens(0.015):
            self._reset(reset_running_requests=self._happens(0.7))
        if self._pause_left:
            self._pause_left -= 1
            if not self._pause_left:
                self._vllm.set_pause_state(PauseState.UNPAUSED)
        elif self._happens(0.015):
            self._pause()

    def _turn(self) -> None:
        """One round of the loop of vLLM's engine core."""
        self._engine.now += STEP_S
        if self._vllm.has_requests():
            self._schedule()
        while len(self._steps) >= self._max_steps or (
            self._steps and not self._vllm.has_requests()
        ):
            self._end_step()

    def _prompt(self) -> list[int]:
        length = self._rng.randint(self.configuration.shortest, self.configuration.longest)
        shared = min(length, self._rng.choice([0, 16, 32, 64, 96]))
        first, other = self._rng.choice([0, 1000]), self._rng.randint(0, 3) * 7000 + 300_000
        return [first + n for n in range(shared)] + [other + n for n in range(length - shared)]

    def _arrive_beside_a_load(self) -> None:
        """Two prompts with one beginning, which the other connector loads for the first.

        Both run in one step, which vLLM discards if that load fails.
        """
        first = 1_000_000 * (1 + self.counts["arrived"])
        shared = [first + n for n in range(SHARED)]
        others = range(first + 1000, first + 1000 + LONGEST - SHARED)
        self._arrive([*shared, *others[:16]])
        self._arrive([*shared, *others[32:]], is_early=True)

    def _arrive(self, tokens: list[int] | None = None, *, is_early: bool = False) -> None:
        self.counts["arrived"] += 1
        tokens = tokens or self._prompt()
        name, kind, params = f"r{self.counts['arrived']}", self._rng.random(), None
        if is_early:
            kind = 0.0
        is_early |= self._happens(self.configuration.pair_share)
        if kind < 0.4:
            params = dict(WANT_TICKET)
            if is_early:
                params |= self._engine.promise()
        elif kind < 0.8:
            params = self._engine.ticket(tokens, is_early=is_early)
            self._ticket_weights[name] = self._weights
        is_short = kind < 0.4 and self._happens(0.6)  # routers ask prefill for one token
        longest = self._rng.choice([4, 12, self.configuration.longest_answer])
        request = make_request(
            name,
            tokens,
            params,
            arrival_time=self._engine.now,
            max_tokens=1 if is_short else self._rng.randint(1, min(longest, ROOM - len(tokens))),
            priority=self._rng.randint(0, 2),
            # With drafts, vLLM may count tokens of a session's next part as computed.
            resumable=not self.configuration.num_drafts and self._happens(0.1),
        )
        self._requests[name] = request
        self._vllm.add_request(request)
        if name in self._engine.role._prefill.awaited:
            self._waiting[name] = 0

    def _go_on_with_session(self) -> None:
        """The next part of one comes, or its end."""
        open_sessions = [r for r in self._vllm.requests.values() if r.resumable]
        living = [r for r in open_sessions if not r.is_finished() and None not in r.streaming_queue]
        if not living:
            return
        request = self._rng.choice(living)
        queued = sum(len(update.prompt_token_ids) for update in request.streaming_queue)
        answers = request.max_tokens + sum(update.max_tokens for update in request.streaming_queue)
        room = ROOM - 12 - request.num_prompt_tokens - queued - answers
        if room > 1 and self._happens(0.6):
            tokens = [500_000 + n for n in range(self._rng.randint(1, min(room, 40)))]
            self._continue(request, tokens, max_tokens=self._rng.randint(1, 12), resumable=True)
            self.counts["sessions went on"] += 1
        else:
            self._continue(request, [1])

    def _continue(self, session: Request, tokens: list[int], **more: Any) -> None:
        """With a part after which no other comes, unless it is `resumable`."""
        name, now = session.request_id, self._engine.now
        self._vllm.add_request(make_request(name, tokens, arrival_time=now, **more))

    def _abort(self) -> None:
        """Any request, also one that has ended and is on offer."""
        if self._vllm.requests:
            name = self._rng.choice(list(self._vllm.requests))
            self._vllm.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            self.counts["aborted"] += 1

    def _pause(self) -> None:
        """Do as `pause_generation`: `keep` runs nothing, `wait` nothing new, `abort` ends all."""
        mode = self._rng.choice(["keep", "keep", "wait", "abort"])
        self.counts[f"paused ({mode})"] += 1
        if mode == "abort":
            self._vllm.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        is_keep = mode == "keep"
        self._vllm.set_pause_state(PauseState.PAUSED_ALL if is_keep else PauseState.PAUSED_NEW)
        self._pause_left = self._rng.randint(1, 20)
        if is_keep:
            while self._steps:
                self._end_step()
            self._reset(reset_running_requests=True)

    def _reset(self, *, reset_running_requests: bool) -> None:
        """Reset the prefix cache. It fails only while loads or offers hold blocks.

        If the connector is reset too, a trainer may replace the weights of all engines. Requests
        that wait for KV of the former weights are computed with the new ones.
        """
        with_connector = self._happens(0.5)
        try:
            is_reset = self._vllm.reset_prefix_cache(reset_running_requests, with_connector)
        except RuntimeError:
            is_reset = False
            self._check_holders()
        self.counts["reset" if is_reset else "not reset"] += 1
        if is_reset and with_connector and not self._steps:
            self._weights += 1
            self.counts["weights replaced"] += 1

    # --- a step

    def _schedule(self) -> None:
        if self._engine.role.takes_hints:
            self._land_between_steps()
        output = self._vllm.schedule()
        self._check_counts()
        self._engine.role._prefill.check()
        waits = self._engine.role._prefill._short_since is not None
        self.counts["steps that wait for offers"] += waits
        sampled, writes = [], []
        for name, count in output.num_scheduled_tokens.items():
            request = self._vllm.requests[name]
            num_drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            num_rejected = self._rng.randint(0, num_drafts) if num_drafts else 0
            is_whole = not request.is_prefill_chunk
            sampled.append(is_whole * (1 + num_drafts - num_rejected))
            begin = request.num_computed_tokens - count
            tokens = range(begin, request.num_computed_tokens)
            writes.append(_Write(request, self._engine.tables(name), tokens, num_rejected))
        self._note_begun(output)
        for command in self._engine.metadata(output).commands:
            self._do(command)
            if isinstance(command, events.PrepareLoad):
                self._hint_keys[command.request] = command.hint_key
        self._saves.update(dict.fromkeys(self._engine.saves(output)))
        invalid = self._load_tier(output)
        self._steps.append(_Step(output, sampled, writes, self._landed, invalid))
        self._landed = {}
        for write in writes:
            self._execute(write, invalid)
        self._read_parts()
        for request in [each for each in self._early if self._happens(0.3)]:
            self._early.remove(request)
            self._engine.role._decode.on_ready([request])

    def _check_counts(self) -> None:
        """VLLM counts each request that it has, also one that waits outside its queue."""
        living = {name for name, each in self._vllm.requests.items() if not each.is_finished()}
        counted = sum(self._vllm.get_request_counts())
        self._check(counted == len(living), f"vLLM counts {counted} of {len(living)} requests")
        aside = self._engine.role.aside & living
        queued = {each.request_id for each in self._vllm.waiting}
        self._check(not aside & queued, f"vLLM looks at {aside & queued} in each step")
        self.counts["steps with requests aside"] += bool(aside)

    def _read_parts(self) -> None:
        """Decode may read the KV that a step has computed, until the step that withdraws it.

        Other early offers have no fence slot yet: decode reads them once they are published.
        """
        self._readable = {nonce: each for nonce, each in self._prepared.items() if each.in_parts}
        for offer in self._readable.values():
            request = self._requests[offer.request]
            if offer.computed is not None and not request.is_finished():
                self.counts["parts read"] += 1
                entries = entries_of(offer.tables[0], self._groups[0])
                tokens, kv = range(offer.computed), self._hashes(request)
                wrong = self._memory.wrong(0, entries, tokens, kv)
                is_right = wrong is None or offer.request in self._on_stale_blocks
                self._check(is_right, f"decode reads a part of {offer.request}: {wrong}")

    def _readable_blocks(self, other: str) -> set[int]:
        """The blocks that decode may read, of parts and of published offers.

        Leaves out those of the request `other`, and of requests whose KV vLLM itself has spoiled.
        """
        published = [offer.command for offer in self._offers.values()]
        return {
            block
            for offer in (*self._readable.values(), *published)
            if offer.request != other and offer.request not in self._on_stale_blocks
            for block in self._blocks_of(offer.tables)
        }

    def _note_begun(self, output: SchedulerOutput) -> None:
        """Prefills begin in order, unless one cannot."""
        # After a reset, a request with a pair ticket is not offered, and need not wait any longer.
        awaited = self._engine.role._prefill.awaited
        for name in self._waiting.keys() - awaited:
            del self._waiting[name]
        for name in output.num_scheduled_tokens:
            if name not in self._waiting:
                continue
            del self._waiting[name]
            for other in self._waiting:
                if self._turn_of(other) < self._turn_of(name):
                    self._waiting[other] += 1
                    most = max(self.counts["most overtaken"], self._waiting[other])
                    self.counts["most overtaken"] = most
                    self._check(most <= MAX_OVERTAKEN, f"{other} was overtaken {most} times")

    def _turn_of(self, name: str) -> tuple[int, int]:
        priority = self._requests[name].priority if self.configuration.policy == "priority" else 0
        return priority, int(name[1:])

    def _do(self, command: events.Command) -> None:
        match command:
            case events.PrepareOffer():
                is_first = command.computed is not None and command.nonce not in self._prepared
                self._prepared[command.nonce] = command
                self.counts["prompts offered in parts"] += is_first
                self.counts["parts offered"] += command.computed is not None
            case events.WithdrawOffer():
                self._prepared.pop(command.nonce, None)
                self._readable.pop(command.nonce, None)
                self.counts["pairs preempted"] += not command.is_final
            case events.PrepareLoad() if command.ticket.is_early:
                self._early.append(command.request)
            case events.PublishOffer():
                self.counts["offered"] += 1
                self._check(command.nonce in self._prepared, f"{command} was not prepared")
                self._offers[command.request] = _Offer(self._prepared.pop(command.nonce))
            case events.RevokeOffer():
                for offer in self._offers.values():
                    offer.is_revoked |= offer.command.nonce == command.nonce
            case events.ReclaimBlocks() | events.RevokeAll():
                for offer in self._offers.values():
                    offer.is_revoked = True
            case events.StartLoad():
                self._start_load(command)

    def _start_load(self, command: events.StartLoad) -> None:
        self.counts["loads"] += 1
        self._check(command.request not in self._loads, f"{command.request} loads twice")
        targets = self._blocks_of(command.tables)
        self._check(
            not targets & self._readable_blocks(command.request),
            f"{command.request} loads into blocks that decode may read",
        )
        for step in self._steps:
            for write in step.writes:
                self._check(
                    not targets & self._written(write),
                    f"{command.request} loads into blocks that a step under way writes",
                )
        self._loads[command.request] = command

    def _blocks_of(self, tables: Iterable[Table]) -> set[int]:
        pairs = zip(tables, self._groups, strict=True)
        return {block for table, group in pairs for block in entries_of(table, group).values()}

    def _written(self, write: _Write) -> set[int]:
        blocks: set[int] = set()
        for group, table in zip(self._groups, write.tables, strict=True):
            first = write.tokens.start if not group.is_state else write.tokens.stop - 1
            size = group.block_size
            blocks.update(table[first // size : (write.tokens.stop - 1) // size + 1])
        return blocks - {0}

    def _load_tier(self, output: SchedulerOutput) -> set[int]:
        """The other connector's loads of a step, before it computes; the blocks that it lacks."""
        invalid = set[int]()
        for name, tokens in self._engine.tier_loads(output).items():
            entries = dict(enumerate(self._engine.tables(name)[0]))
            is_good = self._happens(0.5)
            first, end = tokens.start // BLOCK, -(-tokens.stop // BLOCK)
            targets = {entries[number] for number in range(first, end)}
            self._check(
                not targets & self._readable_blocks(name),
                f"the other connector loads {name} into blocks that decode may read",
            )
            kv = self._hashes(self._requests[name]) if is_good else [JUNK] * tokens.stop
            self._memory.write(0, entries, tokens, kv)
            self.counts["loads within steps"] += 1
            if not is_good:
                self.counts["steps discarded"] += 1
                invalid |= targets
        return invalid

    def _execute(self, write: _Write, invalid: Collection[int]) -> None:
        """Attention reads all tokens before those that are computed, or those of its window."""
        request, tokens = write.request, write.tokens
        kv = self._hashes(request)
        kv[tokens.stop - write.num_rejected : tokens.stop] = [JUNK] * write.num_rejected
        if not set(write.tables[0][: -(-tokens.start // BLOCK)]).isdisjoint(invalid):
            kv = [JUNK] * len(kv)  # vLLM discards this
        written = self._written(write)
        readable = written & self._readable_blocks(request.request_id)
        before_step = {block: self._memory.content(block) for block in readable}
        for load in self._loads.values():
            is_apart = not written & self._blocks_of(load.tables)
            self._check(is_apart, f"a step writes what {load.request} loads")
        for number, group in enumerate(self._groups):
            entries = dict(enumerate(write.tables[number]))
            first = max(0, tokens.start - group.window + 1) if group.window else 0
            if tokens.start and kv[0] != JUNK:
                before = range(first, tokens.start)
                wrong = self._memory.wrong(number, entries, before, kv)
                if wrong is not None and self._is_vllm_at_fault:
                    self._on_stale_blocks.add(request.request_id)
                    kv, wrong = [JUNK] * len(kv), None
                self._check(wrong is None, f"{request.request_id} computes on: {wrong}")
            self._memory.write(number, entries, tokens, kv)
        # If another connector's load fails, vLLM may compute shared blocks again in place.
        changed = {b for b, content in before_step.items() if self._memory.content(b) != content}
        self._check(
            not changed, f"{request.request_id} changes blocks that decode may read: {changed}"
        )

    @property
    def _is_vllm_at_fault(self) -> bool:
        """Whether its prefix cache may have a wrong block: docs/upstream/vllm-discarded-step.md."""
        return self.counts["steps discarded"] > 0

    def _hashes(self, request: Request) -> list[int]:
        return hashes([*request.all_token_ids, *[ANSWER] * BLOCK], self._weights)

    def _end_step(self) -> None:
        step = self._steps.popleft()
        reports = self._reports(self._engine.metadata(step.output).failed, step.landed)
        if step.invalid:
            reports["invalid_block_ids"] = step.invalid
        if self._happens(0.06):
            self._abort()
        ids = list(step.output.num_scheduled_tokens)
        result = EMPTY_MODEL_RUNNER_OUTPUT
        if ids or reports:
            result = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: index for index, name in enumerate(ids)},
                sampled_token_ids=[[ANSWER] * count for count in step.sampled],
                kv_connector_output=KVConnectorOutput(**reports) if reports else None,
            )
        for outputs in self._vllm.update_from_output(step.output, result).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self.counts[f"ended ({each.finish_reason})"] += 1
        if self.configuration.num_drafts:
            names = [each.request_id for each in self._vllm.running if not each.is_prefill_chunk]
            drafts = [[ANSWER] * self.configuration.num_drafts for _ in names]
            self._vllm.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _land_between_steps(self) -> None:
        for name in [name for name in self._loads if self._happens(0.4)]:
            self._landed[name] = self._land(self._loads.pop(name))
            if self._landed[name]:
                self.counts["loads told between steps"] += 1
                hint_key = self._hint_keys[name]
                self._engine.tell(landed(hint_key=hint_key, reader=self._engine.teller))

    def _reports(self, held_back: Collection[str], ended: Mapping[str, bool]) -> dict[str, Any]:
        """The workers' reports with a step, which told them to fail the loads `held_back`."""
        received = {*held_back, *ended}
        failed = {*held_back, *(name for name, is_good in ended.items() if not is_good)}
        self.counts["loads held back"] += len(held_back)
        for name in [name for name in self._loads if self._happens(0.4)]:
            received.add(name)
            if not self._land(self._loads.pop(name)):
                failed.add(name)
        sent = set()
        for name in dict.fromkeys([*self._offers, *self._saves]):
            if self._has_ended(name):
                sent.add(name)
        granted = {name for name, offer in self._offers.items() if offer.is_claimed}
        reports = {
            "finished_recving": received,
            "failed_recving": failed,
            "finished_sending": sent,
            "kv_connector_worker_meta": self._engine.granted(granted) if granted else None,
        }
        return {key: each for key, each in reports.items() if each}

    def _land(self, load: events.StartLoad) -> bool:
        """Whether it is good; else any bytes are in its blocks."""
        is_good = self._happens(0.75)
        self.counts["loads failed"] += not is_good
        prompt = self._requests[load.request].prompt_token_ids
        weights = self._ticket_weights[load.request]
        kv = hashes(prompt, weights) if is_good else [JUNK] * load.end
        for number, group in enumerate(self._groups):
            entries = entries_of(load.tables[number], group)
            self._memory.write(number, entries, range(load.begin, load.end), kv)
        return is_good

    def _has_ended(self, name: str) -> bool:
        """Whether nothing is to be done with a finished request's blocks any longer."""
        if self._happens(0.4):
            self._saves.pop(name, None)
        offer = self._offers.get(name)
        if offer is not None:
            if offer.is_claimed and self._happens(0.4):
                self._read(offer.command)
                del self._offers[name]
            elif not offer.is_claimed and (offer.is_revoked or self._happens(0.03)):
                del self._offers[name]  # it has expired
            else:
                offer.is_claimed |= self._happens(0.3)
        return name not in self._offers and name not in self._saves

    def _read(self, offer: events.PrepareOffer) -> None:
        """Decode reads all of a prompt, or its window."""
        self.counts["offers read"] += 1
        kv = self._hashes(self._requests[offer.request])
        for number, group in enumerate(self._groups):
            first = max(0, offer.num_tokens - group.window) if group.window else 0
            tokens = range(first, offer.num_tokens)
            entries = entries_of(offer.tables[number], group)
            wrong = self._memory.wrong(number, entries, tokens, kv)
            is_right = wrong is None or offer.request in self._on_stale_blocks
            self._check(is_right, f"decode reads {offer.request}: {wrong}")

    # --- the end, and what must hold

    def _check(self, holds: bool, promise: str) -> None:  # noqa: FBT001 - as an assert
        if not holds:
            raise BrokenPromiseError(promise)

    def _end_calmly(self) -> None:
        self._vllm.set_pause_state(PauseState.UNPAUSED)
        for request in list(self._vllm.requests.values()):
            if request.resumable and None not in request.streaming_queue:
                self._continue(request, [1])
        for _ in range(MAX_MORE_STEPS):
            if not self._vllm.has_requests() and not self._steps:
                return
            self._turn()
        states = {name: request.status.name for name, request in self._vllm.requests.items()}
        raise BrokenPromiseError(f"after {MAX_MORE_STEPS} steps there are {states}")

    def _check_holders(self) -> None:
        """Blocks are in use by vLLM's requests, by steps under way, and by offers alone."""
        manager = self._vllm.kv_cache_manager
        in_use = {block.block_id for block in manager.block_pool.blocks if block.ref_cnt > 0}
        for name in self._vllm.requests:
            in_use.difference_update(*self._engine.tables(name))
        for _, blocks in self._vllm.deferred_frees:
            in_use.difference_update(block.block_id for block in blocks)
        for name in self._vllm.requests:
            if self._requests[name].is_finished():
                offer = self._engine.role._prefill._offers.get(name)
                pins = {} if offer is None else offer.pins
                in_use.difference_update(block.block_id for block in pins.values())
        self._check(not in_use - {0}, f"blocks {in_use} belong to no request")

    def _check_idle(self) -> None:
        role, left = self._engine.role, self._idle - num_free_blocks(self._vllm)
        self._check(not left, f"{left} blocks leak")
        prefill = role._prefill
        rest = {
            "to be offered": prefill._awaited,
            "offers": prefill._offers,
            "blocks expected": prefill._num_expected,
            "blocks held": len(prefill._held),
            "blocks unclaimed": len(prefill._unclaimed),
            "open loads": role._decode.num_open,
            "keys of hints": role._decode._by_hint_key,
            "numbers of cached tokens": role._cached._loading,
            "loads that workers must report": role._decode._told,
        }
        rest = {name: each for name, each in rest.items() if each}
        self._check(not rest, f"the connector keeps {rest}")


# --- planted bugs


def _chunks(life: Life) -> None:
    """Decode reads parts beside a connector whose loads vLLM may void."""
    life._engine.role._prefill._in_parts = True


def _window(life: Life) -> None:
    """Nothing keeps the blocks of a window that are offered."""
    blocks: Any = life._engine.role._blocks
    pin, pool = blocks.pin, blocks.manager.block_pool

    def pin_nothing(request: str, num_tokens: int, pins: dict[Any, Any]) -> None:
        known = set(pins)
        pin(request, num_tokens, pins)
        pool.free_blocks([block for place, block in pins.items() if place not in known])

    blocks.pin, blocks.unpin = pin_nothing, dict.clear


PLANTED: Final[Mapping[str, tuple[Callable[[Life], None], Draw]]] = {
    "chunks": (_chunks, Configuration.drawn_beside_tier),
    "window": (_window, Configuration.drawn_with_window),
}
