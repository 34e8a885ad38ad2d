"""Measure a model's accuracy with prefill and decode apart, using lm-eval.

Starts prefill engines, decode engines and vllm-router, evaluates the model behind the router, and
compares its accuracy with the known one. docs/accuracy.md explains the knobs, which are environment
variables, and the exit status.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from logging import getLogger
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import httpx
from pydantic import BeforeValidator, Field, ValidationError, create_model

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, say
from harness.cluster.engines import PATIENT, EngineSpec, Role, halves
from harness.cluster.metrics import COMPUTED_TOKENS, FAILURES, LOADS, PREFIX
from harness.cluster.processes import end_on_signals, kill_descendants, stop_all
from harness.cluster.router import past_proxies
from harness.cluster.waiting import wait_until

CONFIGS: Final = Path(__file__).resolve().parents[1] / "configs"
BUNDLED: Final = CONFIGS / "recall"
HELDOUT: Final = "heldout.jsonl"
HUB: Final = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
OFFLINE: Final = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
START_TIMEOUT_S: Final = 1200.0  # as vLLM's own launcher: weights may have to be downloaded
COUNTERS_LAG_S: Final = 5.0
METRICS: Final = {"gsm8k": "exact_match,strict-match", "recall": "exact_match,none"}
NONE_ALLOWED: Final = {
    "load_failures_total": "loads failed: what decode recomputes proves nothing",
    "refused_tickets_total": "tickets were refused, and their prompts computed on decode",
    "recomputed_requests_total{reason=no_ticket}": "prompts came to decode without a ticket",
}
SIDES: Final[Sequence[tuple[Role, str, str]]] = (
    ("prefill", "PREFILL", "PREFILLER"),
    ("decode", "DECODE", "DECODER"),  # DECODE_BLOCK_SIZE, but DECODER_TP_SIZE
)

# --- Knobs and flags

CPU_LAYOUTS: Final = ("HND", "LBHNC")
CUDA_LAYOUTS: Final = ("HND", "NHD", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
CPU_BACKENDS: Final = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")
BACKEND_KNOBS: Final = ("--attention-backend", "ATTENTION_BACKEND", "VLLM_ATTENTION_BACKEND")
OTHER_DEVICES: Final = ("ROCM_", "XPU_", "NO_ATTENTION", "CUSTOM", "TORCH_SDPA")


class Settings(NamedTuple):
    gpus: Sequence[str]
    knobs: Mapping[str, Any]  # by the name of the variable or flag; None if it is not set


def detect_gpus() -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES, or numbers; empty if the engines run on CPU."""
    import torch  # noqa: PLC0415 - takes seconds, and --help does without

    count = torch.cuda.device_count()
    visible = re.findall(r"[^,\s]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return [*(visible or map(str, range(count)))][:count]


def one_of(*allowed: str) -> Any:
    return Annotated[Literal[allowed], BeforeValidator(str.upper)] | None


def separated_by(separator: str) -> Any:
    split = BeforeValidator(lambda text: [part for part in re.split(separator, text) if part])
    return Annotated[tuple[str, ...], split]


def check_backend(gpus: Sequence[str], text: str) -> str:
    allowed = list(CPU_BACKENDS)
    if gpus:  # this import takes seconds
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        names = [backend.name for backend in registry.AttentionBackendEnum]
        allowed = [one for one in names if not one.startswith((*CPU_BACKENDS, *OTHER_DEVICES))]
    if text.upper() not in allowed:
        raise ValueError(f"Input should be one of {', '.join(allowed)}")
    return text.upper()


def types(gpus: Sequence[str]) -> dict[str, Any]:
    """Type and default of each knob, and of each flag that takes a value."""
    step, concurrent = (16, 100) if gpus else (32, 4)
    instances = Annotated[int, Field(ge=1, le=64)]
    ranks = Annotated[int, Field(ge=1, le=len(gpus) or 64)]
    block_size = Annotated[int, Field(ge=step, le=1024, multiple_of=step)]
    layout = one_of(*(CUDA_LAYOUTS if gpus else CPU_LAYOUTS))
    backend = Annotated[str, BeforeValidator(partial(check_backend, gpus))] | None
    share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    verify = Annotated[str, Field(pattern=r"^(off|all|sample:(0?\.\d+|1(\.0+)?|0))$")]
    same = dict.fromkeys
    return {
        "MODEL_NAMES": (separated_by(r"[\s,]+"), ()),
        **same(("NUM_PREFILL_INSTANCES", "NUM_DECODE_INSTANCES"), (instances, 1)),
        **same(("PREFILLER_TP_SIZE", "DECODER_TP_SIZE"), (ranks, 1)),
        **same(("PREFILL_BLOCK_SIZE", "DECODE_BLOCK_SIZE"), (block_size, 128)),
        "GPU_MEMORY_UTILIZATION": (Annotated[share, Field(gt=0)], 0.2),
        **same(BACKEND_KNOBS, (backend, None)),
        **same(
            ("VLLM_KV_CACHE_LAYOUT", "PREFILLER_KV_LAYOUT", "DECODER_KV_LAYOUT"), (layout, None)
        ),
        "NUM_CONCURRENT": (Annotated[int, Field(ge=1, le=1024)], concurrent),
        **same(("EXPECTED_ACCURACY", "TOLERANCE"), (share | None, None)),
        "VERIFY": (verify, "off"),
        "VLLM_SERVE_EXTRA_ARGS": (separated_by(r"\s*,\s*"), ()),
        # vLLM's launcher has more values for these three.
        "CROSS_LAYERS_BLOCKS": (one_of("FALSE", "0"), None),
        "DP_EP": (None, None),
        "ENFORCE_EAGER": (one_of("TRUE", "1"), None),
        "--kv_buffer_device": (one_of("CUDA" if gpus else "CPU"), None),
        "--limit": (Annotated[int, Field(ge=1)] | None, None),
        "--single": (bool, False),
    }


def read_settings(
    gpus: Sequence[str], env: Mapping[str, str], flags: Mapping[str, object]
) -> Settings:
    """Check all knobs and flags; an empty one counts as not set. A bad one is a ValueError."""
    fields = types(gpus)
    given = {"VERIFY": "all", **env, **flags}
    texts = {name: text for name in fields if (text := str(given.get(name) or "").strip())}
    try:
        knobs = create_model("Knobs", **fields).model_validate(texts).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        name, message = first["loc"][0], first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{name}={first['input']}: {message} (docs/accuracy.md)") from error
    knobs["ATTENTION_BACKEND"] = next(filter(None, map(knobs.get, BACKEND_KNOBS)), None)
    ranks = sum(knobs[f"NUM_{side}_INSTANCES"] * knobs[f"{one}_TP_SIZE"] for _, side, one in SIDES)
    sharing, memory = math.ceil(ranks / (len(gpus) or ranks)), knobs["GPU_MEMORY_UTILIZATION"]
    if sharing * memory > 1:
        most = f"{sharing} engines share a GPU, input should be at most"
        limit = math.floor(1000 / sharing) / 1000
        raise ValueError(f"GPU_MEMORY_UTILIZATION={memory:g}: {most} {limit:g}")
    return Settings(gpus, knobs)


# --- Models and tasks


@dataclass(frozen=True)
class Subject:
    """A model and its task."""

    model: str
    path: str  # a folder, or a name on the hub
    task: str = "gsm8k"
    expected: float | None = None
    tolerance: float = 0.03
    online: bool = False  # engines may use the hub
    instead_of: str = ""  # models that are not available
    chat: bool = False
    engine_args: tuple[str, ...] = ()


TRUST: Final = "--trust-remote-code"
DEEPSEEK_VL2: Final = ("--hf-overrides", '{"architectures": ["DeepseekVLV2ForCausalLM"]}', TRUST)
# On gsm8k, strict match, as in vLLM's tests of its own connector (test_accuracy.py).
KNOWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen/Qwen3-0.6B": {"expected": 0.41},
    "deepseek-ai/DeepSeek-V2-Lite-Chat": {"expected": 0.65, "engine_args": (TRUST,)},
    "deepseek-ai/deepseek-vl2-small": {"expected": 0.59, "engine_args": DEEPSEEK_VL2},
    "google/gemma-3-4b-it": {"expected": 0.74},
    "google/gemma-4-E2B-it": {"expected": 0.485, "chat": True},
}


