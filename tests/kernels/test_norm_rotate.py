"""Norm and rotary embedding in one launch against the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epoch_moe.kernels.norm_rotate import norm_rotate, rms_norm
from epoch_moe.kernels.norm_rotate_reference import rms_norm_reference, rotate_reference

ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3}
"""A sum's order may round a statistic differently: one unit in the last place of a normed number (up to 4 or so)."""


def angles(batch: int, positions: int, rotary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = torch.rand(batch, positions, rotary) * 6
    return turns.cos().to(dtype), turns.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 64, 2000])
def test_a_norm_is_the_released_one(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(3, 5, width, dtype=dtype) * 3, torch.rand(width, dtype=dtype) + 0.5
    error = (rms_norm(x, weight, 1e-6) - rms_norm_reference(x, weight, 1e-6)).abs().max()
    assert error <= ROUNDING[dtype] * rms_norm_reference(x, weight, 1e-6).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 5, 16, 8), (1, 1, 1, 6, 6), (3, 4, 7, 24, 12), (2, 2, 9, 128, 64)])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_normed_and_turned(shape: tuple[int, ...], dtype: torch.dtype, normed: bool) -> None:
    batch, heads, positions, width, rotary = shape
    torch.manual_seed(width)
    # Heads as a projection leaves them: a strided view, other heads beside them.
    wide = torch.full((batch, positions, heads + 2, width), torch.nan, dtype=dtype)
    wide[:, :, 1 : heads + 1] = torch.randn(batch, positions, heads, width, dtype=dtype)
    x_BNSD = wide[:, :, 1 : heads + 1].transpose(1, 2)
    weight_D = torch.rand(width, dtype=dtype) + 0.5
    for angle_batch in {1, batch}:
        cos, sin = angles(angle_batch, positions, rotary, dtype)
        plain = rms_norm_reference(x_BNSD, weight_D, 1e-5) if normed else x_BNSD
        wanted = rotate_reference(plain, cos, sin)
        got = norm_rotate(x_BNSD, weight_D if normed else None, cos, sin, 1e-5)
        assert got.is_contiguous() and got.dtype == dtype
        if normed:
            assert (got - wanted).abs().max() <= 2 * ROUNDING[dtype] * wanted.abs().max()
        else:
            assert torch.equal(got, wanted)  # rounding for rounding


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 4, 8), torch.ones(8), 1e-6).shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_D": torch.ones(7)}, r"weight_D.*7.*expected.*8"),
        ({"weight_D": torch.ones(8).half()}, r"weight_D.*float16.*expected.*float32"),
        ({"weight_D": torch.ones(8, 2)[:, 0]}, r"weight_D has strides \(2,\)"),
        ({"cos_BSR": torch.ones(1, 3, 4)}, r"cos_BSR.*3, 4.*expected.*1, 2, 4"),
        ({"cos_BSR": torch.ones(1, 2, 3), "sin_BSR": torch.ones(1, 2, 3)}, "3 angles: expected an even number"),
        ({"sin_BSR": None}, "sin_BSR must be given"),
        ({"x_BNSD": torch.ones(1, 3, 8, 2).transpose(2, 3)}, "side by side"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor | None], words: str) -> None:
    fits = {
        "x_BNSD": torch.ones(1, 3, 2, 8), "weight_D": torch.ones(8), "cos_BSR": torch.ones(1, 2, 4),
        "sin_BSR": torch.ones(1, 2, 4), "eps": 1e-6,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        norm_rotate(**(fits | change))
