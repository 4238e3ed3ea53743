"""What several tests need: golden data, masks and error measures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Golden:
    """A tiny checkpoint and what the released code computed for it.

    Attributes:
        folder: of the checkpoint.
        config: its config.json.
        weights: its tensors by state-dict key.
        forward: `input_ids`, `logits` and per MoE layer `layer{i}.moe_in`, `.moe_out` and so on.
        about: forward.json.
    """

    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    forward: dict[str, Tensor]
    about: dict[str, Any]

    @property
    def moe_layers(self) -> list[int]:
        return sorted(int(key[5:].split(".")[0]) for key in self.forward if key.endswith(".moe_in"))

    @property
    def loaded(self) -> dict[str, Tensor]:
        """`weights` as a model holds them: its expert bias is fp32, that of the golden bf16 file is bf16."""
        return {k: v.float() if k.endswith("expert_bias") else v for k, v in self.weights.items()}

    def mask(self) -> Tensor:
        """The bool block-causal mask [1,1,S,S] of the LLaDA2 forwards."""
        return block_causal(self.forward["input_ids"].shape[1], self.about["block_length"])


@cache
def load_golden(name: str) -> Golden:
    folder = GOLDEN / name
    return Golden(
        folder=folder,
        config=json.loads((folder / "config.json").read_text()),
        weights=load_file(folder / "model.safetensors"),
        forward=load_file(folder / "forward.safetensors"),
        about=json.loads((folder / "forward.json").read_text()),
    )


def block_causal(seq_len: int, block: int) -> Tensor:
    """Bool [1,1,S,S], True where the key's block is not after the query's."""
    blocks = torch.arange(seq_len) // block
    return (blocks[None, :] <= blocks[:, None])[None, None]


def additive(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; infinite for NaN."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if actual.numel() == 0:
        return 0.0
    actual, expected = actual.detach(), expected.detach()
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    return float(error.nan_to_num(float("inf")))


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    actual, expected = actual.detach(), expected.detach()
    error = (actual.double() - expected.double()).pow(2).mean().sqrt() / expected.double().pow(2).mean().sqrt()
    return float(error.nan_to_num(float("inf")))


def assert_as_accurate(
    actual: Tensor, reference: Tensor, exact: Tensor, factor: float = 4.0, ulps: float = 16.0
) -> None:
    """`actual` is as near to the exact result as `reference`, a plain computation in the same dtype, is.

    Two orders of one sum differ by what the CPU's kernels make of it (vector width, fused products, how rows are
    blocked), so no literal bounds their difference on every machine. The error bound of a sum, n eps sum|terms|, is
    the same for every order, and the largest errors over a tensor lie within a small factor of each other; both are
    measured here, on the machine that runs. The scale is the tensor's largest value: terms that cancel leave an
    element with the error of its terms. `ulps` of that scale are for a reference that happens to be right to the bit.

    Args:
        actual, reference: of one dtype.
        exact: the same in fp64, from fp64 copies of the inputs.
    """
    assert actual.dtype == reference.dtype and exact.dtype == torch.float64
    own, error = relative_error(reference, exact), relative_error(actual, exact)
    bound = factor * own + ulps * torch.finfo(actual.dtype).eps
    assert error <= bound, f"off by {error:.2e} of the largest value, where {bound:.2e} is allowed ({own:.2e} plain)"


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients that there are, by parameter name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(actual: dict[str, Tensor], reference: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """`assert_as_accurate` for every parameter of a model; none has a gradient in one of them only."""
    assert actual.keys() == reference.keys() == exact.keys() and actual
    for name, gradient in actual.items():
        try:
            assert_as_accurate(gradient, reference[name], exact[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def assert_golden(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """fp32 within 1e-5 relative, bf16 within 2e-2 relative RMS."""
    if dtype == torch.float32:
        assert relative_error(actual, expected) < 1e-5
    else:
        assert relative_rms(actual, expected) < 2e-2
