"""scripts/contract, with breaks planted in the installed vLLM. scripts/check runs it without."""

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
PLANTED = {
    "a hook's parameter has another name": (
        BASE,
        "num_computed_tokens: int,\n    ) -> tuple[int | None, bool]:",
        "num_computed: int,\n    ) -> tuple[int | None, bool]:",
        '"def get_num_new_matched_tokens(self, request: Request, num_computed: int',
    ),
    "a hook is gone": (
        BASE,
        "def build_connector_worker_meta(",
        "def build_worker_meta(",
        'has no attribute "build_connector_worker_meta"',
    ),
    "a platform lacks a method": (
        "platforms/interface.py",
        "def is_cuda_alike(",
        "def is_gpu(",
        '"type[Platform]" has no attribute "is_cuda_alike"',
    ),
    "so this vLLM cannot be imported": (
        "platforms/cpu.py",
        "class CpuPlatform(Platform):",
        "class CpuPlatform(Platform):  # no other change",
        "connector/unpromised.py could not look at this vLLM: ",
    ),
    "another function looks at a flag of ours": (
        "v1/core/sched/scheduler.py",
        "def has_finished_requests(self)",
        "FLAG = 'do_remote_prefill'\n\n    def has_finished_requests(self)",
        "Scheduler reads one of do_remote_decode, do_remote_prefill; decide what follows",
    ),
}


def contract(*releases: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, REPO / "scripts" / "contract", *releases],
        env={**os.environ, "NIXL_KV_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


SINCE_0_32 = {("v1/core/sched/scheduler.py", "Scheduler.add_request")}


def load() -> Any:
    """The script, as a module."""
    loader = SourceFileLoader("contract_script", str(REPO / "scripts" / "contract"))
    module = ModuleType(loader.name)
    module.__file__ = loader.path
    loader.exec_module(module)
    return module


def installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM: scripts/install")
    return Path(spec.origin).parent


def test_each_place_where_vllm_reads_our_flags_is_known() -> None:
    script, vllm = load(), installed()
    assert script.new_reads(vllm) == []
    found = {(path, function) for path, function, _ in script.flag_reads(vllm)}
    assert found | SINCE_0_32 == set(script.READS)


def test_a_new_reader_of_our_flags_is_named(tmp_path: Path) -> None:
    files = {
        "v1/engine/core.py": "class Core:\n    def f(self, p):\n        p['do_remote_decode']",
        "serve.py": "FLAG = 'do_remote_prefill'",
        "distributed/kv_transfer/other.py": "FLAG = 'do_remote_prefill'",
        "words.py": "# do_remote_prefill is a flag",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    one, other = load().new_reads(tmp_path)
    assert one.startswith("serve.py:1: the module reads one of do_remote_decode, do_remote_prefill")
    assert other.startswith("v1/engine/core.py:3: Core.f reads one of ")


def test_the_table_has_each_backend_of_vllm() -> None:
    script, vllm = load(), installed()
    assert script.new_backends(vllm) == []
    names = {name for *_, name in script.backend_names(vllm)}
    assert names >= {"FLASH_ATTN", "MINIMAX_M3_SPARSE_INDEXER", "TRITON_FLASH_ATTN"}
    registered = importlib.import_module("vllm.v1.attention.backends.registry")
    without_cache = {"TORCH_SDPA", "NO_ATTENTION", "CUSTOM"}
    other_names = {"ROCM_AITER_FA": "FLASH_ATTN", "ROCM_AITER_TRITON_MLA": "AITER_TRITON_MLA"}
    members = set(registered.AttentionBackendEnum.__members__) - without_cache
    assert {other_names.get(name, name) for name in members} <= names


def test_a_backend_that_the_table_lacks_is_named(tmp_path: Path) -> None:
    """It may derive from another one, or a function may make it."""
    files = {
        "one.py": "class BaseBackend(AttentionBackend): pass",
        "two.py": "class Two(one.BaseBackend):\n    def get_name():\n        return 'NEW_ATTN'",
        "three.py": "def make(kind):\n class C(BaseBackend):\n  def get_name():\n   return kind",
        "four.py": "made = (\n    make(kind='MADE_ATTN'),\n    make(kind='FLASH_ATTN'),\n)",
        "five.py": "class Other(Backend):\n    def get_name():\n        return 'NOT_ATTENTION'",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    one, other = load().new_backends(tmp_path)
    assert one.startswith("four.py:2: attention backend 'MADE_ATTN' is not in connector/")
    assert other.startswith("two.py:3: attention backend 'NEW_ATTN' is not in ")


@pytest.mark.slow
def test_a_changed_part_without_a_promise_is_named(tmp_path: Path) -> None:
    shutil.copytree(installed(), tmp_path / "vllm", copy_function=os.symlink)
    file = tmp_path / "vllm" / "v1" / "core" / "kv_cache_manager.py"
    text = file.read_text(encoding="utf-8")
    old, new = "pop_blocks_for_free(self, request: Request)", "pop_blocks_for_free(self, step: int)"
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new), encoding="utf-8")
    (problem,) = load().missing_parts(sys.executable, tmp_path)
    assert problem.startswith("lacks KVCacheManager.pop_blocks_for_free(request) (")
    assert problem.endswith("and has pop_blocks_for_free(step))")


@pytest.mark.slow
def test_planted_breaks_are_found(tmp_path: Path) -> None:
    release = tmp_path / "planted"
    ignored = shutil.ignore_patterns("*.so", "*.pyc")
    shutil.copytree(installed(), release / "vllm", ignore=ignored)
    for path, old, new, _ in PLANTED.values():
        file = release / "vllm" / path
        text = file.read_text(encoding="utf-8")
        assert text.count(old) >= 1, old
        file.write_text(text.replace(old, new), encoding="utf-8")
    done = contract(release)
    assert done.returncode == 1, done.stderr
    missed = [name for name, (*_, message) in PLANTED.items() if message not in done.stdout]
    assert missed == [], done.stdout
