"""Recurrent layers in a Hugging Face config.json: which they are, and what they keep.

A state has that of the convolution first, if there is one, with a row for each token that it looks
back at; the temporal state follows. Parts have the names that the connector gives them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from nixl_kv.geometry.model_layouts import StatePart

FULL: Final = "full_attention"
ATTENTION: Final = frozenset((FULL, "attention"))
"""Words for layers that look at all tokens before."""
RECURRENT: Final = frozenset(("linear_attention", "mamba", "conv"))
"""Words for layers that keep a state and no KV."""
BOTH: Final = "attention and state"
"""For layers that keep KV and a state; configurations have no word for them."""
NEITHER: Final = frozenset(("mlp", "moe"))
"""Words for layers that keep nothing."""
LETTERS: Final[Mapping[str, str]] = {"M": "mamba", "*": FULL, "-": "mlp", "E": "moe"}
"""The same, in patterns."""
PERIOD: Final = 4
"""Of gated delta nets, if nothing is said, every so many-th layer has full attention."""

CHANNELS: Final = 128
RANKS: Final = 64
"""Channels that could be cut one by one make units, as in `connector/state_layout.py`."""

MAMBA2: Final = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
)
"""Keys of the number of heads, a head's size, the number of groups, a state's size, the kernel."""

Number: TypeAlias = Callable[[str], int]
"""The positive number that a configuration has under a key; it raises ValueError if there is none.
`.` in a key separates the key of an inner configuration from the one in it."""


@dataclass(frozen=True)
class RecurrentLayers:
    """Of one configuration."""

    values: Mapping[str, Any]
    number: Number
    element: str
    """The dtype of the weights, and of what is kept unless it is said otherwise."""
    temporal: str | None
    """The dtype of temporal states, if it is known from elsewhere."""
    sizes: Mapping[str, int]
    """Bytes of an element of each dtype."""

    def words(self, layers: int) -> Any:
        """For each layer a word for its kind, as it is said; None if all are of one kind."""
        values = self.values
        for key in ("layer_types", "layers_block_type"):
            if values.get(key) is not None:
                return values[key]
        if values.get("hybrid_override_pattern"):
            return [LETTERS.get(letter, letter) for letter in values["hybrid_override_pattern"]]
        if values.get("model_type") == "falcon_h1":
            return [BOTH] * layers
        full = self._full(range(layers))
        if full is None:
            return None
        return [FULL if layer in full else "linear_attention" for layer in range(layers)]

    def _full(self, layers: range) -> Sequence[int] | None:
        """The layers with attention, where the others have a state."""
        values = self.values
        if isinstance(values.get("linear_attn_config"), dict):
            recurrent = values["linear_attn_config"].get("kda_layers") or ()  # counted from 1
            return [layer for layer in layers if layer + 1 not in recurrent]
        if "conv_L_cache" in values:
            return list(values.get("full_attn_idxs") or layers)
        if "attn_layer_period" in values:
            return layers[int(values["attn_layer_offset"]) :: self.number("attn_layer_period")]
        period = 0
        if "linear_num_value_heads" in values:
            period = int(values.get("full_attention_interval") or PERIOD)
        elif self._is_linear():
            period = int(values.get("layer_group_size") or 1)
        return layers[period - 1 :: period] if period else None

    def _is_linear(self) -> bool:
        return "BailingMoeV2_5ForCausalLM" in (self.values.get("architectures") or ())

    def state(self) -> tuple[StatePart, ...]:
        """What a recurrent layer keeps.

        Raises:
            ValueError: if the configuration is of no kind that is known, or lacks a number.
        """
        values = self.values
        if "linear_num_value_heads" in values:
            return tuple(self._gated_delta_net())
        if isinstance(values.get("linear_attn_config"), dict):
            return tuple(self._delta_attention())
        if "conv_L_cache" in values:
            return (self._channels("convolution", "hidden_size", 1, "conv_L_cache"),)
        for keys in MAMBA2:
            if keys[0] in values:
                return tuple(self._mamba2(*map(self.number, keys)))
        if "mamba_d_state" in values:
            return tuple(self._mamba1())
        if self._is_linear():
            return (self._state(self.number("num_attention_heads"), self._head() ** 2),)
        raise ValueError("its recurrent layers are of a kind that is not known")

    def _gated_delta_net(self) -> Iterator[StatePart]:
        keys, key_size = self.number("linear_num_key_heads"), self.number("linear_key_head_dim")
        values, size = self.number("linear_num_value_heads"), self.number("linear_value_head_dim")
        kernel = self.number("linear_conv_kernel_dim")
        yield self._projection("query", keys, key_size, kernel)
        yield self._projection("key", keys, key_size, kernel)
        yield self._projection("value", values, size, kernel)
        yield self._state(values, size * key_size, self.values.get("mamba_ssm_dtype"))

    def _delta_attention(self) -> Iterator[StatePart]:
        heads, size, kernel = (
            self.number(f"linear_attn_config.{key}")
            for key in ("num_heads", "head_dim", "short_conv_kernel_size")
        )
        for name in ("query", "key", "value"):
            yield self._projection(name, heads, size, kernel)
        yield self._state(heads, size * size, "float32")

    def _mamba2(
        self, heads: int, head_size: int, groups: int, state_size: int, kernel: int
    ) -> Iterator[StatePart]:
        yield self._projection("x", heads, head_size, kernel)
        for name in ("B", "C"):  # one group is needed by the heads of every rank
            yield self._projection(name, groups, state_size, kernel, is_copied=groups == 1)
        default = "float32" if "ssm_state_size" in self.values else None
        dtype = self.values.get("mamba_ssm_cache_dtype") or default
        yield self._state(heads, head_size * state_size, dtype)

    def _mamba1(self) -> Iterator[StatePart]:
        times, size = self.number("mamba_expand"), self.number("mamba_d_state")
        convolution = self._channels("convolution", "hidden_size", times, "mamba_d_conv")
        yield convolution
        channels = times * self.number("hidden_size")
        yield self._state(convolution.number, channels // convolution.number * size)

    def _head(self) -> int:
        return int(
            self.values.get("head_dim")
            or self.number("hidden_size") // self.number("num_attention_heads")
        )

    def _channels(self, name: str, key: str, times: int, kernel: str) -> StatePart:
        """A convolution of channels, each of which could be cut off."""
        channels = times * self.number(key)
        run = math.gcd(channels // math.gcd(channels, RANKS), CHANNELS)
        return self._projection(name, channels // run, run, self.number(kernel))

    def _projection(
        self, name: str, number: int, channels: int, kernel: int, *, is_copied: bool = False
    ) -> StatePart:
        """Of a convolution, whose kernel is as long as all rows and the token itself."""
        length = channels * self._size(self.element)
        return StatePart(name, number, length, self._words(self.element), kernel - 1, is_copied)

    def _state(self, number: int, elements: int, dtype: str | None = None) -> StatePart:
        """A temporal state, of so many elements for each unit."""
        dtype = self.temporal or dtype or self.element
        return StatePart("state", number, elements * self._size(dtype), self._words(dtype))

    def _size(self, dtype: str) -> int:
        if dtype not in self.sizes:
            raise ValueError(f"dtype of states is {dtype!r}; allowed: {', '.join(self.sizes)}")
        return self.sizes[dtype]

    @staticmethod
    def _words(dtype: str) -> str:
        return f"{dtype} state"
