"""What one worker reports to vLLM: every load once, every pinned offer once, and its counters.

vLLM ends the engine for an id that it does not expect. So a load is reported only if it was
commanded and not reported yet, and a sent offer only once vLLM has said that it is pinned.
"""

import logging
from collections.abc import Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from nixl_kv.connector.results import Counts, LoadResult, Result
from nixl_kv.connector.stats import Stats
from nixl_kv.ids import RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import Failure

logger = logging.getLogger(__name__)


class Reports:
    """Lives on the step thread, so it survives whatever happens to the transfer thread."""

    def __init__(self) -> None:
        """Begin expecting nothing."""
        self._loading: set[RequestId] = set()
        self._pinned: set[RequestId] = set()
        self._sent_early: set[RequestId] = set()
        self._stats = Stats()
        self._results = KVConnectorTransferResults()

    def expect(self, commands: Iterable[events.Command]) -> None:
        """These go to the transfer thread; some will be answered."""
        for command in commands:
            if isinstance(command, events.Load):
                self._loading.add(command.request)
            elif isinstance(command, events.Offer):
                self._pin(command.request)

    def note(self, results: Iterable[Result]) -> None:
        """These came from the transfer thread."""
        for result in results:
            match result:
                case LoadResult():
                    self._note_load(result)
                case events.Sent():
                    self._note_sent(result)
                case Counts():
                    for name, amount in result.counts.items():
                        self._stats.count(name, amount)

    def take(self) -> KVConnectorTransferResults:
        """What has ended since the last call."""
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def take_stats(self) -> Stats | None:
        """What was counted since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, Stats()
        return stats

    def _pin(self, request: RequestId) -> None:
        """The blocks are held until they are reported; readers may have been quicker."""
        self._stats.count("offers")
        if request in self._sent_early:
            self._sent_early.remove(request)
            self._results.finished_sending.add(request)
        else:
            self._pinned.add(request)

    def _note_load(self, result: LoadResult) -> None:
        loaded = result.loaded
        if loaded.request not in self._loading:
            return
        self._loading.remove(loaded.request)
        self._results.finished_recving.add(loaded.request)
        if loaded.failure is not None:
            self._results.failed_recving.add(loaded.request)
            self._note_failure(loaded, loaded.failure)
            return
        self._stats.count("loads")
        if loaded.verified:
            self._stats.count("loads_verified")
        self._stats.count("tokens_loaded", loaded.num_tokens)
        self._count_transfers(result)

    def _note_failure(self, loaded: events.Loaded, failure: Failure) -> None:
        self._stats.count("load_failures")
        self._stats.count(f"load_failures_{failure.why.value}")
        peer = loaded.peer
        whence = f"; engine {peer.engine!r} at {peer.endpoint}" if peer else ""
        logger.warning(
            "request %s: KV not loaded: %s (%s%s)",
            loaded.request,
            failure,
            failure.why.value,
            whence,
        )

    def _count_transfers(self, result: LoadResult) -> None:
        for transferred in result.transferred:
            self._stats.count("bytes_read", transferred.num_bytes)
            self._stats.count("descriptors", transferred.num_runs)
        self._stats.transferred(max((t.seconds for t in result.transferred), default=0.0))

    def _note_sent(self, sent: events.Sent) -> None:
        self._stats.count(f"offers_{sent.how.value}")
        if sent.request in self._pinned:
            self._pinned.remove(sent.request)
            self._results.finished_sending.add(sent.request)
        else:
            self._sent_early.add(sent.request)
