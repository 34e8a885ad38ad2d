"""The `vllm.general_plugins` entry point: makes the connector's name alone enough.

vLLM runs this in every process of every start in the environment, whether the connector is wanted
or not, and lets an exception end that start. So a vLLM that is missing, or has another factory,
costs a line in the log. Where vLLM runs no plugins, the module runs this that has the connector.
"""

from nixl_kv.log_limit import get_logger

logger = get_logger(__name__)


def register() -> None:
    """Tell vLLM's factory where `NixlKVConnector` is; again does nothing."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
            KVConnectorFactory,
        )

        if "NixlKVConnector" not in KVConnectorFactory._registry:  # noqa: SLF001 - no other way
            KVConnectorFactory.register_connector(
                "NixlKVConnector", "nixl_kv.connector.connector", "NixlKVConnector"
            )
    except (ImportError, AttributeError, TypeError, ValueError):
        logger.warning("NixlKVConnector could not be registered by name", exc_info=True)
