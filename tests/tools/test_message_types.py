"""mypy sees each field of a message: wrong names, planted where messages are built, fail it."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, get_args

from harness.local.engine import HAS_STAGED, HAS_VERIFY
from nixl_kv.protocol import messages

REPO: Final = Path(__file__).resolve().parents[2]
KINDS: Final = {kind.__name__ for kind in (*get_args(messages.Message), messages.RankDescription)}
UNUSED: Final = {
    *[name for name in ("DigestRequest", "DigestReply") if not HAS_VERIFY],
    *[name for name in ("PackRequest", "PackReply") if not HAS_STAGED],
}
"""Only a feature builds them, and this tree lacks it."""
SHARED: Final = "ClaimFields"  # the fields that constructors take as `**`
ERROR: Final = re.compile(r"^(nixl_kv/\S+\.py):(\d+): error: (.*)", re.MULTILINE)


def built_in(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Each call of a message's constructor, with the name of the message."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(call.func, call) for call in calls if isinstance(call.func, ast.Attribute | ast.Name)]
    names = [(func.attr if isinstance(func, ast.Attribute) else func.id, c) for func, c in named]
    return [(name, call) for name, call in names if name in KINDS]


def shared_in(tree: ast.AST) -> list[ast.Dict]:
    """Each dictionary in a function that returns the shared fields."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    makers = [each for each in functions if each.returns and SHARED in ast.unparse(each.returns)]
    return [node for each in makers for node in ast.walk(each) if isinstance(node, ast.Dict)]


def plant(source: Path) -> dict[int, str]:
    """Add a wrong name to each call and shared dictionary; returns the message per line."""
    text = source.read_text()
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    calls, dictionaries = built_in(tree), shared_in(tree)
    brackets = [(call.func.end_lineno or 0, call.func.end_col_offset or 0) for _, call in calls]
    at = [(*bracket, "wrong_name=0, ") for bracket in brackets]
    at += [(each.lineno, each.col_offset, "'wrong_name': 0, ") for each in dictionaries]
    for line, bracket, wrong in sorted(at, reverse=True):
        before = lines[line - 1]
        lines[line - 1] = before[: bracket + 1] + wrong + before[bracket + 1 :]
    source.write_text("".join(lines))
    planted = {call.lineno: name for name, call in calls}
    return planted | {each.lineno: SHARED for each in dictionaries}


def test_a_wrong_field_name_fails_mypy_wherever_a_message_is_built(tmp_path: Path) -> None:
    for name in ("nixl_kv", "typings"):
        shutil.copytree(REPO / name, tmp_path / name)
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    planted = {
        (str(source.relative_to(tmp_path)), line): name
        for source in sorted((tmp_path / "nixl_kv").rglob("*.py"))
        for line, name in plant(source).items()
    }
    assert (KINDS - UNUSED) | {SHARED} == set(planted.values()), (
        "no constructor call builds the others"
    )
    files = sorted({path for path, _ in planted})
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache", *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = ERROR.findall(result.stdout)
    assert {(path, int(line)) for path, line, _ in found} == set(planted), result.stdout
    assert all("wrong_name" in error for *_, error in found), result.stdout
