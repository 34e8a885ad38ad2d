"""Publishes the engine's description: a thread in the scheduler's process that answers Describe.

It sleeps until somebody asks. What it publishes is replaced whole after a wake-up.
"""

import logging
import threading
from typing import Final

from nixl_kv.errors import RemoteProtocolError, TransportError
from nixl_kv.ids import shown
from nixl_kv.protocol import ticket
from nixl_kv.protocol.messages import (
    WIRE_VERSION,
    Describe,
    Description,
    Refusal,
    decode_to_engine,
    encode,
)
from nixl_kv.transport.control import Control, FromPeer
from nixl_kv.transport.door import Bounds

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0

BOUNDS: Final = Bounds(message_bytes=4096, answers=8)
"""A question is short, and who asks takes the answer, which is long, before asking again."""


class Publisher:
    """Listens on the engine's host and port."""

    def __init__(self, host: str, port: int, control: Control | None = None) -> None:
        """Bind and start.

        Args:
            host: an IP literal.
            port: 0 takes any free one.
            control: what to listen with, its own from now on; None for one without keys.

        Raises:
            TransportError: if the address cannot be bound.
        """
        self._control = control or Control()
        self.host = host
        self.port = self._control.listen(ticket.bind_address(host), port, BOUNDS)
        self._description: Description | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="nixl-kv-publisher", daemon=True)
        self._thread.start()

    def publish(self, description: Description) -> None:
        """What to answer from now on."""
        self._description = description

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._stopping = True
        self._control.wake()
        self._thread.join(timeout=STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._control.close()

    def _main(self) -> None:
        while not self._stopping:
            for item in self._control.poll(None):
                if isinstance(item, FromPeer):
                    self._answer(item)

    def _answer(self, item: FromPeer) -> None:
        """Whatever a stranger sends, the thread lives on."""
        try:
            self._control.reply(item.route, encode(self._decide(decode_to_engine(item.payload))))
        except (RemoteProtocolError, TransportError) as error:
            logger.warning("request for a description dropped: %s", error)

    def _decide(self, message: Describe) -> Description | Refusal:
        mine = self._description
        if mine is None:
            reason = "this engine is still starting"
        elif message.incarnation == ticket.ANY:
            return mine
        elif message.engine != mine.engine:
            reason = f"remote_engine_id is {message.engine!r}, but here is {mine.engine!r}"
        elif message.incarnation != mine.incarnation:
            reason = (
                f"incarnation is {shown(message.incarnation)}, but {mine.engine!r} "
                f"has begun the life {shown(mine.incarnation)} since"
            )
        else:
            return mine
        return Refusal(WIRE_VERSION, message.incarnation, message.engine, reason)
