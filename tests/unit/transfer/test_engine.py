"""What a rank does where KV cannot be digested."""

import logging
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of others, on import
    pytest.importorskip("vllm", reason="needs vLLM: scripts/install")
    import torch

    from nixl_kv.connector import setup
    from nixl_kv.connector.digests import Nowhere, OnHost
    from nixl_kv.errors import ConfigError
    from nixl_kv.geometry.layout import CacheLayout, Group, Memory, Part, Region, Span


def layout(memory: Memory) -> CacheLayout:
    region = Region("layers.0", 4096, 64, 32, 8, 0, 2, (Part(0, 4), Part(4, 4)))
    return CacheLayout((Group(4, 2, 1, (region,)),), "uint8", memory, 0, (Span(4096, 1024),))


@pytest.mark.parametrize("verifies", [False, True])
def test_memory_of_this_process_is_digested_on_the_host(*, verifies: bool) -> None:
    assert isinstance(setup._compute(layout("DRAM"), verifies=verifies), OnHost)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it can be done")
def test_who_verifies_does_not_start_where_it_cannot() -> None:
    with pytest.raises(ConfigError, match=r"verify is on, but .* cannot .* here: .*allowed: 'off'"):
        setup._compute(layout("VRAM"), verifies=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it can be done")
def test_who_does_not_verify_starts_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="nixl_kv"):
        made = setup._compute(layout("VRAM"), verifies=False)
    assert isinstance(made, Nowhere)
    assert "no load can be verified that is read from here" in caplog.text
