"""Checks of the key and of running engines: do they answer, do they work, do pairs of them fit?"""

import itertools
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from nixl_kv import addresses
from nixl_kv.cli import client, compare
from nixl_kv.cli.client import EngineAnswer
from nixl_kv.cli.doctor.report import Check, error, ok, skipped, warning
from nixl_kv.cli.doctor.transfers import LARGE_PACKETS, check_read, check_transfers
from nixl_kv.cli.status import engine_text, recent_failures
from nixl_kv.cli.tables import duration_text
from nixl_kv.errors import ConfigError, IncompatiblePeer, NixlKVError
from nixl_kv.geometry.match import Mismatch
from nixl_kv.ids import Endpoint, endpoint_host
from nixl_kv.protocol.messages import Status
from nixl_kv.transport.zmq import CONNECT_TIMEOUT_S

MAX_SHOWN: Final = 3  # failures, ranks or mismatches in one line
MAX_PAIRS: Final = 64

KEYGEN: Final = "make a key with `nixl-kv keygen`, and set key_file on every engine"
FIREWALL: Final = (
    "let its firewall, security group or NetworkPolicy pass TCP from this host to its port and to "
    "the ports of its ranks (docs/operations.md, Firewall)"
)
STOPPED: Final = (
    "compare the port with the engine's log; if `ps -o stat` of the process shows T, continue it "
    "with `kill -CONT`, otherwise restart it"
)
HANGS: Final = "if its log stands still, the rank hangs: restart the engine"
FIXES: Final = {
    "no answer to the handshake": STOPPED,
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


def _roles(engine: EngineAnswer) -> str:
    statuses = [status for _, status in engine.ranks if isinstance(status, Status)]
    return str(statuses[0].facts.get("roles")) if statuses else ""


def check_key(path: Path | None, *, insecure: bool) -> tuple[client.AnyKeys, Check]:
    """The key with which to ask engines, and the check of it."""
    try:
        keys = client.read_keys(path, insecure=insecure)
    except (ValueError, ConfigError) as reason:
        return None, error("key", str(reason), KEYGEN)
    if keys is None and not insecure:
        about = "none; the first engine of this user on this machine will make one"
        return None, ok("key", f"{about}; engines of several machines need one to share: {KEYGEN}")
    if keys is None:
        about = "none: every process that reaches the engine's ports may read KV and drain it"
        return None, warning("key", about, KEYGEN)
    return keys, ok("key", f"its fingerprint is {keys.fingerprint}; engines log theirs at start")


def check_engine(
    where: str, option: str, keys: client.AnyKeys
) -> tuple[EngineAnswer | None, list[Check]]:
    """Connect to an engine, then ask it and its ranks for all that they tell."""
    try:
        endpoints = client.endpoints_at(where, option=option)
    except ValueError as reason:
        fix = "give HOST:PORT as the engine logs it at start"
        return None, [error("address", str(reason), fix)]
    hosts = [endpoint_host(endpoint) for endpoint in endpoints]
    checks = [_connect(endpoint) for endpoint in endpoints]
    if all(check.fix for check in checks):
        return None, checks
    try:
        engine = client.engine_at(where, keys, option=option)
    except ValueError as reason:
        if "no answer within" in str(reason) and _answers_shortly(endpoints, keys):
            about = "a short answer arrives, but its description, which is longer, does not"
            return None, [*checks, error("answer", about, LARGE_PACKETS)]
        mine = "no key" if keys is None else f"the key {keys.fingerprint}"
        fixes = {**FIXES, "handshake failed": f"here is {mine}; {OTHER_KEY}"}
        unknown = "check its log; it may be starting, hanging, or of another release"
        fix = next((fixes[words] for words in fixes if words in str(reason)), unknown)
        return None, [*checks, error("answer", str(reason), fix)]
    key = "without a key" if keys is None else f"with the key {keys.fingerprint}"
    checks += [ok("key", f"it accepts this host {key}"), *_health(engine)]
    listening = sorted(endpoint_host(rank.endpoint) for rank, _ in engine.ranks)
    local = [host for host in listening if host.startswith("127.") or host == "::1"]
    if local and not any(map(addresses.is_local, hosts)):
        about = f"its ranks listen on {local[0]}, which other hosts cannot reach"
        fix = "set its host to auto, or to an address that other machines reach"
        checks.append(error("addresses", about, fix))
    return engine, checks


def _answers_shortly(endpoints: Sequence[Endpoint], keys: client.AnyKeys) -> bool:
    """Whether the engine answers with a message that fits into any packet."""
    for endpoint in endpoints:
        with suppress(NixlKVError):
            client.engine_status(endpoint, keys)
            return True
    return False


def _connect(endpoint: Endpoint) -> Check:
    host, port = endpoint_host(endpoint), int(endpoint.rpartition(":")[2])
    name, begin = f"TCP to {host}:{port}", time.monotonic()
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    except ConnectionRefusedError:
        fix = "check that the engine runs, and compare the port with its log"
        return error(name, "refused: the host answers, but nothing listens at this port", fix)
    except TimeoutError:
        about = f"no answer in {CONNECT_TIMEOUT_S:g} s"
        return error(name, f"{about}: a firewall drops packets, or the host is off", FIREWALL)
    except OSError as reason:
        return error(name, f"{reason.strerror}", f"check `ip route get {host}`, and the firewall")
    took_ms = (time.monotonic() - begin) * 1000
    with connection, suppress(ConnectionError):
        try:
            connection.recv(1)  # a thread of ZMQ greets at once, also while Python is busy
        except TimeoutError:
            about = (
                f"connected in {took_ms:.1f} ms, but nothing came in {CONNECT_TIMEOUT_S:g} s: the "
                "process is stopped or hangs, has no free file descriptor, or is not an engine"
            )
            return error(name, about, STOPPED)
    return ok(name, f"connected in {took_ms:.1f} ms")


def _health(engine: EngineAnswer) -> Iterator[Check]:
    facts = engine.status.facts if isinstance(engine.status, Status) else {}
    roles = f"{_roles(engine)}; ".removeprefix("; ")
    version = facts.get("version", "unknown")
    yield ok("answer", f"{roles}nixl_kv {version}; engine {engine_text(engine.description)}")
    silent = [
        (number, rank.endpoint, status)
        for number, (rank, status) in enumerate(engine.ranks)
        if not isinstance(status, Status)
    ]
    if silent:
        about = f"{len(silent)} of {len(engine.ranks)} ranks do not answer"
        shown = "; ".join(f"rank {n} at {place}: {why}" for n, place, why in silent[:MAX_SHOWN])
        connection = _connect(silent[0][1])
        fix = connection.fix or f"{HANGS}; {LARGE_PACKETS}"
        yield error("ranks", f"{about}: {shown}; TCP: {connection.detail}", fix)
    else:
        yield ok("ranks", f"all {len(engine.ranks)} answer")
    draining_s = facts.get("draining_s")
    if isinstance(draining_s, float):
        about = f"for {duration_text(draining_s)}: it offers no new request"
        undo = f"nixl-kv drain --undo --at {engine.where}"
        yield warning("draining", about, f"take it out of the router, or run `{undo}`")
    for record in _unusable(engine):
        about = f"{record.get('engine')} at {record.get('endpoint')}: {record.get('state')}"
        fix = f"run `nixl-kv doctor --peer` for it on the host of {engine.where}"
        yield warning("its peers", f"{about}; {record.get('detail')}", fix)
    yield from check_transfers(engine)
    yield _failures(engine)


def _peers(engine: EngineAnswer) -> list[dict[str, Any]]:
    statuses = [status for _, status in engine.ranks if isinstance(status, Status)]
    return [peer for status in statuses for peer in status.lists.get("peers", ())]


def _unusable(engine: EngineAnswer) -> list[dict[str, Any]]:
    """The peers that the engine cannot use at the moment, each once."""
    found = {
        (record.get("engine"), record.get("endpoint")): record
        for record in _peers(engine)
        if _is_unusable(record)
    }
    return list(found.values())


def _is_unusable(record: Mapping[str, Any]) -> bool:
    # The single failure of an engine that has left is remembered after its pause.
    is_paused = bool(record.get("paused_for_s")) or record.get("num_failures", 0) > 1
    return record.get("state") == "UNUSABLE" and is_paused


def _failures(engine: EngineAnswer) -> Check:
    name, (failures, span_s) = "failed loads", recent_failures(engine)
    if not span_s:
        return skipped(name, "no rank tells")
    when = f"in the last {duration_text(span_s)}"
    if not failures:
        return ok(name, f"none {when}")
    shown = "; ".join(
        f"{record.get('num_loads')} x {record.get('reason')} ({record.get('peer')}): "
        f"{record.get('detail')}; such as {', '.join(map(str, record.get('requests', ())))}"
        for record in failures[:MAX_SHOWN]
    )
    more = f"; and {len(failures) - MAX_SHOWN} more kinds" if len(failures) > MAX_SHOWN else ""
    fix = f"run `nixl-kv status --at {engine.where}`; docs/runbook.md explains the reasons"
    return warning(name, f"{when}: {shown}{more}", fix)


def check_together(
    own: EngineAnswer | None, peers: Sequence[EngineAnswer], keys: client.AnyKeys
) -> Iterator[Check]:
    """Whether each engine that decodes can read each that prefills: by its facts, and by a read."""
    engines = [*peers] if own is None else [own, *peers]
    pairs = [
        (decode, prefill)
        for decode, prefill in itertools.product(engines, engines)
        if "decode" in _roles(decode) and "prefill" in _roles(prefill)
        if decode.description.engine != prefill.description.engine
    ]
    if not pairs:
        about = "not tested: give a prefill and a decode engine, by --at and --peer"
        yield skipped("pairs of engines", about)
    for decode, prefill in pairs[:MAX_PAIRS]:
        check = _pair(decode, prefill)
        yield check
        if check.verdict == "ok":
            yield check_read(decode, prefill, keys)


def _pair(decode: EngineAnswer, prefill: EngineAnswer) -> Check:
    """Whether a decode engine can read a prefill engine."""
    name = f"engine {decode.description.engine!r} reads engine {prefill.description.engine!r}"
    fix = f"run `nixl-kv plan --prefill-at {prefill.where} --decode-at {decode.where}`"
    try:
        comparison = compare.judge(decode, prefill)
    except IncompatiblePeer as reason:
        return error(name, str(reason), fix)
    mismatches = [Mismatch(*each.values()) for each in comparison["mismatches"]]
    if [each.field for each in mismatches] == ["weights"]:
        fix = "update the older engine, then run `nixl-kv set-weights`"
    else:
        cure = "start both with the same model and options; docs/compatibility.md, What must be"
        fix = f"{cure} equal; {fix}"
    if mismatches:
        shown = "; ".join(map(str, mismatches[:MAX_SHOWN]))
        return error(name, f"{shown} ('here' is decode), so decode computes", fix)
    return ok(name, f"they fit; {len(comparison['links'])} pairs of ranks")
