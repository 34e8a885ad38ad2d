"""Talks to running engines over the control plane that engines use among themselves.

An engine's directory (`HOST:PORT`) answers with the engine description. The description has the
endpoint of each rank, and each rank answers with its status. An engine with a key answers only
clients that have the key.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from nixl_kv.config import KEY_VARIABLE, MAX_PORT, Config
from nixl_kv.errors import ForeignVersion, NixlKVError, TransportError
from nixl_kv.ids import ANY_INCARNATION, Endpoint, EngineId, endpoint_at
from nixl_kv.keys import Keys, ToolsKeys, find_user_key, parse_any_key, read_any_key_file
from nixl_kv.protocol import messages
from nixl_kv.transport.base import FromEndpoint, Lost
from nixl_kv.transport.zmq import ZmqControl

# A command of `nixl-kv` reports that an engine does not answer.
ANSWER_TIMEOUT_S: Final = 5.0
# `nixl-kv drain` asks again whether an engine has finished.
DRAIN_POLL_S: Final = 0.25

ADDRESS: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>[0-9]{1,5})")
"""`HOST:PORT`. An IPv6 literal stands in brackets."""

T = TypeVar("T")

AnyKeys: TypeAlias = Keys | ToolsKeys | None

_ENGINE_STATUS: Final = messages.StatusRequest(incarnation=ANY_INCARNATION)

RankAnswer: TypeAlias = tuple[messages.RankDescription, messages.Status | NixlKVError]
"""A rank with its status, or with the error that came instead."""


class NoAnswer(ValueError):  # noqa: N818 - a fact about an engine, not a failure of the tool
    """The engine did not answer, or refused. Names the option, the address and each error."""


@dataclass(frozen=True)
class EngineAnswer:
    """All that a running engine tells of itself."""

    where: str  # HOST:PORT
    description: messages.Description
    status: messages.Status | NixlKVError
    ranks: list[RankAnswer]  # in rank order


def read_keys(path: Path | None, *, insecure: bool = False) -> AnyKeys:
    """Find the key: `--key-file`, else the environment, else this user's key on this host.

    Returns None with `insecure`: the engine has no key.

    Raises:
        ValueError: --key-file and --insecure exclude each other.
        ConfigError: a key cannot be used; names the setting or variable.
    """
    if insecure and path is not None:
        raise ValueError("--key-file and --insecure are given; allowed: one of them")
    if insecure:
        return None
    if path is not None:
        return read_any_key_file(path)
    text = os.environ.get(KEY_VARIABLE)
    return parse_any_key(text, KEY_VARIABLE) if text else find_user_key()


def own_address(environ: Mapping[str, str]) -> str:
    """The `HOST:PORT` of an engine that these environment variables alone configure."""
    config = Config.parse({"insecure": True}, environ)
    return endpoint_at(config.host, config.port).removeprefix("tcp://")


def endpoints_at(where: str, *, option: str) -> list[Endpoint]:
    """All endpoints of `HOST:PORT`. The host is a name or an IP literal.

    Raises:
        ValueError: not such an address, or the name does not resolve; names the option.
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


def ask_first(where: str, ask: Callable[[Endpoint], T], *, option: str = "--at") -> T:
    """Call `ask` with each endpoint of `HOST:PORT` until one answers, and return that answer.

    Raises:
        ValueError: `where` is not an address.
        NoAnswer: no endpoint answered.
    """
    errors: list[str] = []
    for endpoint in endpoints_at(where, option=option):
        try:
            return ask(endpoint)
        except NixlKVError as error:  # noqa: PERF203 - the next endpoint may answer
            errors.append(str(error))
    raise NoAnswer(f"{option} {where}: {'; '.join(dict.fromkeys(errors))}")


def describe_at(where: str, keys: AnyKeys, *, option: str = "--at") -> messages.Description:
    return ask_first(where, partial(describe, keys=keys), option=option)


def engine_at(
    where: str,
    keys: AnyKeys,
    request: str = "",
    *,
    option: str = "--at",
    has_ranks: bool = True,
) -> EngineAnswer:
    """Ask the engine at `HOST:PORT` and, with `has_ranks`, its ranks for all that they tell.

    Raises:
        ValueError: `where` is not an address, or the engine does not answer (`NoAnswer`).
    """

    def ask(endpoint: Endpoint) -> EngineAnswer:
        description = describe(endpoint, keys)
        status: messages.Status | NixlKVError
        try:
            status = engine_status(endpoint, keys)
        except NixlKVError as error:
            status = error
        ranks = rank_statuses(description, keys, request) if has_ranks else []
        return EngineAnswer(where, description, status, ranks)

    return ask_first(where, ask, option=option)


# These functions raise a NixlKVError if the engine does not answer or refuses.


def describe(endpoint: Endpoint, keys: AnyKeys = None) -> messages.Description:
    question = messages.Describe(incarnation=ANY_INCARNATION, engine=EngineId("any"))
    return _ask(endpoint, question, messages.Description, keys)


def engine_status(
    endpoint: Endpoint, keys: AnyKeys = None, *, timeout_s: float | None = None
) -> messages.Status:
    """The status of an engine without that of its ranks, also while it starts."""
    return _ask(endpoint, _ENGINE_STATUS, messages.Status, keys, timeout_s)


