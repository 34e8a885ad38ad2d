"""A decode machine in each state of its one load, which reads prefill's rank 0."""

from collections.abc import Iterator

import pytest

from nixl_kv.protocol.decode.machine import DecodeMachine
from support.records import (
    READER,
    RENEW_S,
    TIMEOUT_S,
    answered,
    cancel_load,
    grant,
    joined,
    no_record,
    prepare_load,
    read_done,
    read_started,
    slot_read,
    start_load,
)


@pytest.fixture
def machine() -> Iterator[DecodeMachine]:
    machine = DecodeMachine(READER, no_record, timeout_s=TIMEOUT_S, renew_interval_s=RENEW_S)
    yield machine
    machine.loads.validate()


@pytest.fixture
def prepared(machine: DecodeMachine) -> DecodeMachine:
    """A load was prepared at second 100; its peer is not known yet."""
    machine.handle(prepare_load(), 100.0)
    return machine


@pytest.fixture
def asking(prepared: DecodeMachine) -> DecodeMachine:
    """Its peer is known, and was asked with number 1 at second 100."""
    prepared.handle(joined(), 100.0)
    return prepared


@pytest.fixture
def granted(asking: DecodeMachine) -> DecodeMachine:
    """It is granted; it has no blocks."""
    asking.handle(answered(grant()), 100.0)
    return asking


@pytest.fixture
def reading(granted: DecodeMachine) -> DecodeMachine:
    """It has blocks since second 110."""
    granted.handle(start_load(), 110.0)
    return granted


@pytest.fixture
def checking(reading: DecodeMachine) -> DecodeMachine:
    """All its data has landed."""
    reading.handle(read_done(), 110.5)
    return reading


@pytest.fixture
def verified(granted: DecodeMachine) -> DecodeMachine:
    """It has blocks since second 110 and is to be verified; prefill's digest was asked for then."""
    granted.handle(start_load(verify=True), 110.0)
    granted.handle(read_started(), 110.0)
    return granted


@pytest.fixture
def verifying(verified: DecodeMachine) -> DecodeMachine:
    """Its data has landed and its slot was valid; prefill's digest is not here yet."""
    verified.handle(read_done(), 110.5)
    verified.handle(slot_read(), 110.6)
    return verified


@pytest.fixture
def draining(reading: DecodeMachine) -> DecodeMachine:
    """It was cancelled while its data was landing."""
    reading.handle(cancel_load(), 110.5)
    return reading
