"""Checks of an engine's settings, as the engine would read them, and of its key and address."""

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from nixl_kv import addresses
from nixl_kv.cli import client
from nixl_kv.cli.doctor.report import Check, error, ok, skipped, warning
from nixl_kv.config import (
    EXTRA,
    KEY_VARIABLE,
    OWN_NAME,
    POLICY,
    Config,
    foreign_lines,
    own_transfers,
)
from nixl_kv.errors import ConfigError, NixlKVError
from nixl_kv.ids import endpoint_at, endpoint_host
from nixl_kv.keys import find_user_key, other_user_keys, parse_any_key, read_any_key_file

MODULE: Final = "nixl_kv.connector"
OUR_NAMES: Final = ("NixlKVConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector")
ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")
TRANSFER_KEYS: Final = {"kv_connector", "kv_connector_module_path", "kv_role", EXTRA}
ALLOWED: Final = f"allowed: a JSON object, the value of --kv-transfer-config, or its {EXTRA}"

NO_CONFIG: Final = "not given; pass --config with the value of the engine's --kv-transfer-config"
LOCAL_KEY: Final = "the key that this user's engines on this machine share"
KEYGEN: Final = "make a key with `nixl-kv keygen`, and set key_file on every engine"


@dataclass(frozen=True)
class Setup:
    """The value of --config: vLLM's --kv-transfer-config, or its kv_connector_extra_config."""

    transfer: Mapping[str, Any] | None  # None: the extra configuration alone, or nothing
    extra: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str | None) -> "Setup":
        if text is None:
            return cls(None, {})
        try:
            value = json.loads(text)
        except ValueError as reason:
            raise ValueError(f"--config is not JSON: {reason}; {ALLOWED}") from reason
        if not isinstance(value, dict):
            about = f"--config is {type(value).__name__}; {ALLOWED}"
            raise ValueError(about)  # noqa: TRY004 - bad input of a user
        if not TRANSFER_KEYS & value.keys():
            return cls(None, value)
        if not isinstance(value.get(EXTRA) or {}, dict):
            about = f"--config: {EXTRA} is {value[EXTRA]!r}; allowed: a JSON object"
            raise ValueError(about)  # noqa: TRY004 - likewise
        ours: list[Mapping[str, Any]] = [value]
        if value.get("kv_connector") == "MultiConnector":
            ours = [*own_transfers(value), {"kv_connector": "MultiConnector"}]
        return cls(ours[0], ours[0].get(EXTRA) or {})

    @property
    def is_given(self) -> bool:
        return self.transfer is not None or bool(self.extra)

    @property
    def is_prefill(self) -> bool:
        return (self.transfer or {}).get("kv_role") != "kv_consumer"


def read_config(setup: Setup, environ: Mapping[str, str]) -> Config | Check:
    """The settings as the engine would read them, or the check that says why it would not start."""
    try:
        return Config.of(setup.transfer or {"kv_connector": OWN_NAME, EXTRA: setup.extra}, environ)
    except ConfigError as reason:
        fix = "correct this setting or variable; docs/reference/configuration.md lists them all"
        return error("settings", str(reason), fix)


def check_settings(
    setup: Setup, config: Config | Check, environ: Mapping[str, str]
) -> Iterator[Check]:
    if not setup.is_given:
        yield skipped("--kv-transfer-config", NO_CONFIG)
    elif setup.transfer is not None:
        yield from _transfer_checks(setup.transfer, environ)
    if isinstance(config, Check):
        yield config
        return
    for line in foreign_lines(setup.transfer or {EXTRA: setup.extra}, environ):
        yield warning("settings", line, "remove it; docs/migrate.md, What changes")
    names = [f"{name}={setup.extra[name]!r}" for name in setup.extra if name in Config.parsers()]
    yield ok("settings", ", ".join(names) or "all at their defaults")
    if config.backends != Config.backends:
        yield _backends(config)


def _transfer_checks(transfer: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Check]:
    name = transfer.get("kv_connector")
    module, role = transfer.get("kv_connector_module_path"), transfer.get("kv_role")
    plugins = environ.get("VLLM_PLUGINS", "nixl_kv")
    fix = f'set "kv_connector_module_path": "{MODULE}"'
    if name not in OUR_NAMES:
        about = f"is {name!r}; allowed: {', '.join(OUR_NAMES)}"
        yield error("kv_connector", about, 'set "kv_connector": "NixlKVConnector"')
    elif module == MODULE:
        yield ok("kv_connector", f"{name} of {MODULE}")
    elif module:
        yield error("kv_connector_module_path", f"is {module!r}; allowed: {MODULE!r}", fix)
    elif name != "NixlKVConnector":
        yield error("kv_connector", f"{name} without a module path is vLLM's own connector", fix)
    elif "nixl_kv" not in plugins.split(","):
        about = f"VLLM_PLUGINS={plugins} keeps vLLM from finding {name} by its name"
        yield error("kv_connector", about, f"{fix}, or add nixl_kv to VLLM_PLUGINS")
    else:
        yield ok("kv_connector", f"{name}, which vLLM finds by nixl_kv's plugin")
    if role in ROLES:
        yield ok("kv_role", str(role))
    else:
        yield error("kv_role", f"is {role!r}; allowed: {', '.join(ROLES)}", f"set it to {ROLES[2]}")
    if POLICY in transfer:
        about = f"{transfer[POLICY]!r} has no effect: on_load_failure decides"
        yield warning(POLICY, about, "set on_load_failure in kv_connector_extra_config instead")


