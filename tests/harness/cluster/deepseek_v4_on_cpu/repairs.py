"""Repairs of vLLM's CPU path of DeepSeek-V4 (docs/upstream/vllm-deepseek-v4-cpu.md)."""

from typing import Any, Final
from unittest import mock


def all_kinds(module: Any) -> None:
    """`module` is vLLM's `cpu_mla`, whose builder names three kinds of layers.

    Its base reads five. The base's answer for a step without decode tokens has all five, and no
    plan for any.
    """

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> Any:
        del num_decode_tokens
        return super(builder, self).build_tile_scheduler(0)

    builder = module.DeepseekV4CPUSparseSWAMetadataBuilder
    builder.build_tile_scheduler = build_tile_scheduler


def prefix_caching(module: Any) -> None:
    """`module` is vLLM's `platforms.cpu`, which turns prefix caching off on CPUs without AMX.

    The kernels for other CPUs take the same block tables.
    """
    check = module.CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        with mock.patch("torch.cpu._is_amx_tile_supported", return_value=True):
            check(vllm_config)

    module.CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


REPAIRS: Final = {
    "vllm.models.deepseek_v4.cpu.cpu_mla": all_kinds,
    "vllm.platforms.cpu": prefix_caching,
}
