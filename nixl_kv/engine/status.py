"""Builds the status of a rank for `nixl-kv status`, on the transfer thread.

The status is an open record: `nixl-kv status` shows every key of it. Add a key here to show more.
`engine/directory.py` builds that of the engine.
"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from nixl_kv.engine.loop import Parts
from nixl_kv.errors import printable, shown_id
from nixl_kv.ids import Rank, short
from nixl_kv.protocol import messages
from nixl_kv.protocol.load import Load, ReadState
from nixl_kv.protocol.peers import PeerState
from nixl_kv.transport.ports import max_descriptors, num_descriptors
from nixl_kv.transport.ucx.detect import ucx_settings

MAX_SETTINGS: Final = 1000  # characters of UCX's settings

LOST_LISTENER: Final = "UCX has closed a listening socket, so peers cannot connect to its memory"


def process_facts() -> dict[str, str | int | float | None]:
    """About the engine's own process, of which a tool's shell knows nothing."""
    settings = ucx_settings(os.environ, "")
    shown = " ".join(f"UCX_{name}={value}" for name, value in sorted(settings.items()))
    return {
        "num_descriptors": num_descriptors(),
        "max_descriptors": max_descriptors(),  # None: unlimited
        "ucx_settings": printable(shown, MAX_SETTINGS),  # of the environment
    }


def build_status(
    parts: Parts,
    rank: Rank,
    roles: str,
    clock: Callable[[], float],
    started_at: float,
    question: messages.StatusRequest,
) -> messages.Status:
    """Read the state of the machines without changing it. `started_at` is a time of `clock`."""
    now = clock()
    peers, links = [*parts.decode.peers.known.values()], parts.control.links()
    offers, loads = [*parts.prefill.offers.values()], parts.decode.loads
    waiting = [load for load in loads if load.lacks_only_blocks]
    serving = parts.serving
    listed = peers[: messages.MAX_LISTED]
    return messages.Status(
        incarnation=parts.description.incarnation,
        facts={
            "engine": parts.decode.reader.engine,
            "rank": rank,
            "roles": roles,
            "uptime_s": now - started_at,
            **process_facts(),
            # None: peers can connect to its memory, or this rank only decodes
            "unreadable": LOST_LISTENER if serving and serving.has_lost_listener else None,
            # for how long the first of the loads has waited for local blocks; None: none waits
            "blocks_waited_s": max((_waited_s(load, now) for load in waiting), default=None),
            "events_since": parts.event_log.since,  # seconds since the epoch; None if no events
            "failures_span_s": parts.event_log.failures_span_s,
        },
        totals={
            "peers": len(peers),
            "links": len(links),
            "offers": len(offers),
            "loads": len(loads),
            "loads_without_blocks": len(waiting),
            "reads": sum(len(agent.reads) for agent in parts.agents.polled),
            "bytes_being_read": sum(
                read.num_bytes for agent in parts.agents.polled for read in agent.reads
            ),
            **{worker.name: len(worker) for worker in parts.workers},
            "events": len(parts.event_log),
        },
        lists={
            "failures": parts.event_log.failures(),
            "peers": [
                {
                    "engine": peer.key.engine,
                    "incarnation": short(peer.key.incarnation),
                    "endpoint": peer.key.endpoint,
                    "state": peer.state.name,
                    **link,
                    "num_failures": peer.failures,  # in a row
                    # None: loads may use it, or an attempt is under way
                    "paused_for_s": (
                        max(0.0, peer.pause_ends_at - now)
                        if peer.state is PeerState.UNUSABLE
                        else None
                    ),
                    "detail": "" if peer.failure is None else peer.failure.detail,
                }
                for peer, link in zip(listed, parts.links.describe(listed), strict=True)
            ],
            "unmapped": [
                # Ranks of this host whose GPU memory no kernel reads.
                {"endpoint": endpoint, "detail": detail}
                for path in parts.agents.peers.paths
                for endpoint, detail in path.unmapped
            ][: messages.MAX_LISTED],
            "links": [asdict(link) for link in links[: messages.MAX_LISTED]],
            "offers": [
                {
                    "request": shown_id(offer.request),
                    "nonce": short(offer.nonce),
                    "num_tokens": offer.prepared.num_tokens,
                    "state": offer.state.name,
                    "waits_for": offer.waits_for,
                    # None: the offer does not expire by itself
                    "ends_in_s": _finite(offer.due_at(max) - now),
                }
                for offer in offers[: messages.MAX_LISTED]
            ],
            "loads": [
                {
                    "request": shown_id(load.request),
                    "nonce": short(load.ticket.nonce),
                    "peer": str(load.peer),
                    "reads": [[read.rank, read.state.name] for read in load.reads.values()],
                    "waits_for": load.waits_for,
                    # None: the load waits for local blocks, without a deadline
                    "late_in_s": _finite(load.deadline - now),
                }
                for load in loads[: messages.MAX_LISTED]
            ],
            "story": [
                {"time": time, **transition._asdict()}  # seconds since the epoch
                for time, transition in parts.event_log.story(question.request)
            ],
        },
    )


def _waited_s(load: Load, now: float) -> float:
    """Seconds since the last of its ranks has granted its blocks."""
    granted = (read.entered_at.get(ReadState.GRANTED, now) for read in load.reads.values())
    return now - max(granted, default=now)


def _finite(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds
