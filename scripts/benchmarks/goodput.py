"""Compare replicas with prefill and decode engines, on the same number of GPUs.

Counts the requests whose first token and mean gap came in time (--ttft-ms, --gap-ms), by the rate
of requests per GPU. Requests come from vLLM's own client, `vllm bench serve --goodput`, by a
Poisson process, the same ones for each arm, through vllm-router:

    replicas      engines without a connector, with vLLM's default chunk
    replicas-N    the same with --max-num-batched-tokens N
    in-tree       prefill and decode with vLLM's NixlConnector
    serial        prefill and decode with nixl_kv, `overlap` off: one leg after the other
    overlap       prefill and decode with nixl_kv, `overlap` on, its default

All engines start at once and share the GPUs; one arm is asked at a time. A run first finds each
arm's knee, the highest rate at which 90 % of the requests are good and the next one, with --few
requests for each rate. Then it asks more at these two rates, up to --many, then at the other
rates. It ends after --seconds. Arms take turns in random order. --record adds the run to a record,
and a later run goes on where that record ends; "overlap" is in every run. Prefix caching is off.

A run also measures what `nixl-kv plan` asks for: how many tokens per second one prefill engine
computes, and how many answers one decode engine generates within the gap. The second figure comes
from the gaps with two numbers of answers, along a straight line.
"""

import argparse
import itertools
import random
import shlex
import signal
import statistics
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks import engines, points, records
from benchmarks.client import Client, Result
from benchmarks.points import Capacities, Objective, Point, Run, Shape, Share, Step
from benchmarks.shapes import Row
from harness.cluster.cluster import Cluster, say
from harness.cluster.engines import Connector, Engine, EngineSpec, Role
from harness.cluster.waiting import wait_until

ACCUMULATES: Final = True

REFERENCE: Final = "overlap"
"""This arm is measured in every run, so that runs can be compared."""

ARMS: Final = ("replicas", "replicas-1024", "replicas-2048", "in-tree", "serial", REFERENCE)

RATES: Final[Mapping[Shape, Sequence[float]]] = {
    Shape(2000, 200): (2, 3, 4, 5, 6, 7, 8, 10, 12),
    Shape(5000, 250): (1, 1.5, 2, 2.5, 3, 3.5, 4, 5),
    Shape(16000, 200): (0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.6),
    Shape(500, 500): (2, 4, 6, 8, 10, 12, 16, 20),
}
"""Requests a second and GPU. One H200 prefills about 37,000 tokens a second of an 8B model: a
prefill engine for each decode engine is full near the middle."""

