"""`nixl-kv plan` asks engines that run, here by the publisher that they use themselves."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from nixl_kv.cli import engines
from nixl_kv.connector.publisher import Publisher
from nixl_kv.geometry.ranks import Shape
from nixl_kv.geometry.shapes import EngineShape, ModelShape, layouts
from nixl_kv.keys import Keys, read_key_file, write_key_file
from nixl_kv.protocol.messages import (
    WIRE_VERSION,
    Description,
    Done,
    RankDescription,
    Reader,
    Slots,
    encode,
)
from nixl_kv.transport.control import Control, FromPeer

MODEL = ModelShape(layers=36, kv_heads=8, content=(256, 256), element="bfloat16")
FACTS = {"served_model_name": "qwen", "num_hidden_layers": "36"}
HOST = "127.0.0.1"

Run = Callable[..., Result]


def description(
    name: str, shape: EngineShape, facts: dict[str, str] = FACTS, model: ModelShape = MODEL
) -> Description:
    ranks = tuple(
        RankDescription(f"{number:032x}", f"tcp://{HOST}:1", b"agent", Slots(4096, 8), layout)
        for number, layout in enumerate(layouts(model, shape))
    )
    return Description(WIRE_VERSION, "ab" * 16, name, facts, Shape(shape.tp, shape.pp), ranks)


@pytest.fixture
def publish() -> Iterator[Callable[[Description | None], str]]:
    """Starts an engine's publisher; returns where it listens."""
    started: list[Publisher] = []

    def start(described: Description | None, keys: Keys | None = None) -> str:
        publisher = Publisher(HOST, 0, Control(keys))
        started.append(publisher)
        if described is not None:
            publisher.publish(described)
        return f"{HOST}:{publisher.port}"

    yield start
    for publisher in started:
        publisher.stop()


@contextlib.contextmanager
def answering(*payloads: bytes) -> Iterator[str]:
    """An address where whatever is asked is answered with these bytes, or with nothing."""
    control = Control()
    port = control.listen(f"tcp://{HOST}", 0)
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            for item in control.poll(None):
                for payload in payloads:
                    assert isinstance(item, FromPeer)
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


def test_two_engines_say_what_they_are(run: Run, publish: Callable[..., str]) -> None:
    prefill = publish(description("left", EngineShape(tp=1, num_blocks=5000)))
    decode = publish(description("right", EngineShape(tp=2, num_blocks=6000)))
    result = run(f"--prefill-at {prefill} --decode-at {decode}")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:2] == [
        "prefill: left, TP1, PP1, 5,000 blocks of 16 tokens in VRAM",
        "decode:  right, TP2, PP1, 6,000 blocks of 16 tokens in VRAM",
    ]
    planned = run(
        "--layers 36 --kv-heads 8 --head-size 128 --prefill tp=1,blocks=5000 "
        "--decode tp=2,blocks=6000"
    )
    assert result.stdout.splitlines()[2:] == planned.stdout.splitlines()[2:]


def test_names_of_layers_need_no_numbers(run: Run, publish: Callable[..., str]) -> None:
    described = description("one", EngineShape())
    rank = described.ranks[0]
    group = rank.layout.groups[0]
    for names, shown in (("model.{}.attn.1", "36"), ("x.{}", "0-35"), ("x{}.y", "0-35")):
        regions = tuple(
            replace(region, layer=names.format(number))
            for number, region in enumerate(group.regions)
        )
        layout = replace(rank.layout, groups=(replace(group, regions=regions),))
        ranks = (RankDescription(rank.incarnation, "", b"", rank.slots, layout),)
        where = publish(Description(WIRE_VERSION, "ab" * 16, "one", FACTS, described.shape, ranks))
        result = run(f"--prefill-at {where} --decode-at {where}")
        assert result.exit_code == 0, result.output
        (row,) = [line for line in result.stdout.splitlines() if "64 KiB" in line]
        assert row.split()[:3] == ["0", "0", shown]


