"""Parses `kv_connector_extra_config` into a frozen Config, once, when an engine starts.

A bad value, an unknown key or a near miss of a known one raises a ConfigError that names the key,
the value and the allowed values. Under the names of vLLM's own connectors, other unknown keys only
warn, because recipes have keys of older releases and of forks. No other module reads options, and
only the CLI also reads the environment.
"""

import contextlib
import ipaddress
import math
import os
import pathlib
import re
import socket
import stat
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from nixl_kv import addresses
from nixl_kv.errors import ConfigError, printable
from nixl_kv.ids import endpoint_host

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

HOST_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
KEY_VARIABLE: Final = "NIXL_KV_KEY"
DYNAMO_VARIABLE: Final = "NIXL_KV_DYNAMO"  # tells an engine that Dynamo's worker has started it
AUTO: Final = "auto"
ON: Final = "on"
OFF: Final = "off"
MAX_PORT: Final = 65535
MIN_SECONDS: Final = 0.1
MAX_SECONDS: Final = 3600.0
# The address of a UNIX socket has up to 107 bytes: a slash, a dot and 16 digits follow.
MAX_SHARE_DIR: Final = 89
MAX_LABEL: Final = 256  # characters in the label of an engine's weights

LOOPBACK: Final = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1"))
ANYWHERE: Final = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4 addresses in IPv6 notation."""

HOW_TO_SHARE_A_KEY: Final = (
    "make one key with `nixl-kv keygen PATH`, and copy it to every engine's machine with `scp -p "
    "PATH HOST:PATH`, with key_file set to PATH; or give the same 64 hexadecimal digits to every "
    f"engine in its environment, as {KEY_VARIABLE}, "
    "in Kubernetes with `kubectl create secret generic nixl-kv "
    f'--from-literal={KEY_VARIABLE}="$(openssl rand -hex 32)"` and `envFrom: [{{secretRef: {{name: '
    "nixl-kv}}]` in each pod's container; or, on a network where every host is trusted, set "
    "insecure to true and peers to the CIDRs of the other engines"
)

OWN_NAME: Final = "NixlKVConnector"
EXTRA: Final = "kv_connector_extra_config"
LEASE_KEY: Final = "kv_lease_duration"
PUSH_KEY: Final = "bidirectional_kv_xfer"
NO_PUSH: Final = "has no effect: 'conversations' reads decode's blocks, and pins none"
FOREIGN_KEYS: Final = {
    PUSH_KEY: NO_PUSH,
    "decoder_kv_blocks_ttl": NO_PUSH,
    "kv_recompute_threshold": NO_PUSH,
    "push_registration_timeout": "has no effect: decode reads; prefill does not push",
    "num_threads": "has no effect: one thread per rank runs all reads",
    "engine_ttl": "has no effect: an idle peer holds no connection, and its description is small",
    "enforce_handshake_compat": "has no effect: decode never reads a cache that means other KV",
    "backend_params": "has no effect: NIXL's backends have the settings that measured best",
    # Of older releases and of forks.
    "enable_cross_layers_blocks": "has no effect: 'layout' decides; BHLNC joins a block's layers",
    "read_validation_timeout": "has no effect: each read is fenced; 'request_timeout_s' bounds it",
}
"""Keys of vLLM's own NixlConnector that mean nothing here, and why. LEASE_KEY means something."""

FOREIGN_VARIABLES: Final = {
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "has no effect, as in vLLM 0.32: set 'offer_ttl_s' instead"
}
NOT_ON: Final = (
    "is true, but has no effect: to let prefill read decode's blocks, set 'conversations' to 'on' "
    "on both engines, and kv_role to 'kv_both' on prefill"
)
POLICY: Final = "kv_load_failure_policy"
PERMUTE: Final = "enable_permute_local_kv"
MAX_MISS: Final = 2
"""Edits between a known key and one that counts as its misspelling."""
MAX_SHOWN: Final = 100  # characters of an operator's key or value in a message


