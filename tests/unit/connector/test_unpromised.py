"""Parts of vLLM without a promise: the list is complete, and a start without one says so."""

import ast
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest.mock import Mock

import pytest
import vllm
from vllm.config import KVTransferConfig, MultiModalConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

import nixl_kv
from nixl_kv.config import Config
from nixl_kv.connector import plugin, unpromised
from nixl_kv.connector.scheduler_hooks import SchedulerHooks
from nixl_kv.connector.unpromised import PARTS, Absence, Part, is_tested
from nixl_kv.early.answers import PROMISE, seal_promise
from nixl_kv.errors import ConfigError
from nixl_kv.ids import new_nonce
from nixl_kv.protocol import events
from nixl_kv.protocol.ticket import FIELD
from support.records import ticket_for
from support.vllm_objects import override, vllm_config
from support.vllm_scheduler import WANT_TICKET, SteppedScheduler, hooked, make_config, ours

CONNECTOR: Final = Path(unpromised.__file__).parent
MEMBERS: Final = [(part, member) for part in PARTS for member in part.members]

# --- the list is complete

# In connector/, the last word of an expression, and the classes of vLLM that its value has.
KINDS: Final = {
    "vllm_config": "VllmConfig",
    "_vllm_config": "VllmConfig",
    "vllm": "VllmConfig",
    "transfer": "KVTransferConfig",
    "kv_transfer_config": "KVTransferConfig",
    "transfer_config()": "KVTransferConfig",
    "model": "ModelConfig",
    "model_config": "ModelConfig",
    "model_arch_config": "ModelArchitectureConfig",
    "architecture": "ModelArchitectureConfig",
    "multimodal": "MultiModalConfig",
    "cache_config": "CacheConfig",
    "parallel": "ParallelConfig",
    "parallel_config": "ParallelConfig",
    "scheduler_config": "SchedulerConfig",
    "attention_config": "AttentionConfig",
    "compilation_config": "CompilationConfig",
    "observability_config": "ObservabilityConfig",
    "aux_output_config": "AuxOutputConfig",
    "speculative": "SpeculativeConfig",
    "kv_cache_config": "KVCacheConfig",
    "_kv_cache_config": "KVCacheConfig",
    "kv": "KVCacheConfig",
    "kv_cache_spec": "KVCacheSpec",
    "_first()": "KVCacheSpec",
    "inner": "SlidingWindowSpec ChunkedLocalAttentionSpec",
    "spec": "AttentionSpec KVCacheSpec MambaSpec UniformTypeKVCacheSpecs",
    "request": "Request EngineCoreRequest",
    "prefill_stats": "PrefillStats",
    "requests": "a mapping",
    "waiting": "RequestQueue",
    "requests[]": "Request",
    "scheduler": "Scheduler",
    "outputs": "EngineCoreOutputs",
    "EngineCoreOutputs()": "EngineCoreOutputs",
    "arguments": "EngineArgs",
    "params": "SamplingParams",
    "changed": "SamplingParams",
    "arrived": "Request",
    "feature": "MultiModalFeatureSpec",
    "mm_position": "PlaceholderRange",
    "scheduler_output": "SchedulerOutput",
    "output": "SchedulerOutput KVConnectorOutput",
    "connector_output": "KVConnectorOutput",
    "cached": "CachedRequestData",
    "manager": "KVCacheManager",
    "kv_cache_manager": "KVCacheManager",
    "get_blocks()": "KVCacheBlocks",
    "blocks": "KVCacheBlocks",
    "end_loads": "a function",
    "block_pool": "BlockPool",
    "module": "Attention AttentionLayerBase MambaMixer2 set_default_quant_scales",
    "_module": "Attention AttentionLayerBase MambaMixer2 set_default_quant_scales",
    "norm": "Mixer2RMSNormGated",
    "KVConnectorFactory": "KVConnectorFactory",
    "executor": "Executor",
    "client": "AsyncLLM",
    "_client": "AsyncLLM EngineClient",
    "processor": "OutputProcessor",
    "queue": "RequestOutputCollector",
    "state": "RequestState",
    "status": "RequestStatus",
    "answer": "RequestOutput",
    "outputs[]": "CompletionOutput",
    "core": "MPClient AsyncMPClient DPLBAsyncMPClient EngineCore",
}