def find_subjects(settings: Settings) -> list[Subject]:
    """The named models. The bundled one runs alone, or for all that are not available."""
    names, bundled = settings.knobs["MODEL_NAMES"], recall(BUNDLED)
    online = any(not (Path(name) / HELDOUT).is_file() for name in names) and is_reachable(HUB)
    os.environ.update(dict.fromkeys(OFFLINE, "0" if online else "1"))
    found = {name: find_subject(name, online=online) for name in names}
    subjects = [subject for subject in found.values() if subject] if names else [bundled]
    for name, knob in (("expected", "EXPECTED_ACCURACY"), ("tolerance", "TOLERANCE")):
        if (value := settings.knobs[knob]) is not None:
            subjects = [replace(subject, **{name: value}) for subject in subjects]
    if missing := " ".join(name for name, subject in found.items() if subject is None):
        say(f"MODEL_NAMES={missing}: not on this machine, and {HUB} is not reachable. The bundled")
        say("model runs INSTEAD, without EXPECTED_ACCURACY, TOLERANCE and VLLM_SERVE_EXTRA_ARGS")
        subjects.append(replace(bundled, instead_of=missing))
    return subjects


def find_subject(name: str, *, online: bool) -> Subject | None:
    """None if the model or its data set is neither here nor on the hub."""
    folder = Path(name).absolute()  # a link may have the model's name: do not resolve it
    path = name
    if (folder / HELDOUT).is_file():
        return recall(folder)
    if (folder / "config.json").is_file():
        if not (online or has_data_set()):
            raise ValueError(f"MODEL_NAMES={name}: gsm8k is neither on this machine nor reachable")
        path = str(folder)
        name = next((one for one in KNOWN if one.split("/")[1] == folder.name), folder.name)
    elif name.startswith((".", "/", "~")):
        raise ValueError(f"MODEL_NAMES={name}: this folder has no config.json")
    elif not (online or (is_cached(name) and has_data_set())):
        return None
    return Subject(name, path, online=online, **KNOWN.get(name, {}))


