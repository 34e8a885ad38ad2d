"""Engines that decode is told of are joined before a request needs them."""

import contextlib
from dataclasses import replace

import pytest

from lab.local.caches import Cache, Sizes
from lab.local.engine import HOST
from nixl_kv.connector.trust import Trust
from nixl_kv.engine.directory import DirectoryServer
from nixl_kv.ids import endpoint_at
from nixl_kv.protocol import peers
from support.pair import CONFIG, MakeTransport, SmallEngine, exchange


def test_an_engine_to_be_known_is_joined_and_warmed_up_before_its_first_load(
    memory: MakeTransport,
) -> None:
    prefill = SmallEngine("prefill", Cache(Sizes()).fill(1), memory, roles="prefill")
    warm = (endpoint_at(HOST, prefill.directory.port),)
    decode = SmallEngine(
        "decode", Cache(Sizes()).fill(2), memory, config=replace(CONFIG, warm=warm)
    )
    try:
        decode.wait_count("joins", 1)
        decode.wait_count("warm_ups", 2)
        exchange((prefill, decode))
        states = [event.after for event in decode.parts.event_log.story("d1")]
        assert "ASKING" in states
        assert not {"CONNECTING", "JOINING", "READY"} & set(states), "it was known before"
        decode.wait_count("joins", 1)
    finally:
        decode.close()
        prefill.close()


def test_an_engine_that_starts_anew_is_joined_anew(memory: MakeTransport) -> None:
    first = SmallEngine("prefill", Cache(Sizes()).fill(1), memory, roles="prefill")
    port = first.directory.port
    config = replace(CONFIG, warm=(endpoint_at(HOST, port),))
    with contextlib.ExitStack() as stack:
        decode = SmallEngine("decode", Cache(Sizes()).fill(2), memory, config=config)
        stack.callback(decode.close)
        decode.wait_count("joins", 1)
        first.close()

        successor = SmallEngine("prefill", Cache(Sizes()).fill(3), memory, roles="prefill")
        stack.callback(successor.close)
        answers_there = DirectoryServer(Trust.of(CONFIG).control(), HOST, port)
        answers_there.publish(successor.description)
        answers_there.start()
        stack.callback(answers_there.stop)
        decode.wait_count("joins", 2)
        (peer,) = decode.parts.decode.peers.all()
        assert peer.key.incarnation == successor.description.incarnation


def test_who_is_not_there_is_named_once(
    memory: MakeTransport, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "WARM_AGAIN_S", 0.05)
    nobody = endpoint_at(HOST, 1)
    decode = SmallEngine(
        "decode", Cache(Sizes()).fill(2), memory, config=replace(CONFIG, warm=(nobody,))
    )
    try:
        asked = decode.parts.decode.peers
        decode.wait(lambda: "warm: tcp://127.0.0.1:1: no engine has described" in caplog.text)
        due = asked.next_due
        assert due is not None
        decode.wait(lambda: (asked.next_due or 0) > due + 0.2)
    finally:
        decode.close()
    assert caplog.text.count("warm: ") == 1