def _backends(config: Config) -> Check:
    name = "backends"
    try:
        from nixl_kv.transport.nixl import check_backends  # noqa: PLC0415 - NIXL may be absent

        check_backends(config.backends)
    except ImportError as reason:
        return skipped(name, f"{', '.join(config.backends)}; NIXL cannot be imported: {reason}")
    except ConfigError as reason:
        return error(name, str(reason), "correct 'backends'")
    return ok(name, ", ".join(config.backends))


def check_key(
    config: Config | None, given: Path | None, *, insecure: bool
) -> tuple[client.AnyKeys, list[Check]]:
    """The key with which to ask other engines, and the checks of it.

    `given` and `insecure` are options of the tool; otherwise the engine's settings say which key.
    """
    name, is_engines, others = "key", given is None, list[Path]()
    path = given or (config.key_file if config is not None else None)
    try:
        if insecure:
            return None, [_no_key(config)]
        if path is not None:
            keys, source = read_any_key_file(path), f"from {path}"
        elif text := os.environ.get(KEY_VARIABLE):
            keys, source = parse_any_key(text, KEY_VARIABLE), f"from {KEY_VARIABLE}"
        elif config is not None and config.insecure:
            return None, [_no_key(config)]
        else:
            found = find_user_key()
            if found is None:
                return None, [ok(name, f"{LOCAL_KEY}; the first of them will make it")]
            keys, source = found, f"{LOCAL_KEY}; other machines need another: {KEYGEN}"
            others += other_user_keys(keys)
    except ConfigError as reason:
        return None, [error(name, str(reason), KEYGEN)]
    whose = "" if is_engines else " (of this tool; the engine's own settings were not compared)"
    detail = f"its fingerprint is {keys.fingerprint}, {source}{whose}; engines log theirs at start"
    checks = [ok(name, detail)]
    if others:
        about = f"this user has other generated keys too, in {', '.join(map(str, others))}"
        fix = "compare the fingerprints that the engines log, and delete the keys that none has"
        checks.append(warning(name, about, fix))
    return keys, checks


def _no_key(config: Config | None) -> Check:
    if config is not None and config.is_this_machine_only:
        return ok("key", "none; only processes of this machine reach the engine")
    about = "none: every process that reaches the engine's ports may read KV and drain it"
    return warning("key", about, KEYGEN)


def check_address(
    config: Config, keys: client.AnyKeys, peers: Sequence[str], *, is_prefill: bool
) -> Iterator[Check]:
    """Whether the engine can listen, and whether the peers could reach it."""
    fix = f"set {config.host_name} to auto, or to an address or interface of this machine"
    interface = _interface_of(config.host)
    if interface is None and not addresses.is_local(config.host):
        yield error("host", f"{config.host} is not an address of this machine", fix)
        return
    about = "is an address of this machine" if interface is None else f"on {interface}"
    yield ok("host", f"{config.host} {about}")
    far = [host for where in peers for host in _hosts(where) if not addresses.is_local(host)]
    if far and config.is_this_machine_only and is_prefill:
        yield error(
            "host",
            f"tickets would name {config.host}, which {far[0]} cannot reach",
            f"set {config.host_name} to auto, or to an address that decode can reach",
        )
    for host in far:
        yield _route(config, host)
    yield _port(config, keys, is_prefill=is_prefill)
    if config.rank_port and _is_in_use(config.host, config.rank_port):
        about = f"rank_port {config.rank_port} is in use by {_owner(config.rank_port)}"
        yield warning("rank_port", about, "if this engine does not run yet, choose a free range")


def _hosts(where: str) -> list[str]:
    with suppress(ValueError):
        endpoints = client.endpoints_at(where, option="--peer")
        return [endpoint_host(endpoint) for endpoint in endpoints]
    return []  # the check of this peer says why


def _interface_of(host: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == host for entry in entries):
            return name
    return None


def _route(config: Config, peer: str) -> Check:
    name = f"route to {peer}"
    try:
        source = addresses.towards(peer)
    except OSError as reason:
        return error(name, f"{reason.strerror}", f"check `ip route get {peer}`")
    about = f"packets leave from {source}"
    if source == config.host or config.is_this_machine_only:
        return ok(name, about)
    if (":" in peer) != (":" in config.host):
        return ok(name, f"{about}; the peer would come to {config.host}")
    fix = f"if the peer cannot reach {config.host}, set {config.host_name} to {source}"
    return warning(name, f"{about}, but tickets would name {config.host}", fix)


def _port(config: Config, keys: client.AnyKeys, *, is_prefill: bool) -> Check:
    name, where = "port", f"{config.port} of {config.host}"
    if not config.port:
        return ok(name, "0: the engine takes any free port")
    if not _is_in_use(config.host, config.port):
        return ok(name, f"{where} is free")
    variable = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    try:
        endpoint = endpoint_at(config.host, config.port)
        engine = client.engine_status(endpoint, keys, timeout_s=2.0).facts.get("engine")
    except NixlKVError as reason:
        if not is_prefill and not config.port_name:
            return ok(name, f"{where} is in use; a decode engine takes another one")
        owner = f"{_owner(config.port)}, which is not an engine with this key ({reason})"
        fix = f"set {variable} (or 'port') to a free port"
        return error(name, f"{where} is in use by {owner}", fix)
    about = f"engine {engine!r} answers there; if that is another engine, set {variable} to another"
    return ok(name, f"{where}: {about} port for this one")


def _is_in_use(host: str, port: int) -> bool:
    try:
        addresses.try_bind(host, port)
    except OSError as reason:
        return reason.errno == errno.EADDRINUSE
    return False


def _owner(port: int) -> str:
    """The process that listens on a port, if this user may see it."""
    with suppress(psutil.Error):
        for each in psutil.net_connections("tcp"):
            is_here = each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN
            if is_here and each.pid:
                return f"process {each.pid} ({psutil.Process(each.pid).name()})"
    return "a process"
