"""Asks running engines, over the control plane that they use among each other.

The directory of an engine answers with its description. That has the endpoint of each rank, and a
rank answers with its status. Engines answer only those who have their key, unless they run with
`insecure`.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from nixl_kv.config import KEY_VARIABLE, Config
from nixl_kv.errors import ConfigError, ForeignVersion, NixlKVError, TransportError
from nixl_kv.ids import ANY_INCARNATION, Endpoint, EngineId, endpoint_at
from nixl_kv.keys import Keys, find_user_key, parse_key, read_key_file
from nixl_kv.protocol import messages
from nixl_kv.transport.base import FromEndpoint, Lost
from nixl_kv.transport.zmq import ZmqControl

ANSWER_TIMEOUT_S: Final = 5.0

ADDRESS: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>[0-9]{1,5})")
"""`HOST:PORT`, where an IPv6 literal has brackets."""

MAX_PORT: Final = 65_535

T = TypeVar("T")

RankAnswer: TypeAlias = tuple[messages.RankDescription, messages.Status | NixlKVError]
"""A rank, and its status; or why there is none."""


def read_keys(path: Path | None, *, insecure: bool = False) -> Keys | None:
    """The keys of `--key-file`, else of the environment, else of this user's engines here.

    `insecure` means none of these: the engine has no key.

    Raises:
        ValueError: names the option, or the variable, and what is wrong with it.
    """
    if insecure and path is not None:
        raise ValueError("--key-file and --insecure are given; allowed: one of them")
    if insecure:
        return None
    text = os.environ.get(KEY_VARIABLE)
    try:
        if path is not None:
            return read_key_file(path)
        return parse_key(text, KEY_VARIABLE) if text else find_user_key()
    except ConfigError as error:
        words = str(error)
        raise ValueError(words if path is None else f"--{words.replace('_', '-', 1)}") from error


def describe_at(where: str, *, option: str, keys: Keys | None) -> messages.Description:
    """The description of the engine at `HOST:PORT`. See `ask_first`."""
    return ask_first(where, partial(describe, keys=keys), option=option)


def own_address(environ: Mapping[str, str]) -> str:
    """The `HOST:PORT` of an engine that is configured by these variables alone.

    Raises:
        ConfigError: names the variable, its value and what is allowed.
    """
    config = Config.parse({"insecure": True}, environ)
    return endpoint_at(config.host, config.port).removeprefix("tcp://")


def ask_first(where: str, ask: Callable[[Endpoint], T], *, option: str) -> T:
    """What the first endpoint answers that `HOST:PORT` may mean.

    Raises:
        ValueError: names the option, the address and what went wrong.
    """
    errors: list[str] = []
    for endpoint in endpoints_at(where, option=option):
        try:
            return ask(endpoint)
        except NixlKVError as error:  # noqa: PERF203 - the next one may answer
            errors.append(str(error))
    raise ValueError(f"{option} {where}: {'; '.join(dict.fromkeys(errors))}")


def endpoints_at(where: str, *, option: str) -> list[Endpoint]:
    """All endpoints that `HOST:PORT` may mean; the host is a name or an IP literal.

    Raises:
        ValueError: names the option, its value and what is allowed, or that there is no such host.
    """
    match = ADDRESS.fullmatch(where)
    if match is None or not 1 <= int(match["port"]) <= MAX_PORT:
        raise ValueError(f"{option} is {where!r}; allowed: HOST:PORT")
    host, port = match["ipv6"] or match["host"], int(match["port"])
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", error)
        raise ValueError(f"{option} {where}: {host}: {reason}") from error
    return list(dict.fromkeys(endpoint_at(str(info[4][0]), port) for info in infos))


def describe(endpoint: Endpoint, keys: Keys | None = None) -> messages.Description:
    """The description of the engine whose directory is at this endpoint.

    Raises:
        NixlKVError: if nobody answers, or not with a description.
    """
    question = messages.encode(
        messages.Describe(incarnation=ANY_INCARNATION, engine=EngineId("any"))
    )
    message = _decode(_exchange({endpoint: question}, keys)[endpoint], messages.decode_answer)
    if isinstance(message, messages.Refusal):
        raise TransportError(f"refused: {message.reason}")
    if not isinstance(message, messages.Description):
        raise TransportError(f"answered with {type(message).__name__}")
    return message


def rank_statuses(
    description: messages.Description, keys: Keys | None = None, request: str = ""
) -> list[RankAnswer]:
    """What each rank of an engine says of itself, in rank order.

    Args:
        description: the engine's.
        keys: the engine's, if it has any.
        request: tell the story of requests whose id contains this; empty for none.
    """
    questions = {
        rank.endpoint: messages.encode(
            messages.StatusRequest(incarnation=rank.incarnation, request=request)
        )
        for rank in description.ranks
    }
    answers = _exchange(questions, keys)
    return [(rank, _status(answers[rank.endpoint])) for rank in description.ranks]


def ask_to_drain(endpoint: Endpoint, keys: Keys | None = None, *, undo: bool = False) -> int:
    """Tell the engine whose directory is at this endpoint to offer nothing new, or to offer again.

    Returns how many requests have arrived before and are not offered yet.

    Raises:
        NixlKVError: if nobody answers, or the engine refuses.
    """
    question = messages.Drain(incarnation=ANY_INCARNATION, undo=undo)
    answer = _order(endpoint, question, messages.Draining, keys)
    if answer.is_refused:
        raise TransportError("refused: an engine without a key is drained from its own machine")
    return answer.num_awaited


def set_weights(endpoint: Endpoint, weights: str, keys: Keys | None = None) -> str:
    """Give the engine whose directory is at this endpoint another label; returns the former one.

    Raises:
        NixlKVError: if nobody answers, or the engine refuses.
    """
    question = messages.SetWeights(incarnation=ANY_INCARNATION, weights=weights)
    answer = _order(endpoint, question, messages.WeightsSet, keys)
    if answer.refusal:
        raise TransportError(f"refused: {answer.refusal}")
    return answer.former


def _order(
    endpoint: Endpoint,
    question: messages.Drain | messages.SetWeights,
    kind: type[T],
    keys: Keys | None,
) -> T:
    """Send an order to an engine's directory, and wait for its answer of this kind."""
    packed = _exchange({endpoint: messages.encode(question)}, keys)[endpoint]
    answer = _decode(packed, messages.decode_to_tool)
    if not isinstance(answer, kind):
        raise TransportError(f"answered with {type(answer).__name__}")
    return answer


