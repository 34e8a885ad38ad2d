"""Prompts with images, audio or video: decode loads them, computes them itself, or fails them.

Platforms may give decode something else than prefill had: stand-in embeddings under the picture's
own id, or token ids without media, because decode reads the KV anyway. If decode computed such a
prompt, the answer would be wrong, and vLLM would cache its KV under the id of the real picture. So
the ticket has a hash of prefill's media beside that of the tokens, and the setting `media` says
what decode has. Where decode may not compute a request, the request is loaded, or it fails.

No vLLM here: `vllm_config.py` makes these records, `scheduler_hooks.py` ends the requests that
fail.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from nixl_kv.ids import Nonce, RequestId
from nixl_kv.protocol.ticket import Ticket, context_hash

WITHOUT_TICKET: Final = "no valid ticket proves that decode has the media that prefill had"
PLATFORM: Final = (
    "Dynamo runs in this process and may have sent stand-ins for them; set media to 'ticket'"
)
OTHER_MEDIA: Final = (
    "the ticket is for other media: check that the router sends both engines the same images, "
    "audio and video, or set media to 'ticket' if it sends decode none or stand-ins"
)


# Beside the reasons why decode refuses a ticket.
FAIL_REASONS: Final = ("load", "other_load", "cancelled", "preempted")


@dataclass(frozen=True)
class MediaItem:
    """One image, audio or video, at the positions [begin, end) of a prompt."""

    begin: int
    end: int
    identifier: str  # vLLM's content hash, or the client's uuid
    is_data: bool = True  # as opposed to embeddings, or to something that cannot be told from them
    # Sizes on which the positions of later tokens depend (M-RoPE).
    geometry: bytes = b""


@dataclass(frozen=True)
class Media:
    """The media of one prompt."""

    items: tuple[MediaItem, ...] = ()
    # Positions of the model's placeholder tokens that belong to no item.
    bare: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.items or self.bare)

    @property
    def end(self) -> int:
        """The position after the last token that depends on media."""
        return max((*(item.end for item in self.items), *(at + 1 for at in self.bare)), default=0)

    def before(self, num_tokens: int) -> "Media":
        """The media that begin within the first `num_tokens` tokens."""
        return Media(
            tuple(item for item in self.items if item.begin < num_tokens),
            tuple(at for at in self.bare if at < num_tokens),
        )

    def hash(self, nonce: Nonce) -> str:
        """Hash which media stand where; '' without any. The nonce is the key."""
        if not self:
            return ""
        items = [f"{one.begin} {one.end} {one.identifier}".encode() for one in self.items]
        return context_hash(nonce, self.bare, items)

    def geometries(self) -> Iterator[bytes]:
        for item in self.items:
            if item.geometry:
                yield f"geometry {item.begin} ".encode() + item.geometry


NO_MEDIA: Final = Media()


@dataclass(frozen=True)
class MediaRules:
    """The setting `media` of a decode engine, and whether its platform may send stand-ins."""

    setting: str = "auto"
    has_stand_ins: bool = False  # Dynamo is loaded

    @property
    def ids_may_mislead(self) -> bool:
        """Whether the ids of a prompt's media may be those of other media."""
        return self.setting == "ticket" or self.has_stand_ins

    def why_not_computed(self, media: Media, ticket: Ticket | None) -> str:
        """Why decode may not compute a prompt itself; '' if it may.

        `ticket` is None if the request has none that this engine's key has sealed, or one that
        precedes its offer.
        """
        if self.setting == "own" or not (media or (ticket is not None and ticket.media)):
            return ""
        if self.setting == "ticket":
            return "media is 'ticket', so decode may have stand-ins for the media of this prompt"
        if self.has_stand_ins:
            return PLATFORM
        if ticket is None:
            return WITHOUT_TICKET
        if media.hash(ticket.nonce) != ticket.media:
            return "its media are not those that prefill had"
        if not all(item.is_data for item in media.items):
            return "decode got embeddings instead of its media"
        return ""

    def why_not_loaded(self, media: Media, ticket: Ticket, num_tokens: int) -> str:
        """Why decode refuses a ticket for the first tokens of its prompt; '' if it loads them.

        Decode loads at most `num_tokens` of the prompt and computes the rest.
        """
        compares = self.setting != "ticket"
        if compares and media.before(ticket.num_tokens).hash(ticket.nonce) != ticket.media:
            return OTHER_MEDIA
        if not self.why_not_computed(media, ticket):
            return ""
        if not media:
            return (
                "decode has neither the media of this prompt nor their placeholder tokens, so it "
                "cannot tell where they end; let the router send decode the expanded token ids"
            )
        if media.end > num_tokens:
            return (
                f"its media end at token {media.end}; decode loads {num_tokens} tokens, and may "
                "not compute media itself"
            )
        return ""


