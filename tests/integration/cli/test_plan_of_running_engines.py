"""`nixl-kv plan` asks engines that run, here their directories."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
from typer.testing import Result

from harness.local.model_layouts import EngineShape
from nixl_kv.cli import client
from nixl_kv.engine.directory import DirectoryServer
from nixl_kv.ids import Endpoint
from nixl_kv.keys import make_user_key
from nixl_kv.protocol.messages import WIRE_VERSION, encode
from nixl_kv.transport.base import FromPeer
from nixl_kv.transport.zmq import ZmqControl
from support.nixl_kv_command import described, nixl_kv
from support.records import release

HOST = "127.0.0.1"

Publish: TypeAlias = Callable[..., str]


def plan(prefill: str, decode: str, *options: str) -> Result:
    return nixl_kv("plan", f"--prefill-at {prefill} --decode-at {decode}", *options)


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Starts an engine's directory; returns where it listens."""
    with contextlib.ExitStack() as stack:

        def start(name: str, tp: int = 1, weights: str = "") -> str:
            control = ZmqControl(make_user_key()[0])
            directory = DirectoryServer(control, HOST, 0, weights=weights)
            stack.callback(directory.stop)
            directory.start()
            directory.publish(described(EngineShape(tp=tp, num_blocks=5000 * tp), name=name))
            return f"{HOST}:{directory.port}"

        yield start


@contextlib.contextmanager
def answering(payload: bytes | None) -> Iterator[str]:
    """An address where whatever is asked is answered with these bytes, or not at all."""
    control = ZmqControl(make_user_key()[0])
    port = control.listen(HOST, 0)
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            for item in control.poll(None):
                if payload is not None and isinstance(item, FromPeer):
                    control.reply(item.route, payload)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        stopping.set()
        control.wake()
        thread.join()
        control.close()


def test_running_engines_are_compared(publish: Publish) -> None:
    prefill, decode = publish("left"), publish("right", tp=2)
    result = plan(prefill, decode)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:2] == [
        "prefill: left, TP1, PP1, 5,000 blocks of 16 tokens in VRAM",
        "decode:  right, TP2, PP1, 10,000 blocks of 16 tokens in VRAM",
    ]
    links = json.loads(plan(prefill, decode, "--json").stdout)["links"]
    assert [(link["reader"], link["source"]) for link in links] == [(0, 0), (1, 0)]


def test_engines_with_different_weights_do_not_fit(publish: Publish) -> None:
    result = plan(publish("left", weights="step 8"), publish("right"))
    assert result.exit_code == 1
    assert "Decode cannot read this prefill engine" in result.stdout
    assert "weights is '' here and 'step 8' there" in result.stdout


def test_an_address_without_a_listener_exits_2(publish: Publish) -> None:
    prefill = publish("left")
    control = ZmqControl(make_user_key()[0])
    port = control.listen(HOST, 0)
    control.close()
    result = plan(prefill, f"{HOST}:{port}")
    assert result.exit_code == 2
    assert result.stderr == f"error: --decode-at {HOST}:{port}: cannot connect\n"


def test_an_address_without_an_answer_exits_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_TIMEOUT_S", 0.2)
    with answering(None) as where:
        result = plan(where, where)
    assert result.exit_code == 2
    assert result.stderr == f"error: --prefill-at {where}: no answer within 0.2 s\n"


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        pytest.param(b"\x93\xff", "not msgpack: 2 bytes", id="noise"),
        pytest.param(
            b"\x93\xa8Describe\x01\xa0",
            f"wire version 1; this side speaks {WIRE_VERSION}",
            id="another version",
        ),
        pytest.param(
            encode(release()), "Invalid value 'Release' - at `$[0]`", id="another message"
        ),
    ],
)
def test_an_answer_other_than_a_description_exits_2(payload: bytes, words: str) -> None:
    with answering(payload) as where:
        result = plan(where, where)
    assert result.exit_code == 2
    assert result.stderr == f"error: --prefill-at {where}: {words}\n"


def test_every_address_of_a_name_is_tried(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(publish("one").rpartition(":")[2])
    endpoints = [Endpoint(f"tcp://127.0.0.9:{port}"), Endpoint(f"tcp://{HOST}:{port}")]
    monkeypatch.setattr(client, "endpoints_at", lambda *_, **__: endpoints)
    result = plan(f"two:{port}", f"two:{port}")
    assert result.exit_code == 0, result.output
