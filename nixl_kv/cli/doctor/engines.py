"""Checks of running engines: whether they answer, how they are, and whether pairs of them fit."""

import itertools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nixl_kv import addresses
from nixl_kv.cli import client, compare
from nixl_kv.cli.doctor.report import Check, error, ok, skipped, warning
from nixl_kv.cli.status import engine_text, merged_failures
from nixl_kv.cli.tables import duration_text
from nixl_kv.config import Config
from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.match import Mismatch
from nixl_kv.ids import Endpoint, endpoint_host
from nixl_kv.keys import Keys
from nixl_kv.protocol.messages import Status
from nixl_kv.transport.tcp.detect import ROOT, Place, ucx_settings

CONNECT_TIMEOUT_S: Final = 3.0
MAX_SHOWN: Final = 3  # failures, ranks or mismatches in one line
SOON_S: Final = 600.0  # a failure in the last ten minutes is a warning
MAX_PAIRS: Final = 64

FIREWALL: Final = (
    "let its firewall, security group or NetworkPolicy pass TCP from this host to its port and to "
    "the ports of its ranks (docs/operations.md, Firewall)"
)
STOPPED: Final = (
    "compare the port with the engine's log; if `ps -o stat` of the process shows T, continue it "
    "with `kill -CONT`, otherwise restart it"
)
FIXES: Final = {
    "not among its peers": "add this host's network to its 'peers', or run this on a host that "
    "they allow",
    "speaks wire version": "finish the upgrade; until then decode computes the prompts of the other"
    " version (docs/operations.md, Upgrading a fleet)",
}
"""The fix by words of the reason why an engine does not answer."""
OTHER_KEY: Final = (
    "compare the fingerprints: every engine logs its own at start; copy one key file to all hosts "
    "(or use --key-file, or --insecure for engines without a key)"
)


@dataclass(frozen=True)
class Engine:
    """A running engine that has described itself."""

    answer: client.EngineAnswer
    is_peer: bool

    @property
    def roles(self) -> str:
        statuses = [status for _, status in self.answer.ranks if isinstance(status, Status)]
        return str(statuses[0].facts.get("roles")) if statuses else ""

    @property
    def name(self) -> str:
        return f"engine {self.answer.description.engine!r}"


def check_engine(
    where: str, option: str, keys: Keys | None, config: Config | None
) -> tuple[Engine | None, list[Check]]:
    """Connect to an engine, then ask it and its ranks for all that they tell."""
    try:
        endpoints = client.endpoints_at(where, option=option)
    except ValueError as reason:
        return None, [
            error("address", str(reason), "give HOST:PORT as the engine logs it at start")
        ]
    checks: list[Check] = []
    is_peer = option == "--peer"
    if is_peer and config is not None:
        for host in map(endpoint_host, endpoints):
            if not config.allowed_hosts.allows(host):
                about = f"{host} is not among the allowed hosts {config.allowed_hosts}"
                checks.append(error("peers", about, "add the peer's network to 'peers'"))
    connected = [_connect(endpoint) for endpoint in endpoints]
    checks += connected
    if all(check.fix for check in connected):
        return None, checks
    try:
        answer = client.engine_at(where, keys, option=option)
    except ValueError as reason:
        mine = "no key" if keys is None else f"the key {keys.fingerprint}"
        fixes = {**FIXES, "handshake failed": f"here is {mine}; {OTHER_KEY}"}
        unknown = "check its log; it may be starting, hanging, or of another release"
        fix = next((fixes[words] for words in fixes if words in str(reason)), unknown)
        return None, [*checks, error("answer", str(reason), fix)]
    engine = Engine(answer, is_peer)
    key = "without a key" if keys is None else f"with the key {keys.fingerprint}"
    checks.append(ok("key", f"it accepts this host {key}"))
    return engine, [*checks, *_health(engine), *_far_ranks(engine)]


