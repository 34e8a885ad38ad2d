"""Processes that are killed, stopped and restarted, before, during and after a transfer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pd.faults_asking import Ticket
from pd.faults_deck import LONG, TALK, Question
from pd.faults_scene import RELEASE_S, Fault, Scene
from pd.netns import Quality

SLOW: Final = Quality(rate=40e6)  # a LONG one takes 2.5 s
UNDER_WAY: Final = 2 << 20  # of 12 MiB for each of two
ENOUGH: Final = 2  # requests of each kind
TALKED: Final = 150  # tokens that decode still generates when it has read


@dataclass(frozen=True)
class Early:
    """A request that prefill has served, and decode has not seen yet."""

    question: Question
    ticket: Ticket

    def send(self, scene: Scene) -> None:
        """Let decode see it."""
        scene.crowd.send(self.question, lambda: scene.clients.decoded(self.question, self.ticket))


def three_moments(scene: Scene) -> Sequence[Early]:
    """Requests after their transfer and during it; returned are those before it."""
    clients, deck, wire = scene.clients, scene.deck, scene.pair.wire
    early, during = (
        [Early(question, clients.source.offer(question)) for question in deck.draw(LONG, ENOUGH)]
        for _ in range(2)
    )
    loads = clients.loads()
    for question in deck.draw(TALK, ENOUGH):
        short = question.cut(TALKED)
        scene.crowd.send(short, partial(clients.apart, short))
    scene.expect_soon(lambda: clients.loads() >= loads + ENOUGH, "decode read nothing before")
    if wire is not None:
        wire.quality = SLOW
    carried = wire.carried if wire is not None else 0
    for request in during:
        request.send(scene)
    if wire is not None:
        scene.expect_soon(lambda: wire.carried > carried + UNDER_WAY, "no transfer was under way")
    return early


def strike_prefill(scene: Scene, blow: Callable[[], None], lift: Callable[[], None]) -> None:
    """Decode lives: every request ends, and right, while prefill does not answer."""
    early = three_moments(scene)
    blow()
    for request in early:
        request.send(scene)
    scene.collect()
    lift()


def strike_decode(scene: Scene, blow: Callable[[], None], lift: Callable[[], None]) -> None:
    """Prefill lives: its blocks come back while decode does not answer."""
    early = three_moments(scene)
    blow()
    scene.expect_free(scene.clients.source, RELEASE_S)
    lift()
    for request in early:
        request.send(scene)
    scene.collect()


def kill_prefill(scene: Scene) -> None:
    """SIGKILL of all processes of prefill, and a restart."""
    prefill = scene.pair.prefill
    strike_prefill(scene, prefill.kill, prefill.revive)


def stop_prefill(scene: Scene) -> None:
    """SIGSTOP of prefill, and SIGCONT when every request has ended or is too late."""
    prefill = scene.pair.prefill
    strike_prefill(scene, prefill.freeze, prefill.thaw)


def restart_prefill(scene: Scene) -> None:
    """SIGTERM of prefill and a restart, while decode knows its former life."""
    prefill = scene.pair.prefill
    strike_prefill(scene, prefill.end, prefill.revive)


def kill_decode(scene: Scene) -> None:
    """SIGKILL of all processes of decode, and a restart."""
    decode = scene.pair.decode
    strike_decode(scene, decode.kill, decode.revive)


def stop_decode(scene: Scene) -> None:
    """SIGSTOP of decode until prefill has taken its blocks back, and SIGCONT."""
    decode = scene.pair.decode
    strike_decode(scene, decode.freeze, decode.thaw)


def restart_decode(scene: Scene) -> None:
    """SIGTERM of decode, and a restart."""
    decode = scene.pair.decode
    strike_decode(scene, decode.end, decode.revive)


PROCESS_FAULTS: Final = (
    Fault("kill-prefill", "network", kill_prefill),
    Fault("stop-prefill", "network", stop_prefill),
    Fault("restart-prefill", "network", restart_prefill),
    Fault("kill-decode", "network", kill_decode),
    Fault("stop-decode", "network", stop_decode, deadline_s=30.0),
    Fault("restart-decode", "network", restart_decode),
)
