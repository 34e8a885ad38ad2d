"""A KV-cache connector for vLLM: disaggregated prefill and decode over NIXL.

Importing this package opens nothing and starts nothing. vLLM loads `nixl_kv.connector`; a program
that moves KV without vLLM uses `nixl_kv.engine`.
"""

from typing import TYPE_CHECKING, Final

TESTED_VLLM: Final = ("0.31", "0.32", "0.33")
"""The minor releases of vLLM that were tested, oldest first."""

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Find `__version__` when asked, because reading the metadata takes milliseconds."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import metadata  # noqa: PLC0415

        try:
            return metadata.version("nixl_kv")
        except metadata.PackageNotFoundError:  # a checkout that is on the path, not installed
            return "unknown"