# Attributes of mappings and of our own records with the same names.
OURS_TOO: Final = {
    "get",
    "values",
    ("state", "name"),
    ("blocks", "are_kept"),
    ("blocks", "num_blocks"),
    ("blocks", "astype"),
    ("blocks", "count"),
    ("outputs", "setdefault"),
    ("outputs", "append"),
}
# vLLM's classes that a class of this package extends: it may use these of their own attributes.
BASES: Final = {
    "SchedulerHooks": "Scheduler",
    "PromMetrics": "KVConnectorPromMetrics",
}
# Private names of vLLM that the connector interface itself defines.
PUBLIC: Final = {"_cache_hit_source"}


def used() -> Iterator[tuple[str, str, str]]:
    """`(where, classes of vLLM, attribute)` for each use in connector/ that can be recognised."""
    for path in sorted(CONNECTOR.rglob("*.py")):
        if path.name != "unpromised.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                where = f"{path.name}:{getattr(node, 'lineno', 0)}"
                for word, name in attributes(node):
                    if word in KINDS and not {name, (word, name)} & OURS_TOO:
                        yield where, KINDS[word], name
                if isinstance(node, ast.ClassDef) and node.name in BASES:
                    for name in private_names(node):
                        yield where, BASES[node.name], name


def attributes(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Attribute):
        yield word_of(node.value), node.attr
    if isinstance(node, ast.Call) and word_of(node.func) in ("getattr", "hasattr", "setattr"):
        owner, name = node.args[:2]
        if isinstance(name, ast.Constant):
            yield word_of(owner), str(name.value)


def word_of(node: ast.AST) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return name
        case ast.Call():
            return f"{word_of(node.func)}()"
        case ast.Subscript():
            return f"{word_of(node.value)}[]"
    return ""


def private_names(owner: ast.ClassDef) -> set[str]:
    """Attributes of `self` and of `super()` that this class does not define itself."""
    methods = {node.name for node in ast.walk(owner) if isinstance(node, ast.FunctionDef)}
    methods |= {node.id for node in ast.walk(owner) if isinstance(node, ast.Name)}  # its fields
    assigned = {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    read = {name for node in ast.walk(owner) for word, name in attributes(node) if word == "self"}
    inherited = {
        name for node in ast.walk(owner) for word, name in attributes(node) if word == "super()"
    }
    return {name for name in (read - methods - assigned) | inherited if not name.startswith("__")}


def listed(classes: str, name: str) -> bool:
    owners = classes.split()
    return any(
        part.owner.rpartition(":")[2] in owners and member.partition("(")[0] == name
        for part, member in MEMBERS
    )


def test_each_use_of_a_part_is_listed() -> None:
    unlisted = {
        f"{where}: {name} of {classes}"
        for where, classes, name in used()
        if not listed(classes, name)
    }
    assert not unlisted


def test_each_private_name_is_listed() -> None:
    """Whatever the object: a name with an underscore that this package does not define itself."""
    names = {member.partition("(")[0] for _, member in MEMBERS} | PUBLIC
    source = "".join(path.read_text(encoding="utf-8") for path in CONNECTOR.rglob("*.py"))
    found = {
        match[1]
        for line in source.splitlines()
        if "noqa: SLF001" in line
        for match in re.finditer(r"\w\.(_[a-z]\w*)", line)
    }
    assert found, "there are some"
    assert found <= names


def test_each_parameter_with_a_type_of_vllm_has_a_known_name() -> None:
    """Otherwise `used` would overlook how a function uses it."""
    kinds = {part.owner.rpartition(":")[2] for part in PARTS}
    unknown = set()
    for path in CONNECTOR.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.arg) and node.annotation is not None:
                words = set(re.findall(r"\w+", ast.unparse(node.annotation)))
                if words & kinds and node.arg not in KINDS:
                    unknown.add(f"{path.name}:{node.lineno}: {node.arg}")
    assert not unknown


def test_no_part_is_listed_in_vain() -> None:
    source = "".join(
        path.read_text(encoding="utf-8")
        for path in CONNECTOR.rglob("*.py")
        if path.name != "unpromised.py"
    )
    found = set(re.findall(r"\w+", source)) | {"is_attention_free"}  # in unpromised.py itself
    assert not {name for _, name in MEMBERS if name.partition("(")[0] not in found}


