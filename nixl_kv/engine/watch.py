"""Learns which offers decode has released, from the directory of the engine that computes them.

An API server answers early (`connector/early_answer.py`) and watches the offers of these requests.
A watch that is lost costs only prefill's work: the request is computed to its end.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from nixl_kv.errors import LimitedLog, RemoteProtocolError, TransportError, get_logger, run_guarded
from nixl_kv.ids import Nonce
from nixl_kv.protocol import messages
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.base import ControlPlane, FromEndpoint, Lost

logger = get_logger(__name__)

# How long the link stays open after the last message, while no offer is watched.
LINK_KEPT_S: Final = 5.0
LOG_INTERVAL_S: Final = 60.0
LOST: Final = (
    "cannot learn from %s which offers decode has released (%s): prefill computes their requests "
    "to the end"
)
FAILED: Final = "watching offers failed; it goes on"


class OfferWatch:
    """Any thread may call `start`, `add` and `discard`. Its own thread uses `control`.

    The thread sleeps, and has no link, while no offer is watched.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._watched: dict[Nonce, Callable[[], object]] = {}
        self._added: deque[Ticket] = deque()
        self._log = LimitedLog(logger, time.monotonic, interval_s=LOG_INTERVAL_S)

    def start(self) -> None:
        threading.Thread(target=self._main, name="nixl-kv-watch", daemon=True).start()

    def add(self, pair: Ticket, on_released: Callable[[], object]) -> None:
        """Its thread calls `on_released` once if decode releases the offer before `discard`."""
        self._watched[pair.nonce] = on_released
        self._added.append(pair)
        self._control.wake()

    def discard(self, nonce: Nonce) -> None:
        self._watched.pop(nonce, None)

    def turn(self, timeout_s: float | None = None) -> None:
        """Ask about new offers, and wait for answers."""
        while self._added:
            self._ask(self._added.popleft())
        if timeout_s is None and self._control.links():
            timeout_s = LINK_KEPT_S
        for item in self._control.poll(timeout_s):
            match item:
                case FromEndpoint():
                    self._on_answer(item)
                case Lost() if self._watched:
                    self._log.warning(LOST, item.endpoint, item.reason)
        for link in self._control.links():
            if not self._watched and link.idle_s >= LINK_KEPT_S:
                self._control.disconnect(link.endpoint)

    def _main(self) -> None:
        while True:
            run_guarded(self.turn, FAILED)

    def _ask(self, pair: Ticket) -> None:
        question = messages.WatchOffer(incarnation=pair.incarnation, nonce=pair.nonce)
        try:
            self._control.send(pair.endpoint, messages.encode(question))
        except TransportError as error:
            self._log.warning(LOST, pair.endpoint, error)

    def _on_answer(self, item: FromEndpoint) -> None:
        try:
            message = messages.decode_to_tool(item.payload)
        except RemoteProtocolError as error:
            self._log.warning(LOST, item.endpoint, error)
            return
        for nonce in message.nonces if isinstance(message, messages.OffersReleased) else ():
            on_released = self._watched.pop(Nonce(nonce), None)
            if on_released is not None:
                on_released()
