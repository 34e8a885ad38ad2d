"""`kv_connector_extra_config`, parsed once into a frozen Config.

Everything is checked here, at the start: an unknown key or a bad value raises a ConfigError that
names the key, the value and what is allowed. Nothing else reads options or the environment.

The parsers are our own, as no library says as much: of 31 bad values pydantic-settings 2.16 (with
constraints and patterns) refuses 26 and names the value in 23, msgspec 0.22 refuses 24 and names it
in 5; what is left (hosts, networks, shares) would be validators of ours again.
"""

import ipaddress
import re
import socket
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

from nixl_kv import addresses
from nixl_kv.errors import ConfigError
from nixl_kv.ids import Endpoint, endpoint_at, endpoint_host

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

LAYOUTS: Final = ("auto", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Physical orders of vLLM's packed cache: L layers, B blocks, H heads, N tokens, C content."""

POLICIES: Final = ("recompute", "fail")

PATHS: Final = ("auto", "gather", "direct", "staged")

MAX_STAGING_MIB: Final = 1 << 16

HOST_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
KEY_VARIABLE: Final = "NIXL_KV_KEY"
AUTO: Final = "auto"
ON: Final = "on"
OFF: Final = "off"
WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - not listened to
MAX_PORT_DIGITS: Final = 5
MAX_PORT: Final = 65535
MAX_LABEL: Final = 256
"""Of the label of an engine's weights, in characters."""

LOOPBACK: Final = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1"))
ANYWHERE: Final = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4 as IPv6 writes it: the same hosts, so it counts as IPv4 everywhere here."""

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
    "num_threads": "one thread a rank has all reads under way",
    "engine_ttl": "an idle peer costs no link, and what is known of it stays",
    "enforce_handshake_compat": "a peer whose cache means something else is never read",
    "backend_params": "NIXL's backends are set up as they were measured to be best",
    "bidirectional_kv_xfer": "decode's blocks are not read by prefill",
    "decoder_kv_blocks_ttl": "decode's blocks are not read by prefill",
    "kv_recompute_threshold": "decode's blocks are not read by prefill",
    "push_registration_timeout": "decode reads; prefill does not push",
}
"""Others of that connector's keys, and why they have no effect here."""


@dataclass(frozen=True)
class AllowedHosts:
    """The hosts that this engine talks to and listens to."""

    networks: tuple[Network, ...] = ANYWHERE

    def __str__(self) -> str:
        return ", ".join(map(str, self.networks))

    @property
    def are_all(self) -> bool:
        """Whether every host is one of them."""
        return set(ANYWHERE) <= set(self.networks)

    @property
    def are_local(self) -> bool:
        """Whether each of them is this machine, by a loopback address."""
        return all(network.network_address.is_loopback for network in self.networks)

    def allows(self, host: str) -> bool:
        """Whether an IP literal is one of them; what is no IP literal is none."""
        try:
            address = _plain(ipaddress.ip_address(host))
        except ValueError:
            return False
        return any(address in network for network in self.networks)


def _refuse(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}; allowed: {allowed}")


def _plain(address: Address) -> Address:
    """IPv4 where it is written as IPv6."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _host(name: str, value: object) -> str:
    """An address a peer can connect to, as an IP literal: tickets carry no names to resolve."""
    allowed = (
        f"{AUTO!r}, an IP address or a network interface of this machine, or a name that resolves "
        "to one; not a wildcard"
    )
    if not isinstance(value, str) or not value:
        raise _refuse(name, value, allowed)
    try:
        address = _plain(ipaddress.ip_address(_literal(value)))
    except (OSError, UnicodeError) as error:  # a name that is none
        raise _refuse(name, value, allowed) from error
    except ValueError as error:
        raise _refuse(name, value, f"{allowed}; {error}") from error
    if address.is_unspecified or address.is_multicast:
        raise _refuse(name, value, allowed)
    return str(address)


def _literal(host: str) -> str:
    """The IP literal that an operator's word for a host stands for."""
    if host == AUTO:
        return addresses.of_default_route()
    if addresses.is_interface(host):
        return addresses.of_interface(host)
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _port(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PORT:
        raise _refuse(name, value, "a whole number from 0 to 65535 (0: any free port)")
    return value


def _backends(name: str, value: object) -> tuple[str, ...]:
    backends = tuple(value) if isinstance(value, list | tuple) else ()
    if not backends or not all(isinstance(backend, str) and backend for backend in backends):
        raise _refuse(name, value, "a list of names of NIXL backends, such as ['UCX']")
    return backends


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.1 <= value <= 3600:  # noqa: PLR2004
        raise _refuse(name, value, "a number of seconds from 0.1 to 3600")
    return float(value)


def _layout(name: str, value: object) -> str:
    if value not in LAYOUTS:
        raise _refuse(name, value, ", ".join(LAYOUTS))
    return str(value)


def _policy(name: str, value: object) -> str:
    if value not in POLICIES:
        raise _refuse(name, value, " or ".join(map(repr, POLICIES)))
    return str(value)


def _path(name: str, value: object) -> str:
    if value not in PATHS:
        raise _refuse(name, value, ", ".join(map(repr, PATHS)))
    return str(value)


def _mebibytes(name: str, value: object) -> int:
    allowed = f"a whole number of MiB from 0 to {MAX_STAGING_MIB}"
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STAGING_MIB:
        raise _refuse(name, value, allowed)
    return value


def _key_file(name: str, value: object) -> str | None:
    """Only the path: the file is read where the key is used."""
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise _refuse(name, value, "the path of a file made by `nixl-kv keygen`, or null")
    return value


def weights_label(name: str, value: object) -> str:
    """A label of an engine's weights, also as a tool sets it.

    Raises:
        ConfigError: names the value and what is allowed.
    """
    if not isinstance(value, str) or len(value) > MAX_LABEL or not value.isprintable():
        allowed = f"up to {MAX_LABEL} printable characters, such as the trainer's step"
        raise _refuse(name, value, allowed)
    return value


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "true or false")
    return value


def _pacing(name: str, value: object) -> str:
    """True and false are what it was before there was 'auto'."""
    if isinstance(value, bool):
        return ON if value else OFF
    if value not in (AUTO, ON, OFF):
        raise _refuse(name, value, f"{AUTO!r}, {ON!r} or {OFF!r}")
    return str(value)


def _peers(name: str, value: object) -> tuple[Network, ...] | None:
    allowed = "a list of CIDRs, such as ['10.0.0.0/24', 'fd00::/64'], or null"
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise _refuse(name, value, allowed)
    try:
        return tuple(_network(entry) for entry in value)
    except ValueError as error:
        raise _refuse(name, value, f"{allowed}; {error}") from error


def _warm(name: str, value: object) -> tuple[Endpoint, ...]:
    """Where other engines describe themselves, as tickets have it: an IP literal and a port."""
    allowed = "a list of HOST:PORT, such as ['10.0.0.1:5600', '[fd00::1]:5600']"
    if not isinstance(value, list | tuple):
        raise _refuse(name, value, allowed)
    try:
        return tuple(dict.fromkeys(_endpoint(entry) for entry in value))
    except ValueError as error:
        raise _refuse(name, value, f"{allowed}; {error}") from error


def _endpoint(entry: object) -> Endpoint:
    host, colon, port = entry.rpartition(":") if isinstance(entry, str) else ("", "", "")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isdecimal() and len(port) <= MAX_PORT_DIGITS and 0 < int(port) <= MAX_PORT
    if not colon or not is_port or is_bracketed != (":" in host):
        raise ValueError(f"{entry!r} is none")
    return endpoint_at(str(_plain(ipaddress.ip_address(host.strip("[]")))), int(port))


def _network(entry: object) -> Network:
    if not isinstance(entry, str):
        raise ValueError(f"{entry!r} is no text")  # noqa: TRY004 - refused as all others
    network = ipaddress.ip_network(entry)
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(MAPPED):
        first = _plain(network.network_address)
        return ipaddress.ip_network(f"{first}/{network.prefixlen - MAPPED.prefixlen}")
    return network


def _share(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value <= 1:  # noqa: PLR2004
        raise _refuse(name, value, "a number from 0.01 to 1")
    return float(value)


def _verify(name: str, value: object) -> float:
    """The share of loads that are verified."""
    known = {"off": 0.0, "all": 1.0}
    if isinstance(value, str) and value in known:
        return known[value]
    rate = value.removeprefix("sample:") if isinstance(value, str) else ""
    if value == rate or not re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,9}", rate) or float(rate) > 1:
        raise _refuse(name, value, "'off', 'all', or 'sample:RATE' with RATE from 0 to 1")
    return float(rate)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What an operator may choose, and what parses it. Times are seconds."""

    host: Annotated[str, _host] = "127.0.0.1"
    """IP address under which other engines reach this one's control plane: each of its processes
    has its own, so that 'auto' or a network interface fits where a rank is on another machine."""

    port: Annotated[int, _port] = 5600
    """TCP port of the engine description; 0 takes any free one. Data-parallel rank r adds r."""

    host_name: str = field(default="host", repr=False, compare=False)
    """Which setting gave `host`, for error messages."""

    port_name: str = field(default="", repr=False, compare=False)
    """The same of `port`; empty for the default."""

    rank_port: Annotated[int, _port] = 0
    """First TCP port of the ranks' control planes; 0 takes any free one. Each rank adds its number
    among all ranks of the data-parallel group."""

    backends: Annotated[tuple[str, ...], _backends] = ("UCX",)
    """NIXL backends, in order of preference."""

    offer_ttl_s: Annotated[float, _seconds] = 10.0
    """How long a finished prefill that nobody claims keeps its blocks."""

    lease_s: Annotated[float, _seconds] = 5.0
    """How long blocks stay pinned after the last sign of life of the reader that claimed them."""

    hold_s: Annotated[float, _seconds] = 60.0
    """How long blocks stay pinned for a reader that has claimed them and does not begin to read."""

    request_timeout_s: Annotated[float, _seconds] = 30.0
    """How long a load on decode may stand still before it counts as failed."""

    layout: Annotated[str, _layout] = "auto"
    """Physical order of the KV cache to ask vLLM for; 'auto' picks the best that is known good."""

    key_file: Annotated[str | None, _key_file] = None
    """File with the key that all engines share. If no key is given anywhere, the engines of one
    user on one machine share one that the first of them makes."""

    key: str | None = field(default=None, repr=False)
    """The key itself, from NIXL_KV_KEY alone, for who gives no file: vLLM logs its options."""

    insecure: Annotated[bool, _switch] = False
    """Whether to run without any key if none is given, for tests and trusted networks."""

    peers: Annotated[tuple[Network, ...] | None, _peers] = None
    """Networks of the other engines; None: any if a key is given, else this machine."""

    warm: Annotated[tuple[Endpoint, ...], _warm] = ()
    """Prefill engines, HOST:PORT of their descriptions, that decode joins beforehand, and keeps."""

    peer_timeout_s: Annotated[float, _seconds] = 2.0
    """How soon a peer that has fallen silent counts as lost."""

    paced_reads: Annotated[str, _pacing] = AUTO
    """Which prefill ranks are read piece by piece, so that they survive readers that die: those
    that UCX reads over TCP ('auto'), all ('on'), or none ('off')."""

    path: Annotated[str, _path] = "auto"
    """How KV is read: by NIXL ('direct'), by a kernel from a GPU of the same host ('gather'), by
    NIXL from where prefill has packed it ('staged'; both 'direct' where they cannot be), or by
    a rule for each load ('auto'): gather if prefill's memory is mapped, direct if the contiguous
    runs are long, staged otherwise."""

    staging_mib: Annotated[int, _mebibytes] = 256
    """How many MiB a rank has, of the memory that its cache is in, for KV that is packed before it
    is read; 0: it is never packed."""

    offer_share: Annotated[float, _share] = 0.5
    """Share of the cache's blocks that offers which nobody has claimed may hold."""

    weights: Annotated[str, weights_label] = ""
    """Label of this engine's weights, such as the trainer's step. Decode computes a request itself
    if prefill's label is another one; `nixl-kv set-weights` changes it at run time."""

    in_tree_decode: Annotated[bool, _switch] = True
    """Whether decode engines with vLLM's own NixlConnector may get this engine's tickets, and
    compute those requests; false: every decode engine runs this connector."""

    on_load_failure: Annotated[str, _policy] = "recompute"
    """What becomes of a request whose KV cannot be read: decode computes it, or it 'fail's."""

    verify: Annotated[float, _verify] = 0.0
    """Share of the loads whose bytes are compared with prefill's by a digest, on decode: 'off' (0),
    'sample:RATE', or 'all' (1)."""

    @property
    def has_key(self) -> bool:
        """Whether a key is given. The one that a user's engines share never leaves a machine."""
        return self.key_file is not None or self.key is not None

    @property
    def is_this_machine_only(self) -> bool:
        """Whether other machines cannot reach `host`."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def allowed_hosts(self) -> AllowedHosts:
        """`peers`, or what it is by default."""
        if self.peers is not None:
            return AllowedHosts(self.peers)
        if self.has_key:
            return AllowedHosts()
        return AllowedHosts((*LOOPBACK, ipaddress.ip_network(self.host)))

    @property
    def renew_interval_s(self) -> float:
        """Renew five times a lease: three may be lost, with a stall, before the lease runs out.

        And each 0.8 s at least: so that prefill hears each second that it may still be read.
        """
        return min(0.8, self.lease_s / 5)

    @classmethod
    def parsers(cls) -> dict[str, Callable[[str, object], Any]]:
        """The keys that an operator may give, each with what parses its value."""
        hints = typing.get_type_hints(cls, include_extras=True)
        known = {key: getattr(hint, "__metadata__", None) for key, hint in hints.items()}
        return {key: metadata[0] for key, metadata in known.items() if metadata}

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environ: Mapping[str, str]) -> "Config":
        """Build from `kv_connector_extra_config`, with some variables as defaults.

        Keys of vLLM's own NixlConnector are known, see `needless`.

        Raises:
            ConfigError: for an unknown key or a value that is not allowed, or if other machines
                could reach an engine that is given no key.
        """
        known = cls.parsers()
        unknown = sorted(set(extra) - {*known, *MAPPED_KEYS, *NEEDLESS_KEYS})
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config has the unknown key {unknown[0]!r} "
                f"(value {extra[unknown[0]]!r}); allowed keys are {', '.join(known)}"
            )
        given = _from_environment(environ)
        mapped = {ours: theirs for theirs, ours in MAPPED_KEYS.items() if theirs in extra}
        named = mapped | {key: key for key in extra if key in known}
        given |= {
            key: (f"kv_connector_extra_config[{name!r}]", extra[name])
            for key, name in named.items()
        }
        config = cls(
            key=environ.get(KEY_VARIABLE) or None,
            host_name=given["host"][0] if "host" in given else "host",
            port_name=given["port"][0] if "port" in given else "",
            **{key: known[key](*given[key]) for key in given},
        )
        if not (config.has_key or config.insecure or config.is_this_machine_only):
            raise _refuse(
                given["host"][0],
                config.host,
                "without key_file and NIXL_KV_KEY, an address that only this machine reaches: "
                f"{HOW_TO_SHARE_A_KEY}",
            )
        for endpoint in config.warm:
            if not config.allowed_hosts.allows(endpoint_host(endpoint)):
                allowed = f"hosts that 'peers' allows: {config.allowed_hosts}"
                raise _refuse(given["warm"][0], extra["warm"], allowed)
        return config


def needless(extra: Mapping[str, Any]) -> list[str]:
    """What to say of the keys that only vLLM's own NixlConnector has: a line each."""
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
    """Defaults that vLLM's variables give, each with the name to blame for it."""
    defaults: dict[str, tuple[str, Any]] = {}
    host = environ.get(HOST_VARIABLE)
    if host:
        # vLLM's own connector listens there, and samples of platforms say so; a ticket cannot.
        defaults["host"] = (HOST_VARIABLE, AUTO if host in WILDCARDS else host)
    text = environ.get(PORT_VARIABLE)
    if text:
        number = text.isdecimal() and len(text) <= MAX_PORT_DIGITS
        defaults["port"] = (PORT_VARIABLE, int(text) if number else text)
    return defaults
