"""One life of one engine: its ranks, its scheduler, and vLLM's steps.

A step has pieces, between which anything may happen: the schedule; each rank takes the commands;
each rank computes and hands over its report; the scheduler takes in what all ranks have reported.
"""

from collections.abc import Callable, Sequence

from nixl_kv.ids import Generation, Incarnation, engine_incarnation
from nixl_kv.protocol import events
from sim.book import Book, Pool
from sim.rank import RankLife, Seat, Surroundings
from sim.sides import Side
from sim.violations import Violation
from sim.vllm import Forward, Reported

Piece = tuple[RankLife | None, Callable[[], None]]
MakeSide = Callable[[Book, "Engine"], Side]


class Engine:
    """See the module's head."""

    def __init__(self, seats: Sequence[Seat], around: Surroundings, make_side: MakeSide) -> None:
        """Begin a life: all memory has other contents."""
        self.seats = seats
        self.spoil(list(range(seats[0].memory.blocks)))
        for seat in seats:
            for slot in range(seat.slots.count):
                seat.slots.write(slot, Generation(bytes(16)))
        self.ranks = [RankLife(seat, around) for seat in seats]
        self.side = make_side(Book(Pool(seats[0].memory.blocks, self.spoil)), self)
        self.loads, self.sends = Reported(len(seats)), Reported(len(seats))
        self._failed: set[str] = set()
        self._pieces: list[Piece] = []
        self._first = [events.Siblings(tuple(rank.described.layout for rank in self.ranks))]

    def __repr__(self) -> str:
        """Its requests and their states."""
        return f"<{self.name}: {self.side!r}>"

    @property
    def name(self) -> str:
        """As schedules write it."""
        return self.seats[0].engine.name

    @property
    def life(self) -> Incarnation:
        """The engine's incarnation."""
        return engine_incarnation(Incarnation(rank.incarnation) for rank in self.ranks)

    @property
    def stopped(self) -> bool:
        """Whether a rank of it stands still."""
        return any(rank.stopped for rank in self.ranks)

    def piece(self) -> bool:
        """Go on with the step, or begin one; False if a stopped rank is in the way."""
        if not self._pieces:
            self._begin()
            return True
        rank, call = self._pieces[0]
        if rank is not None and rank.stopped:
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

    def spoil(self, blocks: list[int]) -> None:
        """These blocks are anybody's."""
        for seat in self.seats:
            seat.memory.spoil(blocks)

    def _begin(self) -> None:
        commands, forwards = self.side.schedule()
        commands, self._first = [*self._first, *commands], []
        pieces: list[Piece] = [(rank, self._swap(rank, commands)) for rank in self.ranks]
        pieces += [(rank, self._work(rank, forwards)) for rank in self.ranks]
        self._pieces = [*pieces, (None, self._end)]

    def _swap(self, rank: RankLife, commands: list[events.Command]) -> Callable[[], None]:
        return lambda: rank.swap(commands)

    def _work(self, rank: RankLife, forwards: list[Forward]) -> Callable[[], None]:
        """A forward, and then the rank's report."""

        def work() -> None:
            for forward in forwards:
                rank.seat.memory.write(forward.prompt, forward.table, forward.tokens)
            report = rank.take()
            if not report.failed_recving <= report.finished_recving:
                raise Violation("failed is no subset of finished", str(report))
            number = rank.seat.number
            self._failed |= report.failed_recving
            self.loads.note(number, report.finished_recving, self._expects("recving"))
            self.sends.note(number, report.finished_sending, self._expects("sending"))

        return work

    def _expects(self, kind: str) -> Callable[[str], bool]:
        return lambda request: self.side.expects(kind, request)

    def _end(self) -> None:
        self.side.reported(self.loads.take(), self._failed, self.sends.take())
        self.side.update()