def _status(answer: bytes | TransportError) -> messages.Status | NixlKVError:
    try:
        status = _decode(answer, messages.decode_to_tool)
    except NixlKVError as error:
        return error
    if not isinstance(status, messages.Status):
        return TransportError(f"answered with {type(status).__name__}")
    return status


def _decode(
    answer: bytes | TransportError, decode: Callable[[bytes], T | messages.VersionRefusal]
) -> T:
    """What has come.

    Raises:
        NixlKVError: if nothing has, or it is no such answer.
    """
    if isinstance(answer, TransportError):
        raise answer
    message = decode(answer)
    if isinstance(message, messages.VersionRefusal):
        raise ForeignVersion(str(message))
    return message


def _exchange(
    questions: Mapping[Endpoint, bytes], keys: Keys | None
) -> dict[Endpoint, bytes | TransportError]:
    """Send each endpoint a message, and wait for one answer of each."""
    answers: dict[Endpoint, bytes | TransportError] = {}
    control = ZmqControl(keys)
    try:
        for endpoint, question in questions.items():
            try:
                control.send(endpoint, question)
            except TransportError as error:  # noqa: PERF203 - the others may be reached
                answers[endpoint] = error
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while len(answers) < len(questions) and (left_s := deadline - time.monotonic()) > 0:
            for item in control.poll(left_s):
                match item:
                    case FromEndpoint():
                        answers.setdefault(item.endpoint, item.payload)
                    case Lost():
                        answers.setdefault(item.endpoint, TransportError(item.reason))
    finally:
        control.close()
    silence = TransportError(f"no answer within {ANSWER_TIMEOUT_S:g} s")
    return {endpoint: answers.get(endpoint, silence) for endpoint in questions}