def recall(folder: Path) -> Subject:
    """The recall task, with the items in the model's folder."""
    expected = 1.0 if folder.samefile(BUNDLED) else None
    return Subject(folder.name, str(folder), "recall", expected, 0.02)


def is_reachable(url: str) -> bool:
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
        return not offline and httpx.head(url, timeout=10) is not None
    return False


def is_cached(name: str) -> bool:
    import huggingface_hub  # noqa: PLC0415 - reads HF_HUB_OFFLINE when it is imported

    try:
        return isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str)
    except ValueError as error:  # no model can have this name
        raise ValueError(f"MODEL_NAMES={name}: {error}") from error


def has_data_set() -> bool:
    from datasets import config  # noqa: PLC0415 - reads HF_DATASETS_OFFLINE when it is imported

    return (Path(config.HF_DATASETS_CACHE) / "openai___gsm8k").is_dir()


# --- Engines and lm-eval


def pair_specs(subject: Subject, settings: Settings) -> list[EngineSpec]:
    """Prefill engines, then decode engines, each on the next GPUs in turn.

    On CPU each side has a half of the cores: a waiting engine spins and would starve the other.
    """
    gpus, knobs = settings
    turn, specs = cycle(gpus), list[EngineSpec]()
    for (role, side, agent), cores in zip(SIDES, halves(os.sched_getaffinity(0)), strict=True):
        ranks = knobs[f"{agent}_TP_SIZE"]
        layout = knobs[f"{agent}_KV_LAYOUT"] or knobs["VLLM_KV_CACHE_LAYOUT"]
        for number in range(knobs[f"NUM_{side}_INSTANCES"]):
            own = [*islice(turn, ranks)]
            spec = replace(
                engine_spec(f"{role}-{number}", subject, settings, own, layout),
                role=role,
                connector="nixl-kv",
                connector_config={**({} if gpus else PATIENT), "verify": knobs["VERIFY"]},
                tensor_parallel=ranks,
                block_size=knobs[f"{side}_BLOCK_SIZE"],
                cores=frozenset() if gpus else cores,
            )
            specs.append(spec)
    return specs


