"""What is fuzzed: for each decoder valid inputs to start from, and what others may end in."""

import base64
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import msgspec

from fuzz.decoders import inputs
from fuzz.decoders.mutate import Tree
from fuzz.decoders.rank import DIRECTORY_PORT, ENDPOINTS, HOST, RankUnderTest
from fuzz.decoders.samples import sample
from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.config import Config
from nixl_kv.engine.directory import DirectoryServer
from nixl_kv.errors import ConfigError, IncompatiblePeer, RemoteProtocolError
from nixl_kv.geometry import match
from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.geometry.plan import Reads, plan
from nixl_kv.ids import Rank
from nixl_kv.protocol import messages
from nixl_kv.protocol.messages import Description
from nixl_kv.protocol.ticket import FIELD, WIRE_VERSION, SealedTicket, Ticket, TicketHead
from nixl_kv.transport.base import FromPeer

MAX_MESSAGES = 100
DESCRIPTION: Final = sample(Description)

Run = Callable[[bytes], object]


class NoInputError(Exception):
    """The bytes are not even what the code before the decoder would let through."""


@dataclass(frozen=True)
class Target:
    """A decoder, or what is behind one.

    `form` is how inputs are written; `run` is given one and returns, or raises one of `allowed`.
    """

    name: str
    run: Run
    seeds: Sequence[bytes]
    form: str = "msgpack"
    allowed: tuple[type[Exception], ...] = (RemoteProtocolError,)

    def parse(self, data: bytes) -> Tree:
        """An input as a tree."""
        return json.loads(data) if self.form == "json" else msgspec.msgpack.decode(data)

    def write(self, tree: Tree) -> bytes:
        """A tree as an input.

        Raises:
            ValueError: if it cannot be written in this form.
        """
        try:
            if self.form == "json":
                return json.dumps(tree, default=repr).encode()
            return msgspec.msgpack.encode(tree)
        except (OverflowError, TypeError, RecursionError, UnicodeEncodeError) as error:
            raise ValueError(str(error)) from error


OWN_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""Of a description from a worker of the same engine: msgspec's own errors are good enough."""

REFUSALS: Final = (IncompatiblePeer, *OWN_ERRORS)
"""What a remote layout may end in; all of them are caught where peers are joined."""


def targets() -> list[Target]:
    """All of them; new decoders of the wire are found by their names."""
    decoders: Mapping[str, Run] = {
        name: function
        for name, function in vars(messages).items()
        if name.startswith("decode") and callable(function)
    }
    every = inputs.every_message()
    return [
        *(
            Target(f"messages.{name}", run, every, allowed=(RemoteProtocolError, *_own(name)))
            for name, run in decoders.items()
        ),
        Target("ticket", _ticket, inputs.tickets(), "json"),
        Target("ticket payload", _payload, inputs.ticket_payloads()),
        Target("Config.parse", _config, inputs.configs(), "json", (ConfigError,)),
        Target("directory", _directory, every),
        Target("prefill rank", _ask_rank, inputs.questions()),
        Target("decode rank", _answer_rank, inputs.answers()),
        Target("geometry", _geometry, inputs.layouts(), allowed=REFUSALS),
    ]


def _own(decoder: str) -> tuple[type[Exception], ...]:
    return OWN_ERRORS if decoder == "decode_rank" else ()


def _from_json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NoInputError from error


def _ticket(data: bytes) -> Ticket:
    return SealedTicket.parse(_from_json(data)).open()


def _payload(data: bytes) -> tuple[TicketHead, Ticket]:
    """Of a ticket that a client has made up."""
    payload = base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")
    sealed = SealedTicket.parse({FIELD: f"{WIRE_VERSION}..{payload}"})
    return sealed.head(), sealed.open()


def _config(data: bytes) -> Config:
    """No name is resolved: what is wrong would be the resolver's fault, and take its time."""
    given = _from_json(data)
    if not isinstance(given, dict):
        raise NoInputError
    literal = partial(socket.getaddrinfo, flags=socket.AI_NUMERICHOST)
    with mock.patch("socket.getaddrinfo", literal):
        return Config.parse(given, {})


def _directory(data: bytes) -> None:
    """A message to an engine's directory."""
    control = MemoryControl(MemoryNetwork())
    server = DirectoryServer(control, HOST, DIRECTORY_PORT)
    server.publish(DESCRIPTION)
    control.inbox.append(FromPeer(b"route", data))
    server.turn(0)


def _ask_rank(data: bytes) -> None:
    """Messages to a prefill rank, in order."""
    payloads = _payloads(data)
    with RankUnderTest() as rank:
        for _, payload in payloads:
            rank.ask(payload)
        rank.finish()


def _answer_rank(data: bytes) -> None:
    """Answers to a decode rank, in order."""
    payloads = _payloads(data)
    with RankUnderTest() as rank:
        for number, payload in payloads:
            known = isinstance(number, int) and 0 <= number < len(ENDPOINTS)
            rank.answer(ENDPOINTS[number if known else 0], payload)
        rank.finish()


def _geometry(data: bytes) -> Reads | None:
    """Could a cache be read that says this of itself? None if the two do not fit."""
    mine, theirs = inputs.LARGE_CACHE.layout(), msgspec.msgpack.decode(data, type=CacheLayout)
    if match.layout_mismatches([mine], [theirs]):
        return None
    (route, *_) = match.routes(Rank(0), [match.holdings(mine)], [match.holdings(theirs)])
    table = Table.of(range(1, 65))
    local, remote = ([table] * len(layout.groups) for layout in (mine, theirs))
    return plan(mine, theirs, route.share).reads(local, remote, range(64))


def _payloads(data: bytes) -> list[tuple[Any, bytes]]:
    """Of a conversation: where each message comes from, and the message."""
    try:
        parts = [(number, message) for number, message in msgspec.msgpack.decode(data)]
        parts = parts[:MAX_MESSAGES]
        return [(number, msgspec.msgpack.encode(message)) for number, message in parts]
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise NoInputError from error
