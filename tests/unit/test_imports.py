"""Which modules can be imported without vLLM, torch or NIXL, and files that an import opens."""

import subprocess
import sys
from pathlib import Path

import pytest

import nixl_kv

PACKAGE = Path(nixl_kv.__file__).parent
NEEDS_TORCH = frozenset(
    {"reading.kernel", "reading.gather.gpu", "reading.gather.memory", "verify.gpu"}
)
ENGINE = sorted(
    f"nixl_kv.{name}"
    for folder in ("engine", "reading", "verify")
    for path in (PACKAGE / folder).rglob("*.py")
    if (name := ".".join(path.relative_to(PACKAGE).with_suffix("").parts)) not in NEEDS_TORCH
    and path.stem != "__init__"
)

WITHOUT = """
import sys
for name in ("vllm", "torch", "triton", "nixl", "nixl_cu12", "nixl_cu13"):
    sys.modules[name] = None  # to import it raises an ImportError
"""

OPENED = """
import os, sys, threading
def opened():
    paths = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(path) for path in paths if os.path.lexists(path))
before = opened()
import nixl_kv
ours = [name for name in sys.modules if name.startswith(("nixl_kv.", "importlib.metadata"))]
assert not ours, ours
import nixl_kv.connector, nixl_kv.connector.plugin
assert opened() == before, opened()
assert threading.active_count() == 1, threading.enumerate()
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"vllm", "torch", "nixl", "zmq", "numpy"}, loaded
"""


PROGRAM = """
import sys, nixl_kv.cli.main
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"vllm", "torch", "nixl", "nixl_cu12", "nixl_cu13", "matplotlib"}, loaded
"""


def run(program: str) -> None:
    """In a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_the_transfer_engine_needs_neither_vllm_nor_torch_nor_nixl() -> None:
    """Any inference engine may use it, also with another data plane; so may a scheduler."""
    assert len(ENGINE) > 10
    decisions = (f"nixl_kv.connector.{name}" for name in ("decode", "paging", "prefill"))
    run(WITHOUT + "".join(f"import {name}\n" for name in (*ENGINE, *decisions)))


def test_the_connectors_package_opens_and_starts_nothing() -> None:
    """Every process of every start of vLLM imports it, wanted or not."""
    run(OPENED)


def test_the_program_starts_fast() -> None:
    run(PROGRAM)


@pytest.mark.slow
def test_the_connector_is_imported_without_nixl() -> None:
    """It is imported in vLLM's API server too, which moves nothing. Slow: vLLM is."""
    pytest.importorskip("vllm", reason="needs vLLM: scripts/install")
    run(f"""{WITHOUT}
for name in ("vllm", "torch", "triton"):
    del sys.modules[name]
import warnings
warnings.simplefilter("ignore")
import nixl_kv.connector.connector
""")
