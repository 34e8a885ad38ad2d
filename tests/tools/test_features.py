"""Everything else works without a feature's folder, its tests and its two lines of wiring.

Three have vLLM's half as well, `connector/early.py`, `connector/gather.py` and
`connector/conversations/`, and a few lines of other files.
Each test copies the tree, removes one feature, and runs the rest there. Slow: a minute each.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
WIRING: Final = Path("nixl_kv/engine/engine.py")
FEATURES: Final = {
    "conversations": "conversations",
    "early": "early",
    "gather": "reading/gather",
    "staged": "reading/staged",
    "verify": "verify",
}
"""Their folders in nixl_kv/, and in tests/unit/."""
VLLM: Final = {
    "conversations": {
        "nixl_kv/connector/plugin.py": {
            """def check_conversations(config: Config, vllm_config: Any) -> None:
    from nixl_kv.connector.conversations.content import check_start  # noqa: PLC0415 - imports vLLM

    check_start(config, vllm_config)


""": "",
            "    (Where.CONFIG, check_conversations),\n": "",
        },
        "nixl_kv/connector/scheduler.py": {
            "from nixl_kv.connector.conversations import build as build_conversations\n": "",
            """        parts = build_conversations(
            vllm_config,
            kv_cache_config,
            self._config,
            self._trust,
            self.stats,
            self._decode,
            is_child=is_child,
        )
        self._parts: Sequence[SchedulerPart] = list(parts)
""": "        self._parts: Sequence[SchedulerPart] = []\n",
        },
    },
    "early": {
        "nixl_kv/connector/plugin.py": {
            "    from nixl_kv.connector.early import wrap_client  "
            "# noqa: PLC0415 - imports vLLM's engine client\n\n    wrap_client()\n": "",
        },
        "nixl_kv/connector/scheduler.py": {
            "from nixl_kv.early.answers import PROMISE, open_promise, seal_promise\n": "",
            """        # Shows that the API server has the same key.
        proof = seal_promise(new_nonce(), self._trust.ticket_key)
        return {**asdict(self._prefill.address), PROMISE: proof}
""": "        return asdict(self._prefill.address)\n",
            """        fields = request.kv_transfer_params or {}
        if PROMISE not in fields:
            return None
        try:
            return open_promise(fields[PROMISE], self._trust.ticket_key)
        except TicketRefused as error:
            shown = shown_id(request.request_id)
            self._log.info("request %s: no promise: %s", shown, error, about=error.reason)
            return None
""": "        return None\n",
        },
    },
    "gather": {
        "nixl_kv/connector/worker.py": {
            "from nixl_kv.connector.gather import make_pool\n": "",
            """if TYPE_CHECKING:  # it needs CUDA's bindings, which only GPU machines have
    from nixl_kv.reading.gather.gpu import SharePool

""": "",
            """        self._pool: SharePool | None = None  # of the cache, with `share_dir`
""": "",
            """    # Before vLLM allocates the cache.
    def get_mem_pool_context(self) -> contextlib.AbstractContextManager[None] | None:
        \"\"\"The pool in which vLLM allocates the cache; None: vLLM's choice.\"\"\"
        self._pool = make_pool(self._vllm_config)
        return None if self._pool is None else self._pool.use()

""": "",
        },
    },
}
"""Edits of files beside the wiring, where vLLM's half is a file or a folder of `connector/`."""
MIN_MODULES: Final = 50
PURE: Final = ("tests/unit/protocol", "tests/unit/engine", "tests/unit/reading")
TESTS: Final = {
    "conversations": (*PURE, "tests/unit/early", "tests/unit/connector", "tests/sim"),
    # Every schedule of the simulator may contain early requests.
    "early": (*PURE, "tests/unit/verify", "tests/unit/connector"),
    "gather": (*PURE, "tests/sim"),
    "staged": (*PURE, "tests/sim"),
    "verify": (*PURE, "tests/sim"),
}
IN_COPY: Final = """
from pathlib import Path

import pytest

import nixl_kv


def test_the_copy_is_tested_and_lacks_the_feature() -> None:
    assert Path(nixl_kv.__file__).is_relative_to({tree!r})
    with pytest.raises(ModuleNotFoundError, match="{module}"):
        __import__("{module}")
"""

IMPORT_ALL: Final = f"""
import importlib, sys
from pathlib import Path
import nixl_kv
package, tree = Path(nixl_kv.__file__).parent, Path(sys.argv[1])
assert package == tree / "nixl_kv", package
paths = [path.relative_to(tree).with_suffix("") for path in package.rglob("*.py")]
assert len(paths) >= {MIN_MODULES}, paths
for path in sorted(paths):
    name = ".".join(path.parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except ImportError as error:  # of vLLM, or of what only machines with GPUs have
        if not error.name or error.name.startswith("nixl_kv"):
            raise
"""


def copy_without(feature: str, to: Path) -> Path:
    """The tree without the feature's folders."""
    skip = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "dist")
    tree = Path(shutil.copytree(ROOT, to / "tree", symlinks=True, ignore=skip)).resolve()
    for parent in ("nixl_kv", "tests/unit"):
        shutil.rmtree(tree / parent / FEATURES[feature])
    if feature in VLLM:
        half = tree / "nixl_kv" / "connector" / feature
        shutil.rmtree(half) if half.is_dir() else half.with_suffix(".py").unlink()
        remove_tests_of(feature, tree / "tests" / "unit")
    return tree


def remove_tests_of(feature: str, folder: Path) -> None:
    """Remove the files of tests that import the feature, or another file that was removed."""
    gone = rf"nixl_kv\.(connector\.)?{feature}\b"
    while found := [p for p in folder.rglob("*.py") if re.search(gone, p.read_text("utf-8"))]:
        for path in found:
            path.unlink()
        gone = "|".join(rf"import.*\b{p.stem}\b|\.{p.stem} import" for p in found)


def unwire(feature: str, tree: Path) -> None:
    """Remove its import and its entry in the list of features, and what uses vLLM's half."""
    lines = (tree / WIRING).read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if f"build_{feature}" not in line]
    assert len(lines) - len(kept) == 2
    (tree / WIRING).write_text("".join(kept), "utf-8")
    for path, edits in VLLM.get(feature, {}).items():
        text = (tree / path).read_text("utf-8")
        for old, new in edits.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tree / path).write_text(text, "utf-8")


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python there, where the copy precedes an installed nixl_kv."""
    environ = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_the_rest_works_without_a_feature(feature: str, tmp_path: Path) -> None:
    tree = copy_without(feature, tmp_path)
    unwire(feature, tree)
    imported = run(tree, "-c", IMPORT_ALL, str(tree))
    assert imported.returncode == 0, imported.stderr[-3000:]
    typed = run(tree, "-m", "mypy", "nixl_kv")
    assert typed.returncode == 0, typed.stdout[-3000:]
    module = f"nixl_kv.{FEATURES[feature].replace('/', '.')}"
    in_copy = IN_COPY.format(tree=str(tree), module=module)
    (tree / "tests/unit/protocol/test_copy.py").write_text(in_copy, "utf-8")
    with TemporaryDirectory() as short:  # the path of a UNIX socket has 107 bytes at most
        # vLLM's parts that the feature needs stay listed.
        names = "not many and not listed_in_vain"
        selected = ("-m", "not slow", "-k", names, f"--basetemp={short}/tests")
        paths = TESTS[feature]
        tested = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected, *paths)
    assert tested.returncode == 0, tested.stdout[-3000:]
    print(tested.stdout.splitlines()[-1])
