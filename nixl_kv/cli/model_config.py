"""A model's KV cache, from the numbers of a command line or of a Hugging Face config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nixl_kv.cli.options import ModelOptions
from nixl_kv.cli.recurrent_layers import (
    ATTENTION,
    BOTH,
    NEITHER,
    RECURRENT,
    RecurrentLayers,
)
from nixl_kv.geometry.model_layouts import ModelShape

ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "int8": 1,
}

INNER: Final = ("text_config", "llm_config", "language_config")
"""Where configurations of models with more than text keep what matters here."""

WINDOW_OF: Final[Mapping[str, str]] = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Types of layers that look back a number of tokens, and the key that has the number."""

PERIODS: Final[Mapping[str, int]] = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Model types whose configuration may leave out how layers alternate: of every so many layers the
last one does not slide."""

UNEVEN: Final = ("index_head_dim", "global_head_dim", "block_configs")
"""Keys of models whose layers have caches of different sizes, which the options cannot say."""


def model_shape(options: ModelOptions) -> ModelShape:
    """The model that the options name.

    Raises:
        ValueError: names what is missing or wrong.
    """
    path = options.model_config
    config = ModelConfig(str(path), _read(path)) if path else ModelConfig("options", {})
    layers = options.layers or config.number("num_hidden_layers", option="--layers")
    element = options.dtype or config.element()
    if element not in ELEMENT_BYTES:
        raise ValueError(f"dtype is {element!r}; allowed: {', '.join(ELEMENT_BYTES)}")
    heads, elements = _heads(options, config)
    content = tuple(count * ELEMENT_BYTES[element] for count in elements)
    window, sliding = _sliding(options, config, layers)
    recurrence = config.recurrence(layers, options.state_dtype)
    return ModelShape(layers, heads, content, element, window, sliding, **recurrence)


def _heads(options: ModelOptions, config: "ModelConfig") -> tuple[int, tuple[int, ...]]:
    """How many heads, and the elements of K and of V, or of one latent."""
    latent = options.latent or (0 if options.kv_heads else config.latent())
    if latent:
        return 1, (latent,)
    size = options.head_size or config.head_size()
    return options.kv_heads or config.kv_heads(), (size, size)


def _read(path: Path) -> Mapping[str, Any]:
    """The part of a configuration that is about text; the outer part has what that part lacks."""
    file = path / "config.json" if path.is_dir() else path
    try:
        outer = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"--model-config {file}: {error}; allowed: an object in JSON") from error
    inner = [outer[name] for name in INNER if isinstance(outer.get(name), dict)]
    return {**outer, **inner[0]} if inner else outer


def _sliding(
    options: ModelOptions, config: "ModelConfig", layers: int
) -> tuple[int, tuple[int, ...]]:
    """The window, and the layers that have it."""
    if options.sliding:
        window = options.window or config.number("sliding_window", option="--window")
        return window, _pattern(options.sliding, layers)
    window, sliding = config.sliding(layers)
    if options.window and not sliding:
        sliding = tuple(range(layers))
    return options.window or window, sliding


def _pattern(text: str, layers: int) -> tuple[int, ...]:
    """For "5:1": all layers except every sixth one."""
    sides = text.split(":")
    if len(sides) != 2 or not all(side.isdecimal() for side in sides):  # noqa: PLR2004
        raise ValueError(f"--sliding is {text!r}; allowed: two numbers, such as 5:1")
    sliding, full = map(int, sides)
    if not sliding:
        raise ValueError(f"--sliding is {text!r}; allowed: 1 or more before the colon")
    return tuple(layer for layer in range(layers) if layer % (sliding + full) < sliding)


@dataclass(frozen=True)
class ModelConfig:
    """A configuration, or none: then every number has to be an option."""

    name: str
    values: Mapping[str, Any]

    def number(self, key: str, option: str = "--model-config") -> int:
        """A positive number that must be there; after a dot, within what is before it."""
        outer, _, inner = key.rpartition(".")
        value = (self.values.get(outer) or {} if outer else self.values).get(inner)
        if value is None and not self.values:
            raise ValueError(f"{option} is missing; give it, or --model-config")
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} of {self.name} is {value!r}; allowed: 1 or more")
        return value

    def element(self) -> str:
        """The dtype of the weights, which is that of the cache unless it is said otherwise."""
        name = self.values.get("dtype") or self.values.get("torch_dtype") or "bfloat16"
        return str(name).removeprefix("torch.")

    def latent(self) -> int:
        """Elements of a latent head; 0 if the model has none."""
        if not self.values.get("kv_lora_rank"):
            return 0
        self._check_even()
        rank = self.number("kv_lora_rank", option="--latent")
        return rank + self.number("qk_rope_head_dim", option="--latent")

    def kv_heads(self) -> int:
        """As many as there are heads at all, if it is not said."""
        self._check_even()
        key = "num_key_value_heads"
        key = "num_attention_heads" if self.values and self.values.get(key) is None else key
        return self.number(key, option="--kv-heads")

    def head_size(self) -> int:
        """In elements."""
        if not self.values or self.values.get("head_dim") is not None:
            return self.number("head_dim", option="--head-size")
        hidden = self.number("hidden_size", option="--head-size")
        return hidden // self.number("num_attention_heads", option="--head-size")

    def recurrence(self, layers: int, dtype: str | None) -> dict[str, Any]:
        """The fields of a `ModelShape` that say which layers keep no KV, or a state.

        `dtype` is that of temporal states, if it is given.
        """
        recurrent_layers = self._recurrent(dtype)
        words = recurrent_layers.words(layers) or ()
        without = {n for n, word in enumerate(words) if word in RECURRENT | NEITHER}
        recurrent = {n for n, word in enumerate(words) if word in RECURRENT | {BOTH}}
        try:
            state = recurrent_layers.state() if recurrent else ()
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        return {
            "without_kv": tuple(sorted(without)),
            "recurrent": tuple(sorted(recurrent)),
            "state": state,
        }

    def _recurrent(self, dtype: str | None = None) -> RecurrentLayers:
        return RecurrentLayers(self.values, self.number, self.element(), dtype, ELEMENT_BYTES)

    def sliding(self, layers: int) -> tuple[int, tuple[int, ...]]:
        """The window, and the layers that have it."""
        types = self._recurrent().words(layers)
        if types is not None:
            return self._sliding_by_type(types, layers)
        window = self.values.get("sliding_window")
        if not window or self.values.get("use_sliding_window") is False:
            return 0, ()
        period = self.values.get("sliding_window_pattern") or PERIODS.get(
            str(self.values.get("model_type")), 0
        )
        if period:
            return int(window), _pattern(f"{int(period) - 1}:1", layers)
        sliding = tuple(range(self._first_sliding(), layers))
        return (int(window), sliding) if sliding else (0, ())

    def _first_sliding(self) -> int:
        """Where a configuration says whether layers slide at all, the first ones may not."""
        if "use_sliding_window" not in self.values:
            return 0
        return int(self.values.get("max_window_layers") or 0)

    def _sliding_by_type(self, types: Any, layers: int) -> tuple[int, tuple[int, ...]]:
        known = {*WINDOW_OF, *ATTENTION, *RECURRENT, *NEITHER, BOTH}
        if not isinstance(types, list) or len(types) != layers or set(types) - known:
            raise ValueError(
                f"layer_types of {self.name} is {types!r}; "
                f"allowed: {layers} times one of {', '.join(sorted(known - {BOTH}))}"
            )
        narrow = sorted(set(types) & set(WINDOW_OF))
        if len(narrow) > 1:
            raise ValueError(
                f"layer_types of {self.name} has {' and '.join(narrow)}; allowed: one of them"
            )
        if not narrow:
            return 0, ()
        window = self.number(WINDOW_OF[narrow[0]], option="--window")
        return window, tuple(layer for layer, kind in enumerate(types) if kind == narrow[0])

    def _check_even(self) -> None:
        for key in UNEVEN:
            if self.values.get(key):
                raise ValueError(
                    f"{self.name} has {key}: its layers' caches differ, which the numbers here "
                    "cannot say; ask running engines, by --prefill-at and --decode-at"
                )
