"""Parses `kv_connector_extra_config` into a frozen Config, once, when an engine starts.

An unknown key or a bad value raises a ConfigError that names the key, the value and the allowed
values. No other module reads options, and only the CLI also reads the environment.
"""

# These rules are our own because pydantic does not shorten them: its messages leave out the key or
# the value, and hosts, networks, shares and labels would remain functions. The same rules with
# pydantic 2.14 took as many lines and 140 ms more CPU time per import, which each `nixl-kv`
# command would pay.

import ipaddress
import re
import socket
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

from nixl_kv import addresses
from nixl_kv.errors import ConfigError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

LAYOUTS: Final = ("auto", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Physical orders of vLLM's packed cache: L layers, B blocks, H heads, N tokens, C content."""

HOST_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
KEY_VARIABLE: Final = "NIXL_KV_KEY"
AUTO: Final = "auto"
ON: Final = "on"
OFF: Final = "off"
MAX_PORT: Final = 65535
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

MAPPED_KEYS: Final = {"kv_lease_duration": "offer_ttl_s"}
"""Keys of vLLM's own NixlConnector that mean the same as one of ours."""

NEEDLESS_KEYS: Final = {
    "num_threads": "one thread per rank runs all reads",
    "engine_ttl": "an idle peer holds no connection, and its description is small",
    "enforce_handshake_compat": "decode never reads a peer whose cache differs in meaning",
    "backend_params": "NIXL's backends have the settings that measured best",
    "bidirectional_kv_xfer": "prefill does not read decode's blocks",
    "decoder_kv_blocks_ttl": "prefill does not read decode's blocks",
    "kv_recompute_threshold": "prefill does not read decode's blocks",
    "push_registration_timeout": "decode reads; prefill does not push",
}
"""Keys of vLLM's own NixlConnector that have no effect here, and why."""

REMOVED_KEYS: Final = {
    "warm": "decode connects to a prefill engine when the first request for it arrives"
}
"""Keys of earlier releases, and what the engine does instead."""


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
            address = _unmapped(ipaddress.ip_address(host))
        except ValueError:
            return False
        return any(address in network for network in self.networks)


def _unmapped(address: Address) -> Address:
    """The IPv4 address, if an IPv6 one stands for it: both are the same host."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@dataclass(frozen=True)
class Rule:
    """Parses the value of one setting."""

    allowed: str
    """The allowed values, for error messages."""

    parse: Callable[[Any], Any]
    """Raises a ValueError for a bad value. The error's text, if any, goes after `allowed`."""

    def __call__(self, name: str, value: object) -> Any:
        """Parse `value`, which the operator gave under `name`; raises a ConfigError."""
        try:
            return self.parse(value)
        except ValueError as error:
            detail = f"; {error}" if str(error) else ""
            raise ConfigError(f"{name} is {value!r}; allowed: {self.allowed}{detail}") from error


def _rule(allowed: str, is_allowed: Callable[[Any], bool]) -> Rule:
    """A rule that returns each allowed value as it is."""

    def parse(value: object) -> object:
        if not is_allowed(value):
            raise ValueError
        return value

    return Rule(allowed, parse)


def _choice(*choices: str) -> Rule:
    return _rule(" or ".join(map(repr, choices)), lambda value: value in choices)


def _number(kind: type[int | float], low: float, high: float, what: str, note: str = "") -> Rule:
    def parse(value: Any) -> float:
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # false for NaN
            raise ValueError
        return kind(value)

    return Rule(f"a {what} from {low:g} to {high:g}{note}", parse)


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
    except (OSError, UnicodeError) as error:
        raise ValueError from error
    address = _unmapped(ipaddress.ip_address(literal))
    if address.is_unspecified or address.is_multicast:
        raise ValueError
    return str(address)


def _strings(value: object) -> tuple[str, ...]:
    strings = tuple(value) if isinstance(value, list | tuple) else ()
    if not strings or not all(isinstance(one, str) and one for one in strings):
        raise ValueError
    return strings


def _pacing(value: object) -> object:
    return {True: ON, False: OFF}[value] if isinstance(value, bool) else PACING.parse(value)


def _networks(value: object) -> tuple[Network, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise ValueError
    return tuple(map(_network, value))


def _network(entry: object) -> Network:
    if not isinstance(entry, str):  # ip_network takes integers and bytes too
        raise ValueError(f"{entry!r} is not a string")  # noqa: TRY004 - refused like the others
    network = ipaddress.ip_network(entry)
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(MAPPED):
        first = _unmapped(network.network_address)
        return ipaddress.ip_network(f"{first}/{network.prefixlen - MAPPED.prefixlen}")
    return network


def _share_of_loads(value: object) -> float:
    if value in ("off", "all"):
        return float(value == "all")
    number = r"sample:([0-9]{0,9}\.?[0-9]{1,9})"
    match = re.fullmatch(number, value) if isinstance(value, str) else None
    if match is None or float(match[1]) > 1:
        raise ValueError
    return float(match[1])


HOST: Final = Rule(
    f"{AUTO!r}, an IP address or a network interface of this machine, or a name that resolves to "
    "one; not a wildcard",
    _host,
)
PORT: Final = _number(int, 0, MAX_PORT, "whole number", " (0: any free port)")
SECONDS: Final = _number(float, 0.1, 3600, "number of seconds")
SHARE: Final = _number(float, 0.01, 1, "number")
MEBIBYTES: Final = _number(int, 0, 1 << 16, "whole number of MiB")
LAYOUT: Final = _choice(*LAYOUTS)
POLICY: Final = _choice("recompute", "fail")
PATH: Final = _choice("auto", "gather", "direct", "staged")
SWITCH: Final = _rule("true or false", lambda value: isinstance(value, bool))
PACING: Final = _choice(AUTO, ON, OFF)
BACKENDS: Final = Rule("a list of names of NIXL backends, such as ['UCX']", _strings)
PEERS: Final = Rule("a list of CIDRs, such as ['10.0.0.0/24', 'fd00::/64'], or null", _networks)
KEY_FILE: Final = _rule(
    "the path of a file made by `nixl-kv keygen`, or null",
    lambda value: value is None or (isinstance(value, str) and value != "" and "\0" not in value),
)
VERIFY: Final = Rule("'off', 'all', or 'sample:RATE' with RATE from 0 to 1", _share_of_loads)
weights_label: Final = _rule(
    f"up to {MAX_LABEL} printable characters, such as the trainer's step",
    lambda value: isinstance(value, str) and len(value) <= MAX_LABEL and value.isprintable(),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one engine. Names that end in `_s` are in seconds."""

    # IP address at which other engines reach this one's control plane. Each process resolves names
    # by itself, because ranks may run on several machines.
    host: Annotated[str, HOST] = "127.0.0.1"
    # TCP port of the engine description; 0 takes any free one. Data-parallel rank r adds r.
    port: Annotated[int, PORT] = 5600
    # The settings or variables that gave `host` and `port`, for error messages.
    host_name: str = field(default="host", repr=False, compare=False)
    port_name: str = field(default="", repr=False, compare=False)  # empty for the default
    # First TCP port of the ranks' control planes; 0 takes free ones. Each rank adds its number
    # among all ranks of the data-parallel group.
    rank_port: Annotated[int, PORT] = 0

    # NIXL backends, in order of preference.
    backends: Annotated[tuple[str, ...], BACKENDS] = ("UCX",)

    # How long prefill keeps the blocks of a finished request that no decode engine claims.
    offer_ttl_s: Annotated[float, SECONDS] = 10.0
    # How long prefill keeps claimed blocks after the last message of their reader.
    lease_s: Annotated[float, SECONDS] = 5.0
    # How long prefill keeps claimed blocks whose reader does not begin to read.
    hold_s: Annotated[float, SECONDS] = 60.0
    # How long a load on decode may make no progress before it fails.
    request_timeout_s: Annotated[float, SECONDS] = 30.0

    # Physical order of the KV cache to ask vLLM for; 'auto' takes the best that works.
    layout: Annotated[str, LAYOUT] = "auto"

    # File with the key that all engines share. Without any configured key, the engines of one user
    # on one machine share one that the first of them makes.
    key_file: Annotated[str | None, KEY_FILE] = None
    # The key itself. It comes from NIXL_KV_KEY only, because vLLM logs its options.
    key: str | None = field(default=None, repr=False)
    # Whether to run without a key if none is configured, for tests and trusted networks.
    insecure: Annotated[bool, SWITCH] = False
    # Networks of the other engines; None: any if a key is configured, else this machine.
    peers: Annotated[tuple[Network, ...] | None, PEERS] = None
    # How long a peer may be silent before its connection counts as lost.
    peer_timeout_s: Annotated[float, SECONDS] = 2.0

    # Which prefill ranks decode reads in small pieces, so that they survive readers that die: those
    # that UCX may read over TCP ('auto'), all ('on'), or none ('off').
    paced_reads: Annotated[str, Rule(PACING.allowed, _pacing)] = AUTO
    # How decode reads KV: by NIXL ('direct'), by a kernel from a GPU of the same host ('gather'),
    # by NIXL from memory into which prefill packs it ('staged'; both fall back to 'direct'), or by
    # a rule ('auto'): gather if prefill's memory is mapped, direct if the contiguous runs are long
    # or few, staged otherwise.
    path: Annotated[str, PATH] = "auto"
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
    on_load_failure: Annotated[str, POLICY] = "recompute"
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

    @property
    def renew_interval_s(self) -> float:
        # Five heartbeats per lease: three may be lost, and a stall still costs nothing. At most
        # 0.8 s, so that prefill hears at least once per second that a read may go on.
        return min(0.8, self.lease_s / 5)

    @classmethod
    def parsers(cls) -> dict[str, Rule]:
        """The keys that an operator may set."""
        hints = typing.get_type_hints(cls, include_extras=True)
        return {
            k: hint.__metadata__[0] for k, hint in hints.items() if hasattr(hint, "__metadata__")
        }

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environ: Mapping[str, str]) -> "Config":
        """Build a Config from `kv_connector_extra_config`; some variables give defaults.

        Raises:
            ConfigError: for an unknown or removed key or a bad value, or if other machines could
                reach an engine without a key.
        """
        known = cls.parsers()
        _check_keys(extra, known)
        given = _from_environment(environ)
        mapped = {ours: theirs for theirs, ours in MAPPED_KEYS.items() if theirs in extra}
        for key, name in (mapped | {key: key for key in extra if key in known}).items():
            given[key] = (f"kv_connector_extra_config[{name!r}]", extra[name])
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


def _check_keys(extra: Mapping[str, Any], known: Mapping[str, Rule]) -> None:
    for key in sorted(set(extra) - {*known, *MAPPED_KEYS, *NEEDLESS_KEYS}):
        if key in REMOVED_KEYS:
            raise ConfigError(
                f"kv_connector_extra_config[{key!r}] is {extra[key]!r}; this setting was removed: "
                f"{REMOVED_KEYS[key]}. Delete the key"
            )
        raise ConfigError(
            f"kv_connector_extra_config has the unknown key {key!r} (value {extra[key]!r}); "
            f"allowed keys are {', '.join(known)}"
        )


def needless(extra: Mapping[str, Any]) -> list[str]:
    """One warning for each key in `extra` that belongs to vLLM's own NixlConnector."""
    lines = [
        f"kv_connector_extra_config[{key!r}] counts as {MAPPED_KEYS[key]!r}"
        for key in sorted(MAPPED_KEYS.keys() & extra)
        if MAPPED_KEYS[key] not in extra
    ]
    lines += [
        f"kv_connector_extra_config[{key!r}] has no effect: {NEEDLESS_KEYS[key]}"
        for key in sorted(NEEDLESS_KEYS.keys() & extra)
    ]
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