def _connect(endpoint: Endpoint) -> Check:
    host, port = endpoint_host(endpoint), int(endpoint.rpartition(":")[2])
    name, begin = f"TCP to {host}:{port}", time.monotonic()
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    except ConnectionRefusedError:
        fix = "check that the engine runs, and compare the port with its log"
        return error(name, "refused: the host answers, but nothing listens at this port", fix)
    except TimeoutError:
        about = (
            f"no answer in {CONNECT_TIMEOUT_S:g} s: a firewall drops packets, or the host is off"
        )
        return error(name, about, FIREWALL)
    except OSError as reason:
        return error(name, f"{reason.strerror}", f"check `ip route get {host}`, and the firewall")
    took_ms = (time.monotonic() - begin) * 1000
    with connection, suppress(ConnectionError):
        try:
            connection.recv(1)  # a thread of ZMQ greets at once, also while Python is busy
        except TimeoutError:
            about = (
                f"connected in {took_ms:.1f} ms, but nothing came in {CONNECT_TIMEOUT_S:g} s: the "
                "process is stopped or hangs, or is not an engine"
            )
            return error(name, about, STOPPED)
    return ok(name, f"connected in {took_ms:.1f} ms")


def _health(engine: Engine) -> Iterator[Check]:
    answer = engine.answer
    of_engine, ranks = answer.status, answer.ranks
    silent = [
        f"rank {number} at {rank.endpoint}: {status}"
        for number, (rank, status) in enumerate(ranks)
        if not isinstance(status, Status)
    ]
    version = of_engine.facts.get("version") if isinstance(of_engine, Status) else "unknown"
    roles = f"{engine.roles}; " if engine.roles else ""
    yield ok("answer", f"{roles}nixl_kv {version}; engine {engine_text(answer.description)}")
    if silent:
        about = (
            f"{len(silent)} of {len(ranks)} ranks do not answer: {'; '.join(silent[:MAX_SHOWN])}"
        )
        yield error("ranks", about, f"if the engine runs, {FIREWALL}")
    else:
        yield ok("ranks", f"all {len(ranks)} answer")
    draining_s = of_engine.facts.get("draining_s") if isinstance(of_engine, Status) else None
    if isinstance(draining_s, float):
        about = f"for {duration_text(draining_s)}: it offers no new request"
        undo = f"nixl-kv drain --undo --at {answer.where}"
        yield warning("draining", about, f"take it out of the router, or run `{undo}`")
    for record in _unusable(engine):
        about = f"{record.get('engine')} at {record.get('endpoint')}: {record.get('state')}"
        fix = f"run `nixl-kv doctor --peer` for it on the host of {answer.where}"
        yield warning("its peers", f"{about}; {record.get('detail')}", fix)
    yield _failures(engine)


def _lists(engine: Engine, name: str) -> Iterator[dict[str, Any]]:
    for _, status in engine.answer.ranks:
        yield from status.lists.get(name, ()) if isinstance(status, Status) else ()


def _unusable(engine: Engine) -> list[dict[str, Any]]:
    """The peers that the engine cannot use at the moment, each once."""
    found = {
        (record.get("engine"), record.get("endpoint")): record
        for record in itertools.chain(_lists(engine, "peers"), _lists(engine, "circuits"))
        if record.get("state") in ("UNREADABLE", "BACKOFF", "OPEN", "HALF_OPEN")
    }
    return list(found.values())


def _failures(engine: Engine) -> Check:
    failures = merged_failures(engine.answer)
    if not failures:
        return ok("failures in the last hour", "none")
    shown = "; ".join(
        f"{record.get('num_last_hour')} x {record.get('reason')}"
        + (f" ({record.get('peer')})" if record.get("peer") else "")
        + (f": {record.get('detail')}" if record.get("detail") else "")
        for record in failures[:MAX_SHOWN]
    )
    latest = min(float(record.get("latest_ago_s") or 0) for record in failures)
    if latest > SOON_S:
        about = f"none in the last 10 minutes; before: {shown}"
        return ok("failures in the last hour", about)
    fix = (
        f"run `nixl-kv status --at {engine.answer.where}`; docs/operations.md explains the reasons"
    )
    return warning("failures in the last hour", shown, fix)


def _far_ranks(engine: Engine) -> Iterator[Check]:
    """Ranks that say that they listen on loopback, although this host is another one."""
    answer = engine.answer
    hosts = {endpoint_host(rank.endpoint) for rank in answer.description.ranks}
    local = sorted(host for host in hosts if host.startswith("127.") or host == "::1")
    where = client.endpoints_at(answer.where, option="--at")
    if local and not any(addresses.is_local(endpoint_host(each)) for each in where):
        fix = "set its host to auto, or to an address that other machines reach"
        yield error(
            "addresses", f"its ranks listen on {local[0]}, which other hosts cannot reach", fix
        )
        return
    if engine.is_peer and "prefill" in engine.roles:
        yield _path_from(answer.description.ranks[0].agent)


