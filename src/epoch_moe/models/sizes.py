"""`ModelSizes`: the sizes of a model under one set of names, whatever its family's configuration calls them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What a configuration's ``sizes()`` gives.

    Attributes:
        hidden: H, size of the hidden state.
        vocab: V, rows of the embedding.
        layers: decoder layers.
        moe_layers: numbers of those with an MoE block.
        heads, kv_heads, head_dim: of the attention.
        experts, top_k: routed experts of an MoE layer, and how many a row takes.
        expert_inner: F, inner size of a routed expert.
        shared_inner: inner size of the shared expert; 0 where there is none.
        dense_inner: inner size of a dense layer's MLP.
    """

    hidden: int
    vocab: int
    layers: int
    moe_layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_inner: int
    shared_inner: int
    dense_inner: int
