"""A NIXL agent as vLLM's own connector makes it: a thread that spins, and four that copy.

`InTreeAgent` reads what our plan names, so that only the agents differ. While an agent lives its
thread takes a core, so it should live no longer than it is measured.
"""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import nixl._api as api
import torch

from lab.bench.bulk import Source
from nixl_kv.geometry.layout import CacheLayout, Memory, Table
from nixl_kv.geometry.plan import Plan, plan
from nixl_kv.reading.agent import READING_PAUSE_S

NUM_THREADS: Final = 4


def make_agent() -> Any:
    """With what vLLM 0.32 sets by default: threads, and telemetry."""
    nixl: Any = api
    config = nixl.nixl_agent_config(num_threads=NUM_THREADS, capture_telemetry=True)
    return nixl.nixl_agent(f"in-tree-{secrets.token_hex(8)}", config)


def wait_until_done(agent: Any, handles: Iterable[Any]) -> None:
    """Until all these transfers have ended; they are looked at as often as ours.

    Raises:
        RuntimeError: if one did not end well.
    """
    for handle in handles:
        while (state := agent.check_xfer_state(handle)) == "PROC":
            time.sleep(READING_PAUSE_S)
        if state != "DONE":
            raise RuntimeError(f"the in-tree agent's read ended as {state}")


class InTreeAgent:
    """Of one rank's memory."""

    def __init__(self, memory: torch.Tensor, gpu: int) -> None:
        """Register it."""
        self._agent: Any = make_agent()
        self._kind: Memory = "DRAM" if gpu < 0 else "VRAM"
        self._gpu = gpu
        self._memory = memory  # NIXL does not keep it
        self._address = memory.data_ptr()
        region = (self._address, memory.numel(), max(0, gpu), "")
        self._registered = self._agent.register_memory([region], self._kind)
        self._plans: list[tuple[Plan, Any, Any]] = []

    @property
    def source(self) -> Source:
        """How its memory is read."""
        return Source(bytes(self._agent.get_agent_metadata()), self._address, self._gpu)

    def join(self, layout: CacheLayout, remotes: Mapping[Source, CacheLayout]) -> None:
        """Prepare to read what this rank and each of these have in common."""
        for source, theirs in remotes.items():
            peer = self._agent.add_remote_agent(source.agent)
            common = plan(layout, theirs)
            mine = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", common.local, self._kind)
            its = self._agent.prep_xfer_dlist(peer, common.remote, self._kind)
            self._plans.append((common, mine, its))

    def read(self, local: Sequence[int], remote: Sequence[int], tokens: int) -> float:
        """Read a prompt in these blocks; seconds from the first post to the end of all.

        Raises:
            RuntimeError: if that failed.
        """
        indices = [
            common.reads([Table.of(local)], [Table.of(remote)], range(tokens))
            for common, _, _ in self._plans
        ]
        begin = time.perf_counter()
        handles = []
        for (_, mine, its), reads in zip(self._plans, indices, strict=True):
            handle = self._agent.make_prepped_xfer("READ", mine, reads.local, its, reads.remote)
            self._agent.transfer(handle)
            handles.append(handle)
        wait_until_done(self._agent, handles)
        took = time.perf_counter() - begin
        for handle in handles:
            self._agent.release_xfer_handle(handle)
        return took

    def close(self) -> None:
        """Its threads end with it."""
        self._plans.clear()
        self._agent.deregister_memory(self._registered)
        self._agent = None
