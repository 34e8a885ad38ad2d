"""A ticket that a platform hands on is accepted, or the error says why not."""

from collections.abc import Sequence
from typing import Any, Final

import pytest

from harness.cluster.client import COMPLETIONS
from nixl_kv.config import Config
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import RemoteProtocolError
from nixl_kv.keys import Keys
from nixl_kv.protocol.ticket import FIELD
from platforms.replays import (
    PARAMS,
    REPLAYS,
    BrokenReplyError,
    Replay,
    Request,
    with_host_of_pod,
    with_host_of_url,
)
from support.records import ticket

HERE: Final = "10.1.0.7"  # where prefill says that it is: in the ticket
KEYED: Final = Trust(Keys.derive(b"k" * 32), Config(key_file="key").allowed_hosts, 2.0)
KEYLESS: Final = Trust(None, Config.parse({"peers": ["10.1.0.0/16"]}, {}).allowed_hosts, 2.0)
WHERE: Final = {  # prefill's URL, and the IP of its pod
    "here": ("http://prefill-0.prefill.default.svc.cluster.local:8000", HERE),
    "elsewhere": ("http://192.0.2.7:8000", "10.244.3.9"),
    "IPv6": ("http://[2001:db8::7]:8000", "fd00::9"),
}

BODY: Final = {
    "model": "tiny",
    "prompt": "ba be",
    "max_tokens": 16,
    "max_completion_tokens": 16,
    "min_tokens": 4,
    "stream": True,
    "stream_options": {"include_usage": True},
    "cache_salt": "s",
    "temperature": 0.5,
}

MOVING: Final = [replay for replay in REPLAYS if replay.moves_kv]


def named(replays: Sequence[Replay]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("replay", replays, ids=lambda replay: replay.name)


def request(**known: Any) -> Request:
    return Request(COMPLETIONS, BODY, "1f", token_ids=(3, 4), **known)


def reply(trust: Trust, host: str = HERE) -> dict[str, Any]:
    """Prefill's answer, as vLLM's front end gives it."""
    return {"id": "cmpl-1f", "choices": [], PARAMS: trust.seal(ticket(host=host))}


def handed_on(replay: Replay, answer: dict[str, Any], **known: Any) -> Any:
    return replay.to_decode(request(**known), answer).get(PARAMS)


@named(MOVING)
@pytest.mark.parametrize("trust", [KEYED, KEYLESS], ids=["with a key", "without"])
@pytest.mark.parametrize(("prefill", "pod_ip"), WHERE.values(), ids=WHERE)
def test_what_is_handed_on_is_accepted(
    replay: Replay, trust: Trust, prefill: str, pod_ip: str
) -> None:
    params = handed_on(replay, reply(trust), prefill=prefill, pod_ip=pod_ip)
    assert trust.check(params).open() == ticket(host=HERE)


@named([replay for replay in REPLAYS if replay.hand_on in (with_host_of_url, with_host_of_pod)])
def test_a_host_beside_the_ticket_opens_no_door(replay: Replay) -> None:
    """Where the ticket leads is checked, not what a platform has written over it."""
    params = handed_on(
        replay, reply(KEYLESS, host="10.2.0.7"), prefill=f"http://{HERE}:8000", pod_ip=HERE
    )
    assert params["remote_host"] == HERE
    with pytest.raises(RemoteProtocolError, match=r"host is '10\.2\.0\.7'; allowed by 'peers'"):
        KEYLESS.check(params)


@named(MOVING)
def test_a_ticket_that_was_changed_is_refused(replay: Replay) -> None:
    answer = reply(KEYED)
    answer[PARAMS][FIELD] = answer[PARAMS][FIELD].replace(".", ".0", 1)[:-1]
    with pytest.raises(RemoteProtocolError, match=FIELD):
        KEYED.check(handed_on(replay, answer))


@named([replay for replay in REPLAYS if not replay.moves_kv])
def test_nothing_of_the_reply_is_handed_on_to_the_connector(replay: Replay) -> None:
    """Nor has prefill been asked, so that it holds nothing for anybody."""
    assert PARAMS not in replay.to_prefill(request())
    assert handed_on(replay, reply(KEYED)) is None


@named(REPLAYS)
def test_a_reply_without_a_ticket_is_computed_or_refused_in_words(replay: Replay) -> None:
    """As prefill answers where it offers nothing: decode has nothing, or the flags alone."""
    if replay.name == "AIBrix, default":
        with pytest.raises(BrokenReplyError, match="unexpected type NoneType"):
            handed_on(replay, {PARAMS: None})
        return
    params = handed_on(replay, {PARAMS: None})
    if params is not None:
        with pytest.raises(RemoteProtocolError, match=f"lacks the field '{FIELD}'"):
            KEYED.check(params)