def ask_to_drain(endpoint: Endpoint, keys: AnyKeys = None, *, undo: bool = False) -> int:
    """Tell an engine to stop offering, or with `undo` to resume.

    Returns the number of requests that arrived before the order and are not offered yet.
    """
    question = messages.Drain(incarnation=ANY_INCARNATION, undo=undo)
    answer = _ask(endpoint, question, messages.Draining, keys)
    if answer.refusal:
        raise TransportError(f"refused: {answer.refusal}")
    return answer.num_awaited


def set_weights(endpoint: Endpoint, weights: str, keys: AnyKeys = None) -> str:
    """Change the weights label of an engine; returns the old label."""
    question = messages.SetWeights(incarnation=ANY_INCARNATION, weights=weights)
    answer = _ask(endpoint, question, messages.WeightsSet, keys)
    if answer.refusal:
        raise TransportError(f"refused: {answer.refusal}")
    return answer.former


def rank_statuses(
    description: messages.Description, keys: AnyKeys = None, request: str = ""
) -> list[RankAnswer]:
    """Ask every rank of an engine for its status, all at once; the answers are in rank order.

    If `request` is not empty, each status has the events of all requests whose id contains it.
    """
    questions: dict[Endpoint, messages.Message] = {
        rank.endpoint: messages.StatusRequest(incarnation=rank.incarnation, request=request)
        for rank in description.ranks
    }
    answers = _exchange(questions, messages.Status, keys)
    return [(rank, answers[rank.endpoint]) for rank in description.ranks]


def probe(reader: messages.Description, ticket: str, keys: AnyKeys = None) -> list[RankAnswer]:
    """Let each rank of a decode engine read some bytes from the engine that gave the ticket.

    The ticket is the fact `probe_ticket` of that engine's status. Takes up to `messages.PROBE_S`.
    """
    questions: dict[Endpoint, messages.Message] = {
        rank.endpoint: messages.StatusRequest(incarnation=rank.incarnation, probe=ticket)
        for rank in reader.ranks
    }
    answers = _exchange(questions, messages.Status, keys, messages.PROBE_S + ANSWER_TIMEOUT_S)
    return [(rank, answers[rank.endpoint]) for rank in reader.ranks]


def drain(where: str, keys: AnyKeys, timeout_s: float, say: Callable[[str], object]) -> bool:
    """Tell the engine at `HOST:PORT` to drain, then poll it until it has finished.

    Calls `say` with the remaining work whenever that has changed. Returns whether none is left
    within `timeout_s`.

    Raises:
        ValueError: the engine does not answer; names the address.
    """
    until = time.monotonic() + timeout_s
    last = None
    while True:
        # Count requests before offers: a request becomes an offer before it leaves the first
        # count, so it is in at least one of the two.
        awaited = ask_first(where, partial(ask_to_drain, keys=keys))
        answers = [answer for _, answer in rank_statuses(describe_at(where, keys), keys)]
        totals = [answer.totals for answer in answers if isinstance(answer, messages.Status)]
        # Each rank has a share of each request, so the ranks' counts do not add up.
        offers, loads = (
            max((each.get(name, 0) for each in totals), default=0) for name in ("offers", "loads")
        )
        counts = f"{awaited:,} requests not offered yet, {offers:,} offers, {loads:,} loads"
        silent = [
            f"rank {number} gives no status: {answer}"
            for number, answer in enumerate(answers)
            if isinstance(answer, NixlKVError)
        ]
        unfinished = "; ".join((counts, *silent))
        if unfinished != last:
            say(unfinished)
            last = unfinished
        is_done = not (awaited or offers or loads or silent)
        if is_done or time.monotonic() >= until:
            return is_done
        time.sleep(DRAIN_POLL_S)


def _ask(
    endpoint: Endpoint,
    question: messages.Message,
    kind: type[T],
    keys: AnyKeys,
    timeout_s: float | None = None,
) -> T:
    answer = _exchange({endpoint: question}, kind, keys, timeout_s)[endpoint]
    if isinstance(answer, NixlKVError):
        raise answer
    return answer


def _exchange(
    questions: Mapping[Endpoint, messages.Message],
    kind: type[T],
    keys: AnyKeys,
    timeout_s: float | None = None,
) -> dict[Endpoint, T | NixlKVError]:
    timeout_s = ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
    answers: dict[Endpoint, T | NixlKVError] = {}
    control = ZmqControl(keys)
    try:
        for endpoint, question in questions.items():
            try:
                control.send(endpoint, messages.encode(question))
            except TransportError as error:  # noqa: PERF203 - other endpoints may be reachable
                answers[endpoint] = error
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(questions) and (left_s := deadline - time.monotonic()) > 0:
            for item in control.poll(left_s):
                match item:
                    case FromEndpoint():
                        answers.setdefault(item.endpoint, _parse(item.payload, kind))
                    case Lost():
                        answers.setdefault(item.endpoint, TransportError(item.reason))
    finally:
        control.close()
    silence = TransportError(f"no answer within {timeout_s:g} s")
    return {endpoint: answers.get(endpoint, silence) for endpoint in questions}


def _parse(payload: bytes, kind: type[T]) -> T | NixlKVError:
    try:
        if kind is messages.Description:  # only this decoder builds them; they may be large
            message: messages.Message = messages.decode_answer(payload)
        else:
            message = messages.decode_to_tool(payload)
    except NixlKVError as error:
        return error
    match message:
        case messages.VersionRefusal():
            return ForeignVersion(str(message))
        case messages.Refusal() | messages.KeyRefusal():
            return TransportError(f"refused: {message.reason}")
        case kind():
            return message
    return TransportError(f"answered with {type(message).__name__}")
