"""What wrong KV does to answers, and what `verify` does about it.

One prefill and two decode engines on CPU, one of which verifies every load. Each fault is planted
into every load of both (`suites.planted`): into the memory of decode, when the read has landed.
Asked are held-out prompts of a recall model, whose answers stand in the prompt's KV, or its states,
or nowhere; a single engine answers them too. Decode keeps no prefixes, so that each prompt is
loaded each time.

The exit status is 0 only if with `verify` all answers are those of the single engine, every planted
fault was detected, and nothing else was; and if without faults all are the same, verified or not.
(The same but for tokens that are equally likely, as rounding may decide in bfloat16.)
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from harness.cluster.answers import LIKELY, TIES, likeness
from harness.cluster.client import Answer, Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import PATIENT, Engine, EngineSpec, python_path
from harness.cluster.metrics import CORRUPT, FAILURES, LOADS, CountersSince
from harness.cluster.models import FAMILIES
from harness.cluster.models.files import REPO, ensure_tiny_model
from harness.cluster.models.qwen3 import TinyModel
from harness.cluster.pair import Pair
from harness.cluster.processes import ProcessDiedError
from harness.cluster.prompts import random_prompt
from lab.results import Results, Verdict, verdict_of
from suites.detect.planting import FAULTS, check_fault

RECALL: Final = REPO / "configs" / "recall"
PLANTED_MODULE: Final = "suites.planted"
PLAN_VARIABLE: Final = "NIXL_KV_PLANT"
PROMPTS: Final = 40
ANSWER_TOKENS: Final = 32
PLANTED: Final = ("byte", "blocks", "head", "layer")
BLOCK_SIZE: Final = 32
"""Several in the shortest prompt."""
LAG_S: Final = 30.0
NO_FAULT: Final = "none"


@dataclass(frozen=True)
class Asked:
    """A prompt, what should be said, and what a single engine says."""

    prompt: str
    answer: str
    single: Answer

    def is_exact(self, answer: Answer) -> bool:
        """Whether it is what should be said."""
        return answer.text.strip() == self.answer

    def is_same(self, answer: Answer, dtype: str) -> bool:
        """Whether it is what the single engine says, or as good as that."""
        if len(answer.tokens) != len(self.single.tokens):
            return False
        return likeness(self.single, answer, TIES[dtype]) != "other"


@dataclass(frozen=True)
class Row:
    """What came of all prompts with one fault and one setting of `verify`."""

    fault: str
    verify: str
    prompts: int
    planted: int
    exact: int
    """Answers that are right."""
    same: int
    """Answers that are the single engine's."""
    loads: int
    corrupt: int
    others: int
    """Loads that failed for any other reason."""

    @property
    def verdict(self) -> Verdict:
        """Whether all is as it should be; without proof, wrong answers are no surprise."""
        return verdict_of("" if self._is_good() else "not as it should be")

    def _is_good(self) -> bool:
        """A layer that was not read is no fault where what stood there happens to be the same."""
        detected = 0 if self.verify == "off" else self.planted
        if (self.loads, self.corrupt, self.others) != (self.prompts - detected, detected, 0):
            return False
        if self.fault == NO_FAULT:
            return self.planted == 0 and self.same == self.prompts
        return self.planted > 0 and (self.verify == "off" or self.same == self.prompts)

    def cells(self) -> dict[str, str]:
        """A row of the table."""
        return {
            "fault": self.fault,
            "verify": self.verify,
            "planted": str(self.planted),
            "exact\n%": f"{100 * self.exact / self.prompts:.1f}",
            "as single\nengine %": f"{100 * self.same / self.prompts:.1f}",
            "loads": str(self.loads),
            "failed:\ncorrupt": str(self.corrupt),
            "others": str(self.others),
        }


def held_out(folder: Path, count: int) -> list[tuple[str, str]]:
    """Prompts and their answers, of all lengths, always the same ones."""
    lines = (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines]
    random.Random(0).shuffle(items)  # noqa: S311 - the same order every time
    return [(item["prompt"], item["answer"]) for item in items[:count]]


def made_up(count: int) -> list[tuple[str, str]]:
    """For a model that can answer nothing: what it says is compared with the single engine."""
    lengths = (100, 200, 400, 800)
    return [(random_prompt(lengths[n % len(lengths)], seed=n), "") for n in range(count)]


def planted_spec(spec: EngineSpec, plan: Path) -> EngineSpec:
    """The same decode engine with faults, those that stand in the file `plan`."""
    env = {PLAN_VARIABLE: f"@{plan}", "PYTHONPATH": python_path(REPO / "tests")}
    return replace(spec, module=PLANTED_MODULE, extra_env=env)


