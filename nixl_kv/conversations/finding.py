"""The reader's scheduler: which engine to ask for the KV of a prompt, and when to stop waiting.

A decode engine that has read an offer has the prompt's KV, and soon that of its own answer. So the
prefill engine remembers to which engine it gave a prompt, by hashes of some of its blocks. The next
turn's prompt begins alike. The hashes only choose the engine: it finds the longest run of blocks
itself (`index.py`), so a wrong choice costs one question.

No vLLM and no IO here. The scheduler's thread calls everything.
"""

import enum
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from nixl_kv.conversations.owners import Answer, Question
from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Endpoint, Nonce, RequestId, new_nonce
from nixl_kv.protocol.machine import MachineState

# A request waits so long for an answer, and then until the next step begins: answers and late
# questions are looked at only between two steps. Between two H200s of one host an answer comes
# after 3 ms (median; the latest after 7 ms), also while its engine decodes for 64 requests; the
# first one from an engine also needs a connection and that engine's description.
FIND_S: Final = 0.02

# Below this number of tokens, computing costs less than a question and a load. A GPU reads the
# whole model for one token or for 200, and both take 5 to 10 ms. A question takes until the end of
# a step, and a load about two steps more. A busy engine computes other requests meanwhile, and its
# steps are as long as those. Measured on two H200s without load (the shape of Qwen3-8B, prefill not
# compiled): with 64 to 2,048 found tokens, prefill answers 9 to 15 ms later than if it computes
# them; with 4,096, 36 ms earlier.
MIN_TOKENS: Final = 256

# Hashes that are remembered, 160 bytes each. A prompt of 1,000 blocks has 11.
MAX_HASHES: Final = 1 << 16

# Questions whose answers are awaited. Further requests are computed: the owners are busy.
MAX_FINDS: Final = 256


def marks(hashes: Sequence[bytes]) -> tuple[bytes, ...]:
    """The hashes of the 1st, 2nd, 4th, 8th ... and the last block of a prompt.

    If a client changes the history of a conversation, one of them is in its unchanged part, and
    covers at least half of that.
    """
    if not hashes:
        return ()
    powers = (1 << exponent for exponent in range(len(hashes).bit_length()))
    return tuple(hashes[count - 1] for count in dict.fromkeys((*powers, len(hashes))))


class Source(NamedTuple):
    """The engine that may have KV of a prompt."""

    owner: Endpoint  # of its directory
    #: Tokens of the prompt that this engine gave to the owner. If it has more in its own cache, the
    #: prompt continues another conversation than the owner's. Infinity if a router names the owner.
    num_given: float


