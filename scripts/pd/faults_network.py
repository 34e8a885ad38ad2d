"""A wire that is slow, loses packets, or is cut."""

import time
from functools import partial
from typing import Final

from pd.faults_deck import LONG, TALK
from pd.faults_processes import strike_prefill, three_moments
from pd.faults_scene import Fault, Scene
from pd.netns import PERFECT, Quality

REQUESTS: Final = 6
CUT: Final = Quality(up=False)
CRAWLING: Final = Quality(rate=16e6)  # a LONG one takes 6.3 s: longer than a lease, or an offer
BLINK_S: Final = 1.0


def cut_wire(scene: Scene) -> None:
    """All packets are lost and nobody is told; when every request has ended, they pass again."""
    strike_prefill(scene, partial(_set, scene, CUT), partial(_set, scene, PERFECT))


def blink(scene: Scene) -> None:
    """All packets of one second are lost, before, during and after transfers."""
    early = three_moments(scene)
    _set(scene, CUT)
    for request in early:
        request.send(scene)
    time.sleep(BLINK_S)
    _set(scene, PERFECT)
    scene.collect()


def interface_down(scene: Scene) -> None:
    """Prefill's interface goes down; when every request has ended, it comes up again."""
    prefill = scene.pair.prefill
    strike_prefill(scene, prefill.unplug, prefill.plug)


def delay(scene: Scene) -> None:
    """Packets take 2 ms each way."""
    ask_in(scene, Quality(delay_s=0.002))


def lose_1_percent(scene: Scene) -> None:
    """Of a hundred packets one is lost."""
    ask_in(scene, Quality(loss=0.01))


def lose_5_percent(scene: Scene) -> None:
    """Of a hundred packets five are lost."""
    ask_in(scene, Quality(loss=0.05))


def crawl(scene: Scene) -> None:
    """A read takes longer than a lease, and longer than an offer lasts."""
    loads = scene.clients.loads()
    _set(scene, CRAWLING)
    (question,) = scene.deck.draw(LONG, 1)
    scene.crowd.send(question, partial(scene.clients.apart, question))
    scene.collect()
    scene.expect(scene.clients.loads() > loads, "the slow read was given up")


def ask_in(scene: Scene, quality: Quality) -> None:
    """Requests of both lengths, all at once; all are to be read in spite of it."""
    loads = scene.clients.loads()
    _set(scene, quality)
    for question in scene.deck.draw(LONG, REQUESTS // 2) + scene.deck.draw(TALK, REQUESTS // 2):
        scene.crowd.send(question, partial(scene.clients.apart, question))
    scene.collect()
    read = scene.clients.loads() - loads
    scene.expect(read == REQUESTS, f"{read:g} of {REQUESTS} were read")


def _set(scene: Scene, quality: Quality) -> None:
    wire = scene.pair.wire
    if wire is None:
        raise RuntimeError("needs two hosts")
    wire.quality = quality


NETWORK_FAULTS: Final = (
    Fault("cut-wire", "network", cut_wire),
    Fault("interface-down", "network", interface_down),
    Fault("blink", "network", blink),
    Fault("delay", "network", delay),
    Fault("lose-1-percent", "network", lose_1_percent),
    Fault("lose-5-percent", "network", lose_5_percent),
    Fault("crawl", "network", crawl),
)
