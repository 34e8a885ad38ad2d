"""The `vllm.general_plugins` entry point: makes the connector's name alone enough.

It also has vLLM's executors check the connector's address, where this process has loaded them.

vLLM runs this in every process of every start in the environment, whether the connector is wanted
or not, and lets an exception end that start. So a vLLM that is missing, or has another factory,
costs a line in the log. Where vLLM runs no plugins, the module runs this that has the connector.
"""

import sys

from nixl_kv.connector.listening import check_before_weights
from nixl_kv.errors import get_logger

logger = get_logger(__name__)

EXECUTORS = "vllm.v1.executor.abstract"


def register() -> None:
    """Tell vLLM's factory where `NixlKVConnector` is; again does nothing."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
            KVConnectorFactory,
        )

        if "NixlKVConnector" not in KVConnectorFactory._registry:  # noqa: SLF001 - no other way
            KVConnectorFactory.register_connector(
                "NixlKVConnector", "nixl_kv.connector", "NixlKVConnector"
            )
        # An engine's process that was spawned has loaded it by now; one that is forked inherits
        # what its parent does when it looks the connector up.
        if EXECUTORS in sys.modules:
            check_before_weights(sys.modules[EXECUTORS].Executor)
    except (ImportError, AttributeError, TypeError, ValueError):
        logger.warning("NixlKVConnector could not be registered by name", exc_info=True)