def test_this_vllm_has_all_parts() -> None:
    assert list(unpromised.missing(PARTS)) == []


# --- a part is missing or has changed


def engine(**changed: Any) -> unpromised.Engine:
    """One that every absence concerns."""
    config = vllm_config()
    override(config, is_hybrid=True, supports_multimodal_inputs=True)
    config.model_config.multimodal_config = MultiModalConfig()
    config.parallel_config.world_size = 2
    config.cache_config.cache_dtype = "fp8"
    values = {"vllm_config": config, "config": Config(media="ticket"), "is_prefill": True}
    return unpromised.Engine(**values | changed)


def replace_owner(monkeypatch: pytest.MonkeyPatch, part: Part) -> None:
    """Let vLLM have a part's owner without its members."""
    module, _, name = part.owner.partition(":")
    if name:
        monkeypatch.setattr(unpromised._load(module), name, SimpleNamespace())
    else:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))


ABSENCES: Final = {part.absence: part for part in PARTS}


@pytest.mark.parametrize("absence", ABSENCES, ids=lambda absence: absence.text)
def test_the_effect_of_each_absence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, absence: Absence
) -> None:
    """The start fails, or a WARNING names the disabled part."""
    part = ABSENCES[absence]
    monkeypatch.setattr(unpromised, "PARTS", (part,))
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: True)
    unpromised.check(engine())
    assert not unpromised.is_off(absence)
    replace_owner(monkeypatch, part)
    if absence.ends_start:
        with pytest.raises(ConfigError) as error:
            unpromised.check(engine())
        message = str(error.value)
        assert "install one of these" in message
    else:
        unpromised.check(engine())
        caplog.clear()
        assert unpromised.is_off(absence)
        assert unpromised.warn(absence)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        message = record.getMessage()
        assert absence.text in message
    owner, version = part.owner.rpartition(":")[2], f"vLLM {vllm.__version__} lacks"
    for text in (
        version,
        "tested with vLLM 0.31 to 0.33",
        f"{owner}.{part.members[0]}",
        part.purpose,
    ):
        assert text in message


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.owner.rpartition(":")[2])
def test_a_missing_owner_is_named_once(monkeypatch: pytest.MonkeyPatch, part: Part) -> None:
    monkeypatch.setattr(unpromised, "PARTS", (part,))
    module, _, name = part.owner.partition(":")
    if name:
        monkeypatch.delattr(unpromised._load(module), name)
    else:
        monkeypatch.setitem(sys.modules, module, None)
    (text,) = unpromised.missing([part])
    assert text == f"{part.owner.replace(':', '.')} ({part.purpose})"


def test_an_additional_optional_parameter_does_not_count_as_a_change() -> None:
    def free(request: Any, reason: str = "", *rest: Any, later: int = 0) -> Any:
        return request, reason, rest, later

    assert unpromised._find(SimpleNamespace(free=free), "free(request)") == "free(request)"
    for member in ("free()", "free(reason)", "free(request, other)"):
        assert unpromised._find(SimpleNamespace(free=free), member) == "free(request)"


@pytest.mark.parametrize(
    ("absence", "changed"),
    [
        (unpromised.STATE, {"is_prefill": False}),
        (unpromised.STATE, {"vllm_config": vllm_config()}),
        (unpromised.SCALES, {"vllm_config": vllm_config()}),
        (unpromised.SEVERAL_STATES, {"vllm_config": vllm_config()}),
        (unpromised.MEDIA, {"vllm_config": vllm_config()}),
        (unpromised.MEDIA, {"config": Config(media="own")}),
        (unpromised.PRIVATE, {"config": Config()}),
    ],
)
def test_an_engine_without_need_of_a_part_starts(
    monkeypatch: pytest.MonkeyPatch, absence: Absence, changed: dict[str, Any]
) -> None:
    part = next(part for part in PARTS if part.absence is absence)
    monkeypatch.setattr(unpromised, "PARTS", (part,))
    replace_owner(monkeypatch, part)
    with pytest.raises(ConfigError):
        unpromised.check(engine())
    unpromised.check(engine(**changed))


