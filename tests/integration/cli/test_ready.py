"""`nixl-kv ready` as a readiness probe, and what `nixl-kv` says of itself."""

import time
from pathlib import Path

import pytest

from nixl_kv.config import HOST_VARIABLE, PORT_VARIABLE
from nixl_kv.engine.directory import DirectoryServer
from nixl_kv.engine.trust import Trust
from support.integration import MakeEngine, address
from support.nixl_kv_command import nixl_kv

HANDSHAKE = "handshake failed: perhaps it has another key, or none"


def test_an_engine_that_serves_is_ready_unless_it_drains(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("P", 2)
    host, _, port = address(engine).rpartition(":")
    monkeypatch.setenv(HOST_VARIABLE, host)
    monkeypatch.setenv(PORT_VARIABLE, port)
    result = nixl_kv("ready")
    assert (result.exit_code, result.stdout) == (0, "ready: engine P, 2 ranks\n")
    assert nixl_kv("drain").exit_code == 0
    result = nixl_kv("ready --at", address(engine))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("not ready: engine P has been draining for 0")
    shown = nixl_kv("status --at", address(engine)).stdout
    assert "\nDRAINING for 0" in shown
    assert nixl_kv("drain --undo --at", address(engine)).exit_code == 0
    assert nixl_kv("ready --at", address(engine)).exit_code == 0


def test_an_engine_that_starts_is_not_ready(make_engine: MakeEngine) -> None:
    engine = make_engine("P", 1)
    starting = DirectoryServer(Trust.of(engine.config).control(), "127.0.0.1", 0)
    starting.start()
    result = nixl_kv(f"ready --at 127.0.0.1:{starting.port}")
    starting.stop()
    assert (result.exit_code, result.stderr) == (1, "not ready: the engine is still starting\n")


@pytest.mark.parametrize("trouble", ["gone", "key"])
def test_no_answer_is_one_line_within_a_second(
    make_engine: MakeEngine, key_file: Path, trouble: str
) -> None:
    engine, options = make_engine("P", 1), []
    if trouble == "gone":
        engine.directory.stop()
    else:
        options = [f"--key-file {key_file}"]
    begin = time.monotonic()
    result = nixl_kv("ready --at", address(engine), *options)
    assert time.monotonic() - begin < 5.0  # 0.8 s, on an idle machine
    assert (result.exit_code, result.stdout) == (1, "")
    reason = "cannot connect" if trouble == "gone" else HANDSHAKE
    assert result.stderr == f"not ready: --at {address(engine)}: {reason}\n"


def test_watch_shows_it_until_it_is_interrupted(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the engine is gone."""
    engine, naps = make_engine("P", 1), []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        engine.directory.stop()
        if len(naps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("nixl_kv.cli.main.time.sleep", nap)
    result = nixl_kv("status --watch 0.5 --at", address(engine))
    assert result.exit_code == 0
    assert naps == [0.5, 0.5]
    assert result.stdout.count("every 0.5 s, ") == 2
    assert result.stdout.count("engine P, TP1") == 1
    assert result.stderr == f"error: --at {address(engine)}: cannot connect\n"
