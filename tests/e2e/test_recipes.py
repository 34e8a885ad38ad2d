"""README's recipes, pasted into a shell: only the model, and the key, are other ones.

Machines are network namespaces, so that no port and no address has to be another one.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from harness.cluster.engines import QUIET_ENV
from harness.cluster.models.families import TinyModel
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.netns import TUN_DEVICE, WIRE, Namespace, Switch
from harness.cluster.processes import ManagedProcess, kill_descendants
from harness.cluster.waiting import wait_until
from support.engine_commands import KEY, REPO, blocks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not Path(TUN_DEVICE).exists(),
        reason="needs root, ip and network namespaces",
    ),
]

# As published models are. On some processors vLLM's CPU kernel for it ends the worker.
MODEL: Final = ensure_tiny_model(model=TinyModel(dtype="bfloat16")).absolute()
START_S: Final = 540.0
SHARED_MEMORY: Final = "--gpu-memory-utilization 0.4 --kv-cache-memory-bytes 1G"
KEPT: Final = ("HOME", "LANG", "PATH", "PYTHONPATH", "TMPDIR")
"""A shell of a user has no variables of the tests."""


def recipe(heading: str) -> list[str]:
    """The blocks of code under a heading of README, in order."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    section = re.split(r"^##+ ", text, flags=re.MULTILINE)
    (found,) = [part for part in section if part.startswith(f"{heading}\n")]
    return [code for _, code in blocks(found) if code.strip()]


@contextmanager
def shell(host: Namespace, code: str, log: Path) -> Iterator[ManagedProcess]:
    """A user pastes this on a machine; its processes end with the block."""
    pasted = code.replace("Qwen/Qwen3-0.6B", str(MODEL))
    pasted = re.sub(r"(NIXL_KV_KEY=)\.\.\.", rf"\g<1>{KEY}", pasted)
    process = ManagedProcess(log.stem, log)
    process.launch(host.inside(["bash", "-c", f"{pasted}\nwait"]), environment(), log.parent)
    try:
        yield process
    finally:
        kill_descendants(process.pid)
        process.kill()


def environment() -> Mapping[str, str]:
    env = {name: os.environ[name] for name in KEPT if name in os.environ} | QUIET_ENV
    return env | {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}


def run(host: Namespace, code: str) -> subprocess.CompletedProcess[str]:
    """In the same shell, which has exported MODEL."""
    pasted = f"export MODEL={MODEL}\n{code}"
    return subprocess.run(
        host.inside(["bash", "-c", pasted]),
        env=environment(),
        text=True,
        capture_output=True,
        check=False,
    )


def answers(host: Namespace, url: str, *shells: ManagedProcess) -> bool:
    """Whether a server answers, before a shell ends, within the timeout."""

    def does() -> bool:
        for one in shells:
            one.check_alive()
        return run(host, f"curl -sf --noproxy '*' {url}/health").returncode == 0

    return wait_until(does, START_S, interval_s=1.0)


@pytest.fixture
def hosts() -> Iterator[tuple[Namespace, Namespace]]:
    """10.0.0.1 and 10.0.0.2."""
    with ExitStack() as stack:
        pair = [stack.enter_context(Namespace(f"readme{n}", n)) for n in (1, 2)]
        stack.enter_context(Switch(*pair))
        for host in pair:
            host.ip("addr", "add", f"10.0.0.{host.number}/24", "dev", WIRE)
        yield pair[0], pair[1]


def expect_an_answer_with_kv(host: Namespace, code: str) -> None:
    ran = run(host, code)
    assert '"object":"text_completion"' in ran.stdout, ran
    assert '"completion_tokens":16' in ran.stdout, ran
    assert re.search(
        r"^vllm:nixl_kv_loads_total\{.*outcome=\"loaded\".*\} 1\.0$", ran.stdout, re.MULTILINE
    ), ran


def test_the_recipe_for_one_machine_runs(
    hosts: tuple[Namespace, Namespace], tmp_path: Path
) -> None:
    for_cpu, engines, questions = recipe("On one machine")
    with shell(hosts[0], f"{for_cpu}\n{engines}", tmp_path / "one.log") as one:
        assert answers(hosts[0], "http://127.0.0.1:9000", one), one.log_text()
        expect_an_answer_with_kv(hosts[0], questions)


def test_the_recipe_between_machines_runs(
    hosts: tuple[Namespace, Namespace], tmp_path: Path
) -> None:
    for_cpu, _, questions = recipe("On one machine")
    exports, on_prefill, on_decode = recipe("Between machines")
    # Both machines are this one: neither engine may take nine tenths of its memory.
    on_prefill, on_decode = (
        code.replace("--port 8000", f"--port 8000 {SHARED_MEMORY}")
        for code in (on_prefill, on_decode)
    )
    given, (first, second) = f"{for_cpu}\n{exports}\n", hosts
    with (
        shell(first, given + on_prefill, tmp_path / "prefill.log") as one,
        shell(second, given + on_decode, tmp_path / "decode.log") as two,
    ):
        assert answers(second, "http://127.0.0.1:9000", one, two), two.log_text()
        asked = questions.replace("127.0.0.1:8001", "10.0.0.2:8000")
        expect_an_answer_with_kv(second, asked)
