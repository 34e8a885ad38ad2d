"""Feed every decoder with what strangers may send, and see that nothing but an error comes of it.

Each target is a decoder of bytes or objects from outside, or the machinery behind one: inputs are
valid ones with up to four mutations. An input may give a value or the documented exception. All
else is a crash, and so is an execution of more than a second or 500 MiB. Times are CPU times.

A crash is printed with the input in hex, which --replay runs again.
"""

import argparse
import logging
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fuzz.decoders.execute import execute
from fuzz.decoders.fuzzer import Crash, Findings, as_argument, fuzz
from fuzz.decoders.rank import map_memory
from fuzz.decoders.targets import Target, targets
from lab.results import print_table, say_on_stderr

ADDRESS_SPACE = 8 << 30
"""Bytes: what asks for more gets a MemoryError."""

MIB = 2**20


def fuzz_all(chosen: Sequence[Target], seconds: float, *, seed: int) -> int:
    """Fuzz each for its share of the time, and print a table; how many crashes there were."""
    report: dict[str, Findings] = {}
    try:
        for target in chosen:
            say_on_stderr(f"{target.name} ...")
            report[target.name] = fuzz(target, seconds / len(chosen), seed)
    except KeyboardInterrupt:
        say_on_stderr("interrupted")
    print_table(
        "mutated inputs, by what decodes them",
        [_row(name, findings) for name, findings in report.items()],
    )
    total = sum(findings.executions for findings in report.values())
    spent_s = sum(findings.seconds for findings in report.values())
    print(f"{total:,} executions in {spent_s:.0f} s, {total / max(spent_s, 1e-9):,.0f} per s")
    for name, findings in report.items():
        for crash in findings.crashes.values():
            print_crash(name, crash, times=findings.repeats[crash.what])
    return sum(len(findings.crashes) for findings in report.values())


def _row(name: str, findings: Findings) -> dict[str, str]:
    return {
        "target": name,
        "executions": f"{findings.executions:,}",
        "per s": f"{findings.executions / max(findings.seconds, 1e-9):,.0f}",
        "slowest ms": f"{findings.slowest_s * 1e3:.1f}",
        "of bytes": f"{len(findings.slowest):,}",
        "peak MiB": f"{findings.most_bytes / MIB:.0f}",
        "crashes": str(len(findings.crashes)),
    }


def print_crash(name: str, crash: Crash, *, times: int) -> None:
    """What it was, where, and how to see it again."""
    print(f"\n{name}: {crash.what}, {times} times; {len(crash.data)} bytes do it")
    print(crash.detail.rstrip())
    print(f"scripts/fuzz --replay {name!r} {as_argument(crash.data)}")


def replay(everything: Mapping[str, Target], name: str, text: str) -> int:
    """One input, in hex or as @FILE; the exit status."""
    data = Path(text[1:]).read_bytes() if text.startswith("@") else bytes.fromhex(text)
    result = execute(everything[name], data)
    words = result.crash or "no crash"
    print(f"{words}; {result.seconds * 1e3:.1f} ms, {result.nbytes / MIB:.0f} MiB")
    print(result.detail)
    return int(result.crash is not None)


def parse_arguments(names: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="in all; default 10")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="TARGET")
    parser.add_argument("--list", action="store_true", help="print the targets and stop")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "HEX"), help="run one input")
    return parser.parse_args()


def main() -> int:
    """Run; 0 only if nothing crashed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("nixl_kv").setLevel(logging.CRITICAL)
    everything = {target.name: target for target in targets()}
    options = parse_arguments(list(everything))
    if options.list:
        print("\n".join(everything))
        return 0
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    map_memory()
    if options.replay:
        return replay(everything, *options.replay)
    chosen = [everything[name] for name in options.only]
    crashes = fuzz_all(chosen, options.minutes * 60, seed=options.seed)
    return int(crashes > 0)


if __name__ == "__main__":
    sys.exit(main())
