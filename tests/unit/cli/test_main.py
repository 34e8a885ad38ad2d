"""`nixl-kv` says its version and its commands."""

from importlib import metadata

import nixl_kv
from support.nixl_kv_command import nixl_kv as run


def test_without_a_command_it_prints_its_help() -> None:
    result = run("")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("status", "ready", "drain", "plan", "keygen"))


def test_it_knows_its_version() -> None:
    version = metadata.version("nixl_kv")
    assert nixl_kv.__version__ == version
    assert run("--version").stdout == f"nixl-kv {version}\n"
