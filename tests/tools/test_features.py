"""Everything else works without a feature's folder, its tests and its two lines of wiring.

Each test copies the tree, removes one feature, and runs the rest there. Slow: a minute each.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
WIRING: Final = Path("nixl_kv/engine/engine.py")
FEATURES: Final = {"gather": "reading/gather", "staged": "reading/staged", "verify": "verify"}
"""Their folders in nixl_kv/, and in tests/unit/."""
MIN_MODULES: Final = 50
TESTS: Final = ("tests/unit/protocol", "tests/unit/engine", "tests/unit/reading", "tests/sim")
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
    return tree


def unwire(feature: str, tree: Path) -> None:
    """Remove its import and its entry in the list of features."""
    lines = (tree / WIRING).read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if f"build_{feature}" not in line]
    assert len(lines) - len(kept) == 2
    (tree / WIRING).write_text("".join(kept), "utf-8")


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
    selected = ("-m", "not slow", "-k", "not many", f"--basetemp={tmp_path / 'tests'}")
    tested = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected, *TESTS)
    assert tested.returncode == 0, tested.stdout[-3000:]
    print(tested.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_a_line_that_still_names_the_feature_is_found(feature: str, tmp_path: Path) -> None:
    tree = copy_without(feature, tmp_path)
    imported = run(tree, "-c", IMPORT_ALL, str(tree))
    assert imported.returncode == 1
    assert f"No module named 'nixl_kv.{FEATURES[feature].replace('/', '.')}'" in imported.stderr