@dataclass(frozen=True)
class AllowedHosts:
    """The hosts that this engine may connect to, and that may connect to it."""

    networks: tuple[Network, ...] = ANYWHERE

    def __str__(self) -> str:
        return ", ".join(map(str, self.networks))

    @property
    def are_all(self) -> bool:
        return set(ANYWHERE) <= set(self.networks)

    @property
    def are_local(self) -> bool:
        """Whether only this machine is allowed, by its loopback addresses."""
        return all(network.network_address.is_loopback for network in self.networks)

    def allows(self, host: str) -> bool:
        """Whether `host` is an IP literal within one of the networks."""
        try:
            address = unmapped(ipaddress.ip_address(host))
        except ValueError:
            return False
        return any(address in network for network in self.networks)


def unmapped(address: Address) -> Address:
    """The IPv4 address, if an IPv6 one stands for it: both are the same host."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@dataclass(frozen=True)
class Rule:
    """Parses the value of one setting."""

    allowed: str  # the allowed values, for error messages
    parse: Callable[[Any], Any]  # raises a ValueError for a bad value

    def __call__(self, name: str, value: object) -> Any:
        """Parse `value`, which the operator gave under `name`; raises a ConfigError."""
        try:
            return self.parse(value)
        except ValueError as error:
            # msgspec's texts repeat `allowed`.
            detail = "" if isinstance(error, msgspec.ValidationError) else str(error)
            reason = f"; {detail}" if detail else ""
            raise ConfigError(f"{name} is {value!r}; allowed: {self.allowed}{reason}") from error


def _typed(allowed: str, kind: Any) -> Rule:
    """The values of a type, as msgspec understands it: an integer is a float, a bool is not."""
    return Rule(allowed, partial(msgspec.convert, type=kind))


def _choice(literal: Any) -> Rule:
    return _typed(" or ".join(map(repr, typing.get_args(literal))), literal)


def _host(value: object) -> str:
    """Resolve to an IP literal that a peer can connect to; tickets carry no names."""
    if not isinstance(value, str) or not value:
        raise ValueError
    try:
        if value == AUTO:
            literal = addresses.of_default_route()
        elif addresses.is_interface(value):
            literal = addresses.of_interface(value)
        else:
            found = socket.getaddrinfo(value, None, type=socket.SOCK_STREAM)
            literal = str(found[0][4][0])
    except OSError as error:
        raise ValueError(f"it cannot be resolved: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError from error
    address = unmapped(ipaddress.ip_address(literal))
    if address.is_unspecified or address.is_multicast:
        raise ValueError
    return str(address)


def _on_or_off(value: object) -> str:
    if isinstance(value, bool):  # YAML reads 'on' and 'off' as these
        return ON if value else OFF
    return str(msgspec.convert(value, Switch))


def _networks(value: object) -> tuple[Network, ...] | None:
    return None if value is None else tuple(map(_network, msgspec.convert(value, Strings)))


def _network(entry: str) -> Network:
    network = ipaddress.ip_network(entry)
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(MAPPED):
        first = unmapped(network.network_address)
        return ipaddress.ip_network(f"{first}/{network.prefixlen - MAPPED.prefixlen}")
    return network


def _label(value: object) -> str:
    if not (isinstance(value, str) and len(value) <= MAX_LABEL and value.isprintable()):
        raise ValueError
    return value


def _directory(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or "\0" in value or not pathlib.Path(value).is_absolute():
        raise ValueError
    if len(os.fsencode(value)) > MAX_SHARE_DIR:
        raise ValueError(f"it has {len(os.fsencode(value))} bytes")
    return value


def _share_of_loads(value: object) -> float:
    if value in ("off", "all"):
        return float(value == "all")
    number = r"sample:([0-9]{0,9}\.?[0-9]{1,9})"
    match = re.fullmatch(number, value) if isinstance(value, str) else None
    if match is None or float(match[1]) > 1:
        raise ValueError
    return float(match[1])


Strings: TypeAlias = Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)]
Switch: TypeAlias = Literal["on", "off"]
Path: TypeAlias = Literal["auto", "gather", "direct", "staged"]
Layout: TypeAlias = Literal["auto", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
"""Physical orders of vLLM's packed cache: L layers, B blocks, H heads, N tokens, C content."""

