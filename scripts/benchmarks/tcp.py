"""Time single loads over TCP between two hosts, beside a plain stream.

The hosts are network namespaces, joined by a program that delays packets and limits their rate
(`harness.cluster.netns`). Engines are those of `transfer`, and so is a load. A stream asks once and
receives as many bytes by a plain socket, in the same rounds. "load of stream" is the stream's time
divided by the load's: 1 is the link's speed. Needs root.
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final

from benchmarks import transfer
from benchmarks.shapes import REPO, Row
from harness.cluster.netns import Namespace, Quality, Wire
from harness.local.model_layouts import ORDERS
from nixl_kv.config import Config

PATH: Final = "auto"
STREAM: Final = "stream"
QUEUE_BYTES: Final = 4 << 20
"""The wire drops packets beyond these, or beyond a round trip's bytes if those are more."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The links and the loads."""
    parser.add_argument("--round-trip-ms", type=float, nargs="+", default=[0.1, 1.0, 10.0])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["BHLNC", "LBHNC"])
    parser.add_argument("--tokens", type=int, default=4096, help="64 KiB each; default 4096")
    parser.add_argument("--rounds", type=int, default=5, help="2 or more; default 5")
    parser.set_defaults(device="cpu", shape="64-layers", tp=[(1, 1)], blocks=[(16, 16)])
    parser.set_defaults(staging_mib=Config().staging_mib)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each link and layout.

    Raises:
        SystemExit: without root.
    """
    if os.geteuid():
        raise SystemExit("network namespaces need root")
    cells = transfer.cells_of(options)
    for gbit, round_trip_ms in itertools.product(options.gbit, options.round_trip_ms):
        with ExitStack() as stack:
            hosts = [
                stack.enter_context(Namespace(f"kv-{role}", number))
                for number, role in enumerate(transfer.ROLES, 1)
            ]
            wire = stack.enter_context(Wire(*hosts, offload=True))
            rate, round_trip_s = gbit * 1e9, round_trip_ms / 1e3
            queue_s = max(round_trip_s, QUEUE_BYTES * 8 / rate)
            wire.quality = Quality(delay_s=round_trip_s / 2, rate=rate, queue_s=queue_s)
            pair = stack.enter_context(transfer.running_pair(REPO, cells, [PATH], options, hosts))
            for cell in cells:
                pair.start(cell)
                fault = pair.check()
                stream = partial(pair.read_stream, hosts[0].wire_address)
                ways = {PATH: partial(pair.load, PATH), STREAM: stream}
                samples = transfer.rounds(ways, options.rounds)
                about = {"link": f"{gbit:g} Gbit/s, {round_trip_ms:g} ms"}
                yield about | figures(samples) | {"layout": cell[0].order} | fault


def figures(samples: dict[str, list[transfer.Sample]]) -> dict[str, str | int | float]:
    """Medians, and the ratio of each round."""
    loads, streams = ([sample["load"] for sample in samples[way]] for way in (PATH, STREAM))
    num_bytes, num_runs = (samples[PATH][0][name] for name in ("num_bytes", "num_runs"))
    rates = [num_bytes * 8 / statistics.median(times) / 1e9 for times in (loads, streams)]
    return {
        "runs": num_runs,
        "load Gbit/s": rates[0],
        "stream Gbit/s": rates[1],
        "load of stream": transfer.ratio(streams, loads),
    }
