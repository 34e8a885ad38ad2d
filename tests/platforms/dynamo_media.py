"""Prints what Dynamo sends a decode engine instead of images, as nixl_kv reads it there.

An environment with Dynamo runs it, with `no_torchvision` in PYTHONPATH. Dynamo's own function makes
the data for a Qwen-VL, and vLLM's own code makes a request's media of them.
"""

import json
import os
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from dynamo.vllm.multimodal_utils.model import construct_qwen_decode_mm_data
from transformers import BatchFeature
from vllm.model_executor.models import qwen2_vl
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems, PlaceholderRange
from vllm.plugins import load_general_plugins

from nixl_kv.config import DYNAMO_VARIABLE
from nixl_kv.connector.media import MediaItem
from nixl_kv.connector.vllm_config import MediaReader, media_rules

GRID: Final = [[1, 8, 8], [1, 4, 8]]  # patches of two images
MERGED: Final = 2  # patches in a row and a column of one token
HIDDEN: Final = 16
PATCH: Final = 12  # values
LENGTHS: Final = [time * height * width // MERGED**2 for time, height, width in GRID]
PLACEHOLDER: Final = 5


def media_of(images: dict[str, torch.Tensor]) -> tuple[MediaItem, ...]:
    """The media of a prompt that is all images."""
    make_fields = qwen2_vl._create_qwen2vl_field_factory(MERGED)
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(images), make_fields(images))["image"]
    features = [
        MultiModalFeatureSpec(
            data=item,
            modality="image",
            identifier=f"image {number}",
            mm_position=PlaceholderRange(offset=sum(LENGTHS[:number]), length=LENGTHS[number]),
        )
        for number, item in enumerate(items)
    ]
    tokens = [PLACEHOLDER] * sum(LENGTHS)
    request = cast("Any", SimpleNamespace(mm_features=features, prompt_token_ids=tokens))
    return MediaReader(frozenset({PLACEHOLDER}), has_geometry=True).media_of(request).items


def main() -> None:
    data = construct_qwen_decode_mm_data(GRID, (sum(LENGTHS), HIDDEN), "request")["image"]
    (parsed,) = qwen2_vl.Qwen2VLMultiModalDataParser(MERGED).parse_mm_data({"image": data}).values()
    grid = torch.tensor(GRID)
    pixels = torch.zeros(int(grid.prod(-1).sum()), PATCH)
    stand_ins = media_of(dict(parsed.get_passthrough_data()))
    own = media_of({"pixel_values": pixels, "image_grid_thw": grid})
    load_general_plugins()
    facts = {
        "keys": sorted(data),
        "values": data["image_embeds"].unique().tolist(),
        "stand-ins are data": [item.is_data for item in stand_ins],
        "pictures are data": [item.is_data for item in own],
        "same sizes": [one.geometry for one in stand_ins] == [one.geometry for one in own],
        "variable": os.environ.get(DYNAMO_VARIABLE),
        "has stand-ins": media_rules("auto").has_stand_ins,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