def test_other_models_do_not_fit(run: Run, publish: Callable[..., str]) -> None:
    prefill = publish(description("left", EngineShape()))
    facts = {**FACTS, "served_model_name": "llama"}
    other = replace(MODEL, kv_heads=4)
    decode = publish(description("right", EngineShape(tp=2), facts, other))
    result = run(f"--prefill-at {prefill} --decode-at {decode}")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[3:] == [
        "These engines cannot exchange KV ('here' is decode, 'there' is prefill):",
        "  served_model_name is 'llama' here and 'qwen' there",
        "  number of KV heads of layer.0 and 35 more is 4 here and 8 there",
    ]
    found = json.loads(run(f"--prefill-at {prefill} --decode-at {decode} --json").stdout)
    assert found["mismatches"][0] == {
        "field": "served_model_name",
        "decode": "llama",
        "prefill": "qwen",
    }


def test_an_engine_that_is_still_starting(run: Run, publish: Callable[..., str]) -> None:
    where = publish(None)
    result = run(f"--prefill-at {where} --decode-at {where}")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: --prefill-at {where}: refused: this engine is still starting\n"
    )


def test_nobody_listens(run: Run, publish: Callable[..., str]) -> None:
    prefill = publish(description("left", EngineShape()))
    control = Control()
    port = control.listen(f"tcp://{HOST}", 0)
    control.close()
    result = run(f"--prefill-at {prefill} --decode-at {HOST}:{port}")
    assert result.exit_code == 2
    assert result.stderr == f"error: --decode-at {HOST}:{port}: cannot connect\n"


def test_nobody_answers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ANSWER_TIMEOUT_S", 0.2)
    with answering() as where:
        result = run(f"--prefill-at {where} --decode-at {where}")
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
            encode(Done(WIRE_VERSION, "0" * 32, "1" * 32, "2" * 32, Reader("x", "3" * 32, 0))),
            "Invalid value 'Done' - at `$[0]`",
            id="another message",
        ),
    ],
)
def test_answers_that_are_none(run: Run, payload: bytes, words: str) -> None:
    with answering(payload) as where:
        result = run(f"--prefill-at {where} --decode-at {where}")
    assert result.exit_code == 2
    assert result.stderr == f"error: --prefill-at {where}: {words}\n"


@pytest.mark.parametrize("where", ["localhost", ":5600", "localhost:", "localhost:port", ""])
def test_what_is_no_address(run: Run, where: str) -> None:
    result = run(f"--prefill-at {where or ':'} --decode-at {HOST}:1")
    assert result.exit_code == 2
    assert result.stderr == (f"error: --prefill-at is {where or ':'!r}; allowed: HOST:PORT\n")


def test_a_port_that_cannot_be_one(run: Run) -> None:
    result = run(f"--prefill-at {HOST}:99999 --decode-at {HOST}:1")
    assert result.exit_code == 2
    assert result.stderr == f"error: --prefill-at {HOST}:99999: cannot connect\n"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    write_key_file(tmp_path / "key")
    return tmp_path / "key"


def test_engines_with_a_key_answer_those_who_have_it(
    run: Run, publish: Callable[..., str], key_file: Path
) -> None:
    where = publish(description("one", EngineShape()), read_key_file(key_file))
    result = run(f"--prefill-at {where} --decode-at {where} --key-file {key_file}")
    assert result.exit_code == 0, result.output


def test_engines_with_a_key_answer_nobody_else(
    run: Run, publish: Callable[..., str], key_file: Path, tmp_path: Path
) -> None:
    where = publish(description("one", EngineShape()), read_key_file(key_file))
    write_key_file(tmp_path / "other")
    asked = f"--prefill-at {where} --decode-at {where}"
    for given, words in (
        ("", "handshake failed: perhaps it has a key"),
        (f"--key-file {tmp_path / 'other'}", "handshake failed: perhaps it has another key, or"),
    ):
        result = run(f"{asked} {given}")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: --prefill-at {where}: {words}")


def test_a_key_file_that_others_can_read(run: Run, key_file: Path) -> None:
    key_file.chmod(0o644)
    result = run(f"--prefill-at {HOST}:1 --decode-at {HOST}:1 --key-file {key_file}")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --key-file is {str(key_file)!r}: its mode is 0644;")
