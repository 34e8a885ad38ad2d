"""What do arriving transfers cost a decode engine that is busy?

Some streams run on decode all the time. In each round, prefill first computes some new prompts,
and nothing is measured. Then follow three windows of the same length. In one nothing arrives but
the tickets of these prompts, at a fixed rate, so their KV is read from prefill; in one nothing; in
one as many prompts that decode has in its prefix cache. So the first and the last differ in the
transfers alone, also where prefill shares decode's cores or its GPU. Of each window the time
between tokens of the streams is measured; and of the hooks of the connector (they are timed by
`lab.bench.timed_connector`), on the scheduler's thread and on the workers' step threads, of decode
and of prefill: what those calls took that had something to do for a request, in seconds that pass
and in seconds of CPU, and in which hook most of these; and what a step takes without.

The new prompts of a round must fit the share of prefill's cache that offers may hold: half of it.
"""

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeAlias, get_args

from lab.bench import engines, hook_times
from lab.bench.arrivals import prompt
from lab.bench.hook_times import Times
from lab.bench.streams import Asker, percentile, sleep_until
from lab.cluster.client import Client
from lab.cluster.cluster import Cluster
from lab.cluster.engines import Engine
from lab.cluster.metrics import CountersSince, Loaded
from lab.results import Figures, Results, verdict_of

