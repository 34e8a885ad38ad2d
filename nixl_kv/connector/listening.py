"""Where an engine's description is served; checks that address before vLLM loads the weights.

vLLM makes the scheduler, which listens, after the model is loaded. No hook of a connector gets the
configuration earlier: `get_required_kvcache_layout` comes behind the weights in vLLM 0.31 to 0.33.
So vLLM's executors, which load the model in the process that will listen, check first.
"""

import errno
import functools
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from nixl_kv.config import Config
from nixl_kv.errors import ConfigError, get_logger

logger = get_logger(__name__)

WAIT_S: Final = 10.0
"""How long a port may stay in use: the processes of an engine that was killed end in a second or
two, and its successor may start at once."""
PAUSE_S: Final = 0.1

NAMES: Final = ("NixlKVConnector",)
"""Of connectors that need no module path."""

HOW_TO_CHANGE_THE_PORT: Final = (
    "set VLLM_NIXL_SIDE_CHANNEL_PORT (or 'port') to another port for each engine on this machine"
)


def port_of(config: Config, vllm_config: Any) -> int:
    """Data-parallel engines of one host have a port each; 0 stays any free one."""
    index: int = vllm_config.parallel_config.data_parallel_index
    return config.port and config.port + index


def may_move(config: Config, *, is_prefill: bool) -> bool:
    """Whether any other port will do: no ticket names it, and nobody has configured it."""
    return not is_prefill and not config.port_name


def check_address(config: Config, vllm_config: Any, *, is_prefill: bool) -> None:
    """Check that the scheduler can listen; nothing is listened to.

    Raises:
        ConfigError: names the setting, its value and what to do.
    """
    port = port_of(config, vllm_config)
    until = time.monotonic() + WAIT_S
    is_said = False
    while True:
        try:
            _bind(config.host, 0 if may_move(config, is_prefill=is_prefill) else port)
        except OSError as error:  # noqa: PERF203 - the port may become free
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise unusable(config, port, error) from error
            if not is_said:
                logger.warning("port %d is in use; waiting for up to %g s", port, WAIT_S)
            is_said = True
            time.sleep(PAUSE_S)
        else:
            return


def unusable(config: Config, port: int, error: OSError) -> ConfigError:
    """Why the scheduler cannot listen, and what to do."""
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"{config.host_name} is {config.host!r}, which is not an address of this machine; "
            "allowed: 'auto', or an IP address or a network interface of this machine"
        )
    name = config.port_name or "port"
    value = f"{config.port}" + ("" if config.port_name else " (the default)")
    rank = f"; data-parallel rank {port - config.port} listens on {port}"
    return ConfigError(
        f"{name} is {value}{rank if port != config.port else ''}; port {port} of {config.host} "
        f"cannot be used: {error.strerror}; allowed: a free port; {HOW_TO_CHANGE_THE_PORT}"
    )


def check_before_weights(executor: Any) -> None:
    """Have vLLM's class of executors check the address, once per process."""
    begin = executor.__init__
    if getattr(begin, "checks_address", False):
        return

    @functools.wraps(begin)
    def check_and_begin(self: Any, vllm_config: Any, *args: Any, **options: Any) -> None:
        _check(vllm_config)
        begin(self, vllm_config, *args, **options)

    setattr(check_and_begin, "checks_address", True)  # noqa: B010 - mypy knows no such attribute
    executor.__init__ = check_and_begin


def _check(vllm_config: Any) -> None:
    """Only for this connector, and only on the node of an engine where its scheduler is."""
    transfers = _connectors(vllm_config.kv_transfer_config)
    for transfer in filter(_is_ours, transfers):
        if not vllm_config.parallel_config.node_rank_within_dp:
            from nixl_kv.connector.vllm_config import parse_extra  # noqa: PLC0415 - only if wanted

            config = parse_extra(transfer.get("kv_connector_extra_config") or {})
            is_prefill = transfer.get("kv_role") != "kv_consumer"
            check_address(config, vllm_config, is_prefill=is_prefill)


def _connectors(transfer: Any) -> Iterator[Mapping[str, Any]]:
    """The configuration of each connector: those in a MultiConnector, or the only one."""
    if transfer is None:
        return
    if transfer.kv_connector == "MultiConnector":
        yield from transfer.kv_connector_extra_config.get("connectors", ())
        return
    names = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config", "kv_role")
    yield {name: getattr(transfer, name) for name in names}


def _is_ours(transfer: Mapping[str, Any]) -> bool:
    module = transfer.get("kv_connector_module_path")
    if module:
        return str(module).partition(".")[0] == "nixl_kv"
    return transfer.get("kv_connector") in NAMES


def _bind(host: str, port: int) -> None:
    """As `LimitedPort` binds, but without listening: so two that check do not meet each other.

    Raises:
        OSError: if the address is not of this machine, or another socket listens on the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((host, port))
