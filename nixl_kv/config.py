"""`kv_connector_extra_config`, parsed once into a frozen Config.

Everything is checked here, at the start: an unknown key or a bad value raises a ConfigError that
names the key, the value and what is allowed. Nothing else reads options or the environment.
"""

import ipaddress
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from nixl_kv.errors import ConfigError

LAYOUTS: Final = ("auto", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Physical orders of vLLM's packed cache: L layers, B blocks, H heads, N tokens, C content."""

HOST_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
MAX_PORT_DIGITS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Config:
    """What an operator may choose. Times are seconds."""

    host: str = "127.0.0.1"
    """IP address under which decode engines reach this engine's control plane."""

    port: int = 5600
    """TCP port of the engine description; 0 takes any free one. Data-parallel rank r adds r."""

    backends: tuple[str, ...] = ("UCX",)
    """NIXL backends, in order of preference."""

    offer_ttl_s: float = 10.0
    """How long a finished prefill that nobody claims keeps its blocks."""

    lease_s: float = 5.0
    """How long blocks stay pinned after the last sign of life of the reader that claimed them."""

    request_timeout_s: float = 30.0
    """How long a request on decode waits for its blocks before it counts as failed."""

    layout: str = "auto"
    """Physical order of the KV cache to ask vLLM for; 'auto' picks the best that is known good."""

    @property
    def renew_interval_s(self) -> float:
        """Renew five times a lease: three may be lost, with a stall, before the lease runs out."""
        return self.lease_s / 5

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environ: Mapping[str, str]) -> "Config":
        """Build from `kv_connector_extra_config`, with vLLM's two variables as defaults.

        Raises:
            ConfigError: for an unknown key or a value that is not allowed.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config has the unknown key {unknown[0]!r} "
                f"(value {extra[unknown[0]]!r}); allowed keys are {', '.join(known)}"
            )
        given = _from_environment(environ)
        given.update({key: (_name(key), value) for key, value in extra.items()})
        return cls(**{key: _PARSERS[key](name, value) for key, (name, value) in given.items()})


def _name(key: str) -> str:
    return f"kv_connector_extra_config[{key!r}]"


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """Defaults that vLLM's variables give, each with the name to blame for it."""
    found: dict[str, tuple[str, Any]] = {}
    if environ.get(HOST_VARIABLE):
        found["host"] = (HOST_VARIABLE, environ[HOST_VARIABLE])
    text = environ.get(PORT_VARIABLE)
    if text:
        number = text.isdecimal() and len(text) <= MAX_PORT_DIGITS
        found["port"] = (PORT_VARIABLE, int(text) if number else text)
    return found


def _refuse(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}; allowed: {allowed}")


def _host(name: str, value: object) -> str:
    """An address a peer can connect to, as an IP literal: tickets carry no names to resolve."""
    allowed = "an IP address of this machine, or a name that resolves to one; not a wildcard"
    if not isinstance(value, str) or not value:
        raise _refuse(name, value, allowed)
    try:
        literal = socket.getaddrinfo(value, None, type=socket.SOCK_STREAM)[0][4][0]
        address = ipaddress.ip_address(literal)
    except (OSError, ValueError) as error:
        raise _refuse(name, value, allowed) from error
    if address.is_unspecified or address.is_multicast:
        raise _refuse(name, value, allowed)
    return str(address)


def _port(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:  # noqa: PLR2004
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


_PARSERS: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "host": _host,
    "port": _port,
    "backends": _backends,
    "offer_ttl_s": _seconds,
    "lease_s": _seconds,
    "request_timeout_s": _seconds,
    "layout": _layout,
}