class OwnerTable:
    """Which engine has read a prompt that begins with some blocks; the least recent one goes."""

    def __init__(self, most: int = MAX_HASHES) -> None:
        self._most = most
        self._owners: OrderedDict[bytes, Endpoint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def clear(self) -> None:
        self._owners.clear()

    def learn(self, hashes: Iterable[bytes], owner: Endpoint) -> None:
        for each in hashes:
            self._owners[each] = owner
            self._owners.move_to_end(each)
        while len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def find(self, hashes: Sequence[bytes], block_size: int) -> Source | None:
        """The owner of the longest beginning of a prompt, by the hashes of all its blocks.

        An unknown prompt of n blocks costs log2(n) look-ups, on the scheduler's thread.
        """
        count = 1 << len(hashes).bit_length()
        while count and (count > len(hashes) or hashes[count - 1] not in self._owners):
            count >>= 1
        # A prompt of which `count * 2` blocks were given would have that mark too. So only the last
        # block of a shorter one is left to find. Seen from the end: most prompts only grow.
        for each in range(min(count * 2 - 1, len(hashes)), 0, -1):
            owner = self._owners.get(hashes[each - 1])
            if owner is not None:
                return Source(owner, each * block_size)
        return None


class SoughtState(MachineState):
    NAMED = enum.auto()  # an owner is known; vLLM has not asked for the KV yet
    BEHIND = enum.auto()  # it waits for another request's load
    RESUMED = enum.auto()  # that load has ended; the request does not wait for one again
    ASKED = enum.auto()  # a question waits for its answer
    FOUND = enum.auto()  # the owner has something; vLLM has allocated no blocks yet
    LOADING = enum.auto()
    LANDED = enum.auto()  # vLLM knows that the KV is there; the workers will report the load
    ABANDONED = enum.auto()  # vLLM has ended the request during its load


class SoughtEvent(MachineState):
    WAITED = enum.auto()  # for another request's load, from now on
    RESUMED = enum.auto()
    ASKED = enum.auto()
    FOUND = enum.auto()
    DROPPED = enum.auto()  # nothing is, or was, to be found
    STARTED = enum.auto()
    LANDED = enum.auto()
    REPORTED = enum.auto()  # by all workers, whether the load was complete or not
    FINISHED = enum.auto()  # vLLM has ended the request


SOUGHT_TRANSITIONS: Final[Mapping[SoughtState, Mapping[SoughtEvent, SoughtState | None]]] = {
    SoughtState.NAMED: {
        SoughtEvent.WAITED: SoughtState.BEHIND,
        SoughtEvent.ASKED: SoughtState.ASKED,
        SoughtEvent.DROPPED: None,
        SoughtEvent.FINISHED: None,
    },
    SoughtState.BEHIND: {
        SoughtEvent.RESUMED: SoughtState.RESUMED,
        SoughtEvent.DROPPED: None,
        SoughtEvent.FINISHED: None,
    },
    SoughtState.RESUMED: {
        SoughtEvent.ASKED: SoughtState.ASKED,
        SoughtEvent.DROPPED: None,
        SoughtEvent.FINISHED: None,
    },
    SoughtState.ASKED: {
        SoughtEvent.FOUND: SoughtState.FOUND,
        SoughtEvent.DROPPED: None,
        SoughtEvent.FINISHED: None,
    },
    SoughtState.FOUND: {
        SoughtEvent.STARTED: SoughtState.LOADING,
        SoughtEvent.DROPPED: None,
        SoughtEvent.FINISHED: None,
    },
    SoughtState.LOADING: {
        SoughtEvent.LANDED: SoughtState.LANDED,
        SoughtEvent.REPORTED: None,
        SoughtEvent.FINISHED: SoughtState.ABANDONED,
    },
    SoughtState.LANDED: {
        SoughtEvent.REPORTED: None,
        SoughtEvent.FINISHED: SoughtState.LANDED,
    },
    SoughtState.ABANDONED: {SoughtEvent.REPORTED: None},
}
"""None ends the record."""

UNASKED: Final = (SoughtState.NAMED, SoughtState.BEHIND, SoughtState.RESUMED)
LOADS: Final = (SoughtState.LOADING, SoughtState.LANDED, SoughtState.ABANDONED)


@dataclass
class First:
    """A request whose KV others want too, from its question to the end of its load."""

    request: RequestId
    behind: list[RequestId] = field(default_factory=list)  # in BEHIND, unless vLLM has ended them


@dataclass
class Finds:
    """The requests whose KV other engines may have, until the workers have reported their loads."""

    ask: Callable[[Question], None]
    clock: Callable[[], float] = time.monotonic
    table: OwnerTable = field(default_factory=OwnerTable)
    _states: dict[RequestId, SoughtState] = field(default_factory=dict)
    _sources: dict[RequestId, Source] = field(default_factory=dict)  # in NAMED, BEHIND, RESUMED
    _asked: dict[RequestId, Question] = field(default_factory=dict)  # in ASKED, the oldest first
    _firsts: dict[bytes, First] = field(default_factory=dict)  # by the first block that they want

    def __len__(self) -> int:
        """How many requests wait for an answer."""
        return len(self._asked)

    def state_of(self, request: RequestId) -> SoughtState | None:
        return self._states.get(request)

    def is_load(self, request: RequestId) -> bool:
        """Whether the workers have yet to report a load of this request."""
        return self._states.get(request) in LOADS

    def move(self, request: RequestId, event: SoughtEvent) -> None:
        state = SOUGHT_TRANSITIONS[self._states[request]][event]
        if state is None:
            del self._states[request]
        else:
            self._states[request] = state
        if event not in (SoughtEvent.WAITED, SoughtEvent.RESUMED):
            self._sources.pop(request, None)
        self._asked.pop(request, None)

    def add(self, request: RequestId, source: Source) -> None:
        self._states[request], self._sources[request] = SoughtState.NAMED, source

    def begin(
        self,
        request: RequestId,
        local: int,
        num_tokens: int,
        make_question: Callable[[Endpoint, Nonce, float], Question],
        wanted: bytes | None = None,
    ) -> bool:
        """Ask for the tokens [local, num_tokens) if that may pay; whether the request waits.

        A request is asked for only once, whatever comes of it. Before that, it may wait once for
        another request that is asked for, or loaded, from the same block on: afterwards this
        engine's own cache has the blocks that both want, and often nothing is left to ask for.
        `wanted` is the hash of that block, the one after `local`; None: no full block follows.
        """
        state, source = self._states.get(request), self._sources.get(request)
        if source is None or state is SoughtState.BEHIND:
            return False
        if source.num_given < local or num_tokens - local < MIN_TOKENS:
            self.move(request, SoughtEvent.DROPPED)
            return False
        first = None if wanted is None else self._firsts.get(wanted)
        if first is not None and state is SoughtState.NAMED:
            self.move(request, SoughtEvent.WAITED)
            first.behind.append(request)
            return True
        if len(self._asked) >= MAX_FINDS:
            self.move(request, SoughtEvent.DROPPED)
            return False
        if first is None and wanted is not None:
            self._firsts[wanted] = First(request)
        question = make_question(source.owner, new_nonce(), self.clock() + FIND_S)
        self.move(request, SoughtEvent.ASKED)
        self._asked[request] = question
        self.ask(question)
        return True

    def awaits(self, answer: Answer) -> bool:
        """Whether a request waits for this answer: it is neither late nor of another question."""
        question = self._asked.get(answer.request)
        return question is not None and question.nonce == answer.nonce

    def finish(self, request: RequestId) -> None:
        """VLLM has ended a request."""
        if request in self._states:
            self.move(request, SoughtEvent.FINISHED)

    def pop_late(self) -> list[RequestId]:
        """The requests that have waited for FIND_S."""
        now, late = self.clock(), list[RequestId]()
        for request, question in self._asked.items():
            if now < question.ends_at:
                break
            late.append(request)
        for request in late:
            self.move(request, SoughtEvent.DROPPED)
        return late

    def clear(self) -> None:
        """Forget all owners, and all requests that do not load; answers have no question then."""
        self.table.clear()
        self._firsts.clear()
        for request in [each for each in self._states if not self.is_load(each)]:
            self.move(request, SoughtEvent.DROPPED)

    def pop_behind(self, has_load: Callable[[RequestId], bool]) -> list[RequestId]:
        """The requests that waited for another one, which neither waits nor loads any longer."""
        ended = [each for each, first in self._firsts.items() if not has_load(first.request)]
        waited = [request for each in ended for request in self._firsts.pop(each).behind]
        behind = [each for each in waited if self.state_of(each) is SoughtState.BEHIND]
        for request in behind:
            self.move(request, SoughtEvent.RESUMED)
        return behind

    def check(self) -> None:
        """Check what the states promise, between two events.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        named = {each for each, state in self._states.items() if state in UNASKED}
        asked = {each for each, state in self._states.items() if state is SoughtState.ASKED}
        if named != set(self._sources) or asked != set(self._asked):
            raise LocalProtocolError(f"{self._states}: {self._sources}, {self._asked}")
