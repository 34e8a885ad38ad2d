"""One life of one engine: its ranks, its scheduler, and vLLM's steps.

A step has pieces, between which anything may happen: the schedule; each rank gets the commands;
each rank computes and hands over its report; the scheduler handles what all ranks have reported.
"""

from collections.abc import Callable, Sequence

from lab.sim.network import HOST
from lab.sim.rank import MODEL, Environment, RankLife, Seat
from lab.sim.schedulers import DecodeEngineScheduler, PrefillEngineScheduler, Scheduler
from lab.sim.vllm import Aggregator, BlockManager, BlockPool, Forward
from nixl_kv.connector.prefill import Address
from nixl_kv.geometry.ranks import ParallelShape
from nixl_kv.ids import EngineId, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import Description
from nixl_kv.transfer.directory_server import DirectoryServer, describe_engine
from nixl_kv.transport.memory_control import MemoryControl

PORT = 5600

Piece = tuple[RankLife | None, Callable[[], None]]


class Engine:
    """See the module's head."""

    def __init__(self, seats: Sequence[Seat], environment: Environment) -> None:
        """Start a life: all memory has other contents."""
        self._seats = seats
        self._environment = environment
        self._overwrite(list(range(seats[0].cache.num_blocks)))
        self.ranks = [RankLife(seat, environment) for seat in seats]
        self.description = self._describe()
        self.directory_control = MemoryControl(environment.network, f"{self.name}.directory")
        self._directory: DirectoryServer | None = None
        self.scheduler: Scheduler = self._make_scheduler()
        self._ended = Aggregator(len(seats))
        self._failed: set[RequestId] = set()
        self._pieces: list[Piece] = []
        layouts = tuple(rank.parts.description.layout for rank in self.ranks)
        self._first: list[events.Command] = [events.SetEngineLayouts(layouts)]

    def __repr__(self) -> str:
        """Its requests and their states."""
        return f"<{self.name}: {self.scheduler!r}>"

    @property
    def name(self) -> str:
        """As schedules write it."""
        return self._seats[0].process.name

    @property
    def is_stopped(self) -> bool:
        """Whether a rank of it stands still."""
        return any(rank.is_stopped for rank in self.ranks)

    @property
    def num_pieces(self) -> int:
        """What is left of the step that is under way."""
        return len(self._pieces)

    def serve_directory(self) -> None:
        """Answer who asks for the engine's description, unless its process stands still."""
        is_asked = bool(self.directory_control.inbox)
        if self._directory is not None and is_asked and not all(r.is_stopped for r in self.ranks):
            self._directory.turn(0)

    def leave(self) -> None:
        """Its process has died."""
        self.directory_control.close()
        for rank in self.ranks:
            rank.control.close()

    def piece(self) -> bool:
        """Go on with the step, or begin one; False if a stopped rank is in the way."""
        if not self._pieces:
            self._begin()
            return True
        rank, call = self._pieces[0]
        if rank is not None and rank.is_stopped:
            return False
        self._pieces.pop(0)
        call()
        return True

    def settle(self) -> bool:
        """End the step that is under way, if one is; False if a stopped rank is in the way."""
        while self._pieces:
            if not self.piece():
                return False
        return True

    def step(self) -> bool:
        """What is left of this step, or a whole one."""
        if not self._pieces:
            self._begin()
        return self.settle()

    def _describe(self) -> Description:
        descriptions = [rank.parts.description for rank in self.ranks]
        shape = ParallelShape(len(self.ranks), 1)
        return describe_engine(EngineId(self.name), MODEL, shape, descriptions)

    def _make_scheduler(self) -> Scheduler:
        """As `connector.scheduler` has its two halves; prefill is found by its directory."""
        environment, caches = self._environment, [seat.cache for seat in self._seats]
        pool = BlockPool(caches[0].num_blocks, self._overwrite)
        blocks = BlockManager(pool, environment.window)
        if not self._seats[0].is_prefill:
            return DecodeEngineScheduler(blocks, caches, environment.clock, environment.config)
        self._directory = DirectoryServer(self.directory_control, HOST, PORT)
        self._directory.publish(self.description)
        incarnation = self.description.incarnation
        address = Address(EngineId(self.name), incarnation, HOST, self._directory.port)
        return PrefillEngineScheduler(blocks, caches, address, environment.config)

    def _overwrite(self, blocks: list[int]) -> None:
        """These blocks are anybody's."""
        for seat in self._seats:
            seat.cache.overwrite(blocks)

    def _begin(self) -> None:
        commands, forwards = self.scheduler.schedule()
        commands, self._first = [*self._first, *commands], []
        pieces: list[Piece] = [(rank, self._submit(rank, commands)) for rank in self.ranks]
        pieces += [(rank, self._work(rank, forwards)) for rank in self.ranks]
        self._pieces = [*pieces, (None, self._end)]

    def _submit(self, rank: RankLife, commands: list[events.Command]) -> Callable[[], None]:
        return lambda: rank.submit(commands)

    def _work(self, rank: RankLife, forwards: list[Forward]) -> Callable[[], None]:
        """A forward, and then the rank's report."""

        def work() -> None:
            for forward in forwards:
                rank.seat.cache.write(forward.prompt, forward.table, forward.tokens)
            ended, failed = rank.pop_ended()
            self._failed |= failed
            self._ended.add(rank.seat.number, ended, self.scheduler.expects_end)

        return work

    def _end(self) -> None:
        self.scheduler.on_ends(self._ended.pop_complete(), self._failed)
        self.scheduler.update()
