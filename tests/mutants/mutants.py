"""Small faults that a user would pay for, and the tests that should find each.

`run.py` plants them. A mutant names no file, so code may move: its text must occur exactly once in
`nixl_kv/`, and `tests/tools/test_mutants.py` checks that. If you change a line that a mutant has,
aim the mutant anew: it keeps its name and its consequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPO: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    name: str
    old: str  # occurs once in nixl_kv/
    new: str
    tests: str  # the nearest ones, below tests/; they need no engine
    consequence: str
    equivalent: str = ""  # why no user and no test can tell it from the original
    needs: str = ""  # a test with real engines, or with a GPU, that alone can find it

    @property
    def paths(self) -> list[str]:
        """The nearest tests, relative to the repository."""
        names = [f"tests/{name}" for name in self.tests.split()]
        return [name if (REPO / name).is_dir() else f"{name}.py" for name in names]


def find(mutant: Mutant, texts: Mapping[Path, str]) -> Path:
    """The file of nixl_kv/ that has the mutant's text.

    Raises:
        ValueError: if no file has it, or if it occurs more than once.
    """
    counts = {path: text.count(mutant.old) for path, text in texts.items() if mutant.old in text}
    if sum(counts.values()) != 1:
        places = ", ".join(f"{path} ({count})" for path, count in counts.items()) or "nowhere"
        raise ValueError(
            f"mutant {mutant.name}: its text must occur once in nixl_kv/; found: {places}. Give "
            f"it the text that has the same consequence now, or move it to ENDED:\n{mutant.old}"
        )
    return next(iter(counts))


def read_texts(root: Path) -> dict[Path, str]:
    """All of nixl_kv/, by path."""
    return {path: path.read_text() for path in sorted((root / "nixl_kv").rglob("*.py"))}


ENDED: Final = {
    "fast-sync": "the connector no longer has a scheduler class of its own: the hooks leave to "
    "vLLM when a token is scheduled",
    "watch-idle": "API servers no longer watch offers over a link: the ranks tell the scheduler",
    "doctor-plugin": "`nixl-kv doctor` no longer reads the settings of an engine",
}
"""Mutants whose subject is gone, and the removal that ended each."""

MUTANTS: Final = (
    # --- cached blocks: the answer that is sealed, their slots, and the asks that wait
    Mutant(
        "cached-seal",
        "or not hmac.compare_digest(mac, _mac(payload, offer, key))",
        "or False",
        "unit/conversations/test_runs unit/conversations/test_part",
        "A reader names any block of the cache, and reads another user's KV.",
    ),
    Mutant(
        "cached-offer",
        'message = offer.encode("ascii") + payload',
        "message = payload",
        "unit/conversations/test_runs",
        "A reader uses one answer for many offers, for ever.",
    ),
    Mutant(
        "cached-look",
        "        if self.is_stale(run):\n            self._forget(slot)\n",
        "        if False:\n            self._forget(slot)\n",
        "unit/conversations",
        "A reader gets the KV of another prompt.",
    ),
    Mutant(
        "cached-gap",
        "is_unknown = run.steps + 1 < self._since or run.epoch < self._epoch",
        "is_unknown = run.epoch < self._epoch",
        "unit/conversations/test_slots",
        "After a wake-up, a rank grants blocks although it does not know their writer.",
    ),
    Mutant(
        "cached-epoch",
        "self._holding(ids) if is_next and is_same else range(self.num_slots)",
        "self._holding(ids) if is_next else range(self.num_slots)",
        "unit/conversations",
        "A reader gets the KV of former weights.",
    ),
    Mutant(
        "cached-written",
        "next((step.number for step in reversed(steps) if step.has_ended()), -1)",
        "next((step.number for step in reversed(steps)), -1)",
        "unit/conversations",
        "A reader reads blocks that the GPU has not written yet.",
    ),
    Mutant(
        "cached-recycled",
        "if slot is not None and not is_cleared and not offer.prepared.is_cached:",
        "if slot is not None and not is_cleared:",
        "unit/conversations",
        "A grant is void at once, because the end of another one clears its slot.",
    ),
    Mutant(
        "cached-digest",
        "if offer is None or machine.is_void(offer):",
        "if offer is None:",
        "unit/conversations/test_part",
        "An operator hears of corrupt KV that no reader has got.",
    ),
    Mutant(
        "cached-reader",
        "if ask.reader.rank not in ask.readers:  # the machine would bind no reader",
        "if False:",
        "unit/conversations/test_part",
        "A peer takes fence slots for ever.",
    ),
    Mutant(
        "cached-wait",
        "elif each.until <= now:",
        "elif False:",
        "unit/conversations/test_part",
        "An ask waits for ever for a step that never comes.",
    ),
    Mutant(
        "cached-find",
        "if question.engine == own.engine and is_meant:",
        "if question.engine == own.engine:",
        "unit/engine/test_directory",
        "A reader hears of blocks that a former life of the engine had.",
    ),
    Mutant(
        "cached-ended",
        "            self._engine.end_step(_record_event)  # of the step before\n",
        "",
        "unit/connector/test_worker",
        "A pipeline stage without the draft model never grants its latest blocks.",
    ),
    # --- early tickets: the promise, asks that precede their offer
    Mutant(
        "pair-key",
        "digest_size=16, key=key, person=person",
        'digest_size=16, key=b"", person=person',
        "unit/early/test_answers unit/engine/test_trust unit/connector/test_early",
        "A client without the key promises a nonce, and names the offer of another request.",
    ),
    Mutant(
        "pair-blocks",
        "(host is not None and blocks is None)",
        "(host is not None)",
        "unit/connector/test_legs unit/connector/test_scheduler",
        "Decode tells the operator of a router that does not wait, although prefill had answered.",
    ),
    Mutant(
        "early-others",
        "if known is None or known.expected is None or known.asks:\n            return None",
        "if known is None or known.expected is None:\n            return None",
        "unit/early/test_part",
        "Prefill aborts a request for which another reader still waits.",
    ),
    Mutant(
        "early-declined",
        "is_kept = known.demand is not Demand.WANTED and len(self._requests) <= MAX_ASKS",
        "is_kept = False",
        "unit/early/test_part",
        "Prefill forgets a release that precedes its request, and computes it without readers.",
    ),
    Mutant(
        "early-bound",
        "is_kept = known.demand is not Demand.WANTED and len(self._requests) <= MAX_ASKS",
        "is_kept = known.demand is not Demand.WANTED",
        "unit/early/test_asks unit/early/test_part",
        "A peer fills prefill's memory with releases of invented nonces.",
    ),
    Mutant(
        "early-route",
        "known.asks[key] = _Waiting(RoutedAsk(route, ask), now + REPEATED_S)",
        "known.asks.setdefault(key, _Waiting(RoutedAsk(route, ask), now + REPEATED_S))",
        "unit/early/test_part",
        "A repeated ask expires as the first one, and its grant takes the broken route.",
    ),
    Mutant(
        "early-complete",
        "known.move(DemandEvent.COMPLETE if release.complete else DemandEvent.RELEASE)",
        "known.move(DemandEvent.RELEASE)",
        "unit/early/test_part",
        "A rank that decode does not read aborts the request that it reads from another rank.",
    ),
    Mutant(
        "dir-order",
        "return denials + self._report_given_up(command.nonce)",
        "return denials",
        "unit/early/test_part",
        "Prefill computes a request to its end although decode had released it before it came.",
    ),
    # --- peers that decode cannot use
    Mutant(
        "breaker-used",
        "peer.used_at = now\n        if peer.state is PeerState.UNUSABLE:",
        "if peer.state is PeerState.UNUSABLE:",
        "unit/protocol/test_decode unit/protocol/test_peers",
        "Decode forgets a peer that it used a moment ago, and the next load connects anew.",
    ),
    Mutant(
        "breaker-ranks",
        "self._move(peer, PeerState.READY, event)",
        "self._move(peer, PeerState.READY, event)\n            peer.failures = 0",
        "unit/protocol/test_decode unit/protocol/test_peers",
        "An engine that answers but cannot be read costs each load its time: failures never add up",
    ),
    Mutant(
        "breaker-pause",
        "pause_s = pause_after(peer.failures)",
        "pause_s = PAUSE_S",
        "unit/protocol/test_decode unit/protocol/test_peers",
        "Decode tries a broken engine each second, at the price of a load and of descriptors.",
    ),
    Mutant(
        "breaker-room",
        "if len(self._unusable) > MAX_UNUSABLE:",
        "if False:",
        "unit/test_bounds unit/protocol/test_decode",
        "A client without a key fills decode's memory with invented engines.",
    ),
    # --- the prefill machine
    Mutant(
        "prefill-life",
        "if num_tokens <= offer.written or command.attempt != offer.prepared.attempt:",
        "if num_tokens <= offer.written:",
        "unit/protocol/test_prefill",
        "Prefill grants blocks that a preempted request has not written: wrong bytes.",
    ),
    Mutant(
        "prefill-number",
        "elif binding.numbers.get(rank, heartbeat.number) < heartbeat.number:",
        "elif binding.numbers.get(rank, heartbeat.number) <= heartbeat.number:",
        "unit/protocol/test_prefill",
        "An ask that overtakes a heartbeat ends its own reader.",
    ),
    Mutant(
        "prefill-hold",
        "            offer.binding.held_until = now + self._hold_s\n",
        "",
        "unit/protocol/test_prefill",
        "A granted offer that is never read keeps its blocks, in spite of hold_s.",
    ),
    Mutant(
        "prefill-released",
        "if offer.is_pinned or end is OfferEnd.READ or not offer.prepared.is_early:",
        "if offer.is_pinned or not offer.prepared.is_early:",
        "unit/early/test_part",
        "The scheduler aborts a request whose offer decode has read.",
    ),
    Mutant(
        "withdraw-released",
        "return [events.EarlyReleased(command.nonce, expected.request), *denials]",
        "return denials",
        "unit/early/test_part",
        "After a reset, prefill computes a request to its end although no reader is left.",
    ),
    # --- a load
    Mutant(
        "load-entry",
        "end = written // self.entry_size * self.entry_size",
        "end = written",
        "unit/protocol/test_load unit/protocol/test_decode",
        "A part of a load ends inside a block, and the copy of its rest is wrong.",
    ),
    Mutant(
        "load-renewed",
        "is_lost = not slot_valid or (is_renewed and self.is_compared)",
        "is_lost = not slot_valid",
        "unit/protocol/test_load unit/protocol/test_decode",
        "One digest compares the parts of two computations, and a good load fails.",
    ),
    Mutant(
        "load-lost",
        "if read.num_lost > MAX_LOST:",
        "if read.num_lost > 10**9:",
        "unit/protocol/test_load unit/protocol/test_decode",
        "A load asks for ever while prefill preempts its request.",
    ),
    Mutant(
        "load-direct",
        'names = ("num_bytes", "num_runs", "seconds", "direct_bytes", "post_seconds")',
        'names = ("num_bytes", "num_runs", "seconds", "post_seconds")',
        "unit/protocol/test_load unit/protocol/test_decode",
        "The metrics lose the bytes that earlier parts read directly.",
    ),
    Mutant(
        "load-pending",
        "self.told_at = read.moved_at = now",
        "read.moved_at = now",
        "unit/protocol/test_load unit/protocol/test_decode",
        "A load fails as late although prefill says that its request is queued.",
    ),
    Mutant(
        "wait-prefill",
        "return min(due, self.prepared_at + self.wait_for_prefill_s)",
        "return due",
        "unit/protocol/test_load unit/protocol/test_decode",
        "The setting wait_for_prefill_s has no effect.",
    ),
    # --- agents that are replaced
    Mutant(
        "replace-abandon",
        'return self._fail_waiting("it could not begin in time", partial(_is_of, action))',
        "return []",
        "unit/reading/test_turnover unit/engine/test_loop",
        "An abandoned read that waits for an agent never ends, nor does its request.",
    ),
    Mutant(
        "replace-moved",
        "return [events.PeersMoved(tuple(known))] if known else []",
        "return []",
        "unit/reading/test_turnover unit/engine/test_loop",
        "The successor of an agent connects with no peer, and the next loads wait.",
    ),
    Mutant(
        "replace-proof",
        "                self._closing.remove(closing)\n                logger.error(",
        "                self._closing.remove(closing)\n"
        "                failed += closing.agent.fail_all()\n                logger.error(",
        "unit/reading/test_turnover",
        "vLLM gets blocks back into which a dead agent may still write: wrong bytes.",
    ),
    Mutant(
        "replace-tidy",
        "current.ranks.num_ready <= num_left * READ_PER_LEFT",
        "current.ranks.num_ready < num_left * READ_PER_LEFT * 100",
        "unit/reading/test_turnover",
        "One peer that leaves costs an agent of a thousand living ranks its connections.",
    ),
    # --- the prefill half of the scheduler
    Mutant(
        "chunk-local",
        "            offer.in_parts &= positions.start <= offer.local\n",
        "",
        "unit/connector/test_prefill unit/connector/test_pairs",
        "Decode reads tokens that another connector of the engine has yet to load: wrong bytes.",
    ),
    Mutant(
        "chunk-life",
        "            offer.attempt += 1\n",
        "",
        "unit/connector/test_prefill unit/connector/test_pairs",
        "A late write mark of a preempted computation counts for the next one: wrong bytes.",
    ),
    Mutant(
        "chunk-reset",
        "is_over = is_mixed or bool(offer.promised)",
        "is_over = is_mixed",
        "unit/connector/test_pairs unit/connector/test_weights",
        "A request that is preempted during a reset is offered under the former label.",
    ),
    Mutant(
        "chunk-weights",
        "if not (epoch or weights):",
        "if True:",
        "unit/connector/test_weights unit/protocol/test_ticket unit/connector/test_pairs",
        "Prefill grants new KV to a ticket from before a reset or from other weights.",
    ),
    Mutant(
        "chunk-bound",
        "            if len(self._promised) > MAX_PROMISED:\n"
        "                del self._promised[next(iter(self._promised))]\n",
        "",
        "unit/test_bounds unit/connector/test_pairs",
        "The table of early tickets grows for ever.",
    ),
    Mutant(
        "zeroes",
        "writes_early = copies or zeroes_blocks(self._kv_cache_config)",
        "writes_early = copies",
        "unit/connector/test_scheduler unit/connector/test_vllm_config unit/connector/test_windows",
        "vLLM zeroes new blocks while decode still reads the former ones: wrong bytes.",
    ),
    Mutant(
        "groups",
        "return has_one_group and not is_off and not writes_early",
        "return not is_off and not writes_early",
        "unit/connector/test_scheduler unit/connector/test_vllm_config unit/connector/test_windows",
        "Prefill grants parts of a cache with several groups, whose blocks vLLM replaces.",
    ),
    # --- the decode half of the scheduler
    Mutant(
        "decode-retracted",
        "if not isinstance(hint, Landed) or load.state is not ScheduledState.STARTED:",
        "if not isinstance(hint, Landed):",
        "unit/connector/test_landed_loads unit/connector/test_decode",
        "A load from before a cache reset ends well by a hint: stale KV.",
    ),
    Mutant(
        "decode-outdated",
        "        for engine, epoch in self._epochs.items():\n",
        "        self._outdated.clear()\n        for engine, epoch in self._epochs.items():\n",
        "unit/connector/test_decode unit/connector/test_weights",
        "After a second reset, decode accepts tickets from before the first one.",
    ),
    Mutant(
        "epoch-bound",
        "        if len(self._epochs) > MAX_ENGINES:\n"
        "            del self._epochs[next(iter(self._epochs))]\n",
        "",
        "unit/test_bounds unit/connector/test_decode",
        "The table of prefill engines grows for ever.",
    ),
    Mutant(
        "sched-told",
        "output.finished_recving -= held_back | told",
        "output.finished_recving -= held_back",
        "unit/connector/test_landed_loads unit/connector/test_scheduler",
        "vLLM hears twice of a load's end, and the engine ends.",
    ),
    # --- early answers
    Mutant(
        "answer-types",
        "if params.logprobs is not None or params.prompt_logprobs is not None:",
        "if params.logprobs or params.prompt_logprobs:",
        "unit/connector/test_early",
        "A client that asks for `logprobs: 0` gets an early answer without them.",
    ),
    Mutant(
        "answer-open",
        "if len(self._since) >= self._seats:",
        "if False:",
        "unit/early/test_answers unit/connector/test_early",
        "A client that has its answers at once queues requests without limit.",
    ),
    Mutant(
        "answer-learn",
        "is_off = is_draining or self._is_paused or not self._is_prefill",
        "is_off = self._is_paused or not self._is_prefill",
        "unit/connector/test_scheduler",
        "An engine that drains answers early, and then denies the ticket.",
    ),
    # --- the engine: slots, the loop, the directory
    Mutant(
        "slots-token",
        "freed = [report.slot] if self._tokens.get(report.slot) == report.fence_token else []",
        "freed = [report.slot] if report.slot in self._tokens else []",
        "unit/early/test_slots",
        "A late report clears the fence slot of another offer, and a good read is refused.",
    ),
    Mutant(
        "loop-slot",
        "if self._read_slot(command.slot) == command.fence_token:",
        "if True:",
        "unit/early/test_rank unit/engine/test_engine",
        "After a restart of the thread, prefill grants an offer whose slot is cleared.",
    ),
    Mutant(
        "loop-doubt",
        "                    self._doubted.discard(item.endpoint)\n",
        "",
        "unit/engine/test_loop",
        "The second break of a healthy link fails its loads at once.",
    ),
    Mutant(
        "dir-watch",
        "deque(maxlen=MAX_HINTS)",
        "deque()",
        "unit/test_bounds unit/engine/test_directory",
        "A peer fills the memory of the scheduler's process with hints.",
    ),
    Mutant(
        "verify-wanted",
        "                job.move(JobEvent.FORGOTTEN)\n                del self.waiting[key]",
        "                pass",
        "unit/verify/test_queue",
        "The digests of loads that have ended stay in the queue.",
    ),
    # --- the worker
    Mutant(
        "worker-loading",
        "if self._loading and not (self._computes or self._is_awaited):",
        "if self._loading and not self._computes:",
        "unit/connector/test_worker",
        "A rank of a pipeline waits in an idle step, and the others stall.",
    ),
    Mutant(
        "worker-cleared",
        "if self._engine is not None and not step.is_cleared:",
        "if self._engine is not None:",
        "unit/connector/test_worker",
        "A worker clears the slot of an offer that it has just prepared anew.",
    ),
    Mutant(
        "granting",
        "            if written and not current_platform.is_cpu():",
        "            if False:",
        "unit/connector/test_worker unit/connector/test_connector",
        "The transfer thread grants a step's blocks 1 to 1.5 ms later on an H200.",
    ),
    # --- statistics and the log
    Mutant(
        "stats-verified",
        "self.verified and other.verified",
        "self.verified or other.verified",
        "unit/connector/test_stats",
        "A load counts as verified although only one rank has verified it.",
    ),
    Mutant(
        "stats-gauge",
        "mine[key] = value if name in GAUGES else mine.get(key, 0) + value",
        "mine[key] = mine.get(key, 0) + value",
        "unit/connector/test_stats",
        "Gauges show the sum of several steps.",
    ),
    Mutant(
        "stats-direct",
        'yield "read_bytes", {path: sum(sizes) - sum(directly)}',
        'yield "read_bytes", {path: sum(sizes)}',
        "unit/connector/test_stats",
        "The metric read_bytes counts some bytes twice.",
    ),
    Mutant(
        "doctor-far",
        "if self._is_prefill and self._config.has_key and self._config.is_this_machine_only:",
        "if self._config.has_key and self._config.is_this_machine_only:",
        "unit/connector/test_scheduler",
        "A decode engine warns of a loopback address in tickets, although it makes none.",
    ),
    # --- transports and paths
    Mutant(
        "tcp-inflight",
        "if read.failure is not None and not (read.num_in_flight and read.failure is PeerLost):",
        "if read.failure is not None:",
        "unit/transport/ucx/test_paced",
        "A read fails while its pieces still write into blocks that vLLM reuses: wrong bytes.",
    ),
    Mutant(
        "tcp-lost",
        "                stream.is_lost = True  "
        "# the piece may go on, so never use its stream again\n",
        "",
        "unit/transport/ucx/test_paced",
        "A stream with a lost piece serves the next read: wrong bytes.",
    ),
    Mutant(
        "gather-unmap",
        "if self._is_released and not self.num_reads:",
        "if self._is_released:",
        "unit/reading/gather",
        "Decode unmaps memory that a kernel reads, and the GPU faults.",
    ),
    Mutant(
        "gather-ended",
        "        if prepared.mapping.has_owner_ended:\n            return None\n",
        "",
        "unit/reading/gather",
        "Decode reads the memory of a process that has ended.",
    ),
    Mutant(
        "match-window",
        "if theirs.window and not 0 < mine.window <= theirs.window:",
        "if theirs.window and not mine.window <= theirs.window:",
        "unit/geometry/test_compat",
        "Decode without a window loads the KV of a windowed prefill: missing tokens.",
    ),
    Mutant(
        "match-order",
        "key=lambda a: (a[0] in already_read, a[1], -num_readers[a[0]]),",
        "key=lambda a: (a[1], -num_readers[a[0]]),",
        "unit/geometry/test_ranks unit/geometry",
        "Decode reads more remote ranks than it needs.",
    ),
    Mutant(
        "zmq-domain",
        "is_asked_here = (version, domain) == (ZAP_VERSION, ZAP_DOMAIN)",
        "is_asked_here = True",
        "unit/transport/test_zmq",
        "The gatekeeper admits connections to sockets of other ZAP domains.",
    ),
    Mutant(
        "zmq-batch",
        "        if num_messages == MAX_BATCH:\n            return received\n",
        "",
        "unit/transport/test_zmq",
        "A link counts as lost before its last messages are read.",
    ),
    # === in what came later
    # --- the seam in vLLM's engine client
    Mutant(
        "early-child",
        "if early is None or parent_req is not None:",
        "if early is None:",
        "unit/connector/test_early",
        "Each sample of one prompt gets an early ticket of its own, although decode loads one.",
    ),
    Mutant(
        "early-part",
        "if request.request_id in self._client.output_processor.request_states:",
        "if False:",
        "unit/connector/test_early",
        "Prefill answers a further part of a streamed input as if it were the whole prompt.",
    ),
    Mutant(
        "early-forged",
        "        if PROMISE in fields:\n            _replace(",
        "        if False:\n            _replace(",
        "unit/connector/test_early",
        "Without a key, a client's own promise reaches the engine and names another offer.",
    ),
    Mutant(
        "early-ended",
        "if exchange.has_ended or state is None:",
        "if state is None:",
        "unit/connector/test_early",
        "Each request that the engine refuses takes a seat for ever, until no answer is early.",
    ),
    Mutant(
        "early-copy",
        "changed: Any = copy(request.sampling_params)",
        "changed: Any = request.sampling_params",
        "unit/connector/test_early",
        "Requests that share sampling parameters get the promise of each other's offer.",
    ),
    Mutant(
        "early-token",
        "        answer.outputs[0].token_ids = []\n",
        "",
        "unit/connector/test_early",
        "The early answer shows the engine's own token, which decode generates again.",
    ),
    Mutant(
        "early-withdraw",
        "self._withdraw(exchange, rank)",
        "pass",
        "unit/connector/test_early",
        "Decode waits until a timeout for a request that prefill's engine has refused.",
    ),
    Mutant(
        "early-abort",
        'if "abort" not in ends:',
        "if True:",
        "unit/connector/test_early",
        "A hung engine looks alive, and answers early, while clients hang up.",
    ),
    Mutant(
        "early-balanced",
        "for rank in ranks.values() if len(ranks) == 1 else ():",
        "for rank in ranks.values():",
        "unit/connector/test_early",
        "A hung data-parallel rank answers early as long as another rank steps.",
    ),
    Mutant(
        "early-current",
        "is_old = not len(self.open) and time.monotonic() > self.told_at + CURRENT_S",
        "is_old = False",
        "unit/connector/test_early",
        "An idle engine gives tickets with the label of former weights, and denies them later.",
    ),
    Mutant(
        "early-sizes",
        "if reader is not None and reader.has_geometry and any(not one.data for one in features):",
        "if False:",
        "unit/connector/test_early unit/connector/test_media_requests",
        "The ticket for a picture that only the engine has cached lacks its size: decode refuses.",
    ),
    Mutant(
        "answers-mac",
        "if match is None or not hmac.compare_digest(match[2], _mac(Nonce(match[1]), key)):",
        "if match is None:",
        "unit/early/test_answers",
        "A client promises any nonce with any MAC.",
    ),
    Mutant(
        "answers-idle",
        "self._clock() - max(oldest, self._heard_at) > LIFE_S",
        "self._clock() - self._heard_at > LIFE_S",
        "unit/early/test_answers unit/connector/test_early",
        "An engine never answers early again after it was idle for 5 s.",
    ),
    Mutant(
        "answers-silent",
        'return SILENT if self._clock() - max(oldest, self._heard_at) > LIFE_S else ""',
        'return ""',
        "unit/early/test_answers unit/connector/test_early",
        "A hung engine answers early, so no router avoids it.",
    ),
    # --- hooks over vLLM's scheduler
    Mutant(
        "hooks-media",
        "new.mm_features = request.mm_features",
        "pass",
        "unit/connector/test_scheduler_hooks",
        "After a preemption, vLLM's runner misses the media of a request, and the engine ends.",
    ),
    Mutant(
        "hooks-output",
        "outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)",
        "outputs.setdefault(request.client_index, EngineCoreOutputs())",
        "unit/connector/test_scheduler_hooks",
        "The client of a request that the hooks end waits for ever.",
    ),
    Mutant(
        "hooks-aside",
        "living = {n: one for n, one in self._aside.items() if not one.is_finished()}",
        "living = dict(self._aside)",
        "unit/connector/test_aside",
        "An aborted request comes back into vLLM's queue, and the engine ends.",
    ),
    Mutant(
        "hooks-token",
        "leave. vLLM aborts here too.\n        self._end_requests()",
        "leave. vLLM aborts here too.",
        "unit/connector/test_scheduler_hooks",
        "A request whose load failed during a step sends a token of wrong bytes.",
    ),
    Mutant(
        "hooks-alone",
        "for connector in self._connectors if self._is_alone else ():",
        "for connector in self._connectors:",
        "unit/connector/test_scheduler_hooks unit/connector/test_landed_loads "
        "unit/connector/test_multi_connector",
        "Inside a MultiConnector, a hint tells another child of a load that it never had.",
    ),
    # --- prompts with media
    Mutant(
        "media-stand-ins",
        'return self.setting == "ticket" or self.has_stand_ins',
        'return self.setting == "ticket"',
        "unit/connector/test_media unit/connector/test_media_requests",
        "vLLM caches the KV of Dynamo's stand-ins under the picture's id: later answers are wrong.",
    ),
    Mutant(
        "media-embeddings",
        "if not all(item.is_data for item in media.items):",
        "if False:",
        "unit/connector/test_media unit/connector/test_media_requests",
        "Decode computes a picture's prompt from embeddings that may be stand-ins.",
    ),
    Mutant(
        "media-preempted",
        "State.LOADED: {State.FAILED},",
        "State.LOADED: set[State](),",
        "unit/connector/test_media unit/connector/test_scheduler_hooks",
        "Decode computes a preempted prompt from stand-ins: a wrong answer.",
    ),
    Mutant(
        "media-voided",
        "elif request.num_computed_tokens < num_tokens:",
        "elif False:",
        "unit/connector/test_multi_connector",
        "Another connector's load fails, and decode computes a picture from a stand-in.",
    ),
    Mutant(
        "media-end",
        "if media.end > num_tokens:",
        "if False:",
        "unit/connector/test_media",
        "Decode loads a part of a picture and computes its rest from a stand-in.",
    ),
    # --- the number of cached tokens
    Mutant(
        "usage-bound",
        "prefill_stats.num_cached_tokens = min(num_cached, most)",
        "prefill_stats.num_cached_tokens = num_cached",
        "unit/connector/test_usage",
        "A peer sets a client's bill: more cached tokens than the prompt has.",
    ),
    Mutant(
        "usage-forget",
        "def forget(self, request_id: RequestId) -> None:\n"
        "        self._loading.pop(request_id, None)",
        "def forget(self, request_id: RequestId) -> None:\n        pass",
        "unit/connector/test_usage",
        "Each load that is aborted leaves its request in memory for ever.",
    ),
    # --- this connector's part of the configuration
    Mutant(
        "own-role",
        'return config.overlap == ON and "prefill" in roles',
        "return config.overlap == ON",
        "unit/connector/test_early",
        "The front end of a pure decode engine promises offers that its engine never makes.",
    ),
    # --- the clock of the loop
    Mutant(
        "clock-gap",
        "self._left_out += gap_s - self._max_gap_s",
        "self._left_out += 0.0",
        "unit/engine/test_clock",
        "A thread that stood still calls its peers late, and good loads fail.",
    ),
    Mutant(
        "clock-work",
        "gap_s = now - self._due - (worked - self._worked)",
        "gap_s = now - self._due",
        "unit/engine/test_clock",
        "The clock of a busy thread stands still, so a dead peer costs a load more than its time.",
    ),
    # --- hosts that may connect to UCX's ports
    Mutant(
        "admission-peers",
        "return is_single and self._allowed.allows(host)",
        "return is_single",
        "unit/engine/test_admission",
        "A peer lets hosts outside 'peers' connect to UCX's ports, which ask for no key.",
    ),
    Mutant(
        "admission-silent",
        "if at + SILENT_S <= now]:",
        "if False]:",
        "unit/engine/test_admission",
        "The hosts of dead peers may connect to UCX's ports for ever.",
    ),
    Mutant(
        "admission-room",
        "has_room = one in taken or len(taken) < MAX_HOSTS",
        "has_room = True",
        "unit/engine/test_admission",
        "One peer names more hosts than the kernel's filter takes, and locks all others out.",
    ),
    # --- port filters
    Mutant(
        "ports-reopen",
        "attach(self._socket, self._filter)",
        "attach(self._socket, PASS)",
        "unit/transport/test_ports",
        "A port that was full once accepts connections of every host.",
    ),
    Mutant(
        "ports-ipv6",
        "for word in range(num_words - 1):",
        "for word in range(0):",
        "unit/transport/test_ports",
        "The filter passes each IPv6 host whose last 32 bits are those of an allowed one.",
    ),
    Mutant(
        "ucx-cut",
        "if former - hosts:",
        "if False:",
        "unit/transport/ucx/test_ports",
        "A host whose peer has left keeps its connection, and can write memory.",
    ),
    Mutant(
        "ucx-race",
        "while attached != (self._own, self._hosts):",
        "if attached != (self._own, self._hosts):",
        "unit/transport/ucx/test_ports",
        "A new agent's port keeps a filter without the host that was admitted meanwhile.",
    ),
    Mutant(
        "ucx-reused",
        "if os.fstat(copy).st_ino != inode:",
        "if False:",
        "unit/transport/ucx/test_ports",
        "A socket of vLLM that gets a closed one's descriptor drops what other machines send it.",
    ),
    Mutant(
        "ucx-closed",
        "self._sockets.pop(number, None)",
        "pass",
        "unit/transport/ucx/test_ports",
        "Each agent that is replaced leaves its sockets in the table.",
        equivalent="each use of the table skips a closed socket, and the next socket with its "
        "descriptor replaces it",
    ),
    # --- UNUSABLE peers
    Mutant(
        "unusable-back",
        "is_due = peer.pause_ends_at <= now or (is_back and does_fit)",
        "is_due = peer.pause_ends_at <= now",
        "unit/protocol/test_decode unit/protocol/test_peers",
        "Loads from a restarted engine fail until a pause of up to 64 s ends.",
    ),
    Mutant(
        "unusable-memory",
        "if is_due and peer.description is None:",
        "if is_due:",
        "unit/protocol/test_decode unit/protocol/test_peers",
        "Decode connects with a broken peer anew while reads of its former memory go on.",
    ),
    Mutant(
        "unusable-read",
        "peer.failures, peer.is_reported = 0, False",
        "peer.is_reported = False",
        "unit/protocol/test_decode unit/protocol/test_peers",
        "Rare failures add up for days, until one break makes all loads fail for 64 s.",
    ),
    Mutant(
        "unusable-cheap",
        "elif is_cheap:",
        "elif False:",
        "unit/protocol/test_decode unit/protocol/test_peers",
        "A prefill engine that ends between loads makes the next loads fail at once.",
    ),
    # --- steps of prefill's engine, and whether decode needs an offer
    Mutant(
        "steps-order",
        "if event.number <= self._number:",
        "if False:",
        "unit/early/test_part",
        "A message of a pause that is late makes a hung engine look paused.",
    ),
    Mutant(
        "steps-pause",
        "last = max(self._stepped_at, since, self._paused_until)",
        "last = max(self._stepped_at, since)",
        "unit/early/test_part",
        "Early loads fail because a paused engine looks hung.",
    ),
    Mutant(
        "demand-again",
        "DemandEvent.RELEASE: Demand.REPORTED,",
        "DemandEvent.RELEASE: Demand.GIVEN_UP,",
        "unit/early/test_part",
        "Each repeated release tells the engine again to end a request.",
    ),
    # --- state tables
    Mutant(
        "load-releasing",
        "case LoadState.RELEASING:\n                self.fail(DROPPED)",
        "case LoadState.RELEASING:\n                pass",
        "unit/protocol/test_decode unit/protocol/test_load",
        "A load that is dropped while decode connects never leaves the table.",
    ),
    Mutant(
        "offer-claimed",
        "self._unclaimed.remove(offer.held)",
        "pass",
        "unit/connector/test_prefill",
        "Claimed offers count as unclaimed for ever, so prefill revokes each new one.",
    ),
    Mutant(
        "scheduled-reset",
        "ScheduledEvent.COMPUTING: ScheduledState.STARTED,\n"
        "        ScheduledEvent.RESET: ScheduledState.RETRACTED,",
        "ScheduledEvent.COMPUTING: ScheduledState.STARTED,\n"
        "        ScheduledEvent.RESET: ScheduledState.STARTED,",
        "unit/connector/test_decode unit/connector/test_weights",
        "A load that a reset finds under way counts as good: stale KV.",
    ),
    Mutant(
        "scheduled-aside",
        "self.aside.discard(load.request)",
        "pass",
        "unit/connector/test_aside unit/connector/test_pairs",
        "A request that waits outside vLLM's queue never comes back.",
    ),
    # --- blocks that are read whole, replicated caches, and layouts
    Mutant(
        "whole-window",
        "    edge = 1\n",
        "    edge = 256\n",
        "unit/connector/test_paging unit/connector/test_windows",
        "Each prompt pins 64 blocks for a window of 8 tokens, and prefill runs out of blocks.",
    ),
    Mutant(
        "whole-most",
        "return min(super().count(num_tokens), self.most)",
        "return super().count(num_tokens)",
        "unit/connector/test_paging unit/connector/test_vllm_config",
        "A long prompt counts as one that its cache cannot hold, and gets no ticket.",
    ),
    Mutant(
        "whole-unit",
        "self.group.stripe.token(positions * self.group.unit)",
        "self.group.stripe.token(positions)",
        "unit/verify/test_whole_blocks",
        "A difference is said to be in other tokens than it is in.",
    ),
    Mutant(
        "whole-last",
        "-(-stripe.num_before(self.end) // unit)",
        "stripe.num_before(self.end) // unit",
        "unit/verify/test_whole_blocks",
        "Nothing compares the last block of a prompt, which is partly filled.",
    ),
    Mutant(
        "whole-run",
        "if self.groups[0].whole:",
        "if False:",
        "unit/geometry/test_whole_blocks unit/geometry/test_plan",
        "Decode reads a part of each block, and answers from stale states.",
    ),
    Mutant(
        "whole-sizes",
        "if mine.whole or theirs.whole:",
        "if False:",
        "unit/geometry/test_whole_blocks unit/geometry/test_compat",
        "Decode reads blocks of another size, and answers from states of other tokens.",
    ),
    Mutant(
        "whole-rows",
        "Part(0, content, rows, stride) if stride > content else Part(0, rows * content)",
        "Part(0, rows * content)",
        "unit/connector/test_kv_layout",
        "Decode reads the gaps between the rows of a block, and lacks its last rows.",
    ),
    Mutant(
        "replicated-ring",
        "or type(self.spec).__name__ in RINGS",
        "or False",
        "unit/connector/test_kv_layout unit/connector/test_backends",
        "The log says of a ring that its heads cannot be divided, instead of why it is refused.",
    ),
    Mutant(
        "replicated-latent",
        "(is_latent and self.spec.num_kv_heads == 1)",
        "False",
        "unit/connector/test_kv_layout",
        "Engines with an indexer do not start at TP 2.",
    ),
    Mutant(
        "layout-keys",
        "wished = APART if has_keys else PACKED",
        "wished = PACKED",
        "unit/connector/test_vllm_config",
        "vLLM overwrites KV with an indexer's keys, and answers wrongly without an error.",
    ),
    Mutant(
        "layout-accepted",
        "if accepted is None or each in accepted",
        "if each",
        "unit/connector/test_vllm_config",
        "vLLM drops the layout, and heads are read in runs of 512 bytes.",
    ),
    # --- memory that containers share
    Mutant(
        "share-once",
        "                del self._tokens[packet]\n",
        "",
        "unit/reading/gather/test_share",
        "A token that leaks maps the memory for ever.",
    ),
    Mutant(
        "share-sleep",
        "        for one in list(self._connections.values()):\n            self._end(one)\n",
        "",
        "unit/reading/gather/test_share",
        "The GPU memory of an engine that sleeps stays taken.",
    ),
    Mutant(
        "share-descriptors",
        "            for descriptor in descriptors:\n                os.close(descriptor)\n",
        "            pass\n",
        "unit/reading/gather/test_share",
        "Each reader leaks descriptors, until prefill can open no more files.",
    ),
    Mutant(
        "share-strangers",
        "if len(unproven) > MAX_UNPROVEN:",
        "if False:",
        "unit/reading/gather/test_share",
        "A process without a token takes all connections.",
    ),
    Mutant(
        "share-slow",
        "self._left_s -= time.monotonic() - begun",
        "pass",
        "unit/reading/gather/test_share",
        "An owner that answers a byte at a time keeps decode's thread for minutes.",
    ),
    Mutant(
        "share-cut",
        " or answer.content != NUMBER.pack(len(batch)):",
        ":",
        "unit/reading/gather/test_share",
        "Decode maps pieces at the places of others, because some descriptors were cut off.",
    ),
    Mutant(
        "share-living",
        "if not is_ours or not _is_refused(path):",
        "if not is_ours:",
        "unit/reading/gather/test_share",
        "An engine that starts removes the sockets of the others.",
    ),
    # --- how many engines a load needs
    Mutant(
        "ratio-share",
        "(PREFILL_SHARE * self.capacity.prefill_tokens)",
        "self.capacity.prefill_tokens",
        "unit/cli/test_ratio unit/cli/test_plan",
        "`plan` advises prefill engines that are always full, so first tokens wait in a queue.",
    ),
    Mutant(
        "ratio-round",
        "max(1, math.ceil(self.prefill_needed - ROUNDING))",
        "max(1, round(self.prefill_needed))",
        "unit/cli/test_ratio unit/cli/test_plan",
        "`plan` advises a prefill engine too few.",
    ),
    # --- prompts whose KV another engine may have
    Mutant(
        "sought-media",
        "if request.mm_features and facts.has_stand_ins:",
        "if False:",
        "unit/connector/test_finding unit/connector/test_conversations",
        "Prefill reads what decode computed from stand-ins for a picture.",
    ),
    Mutant(
        "sought-self",
        "if source is not None and source.owner != own:",
        "if source is not None:",
        "unit/connector/test_finding unit/connector/test_conversations",
        "An engine asks itself, and each such prompt waits in vain.",
    ),
    Mutant(
        "sought-learned",
        "if reader is not None and self.trust.allowed.allows(endpoint_host(reader)):",
        "if reader is not None:",
        "unit/connector/test_finding unit/connector/test_conversations",
        "A reader makes prefill connect to an address outside `peers`.",
    ),
    Mutant(
        "sought-listed",
        "if networks is None or not AllowedHosts(networks).allows(head.host):",
        "if networks is None:",
        "unit/connector/test_finding unit/connector/test_conversations",
        "A client makes prefill connect to an address outside `peers`.",
    ),
    Mutant(
        "sought-aborted",
        "is_used = self.finds.state_of(request) is not SoughtState.ABANDONED",
        "is_used = True",
        "unit/connector/test_finding unit/connector/test_conversations",
        "Tokens of requests that had ended count as read.",
    ),
    Mutant(
        "sought-late",
        'self._drop(request_id, "late")',
        "pass",
        "unit/connector/test_finding unit/connector/test_conversations",
        "A prompt whose owner is silent waits for ever.",
    ),
    Mutant(
        "sought-reset",
        "        self.finds.clear()\n        self._marks.clear()\n",
        "        self.finds.clear()\n",
        "unit/connector/test_finding unit/connector/test_conversations",
        "After a change of weights, prefill remembers answers of the former ones.",
    ),
    Mutant(
        "sought-seed",
        "    parent, media, hashes = hash_of(facts.seed), 0, list[bytes]()\n",
        '    parent, media, hashes = hash_of(""), 0, list[bytes]()\n',
        "unit/connector/test_finding unit/connector/test_conversations",
        "Prefill never finds a prompt in an engine with another PYTHONHASHSEED.",
    ),
    Mutant(
        "sought-place",
        "first = begin // facts.block_size",
        "first = 0",
        "unit/connector/test_finding unit/connector/test_conversations",
        "Prefill never reads the end of a long conversation.",
    ),
    Mutant(
        "sought-behind",
        "in self.finds.pop_behind(self.decode.has_load):",
        "in ():",
        "unit/connector/test_finding unit/connector/test_conversations",
        "A prompt that waits for another one's load waits for ever.",
    ),
)
