"""What wrong KV does to answers, and what `verify` does about it.

One prefill and two decode engines on CPU, one of which verifies every load. Each fault is planted
into every load of both (`pd.planted`): into the memory of decode, when the read has landed. Asked
are held-out prompts of the recall model, whose answers stand in the prompt's KV or nowhere; a
single engine answers them too. Decode keeps no prefixes, so that each prompt is loaded each time.

The exit status is 0 only if with `verify` all answers are those of the single engine, every planted
fault was found, and nothing else was; and if without faults all are the same, verified or not.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.table import Table

from pd.asking import WANT_TICKET
from pd.client import Client
from pd.cluster import CPU_DTYPE, Cluster, ClusterSpec, say_on_stderr
from pd.console import console
from pd.detect_planting import FAULTS, VARIABLE
from pd.engines import Engine, EngineSpec
from pd.processes import ProcessDiedError
from pd.prompts import random_prompt
from pd.tiny_model import REPO, ensure_tiny_model

RECALL: Final = REPO / "configs" / "recall"
PROMPTS: Final = 40
ANSWER_TOKENS: Final = 32
PLANTED: Final = ("byte", "blocks", "head", "layer")
BLOCK: Final = ("--block-size", "32")  # several in the shortest prompt
FORGETFUL: Final = (*BLOCK, "--no-enable-prefix-caching")
PATIENT: Final[Mapping[str, object]] = {
    "request_timeout_s": 60,
    "lease_s": 30,
    "offer_ttl_s": 60,
    "peer_timeout_s": 30,
}
"""The connector's configuration: few cores are slow."""
WIDTH: Final = 110
LOADS: Final = "vllm:nixl_kv_loads_total"
VERIFIED: Final = "vllm:nixl_kv_loads_verified_total"
CORRUPT: Final = "vllm:nixl_kv_load_failures_corrupt_total"
FAILURES: Final = "vllm:nixl_kv_load_failures_total"
NO_FAULT: Final = "none"


@dataclass(frozen=True)
class Asked:
    """A prompt, what should be said, and what a single engine says."""

    prompt: str
    answer: str
    single: str


@dataclass(frozen=True)
class Row:
    """What came of all prompts with one fault and one setting of `verify`."""

    fault: str
    verify: str
    planted: int
    exact: int
    """Answers that are right."""
    same: int
    """Answers that are the single engine's."""
    loads: int
    corrupt: int
    others: int
    """Loads that failed for any other reason."""

    def is_good(self, count: int) -> bool:
        """Whether all is as it should be; without proof, wrong answers are no surprise.

        A layer that was not read is no fault where what stood there happens to be the same.
        """
        found = 0 if self.verify == "off" else self.planted
        if (self.loads, self.corrupt, self.others) != (count - found, found, 0):
            return False
        if self.fault == NO_FAULT:
            return self.planted == 0 and self.same == count
        return self.planted > 0 and (self.verify == "off" or self.same == count)


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


def spec_of(model: Path, plan: Path) -> ClusterSpec:
    """The engines; decode's faults stand in the file `plan`."""
    env = {VARIABLE: f"@{plan}", "PYTHONPATH": str(REPO / "scripts")}
    prefill = EngineSpec(
        "prefill", model, "prefill", "nixl-kv", PATIENT, dtype=CPU_DTYPE, extra_args=BLOCK
    )
    decode = [
        EngineSpec(
            f"decode-{verify}",
            model,
            "decode",
            "nixl-kv",
            {**PATIENT, "verify": verify},
            module="pd.planted",
            dtype=CPU_DTYPE,
            extra_args=FORGETFUL,
            extra_env=env,
        )
        for verify in ("off", "all")
    ]
    single = EngineSpec("single", model, dtype=CPU_DTYPE, extra_args=BLOCK)
    return ClusterSpec([prefill], decode, single)


def answer_of(client: Client, prompt: str, **extra: object) -> str:
    """To the end of the answer, or of our patience."""
    return client.complete(prompt, ANSWER_TOKENS, ignore_eos=False, **extra).text.strip()