LATE_S: Final = 25.0  # how much longer than expected the last point may take
STOP_S: Final = 20.0  # for engines to end
GPU_SHARE: Final = 0.9  # of its memory, for all engines on a GPU
OTHER_BYTES: Final = 4 << 30  # of an engine, beside weights and cache: CUDA, graphs and activations


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines, the objectives and the requests."""
    engines.add_options(parser)
    parser.add_argument("--arms", nargs="+", type=arm, default=ARMS, metavar="ARM")
    parser.add_argument(
        "--ratio",
        type=ratio,
        metavar="P:D",
        help="prefill and decode engines; default: as many as --prefill-gpus and --decode-gpus "
        "name, or 1:1. Replicas: as many as both",
    )
    parser.add_argument(
        "--kv-gib",
        type=float,
        help="of each engine's cache on GPUs; default: what the memory allows. Too small a cache "
        "makes the requests of a decode engine wait",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=Shape.parse,
        default=list(RATES),
        metavar="PROMPT/ANSWER",
        help=f"tokens; default {' '.join(map(str, RATES))}",
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, help="requests a second and GPU, instead of the shapes'"
    )
    parser.add_argument("--ttft-ms", type=float, default=1000.0, help="default 1000")
    parser.add_argument("--gap-ms", type=float, default=15.0, help="default 15")
    parser.add_argument(
        "--few", type=int, default=points.LEAST, help="requests of a rate, default %(default)s"
    )
    # A queue needs time to grow: at a rate at which 39 % of 150 requests were good, 98 % of 48
    # were, which came within 6 s.
    parser.add_argument(
        "--least-s",
        type=float,
        default=20.0,
        help="of a rate's requests, more than --few if need be",
    )
    parser.add_argument("--many", type=int, default=points.MANY, help="default %(default)s")
    parser.add_argument("--most", type=int, default=120, help="requests at once, default 120")
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="for everything, also starts; default 540"
    )
    parser.add_argument(
        "--capacity-tokens", type=int, default=65536, help="for each figure of `nixl-kv plan`"
    )
    parser.add_argument("--seed", type=int, default=0)


def arm(text: str) -> str:
    """The name of an arm.

    Raises:
        argparse.ArgumentTypeError: for other text.
    """
    chunk = text.removeprefix("replicas-")
    if text in ARMS or (chunk != text and chunk.isdecimal()):
        return text
    allowed = "replicas, replicas-TOKENS, in-tree, serial, overlap"
    raise argparse.ArgumentTypeError(f"{text!r}; allowed: {allowed}")


def ratio(text: str) -> tuple[int, int]:
    """Numbers of engines.

    Raises:
        argparse.ArgumentTypeError: for other text.
    """
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: PREFILL:DECODE, such as 2:1")
    return int(prefill), int(decode)


# --- the engines


@dataclass(frozen=True)
class Setup:
    """The GPUs of each engine, None without GPUs; prefill engines come first."""

    gpus: Sequence[str | None]
    num_prefill: int
    tp: int

    @property
    def num_decode(self) -> int:
        return len(self.gpus) - self.num_prefill

    @property
    def name(self) -> str:
        return f"{self.num_prefill}:{self.num_decode}"

    @property
    def num_gpus(self) -> int:
        """An engine on CPU counts as one for each rank."""
        return len(self.gpus) * self.tp

    @property
    def roles(self) -> Sequence[Role]:
        roles: list[Role] = ["prefill"] * self.num_prefill
        return roles + ["decode"] * self.num_decode


def setup_of(options: argparse.Namespace) -> Setup:
    """Which engines run, and where.

    Raises:
        SystemExit: the options contradict each other.
    """
    tp, other = options.tp
    if tp != other:
        raise SystemExit(f"--tp {tp} {other}: allowed: equal numbers, because replicas have one")
    named = [
        gpus.split(",") if gpus else [] for gpus in (options.prefill_gpus, options.decode_gpus)
    ]
    counts = options.ratio or (tuple(len(each) // tp for each in named) if all(named) else (1, 1))
    if options.device == "cpu":
        return Setup([None] * sum(counts), counts[0], tp)
    if not any(named):
        numbers = list(map(str, range(sum(counts) * tp)))
        named = [numbers[: counts[0] * tp], numbers[counts[0] * tp :]]
    for role, gpus, count in zip(("prefill", "decode"), named, counts, strict=True):
        if len(gpus) != count * tp or not count:
            raise SystemExit(
                f"--{role}-gpus names {len(gpus)} GPUs; allowed: {count * tp}, for {count} engines "
                f"with TP {tp}"
            )
    slices = [gpus[n : n + tp] for gpus in named for n in range(0, len(gpus), tp)]
    return Setup([",".join(each) for each in slices], counts[0], tp)


def specs_of(name: str, setup: Setup, options: argparse.Namespace, beside: int) -> list[EngineSpec]:
    """The engines of an arm; `beside` is how many arms share the GPUs."""
    fields = engines.engine_fields(options, caching=False)
    if options.device == "cuda":
        fields |= {"kv_cache_bytes": cache_bytes(options, setup, beside)}
        fields |= {"gpu_memory_utilization": GPU_SHARE / beside}
    if chunk := name.partition("-")[2] if points.is_replicas(name) else "":
        fields["extra_args"] = ("--max-num-batched-tokens", chunk, *fields["extra_args"])
    connector: Connector = "in-tree" if name == "in-tree" else "nixl-kv"
    model = engines.model_of(options)
    specs = []
    for number, (role, gpus) in enumerate(zip(setup.roles, setup.gpus, strict=True)):
        about: dict[str, Any] = {"tensor_parallel": setup.tp, "extra_env": engines.visible(gpus)}
        if points.is_replicas(name):
            spec = EngineSpec(f"{name}-{number}", model, **fields, **about)
        else:
            spec = EngineSpec(f"{name}-{role}-{number}", model, role, connector, **fields, **about)
        if connector == "nixl-kv" and not points.is_replicas(name):
            spec = replace(spec, connector_config={"verify": "off", "overlap": "off"})
        specs.append(engines.with_overlap(spec) if name == REFERENCE else spec)
    return specs


def cache_bytes(options: argparse.Namespace, setup: Setup, beside: int) -> int:
    """How large each engine's cache is on each of its GPUs.

    Raises:
        SystemExit: the memory of a GPU is too small for these engines.
    """
    if options.kv_gib:
        return int(options.kv_gib * (1 << 30))
    shown = records.output(
        "nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"
    )
    memory = min(map(int, shown.split())) << 20
    weights = engines.weight_bytes(options) // setup.tp
    left = int(memory * GPU_SHARE) // beside - weights - OTHER_BYTES
    if left < OTHER_BYTES:
        raise SystemExit(
            f"--arms: {beside} engines share a GPU of {memory >> 30} GiB, and the weights of each "
            f"take {weights >> 30} GiB; name fewer arms"
        )
    return left


# --- the run


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each point.

    Raises:
        SystemExit: no point was measured.
        ProcessDiedError: an engine or a router has ended.
    """
    end = time.monotonic() + options.seconds
    setup = setup_of(options)
    arms = list(dict.fromkeys([*options.arms, REFERENCE]))
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(start_timeout_s=engines.START_TIMEOUT_S))
        client = stack.enter_context(Client(engines.model_of(options), cluster.log_dir))
        specs = {name: specs_of(name, setup, options, len(arms)) for name in arms}
        stack.callback(interrupt, cluster)
        started = iter(cluster.start(*itertools.chain(*specs.values())))
        running = {name: list(itertools.islice(started, len(specs[name]))) for name in arms}
        session = Session(options, setup, cluster, client, running, end - STOP_S)
        yield from session.points()
        for shape, capacity in session.run.capacities.items():
            say(capacity_text(shape, capacity))
        if not session.run.points:
            raise SystemExit(
                f"no point fits into the rest of --seconds {options.seconds:g}, or none is "
                "missing; allowed: more seconds, or more requests (--many)"
            )


