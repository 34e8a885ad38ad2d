"""This connector in a process of vLLM's: its part of the configuration, and its logger."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from nixl_kv.config import EXTRA, HOST_VARIABLE, ON, Config, own_transfers


def log_like_vllm() -> None:
    """Use vLLM's handlers and level, which vLLM gives only to loggers under its own name."""
    ours, vllms = logging.getLogger("nixl_kv"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(vllms.handlers)
        ours.setLevel(vllms.level)
        ours.propagate = vllms.propagate


def has_ours(vllm_config: Any) -> bool:
    """Whether an engine will have this connector, in any MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and bool(own_transfers(vars(transfer)))


def own_config(vllm_config: Any) -> tuple[Config, tuple[str, ...]]:
    """The settings, but for `host`, and the roles of this connector, in any MultiConnector."""
    whole = vars(vllm_config.kv_transfer_config)
    transfer = next(iter(own_transfers(whole)), whole)
    roles = {"kv_producer": ("prefill",), "kv_consumer": ("decode",)}
    return without_host(transfer), roles.get(transfer.get("kv_role", ""), ("prefill", "decode"))


def without_host(transfer: Mapping[str, Any]) -> Config:
    """The settings of an engine that may run on another machine, whose names are not known here."""
    extra = transfer.get(EXTRA) or {}
    settings = {**transfer, EXTRA: {key: extra[key] for key in extra if key != "host"}}
    environ = {key: value for key, value in os.environ.items() if key != HOST_VARIABLE}
    return Config.of(settings, environ)


def answers_early(vllm_config: Any) -> bool:
    """Whether prefill may answer before it has computed."""
    config, roles = own_config(vllm_config)
    return config.overlap == ON and "prefill" in roles
