"""Runs before the connector exists: registers its name, and checks its address before the weights.

`register` is the `vllm.general_plugins` entry point, so that `"kv_connector": "NixlKVConnector"`
alone is enough. vLLM runs it in every process of every start, used or not, and an exception would
end that start. If vLLM loads no plugins, `nixl_kv.connector` runs it.
"""

import errno
import functools
import itertools
import logging
import os
import sys
import time
from typing import Any, Final

from nixl_kv import addresses
from nixl_kv.config import Config, own_transfers
from nixl_kv.connector import unpromised
from nixl_kv.errors import ConfigError, get_logger

logger = get_logger(__name__)

EXECUTORS: Final = "vllm.v1.executor.abstract"

# The processes of a killed engine end within two seconds, and its successor may start at once.
PORT_WAIT_S: Final = 10.0
PORT_RETRY_S: Final = 0.1


def register() -> None:
    """Tell vLLM's factory where `NixlKVConnector` is. May be called again."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
            KVConnectorFactory,
        )

        if "NixlKVConnector" not in KVConnectorFactory._registry:  # noqa: SLF001 - no other way
            KVConnectorFactory.register_connector(
                "NixlKVConnector", "nixl_kv.connector", "NixlKVConnector"
            )
        # A spawned engine process has loaded the executors by now. A forked one inherits the
        # wrapper, because its parent has looked the connector up.
        if EXECUTORS in sys.modules:
            check_before_weights(sys.modules[EXECUTORS].Executor)
    except (ImportError, AttributeError, TypeError, ValueError):
        logger.warning("vLLM's factory did not accept the name NixlKVConnector", exc_info=True)


def log_like_vllm() -> None:
    """Use vLLM's handlers and level, which vLLM gives only to loggers under its own name."""
    ours, vllms = logging.getLogger("nixl_kv"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(vllms.handlers)
        ours.setLevel(vllms.level)
        ours.propagate = vllms.propagate


def port_of(config: Config, vllm_config: Any) -> int:
    """The port to serve the description on, one per data-parallel engine; 0 means any free port."""
    index: int = vllm_config.parallel_config.data_parallel_index
    return config.port and config.port + index


def may_move(config: Config, *, is_prefill: bool) -> bool:
    """Whether another port would do: no ticket names it, and the operator did not choose it."""
    return not is_prefill and not config.port_name


def check_address(config: Config, vllm_config: Any, *, is_prefill: bool) -> None:
    """Check that the scheduler will be able to listen; waits up to PORT_WAIT_S for its port."""
    port = port_of(config, vllm_config)
    until = time.monotonic() + PORT_WAIT_S
    for attempt in itertools.count():
        try:
            addresses.try_bind(config.host, 0 if may_move(config, is_prefill=is_prefill) else port)
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise _cannot_listen(config, port, error) from error
        if attempt == 0:
            logger.warning("port %d is in use; waiting for up to %g s", port, PORT_WAIT_S)
        time.sleep(PORT_RETRY_S)


def _cannot_listen(config: Config, port: int, error: OSError) -> ConfigError:
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
        f"cannot be used: {error.strerror}; allowed: a free port; set VLLM_NIXL_SIDE_CHANNEL_PORT "
        "(or 'port') to another port for each engine on this machine"
    )


def check_key_and_backends(config: Config) -> None:
    """Raise a ConfigError for a key or a NIXL backend that the engine could not use."""
    from nixl_kv.engine.trust import Trust  # noqa: PLC0415 - not in every process

    Trust.of(config)
    if config.backends != Config.backends:
        from nixl_kv.transport.nixl import check_backends  # noqa: PLC0415 - takes seconds

        check_backends(config.backends)


def check_before_weights(executor: Any) -> None:
    """Make vLLM's executor class check settings before it loads the model. Wraps it once."""
    # The scheduler, which listens, is created after the model is loaded, in the same process as
    # the executor. No hook of a connector gets the configuration earlier: vLLM 0.31 to 0.33 call
    # `get_required_kvcache_layout` after loading the weights.
    begin = executor.__init__
    if getattr(begin, "checks_address", False):
        return

    @functools.wraps(begin)
    def check_and_begin(self: Any, vllm_config: Any, *args: Any, **options: Any) -> None:
        whole = vllm_config.kv_transfer_config
        for transfer in () if whole is None else own_transfers(vars(whole)):
            if not vllm_config.parallel_config.node_rank_within_dp:  # the scheduler's node
                extra = transfer.get("kv_connector_extra_config") or {}
                is_prefill = transfer.get("kv_role") != "kv_consumer"
                config = Config.parse(extra, os.environ)
                unpromised.check(unpromised.Engine(vllm_config, config, is_prefill=is_prefill))
                check_address(config, vllm_config, is_prefill=is_prefill)
                check_key_and_backends(config)
        begin(self, vllm_config, *args, **options)

    setattr(check_and_begin, "checks_address", True)  # noqa: B010 - mypy knows no such attribute
    executor.__init__ = check_and_begin


def own_config(vllm_config: Any) -> tuple[Config, tuple[str, ...]]:
    """The settings and the roles of this connector, also if it is a child of a MultiConnector."""
    whole = vars(vllm_config.kv_transfer_config)
    transfer = next(iter(own_transfers(whole)), whole)
    roles = {"kv_producer": ("prefill",), "kv_consumer": ("decode",)}
    config = Config.parse(transfer.get("kv_connector_extra_config") or {}, os.environ)
    return config, roles.get(transfer.get("kv_role", ""), ("prefill", "decode"))