HOST: Final = Rule(
    f"{AUTO!r}, an IP address or a network interface of this machine, or a name that resolves to "
    "one; not a wildcard",
    _host,
)
PORT: Final = _typed(
    "a whole number from 0 to 65535 (0: any free port)", Annotated[int, Meta(ge=0, le=MAX_PORT)]
)
SECONDS: Final = _typed(
    f"a number of seconds from {MIN_SECONDS:g} to {MAX_SECONDS:g}",
    Annotated[float, Meta(ge=MIN_SECONDS, le=MAX_SECONDS)],
)
SHARE: Final = _typed("a number from 0.01 to 1", Annotated[float, Meta(ge=0.01, le=1)])
MEBIBYTES: Final = _typed(
    "a whole number of MiB from 0 to 65536", Annotated[int, Meta(ge=0, le=1 << 16)]
)
SWITCH: Final = _typed("true or false", bool)
ON_OR_OFF: Final = Rule(_choice(Switch).allowed, _on_or_off)
BACKENDS: Final = _typed("a list of names of NIXL backends, such as ['UCX']", Strings)
PEERS: Final = Rule("a list of CIDRs, such as ['10.0.0.0/24', 'fd00::/64'], or null", _networks)
KEY_FILE: Final = _typed(
    "the path of a file made by `nixl-kv keygen`, or null",
    Annotated[str, Meta(pattern=r"\A[^\0]+\Z")] | None,
)
SHARE_DIR: Final = Rule(
    f"the absolute path of a directory, of up to {MAX_SHARE_DIR} bytes, or null", _directory
)
VERIFY: Final = Rule("'off', 'all', or 'sample:RATE' with RATE from 0 to 1", _share_of_loads)
weights_label: Final = Rule(
    f"up to {MAX_LABEL} printable characters, such as the trainer's step", _label
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one engine. Names that end in `_s` are in seconds."""

    # Other engines reach this one's control plane there. Each process resolves names by itself,
    # because ranks may run on several machines.
    host: Annotated[str, HOST] = "127.0.0.1"
    # TCP port of the engine description; 0 takes any free one. Data-parallel rank r adds r.
    port: Annotated[int, PORT] = 5600
    # The settings or variables that gave `host` and `port`, for error messages.
    host_name: str = field(default="host", repr=False, compare=False)
    port_name: str = field(default="", repr=False, compare=False)  # empty for the default
    # First TCP port of the ranks' control planes; each rank of the data-parallel group adds its
    # number.
    rank_port: Annotated[int, PORT] = 0

    # NIXL backends, in order of preference.
    backends: Annotated[tuple[str, ...], BACKENDS] = ("UCX",)

    # Prefill frees the blocks of a finished request that no decode engine has claimed.
    offer_ttl_s: Annotated[float, SECONDS] = 10.0
    # Prefill takes claimed blocks back from a reader that sends no message.
    lease_s: Annotated[float, SECONDS] = 5.0
    # A load on decode that makes no progress fails.
    request_timeout_s: Annotated[float, SECONDS] = 30.0

    # Whether prefill answers before it has computed, and decode schedules a request as soon as its
    # KV has landed, instead of with a step's output.
    overlap: Annotated[str, ON_OR_OFF] = ON
    # Whether other engines may read from this one's prefix cache, and whether this one asks others
    # before it computes a prompt.
    conversations: Annotated[str, ON_OR_OFF] = OFF

    # Physical order of the KV cache to ask vLLM for; 'auto' takes the best that works.
    layout: Annotated[str, _choice(Layout)] = "auto"

    # File with the key that all engines share. Without any configured key, the engines of one user
    # on one machine share one that the first of them makes.
    key_file: Annotated[str | None, KEY_FILE] = None
    # The key itself. It comes from NIXL_KV_KEY only, because vLLM logs its options.
    key: str | None = field(default=None, repr=False)
    # Whether to run without a key if none is configured, for tests and trusted networks.
    insecure: Annotated[bool, SWITCH] = False
    # Networks of the other engines; None: any if a key is configured, else this machine.
    peers: Annotated[tuple[Network, ...] | None, PEERS] = None
    # Decode closes the connection to a silent peer, and tries once more to connect.
    peer_timeout_s: Annotated[float, SECONDS] = 2.0

    # How decode reads KV: by NIXL ('direct'), by a kernel from a GPU of the same host ('gather'),
    # by NIXL from memory into which prefill packs it ('staged'; both fall back to 'direct'), or by
    # a rule ('auto'): gather if prefill's memory is mapped, direct if the contiguous runs are long
    # or few, staged otherwise.
    path: Annotated[str, _choice(Path)] = "auto"
    # A private directory that containers of one host mount. Prefill hands out its GPU memory on
    # sockets there, so that `gather` also works between PID namespaces. None: within one only.
    share_dir: Annotated[str | None, SHARE_DIR] = None
    # MiB per rank, of the memory that holds its cache, for packed KV; 0: prefill packs nothing.
    staging_mib: Annotated[int, MEBIBYTES] = 256
    # Share of the cache's blocks that unclaimed offers may hold.
    offer_share: Annotated[float, SHARE] = 0.5

    # Label of this engine's weights. Decode computes a request itself if prefill's label differs.
    # `nixl-kv set-weights` changes the label at run time.
    weights: Annotated[str, weights_label] = ""
    # Whether decode engines with vLLM's own NixlConnector may get this engine's tickets. They
    # compute those requests.
    in_tree_decode: Annotated[bool, SWITCH] = True
    # Whether decode computes a request whose KV cannot be read, or ends it with an error.
    on_load_failure: Annotated[str, _choice(Literal["recompute", "fail"])] = "recompute"
    # What decode has of a prompt's images, audio and video: those of prefill ('own'), what the
    # platform sends instead ('ticket'), or what the ticket's hash proves ('auto').
    media: Annotated[str, _choice(Literal["auto", "ticket", "own"])] = "auto"
    # Share of the loads whose bytes decode compares with prefill's by a digest.
    verify: Annotated[float, VERIFY] = 0.0

    @property
    def has_key(self) -> bool:
        # The key that a user's engines on one machine share does not count.
        return self.key_file is not None or self.key is not None

    @property
    def is_this_machine_only(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def allowed_hosts(self) -> AllowedHosts:
        if self.peers is not None:
            return AllowedHosts(self.peers)
        if self.has_key:
            return AllowedHosts()
        return AllowedHosts((*LOOPBACK, ipaddress.ip_network(self.host)))

    def entry_of(self, endpoint: str) -> str:
        """The entry of `peers` that allows an endpoint; '' if `peers` is not set."""
        host = endpoint_host(endpoint)
        entries = [one for one in self.peers or () if AllowedHosts((one,)).allows(host)]
        return str(entries[0]) if entries else ""

    def make_share_dir(self) -> None:
        """Make the directory `share_dir` if it is missing; check that only this user can enter it.

        Raises:
            ConfigError: if others can, or it cannot be used.
        """
        if self.share_dir is None:
            return
        path, wrong = pathlib.Path(self.share_dir), ""
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)
            found = path.stat()
        except OSError as error:
            wrong = f"cannot be used: {error.strerror}"
        else:
            if not stat.S_ISDIR(found.st_mode):
                wrong = "is not a directory"
            elif found.st_uid != os.geteuid():
                wrong = f"belongs to user {found.st_uid}; this engine's is {os.geteuid()}"
            elif found.st_mode & 0o077:
                wrong = f"has mode {stat.S_IMODE(found.st_mode):04o}"
        if wrong:
            raise ConfigError(
                f"share_dir {self.share_dir!r} {wrong}; allowed: a directory that only this "
                "engine's user can enter (mode 0700), or one to make in a directory that exists"
            )

    @property
    def heartbeat_interval_s(self) -> float:
        """Decode sends its next heartbeat."""
        # Five heartbeats per lease: three may be lost, and a stall still costs nothing. At most
        # 0.8 s, so that prefill hears at least once per second that a read may go on.
        return min(0.8, self.lease_s / 5)

    @property
    def stall_s(self) -> float:
        """Prefill says that its engine hangs, because no step has begun or ended."""
        return self.request_timeout_s / 3

    @classmethod
    def parsers(cls) -> dict[str, Rule]:
        """The keys that an operator may set."""
        hints = typing.get_type_hints(cls, include_extras=True)
        return {
            k: hint.__metadata__[0] for k, hint in hints.items() if hasattr(hint, "__metadata__")
        }

    @classmethod
    def of(cls, transfer: Mapping[str, Any], environ: Mapping[str, str]) -> "Config":
        """Build a Config from a `--kv-transfer-config`, or a child's of a MultiConnector."""
        is_drop_in = transfer.get("kv_connector") != OWN_NAME
        return cls.parse(transfer.get(EXTRA) or {}, environ, is_drop_in=is_drop_in)

    @classmethod
    def parse(
        cls, extra: Mapping[str, Any], environ: Mapping[str, str], *, is_drop_in: bool = False
    ) -> "Config":
        """Build a Config from `kv_connector_extra_config`; some variables give defaults.

        `is_drop_in` says that the connector has the name of one of vLLM's own. A ConfigError names
        all unknown keys or a bad value, or says that other machines could reach an engine without a
        key.
        """
        known = cls.parsers()
        _check_keys(extra, known, is_drop_in=is_drop_in)
        given = _from_environment(environ)
        if LEASE_KEY in extra and "offer_ttl_s" not in extra:
            given["offer_ttl_s"] = (f"{EXTRA}[{LEASE_KEY!r}]", _lease(extra[LEASE_KEY]))
        for key in known.keys() & extra.keys():
            given[key] = (f"{EXTRA}[{key!r}]", extra[key])
        config = cls(
            key=environ.get(KEY_VARIABLE) or None,
            host_name=given["host"][0] if "host" in given else "host",
            port_name=given["port"][0] if "port" in given else "",
            **{key: known[key](*given[key]) for key in given},
        )
        if not (config.has_key or config.insecure or config.is_this_machine_only):
            raise ConfigError(
                f"{config.host_name} is {config.host!r}; allowed: without key_file and "
                f"{KEY_VARIABLE}, an address that only this machine reaches: {HOW_TO_SHARE_A_KEY}"
            )
        return config


def _check_keys(extra: Mapping[str, Any], known: Mapping[str, object], *, is_drop_in: bool) -> None:
    refused = []
    for key in sorted(map(str, extra.keys() - {*known, *FOREIGN_KEYS, LEASE_KEY})):
        meant = _nearest(key, [*known, LEASE_KEY])
        if key in ("key", KEY_VARIABLE, KEY_VARIABLE.casefold()):
            meant = "key_file"  # vLLM logs its options
        if meant or not is_drop_in:
            question = f"; did you mean {meant!r}?" if meant else ""
            value = printable(repr(extra.get(key)), MAX_SHOWN)
            refused.append(f"{printable(key, MAX_SHOWN)!r} (value {value}{question})")
    if refused:
        noun = "key" if len(refused) == 1 else "keys"
        raise ConfigError(
            f"{EXTRA} has the unknown {noun} {', '.join(refused)}; remove "
            f"{'it' if len(refused) == 1 else 'them'}, or use an allowed key: {', '.join(known)}"
        )


def _nearest(key: str, known: Iterable[str]) -> str:
    """The known key of which `key` is a misspelling, in at most MAX_MISS edits; or ''."""
    plain = key.strip().casefold().replace("-", "_")
    if len(plain) > MAX_SHOWN:
        return ""
    distances = {each: _edits(plain, each) for each in known}
    nearest = min(distances, key=lambda each: distances[each])
    return nearest if distances[nearest] <= MAX_MISS else ""


def _edits(one: str, other: str) -> int:
    """How many letters to insert, delete, replace or swap with their neighbours, at least."""
    before, row = list[int](), list(range(len(other) + 1))
    for i, letter in enumerate(one):
        above, row = row, [i + 1]
        for j, theirs in enumerate(other):
            row.append(min(above[j + 1] + 1, row[j] + 1, above[j] + (letter != theirs)))
            if i and j and (letter, theirs) == (other[j - 1], one[i - 1]):
                row[-1] = min(row[-1], before[j - 1] + 1)
        before = above
    return row[-1]


def _lease(value: object) -> float:
    """The nearest number of seconds that is allowed: vLLM's connector takes any."""
    name, seconds = f"{EXTRA}[{LEASE_KEY!r}]", float("nan")
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        seconds = float(value)  # type: ignore[arg-type]
    if math.isnan(seconds) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; allowed: {SECONDS.allowed}")
    return min(max(seconds, MIN_SECONDS), MAX_SECONDS)


def own_transfers(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The KV transfer configurations that name this connector: all of it, or children at any depth.

    `transfer` is vLLM's. Only a MultiConnector has children, and one of them may be another. As in
    vLLM, a child without an `engine_id` has its parent's.
    """
    found, rest = [], [transfer]
    while rest:
        each = rest.pop(0)
        if each.get("kv_connector") == "MultiConnector":
            children = (each.get(EXTRA) or {}).get("connectors") or ()
            named = {"engine_id": each["engine_id"]} if "engine_id" in each else {}
            rest[:0] = [{**named, **child} for child in children if isinstance(child, Mapping)]
        elif _is_ours(each):
            found.append(each)
    return found


def _is_ours(transfer: Mapping[str, Any]) -> bool:
    module = transfer.get("kv_connector_module_path") or ""
    is_named = not module and transfer.get("kv_connector") == OWN_NAME
    return is_named or str(module).partition(".")[0] == "nixl_kv"


def foreign_lines(transfer: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """One line for each setting of vLLM's own NixlConnector, or of a fork, that is lost here."""
    extra = transfer.get(EXTRA) or {}
    known = {*Config.parsers(), *FOREIGN_KEYS, LEASE_KEY}
    is_missed = bool(extra.get(PUSH_KEY)) and extra.get("conversations") not in (ON, True)
    lines = [
        f"{EXTRA}[{key!r}] {NOT_ON if key == PUSH_KEY and is_missed else FOREIGN_KEYS[key]}"
        for key in FOREIGN_KEYS
        if key in extra
    ]
    lines += [
        f"{EXTRA}[{printable(key, MAX_SHOWN)!r}] is unknown here and has no effect"
        for key in sorted(map(str, extra.keys() - known))
    ]
    if LEASE_KEY in extra and "offer_ttl_s" not in extra:
        seconds = _lease(extra[LEASE_KEY])
        if seconds != float(extra[LEASE_KEY]):
            about = f"is {extra[LEASE_KEY]}, which counts as {seconds:g}: 'offer_ttl_s' is"
            lines.append(f"{EXTRA}[{LEASE_KEY!r}] {about} {SECONDS.allowed}")
    if transfer.get(PERMUTE):
        lines.append(f"{PERMUTE} has no effect: decode reads any layout of prefill's cache")
    lines += [f"{name} {FOREIGN_VARIABLES[name]}" for name in FOREIGN_VARIABLES if name in environ]
    return lines


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """Variable and value of the defaults that vLLM's variables give, by key."""
    defaults: dict[str, tuple[str, Any]] = {}
    host = environ.get(HOST_VARIABLE)
    if host:
        # Deployments set a wildcard because vLLM's own connector listens there. A ticket needs an
        # address, so a wildcard means 'auto'.
        is_wildcard = host in ("0.0.0.0", "::")  # noqa: S104 - nothing listens on it
        defaults["host"] = (HOST_VARIABLE, AUTO if is_wildcard else host)
    text = environ.get(PORT_VARIABLE)
    if text:
        is_number = re.fullmatch("[0-9]{1,5}", text)  # int() is slow for many digits
        defaults["port"] = (PORT_VARIABLE, int(text) if is_number else text)
    return defaults
