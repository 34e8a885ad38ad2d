"""Checks of an engine's transfers, as it tells them, and of a read that it makes on demand.

An engine knows its own limits, settings and links. Those of doctor's shell may be others.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nixl_kv.cli import client
from nixl_kv.cli.client import EngineAnswer
from nixl_kv.cli.doctor.host import DESCRIPTORS, RAISE_LIMIT
from nixl_kv.cli.doctor.report import Check, error, ok, skipped, warning
from nixl_kv.cli.tables import duration_text, num_bytes_text
from nixl_kv.errors import NixlKVError
from nixl_kv.ids import FENCE_TOKEN_BYTES
from nixl_kv.protocol.messages import Status
from nixl_kv.protocol.peers import PeerState

# As the alert NixlKVDescriptorsNearLimit.
FULL_SHARE: Final = 0.8
# Bytes per second. A link of 1 Gbit/s carries 118 MB in a second: the KV of 900 tokens of a model
# with 8 billion parameters (128 KiB each). An H200 computes 4,096 tokens of it in 0.1 s, so decode
# would do better to compute the prompt itself.
SLOW_SPEED: Final = 100e6
# Shorter reads delay no first token noticeably, and a round trip decides their speed.
NOTICED_S: Final = 0.05
# 64 KiB take less than 1 ms over any link between servers. A busy machine may delay all attempts.
SLOW_PROBE_S: Final = 0.02
# Doctor warns of loads that wait for local blocks, as the alert NixlKVWaitingForBlocks does.
LONG_WAIT_S: Final = 2.0

LARGE_PACKETS: Final = (
    "make the MTU of all interfaces and switches on the path equal, or lower it on both hosts; "
    "`ping -M do -s 8972 HOST` shows whether packets of 9,000 bytes arrive (docs/runbook.md, Large "
    "packets vanish)"
)
UCX_PORTS: Final = (
    "let firewalls, security groups and NetworkPolicies pass TCP from decode to UCX's ports of "
    "prefill, and back (set UCX_TCP_PORT_RANGE; docs/operations.md, Firewall)"
)
OWN_PORTS: Final = (
    "let firewalls pass TCP from decode to prefill's port and its ranks' ports "
    "(docs/operations.md, Firewall); check that prefill's host is an address that decode reaches"
)


def check_transfers(engine: EngineAnswer) -> Iterator[Check]:
    """Check the limits, links and reads that the engine's own processes tell."""
    statuses = {
        number: status
        for number, (_, status) in enumerate(engine.ranks)
        if isinstance(status, Status)
    }
    if not statuses or not all("num_descriptors" in each.facts for each in statuses.values()):
        return
    yield _descriptors(engine, statuses)
    settings = sorted({str(each.facts.get("ucx_settings")) for each in statuses.values()} - {""})
    yield ok("UCX's settings", "; ".join(settings) or "none in its environment")
    unreadable = [n for n, each in statuses.items() if each.facts.get("unreadable")]
    if unreadable:
        about = f"rank {unreadable[0]}: {statuses[unreadable[0]].facts['unreadable']}"
        fix = f"{RAISE_LIMIT} (docs/runbook.md, NixlKVRankUnreadable)"
        yield error("listening sockets", about, fix)
    for number, status in statuses.items():
        yield from _blocks(number, status)
        for rank in status.lists.get("unmapped", ()):
            title = f"GPU memory of {rank.get('endpoint')}"
            yield warning(title, str(rank.get("detail")), "see docs/runbook.md, Wrong path")
    yield from _links(statuses)


def _descriptors(engine: EngineAnswer, statuses: Mapping[int, Status]) -> Check:
    processes = {f"rank {number}": status.facts for number, status in statuses.items()}
    if isinstance(engine.status, Status) and "num_descriptors" in engine.status.facts:
        processes["its scheduler"] = engine.status.facts
    shares: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, facts in processes.items():
        count, most = _number(facts, "num_descriptors"), _number(facts, "max_descriptors")
        shares[name] = count / most if most else 0.0
        texts[name] = f"{count:,.0f} of {most:,.0f}" if most else f"{count:,.0f}, without a limit"
    fullest = max(shares, key=lambda name: shares[name])
    about = f"{fullest} has {texts[fullest]} open"
    if shares[fullest] > FULL_SHARE:
        about += ": without free ones, peers cannot connect, and UCX closes ports for good"
        return error("its file descriptors", about, RAISE_LIMIT)
    limits = [most for facts in processes.values() if (most := _number(facts, "max_descriptors"))]
    if limits and min(limits) < DESCRIPTORS:
        return warning("its file descriptors", f"{about}; over TCP it may need more", RAISE_LIMIT)
    return ok("its file descriptors", about)


def _blocks(number: int, status: Status) -> Iterator[Check]:
    waited_s = _number(status.facts, "blocks_waited_s")
    if waited_s > LONG_WAIT_S:
        count = status.totals.get("loads_without_blocks", 0)
        about = (
            f"rank {number}: {count:,} load{'s wait' if count != 1 else ' waits'} for blocks of "
            f"its KV cache, the first for {duration_text(waited_s)}: the cache or the batch is "
            "full, and prefill keeps its blocks meanwhile"
        )
        fix = "add decode engines, or give this one more cache (docs/runbook.md, "
        yield warning("local blocks", about, f"{fix}NixlKVWaitingForBlocks)")


