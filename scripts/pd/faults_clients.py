"""Clients that hang up, and clients behind a router that go on while an engine restarts."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from pd.asking import WANT_TICKET
from pd.client import Client
from pd.faults_asking import Ended, ask
from pd.faults_deck import LONG, SHORT, Question
from pd.faults_pair import Victim
from pd.faults_scene import Fault, Scene
from pd.prompts import random_prompt

HANG_UPS: Final = 30
UNHEARD_SEED: Final = 10_000  # prompts whose answers nobody waits for
SOONEST_S: Final = 0.03  # decode has heard of the request by then
LATEST_S: Final = 0.3  # it has read the KV by then, and generates
FREE_WITHIN_S: Final = 1.0
LONG_ANSWER: Final = 200

LOAD: Final = 200
AT_A_TIME: Final = 8
BEFORE: Final = 40
AFTER: Final = 30
AFTER_AN_ERROR_S: Final = 2.0  # a client's manners, which also make the load last over a restart
ROUTED_S: Final = 30.0


def hang_up(scene: Scene, times: int = HANG_UPS) -> None:
    """Clients disconnect before, during and after the transfer, and while prefill computes."""
    clients = scene.clients
    step = (LATEST_S - SOONEST_S) / times
    for number in range(times):
        prompt = random_prompt(LONG.words, UNHEARD_SEED + number)
        after = SOONEST_S + step * number
        if number % 3 == 0:
            clients.source.disconnect_early(prompt, after, kv_transfer_params=WANT_TICKET)
            scene.ended.append(Ended("left", after))
        ticket = clients.source.ticket(prompt, WANT_TICKET)
        clients.target.disconnect_early(
            prompt, after, kv_transfer_params=ticket, max_tokens=LONG_ANSWER
        )
        scene.ended.append(Ended("left", after))
        scene.expect_free(clients.source, FREE_WITHIN_S)
        scene.expect_free(clients.target, FREE_WITHIN_S)


def restart_prefill_under_load(scene: Scene, load: int = LOAD) -> None:
    """Prefill is killed and restarted while 200 requests come through the router."""
    restart_under_load(scene, scene.pair.prefill, load)


def restart_decode_under_load(scene: Scene, load: int = LOAD) -> None:
    """Decode is killed and restarted while 200 requests come through the router."""
    restart_under_load(scene, scene.pair.decode, load)


def restart_under_load(scene: Scene, victim: Victim, size: int) -> None:
    """Kill it when some requests have ended, and restart it; most of the others come meanwhile."""
    load = _Load(scene.clients.front)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        ended = pool.map(load.ask, scene.deck.draw(SHORT, size - AFTER))
        load.enough.wait()
        victim.kill()
        victim.revive()
        scene.ended += ended
        scene.ended += pool.map(load.ask, scene.deck.draw(SHORT, AFTER))


class _Load:
    """Many clients of one router."""

    def __init__(self, front: Client) -> None:
        self.enough = threading.Event()
        """Set when the first requests have ended."""
        self._front = front
        self._left = iter(range(BEFORE))

    def ask(self, question: Question) -> Ended:
        """One request; a client that got an error pauses before its next."""
        ended = ask(question, lambda: self._front.complete(question.prompt, question.tokens))
        if next(self._left, None) is None:
            self.enough.set()
        if ended.kind != "right":
            time.sleep(AFTER_AN_ERROR_S)
        return ended


CLIENT_FAULTS: Final = (
    Fault("hang-up", "local", hang_up),
    Fault("load-kill-prefill", "local", restart_prefill_under_load, deadline_s=ROUTED_S),
    Fault("load-kill-decode", "local", restart_decode_under_load, deadline_s=ROUTED_S),
)