def engine_spec(
    name: str, subject: Subject, settings: Settings, gpus: Sequence[str], layout: str | None = None
) -> EngineSpec:
    """An engine without a connector, with prefill's blocks."""
    knobs = settings.knobs
    arguments = ["--attention-backend", backend] if (backend := knobs["ATTENTION_BACKEND"]) else []
    env = {"VLLM_KV_CACHE_LAYOUT": layout} if layout else {}
    env |= dict.fromkeys(OFFLINE, "0") if subject.online else {}
    if gpus:
        arguments += ["--enforce-eager"]  # on CPU it always is
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif subject.task == "gsm8k":
        arguments += ["--max-model-len", "4096"]  # the cache of a whole context is too large
        env["VLLM_CPU_KVCACHE_SPACE"] = "4"
    extra = () if subject.instead_of else knobs["VLLM_SERVE_EXTRA_ARGS"]
    return EngineSpec(
        name,
        Path(subject.path),
        device="cuda" if gpus else "cpu",
        block_size=knobs["PREFILL_BLOCK_SIZE"],
        gpu_memory_utilization=knobs["GPU_MEMORY_UTILIZATION"],
        extra_args=(*arguments, *subject.engine_args, *extra),
        extra_env=env,
        without_env=frozenset(knobs),  # among them VLLM_KV_CACHE_LAYOUT, which vLLM reads too
        served_name=subject.model,
    )


def evaluate(subject: Subject, url: str, settings: Settings, samples: Path) -> dict[str, Any]:
    """Run lm-eval in this process, and write its samples to a file: some fields of an Outcome."""
    import lm_eval.tasks  # noqa: PLC0415 - takes 10 s or more

    chat, task = subject.chat, subject.task
    arguments: dict[str, object] = {
        "model": subject.model,
        "base_url": f"{url}/v1/{'chat/' if chat else ''}completions",
        "num_concurrent": settings.knobs["NUM_CONCURRENT"],
        "timeout": 600,
        "tokenized_requests": False,
    }
    if task == "recall":
        arguments |= {"tokenizer_backend": None, "eos_string": "<eos>"}
        os.environ["RECALL_HELDOUT"] = str(Path(subject.path) / HELDOUT)
    else:
        arguments |= {"tokenizer_backend": "huggingface", "tokenizer": subject.path}
    log, records = getLogger("lm_eval.models.api_models"), BufferingHandler(sys.maxsize)
    log.addHandler(records)
    # Its own tasks are 14,000 files, which it reads in half a minute.
    folder, own = str(CONFIGS / "lm_eval"), task == "gsm8k"
    tasks = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=own)
    try:
        result: Any = lm_eval.simple_evaluate(
            "local-chat-completions" if chat else "local-completions",
            model_args=arguments,
            tasks=[task],
            num_fewshot=5 if chat else None,
            apply_chat_template=chat,
            limit=settings.knobs["--limit"],
            bootstrap_iters=0,
            task_manager=tasks,
        )
    finally:
        log.removeHandler(records)
    lines = result["samples"][task]
    samples.write_text(json.dumps(lines, default=str, indent=1), encoding="utf-8")
    # Concurrent requests write the first of these lines when they fail, others the second.
    failed = re.compile("Exception:|API request failed with")
    return {
        "accuracy": float(result["results"][task][METRICS[task]]),
        "items": len({line["doc_id"] for line in lines}),
        "errors": sum(bool(failed.match(record.getMessage())) for record in records.buffer),
    }


