"""The check of the connector against releases of vLLM: of small sources, and of the real ones."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from lab.contract import __main__ as command
from lab.contract.check import Report, check
from lab.contract.index import IndexUnreachableError, NoWheelError, fetch_wheel
from lab.contract.source import in_texts

REPO = Path(__file__).resolve().parents[2]

VLLM = {
    "vllm/__init__.py": "",
    "vllm/config/__init__.py": "from vllm.config.vllm import VllmConfig\n",
    "vllm/config/vllm.py": """
from dataclasses import dataclass
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from .cache import CacheConfig

@dataclass
class VllmConfig:
    cache_config: "CacheConfig" = None
    others: "list[CacheConfig] | None" = None
""",
    "vllm/config/cache.py": """
class CacheConfig(Options):
    block_size: int

    def __init__(self, size):
        self.resolved_size = size

    @property
    def parent(self) -> "CacheConfig | None": ...

class Options: ...
""",
    "vllm/hits.py": "class Source(str, Enum):\n    PEER = 'peer'\n",
    "vllm/utils.py": "def index_of(layer_name: str, number: int = 0) -> int: ...\n",
    "vllm/platforms/__init__.py": """
if TYPE_CHECKING:
    current: "Platform"

class Platform:
    def is_cpu(self) -> bool: ...

def __getattr__(name): ...
""",
    "vllm/base.py": """
class Base(ABC):
    def __init__(self, vllm_config, role): ...

    def on_request(self, request, priority=0): ...

    @abstractmethod
    def start(self, context, **kwargs): ...

    @classmethod
    def required(cls, vllm_config): ...

    def further(self): ...
""",
    "vllm/v1/scheduler.py": """
class Scheduler:
    def step(self, request):
        self.connector.on_request(request, priority=1)
        get_kv_transfer_group().start(None, layer=1)
        connector = connector_cls(self.config, role=1)
        connector.further()
""",
}

OURS = {
    "nixl_kv/connector/connector.py": """
from typing import Any, Final
from vllm.base import Base
from vllm.config import VllmConfig
from vllm.config.cache import CacheConfig
from vllm.hits import Source
from vllm.platforms import current
from vllm.utils import index_of
try:
    from vllm.later import later
except ImportError:
    later = None

class Hooks:
    def on_request(self, request: Any, priority: int = 0) -> None: ...

    def start(self, context: Any, **kwargs: Any) -> None: ...

    def woken(self) -> None: ...

class NixlKVConnector(Hooks, Base):
    source = Source.PEER

    def __init__(self, vllm_config: VllmConfig, role: Any) -> None:
        super().__init__(vllm_config, role)
        self._config = vllm_config

    @classmethod
    def required(cls, vllm_config: VllmConfig) -> Any:
        return vllm_config.cache_config.parent.resolved_size

    def _read(self, value: Any) -> Any:
        cache = self._config.cache_config
        if isinstance(value, CacheConfig):
            return value.block_size
        sizes = [each.block_size for each in self._config.others]
        for name, other in zip("ab", self._config.others):
            sizes.append(other.block_size)
        return cache.block_size, current.is_cpu(), index_of("layer", number=2), self.further

