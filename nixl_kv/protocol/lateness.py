"""When a request's time is over, and what is done then about reads that go on."""

from typing import Final

from nixl_kv.protocol import events
from nixl_kv.protocol.events import Failure, Why
from nixl_kv.protocol.receiving import POSTED, State
from nixl_kv.protocol.request import Request

SILENCE_S: Final = 2.0
"""How long a read under way may take whose prefill has left: it may have landed long ago."""

DRAIN_S: Final = 1.0
"""How long a read may take to end by itself after its time, before its agent is given up for it."""


def failure(request: Request, now: float, timeout_s: float) -> Failure | None:
    """Why the request's time is over; None while it is not."""
    if now >= request.time.deadline and not _is_patient(request):
        return Failure(Why.LATE, f"no KV within {timeout_s:g} s")
    silences = [s.silent_since for s in request.sources.values() if s.state in POSTED]
    since = min((silence for silence in silences if silence is not None), default=now)
    if now >= since + SILENCE_S:
        return Failure(Why.LATE, "prefill fell silent while it was read")
    return None


def give_up(request: Request, why: Failure, now: float) -> list[events.Action]:
    """Cancel it. A read cannot be cancelled: one that does not end by itself is abandoned, once."""
    actions = request.cancel(why)
    if request.time.over_since is None:
        request.time.over_since = now
    if now < request.time.over_since + DRAIN_S:
        return actions
    for source in request.sources.values():
        if source.state in POSTED and not source.abandoned:
            source.abandoned = True
            actions.append(events.Abandon(request.request, source.rank))
    return actions


def _is_patient(request: Request) -> bool:
    """Whether it waits for vLLM alone, which may take any time: granted, without blocks."""
    states = {source.state for source in request.sources.values()}
    return request.load is None and request.opened is not None and states <= {State.GRANTED}
