"""The interface of a feature's half in vLLM's scheduler process; `Scheduler` knows no feature."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from nixl_kv.connector.legs import Leg
from nixl_kv.connector.stats import LoadReport, OfferReport, Stats
from nixl_kv.engine.directory import Correspondent, DirectoryServer
from nixl_kv.ids import Incarnation, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import ContentFacts, Find, Found


class SchedulerPart:
    """Each method does nothing unless a part overrides it. All run on vLLM's scheduler thread."""

    #: Whether vLLM must compute the tokens of failed loads, whatever `on_load_failure` says.
    reads = False
    #: How this engine hashes its cached blocks, if other engines may ask for them.
    facts: ContentFacts | None = None
    #: Set once this engine listens.
    directory: DirectoryServer | None = None

    @property
    def find(self) -> Callable[[Find], Found] | None:
        """Answers another engine's question for cached blocks, on the directory's thread."""
        return None

    @property
    def asks(self) -> Correspondent | None:
        """Asks other engines, on the directory's thread."""
        return None

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """VLLM's scheduler has its cache; no request has blocks yet."""

    def begin_life(self, incarnation: Incarnation) -> None:
        """The engine is about to be described to others: it is new, or some of its ranks are."""

    def on_registered(self) -> list[events.Command]:
        """All ranks are new, perhaps after a wake-up; returns commands for them."""
        return []

    def on_new_request(self, request: Request, leg: Leg) -> None:
        """A request has come that this engine computes, as far as it does not find its KV."""

    def on_match(self, request: Request, num_computed_tokens: int) -> None:
        """VLLM is about to ask how many tokens to load after these."""

    def on_load(self, request: RequestId) -> bool:
        """A load begins; returns whether it is this part's."""
        del request
        return False

    def is_load(self, request: RequestId) -> bool:
        """Whether a load that the workers have yet to report is this part's."""
        del request
        return False

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> list[events.Command]:
        """Commands for the ranks; called once for each step, also for an empty one."""
        del scheduler_output
        return []

    def request_finished(self, request: Request, *, is_offered: bool) -> dict[str, Any] | None:
        """VLLM has ended a request; returns fields for its answer if that has no others."""
        del request, is_offered
        return None

    def on_landed(self, requests: Collection[RequestId]) -> None:
        """VLLM hears that these loads are complete, before the workers report them."""

    def on_loads_ended(self, ended: Mapping[RequestId, LoadReport]) -> None:
        """All workers have reported these loads."""

    def on_offers_ended(
        self, sent: Collection[RequestId], ended: Mapping[RequestId, OfferReport]
    ) -> None:
        """The offers of the requests `sent` have ended, some without a report."""

    def may_seek(self, may: bool) -> None:  # noqa: FBT001 - one fact
        """Whether vLLM computes a request whose load fails; `SchedulerHooks` tells."""

    def take_answers(self) -> None:
        """VLLM is about to schedule a step."""

    def reset_cache(self, epoch: int, weights: str) -> None:
        """Neither read nor show KV from before this call. The halves are reset afterwards.

        `epoch` is that of later tickets, and `weights` the label of later KV.
        """

    def count(self, stats: Stats) -> None:
        """Add what other threads have counted."""
