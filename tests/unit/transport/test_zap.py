"""Who is let in, decided from the frames in which ZMQ asks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.transport.zmq import ZAP_DOMAIN, Gatekeeper

KEY, OTHER = b"k" * 32, b"o" * 32


def question(**changed: Any) -> list[bytes]:
    values = {
        "route": b"route",
        "empty": b"",
        "version": b"1.0",
        "number": b"7",
        "domain": ZAP_DOMAIN,
        "address": b"10.0.0.1",
        "identity": b"",
        "mechanism": b"CURVE",
        "key": KEY,
    }
    return [value for value in {**values, **changed}.values() if value is not None]


WITH_KEY = Gatekeeper(KEY, lambda host: host == "10.0.0.1")
WITHOUT = Gatekeeper(None, lambda host: host == "10.0.0.1")
NULL = {"mechanism": b"NULL", "key": None}


@pytest.mark.parametrize(
    ("keeper", "changed", "status"),
    [
        pytest.param(WITH_KEY, {}, b"200", id="the key"),
        pytest.param(WITH_KEY, {"identity": b"me"}, b"200", id="who names itself"),
        pytest.param(WITH_KEY, {"key": OTHER}, b"400", id="another key"),
        pytest.param(WITH_KEY, {"key": KEY + b"k"}, b"400", id="a longer key"),
        pytest.param(WITH_KEY, {"key": b""}, b"400", id="an empty key"),
        pytest.param(WITH_KEY, {"key": None}, b"400", id="no key"),
        pytest.param(WITH_KEY, {"more": KEY}, b"400", id="two keys"),
        pytest.param(WITH_KEY, {"address": b"10.0.0.2"}, b"400", id="another host"),
        pytest.param(WITH_KEY, {"address": b""}, b"400", id="no host"),
        pytest.param(WITH_KEY, {"address": b"\xff"}, b"400", id="no text"),
        pytest.param(WITH_KEY, NULL, b"400", id="no mechanism"),
        pytest.param(WITH_KEY, {"mechanism": b"PLAIN"}, b"400", id="another mechanism"),
        pytest.param(WITH_KEY, {"domain": b""}, b"400", id="no domain"),
        pytest.param(WITH_KEY, {"domain": b"other"}, b"400", id="another domain"),
        pytest.param(WITH_KEY, {"version": b"2.0"}, b"400", id="another version"),
        pytest.param(WITHOUT, NULL, b"200", id="nobody has keys"),
        pytest.param(WITHOUT, {**NULL, "address": b"10.0.0.2"}, b"400", id="nor that host"),
        pytest.param(WITHOUT, {}, b"400", id="a key that is not wanted"),
        pytest.param(WITHOUT, {"mechanism": b"NULL"}, b"400", id="too much"),
    ],
)
def test_who_is_let_in(keeper: Gatekeeper, changed: dict[str, Any], status: bytes) -> None:
    text = b"OK" if status == b"200" else b"not admitted"
    expected = [b"route", b"", b"1.0", b"7", status, text, b"", b""]
    assert keeper.answer(question(**changed)) == expected


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([], id="none"),
        pytest.param([b"route"], id="route alone"),
        pytest.param(question()[:7], id="too few"),
        pytest.param(question(empty=b"x"), id="not as ZMQ asks"),
    ],
)
def test_frames_that_are_no_question_are_not_answered(frames: list[bytes]) -> None:
    assert WITH_KEY.answer(frames) is None


@given(frames=st.lists(st.binary(max_size=8), max_size=12))
def test_no_frames_raise_or_are_let_in(frames: list[bytes]) -> None:
    for keeper in (WITH_KEY, WITHOUT):
        answer = keeper.answer(frames)
        assert answer is None or answer[4] == b"400"
