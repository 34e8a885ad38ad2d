"""What `nixl-kv` says of itself."""

import subprocess
import sys
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


def test_an_attribute_that_does_not_exist_is_an_error() -> None:
    assert not hasattr(nixl_kv, "version")


def test_importing_the_package_imports_nothing_else() -> None:
    heavy = "('nixl_kv.', 'importlib.metadata')"
    code = f"import sys, nixl_kv; print([n for n in sys.modules if n.startswith({heavy})])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_an_unknown_command_is_bad_input() -> None:
    assert run("statu").exit_code == 2
