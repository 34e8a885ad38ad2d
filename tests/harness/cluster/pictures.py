"""Chat messages with pictures, and the stand-ins that platforms send decode instead of them."""

import base64
import io
from collections.abc import Mapping
from typing import Any, Final

from harness.cluster.client import Messages
from harness.cluster.models.families import Llava

SQUARES: Final = 8  # in a row and in a column of a picture

Part = Mapping[str, Any]
"""A text, a picture or embeddings in a chat message."""


def said(*parts: Part | str) -> Messages:
    """The messages of a chat whose only one has these parts."""
    content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
    return [{"role": "user", "content": content}]


def picture(seed: int, uuid: str | None = None) -> Part:
    """Squares of random colours. Engines take a `uuid` for its content."""
    import numpy as np  # noqa: PLC0415 - few programs need pictures
    from PIL import Image  # noqa: PLC0415

    colours = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (SQUARES, SQUARES, 3))
    size = (Llava().pixels, Llava().pixels)
    image = Image.fromarray(colours.astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}, **_uuid(uuid)}


def stand_in(value: float, uuid: str | None = None) -> Part:
    """Embeddings of one picture that all have this value, as Dynamo's decode worker makes them."""
    import torch  # noqa: PLC0415 - takes seconds

    model, file = Llava(), io.BytesIO()
    torch.save(torch.full((model.image_tokens, model.hidden), value), file)
    embeds = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_embeds", "image_embeds": embeds, **_uuid(uuid)}


def _uuid(uuid: str | None) -> Part:
    return {} if uuid is None else {"uuid": uuid}