def interrupt(cluster: Cluster) -> None:
    """End the engines as Ctrl-C does, so that vLLM frees its GPU memory in order."""
    for engine in cluster.engines:
        if engine.is_running():
            engine.signal_leader(signal.SIGINT)
    wait_until(lambda: not any(one.is_running() for one in cluster.engines), STOP_S)


class Session:
    """A run: it chooses each next measurement, and keeps the results in a file."""

    def __init__(
        self,
        options: argparse.Namespace,
        setup: Setup,
        cluster: Cluster,
        client: Client,
        arms: Mapping[str, Sequence[Engine]],
        deadline: float,
    ) -> None:
        self._options = options
        self._setup = setup
        self._cluster = cluster
        self._client = client
        self._arms = arms
        self._deadline = deadline
        self._objective = Objective(options.ttft_ms, options.gap_ms)
        self._past = points.read(options.record).runs if options.record else []
        seed = f"{options.seed}/{len(self._past)}"
        head = records.head(options.command, options.commit)
        self.run = Run(seed=seed, **head)
        self._index: int | None = None
        self._order = random.Random(seed)  # noqa: S311 - the same each time
        self._warm: set[str] = set()
        self._gaps_ms: dict[Shape, float] = {}
        """The mean gap of the last point."""

    def points(self) -> Iterator[Row]:
        """Measure until nothing is missing, or the deadline has passed."""
        for shape in self._options.shapes:
            self._measure_capacity(shape)
        while chosen := self._next():
            name, shape, step = chosen
            point = self._measure(name, shape, step)
            self.run.points.append(point)
            if point.mean_gap:
                self._gaps_ms[shape] = statistics.mean(point.mean_gap)
            self._save()
            row = {"arm": name, "prompt/answer": shape.shown, "a second and GPU": step.rate}
            yield row | points.figures([point], self._objective)

    def _next(self) -> tuple[str, Shape, Step] | None:
        """The most urgent measurement for which there is time; any of several equal ones."""
        wanted = []
        for name, shape in itertools.product(self._arms, self._options.shapes):
            step = self._step(name, shape)
            fitting = step and self._fitting(shape, step)
            if fitting:
                key = (fitting.stage, fitting.so_far, self._order.random())
                wanted.append((key, (name, shape, fitting)))
        return min(wanted)[1] if wanted else None

    def _step(self, name: str, shape: Shape) -> Step | None:
        options = self._options
        grid = options.rates or RATES.get(shape, ())
        shares = self._shares(name, shape)
        if name == REFERENCE and not any(
            point.arm == name and point.shape == str(shape) for point in self.run.points
        ):  # where this run can be compared with the others
            low, high = points.knee(grid, shares)
            if high - low == 1:
                return self._long_enough(Step(0, 0, grid[max(low, 0)], options.few))
        step = points.next_step(grid, shares, options.few, options.many, options.most)
        return step and self._long_enough(step)

    def _long_enough(self, step: Step) -> Step:
        least = int(self._options.least_s * step.rate * self._setup.num_gpus)
        return step._replace(requests=max(step.requests, min(least, self._options.many)))

    def _shares(self, name: str, shape: Shape) -> dict[float, Share]:
        """The shares by rate, also those of earlier runs on such a machine."""
        about = self.run.card, self.run.vllm, self._setup.name, str(shape), name
        found = points.grouped([*self._past, self.run])
        return {
            key.rate: points.share_of(some, self._objective)
            for key, some in found.items()
            if key[:5] == about
        }

    def _fitting(self, shape: Shape, step: Step) -> Step | None:
        """The requests of `step` for which time is left; None if these are too few."""
        answer_s = shape.answer * self._gaps_ms.get(shape, self._options.gap_ms) / 1e3
        left = self._deadline - time.monotonic() - answer_s
        most = int(left * step.rate * self._setup.num_gpus)
        if step.requests <= most:
            return step
        return step._replace(requests=most) if most >= min(points.LEAST, step.requests) else None

    def _measure(self, name: str, shape: Shape, step: Step) -> Point:
        options, setup = self._options, self._setup
        so_far = self._shares(name, shape).get(step.rate, Share(0, 0)).total
        rate = step.rate * setup.num_gpus
        seed = zlib.crc32(f"{options.seed}/{shape}/{step.rate}/{so_far}".encode())
        extra = ["--request-rate", str(rate), "--goodput"]
        extra += [f"ttft:{options.ttft_ms:g}", f"tpot:{options.gap_ms:g}"]
        if name not in self._warm:
            extra += ["--num-warmups", str(2 * len(setup.gpus))]
            self._warm.add(name)
        engines_of_arm = self._arms[name]
        if points.is_replicas(name):
            router = self._cluster.route((), engines_of_arm)
        else:
            some = setup.num_prefill
            router = self._cluster.route(engines_of_arm[:some], engines_of_arm[some:])
        result = self._ask(router.url, shape, step.requests, seed, extra)
        point = result.point(
            arm=name, engines=setup.name, shape=str(shape), rate=step.rate, gpus=setup.num_gpus
        )
        ours, theirs = point.good(self._objective), result.good
        if abs(ours - theirs) > 1:  # a request at the very edge may be rounded to either side
            raise RuntimeError(f"{ours} requests are good, and {theirs} by vLLM's client")
        return point

    def _measure_capacity(self, shape: Shape) -> None:
        """Ask one prefill and one decode engine of the reference without a router."""
        options = self._options
        prefill, decode = (self._arms[REFERENCE][n] for n in (0, self._setup.num_prefill))
        most = max(2, options.capacity_tokens // sum(shape))
        at_once = ["--request-rate", "inf"]
        self._ask(prefill.url, shape._replace(answer=1), 2, options.seed, at_once)  # warm-up
        count = max(2, options.capacity_tokens // shape.prompt)
        result = self._ask(prefill.url, shape._replace(answer=1), count, options.seed, at_once)
        gaps = {}
        for streams in (max(1, most // 4), most):
            gap = self._ask(decode.url, shape, streams, options.seed, at_once).common_gap_ms()
            if gap is None:
                say(f"{shape}: {streams} answers had no moment in common; no figure for decode")
                return
            gaps[streams] = gap
        tokens = result.prompt_tokens / result.seconds
        self.run.capacities[str(shape)] = Capacities.of(tokens, gaps, options.gap_ms)
        self._save()

    def _ask(self, url: str, shape: Shape, count: int, seed: int, extra: Sequence[str]) -> Result:
        """One call of vLLM's client.

        Raises:
            ProcessDiedError: an engine or a router has ended.
            TimeoutError: it took too long.
        """
        give_up = max(self._deadline, time.monotonic()) + LATE_S
        return self._client.ask(
            url,
            shape,
            count,
            ["--seed", str(seed), *extra],
            while_waiting=self._cluster.check_alive,
            give_up=give_up,
        )

    def _save(self) -> None:
        if self._options.record:
            self._index = points.add(self._options.record, self.run, self._index)


def capacity_text(shape: str, capacity: Capacities) -> str:
    """The figures for `nixl-kv plan`, as a command."""
    tokens = Shape.parse(shape)
    command = ["nixl-kv", "plan", "--rate", "RATE", "--prompt", str(tokens.prompt)]
    command += ["--answer", str(tokens.answer), "--gap-ms", f"{capacity.gap_ms:g}"]
    command += ["--prefill-tokens", f"{capacity.prefill_tokens:.0f}"]
    return shlex.join([*command, "--decode-streams", f"{capacity.decode_streams:.0f}"])
