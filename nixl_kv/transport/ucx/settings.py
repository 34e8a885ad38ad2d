"""Settings of UCX 1.23, without the prefix UCX_, that every agent needs.

Each works around a default of UCX, named beside it. Delete a setting when its default has changed.
"""

from typing import Final

from nixl_kv.transport.base import SEGMENT_FACT

UCX_ENGINE_CONFIG: Final = (
    # Read directly also between GPUs, or within one, on a host without NVLink. There UCX prefers
    # writes over reads where it has the choice; a READ then goes through TCP and the owner's memory
    # copies instead, at 0.4 GB/s on an H100.
    "CUDA_IPC_ENABLE_GET_ZCOPY=on,"
    # Unmap another process's GPU memory after each read. UCX would keep it mapped until this
    # process ends, so the cache of a dead prefill engine would stay allocated: 8 GiB for each
    # restart of one with a cache of 8 GiB, measured between two H200s.
    "CUDA_IPC_CACHE=n,"
    # Connect over TCP in the background: to a host that is cut off, UCX otherwise blocks the
    # calling thread for two minutes. And let reads from such a host end, which they otherwise do
    # not: a connection fails if nothing was acknowledged for 4 s.
    "TCP_CONN_NB=y,TCP_USER_TIMEOUT=4s,TCP_KEEPIDLE=2s,TCP_KEEPINTVL=1s,TCP_KEEPCNT=3,"
    # The same segments on all engines: UCX aborts a reader whose segments are shorter than the
    # sender's. A paced read has to fit into one.
    f"TCP_TX_SEG_SIZE={SEGMENT_FACT},TCP_RX_SEG_SIZE={SEGMENT_FACT}"
)
# UCX listens on every interface. Shared memory, CMA and CUDA IPC are not network devices for it,
# and stay available.
ONLY_LOOPBACK: Final = "NET_DEVICES=lo"
