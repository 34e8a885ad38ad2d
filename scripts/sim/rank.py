"""One life of one rank: the real loop with its machines, and what its worker does with it."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from typing_extensions import Self

from nixl_kv.connector.agents import Agents
from nixl_kv.connector.dataplane import DataPlane
from nixl_kv.connector.digests import Digests
from nixl_kv.connector.engine import Loop, Machinery
from nixl_kv.connector.registering import register
from nixl_kv.connector.reports import Reports
from nixl_kv.connector.results import Result
from nixl_kv.connector.sources import Household, Identity
from nixl_kv.ids import EngineId, Incarnation, Rank, new_incarnation
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.offers import Offers
from nixl_kv.protocol.receiver import Receiver
from nixl_kv.protocol.requests import Requests
from nixl_kv.protocol.sender import Sender
from nixl_kv.transport.slots import SlotPage
from sim.fabric import Background, Place, SimFabric, SimTransport
from sim.memory import Memory
from sim.net import Network, SimControl
from sim.seams import Clock, Fuse
from sim.violations import InjectedError, Violation

MODEL: Final = {"served_model_name": "tiny", "num_hidden_layers": "1"}


@dataclass(frozen=True)
class Times:
    """Seconds, as in the configuration."""

    offer_ttl: float = 3.0
    lease: float = 1.0
    timeout: float = 4.0


class Observer:
    """Is told of every result at the moment in which the step thread may take it."""

    def told(self, rank: "RankLife", result: Result) -> None:
        """A rank's loop has reported."""


class Results(deque[Result]):
    """What the loop hands over."""

    def __init__(self, told: Callable[[Result], None]) -> None:
        """Begin empty."""
        super().__init__()
        self._told = told

    def append(self, result: Result, /) -> None:
        """One more."""
        super().append(result)
        self._told(result)


@dataclass
class Surroundings:
    """What all ranks share."""

    clock: Clock
    network: Network
    fabric: SimFabric
    times: Times = field(default_factory=Times)
    observer: Observer = field(default_factory=Observer)


@dataclass(frozen=True)
class Seat:
    """What a rank is in all of its lives: number, cache, slots, address."""

    engine: Place
    number: int
    memory: Memory
    slots: SlotPage
    endpoint: str  # empty if it only decodes

    @property
    def name(self) -> str:
        """As schedules write it."""
        return f"{self.engine.name}.{self.number}"


@dataclass(frozen=True)
class Outside:
    """What a rank's thread deals with, besides memory."""

    fuse: Fuse
    control: SimControl
    background: Background


class _Top:
    """The top of the transfer thread: a planted death is survived, any other is found out."""

    def __init__(self, name: str) -> None:
        """Of this rank."""
        self.died = False
        self._name = name

    def __enter__(self) -> Self:
        """Nothing has happened yet."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """An error has come up, or none."""
        del kind, trace
        if isinstance(error, InjectedError):
            self.died = True
            return True
        if isinstance(error, Exception) and not isinstance(error, Violation):
            told = f"{self._name}: {type(error).__name__}: {error}"
            raise Violation("thread died", told) from error
        return False


class RankLife:
    """See the module's head."""

    def __init__(self, seat: Seat, around: Surroundings) -> None:
        """Begin a life."""
        self.seat = seat
        self.stopped = False
        self.died = False  # the loop restarts before its next turn
        fuse = Fuse()
        control = SimControl(seat.name, around.network, fuse)
        self.outside = Outside(fuse, control, Background())
        self.commands: deque[events.Command] = deque()
        self.results = Results(lambda result: around.observer.told(self, result))
        self.reports = Reports()
        self.machinery = self._build(around)
        self.fuse.guard(self.machinery.sender, "handle")
        self.fuse.guard(self.machinery.receiver, "handle")
        self.fuse.guard(self.machinery.receiver, "answered")
        self.fuse.guard(self.digests, "begin")
        self.fuse.guard(self.digests, "poll")
        self.loop = Loop(self.machinery, self.commands, self.results, clock=around.clock)

    def __repr__(self) -> str:
        """Its name."""
        return f"<RankLife {self.seat.name}>"

    @property
    def fuse(self) -> Fuse:
        """Of its thread."""
        return self.outside.fuse

    @property
    def control(self) -> SimControl:
        """Its sockets."""
        return self.outside.control

    @property
    def background(self) -> Background:
        """Makes and destroys its agents."""
        return self.outside.background

    @property
    def digests(self) -> Digests:
        """That it makes."""
        return self.machinery.data.digests

    @property
    def busy(self) -> bool:
        """Whether a turn of it would do something, besides looking at reads and the time."""
        digesting = self.digests.patience is not None
        return bool(self.commands or self.control.inbox or self.died or digesting)

    @property
    def incarnation(self) -> Incarnation:
        """Of this life."""
        return Incarnation(self.described.incarnation)

    @property
    def described(self) -> messages.RankDescription:
        """For peers."""
        return messages.decode_rank(self.machinery.description)

    def turn(self) -> None:
        """One turn of the loop; or its restart, if the last one died.

        Raises:
            Violation: if it dies of anything that was not planted.
        """
        step, self.died = (self.loop.restart if self.died else self.loop.turn), True
        with _Top(self.seat.name) as top:
            step()
        self.died = top.died

    def swap(self, commands: Iterable[events.Command]) -> None:
        """As `Worker.swap`, before the forward."""
        commands = list(commands)
        self.reports.expect(commands)
        self.commands.extend(commands)

    def take(self) -> Any:
        """As `Worker.results`, at the end of the step."""
        self.reports.note([self.results.popleft() for _ in range(len(self.results))])
        return self.reports.take()

    def _build(self, around: Surroundings) -> Machinery:
        """As `connector.setup.build`."""
        seat = self.seat
        make = partial(SimTransport, around.fabric, seat.engine, self.fuse)
        layout = seat.memory.layout()
        household = Household.alone(layout, Identity(MODEL, Rank(seat.number)))
        agents = Agents(make, household, clock=around.clock, background=self.background)
        serving = None
        if seat.endpoint:
            serving = make()
            register(serving, layout, seat.slots)
        else:
            agents.open()
        times = around.times
        life = new_incarnation()
        reader = messages.Reader(EngineId(seat.engine.name), life, seat.number)
        described = messages.RankDescription(
            life,
            seat.endpoint,
            b"" if serving is None else serving.metadata(),
            messages.Slots(seat.slots.address, seat.slots.count),
            layout,
        )
        offers = Offers(
            num_slots=seat.slots.count, offer_ttl_s=times.offer_ttl, lease_s=times.lease
        )
        requests = Requests(reader, timeout_s=times.timeout, renew_interval_s=times.lease / 5)
        return Machinery(
            control=self.control,  # type: ignore[arg-type]
            data=DataPlane(agents, household, Digests(layout, clock=around.clock)),
            serving=serving,
            slots=Slots(seat.slots, self.fuse.touch),  # type: ignore[arg-type]
            sender=Sender(life, offers),
            receiver=Receiver(reader, requests),
            description=messages.encode_rank(described),
        )


class Slots:
    """A slot page whose writer may die at any write."""

    def __init__(self, page: SlotPage, touch: Callable[[], None]) -> None:
        """Write to this page."""
        self._page = page
        self._touch = touch

    def __getattr__(self, name: str) -> Any:
        """Each thing that is done to it may be the last one."""
        self._touch()
        return getattr(self._page, name)