# --- Running and judging


@dataclass
class Outcome:
    """The result of one model; the JSON file has these fields and the subject's."""

    accuracy: float | None = None  # with prefill and decode apart
    single: float | None = None  # of a single engine without a connector
    items: int = 0
    errors: int = 0  # requests that failed and were sent again
    computed: int = 0  # tokens of the prompts, by decode
    counters: Mapping[str, float] = field(default_factory=dict)  # the connector's, on decode
    seconds: float = 0.0
    verdict: str = ""


def faults(outcome: Outcome, subject: Subject, knobs: Mapping[str, Any]) -> Iterator[str]:
    """Reasons why the accuracy is wrong, or why it proves nothing."""
    accuracy, tolerance, wanted = outcome.accuracy, subject.tolerance, outcome.items
    if accuracy is None:
        yield "nothing was evaluated"
        return
    for name, value in (("expected", subject.expected), ("the single engine", outcome.single)):
        if value is not None and round(abs(accuracy - value), 9) > tolerance:
            yield f"accuracy {accuracy:.4f} is not within {tolerance:g} of {value:.4f} ({name})"
    count = Counter({name: round(value) for name, value in outcome.counters.items()})
    loads, verified = count["loads_total{outcome=loaded}"], count["verified_loads_total"]
    yield from (f"{count[name]} {words}" for name, words in NONE_ALLOWED.items() if count[name])
    if not (loads and count["loaded_tokens_total"] and count["read_bytes_total"]):
        yield "nothing was loaded over NIXL: decode computed every prompt itself"
    elif loads < wanted:
        yield f"only {loads} of {wanted} loads: decode computed the other prompts"
    elif outcome.computed > wanted:  # decode always computes the last token
        yield f"decode computed {outcome.computed} tokens of {wanted} prompts itself"
    if knobs["VERIFY"] == "all" and verified < loads:
        yield f"only {verified} of {loads} loads were verified by a digest"
    if outcome.errors:
        yield f"{outcome.errors} requests failed and were sent again"


def run(subject: Subject, settings: Settings, log_dir: Path) -> Outcome:
    """Evaluate the pair, then a single engine if wanted. An error is the verdict."""
    begin, outcome = time.monotonic(), Outcome()
    try:
        with Cluster(log_dir, start_timeout_s=START_TIMEOUT_S) as cluster:
            run_pair(outcome, subject, settings, cluster)
            if settings.knobs["--single"]:
                spec = engine_spec("single", subject, settings, settings.gpus[:1])
                (engine,) = cluster.start(spec)
                samples = log_dir / "samples-single.json"
                outcome.single = evaluate(subject, engine.url, settings, samples)["accuracy"]
        outcome.verdict = "; ".join(faults(outcome, subject, settings.knobs)) or "ok"
    except Exception as error:  # noqa: BLE001 - the next model runs all the same
        kind = "" if isinstance(error, RuntimeError) else type(error).__name__  # ours say enough
        trouble = ": ".join(filter(None, [kind, str(error)]))
        say(trouble)
        outcome.verdict = trouble.split("\n")[0]
    outcome.seconds = time.monotonic() - begin
    return outcome