def dtype_of(model: Path) -> str:
    """That of its weights."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return str(config["torch_dtype"])


def specs_of(model: Path, plan: Path) -> tuple[EngineSpec, list[EngineSpec]]:
    """Prefill, and both decode engines; decode keeps no prefixes."""
    prefill, decode = pair_specs(
        model, block_size=BLOCK_SIZE, dtype=dtype_of(model), connector_config=PATIENT
    )
    forgetful = replace(planted_spec(decode, plan), extra_args=("--no-enable-prefix-caching",))
    return prefill, [
        replace(forgetful, name=f"decode-{verify}", connector_config={**PATIENT, "verify": verify})
        for verify in ("off", "all")
    ]


def answer_of(client: Client, prompt: str, **extra: object) -> Answer:
    """To the end of the answer, or of our patience."""
    return client.complete(prompt, ANSWER_TOKENS, ignore_eos=False, **extra)


def ask_single(cluster: Cluster, model: Path, items: Sequence[tuple[str, str]]) -> list[Asked]:
    """What a single engine says; it is not needed any more then."""
    spec = EngineSpec("single", model, block_size=BLOCK_SIZE, dtype=dtype_of(model))
    (engine,) = cluster.start(spec)
    with Client(engine.url) as single:
        asked = [
            Asked(prompt, answer, answer_of(single, prompt, logprobs=LIKELY))
            for prompt, answer in items
        ]
    cluster.end(engine)
    return asked


def measure(pair: Pair, *, asked: Sequence[Asked], fault: str) -> Row:
    """Load all prompts into one decode engine, while its plan says this fault."""
    since, planted = CountersSince(pair.to_decode), _count_planted(pair.decode)
    dtype = str(pair.decode.spec.dtype)
    answers = [
        answer_of(pair.to_decode, one.prompt, kv_transfer_params=pair.to_prefill.ticket(one.prompt))
        for one in asked
    ]
    changed = since.wait(lambda now: now[LOADS] + now[FAILURES] >= len(asked), LAG_S)
    loads, corrupt, failures = (round(changed[name]) for name in (LOADS, CORRUPT, FAILURES))
    return Row(
        fault,
        str(pair.decode.spec.connector_config["verify"]),
        len(asked),
        _count_planted(pair.decode) - planted,
        sum(one.is_exact(answer) for answer, one in zip(answers, asked, strict=True)),
        sum(one.is_same(answer, dtype) for answer, one in zip(answers, asked, strict=True)),
        loads,
        corrupt,
        failures - corrupt,
    )


def _count_planted(engine: Engine) -> int:
    return engine.log_text().count("planted ")


def run(options: argparse.Namespace) -> int:
    """All faults, after none; the exit status."""
    if options.tiny:
        model, items = (
            ensure_tiny_model(model=FAMILIES[options.tiny]()),
            made_up(options.prompts),
        )
    else:
        model, items = options.model, held_out(options.model, options.prompts)
    with tempfile.TemporaryDirectory() as folder, Cluster(options.log_dir) as cluster:
        plan = Path(folder) / "plan"
        plan.write_text("", encoding="utf-8")
        asked = ask_single(cluster, model, items)
        exact = 100 * sum(one.is_exact(one.single) for one in asked) / len(asked)
        title = f"{model.name}: {len(asked)} prompts; a single engine answers {exact:.0f} % exactly"
        results = Results(title, "rows are as they should be", options.json)
        prefill_spec, decode_specs = specs_of(model, plan)
        prefill, *decode = cluster.start(prefill_spec, *decode_specs)
        for fault, engine in itertools.product((NO_FAULT, *options.faults), decode):
            plan.write_text("" if fault == NO_FAULT else fault, encoding="utf-8")
            with Pair(prefill, engine) as pair:
                results.add(measure(pair, asked=asked, fault=fault))
    return results.print(len(decode) * (1 + len(options.faults)))


def main(arguments: Sequence[str]) -> int:
    """Run what these options of `detect --answers` ask for; the exit status."""
    parser = argparse.ArgumentParser(
        prog="detect --answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument(
        "--faults",
        nargs="+",
        default=PLANTED,
        metavar="FAULT[@NAME]",
        help=f"of {', '.join(FAULTS)}; @NAME: in layers with this in their names, such as @query",
    )
    parser.add_argument(
        "--tiny",
        nargs="?",
        choices=list(FAMILIES),
        const=TinyModel.family,
        help="a model of random weights, which knows no answer",
    )
    parser.add_argument(
        "--model", type=Path, default=RECALL, help="with a heldout.jsonl; default configs/recall"
    )
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(arguments)
    try:
        for fault in options.faults:
            check_fault(fault)
    except ValueError as error:
        parser.error(str(error))
    try:
        return run(options)
    except ProcessDiedError as error:
        print(error, file=sys.stderr)
        return 1
