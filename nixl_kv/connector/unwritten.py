"""Offers whose KV may still be on its way to memory when their ticket leaves.

With speculative decoding the model runner copies a step's output to the host before the draft model
runs, which writes the KV of the draft layers. So prefill grants such an offer only after an event
that it recorded on the GPU's stream behind the draft model.

vLLM calls `wait_for_save` behind the draft model in 0.31 to 0.33, in both model runners. It calls
`get_transfer_results` before it in the V1 runner, and from 0.33 on in the V2 runner. The V1 runner
calls no `wait_for_save` on a pipeline rank without the draft model. There the next step's
`bind_connector_metadata` comes behind all of the step.
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
    """The unwritten offers of the current step and of the steps before it, in order."""

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
        """All that the step writes is on the stream; may be called twice for a step."""
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