def ask_single(cluster: Cluster, items: Sequence[tuple[str, str]]) -> list[Asked]:
    """What a single engine says; it is not needed any more then."""
    if cluster.single is None:
        raise ValueError("single: there must be one")
    with Client(cluster.single.url) as single:
        asked = [Asked(prompt, answer, answer_of(single, prompt)) for prompt, answer in items]
    cluster.single.stop()
    return asked


def measure(cluster: Cluster, plan: Path, *, asked: Sequence[Asked], fault: str) -> Iterator[Row]:
    """Plant one fault into all loads of each decode engine."""
    plan.write_text("" if fault == NO_FAULT else fault, encoding="utf-8")
    with Client(cluster.prefill[0].url) as prefill:
        for engine in cluster.decode:
            with Client(engine.url) as decode:
                yield _row(prefill, engine, decode, asked=asked, fault=fault)


def _row(
    prefill: Client, engine: Engine, decode: Client, *, asked: Sequence[Asked], fault: str
) -> Row:
    before, planted = decode.counters(), _planted(engine)
    answers = [
        answer_of(decode, one.prompt, kv_transfer_params=prefill.ticket(one.prompt, WANT_TICKET))
        for one in asked
    ]
    changed = decode.counters_after(before, LOADS)
    loads, corrupt, failures = (round(changed.get(n, 0)) for n in (LOADS, CORRUPT, FAILURES))
    return Row(
        fault,
        str(engine.spec.connector_config["verify"]),
        _planted(engine) - planted,
        sum(answer == one.answer for answer, one in zip(answers, asked, strict=True)),
        sum(answer == one.single for answer, one in zip(answers, asked, strict=True)),
        loads,
        corrupt,
        failures - corrupt,
    )


def _planted(engine: Engine) -> int:
    return engine.log_path.read_text(encoding="utf-8", errors="replace").count("planted ")


def print_rows(rows: Sequence[Row], asked: Sequence[Asked], model: str) -> None:
    """A table, one row for each fault and setting."""
    count = len(asked)
    right = sum(one.single == one.answer for one in asked)
    title = f"{model}: {count} prompts; a single engine answers {100 * right / count:.0f} % exactly"
    table = Table(title=title)
    for heading in ("fault", "verify"):
        table.add_column(heading)
    headings = ("planted", "exact\n%", "as single\nengine %", "loads", "failed:\ncorrupt", "others")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        shares = (f"{100 * n / count:.1f}" for n in (row.exact, row.same))
        figures = map(str, (row.loads, row.corrupt, row.others))
        table.add_row(row.fault, row.verify, str(row.planted), *shares, *figures)
    console(WIDTH).print(table)


@contextmanager
def started(model: Path, log_dir: Path) -> Iterator[tuple[Cluster, Path]]:
    """The engines, and the file that says what decode's shall do."""
    plan = log_dir / "plan"
    plan.write_text("", encoding="utf-8")
    with ExitStack() as stack:
        cluster = Cluster(spec_of(model, plan), log_dir=log_dir, route=False)
        yield stack.enter_context(cluster), plan


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="damage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=PLANTED)
    parser.add_argument(
        "--tiny", action="store_true", help="a model of random weights, which knows no answer"
    )
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    return parser.parse_args()


def run(options: argparse.Namespace, model: Path, log_dir: Path) -> tuple[list[Row], list[Asked]]:
    """All faults, after none."""
    items = made_up(options.prompts) if options.tiny else held_out(RECALL, options.prompts)
    rows: list[Row] = []
    with started(model, log_dir) as (cluster, plan):
        asked = ask_single(cluster, items)
        for fault in (NO_FAULT, *options.faults):
            say_on_stderr(f"planting: {fault}")
            for row in measure(cluster, plan, asked=asked, fault=fault):
                say_on_stderr(f"  {row}")
                rows.append(row)
    return rows, asked


def main() -> int:
    """Run; the exit status."""
    options = parse_arguments()
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-damage-"))
    model = ensure_tiny_model() if options.tiny else RECALL
    try:
        rows, asked = run(options, model, log_dir)
    except ProcessDiedError as error:
        print(error, file=sys.stderr)
        return 1
    print_rows(rows, asked, model.name)
    bad = [row for row in rows if not row.is_good(len(asked))]
    for row in bad:
        print(f"not as it should be: {row}")
    print(f"{len(rows) - len(bad)}/{len(rows)} rows as they should be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
