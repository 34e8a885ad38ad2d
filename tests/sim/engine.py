"""One life of one engine: its ranks, its scheduler, and vLLM's steps.

A step has pieces, between which anything may happen: the schedule; each rank gets the commands;
each rank computes and hands over its report; the scheduler handles what all ranks have reported.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from harness.local.memory_control import MemoryControl
from nixl_kv.connector.prefill import Address
from nixl_kv.engine.directory import DirectoryServer, describe_engine
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import Endpoint, EngineId, RequestId, endpoint_at
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import Description
from sim.content import PrefixCache
from sim.planes import HOST
from sim.rank import MODEL, Environment, RankLife, Seat
from sim.schedulers import EngineScheduler
from sim.vllm import Aggregator, BlockManager, BlockPool, Forward

DIRECTORY_PORT: Final = 50
"""After the port of the engine's first rank."""

Piece = tuple[RankLife | None, Callable[[], None]]


class Engine:
    def __init__(self, seats: Sequence[Seat], environment: Environment) -> None:
        self._seats = seats
        self._environment = environment
        self.name = seats[0].process.name
        self.is_prefill, self.is_decode = seats[0].is_prefill, seats[0].is_decode
        self._freed: list[int] = []  # blocks that a step may write as soon as it begins
        self._overwrite(list(range(seats[0].cache.num_blocks)))
        self.is_paused = False  # vLLM makes no steps; the transfer threads go on, and know that
        self.is_stalled = False  # likewise, but they do not know
        self.is_draining = False  # it takes no new request
        self.is_asleep = False
        self.is_going_to_sleep = False  # as soon as nothing is held
        self.directory_control = MemoryControl(environment.network, f"{self.name}.directory")
        self._directory: DirectoryServer | None = None
        self.prefix_cache: PrefixCache | None = None  # if other engines read from it
        if environment.num_content_slots:
            self.prefix_cache = PrefixCache(seats[0].cache.num_blocks)
        if self.is_prefill or environment.takes_hints or self.prefix_cache is not None:
            port = seats[0].port + DIRECTORY_PORT
            self._directory = DirectoryServer(
                self.directory_control, HOST, port, clock=environment.clock
            )
        cache = self.prefix_cache
        on_taken = (lambda _: None) if cache is None else cache.take
        blocks = BlockPool(seats[0].cache.num_blocks, self._freed.extend, on_taken)
        self.scheduler = EngineScheduler(
            seats, BlockManager(blocks, environment.window, prefix_cache=cache), environment
        )
        self._pieces: list[Piece] = []
        self._ended = Aggregator(len(seats))
        self._failed: set[RequestId] = set()
        self._released: set[RequestId] = set()
        self._start_life()

    def __repr__(self) -> str:
        return f"<{self.name}: {self.scheduler!r}>"

    @property
    def takes_requests(self) -> bool:
        return not (self.is_draining or self.is_asleep or self.is_going_to_sleep)

    @property
    def hints_at(self) -> Endpoint | None:
        """Where its scheduler hears of loads between its steps."""
        if self._directory is None or not self._environment.takes_hints:
            return None
        return endpoint_at(HOST, self._directory.port)

    @property
    def is_stopped(self) -> bool:
        return any(rank.is_stopped for rank in self.ranks)

    def serve_directory(self) -> None:
        """Answer requests for the engine's description, unless its process stands still."""
        is_still = bool(self.ranks) and all(rank.is_stopped for rank in self.ranks)
        if self._directory is not None and not is_still:
            self._directory.turn(0)

    def leave(self) -> None:
        self.directory_control.close()
        for rank in self.ranks:
            rank.control.close()

    def piece(self) -> bool:
        """Go on with the step, or begin one; False if a stopped rank is in the way."""
        if not self._pieces:
            if not self.is_resting:
                self._begin()
            return True
        rank, call = self._pieces[0]
        if rank is not None and rank.is_stopped:
            return False
        self._pieces.pop(0)
        call()
        return True

    @property
    def loses_loads_if_frozen(self) -> bool:
        """Whether vLLM 0.33 would run a load's request with a discarded cache: docs/faults.md."""
        return bool(self._pieces) or self.scheduler.decode.has_good_loads

    def settle(self) -> bool:
        """End the step that is under way, if one is; False if a stopped rank is in the way."""
        while self._pieces:
            if not self.piece():
                return False
        return True

    def step(self) -> bool:
        if not self._pieces and not self.is_resting:
            self._begin()
        return self.settle()

    def go_to_sleep(self) -> None:
        """vLLM's `sleep` in mode `abort`: all requests end; it sleeps when none is left."""
        for request in self.scheduler.living():
            self.scheduler.abort(request)
        self.is_going_to_sleep = True

    def freeze(self) -> None:
        """vLLM's `sleep` in mode `keep`: at once. Running requests are computed again later."""
        if not self.is_asleep:
            self.scheduler.decode.connector.ignore_hints()
            for request in self.scheduler.living():
                self.scheduler.preempt(request)
            self._fall_asleep()

    def wake(self) -> None:
        """Begin a new life of all ranks, if it sleeps; else it goes on."""
        self.is_going_to_sleep = False
        if self.is_asleep:
            self.is_asleep = False
            self._start_life()

    @property
    def is_resting(self) -> bool:
        return self.is_paused or self.is_stalled or self.is_asleep

    def reset(self) -> None:
        """Reset the cache for new weights, without a pause: requests go on."""
        if self.prefix_cache is not None:
            self.prefix_cache.reset(forgets=False)
        self.scheduler.reset()

    def pause(self, *, is_paused: bool) -> None:
        if self._directory is not None and is_paused != self.is_paused:
            self._directory.tell_ranks(is_paused=is_paused)
            self.serve_directory()
        self.is_paused = is_paused

    def _start_life(self) -> None:
        self.ranks = [RankLife(seat, self._environment) for seat in self._seats]
        self.description = self._describe()
        layouts = tuple(rank.parts.description.layout for rank in self.ranks)
        at = self.hints_at
        self._first: list[events.Command] = [events.SetEngine(EngineId(self.name), layouts, at)]
        if self.prefix_cache is not None:
            self._first.append(self.prefix_cache.begin_life())
        if self._directory is not None:
            self._directory.publish(self.description)
            engine, life = EngineId(self.name), self.description.incarnation
            self.scheduler.prefill.admission.address = Address(
                engine, life, HOST, self._directory.port
            )

    def _fall_asleep(self) -> None:
        """Discard the cache; reports that are owed come with the next step."""
        for rank in self.ranks:
            rank.stream.end()  # vLLM waits for the GPU
            rank.stop()
            self._take_report(rank)
        self.ranks = []
        self.is_asleep, self.is_going_to_sleep = True, False
        if self.prefix_cache is not None:
            self.prefix_cache.reset(forgets=True)
        self._overwrite(list(range(self._seats[0].cache.num_blocks)))

    def _describe(self) -> Description:
        descriptions = [rank.parts.description for rank in self.ranks]
        shape = ParallelShape(len(self.ranks), 1)
        return describe_engine(EngineId(self.name), MODEL, shape, descriptions)

    def _overwrite(self, blocks: list[int]) -> None:
        for seat in self._seats:
            seat.cache.overwrite(blocks)

    def _begin(self) -> None:
        if self._directory is not None:
            self.scheduler.decode.end_landed(self._directory.pop_hints())
        commands, forwards = self.scheduler.schedule()
        gone = list(self._freed)
        self._freed.clear()
        if self.prefix_cache is not None:
            taken, gone = self.prefix_cache.end_step()
            commands.insert(0, taken)
        commands, self._first = [*self._first, *commands], []
        # A load writes its own blocks; they may hold a local prefix by now.
        blocks, loading = self.scheduler.blocks.block_pool.blocks, self.scheduler.decode.requests
        junk = [block for block in gone if blocks[block].owner not in loading]
        pieces: list[Piece] = [(rank, partial(rank.submit, commands)) for rank in self.ranks]
        work = (gone, junk, forwards)
        pieces += [(rank, partial(self._work, rank, *work)) for rank in self.ranks]
        self._pieces = [*pieces, (None, self._end)]

    def _work(
        self, rank: RankLife, gone: list[int], junk: list[int], forwards: list[Forward]
    ) -> None:
        rank.compute(partial(self._write, rank, gone, junk, forwards))
        self._take_report(rank)

    def _write(
        self, rank: RankLife, gone: list[int], junk: list[int], forwards: list[Forward]
    ) -> None:
        """Others may write all blocks that were freed before this step; then its requests do.

        With a prefix cache freed blocks stay as they are, until others take them.
        """
        self._environment.observer.on_overwritten(rank, gone)
        rank.seat.cache.overwrite(junk)
        for forward in forwards:
            rank.seat.cache.write(forward.prompt, forward.table, forward.tokens)

    def _take_report(self, rank: RankLife) -> None:
        ended, failed = rank.pop_ended()
        self.scheduler.decode.connector.on_ready(rank.ready)
        rank.ready.clear()
        self.scheduler.prefill.admission.on_granted(rank.granted)
        rank.granted.clear()
        self._released |= rank.released
        rank.released.clear()
        self._failed |= failed
        self._ended.add(rank.seat.number, ended, self.scheduler.expects_end)

    def _end(self) -> None:
        for rank in self.ranks:
            rank.stream.end(keep=1)  # its sampled tokens, which vLLM waits for, come after those
        self.scheduler.on_ends(self._ended.pop_complete(), self._failed)
        self.scheduler.update()
        released, self._released = self._released, set()
        for request in self.scheduler.living():
            # The scheduler's hooks abort it, at times later.
            if request.request_id in released and not request.request_id.endswith("0"):
                self.scheduler.abort(request)
        if self.is_going_to_sleep and not self.scheduler.requests:
            self._fall_asleep()
