"""`nixl-kv set-weights`: a running engine is told that its weights are others."""

from pathlib import Path

import pytest

from nixl_kv.config import KEY_VARIABLE
from nixl_kv.keys import read_key_file, write_key_file
from nixl_kv.transport.zmq import ZmqControl
from support.integration import MakeEngine, address
from support.nixl_kv_command import nixl_kv


def test_the_label_is_set_with_the_key_alone(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    write_key_file(path)
    keys = read_key_file(path)
    engine = make_engine("E", 1, make_control=lambda: ZmqControl(keys))
    engine.directory._has_key = True
    where = address(engine)
    result = nixl_kv(f"set-weights 'step 8' --key-file {path} --at", where)
    assert f"{where} is 'step 8'; it was ''" in result.stdout
    assert result.exit_code == 0
    assert engine.directory.weights == "step 8"

    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    result = nixl_kv("set-weights stolen --at", where)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --at {where}: ")
    assert engine.directory.weights == "step 8"


def test_an_engine_without_a_key_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine("E", 1)
    result = nixl_kv("set-weights mine --at", address(engine))
    assert result.exit_code == 2
    assert "refused: this engine has no key" in result.stderr
    assert engine.directory.weights == ""


def test_a_label_that_is_none_asks_nobody() -> None:
    result = nixl_kv(f"set-weights {'x' * 257} --at 127.0.0.1:1")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: LABEL is 'xxx")
    assert "allowed: up to 256 printable characters" in result.stderr
