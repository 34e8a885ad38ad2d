"""Decode's scheduler: which requests load KV, and into which blocks. It needs no vLLM."""

from collections.abc import Sequence
from typing import Any

import pytest

from nixl_kv.config import Config
from nixl_kv.connector.decode import (
    REMEMBER_S,
    SCHEDULED_TRANSITIONS,
    DecodeScheduler,
    Prompt,
    ScheduledEvent,
    ScheduledState,
)
from nixl_kv.connector.paging import Paging, StatePaging
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import RemoteProtocolError, TicketRefused
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Incarnation, Nonce, RequestId
from nixl_kv.protocol.events import CancelLoad, PrepareLoad, StartLoad
from nixl_kv.protocol.ticket import FIELD, SealedTicket, Ticket, context_hash
from support.records import D1, D2, ENGINE_LIFE, hex32, ticket_for
from support.stepped import Clock

TOKEN_IDS = list(range(20, 40))
SIZE = 4
"""Tokens of a block."""
PAGING = Paging(0, SIZE, 0)

TABLE = [11, 12, 13, 14, 15]


def prompt_of(request: RequestId = D1, token_ids: Sequence[int] = TOKEN_IDS) -> Prompt:
    return Prompt(request, len(token_ids), token_ids)


def offered(number: int = 1, **changed: Any) -> Ticket:
    return ticket_for(TOKEN_IDS, Nonce(hex32(number)), **changed)


accept = SealedTicket.parse


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def decode(clock: Clock) -> DecodeScheduler:
    return DecodeScheduler([PAGING], accept, clock=clock)


def started(decode: DecodeScheduler) -> list[StartLoad]:
    return [command for command in decode.build_connector_meta() if isinstance(command, StartLoad)]


# --- on arrival