# --- versions


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.31.0", True),
        ("0.32.7", True),
        ("0.33.0+cpu", True),
        ("0.33.0.post1", True),
        ("v0.33.0", True),
        ("0.33.0rc1", False),
        ("0.33.1.dev7+g1234567", False),
        ("0.34.0", False),
        ("0.3.1", False),
        ("0.310.0", False),
        ("1.31.0", False),
        ("dev", False),
        ("0.0.0", False),
        ("", False),
    ],
)
def test_which_versions_are_tested(version: str, *, expected: bool) -> None:
    assert is_tested(version) is expected


# --- vLLM's scheduler, as an upgrade might change it


class Stepped(SteppedScheduler):
    """With this connector, and chunks of 64 tokens."""

    def __init__(self, role: str = "kv_both", *, overlap: str = "off", **config: Any) -> None:
        transfer = KVTransferConfig(**ours(role, overlap=overlap))
        made = make_config(transfer, 24, max_num_batched_tokens=64, **config)
        super().__init__(made, hooked(made))
        self.describe()

    def pair(self) -> dict[str, Any]:
        return {**WANT_TICKET, PROMISE: seal_promise(new_nonce(), self.connector._trust.ticket_key)}


Make = Callable[..., Stepped]


@pytest.fixture
def make(engines_of: Callable[[type[Stepped]], Make]) -> Make:
    return engines_of(Stepped)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == unpromised.__name__]


