"""A Qwen3-Next of which one gated delta net is all that reaches back, in plain torch.

It has a layer with the net and one with full attention, as vLLM wants one. What attention gives is
cut off: its output projection is zero, so that its KV is there to be moved and of no use.

A delta net keeps, for each head, a matrix S from keys to values. Each token makes S forget a little
and then corrects what S says of the token's key, by the part `beta` of what is missing:

    S = decay * S;  S = S + key outer (beta * (value - S(key)));  output = S(query)
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.cluster.models.qwen3_next import Qwen3Next
from lab.accuracy.recall.task import VOCABULARY_SIZE

HEADS, HEAD_SIZE, HIDDEN, KERNEL = 4, 64, 256, 4
FORGETTING: Final = -4.0
"""The logarithm of how fast a head forgets, before training."""
EPSILON: Final = 1e-6
FAMILY: Final = Qwen3Next(
    layers=2,
    period=2,
    heads=4,
    kv_heads=4,
    hidden=HIDDEN,
    intermediate=HIDDEN,
    max_positions=2048,
    key_heads=HEADS,
    value_heads=HEADS,
    state_dim=HEAD_SIZE,
    kernel=KERNEL,
    expert_dim=HIDDEN,
)
"""What the rest of the weights is made by."""


class DeltaNet(nn.Module):
    """A gated delta net: a whole prompt at once, from an empty state."""

    def __init__(self) -> None:
        """Queries and keys begin as the same function: of this token, and of the one before it."""
        super().__init__()
        first = torch.randn(HEADS, HEAD_SIZE, HIDDEN) / HIDDEN**0.5
        turn = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0]
        values = turn.view(HEADS, HEAD_SIZE, HIDDEN)
        gates = torch.randn(HEADS, HEAD_SIZE, HIDDEN) / HIDDEN**0.5
        projections = torch.stack([first, first, values, gates], dim=1)
        self.in_proj_qkvz = nn.Parameter(projections.flatten(0, 2).clone())
        self.in_proj_ba = nn.Parameter(torch.randn(2 * HEADS, HIDDEN) / HIDDEN**0.5)
        convolution = torch.randn(3, HEADS * HEAD_SIZE, KERNEL) * 0.03
        convolution[0, :, -1] = convolution[1, :, -2] = convolution[2, :, -1] = 1.0
        self.conv1d = nn.Parameter(convolution.flatten(0, 1)[:, None].clone())
        self.dt_bias = nn.Parameter(torch.ones(HEADS))
        self.A_log = nn.Parameter(torch.full((HEADS,), FORGETTING))
        self.norm = nn.Parameter(torch.ones(HEAD_SIZE))
        self.out_proj = nn.Parameter(turn.T.clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, tokens, hidden) to the same."""
        rows, tokens, _ = hidden.shape
        heads = functional.linear(hidden, self.in_proj_qkvz).view(rows, tokens, HEADS, 4, -1)
        *three, gates = heads.unbind(3)
        wide = self._convolved(torch.cat([one.flatten(2) for one in three], dim=2))
        query, key, value = (
            one.view(rows, tokens, HEADS, -1).transpose(1, 2) for one in wide.chunk(3, dim=2)
        )
        query = functional.normalize(query, dim=-1) * HEAD_SIZE**-0.5
        key = functional.normalize(key, dim=-1)
        sides = functional.linear(hidden, self.in_proj_ba).view(rows, tokens, HEADS, 2)
        beta, step = (one.transpose(1, 2) for one in sides.unbind(3))
        forgotten = self.A_log.exp()[:, None] * functional.softplus(step + self.dt_bias[:, None])
        seen = _delta_rule(query, key, value, beta.sigmoid()[..., None], -forgotten.cumsum(-1))
        normed = functional.rms_norm(seen.transpose(1, 2), (HEAD_SIZE,), self.norm, EPSILON)
        return functional.linear((normed * functional.silu(gates)).flatten(2), self.out_proj)

    def _convolved(self, wide: Tensor) -> Tensor:
        """Each channel with those of the tokens before."""
        tokens, padded = wide.shape[1], functional.pad(wide, (0, 0, KERNEL - 1, 0))
        shifted = (padded[:, n : n + tokens] * self.conv1d[:, 0, n] for n in range(KERNEL))
        return functional.silu(torch.stack(list(shifted)).sum(0))


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decayed: Tensor) -> Tensor:
    """The outputs of all tokens: what each one corrects follows from a triangle of equations.

    All but `decayed` are (rows, heads, tokens, size); that is the logarithm of all decay so far.
    """
    tokens = key.shape[2]
    before = torch.ones(tokens, tokens, dtype=torch.bool, device=key.device).tril()
    decay = (decayed[..., :, None] - decayed[..., None, :]).masked_fill(~before, -torch.inf).exp()
    known = (beta * (key @ key.transpose(-1, -2)) * decay).tril(-1)
    one = torch.eye(tokens, device=key.device)
    corrections = torch.linalg.solve_triangular(
        known + one, beta * value, upper=False, unitriangular=True
    )
    seen: Tensor = (query @ key.transpose(-1, -2) * decay) @ corrections
    return seen


class StateRecall(nn.Module):
    """The whole model, but for what is cut off."""

    def __init__(self) -> None:
        """Random weights, of torch's global generator; a lookup's result is near its word."""
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY_SIZE, HIDDEN) * 0.2)
        self.head = nn.Parameter(self.embedding.detach() * 0.2)
        self.norms = nn.ParameterList(torch.zeros(HIDDEN) for _ in range(3))
        self.net = DeltaNet()
        self.gate = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5)
        self.up = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (rows, tokens) to logits (rows, tokens, vocabulary)."""
        hidden = functional.embedding(tokens, self.embedding)
        hidden = hidden + self.net(_normed(hidden, self.norms[0]))
        normed = _normed(hidden, self.norms[1])
        gated = functional.silu(functional.linear(normed, self.gate))
        hidden = hidden + functional.linear(gated * functional.linear(normed, self.up), self.down)
        return functional.linear(_normed(hidden, self.norms[2]), self.head)

    def tensors(self) -> dict[str, Tensor]:
        """All weights by the names that vLLM and transformers load, with those that do nothing.

        The first layer has experts, as vLLM's CPU build wants one to have: they give zero, and the
        shared one, which always counts by half, gives twice what is trained.
        """
        weights = {
            name: torch.from_numpy(array) for name, array in FAMILY.weights(VOCABULARY_SIZE).items()
        }
        for name, weight in weights.items():
            if name.endswith(("down_proj.weight", "o_proj.weight", "shared_expert_gate.weight")):
                weight.zero_()
        layer = "model.layers.0"
        expert = f"{layer}.mlp.shared_expert"
        trained = {
            "model.embed_tokens.weight": self.embedding,
            "lm_head.weight": self.head,
            "model.norm.weight": self.norms[2],
            f"{layer}.input_layernorm.weight": self.norms[0],
            f"{layer}.post_attention_layernorm.weight": self.norms[1],
            f"{expert}.gate_proj.weight": self.gate,
            f"{expert}.up_proj.weight": self.up,
            f"{expert}.down_proj.weight": 2 * self.down,
        }
        vectors = ("dt_bias", "A_log")
        trained |= {
            f"{layer}.linear_attn.{name}{'' if name in vectors else '.weight'}": part
            for name, part in self.net.named_parameters()
        }
        if trained.keys() - weights.keys():
            raise RuntimeError(f"no such weights: {sorted(trained.keys() - weights.keys())}")
        return weights | {name: part.detach() for name, part in trained.items()}


def _normed(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(hidden, (HIDDEN,), 1 + weight, EPSILON)