Kind: TypeAlias = Literal["alone", "cached", "loaded"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

Arrivals: TypeAlias = Sequence[tuple[list[int], Mapping[str, Any]]]

CACHED_PROMPTS: Final = 4
"""That arrive in turn."""

OFFER_TTL_S: Final = 60.0
"""All prompts of a round are computed before the first of them is read."""

SETTLE_S: Final = 1.0
"""After a window, for what has arrived to end and for the times to be written."""


@dataclass
class Window:
    """What was seen in all windows of a kind."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between two tokens of a stream."""

    arrived: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass
class Measured:
    """In all rounds."""

    windows: dict[Kind, Window]
    times: dict[str, Times]
    """What the hooks of each role of each process took where KV was loaded, see `hook_times`."""

    loaded: Loaded


class Streams:
    """Answers that run on decode, one after the other in each of several places."""

    def __init__(self, asker: Asker, places: int, lengths: tuple[int, int], seed: str = "") -> None:
        """`running` starts them.

        Args:
            asker: who asks decode.
            places: how many answers run at a time.
            lengths: of each prompt and of each answer, in tokens.
            seed: of the prompts; none with another seed begins alike, so none is in a cache.
        """
        self.gaps: list[float] = []
        """Seconds between tokens that have passed since this was last emptied."""
        self._asker = asker
        self._places = places
        self._lengths = lengths
        self._seed = seed
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Until the end of the block.

        Raises:
            RuntimeError: at the end, if one was not answered.
        """
        tasks = [asyncio.create_task(self._run()) for _ in range(self._places)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(end, asyncio.CancelledError):
                    raise end

    async def _run(self) -> NoReturn:
        prompt_tokens, answer_tokens = self._lengths
        while True:
            tokens = prompt(prompt_tokens, f"{self._seed}/stream {next(self._numbers)}")
            stream = await self._asker.ask(
                tokens, answer_tokens, prefill_first=False, gaps=self.gaps
            )
            if stream.error:
                raise RuntimeError(stream.error)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How busy decode is, and what arrives."""
    engines.add_hit_options(parser, lengths=[256, 1024])
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals a second")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=8, help="that run all the time")
    parser.add_argument("--stream-prompt", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--stream-answer", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
    """A row for each length; 0 only if all were answered, and loaded or hit as they should."""
    results = Results(engines.title(options), "lengths are measured", options.json)
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(options.log_dir, warm=False, start_timeout_s=engines.START_TIMEOUT_S) as cluster,
    ):
        env = {hook_times.VARIABLE: folder}
        prefill, decode = engines.pair_of(
            "nixl-kv", options, caching=True, module="lab.bench.timed_connector", extra_env=env
        )
        patient = {**prefill.connector_config, "offer_ttl_s": OFFER_TTL_S}
        prefills, decodes = cluster.start(replace(prefill, connector_config=patient), decode)
        for length in options.lengths:
            measured = asyncio.run(measure(prefills, decodes, length, Path(folder), options))
            row = {"tokens": length, "layout": options.layout or "auto"}
            results.add(Figures(row | figures(measured), verdict_of(*faults(measured, length))))
    return results.print(len(options.lengths))


async def measure(
    prefill: Engine, decode: Engine, length: int, folder: Path, options: argparse.Namespace
) -> Measured:
    """All rounds, with prompts of one length arriving."""
    # One token more than whole blocks: it is what a hit leaves to compute, as a load does. Of whole
    # blocks alone a hit leaves the last one, so its step would be a longer one.
    seed, asked = f"{options.seed}/{length}", length + 1
    cached = [prompt(asked, f"{seed}/cached {n}") for n in range(CACHED_PROMPTS)]
    again = itertools.cycle(cached)
    count = round(options.rate * options.seconds)
    windows: dict[Kind, Window] = {"loaded": Window(), "alone": Window(), "cached": Window()}
    times: dict[str, Times] = {}
    async with Asker(decode.url, prefill.url) as asker:
        for tokens in (*cached, prompt(asked, f"{seed}/first")):
            await asker.ask(tokens, 1)
        lengths = options.stream_prompt, options.stream_answer
        streams = Streams(asker, options.streams, lengths, seed)
        with Client(decode.url) as client:
            since = CountersSince(client)
            async with streams.running():
                await asyncio.sleep(SETTLE_S)
                for number in range(options.rounds):
                    before = hook_times.read_times(folder)
                    new = [prompt(asked, f"{seed}/new {number} {n}") for n in range(count)]
                    tickets = await asyncio.gather(*map(asker.ticket, new))
                    arrivals = list(zip(new, tickets, strict=True))
                    await watch(windows["loaded"], asker, streams, arrivals, options)
                    await asyncio.sleep(SETTLE_S)
                    for name, now in hook_times.read_times(folder).items():
                        took = now.since(before.get(name, Times()))
                        times.setdefault(name, Times()).add(took)
                    await watch(windows["alone"], asker, streams, [], options)
                    hits: Arrivals = [(next(again), {}) for _ in range(count)]
                    await watch(windows["cached"], asker, streams, hits, options)
                await asyncio.sleep(SETTLE_S)
            loaded = Loaded.from_counters(since.changed())
    return Measured(windows, times, loaded)


async def watch(
    window: Window,
    asker: Asker,
    streams: Streams,
    arrivals: Arrivals,
    options: argparse.Namespace,
) -> None:
    """Let prompts arrive for a while, each with its ticket, or with nothing."""
    streams.gaps.clear()
    begin = time.perf_counter()
    tasks = []
    for number, (tokens, ticket) in enumerate(arrivals):
        await sleep_until(begin + number / options.rate)
        tasks.append(asyncio.create_task(asker.ask(tokens, 1, ticket=ticket)))
    await sleep_until(begin + options.seconds)
    arrived = await asyncio.gather(*tasks)
    window.gaps += streams.gaps
    window.arrived += len(arrived)
    window.errors += [one.error for one in arrived if one.error]


def figures(measured: Measured) -> dict[str, str | int | float]:
    """Of the streams, and of the hooks."""
    gaps = {kind: window.gaps or [0.0] for kind, window in measured.windows.items()}
    row: dict[str, str | int | float] = {}
    for name, share in (("p99", 99.0), ("max", 100.0)):
        of = {kind: percentile(gaps[kind], share) * 1e3 for kind in KINDS}
        row |= {f"gap {name} ms {kind}": value for kind, value in of.items()}
        row[f"{name} loaded to cached"] = of["loaded"] / of["cached"] if of["cached"] else 0.0
    loads = max(1, measured.loaded.loads)
    row["descriptors"] = measured.loaded.descriptors // loads
    requests = max(1, measured.windows["loaded"].arrived)
    for (engine, role), cost in sorted(hook_times.per_request(measured.times, requests).items()):
        name = role if engine == "decode" else f"{engine} {role}"
        row[f"{name} ms a request"] = cost.seconds * 1e3
        row[f"{name} CPU ms a request"] = cost.cpu * 1e3
        row[f"{name} most CPU in"] = f"{cost.hook}: {cost.hook_cpu * 1e3:.3f} ms"
        row[f"{name} CPU us a step"] = cost.step_cpu * 1e6
    return row


def faults(measured: Measured, length: int) -> Sequence[str]:
    """What makes figures worthless, where prompts of so many tokens and one more arrived."""
    windows, loaded = measured.windows, measured.loaded
    errors = [error for one in windows.values() for error in one.errors]
    lacking = windows["loaded"].arrived - loaded.loads
    # no prompt of a stream is in the cache; what is loaded counts as cached, too
    missed = windows["cached"].arrived * length - (loaded.cached - loaded.tokens)
    return [
        f"{len(errors)} failed: {errors[0]}" if errors else "",
        f"{lacking} were not loaded" if lacking > 0 else "",
        f"{missed} tokens were not in the cache" if missed > 0 else "",
        "" if all(one.gaps for one in windows.values()) else "no stream gave two tokens",
    ]
