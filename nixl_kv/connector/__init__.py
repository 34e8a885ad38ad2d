"""Adapts vLLM to the transfer engine.

vLLM's plugin hook imports this package in every process, so the connector is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from nixl_kv.connector.unpromised import import_error

if TYPE_CHECKING:
    from nixl_kv.connector.connector import NixlKVConnector

    NixlConnector = NixlPullConnector = NixlPushConnector = NixlKVConnector

__all__ = [
    "NixlConnector",
    "NixlKVConnector",
    "NixlPullConnector",
    "NixlPushConnector",
]


def __getattr__(name: str) -> Any:
    # vLLM and platforms recognise a NIXL connector by the names of vLLM's own ones.
    if name in __all__:
        from nixl_kv.connector.plugin import register  # noqa: PLC0415 - see above

        try:
            from vllm.v1.executor import abstract as _  # noqa: F401, PLC0415 - `register` wraps it

            from nixl_kv.connector.connector import NixlKVConnector  # noqa: PLC0415 - see above
        except ImportError as error:
            raise import_error(error) from error

        # A process may load no plugins (`VLLM_PLUGINS`), and MultiConnector looks up the
        # statistics of its children by name.
        register()
        return NixlKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