def run_pair(outcome: Outcome, subject: Subject, settings: Settings, cluster: Cluster) -> None:
    """Start prefill, decode and a router, evaluate the model behind them, and end them."""
    engines = cluster.start(*pair_specs(subject, settings))
    prefill, decode = ([one for one in engines if one.spec.role == role] for role, *_ in SIDES)
    router = cluster.route(prefill, decode)
    total: Counter[str] = Counter()

    def have_ended() -> bool:
        total.clear()
        for engine in decode:
            with Client(engine.url) as client:
                total.update(client.counters())
        return total[LOADS] + total[FAILURES] >= outcome.items

    try:
        samples = cluster.log_dir / "samples.json"
        vars(outcome).update(evaluate(subject, router.url, settings, samples))
        wait_until(have_ended, COUNTERS_LAG_S)
    except Exception:
        cluster.check_alive()  # the end of an engine explains more than a failed request
        raise
    finally:
        stop_all([router, *engines])
    outcome.computed = round(total[COMPUTED_TOKENS])
    ours = re.compile(f"{PREFIX}(?!.*(_created|{{(engine|model_name)=))")
    counted = {name: value for name, value in total.items() if value and ours.match(name)}
    outcome.counters = {name.removeprefix(PREFIX): value for name, value in counted.items()}


def run_all(
    subjects: Sequence[Subject], settings: Settings, log_dir: Path, result: Path | None
) -> int:
    """Evaluate one model after another; return the exit status."""
    lines: list[dict[str, Any]] = []
    for number, subject in enumerate(subjects):
        given = " ".join(f"{name}={value}" for name, value in settings.knobs.items() if value)
        say(f"== {subject.model} ({subject.task}): {given}")
        outcome = run(subject, settings, log_dir / f"{number}-{subject.model.replace('/', '--')}")
        lines.append(asdict(subject) | asdict(outcome))
        print(*(f"{name:10} {value}" for name, value in lines[-1].items()), sep="\n", flush=True)
        if outcome.accuracy is not None and subject.expected is None and outcome.single is None:
            print("compared with NOTHING: set EXPECTED_ACCURACY, or compare with --single")
        if subject.instead_of:
            print(f"{subject.instead_of}: NOT evaluated: no hub, and no local copy")
        if result:
            result.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")
    num_good = sum(line["verdict"] == "ok" for line in lines)
    print(f"{num_good}/{len(subjects)} models are good", flush=True)
    return 0 if num_good == len(subjects) else 1


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_accuracy_test.sh", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    # What read_settings checks keeps its flag as its name.
    add("--kv_buffer_device", "--kv-buffer-device", dest="--kv_buffer_device", metavar="DEVICE")
    add("--attention-backend", dest="--attention-backend", metavar="NAME", help="of all engines")
    add("--single", dest="--single", action="store_true", help="also run one engine alone")
    add("--limit", dest="--limit", metavar="N", help="only N items")
    add("--json", metavar="FILE", type=Path, help="write the results there")
    add("--log-dir", metavar="DIR", type=Path, help="default: a new temporary folder")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    flags = parse_flags(arguments)
    needed = ("vllm", "lm_eval", "vllm_router")
    if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
        say(f"{sys.executable} lacks {', '.join(lacking)}; scripts/install has it")
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
    end_on_signals()
    log_dir: Path | None = None
    try:
        settings = read_settings(detect_gpus(), os.environ, vars(flags))
        subjects = find_subjects(settings)
        log_dir = (flags.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-accuracy-"))).resolve()
        log_dir.mkdir(parents=True, exist_ok=True)
        if flags.json:
            flags.json.open("a").close()  # an error comes now and not after an hour
        os.environ.update(past_proxies(os.environ) | {"OPENAI_API_KEY": "EMPTY"})
        return run_all(subjects, settings, log_dir, flags.json)
    except (ValueError, OSError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted: everything is ended")
        return 128 + signal.SIGINT
    finally:
        kill_descendants(os.getpid())  # a signal may come between a child's start and our record
        if log_dir is not None:
            say(f"logs in {log_dir}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