class State(enum.Enum):
    LOADING = enum.auto()  # from its arrival until vLLM may run it
    LOADING_ONCE = enum.auto()  # likewise; it fails with its load, but else vLLM may compute it
    LOADED = enum.auto()  # runs on the KV that it loaded, or that vLLM had cached
    FAILED = enum.auto()  # vLLM must end it before it schedules it again


TRANSITIONS: Final = {
    State.LOADING: {State.LOADED, State.FAILED},
    State.LOADING_ONCE: {State.FAILED},
    State.LOADED: {State.FAILED},
    State.FAILED: set[State](),
}


@dataclass
class _MustLoad:
    why: str  # decode may not compute it
    state: State = State.LOADING
    num_tokens: int = 0  # in LOADED: that decode has loaded, or vLLM had cached


class MustLoads:
    """The requests that decode may not compute, until vLLM has finished them, or loaded them."""

    def __init__(self) -> None:
        self._records: dict[RequestId, _MustLoad] = {}
        self._failed: dict[RequestId, tuple[str, str]] = {}  # reason and words, until they are told

    def __contains__(self, request: object) -> bool:
        return request in self._records

    @property
    def loaded(self) -> dict[RequestId, int]:
        """How many tokens of each loaded request decode may not compute."""
        records = self._records.items()
        return {name: one.num_tokens for name, one in records if one.state is State.LOADED}

    def outlasts_load(self, request: RequestId) -> bool:
        """Whether decode may not compute a request even after it has loaded it once."""
        record = self._records.get(request)
        return record is not None and record.state is not State.LOADING_ONCE

    def has_failed(self, request: RequestId) -> bool:
        record = self._records.get(request)
        return record is not None and record.state is State.FAILED

    def add(self, request: RequestId, why: str, *, is_policy: bool = False) -> None:
        """`is_policy`: decode has all that it needs, but on_load_failure is 'fail'.

        Such a request fails if its load does. Without a load, vLLM computes it.
        """
        self._records[request] = _MustLoad(why, State.LOADING_ONCE if is_policy else State.LOADING)

    def on_loaded(self, request: RequestId, num_tokens: int) -> None:
        if not self._forget_policy(request) and self._move(request, State.LOADED):
            self._records[request].num_tokens = num_tokens

    def give_up(self, request: RequestId, reason: str, words: str) -> None:
        """The request will not be loaded, although no load has failed."""
        if not self._forget_policy(request):
            self.fail(request, reason, words)

    def fail(self, request: RequestId, reason: str, words: str) -> None:
        """`reason` is one of the label `reason` of the metric `failed_requests`."""
        if self._move(request, State.FAILED):
            self._failed[request] = (
                reason,
                f"{words}; decode may not compute it: " + (self._records[request].why),
            )

    def pop_failed(self) -> dict[RequestId, tuple[str, str]]:
        """The reason and the words of each request that vLLM must end now."""
        failed, self._failed = self._failed, {}
        return failed

    def forget(self, request: RequestId) -> None:
        self._records.pop(request, None)
        self._failed.pop(request, None)

    def _forget_policy(self, request: RequestId) -> bool:
        record = self._records.get(request)
        if record is None or record.state is not State.LOADING_ONCE:
            return False
        self.forget(request)
        return True

    def _move(self, request: RequestId, to: State) -> bool:
        record = self._records.get(request)
        if record is None or to not in TRANSITIONS[record.state]:
            return False
        record.state = to
        return True