RULES: Final[dict[str, Callable[[VllmConfig, int], bool]]] = {
    "rule": lambda config, _: config.cache_config.block_size > 1,
}
""",
}


def report_of(theirs: Mapping[str, str], ours: Mapping[str, str] = OURS) -> Report:
    return check(in_texts(ours), in_texts(theirs))


def test_what_fits_is_clean_and_what_a_version_lacks_is_told() -> None:
    report = report_of(VLLM)
    assert report.breaks == []
    assert report.lacks == {"vllm.later.later", "woken"}
    assert report.counts == {
        "names imported": 7,
        "methods in place of vLLM's": 4,
        "hooks": 4,
        "calls of hooks": 4,
        "attributes read": 19,
        "calls of vLLM": 3,
    }


PLANTED = [
    (
        "a hook's argument is gone, and none is given",
        "vllm/base.py",
        ("def required(cls, vllm_config)", "def required(cls)"),
        ["missing a required argument: 'vllm_config'"],
    ),
    (
        "a hook has another argument",
        "vllm/base.py",
        ("def on_request(self, request, priority=0)", "def on_request(self, request, when, p)"),
        ["too many positional arguments"],
    ),
    (
        "an argument has another name",
        "vllm/base.py",
        ("def on_request(self, request,", "def on_request(self, new_request,"),
        ["missing a required argument: 'request'"],
    ),
    (
        "any further arguments are taken",
        "vllm/base.py",
        ("request, priority=0)", "request, priority=0, **kwargs)"),
        ["takes no further arguments"],
    ),
    (
        "a hook is one of the class",
        "vllm/base.py",
        ("    def on_request(self,", "    @classmethod\n    def on_request(cls,"),
        ["on_request, at vllm/base.py:6: is a classmethod there"],
    ),
    (
        "a method is abstract",
        "vllm/base.py",
        ("    def further(self)", "    @abstractmethod\n    def further(self)"),
        ["further of vllm/base.py:14 is left abstract"],
    ),
    (
        "the constructor wants more",
        "vllm/base.py",
        ("def __init__(self, vllm_config, role)", "def __init__(self, vllm_config, role, caches)"),
        ["too many positional arguments", "missing a required argument: 'caches'"],
    ),
    (
        "a hook is called with more",
        "vllm/v1/scheduler.py",
        ("on_request(request, priority=1)", "on_request(request, priority=1, at=2)"),
        ["vllm/v1/scheduler.py:4: on_request is called with other arguments"],
    ),
    (
        "the connector is made with more",
        "vllm/v1/scheduler.py",
        ("connector_cls(self.config, role=1)", "connector_cls(self.config, caches, role=1)"),
        ["__init__ is called with other arguments"],
    ),
    (
        "a hook that is not ours is called with more",
        "vllm/v1/scheduler.py",
        ("connector.further()", "connector.further(1)"),
        ["further is called with other arguments"],
    ),
    (
        "a name has gone",
        "vllm/utils.py",
        ("index_of", "layer_index"),
        ["vllm.utils has no index_of"],
    ),
    (
        "a name is no longer handed on",
        "vllm/config/__init__.py",
        ("from vllm.config.vllm import VllmConfig", ""),
        ["vllm.config has no VllmConfig"],
    ),
    (
        "a field has another name",
        "vllm/config/cache.py",
        ("block_size", "page_size"),
        ["CacheConfig has no block_size"] * 5,
    ),
    (
        "an attribute that the constructor sets has gone",
        "vllm/config/cache.py",
        ("self.resolved_size = size", "pass"),
        ["CacheConfig has no resolved_size"],
    ),
    (
        "a method of the base class has gone",
        "vllm/base.py",
        ("def further(self)", "def other(self)"),
        ["NixlKVConnector has no further"],
    ),
    (
        "a member has gone",
        "vllm/hits.py",
        ("PEER", "REMOTE"),
        ["Source has no PEER"],
    ),
    (
        "a function takes another argument",
        "vllm/utils.py",
        ("number: int = 0", "prefix: str"),
        ["index_of at vllm/utils.py:1: missing a required argument: 'prefix'"],
    ),
    (
        "a platform is asked in another way",
        "vllm/platforms/__init__.py",
        ("def is_cpu(self)", "def is_device(self, name)"),
        ["Platform has no is_cpu"],
    ),
]


@pytest.mark.parametrize(
    ("path", "change", "expected"), [pytest.param(*case[1:], id=case[0]) for case in PLANTED]
)
def test_a_planted_difference_is_found(
    path: str, change: tuple[str, str], expected: list[str]
) -> None:
    assert change[0] in VLLM[path]
    breaks = report_of({**VLLM, path: VLLM[path].replace(*change)}).breaks
    assert len(breaks) == len(expected), breaks
    for line, words in zip(breaks, expected, strict=True):
        assert words in line


def test_an_import_that_must_be_there_is_not_forgiven() -> None:
    path = "nixl_kv/connector/connector.py"
    changed = OURS[path].replace("except ImportError", "except ValueError")
    assert report_of(VLLM, {path: changed}).breaks == [f"{path}:10: vllm.later has no later"]


def test_of_a_class_that_may_have_anything_nothing_is_said() -> None:
    path = "vllm/config/cache.py"
    text = VLLM[path].replace("block_size: int", "def __getattr__(self, name): ...")
    assert report_of({**VLLM, path: text}).breaks == []


def test_a_call_with_stars_is_looked_at_as_far_as_it_is_written_out() -> None:
    path = "vllm/v1/scheduler.py"
    for call, num_breaks in (("(*requests, **options)", 0), ("(*requests, at=2)", 1)):
        text = VLLM[path].replace("on_request(request, priority=1)", f"on_request{call}")
        assert len(report_of({**VLLM, path: text}).breaks) == num_breaks, call


# --- the package index


def test_an_index_that_is_not_there_is_not_an_index_without_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # where nothing listens
    with pytest.raises(IndexUnreachableError, match=r"vllm==0\.32\.0"):
        fetch_wheel("vllm==0.32.0", tmp_path)
    (tmp_path / "vllm").mkdir()
    link = '<a href="vllm-0.1.0-py3-none-any.whl">vllm-0.1.0-py3-none-any.whl</a>'
    (tmp_path / "vllm" / "index.html").write_text(link, encoding="utf-8")
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    with pytest.raises(NoWheelError) as raised:
        fetch_wheel("vllm==0.32.0", tmp_path)
    assert not isinstance(raised.value, IndexUnreachableError)


# --- the real ones

LACKS: dict[str, set[str]] = {
    "0.31.0": {
        "get_loaded_kv_cache_group_ids",
        "restore_kv_caches",
        "supports_sleep_mode",
        "unregister_kv_caches",
        "vllm.v1.metrics.cache_hit_source.CacheHitSource",
    },
    "0.32.0": {"restore_kv_caches", "supports_sleep_mode", "unregister_kv_caches"},
    "0.33.0": set(),
}
"""What the connector has for later versions; see connector/vllm_config.py."""


def test_all_documents_name_these_versions() -> None:
    minors = [int(version.split(".")[1]) for version in LACKS]
    text = {
        name: (REPO / name).read_text(encoding="utf-8")
        for name in ("pyproject.toml", "README.md", "docs/compatibility.md")
    }
    assert f'"vllm>=0.{minors[0]},<0.{minors[-1] + 1}"' in text["pyproject.toml"]
    for version in LACKS:
        assert f"\n| {version} |" in text["docs/compatibility.md"]
    assert f"vLLM 0.{minors[0]} to 0.{minors[-1]}" in text["README.md"]


def expect_fit(report: Report) -> None:
    """It fits, and enough was looked at to say so."""
    assert report.breaks == []
    assert report.counts["calls of hooks"] > 80, report.counts
    assert report.counts["attributes read"] > 200, report.counts
    assert report.counts["methods in place of vLLM's"] > 25, report.counts


@pytest.mark.slow
def test_the_vllm_of_this_environment_fits() -> None:
    pytest.importorskip("vllm", reason="needs vLLM: scripts/install")
    expect_fit(command.check_installed())


@pytest.mark.slow
@pytest.mark.parametrize("version", LACKS)
def test_a_published_vllm_fits(version: str) -> None:
    """Fetched, not installed."""
    try:
        report = command.check_published(version)
    except IndexUnreachableError as error:
        pytest.skip(str(error))
    expect_fit(report)
    assert report.lacks == LACKS[version]


def test_the_command_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = {"1": Report(), "2": Report(["a hook"], {"a name"})}
    monkeypatch.setattr(command, "check_published", reports.__getitem__)
    assert command.main(["1"]) == 0
    assert command.main(["1", "2"]) == 1
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "vllm 2: ",
        "  does not have, and need not: a name",
        "  BREAKS a hook",
        "1 of 2 fit",
    ]