def _path_from(metadata: bytes, root: Path = ROOT) -> Check:
    """The transport with which UCX should read a rank from this host, by the rank's metadata."""
    name = "reads from here"
    settings = ucx_settings(os.environ, "")
    own, peer = Place.find(settings, root), Place.of_peer(metadata)
    if peer is None:
        return skipped(name, "this rank does not tell where it is")
    if (own.host, own.namespace) == (peer.host, peer.namespace):
        return ok(name, "it is on this host, so UCX should use shared memory or cuda_ipc")
    where = "on this host in another PID namespace" if own.host == peer.host else "on another host"
    if own.has_rdma == peer.has_rdma:
        return ok(name, f"it is {where}, so UCX should use {'RDMA' if own.has_rdma else 'TCP'}")
    lacking = "this host" if peer.has_rdma else "it"
    about = f"it is {where}, and {lacking} has no usable RDMA device, so UCX uses TCP"
    return warning(name, about, "run `nixl-kv doctor` there, and look at RDMA")


def check_reverse(engines: Sequence[Engine]) -> Iterator[Check]:
    """The view of each peer's decode ranks on the engine at --at."""
    own = next((each for each in engines if not each.is_peer), None)
    if own is None or "prefill" not in own.roles:
        return
    for peer in engines:
        if peer.is_peer and "decode" in peer.roles:
            yield _reverse(own, peer)


def _reverse(own: Engine, peer: Engine) -> Check:
    name, mine = f"{peer.name} to here", own.answer.description.engine
    command = f"`nixl-kv doctor --peer {own.answer.where}`"
    circuits = [each for each in _lists(peer, "circuits") if each.get("engine") == mine]
    unusable = [each for each in _unusable(peer) if each.get("engine") == mine]
    for record in unusable:
        about = f"it cannot use {own.name}: {record.get('state')}; {record.get('detail')}"
        return error(name, about, f"run {command} on its host; {FIREWALL}")
    for record in circuits:  # a circuit is there until a read succeeds
        about = f"its last attempt to reach {own.name} failed: {record.get('detail')}"
        return warning(name, about, f"run {command} on its host")
    if any(each.get("engine") == mine for each in _lists(peer, "peers")):
        return ok(name, f"it reads from {own.name}")
    about = f"it has not read from {own.name} for ten minutes, if ever"
    return skipped(name, f"{about}; run {command} there")


def check_pairs(engines: Sequence[Engine]) -> Iterator[Check]:
    """Whether each decode engine can read each prefill engine."""
    decodes = [each for each in engines if "decode" in each.roles]
    prefills = [each for each in engines if "prefill" in each.roles]
    pairs = [
        (decode, prefill)
        for decode, prefill in itertools.product(decodes, prefills)
        if decode.answer.description.engine != prefill.answer.description.engine
    ]
    if not pairs:
        about = "give a prefill and a decode engine, by --at and --peer, to compare them"
        yield skipped("pairs of engines", about)
    for decode, prefill in pairs[:MAX_PAIRS]:
        name = f"{decode.name} reads {prefill.name}"
        yield from _pair(name, decode.answer, prefill.answer)


def _pair(name: str, decode: client.EngineAnswer, prefill: client.EngineAnswer) -> Iterator[Check]:
    fix = f"run `nixl-kv plan --prefill-at {prefill.where} --decode-at {decode.where}`"
    try:
        comparison = compare.compare(decode.description, prefill.description, None)
    except (ValueError, IncompatiblePeer) as reason:
        yield error(name, str(reason), fix)
        return
    mismatches = [str(Mismatch(*each.values())) for each in comparison["mismatches"]]
    labels = [
        str(each.status.facts.get("weights", "")) if isinstance(each.status, Status) else ""
        for each in (decode, prefill)
    ]
    if mismatches:
        shown = "; ".join(mismatches[:MAX_SHOWN])
        cure = (
            "start both with the same model and options; docs/compatibility.md, What must be equal"
        )
        yield error(name, f"{shown} ('here' is decode)", f"{cure}; {fix}")
    elif labels[0] != labels[1]:
        about = f"decode's weights are {labels[0]!r}, prefill's {labels[1]!r}, so decode computes"
        yield error(name, about, "update the older engine, then run `nixl-kv set-weights`")
    else:
        total = comparison["total"]
        yield ok(name, f"they fit; {total['links']} pairs of ranks")