def test_a_ticket_is_asked_for_on_arrival(decode: DecodeScheduler) -> None:
    decode.on_new_request(prompt_of(), offered().params(None))
    (command,) = decode.build_connector_meta()
    assert isinstance(command, PrepareLoad)
    assert (command.request, command.ticket) == (D1, offered())
    assert len(command.claim) == 32
    assert decode.build_connector_meta() == []


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "kv_transfer_params lacks the field 'nixl_kv_ticket'"),
        (
            offered(num_tokens=21).params(None),
            "another prompt: 21 tokens there, 20 here; check that",
        ),
        (
            offered(2, context=offered(1).context).params(None),
            "another prompt: 20 tokens on both sides, but others, .* have the same model",
        ),
    ],
    ids=["no ticket", "more tokens than the prompt", "the context of another offer of this prompt"],
)
def test_an_invalid_ticket_asks_no_engine(
    decode: DecodeScheduler, params: object, words: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode.on_new_request(prompt_of(), params)
    assert decode.build_connector_meta() == []
    assert decode.get_num_new_matched_tokens(D1, 0) == (0, False)


@pytest.mark.parametrize("is_rejected", [False, True], ids=["", "rejected by the frontend"])
def test_a_ticket_that_is_refused_connects_nowhere_and_does_not_burn_the_true_one(
    *, is_rejected: bool
) -> None:
    trust = Trust.of(Config.parse({"insecure": True}, {}))
    decode = DecodeScheduler([PAGING], trust.check)
    for forged in (offered(host="10.0.0.1").params(None), offered().params(b"x" * 32)):
        for params in (forged, {**forged, FIELD: forged[FIELD].replace("9.", "8.", 1)}):
            with pytest.raises(RemoteProtocolError):
                decode.on_new_request(prompt_of(), params, is_rejected=is_rejected)
    with pytest.raises(RemoteProtocolError, match="another prompt"):
        decode.on_new_request(prompt_of(D2, [*TOKEN_IDS[:-1], 0]), offered().params(None))
    assert decode.build_connector_meta() == []
    decode.on_new_request(prompt_of(), offered().params(None))
    assert len(decode.build_connector_meta()) == 1


def test_a_ticket_is_good_for_one_request(decode: DecodeScheduler, clock: Clock) -> None:
    """The children of a request with n > 1 carry the same one: all but one compute."""
    decode.on_new_request(prompt_of(D1), offered().params(None))
    for seconds in (0, REMEMBER_S):
        clock.now += seconds
        with pytest.raises(RemoteProtocolError, match="was used before"):
            decode.on_new_request(prompt_of(D2), offered().params(None))
    (command,) = decode.build_connector_meta()
    assert isinstance(command, PrepareLoad)
    assert command.request == D1
    clock.now += 1
    decode.on_new_request(prompt_of(D2), offered().params(None))
    assert len(decode._used) == 1, "prefill denies it"


def test_a_request_that_came_here_is_not_released_by_the_frontend_too(
    decode: DecodeScheduler,
) -> None:
    """vLLM rejects each request once more whose client hung up, whatever has become of it."""
    decode.on_new_request(prompt_of(D1), offered().params(None))
    decode.build_connector_meta()
    decode.on_new_request(prompt_of(D2, [0]), offered().params(None), is_rejected=True)
    assert decode.build_connector_meta() == []
    decode.request_finished(D1)
    assert decode.build_connector_meta() == [CancelLoad(D1)]
    decode.on_new_request(prompt_of(D2, [0]), offered().params(None), is_rejected=True)
    assert decode.build_connector_meta() == []


# --- cache resets


@pytest.mark.parametrize("num_resets", [1, 2, 3])
def test_a_ticket_from_before_any_of_the_resets_is_refused(
    decode: DecodeScheduler, num_resets: int
) -> None:
    """Each incarnation that this engine knew counts, whichever reset it was known before."""
    for number in range(num_resets):
        life = {"incarnation": Incarnation(hex32(100 + number)), "epoch": 3}
        decode.on_new_request(prompt_of(D1), offered(number, **life).params(None))
        decode.request_finished(D1)
        decode.reset_cache()
    for number in range(num_resets):
        life = {"incarnation": Incarnation(hex32(100 + number))}
        for epoch in (2, 3):
            old = offered(200 + 10 * number + epoch, epoch=epoch, **life)
            with pytest.raises(TicketRefused, match=f"epoch is {epoch}, from before"):
                decode.on_new_request(prompt_of(D1), old.params(None))
        new = offered(300 + number, epoch=4, **life)
        decode.on_new_request(prompt_of(RequestId(f"n{number}")), new.params(None))


def test_a_reset_without_a_load_since_the_last_one_forgets_nothing(
    decode: DecodeScheduler,
) -> None:
    decode.on_new_request(prompt_of(D1), offered(1).params(None))
    for number in range(2, 5):
        decode.reset_cache()
        with pytest.raises(TicketRefused, match="from before this engine's cache was reset"):
            decode.on_new_request(prompt_of(D2), offered(number).params(None))


# --- how much is loaded


@pytest.mark.parametrize(
    ("num_tokens", "local", "computed", "expected"),
    [
        pytest.param(20, 0, 1, (19, True), id="all but the last token"),
        pytest.param(20, 8, 1, (11, True), id="beyond the local tokens"),
        pytest.param(20, 18, 1, (1, True), id="one token"),
        pytest.param(20, 19, 1, (0, False), id="nothing"),
        pytest.param(12, 0, 1, (12, True), id="a ticket of a part"),
        pytest.param(20, 16, 3, (1, True), id="drafts look ahead"),
        pytest.param(3, 0, 3, (3, True), id="drafts look ahead, prefill computed far less"),
    ],
)
def test_at_most_all_but_the_last_tokens_are_loaded(
    num_tokens: int, local: int, computed: int, expected: tuple[int, bool]
) -> None:
    decode = DecodeScheduler([PAGING], accept, computed=computed)
    decode.on_new_request(prompt_of(), offered(num_tokens=num_tokens).params(None))
    for _ in range(3):  # vLLM asks as often as it likes
        assert decode.get_num_new_matched_tokens(D1, local) == expected
    assert len(decode.build_connector_meta()) == 1


def test_a_prompt_that_is_computed_whole_releases_prefill() -> None:
    """Decode's draft modules look as far ahead as the prompt is long."""
    decode = DecodeScheduler([PAGING], accept, computed=3)
    prompt = TOKEN_IDS[:2]
    context = context_hash(offered().nonce, prompt, [])
    short = offered(num_tokens=2, context=context)
    decode.on_new_request(prompt_of(D1, prompt), short.params(None))
    assert decode.get_num_new_matched_tokens(D1, 0) == (0, False)
    decode.update_state_after_alloc(D1, [TABLE], 0)
    assert decode.build_connector_meta()[1:] == [CancelLoad(D1)]
    decode.request_finished(D1)
    assert decode.build_connector_meta() == []


# --- blocks


@pytest.mark.parametrize(
    ("local", "end", "second", "tables"),
    [
        pytest.param(0, 19, None, [Table.of(TABLE)], id="all"),
        pytest.param(8, 19, None, [Table.of([13, 14, 15], first=2)], id="from a block's edge"),
        pytest.param(7, 12, None, [Table.of([12, 13], first=1)], id="from within a block"),
        pytest.param(
            4,
            19,
            (Paging(1, 8, 0), [0, 0, 23]),
            [Table.of([12, 13, 14, 15], first=1), Table.of([23], first=2)],
            id="a group with blocks of its own, two of them null",
        ),
        pytest.param(
            12,
            19,
            (StatePaging(1, 16), [0, 23]),
            [Table.of([14, 15], first=3), Table.of([23], first=18)],
            id="a state",
        ),
    ],
)
def test_a_load_starts_with_the_blocks_of_its_tokens(
    local: int, end: int, second: tuple[Paging, list[int]] | None, tables: list[Table]
) -> None:
    groups = [(PAGING, TABLE), *([second] if second else [])]
    decode = DecodeScheduler([paging for paging, _ in groups], accept)
    decode.on_new_request(prompt_of(), offered().params(None))
    decode.get_num_new_matched_tokens(D1, 0)
    decode.get_num_new_matched_tokens(D1, local)  # vLLM's last question counts
    decode.update_state_after_alloc(D1, [table for _, table in groups], end - local)
    assert started(decode) == [StartLoad(D1, local, end, tuple(tables))]


def test_a_load_is_started_once(decode: DecodeScheduler) -> None:
    """vLLM allocates again after the load, and after a failed one asks again."""
    decode.on_new_request(prompt_of(), offered().params(None))
    decode.get_num_new_matched_tokens(D1, 0)
    decode.update_state_after_alloc(D1, [TABLE], 19)
    assert len(started(decode)) == 1
    assert decode.get_num_new_matched_tokens(D1, 0) == (0, False)
    decode.update_state_after_alloc(D1, [TABLE], 0)
    decode.update_state_after_alloc(D1, [TABLE], 19)
    assert decode.build_connector_meta() == []


@pytest.mark.parametrize("is_started", [False, True])
def test_a_request_that_ends_cancels_its_load_once(
    decode: DecodeScheduler, *, is_started: bool
) -> None:
    """The cancellation of a load that was reported long ago does nothing."""
    decode.on_new_request(prompt_of(), offered().params(None))
    if is_started:
        decode.update_state_after_alloc(D1, [TABLE], 19)
    decode.build_connector_meta()
    decode.request_finished(D1)
    decode.request_finished(D1)
    assert decode.build_connector_meta() == [CancelLoad(D1)]


def load_in(decode: DecodeScheduler, state: ScheduledState) -> None:
    """Bring a load into a state, as vLLM's hooks do."""
    if state is ScheduledState.REFUSED:
        decode.refuse(D1, len(TOKEN_IDS))
        return
    if state is ScheduledState.SOUGHT:
        decode.seek(D1, len(TOKEN_IDS))
        return
    is_early = state in (ScheduledState.EARLY, ScheduledState.ASIDE)
    decode.on_new_request(prompt_of(), offered(is_early=is_early).params(None))
    if state is ScheduledState.ASIDE:
        decode.get_num_new_matched_tokens(D1, 0)
    if state in (ScheduledState.STARTED, ScheduledState.RETRACTED):
        decode.update_state_after_alloc(D1, [TABLE], 19)
    if state is ScheduledState.RETRACTED:
        decode.reset_cache()


@pytest.mark.parametrize(
    ("state", "event", "after"),
    [(state, *move) for state, moves in SCHEDULED_TRANSITIONS.items() for move in moves.items()],
    ids=lambda each: getattr(each, "name", "over"),
)
def test_each_transition_of_a_load(
    decode: DecodeScheduler,
    state: ScheduledState,
    event: ScheduledEvent,
    after: ScheduledState | None,
) -> None:
    load_in(decode, state)
    assert decode._loads[D1].state is state
    match event:
        case ScheduledEvent.COMPUTING:
            decode.on_ready([D1])
        case ScheduledEvent.MISSED:
            decode.get_num_new_matched_tokens(D1, 0)
        case ScheduledEvent.FOUND:
            assert decode.on_found(D1, offered(), b"run")
        case ScheduledEvent.ALLOCATED:
            decode.update_state_after_alloc(D1, [TABLE], 19)
        case ScheduledEvent.RESET:
            decode.reset_cache()
    load = decode._loads.get(D1)
    assert (None if load is None else load.state) is after
    waits = after in (ScheduledState.ASIDE, ScheduledState.SOUGHT)
    assert decode.aside == ({D1} if waits else set())


# --- KV that another engine has cached


def test_a_sought_request_waits_then_loads_the_found_blocks(decode: DecodeScheduler) -> None:
    decode.seek(D1, len(TOKEN_IDS))
    assert decode.get_num_new_matched_tokens(D1, 4) == (None, False)
    assert decode.aside == {D1}
    assert decode.on_found(D1, offered(num_tokens=12), b"run", least=8)
    assert decode.aside == set()
    (prepare,) = decode.build_connector_meta()
    assert isinstance(prepare, PrepareLoad)
    assert (prepare.ticket, prepare.found) == (offered(num_tokens=12), b"run")
    assert decode.get_num_new_matched_tokens(D1, 4) == (8, True)
    decode.update_state_after_alloc(D1, [TABLE], 8)
    (start,) = started(decode)
    assert (start.begin, start.end) == (4, 12)


def test_the_last_token_of_a_prompt_is_computed_also_if_all_was_found(
    decode: DecodeScheduler,
) -> None:
    decode.seek(D1, len(TOKEN_IDS))
    decode.on_found(D1, offered(num_tokens=len(TOKEN_IDS)), b"run")
    assert decode.get_num_new_matched_tokens(D1, 0) == (len(TOKEN_IDS) - 1, True)


@pytest.mark.parametrize("when", ["while it is sought", "when it is ready"])
def test_a_find_that_begins_after_the_own_hit_is_not_loaded(
    decode: DecodeScheduler, when: str
) -> None:
    """While a request waits, vLLM may evict the blocks before the other engine's run."""
    decode.seek(D1, len(TOKEN_IDS))
    decode.get_num_new_matched_tokens(D1, 8)
    assert decode.on_found(D1, offered(num_tokens=16), b"run", begin=8)
    if when == "when it is ready":
        assert decode.get_num_new_matched_tokens(D1, 8) == (8, True)
    decode.build_connector_meta()
    assert decode.get_num_new_matched_tokens(D1, 4) == (0, False)
    assert decode.build_connector_meta() == [CancelLoad(D1)]
    assert decode.num_open == 0


def test_an_own_hit_may_shrink_within_the_blocks_that_were_found(decode: DecodeScheduler) -> None:
    decode.seek(D1, len(TOKEN_IDS))
    decode.get_num_new_matched_tokens(D1, 12)
    assert decode.on_found(D1, offered(num_tokens=16), b"run", begin=8)
    assert decode.get_num_new_matched_tokens(D1, 8) == (8, True)


@pytest.mark.parametrize("local", [5, 12, 16])
def test_a_find_that_is_too_short_is_not_loaded(decode: DecodeScheduler, local: int) -> None:
    decode.seek(D1, len(TOKEN_IDS))
    decode.get_num_new_matched_tokens(D1, local)
    assert not decode.on_found(D1, offered(num_tokens=12), b"run", least=8)
    assert decode.get_num_new_matched_tokens(D1, local) == (0, False)
    assert (decode.aside, decode.build_connector_meta()) == (set(), [])


@pytest.mark.parametrize("changed", [{"weights": "other"}, {"epoch": 0}], ids=["label", "epoch"])
def test_a_find_of_other_weights_is_not_loaded(
    decode: DecodeScheduler, changed: dict[str, Any]
) -> None:
    decode.on_new_request(prompt_of(D2), offered(2).params(None))
    decode.reset_cache()
    decode.build_connector_meta()
    decode.seek(D1, len(TOKEN_IDS))
    decode.get_num_new_matched_tokens(D1, 0)
    assert not decode.on_found(D1, offered(**changed), b"run")
    assert decode.get_num_new_matched_tokens(D1, 0) == (0, False)
    assert (decode.aside, decode.build_connector_meta()) == (set(), [])


@pytest.mark.parametrize(
    ("told", "epoch", "is_found"), [(2, 2, False), (2, 3, True), (None, 0, False), (None, 9, False)]
)
def test_an_engine_that_was_met_before_a_reset_must_have_reset_since(
    decode: DecodeScheduler, told: int | None, epoch: int, *, is_found: bool
) -> None:
    """If it has told no epoch before, nothing shows that it has."""
    decode.on_met(ENGINE_LIFE, told)
    decode.on_met(ENGINE_LIFE, None)
    decode.reset_cache()
    decode.seek(D1, len(TOKEN_IDS))
    assert decode.on_found(D1, offered(epoch=epoch), b"run") == is_found

    decode.on_met(ENGINE_LIFE, epoch)
    decode.reset_cache()
    decode.seek(D2, len(TOKEN_IDS))
    assert decode.on_found(D2, offered(2, epoch=epoch + 1), b"run")


@pytest.mark.parametrize("end", ["not found", "finished", "reset", "allocated"])
def test_a_sought_request_that_is_not_found_leaves_nothing(
    decode: DecodeScheduler, end: str
) -> None:
    decode.seek(D1, len(TOKEN_IDS))
    decode.get_num_new_matched_tokens(D1, 0)
    match end:
        case "not found":
            decode.on_not_found(D1)
        case "finished":
            decode.request_finished(D1)
        case "reset":
            decode.reset_cache()
        case "allocated":
            decode.update_state_after_alloc(D1, [TABLE], 0)
    assert not decode.on_found(D1, offered(), b"run"), "the answer comes later"
    assert decode.get_num_new_matched_tokens(D1, 0) == (0, False)
    assert (decode.aside, decode.num_open, decode.build_connector_meta()) == (set(), 0, [])


def test_a_failed_load_fails_a_request_with_a_ticket_alone(clock: Clock) -> None:
    """With on_load_failure 'fail' and vLLM's policy 'recompute'."""
    decode = DecodeScheduler([PAGING], accept, clock=clock)
    decode.ends_failed = True
    decode.on_new_request(prompt_of(D1), offered().params(None))
    decode.seek(D2, len(TOKEN_IDS))
    decode.on_found(D2, offered(2), b"run")
    for request in (D1, D2):
        decode.update_state_after_alloc(request, [TABLE], 19)
    decode.update_connector_output([D1, D2], [D1, D2])
    failed = decode.must_load.pop_failed()
    assert list(failed) == [D1]
    assert failed[D1] == (
        "load",
        "its KV load failed; decode may not compute it: on_load_failure is 'fail'",
    )


def test_a_request_that_was_loaded_once_may_be_computed_later(clock: Clock) -> None:
    decode = DecodeScheduler([PAGING], accept, clock=clock)
    decode.ends_failed = True
    decode.on_new_request(prompt_of(), offered().params(None))
    assert D1 in decode.must_load
    decode.update_state_after_alloc(D1, [TABLE], 19)
    decode.update_connector_output([D1])
    assert D1 not in decode.must_load
    assert decode.must_load.loaded == {}


# --- which loads are verified


@pytest.mark.parametrize(
    ("share", "draws", "expected"),
    [
        pytest.param(Config().verify, [0.0, 1.0 - 2**-53], [False, False], id="none by default"),
        pytest.param(1.0, [0.0, 1.0 - 2**-53], [True, True], id="all"),
        pytest.param(0.25, [0.24, 0.25, 0.9, 0.0], [True, False, False, True], id="a quarter"),
    ],
)
def test_verify_rate_selects_that_share_of_the_loads(
    share: float, draws: list[float], expected: list[bool]
) -> None:
    decode = DecodeScheduler([PAGING], accept, verify=share, draw=iter(draws).__next__)
    for number in range(len(draws)):
        request = RequestId(f"d{number}")
        decode.on_new_request(prompt_of(request), offered(number).params(None))
        decode.update_state_after_alloc(request, [TABLE], 19)
    assert [load.verify for load in started(decode)] == expected