def _links(statuses: Mapping[int, Status]) -> Iterator[Check]:
    """How the engine reads each peer, and how fast: the slowest of its ranks counts."""
    found: dict[str, Mapping[str, Any]] = {}
    for status in statuses.values():
        for peer in status.lists.get("peers", ()):
            name = f"{peer.get('engine')} ({peer.get('incarnation')})"
            others = found.get(name)
            if others is None or _speed(peer) < _speed(others):
                found[name] = peer
    for name, slowest in found.items():
        link, path = slowest.get("link"), slowest.get("path")
        speed, read_s = slowest.get("bytes_per_second"), _number(slowest, "read_s")
        title = f"reads from {name}"
        how = " by ".join(str(each) for each in (path, link) if each) or "none yet"
        if speed is not None:
            how += f", at {speed / 1e6:,.1f} MB/s and {duration_text(read_s)} each"
        if speed is not None and speed < SLOW_SPEED and read_s > NOTICED_S:
            about = f"{how}: slower than a link of 1 Gbit/s, so decode had better compute"
            yield warning(title, about, "see docs/runbook.md, NixlKVReadsSlow")
        elif (why_slow := slowest.get("why_slow")) and path != "gather":
            yield warning(title, f"{how}; {why_slow}", "see docs/runbook.md, Wrong path")
        elif link or speed is not None:
            yield ok(title, how)


def _speed(peer: Mapping[str, Any]) -> float:
    speed = peer.get("bytes_per_second")
    return float("inf") if speed is None else float(speed)


def _number(facts: Mapping[str, Any], name: str) -> float:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def check_read(decode: EngineAnswer, prefill: EngineAnswer, keys: client.AnyKeys) -> Check:
    """Let decode read 64 KiB from prefill, over the ports and with the memory that loads use."""
    reader, read = decode.description.engine, prefill.description.engine
    name = f"engine {reader!r} reads 64 KiB from engine {read!r}"
    facts = prefill.status.facts if isinstance(prefill.status, Status) else {}
    if not (ticket := facts.get("probe_ticket")):
        return skipped(name, f"not tested: the release of {read!r} gives no ticket for it")
    answers = client.probe(decode.description, str(ticket), keys)
    found = [judge_probe(name, number, answer) for number, (_, answer) in enumerate(answers)]
    order = ("error", "warning", "skipped", "ok")
    return min(found, key=lambda check: order.index(check.verdict))


def judge_probe(name: str, number: int, answer: Status | NixlKVError) -> Check:
    """The verdict about the answer of one decode rank."""
    who = f"decode rank {number}"
    if not isinstance(answer, Status):
        return error(name, f"{who} does not answer: {answer}", "run `nixl-kv status`, see its log")
    facts = answer.facts
    if "probe" not in facts:
        return skipped(name, f"not tested: the release of {who} cannot read for doctor")
    link = f" over {facts['link']}" if facts.get("link") else ""
    if reason := facts.get("error"):
        return _failed_probe(name, facts, f"{who}{link}", str(reason))
    seconds, num_bytes = _number(facts, "seconds"), _number(facts, "num_bytes")
    if not seconds:
        return skipped(name, f"{who} needs no bytes of it")
    speed = f"{num_bytes / seconds / 1e6:,.1f} MB/s"
    about = f"{num_bytes_text(num_bytes)} in {seconds * 1000:.1f} ms ({speed}){link}"
    if seconds > SLOW_PROBE_S:
        return warning(
            name, f"{about}, the fastest of three", "see docs/runbook.md, NixlKVReadsSlow"
        )
    if why_slow := facts.get("why_slow"):
        return warning(name, f"{about}; {why_slow}", "see docs/runbook.md, Wrong path")
    return ok(name, about)


def _failed_probe(name: str, facts: Mapping[str, Any], who: str, reason: str) -> Check:
    step, num_bytes = facts.get("step"), facts.get("num_bytes")
    if step == PeerState.READY.name and num_bytes and num_bytes > FENCE_TOKEN_BYTES:
        small = f"{FENCE_TOKEN_BYTES} bytes arrive, but {num_bytes_text(num_bytes)} do not"
        return error(name, f"{who}: {small}: {reason}", LARGE_PACKETS)
    if step in (PeerState.READY.name, PeerState.HANDSHAKING.name):
        about = "prefill's own ports answer, but a first read from UCX's ports fails"
        return error(name, f"{who}: {about}: {reason}", UCX_PORTS)
    if step == PeerState.ADMITTING.name:
        fix = f"list decode's addresses in prefill's 'peers'; {OWN_PORTS}"
        return error(name, f"{who} is not admitted to UCX's ports: {reason}", fix)
    if step == PeerState.CONNECTING.name:
        return error(name, f"{who} cannot meet prefill: {reason}", OWN_PORTS)
    return skipped(name, f"not tested: {reason}")
