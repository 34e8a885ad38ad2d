"""Offers whose KV may still be on its way to memory when their ticket leaves.

With speculative decoding the model runner copies a step's output to the host before the draft model
runs, which writes the KV of the draft layers. So such offers are granted only after an event on the
GPU's stream that was recorded behind all of the step.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from vllm.platforms import current_platform

from nixl_kv.ids import Nonce
from nixl_kv.protocol import events


@dataclass
class _Step:
    nonces: list[Nonce]
    written: torch.Event | None  # None where a step is complete when it returns


class UnwrittenOffers:
    """Those of the step that is being made, and of the steps before it, in order."""

    def __init__(self) -> None:
        """Start with none."""
        self._current: list[Nonce] = []
        self._steps: deque[_Step] = deque()

    def add(self, commands: Iterable[events.Command]) -> None:
        """The commands of a step that begins."""
        self._current += [
            command.nonce
            for command in commands
            if isinstance(command, events.PrepareOffer) and not command.is_written
        ]

    def on_step_enqueued(self) -> None:
        """All that the step writes is on the stream."""
        if self._current:
            self._steps.append(_Step(self._current, _record_event()))
            self._current = []

    def pop_written(self) -> list[events.Command]:
        """The offers that are written by now."""
        commands: list[events.Command] = []
        while self._steps and (self._steps[0].written is None or self._steps[0].written.query()):
            commands += map(events.MarkWritten, self._steps.popleft().nonces)
        return commands


def _record_event() -> torch.Event | None:
    if current_platform.is_cpu():
        return None
    event = torch.Event(current_platform.device_type)
    event.record()
    return event
