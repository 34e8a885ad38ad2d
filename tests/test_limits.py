"""Each limit has a source that just passes and one that just fails, so that no check can rot."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from limits import Violation, check_cycles, check_source, read_sources

PATH = "nixl_kv/module.py"


def indent(text: str, steps: int = 1) -> str:
    return "".join(f"{'    ' * steps}{line}\n" for line in text.splitlines())


def messages(source: str, path: str = PATH) -> list[str]:
    return [violation.message for violation in check_source(source, path)]


def file_of(lines: int) -> str:
    return "\n" * lines


def class_of(lines: int) -> str:
    return "class C:\n" + indent("pass\n" * (lines - 1))


def methods(count: int) -> str:
    return "class C:\n" + "".join(indent(f"def m{n}(self): ...") for n in range(count))


def stored(count: int) -> str:
    stores = "".join(f"self.a{n} = self.a{n} = 0\n" for n in range(count))
    return "class C:\n" + indent("def m(self):\n" + indent(stores))


def stored_by_every_means(count: int) -> str:
    """Five ways to store, the rest plain."""
    plain = "".join(f"self.a{n} = 0\n" for n in range(count - 5))
    ways = "self.b: int = 0\nself.c += 1\nself.d, e = 0, 0\nfor self.f in e: pass\n"
    nested = "def inner():\n    self.g = 0\n"
    return "class C:\n" + indent("def m(self):\n" + indent(plain + ways + nested))


def fields(count: int, head: str = "class C:") -> str:
    return f"{head}\n" + indent("".join(f"a{n}: int\n" for n in range(count)))


def fields_and_stores(count: int) -> str:
    """A field that is also stored is one attribute; a ClassVar is none."""
    store = indent("def m(self):\n    self.a0 = 0\n    self.b = 0\n")
    return fields(count - 1) + indent("c: ClassVar[int] = 0") + store


def function_of(lines: int) -> str:
    docstring = '"""Say why.\n\nAt length.\n"""\n'
    return "@decorated\ndef f():\n" + indent(docstring + "pass\n" * (lines - 1))


def method_of(lines: int) -> str:
    return "class C:\n" + indent("async def f(self):\n" + indent("pass\n" * (lines - 1)))


def ifs(count: int) -> str:
    return "def f(x):\n" + indent("if x: pass\n" * (count - 1))


def branches_of_every_kind(count: int) -> str:
    """Seven branches and the way in are eight; each further one is plain."""
    body = (
        "if x: pass\nelif y: pass\nelse: pass\n"
        "while x and y: pass\n"
        "try: pass\nexcept OSError: pass\n"
        "z = [a if a else b for a in x if a]\n"
        "with x: pass\n"
    )
    return "def f(x, y):\n" + indent(body + "for a in x: pass\n" * (count - 8))


def cases(count: int) -> str:
    """A guard is a branch; a bare ``case _`` is none."""
    plain = "".join(f"case {n}: pass\n" for n in range(count - 3))
    return "def f(x):\n" + indent(
        "match x:\n" + indent(plain + "case y if y: pass\ncase _: pass\n")
    )


def with_nested_function(count: int) -> str:
    return ifs(count) + indent("def inner(x):\n" + indent("if x: pass\n" * 7))


def nested(depth: int) -> str:
    heads = ["with x:", "for y in x:", "if y:", "while x:"][:depth]
    lines = [f"{'    ' * n}{head}\n" for n, head in enumerate(heads)]
    return "def f(x):\n" + indent("".join(lines) + f"{'    ' * depth}pass\n")


def nested_matches(depth: int) -> str:
    """A case belongs to its match."""
    inner = "pass\n"
    for _ in range(depth):
        inner = "match x:\n" + indent(f"case 1:\n{indent(inner)}")
    return "def f(x):\n" + indent(inner)


def nested_beside(depth: int) -> str:
    """``elif`` and ``except`` stand beside their head, ``else: if`` stands below it."""
    inner = "if x: pass\nelif x: pass\nelif x: pass\nelif x: pass\n"
    for _ in range(depth - 2):
        inner = f"if x: pass\nelse:\n{indent(inner)}"
    return "def f(x):\n" + indent(f"try: pass\nexcept OSError:\n{indent(inner)}")


def arguments(count: int) -> str:
    names = ", ".join(f"a{n}" for n in range(count - 3))
    return f"class C:\n    def f(self, a, /, b, *, {names}, **rest): ...\n"


def of_a_class(count: int) -> str:
    names = ", ".join(f"a{n}" for n in range(count))
    return f"class C:\n    @classmethod\n    def f(cls, {names}): ...\n"


def positional(count: int) -> str:
    return f"def f({', '.join(f'a{n}' for n in range(count))}): ...\n"


@pytest.mark.parametrize(
    ("build", "limit", "name"),
    [
        pytest.param(file_of, 350, "lines of file", id="file"),
        pytest.param(class_of, 200, "lines of C", id="class"),
        pytest.param(methods, 15, "methods of C", id="methods"),
        pytest.param(stored, 10, "attributes of C", id="attributes"),
        pytest.param(stored_by_every_means, 10, "attributes of C", id="every way to store"),
        pytest.param(fields, 10, "attributes of C", id="fields"),
        pytest.param(fields_and_stores, 10, "attributes of C", id="fields and stores"),
        pytest.param(function_of, 40, "lines of f", id="function"),
        pytest.param(method_of, 40, "lines of f", id="async method"),
        pytest.param(ifs, 8, "complexity of f", id="ifs"),
        pytest.param(branches_of_every_kind, 8, "complexity of f", id="branches of every kind"),
        pytest.param(cases, 8, "complexity of f", id="cases"),
        pytest.param(with_nested_function, 8, "complexity of f", id="nested function is its own"),
        pytest.param(nested, 3, "nesting of f", id="nesting"),
        pytest.param(nested_matches, 3, "nesting of f", id="nested matches"),
        pytest.param(nested_beside, 3, "nesting of f", id="elif and except do not nest"),
        pytest.param(arguments, 6, "arguments of f", id="arguments"),
        pytest.param(of_a_class, 3, "positional arguments of f", id="class method"),
        pytest.param(positional, 3, "positional arguments of f", id="positional"),
    ],
)
def test_a_size_passes_at_its_limit_and_fails_above(
    build: Callable[[int], str], limit: int, name: str
) -> None:
    assert messages(build(limit)) == []
    assert messages(build(limit + 1)) == [f"{name} ({limit + 1} > {limit})"]


RECORDS = [
    pytest.param("@dataclass(frozen=True, slots=True)\nclass C:", id="frozen dataclass"),
    pytest.param("@dataclasses.dataclass(frozen=True)\nclass C:", id="by its module"),
    pytest.param("class C(msgspec.Struct, frozen=True, tag=True):", id="frozen struct"),
    pytest.param("class C(NamedTuple):", id="named tuple"),
    pytest.param("class C(Protocol[T]):", id="protocol"),
    pytest.param("class Base(Struct, frozen=True): ...\nclass C(Base):", id="from a frozen base"),
]
STATEFUL = [
    pytest.param("class C:", id="plain"),
    pytest.param("@dataclass\nclass C:", id="dataclass"),
    pytest.param("@dataclass(frozen=False)\nclass C:", id="dataclass not frozen"),
    pytest.param("class C(msgspec.Struct):", id="struct"),
    pytest.param("class Base(Struct): ...\nclass C(Base):", id="from a base not frozen"),
]


@pytest.mark.parametrize("head", RECORDS)
def test_the_fields_of_a_record_do_not_count(head: str) -> None:
    assert messages(fields(11, head)) == []


@pytest.mark.parametrize("head", STATEFUL)
def test_the_fields_of_what_can_change_count(head: str) -> None:
    assert messages(fields(11, head)) == ["attributes of C (11 > 10)"]


def test_what_a_frozen_class_stores_on_self_counts() -> None:
    source = "@dataclass(frozen=True)\n" + stored(11)
    assert messages(source) == ["attributes of C (11 > 10)"]


STATE = "module-level mutable state: X"
BROAD = "catches every exception"


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        pytest.param("from a import b", "from . import b", "relative import", id="relative"),
        pytest.param("import a.b", "from .a import b", "relative import", id="relative module"),
        pytest.param("X = ()", "X = []", STATE, id="list"),
        pytest.param("X: int", "X: dict[str, int] = {}", STATE, id="annotated dict"),
        pytest.param("X = frozenset({1})", "X = {1}", STATE, id="set"),
        pytest.param("X = tuple(a for a in b)", "X = [a for a in b]", STATE, id="comprehension"),
        pytest.param("X = (1,) * 8", "X = [1] * 8", STATE, id="repeated list"),
        pytest.param("X = (1, ())", "X = (1, [])", STATE, id="list in a tuple"),
        pytest.param("X: Final = {1: 2}", "X = {1: 2}", STATE, id="table"),
        pytest.param("X: Final[dict[int, int]] = {1: 2}", "X: Final = {}", STATE, id="empty table"),
        pytest.param("X: Mapping[int, int] = {1: 2}", "X: Any = {1: 2}", STATE, id="read-only"),
        pytest.param("X = MappingProxyType({1: 2})", "X = dict([(1, 2)])", STATE, id="proxy"),
        pytest.param("X = tuple(a)", "X = list(a)", STATE, id="list call"),
        pytest.param("X = NewType('X', int)", "X = set()", STATE, id="builtin call"),
        pytest.param(
            "from queue import Queue\ndef f():\n    X = Queue()",
            "from queue import Queue as Q\nX = Q()",
            STATE,
            id="renamed queue",
        ),
        pytest.param(
            "import threading\nX = threading",
            "import threading as t\nX: Final = t.Lock()",
            STATE,
            id="lock in a renamed module",
        ),
        pytest.param(
            "import logging\nX = logging.getLogger(__name__)",
            "import collections\nX = collections.defaultdict[str, int](int)",
            STATE,
            id="defaultdict",
        ),
        pytest.param("__all__ = ['X']", "if a:\n    X = ['X']", STATE, id="below an if"),
        pytest.param(
            "def f():\n    nonlocal X",
            "def f():\n    global X",
            "module-level state: global X",
            id="global",
        ),
        pytest.param("raise E", "assert a", "assert in nixl_kv", id="assert"),
        pytest.param(
            "try: pass\nexcept (OSError, E): pass", "try: pass\nexcept: pass", BROAD, id="bare"
        ),
        pytest.param(
            "try: pass\nexcept a.Error: pass",
            "try: pass\nexcept Exception as e: raise",
            BROAD,
            id="Exception",
        ),
        pytest.param(
            "try: pass\nfinally: pass",
            "try: pass\nexcept (OSError, builtins.BaseException): pass",
            BROAD,
            id="in a tuple",
        ),
        pytest.param(
            "with suppress(OSError): pass",
            "with contextlib.suppress(Exception): pass",
            BROAD,
            id="suppress",
        ),
    ],
)
def test_what_is_forbidden_is_found_and_its_neighbour_is_not(
    good: str, bad: str, message: str
) -> None:
    assert messages(good) == []
    assert messages(bad) == [message]


def test_scripts_may_assert() -> None:
    assert messages("assert a", "scripts/limits.py") == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nixl_kv/connector/thread.py", []),
        ("nixl_kv/connector/plugin.py", []),
        ("nixl_kv/connector/worker.py", [BROAD]),
        ("scripts/limits.py", [BROAD]),
    ],
)
def test_two_files_may_catch_everything(path: str, expected: list[str]) -> None:
    assert messages("try: pass\nexcept Exception: pass", path) == expected


def test_a_violation_names_path_and_line() -> None:
    (violation,) = check_source("\nfrom . import b\n", PATH)
    assert str(violation) == "nixl_kv/module.py:2: relative import"


def test_violations_are_in_the_order_of_lines() -> None:
    source = "def f():\n    global X\n\n\nX = []\n"
    assert [violation.line for violation in check_source(source, PATH)] == [2, 5]


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        pytest.param("import nixl_kv.b", "import nixl_kv.a", 1, id="import"),
        pytest.param("\nfrom nixl_kv.b import X", "from nixl_kv import a", 2, id="from"),
        pytest.param("def f():\n    import nixl_kv.b", "import nixl_kv.a", 2, id="in a function"),
    ],
)
def test_a_cycle_of_two_is_found(a: str, b: str, line: int) -> None:
    sources = {"nixl_kv/__init__.py": "", "nixl_kv/a.py": a, "nixl_kv/b.py": b}
    first = Violation("nixl_kv/a.py", line, "import cycle nixl_kv.a -> nixl_kv.b -> nixl_kv.a")
    second = Violation("nixl_kv/b.py", 1, "import cycle nixl_kv.b -> nixl_kv.a -> nixl_kv.b")
    (found,) = check_cycles(sources)
    assert found in {first, second}


def test_a_cycle_of_three_is_found_in_the_order_of_its_imports() -> None:
    sources = {"a.py": "import b", "b.py": "import c", "c.py": "import a", "d.py": "import a"}
    (found,) = check_cycles(sources)
    names = found.message.removeprefix("import cycle ").split(" -> ")
    assert set(pairwise(names)) == {("a", "b"), ("b", "c"), ("c", "a")}


def test_a_package_that_imports_its_modules_is_no_cycle() -> None:
    sources = {
        "nixl_kv/__init__.py": "",
        "nixl_kv/a/__init__.py": "from nixl_kv.a.b import X\nfrom nixl_kv.a import c",
        "nixl_kv/a/b.py": "import nixl_kv.a.c\nimport numpy",
        "nixl_kv/a/c.py": "",
    }
    assert check_cycles(sources) == []


def test_a_module_that_imports_from_its_package_is_a_cycle() -> None:
    sources = {"a/__init__.py": "from a.b import X", "a/b.py": "from a import X"}
    (found,) = check_cycles(sources)
    assert found.message in {"import cycle a -> a.b -> a", "import cycle a.b -> a -> a.b"}


def test_python_is_found_by_suffix_and_by_first_line(tmp_path: Path) -> None:
    (tmp_path / "nixl_kv" / "deep").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "nixl_kv" / "deep" / "a.py").write_text("A")
    (tmp_path / "nixl_kv" / "py.typed").write_text("")
    (tmp_path / "scripts" / "demo").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "scripts" / "check").write_text("#!/usr/bin/env bash\npython x\n")
    found = read_sources(tmp_path)
    assert found == {"nixl_kv/deep/a.py": "A", "scripts/demo": "#!/usr/bin/env python3\n"}
