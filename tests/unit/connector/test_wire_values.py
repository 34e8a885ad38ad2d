"""Values of vLLM's configuration: the start refuses them, or peers read them as they are."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.config import Config, weights_label
from nixl_kv.connector.plugin import check_wire_values
from nixl_kv.connector.scheduler import Scheduler
from nixl_kv.errors import ConfigError, printable
from nixl_kv.protocol import messages
from nixl_kv.protocol.ticket import MAX_WHY
from support import records
from support.vllm_objects import kv_cache_config, vllm_config

TEXTS = st.text(max_size=300) | st.text("\0\nø\ud800\U0001f600", max_size=300)


def check(own: Config, engine_id: str, model_name: str | list[str] = "tiny") -> None:
    transfer = SimpleNamespace(engine_id=engine_id)
    model = SimpleNamespace(served_model_name=model_name)
    config = SimpleNamespace(kv_transfer_config=transfer, model_config=model)
    check_wire_values(own, config)


@given(
    engine_id=TEXTS,
    model_name=TEXTS | st.lists(TEXTS, min_size=1, max_size=3),
    host=st.ip_addresses().map(str),
    weights=TEXTS,
)
def test_values_are_refused_in_words_or_reach_peers_as_they_are(
    engine_id: str, model_name: Any, host: str, weights: str
) -> None:
    try:
        label = weights_label("weights", weights)
        own = replace(Config.parse({"insecure": True}, {}), host=host, weights=label)
        check(own, engine_id, model_name)
    except ConfigError as error:
        refusal = str(error)
    else:
        name = model_name if isinstance(model_name, str) else model_name[0]
        expect_readable(engine_id, name, host, label)
        return
    assert refusal == printable(refusal)
    assert "allowed: " in refusal
    assert len(refusal) < 6000


def expect_readable(engine: str, model: str, host: str, weights: str) -> None:
    for key in (None, b"k" * 32):
        fields = {"engine": engine, "host": host, "weights": weights}
        ticket = records.ticket(**fields, media=records.hex32(7), not_offered="x" * MAX_WHY)
        assert records.opened(ticket.params(key)) == ticket
    facts = {"served_model_name": model}
    described = msgspec.structs.replace(records.description(), engine=engine, model=facts)
    assert messages.decode_answer(messages.encode(described)) == described


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=256))
def test_printable_ids_are_good(engine_id: str) -> None:
    check(Config.parse({"insecure": True}, {}), engine_id)


def test_the_connector_checks_too() -> None:
    """A process may load no plugins, so that nothing was checked before the weights."""
    extra = {"port": 0, "insecure": True}
    with pytest.raises(ConfigError, match="engine_id of --kv-transfer-config is 'prefill"):
        Scheduler(vllm_config(extra, engine_id="prefill\n"), kv_cache_config())


def test_the_longest_values_fit() -> None:
    expect_readable("\U0001f600" * 256, "\U0001f600" * 1000, "1:" * 7 + "1", "\U0001f600" * 256)


def test_a_name_of_the_model_that_no_message_can_carry_is_refused() -> None:
    words = "could not read this engine's tickets: 'utf-8' codec can't encode"
    with pytest.raises(ConfigError, match=words) as refusal:
        check(Config.parse({"insecure": True}, {}), "prefill", "\udc80tiny")
    assert r"the model's name '\udc80tiny'" in str(refusal.value)
