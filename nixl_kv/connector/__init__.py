"""vLLM's side: what vLLM calls, and what turns its objects into ours.

The class is looked up when it is asked for, so that the plugin hook, which every vLLM process runs
at its start, imports none of it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nixl_kv.connector.connector import NixlKVConnector

    NixlConnector = NixlPullConnector = NixlPushConnector = NixlKVConnector

__all__ = ["NixlConnector", "NixlKVConnector", "NixlPullConnector", "NixlPushConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector when vLLM's factory asks for it.

    It also has the names of vLLM's own connectors, by which platforms, and vLLM itself, know what
    speaks NIXL. A process may load no plugins (`VLLM_PLUGINS`), but vLLM's MultiConnector looks up
    the statistics of its children by name: so this registers the name too.
    """
    if name in __all__:
        from vllm.v1.executor import abstract as _  # noqa: F401, PLC0415 - for `register`

        from nixl_kv.connector.connector import NixlKVConnector  # noqa: PLC0415 - see above
        from nixl_kv.connector.plugin import register  # noqa: PLC0415 - see above

        register()
        return NixlKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