def renamed(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Give vLLM a class Request that calls an attribute differently."""
    module = unpromised._load("vllm.v1.request")
    scope = dict(vars(module))
    exec(re.sub(rf"\b{old}\b", new, inspect.getsource(Request)), scope)  # noqa: S102
    monkeypatch.setattr(module, "Request", scope["Request"])


def test_all_missing_parts_are_named_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(self: Any, request_id: str, *, is_preempted: bool) -> None:
        raise NotImplementedError

    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    monkeypatch.delattr(KVCacheManager, "pop_blocks_for_free")
    monkeypatch.setattr(KVCacheManager, "free", free)
    renamed(monkeypatch, "abort_immediately", "is_refused")
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == (
        "vLLM 0.34.1 lacks "
        "Request.abort_immediately (tells that vLLM's frontend refused the request, so that it is "
        "neither offered nor loaded); "
        "KVCacheManager.free(request) (wrapped: tells that a request loses its blocks, before "
        "another request gets them, and has free(request_id, is_preempted)); "
        "KVCacheManager.pop_blocks_for_free(request) (wrapped: tells that a request loses its "
        f"blocks, before another request gets them); nixl_kv {nixl_kv.__version__} is tested with "
        "vLLM 0.31 to 0.33; install one of these, or a release of nixl_kv that is tested with this "
        "vLLM"
    )


def test_a_part_that_only_recurrent_state_needs_ends_no_other_start(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed(monkeypatch, "_all_token_ids", "_token_ids")
    make()
    with pytest.raises(ConfigError, match=r"lacks Request\._all_token_ids "):
        unpromised.check(engine())


def change_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Scheduler._update_from_kv_xfer_finished

    def changed(self: Any, kv_connector_output: Any, scheduler_output: Any) -> None:
        assert scheduler_output is not None
        method(self, kv_connector_output)

    monkeypatch.setattr(Scheduler, method.__name__, changed)
    update = Scheduler.update_from_output

    def call(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Call it as this vLLM's `update_from_output` would."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                self, method.__name__, lambda output: changed(self, output, scheduler_output), False
            )
            return update(self, scheduler_output, model_runner_output)

    monkeypatch.setattr(Scheduler, "update_from_output", call)


def rename(monkeypatch: pytest.MonkeyPatch) -> None:
    update, method = Scheduler.update_from_output, Scheduler._update_from_kv_xfer_finished
    monkeypatch.delattr(Scheduler, method.__name__)

    def call(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, method.__name__, lambda output: method(self, output), False)
            return update(self, scheduler_output, model_runner_output)

    monkeypatch.setattr(Scheduler, "update_from_output", call)


def upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")


@pytest.mark.parametrize("change", [change_argument, rename, upgrade])
@pytest.mark.parametrize("is_async", [False, True])
def test_loads_end_as_vllm_ends_them(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[pytest.MonkeyPatch], None],
    *,
    is_async: bool,
) -> None:
    """From the start on, and not at the first load. All else goes on."""
    change(monkeypatch)
    decode = make("kv_consumer", is_async=is_async, overlap="on")
    assert isinstance(decode.vllm, SchedulerHooks), "it can still end single requests"
    assert not decode.connector.takes_hints
    (warning,) = warnings_of(caplog)
    assert "overlap has no effect on decode" in warning
    prompt = list(range(48))
    decode.add("d", prompt, ticket_for(prompt, new_nonce()).params(None))
    decode.end(decode.vllm.schedule())
    decode.end(decode.vllm.schedule(), finished_recving={"d"})
    output = decode.vllm.schedule()
    assert output.num_scheduled_tokens == {"d": 1}
    (ended,) = decode.end(output)
    assert ended.finished


@pytest.mark.parametrize(("overlap", "takes"), [("on", True), ("off", False)])
def test_hints_are_taken_if_the_operator_wants_overlap(
    make: Make, overlap: str, *, takes: bool
) -> None:
    assert make("kv_consumer", overlap=overlap).connector.takes_hints is takes


def computed(output: SchedulerOutput) -> list[int | None]:
    commands = output.kv_connector_metadata.commands
    return [one.computed for one in commands if isinstance(one, events.PrepareOffer)]


@pytest.mark.parametrize(
    ("version", "expected"), [("0.33.0", [64, 128, None]), ("0.34.1", [None]), ("dev", [None])]
)
def test_chunks_are_off_with_an_untested_vllm(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    expected: list[int | None],
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    prefill = make()
    prefill.add("p", range(150), prefill.pair())
    found = []
    for _ in range(3):
        output = prefill.vllm.schedule()
        found += computed(output)
        answers = prefill.end(output)
    assert found == expected
    assert FIELD in answers[0].kv_transfer_params, "it is offered all the same"
    warnings = warnings_of(caplog)
    assert len(warnings) == (0 if version == "0.33.0" else 1), "of all features together"
    for text in ("in chunks", "overlap", f"vLLM {version} was not tested"):
        assert all(text in warning for warning in warnings)


@pytest.mark.parametrize(("version", "wraps"), [("0.33.0", True), ("0.34.1", False)])
def test_nothing_is_answered_early_with_an_untested_vllm(
    monkeypatch: pytest.MonkeyPatch, version: str, *, wraps: bool
) -> None:
    wrapped = Mock()
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr("nixl_kv.connector.early.wrap_client", wrapped)
    plugin.wrap_engine_client()
    assert wrapped.called is wraps


# --- what cannot be imported, and the API server


def test_a_name_that_cannot_be_imported_is_named_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("vllm.v1.request.RequestStatus")
    monkeypatch.delattr("vllm.v1.kv_cache_interface.MambaSpec")
    unavailable = ImportError("cannot import name 'MambaSpec'", name="vllm.v1.kv_cache_interface")
    error = unpromised.import_error(unavailable)
    assert isinstance(error, ConfigError)
    start = (
        f"vLLM {vllm.__version__} lacks vllm.v1.kv_cache_interface.MambaSpec, "
        "vllm.v1.request.RequestStatus; "
    )
    assert str(error).startswith(start)


@pytest.mark.parametrize("name", ["vllm", "torch", None])
def test_other_errors_of_an_import_stay(name: str | None) -> None:
    error = ImportError("no module", name=name)
    assert unpromised.import_error(error) is error


def test_the_start_names_the_part_that_it_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = sys.modules
    for module in [each for each in modules if each.startswith("nixl_kv.connector.")]:
        if module.rpartition(".")[2] in ("connector", "scheduler", "worker"):
            monkeypatch.delitem(modules, module)
    monkeypatch.delattr("vllm.v1.core.sched.output.SchedulerOutput")
    with pytest.raises(ConfigError, match=r"lacks vllm\.v1\.core\.sched\.output\.SchedulerOutput"):
        getattr(nixl_kv.connector, "NixlKVConnector")  # noqa: B009 - it is made on first use


def test_prefill_answers_late_without_the_parts_of_the_early_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("vllm.v1.engine.async_llm.AsyncLLM._add_request")
    plugin.wrap_engine_client()
    (warning,) = warnings_of(caplog)
    assert "overlap has no effect on prefill" in warning
    assert "AsyncLLM._add_request(" in warning
