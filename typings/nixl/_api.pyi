# What nixl_kv uses of NIXL 1.5.1's Python API, typed. NIXL itself ships no types.
from collections.abc import Sequence
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

_Memory = Literal["VRAM", "DRAM"]
_Indices = npt.NDArray[np.int32]

class nixl_thread_sync_t(Enum):
    NIXL_THREAD_SYNC_RW = ...

class nixl_prepped_dlist_handle:
    def release(self) -> None: ...

class nixl_xfer_handle:
    def release(self) -> None: ...

class nixl_agent_config:
    def __init__(
        self,
        enable_prog_thread: bool = ...,
        *,
        backends: Sequence[str] = ...,
        sync_mode: nixl_thread_sync_t = ...,
    ) -> None: ...

class nixl_agent:
    agent: object  # the C++ object
    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config | None = ...) -> None: ...
    def create_backend(self, backend: str, initParams: dict[str, str] = ...) -> None: ...
    def register_memory(
        self, reg_list: Sequence[tuple[int, int, int, str]], mem_type: _Memory
    ) -> object: ...
    def get_plugin_list(self) -> list[str]: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str | bytes: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: npt.NDArray[np.uint64], mem_type: _Memory
    ) -> nixl_prepped_dlist_handle: ...
    def make_prepped_xfer(
        self,
        operation: Literal["READ", "WRITE"],
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: _Indices,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: _Indices,
    ) -> nixl_xfer_handle: ...
    def transfer(self, handle: nixl_xfer_handle) -> str: ...
    def check_xfer_state(self, handle: nixl_xfer_handle) -> str: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...
