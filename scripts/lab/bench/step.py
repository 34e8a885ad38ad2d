"""What do arriving transfers cost a decode engine that is busy?

Some streams run on decode all the time. Beside them, at a fixed rate, requests for one token
arrive: in the first phase none; in the second, prompts that decode has in its prefix cache; in the
third, as many new ones, whose KV is read from prefill. So the second and the third differ in the
transfers alone. From each phase comes the time between tokens of the streams, and what the
connector's hooks took on the scheduler's thread and on the workers' step threads, of decode and of
prefill (they are timed by `lab.bench.timed_connector`): for a request of the third phase, in
seconds that pass and in seconds of CPU, and in which hook most of these.
"""

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from lab.bench import engines, hook_times
from lab.bench.arrivals import prompt
from lab.bench.hook_times import Times
from lab.bench.streams import Asker, percentile, sleep_until
from lab.cluster.client import Client
from lab.cluster.cluster import Cluster
from lab.cluster.engines import Engine
from lab.cluster.metrics import CountersSince, Loaded
from lab.results import Figures, Results, verdict_of

CACHED_PROMPTS: Final = 4
"""That arrive in turn in the second phase."""

SETTLE_S: Final = 1.0
"""After a phase, for what has arrived to end and for the times to be written."""


@dataclass
class Phase:
    """What was seen in a while."""

    gaps: list[float]
    """Seconds between two tokens of a stream."""

    times: dict[str, Times]
    """What the hooks of each role of each process took, see `hook_times`."""

    arrived: int
    errors: list[str]
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
    engines.add_hit_options(parser, lengths=[1024, 16384])
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--streams", type=int, default=16, help="that run all the time")
    parser.add_argument("--stream-prompt", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--stream-answer", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
    """A row for each length; 0 only if all were answered, and loaded or hit as they should."""
    results = Results(engines.title(options), "lengths are measured", options.json)
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(options.log_dir, warm=False, start_timeout_s=engines.START_TIMEOUT_S) as cluster,
    ):
        env = {hook_times.VARIABLE: folder}
        specs = engines.pair_of(
            "nixl-kv", options, caching=True, module="lab.bench.timed_connector", extra_env=env
        )
        prefill, decode = cluster.start(*specs)
        for length in options.lengths:
            phases = asyncio.run(measure(prefill, decode, length, Path(folder), options))
            row = {"tokens": length, "layout": options.layout or "auto"}
            results.add(Figures(row | figures(phases), verdict_of(*faults(phases, length))))
    return results.print(len(options.lengths))


async def measure(
    prefill: Engine, decode: Engine, length: int, folder: Path, options: argparse.Namespace
) -> dict[str, Phase]:
    """The three phases, with prompts of one length arriving."""
    # One token more than whole blocks: it is what a hit leaves to compute, as a load does. Of whole
    # blocks alone a hit leaves the last one, so its step would be a longer one.
    seed, asked = f"{options.seed}/{length}", length + 1
    cached = [prompt(asked, f"{seed}/cached {n}") for n in range(CACHED_PROMPTS)]
    new = (prompt(asked, f"{seed}/new {n}") for n in itertools.count())
    phases = {}
    async with Asker(decode.url, prefill.url) as asker:
        for tokens in (*cached, next(new)):
            await asker.ask(tokens, 1)
        lengths = options.stream_prompt, options.stream_answer
        streams = Streams(asker, options.streams, lengths, seed)
        async with streams.running():
            await asyncio.sleep(SETTLE_S)
            for name, prompts in (
                ("alone", None),
                ("cached", itertools.cycle(cached)),
                ("loaded", new),
            ):
                phases[name] = await phase(asker, streams, decode, prompts, folder, options)
    return phases


async def phase(
    asker: Asker,
    streams: Streams,
    decode: Engine,
    prompts: Iterator[list[int]] | None,
    folder: Path,
    options: argparse.Namespace,
) -> Phase:
    """Let prompts arrive for a while, with a ticket where they are new."""
    with Client(decode.url) as client:
        since, before = CountersSince(client), hook_times.read_times(folder)
        streams.gaps.clear()
        begin = time.perf_counter()
        tasks = []
        count = round(options.rate * options.seconds) if prompts else 0
        has_ticket = not isinstance(prompts, itertools.cycle)
        for number in range(count):
            await sleep_until(begin + number / options.rate)
            one = next(prompts) if prompts else []
            tasks.append(asyncio.create_task(asker.ask(one, 1, prefill_first=has_ticket)))
        await sleep_until(begin + options.seconds)
        arrived = await asyncio.gather(*tasks)
        gaps = list(streams.gaps)
        await asyncio.sleep(SETTLE_S)
        loaded = Loaded.from_counters(since.changed())
    after = hook_times.read_times(folder)
    times = {name: now.since(before[name]) for name, now in after.items() if name in before}
    return Phase(gaps, times, count, [one.error for one in arrived if one.error], loaded)


def figures(phases: Mapping[str, Phase]) -> dict[str, str | int | float]:
    """Of the streams, and of the hooks."""
    p99 = {name: percentile(one.gaps or [0.0], 99) for name, one in phases.items()}
    loaded = phases["loaded"]
    added = hook_times.per_request(phases["alone"].times, loaded.times, max(1, loaded.arrived))
    measured: dict[str, str | int | float] = {
        f"gap p99 ms, {name}": one * 1e3 for name, one in p99.items()
    }
    measured["loaded to cached"] = p99["loaded"] / p99["cached"] if p99["cached"] else 0.0
    measured["descriptors"] = loaded.loaded.descriptors // max(1, loaded.loaded.loads)
    for (engine, role), cost in sorted(added.items()):
        name = role if engine == "decode" else f"{engine} {role}"
        measured[f"{name} ms a request"] = cost.seconds * 1e3
        measured[f"{name} CPU ms a request"] = cost.cpu * 1e3
        measured[f"{name} most CPU in"] = f"{cost.hook}: {cost.hook_cpu * 1e3:.3f} ms"
        if engine == "prefill":  # those in which it waits for decode to read are among them
            measured[f"{name} steps a request"] = cost.steps
    return measured


def faults(phases: Mapping[str, Phase], length: int) -> Sequence[str]:
    """What makes figures worthless, where prompts of so many tokens and one more arrived."""
    errors = [error for one in phases.values() for error in one.errors]
    lacking = phases["loaded"].arrived - phases["loaded"].loaded.loads
    # no prompt of a stream is in the cache
    missed = phases["cached"].arrived * length - phases["cached"].loaded.cached
    return [
        f"{len(errors)} failed: {errors[0]}" if errors else "",
        f"{lacking} were not loaded" if lacking > 0 else "",
        f"{missed} tokens were not in the cache" if missed > 0 else "",
        "" if all(one.gaps for one in phases.values()) else "no stream gave two tokens",
    ]
