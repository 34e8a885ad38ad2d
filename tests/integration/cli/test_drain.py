"""`nixl-kv drain` and `set-weights` tell a running engine something.

An engine that drains finishes the work it has begun, and offers nothing new.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from harness.local.engine import LocalEngine
from harness.local.memory import Fabric
from nixl_kv.cli import client
from nixl_kv.config import HOST_VARIABLE, KEY_VARIABLE, PORT_VARIABLE
from nixl_kv.keys import find_user_key, read_key_file
from nixl_kv.transport.zmq import ZmqControl
from support.integration import MakeEngine, address
from support.nixl_kv_command import nixl_kv

TOKENS = 8
TABLE = [1, 2]
LEFT = "requests not offered yet"


def test_an_engine_that_drains_can_be_told_to_offer_again(make_engine: MakeEngine) -> None:
    engine = make_engine("E", 2)
    result = nixl_kv("drain --at", address(engine))
    assert result.stdout.splitlines()[-2:] == [f"0 {LEFT}, 0 offers, 0 loads", "drained"]
    assert result.exit_code == 0
    assert engine.directory.is_draining
    result = nixl_kv("drain --undo --at", address(engine))
    assert result.stdout == "the engine offers again\n"
    assert result.exit_code == 0
    assert not engine.directory.is_draining


def test_unfinished_offers_and_loads_are_counted(make_engine: MakeEngine) -> None:
    engine = make_engine("P", 1)
    engine.directory.count_awaited = lambda: 3
    engine.offer("p1", [TABLE], TOKENS)
    result = nixl_kv("drain --timeout 0 --at", address(engine))
    assert result.exit_code == 1
    assert result.stdout == f"3 {LEFT}, 1 offers, 0 loads\n"
    assert result.stderr == "not drained within 0 s\n"


def test_it_waits_for_offers_and_loads(make_engine: MakeEngine, fabric: Fabric) -> None:
    """Both engines drain; the read ends when both commands wait for it."""
    prefill, decode = make_engine("P", 2), make_engine("D", 1)
    fabric.reads_hang = True
    decode.prepare_load("d1", prefill.offer("p1", [TABLE], TOKENS))
    decode.start_load("d1", [TABLE], range(TOKENS))
    said: dict[str, list[str]] = {"P": [], "D": []}
    waiting = threading.Semaphore(0)

    def note(name: str, line: str) -> None:
        said[name].append(line)
        if line.endswith(("1 offers, 0 loads", "0 offers, 1 loads")):
            waiting.release()

    def drain(engine: LocalEngine) -> bool:
        return client.drain(address(engine), find_user_key(), 60.0, partial(note, engine.name))

    with ThreadPoolExecutor() as pool:
        drained = [pool.submit(drain, engine) for engine in (prefill, decode)]
        for _ in drained:
            assert waiting.acquire(timeout=60)
        fabric.reads_hang = False
        assert [each.result() for each in drained] == [True, True]
    assert decode.wait_failure("d1") is None
    assert all(lines[-1].endswith("0 offers, 0 loads") for lines in said.values())


def test_a_rank_that_is_gone_is_not_finished(make_engine: MakeEngine) -> None:
    engine = make_engine("E", 2)
    engine.ranks[0].engine.stop()
    result = nixl_kv("drain --timeout 0 --at", address(engine))
    assert result.exit_code == 1
    assert result.stdout.endswith("; rank 0 gives no status: cannot connect\n")


def test_in_an_engines_own_container_its_variables_say_where_it_is(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("E", 1)
    host, _, port = address(engine).rpartition(":")
    monkeypatch.setenv(HOST_VARIABLE, host)
    monkeypatch.setenv(PORT_VARIABLE, port)
    assert nixl_kv("drain").exit_code == 0
    assert engine.directory.is_draining
    monkeypatch.setenv(PORT_VARIABLE, "http")
    result = nixl_kv("drain")
    assert result.exit_code == 2
    assert "error: VLLM_NIXL_SIDE_CHANNEL_PORT is 'http'; allowed: " in result.stderr


@pytest.mark.parametrize("source", ["file", "environment"])
def test_the_key_comes_from_a_file_or_the_environment(
    make_engine: MakeEngine, key_file: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    engine = make_engine("E", 1, make_control=lambda: ZmqControl(read_key_file(key_file)))
    options = [f"--key-file {key_file}"]
    if source == "environment":
        monkeypatch.setenv(KEY_VARIABLE, key_file.read_text())
        options = []
    assert nixl_kv("drain --at", address(engine), *options).exit_code == 0
    monkeypatch.setenv(KEY_VARIABLE, "no key")
    result = nixl_kv("drain --at", address(engine))
    assert result.exit_code == 2
    assert "error: NIXL_KV_KEY is not a key; allowed: 64 hexadecimal digits" in result.stderr


def test_the_label_of_the_weights_is_set_with_the_key_alone(
    make_engine: MakeEngine, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("E", 1, make_control=lambda: ZmqControl(read_key_file(key_file)))
    engine.directory._has_key = True
    where = address(engine)
    result = nixl_kv(f"set-weights 'step 8' --key-file {key_file} --at", where)
    assert f"{where} is 'step 8'; it was ''" in result.stdout
    assert result.exit_code == 0
    assert engine.directory.weights == "step 8"

    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    result = nixl_kv("set-weights stolen --at", where)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --at {where}: ")
    assert engine.directory.weights == "step 8"


def test_an_invalid_label_of_weights_asks_no_engine() -> None:
    result = nixl_kv(f"set-weights {'x' * 257} --at 127.0.0.1:1")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: LABEL is 'xxx")
    assert "allowed: up to 256 printable characters" in result.stderr
