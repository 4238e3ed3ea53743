"""What a `BlockPlanContext` refuses before anything is changed.

Shape suffixes: B sequences, S rows per sequence, N window rows, C lead rows (S = C + N).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epoch_moe.checks import FLOAT_DTYPES, MOST, WHOLE_DTYPES, flag, tensor, whole
from epoch_moe.experts.views import ExpertViews


def check_begin(pool: int | None, batch: int, window: int, prefix: int, prefix_constant: bool, future: int) -> None:
    """The arguments of a block, on a model whose rows share pools of experts in routing blocks of ``pool``."""
    whole("batch", batch, "sequences", least=1)
    whole("window", window, "rows of a sequence", least=1)
    whole("prefix", prefix, "rows before the block", least=-MOST)
    whole("future", future, "rows behind the block", least=-MOST)
    if prefix < 0 or future < 0 or prefix + future >= window:
        raise ValueError(
            f"prefix={prefix} and future={future} must be at least 0 and leave rows of the window={window} to the block"
        )
    flag("prefix_constant", prefix_constant)
    if pool is not None and prefix_constant and prefix % pool:
        raise ValueError(
            f"prefix={prefix} with prefix_constant=True: this model's rows share a pool of experts in routing "
            f"blocks of {pool}, so prefix rows that share one with the block change with it; use a prefix of whole "
            "routing blocks, or prefix_constant=False"
        )


def check_devices(layers: Sequence[ExpertViews]) -> None:
    """The layers of a block plan lie on one device."""
    devices = sorted({str(experts.down_EHF.device) for experts in layers})
    if len(devices) > 1:
        raise ValueError(
            f"the MoE layers lie on {', '.join(devices)}: the rows of a block plan are on one device; put the "
            "model on one, or decode without a plan (plan=None)"
        )


def check_iteration(
    pool: int | None,
    batch: int,
    window: int,
    ids_BS: Tensor,
    mask_id: int | None,
    valid_BS: Tensor | None,
    lead: int,
    live_BN: Tensor | None,
    changed_BN: Tensor | None,
    capacity: int | None,
) -> None:
    """The rows of one forward in a block of ``batch`` sequences and ``window`` rows."""
    tensor("ids_BS", ids_BS, WHOLE_DTYPES, ("sequences", "rows"))
    whole("lead", lead, "rows before the window")
    if mask_id is not None:
        whole("mask_id", mask_id, "a token id", least=-MOST)
    if capacity is not None:
        whole("capacity", capacity, "fresh rows")
    if pool is not None and lead % pool:
        raise ValueError(
            f"lead={lead}: this model's rows share a pool of experts in routing blocks of {pool}, so the lead must "
            f"be whole routing blocks: use decode blocks whose length is a multiple of {pool}"
        )
    if mask_id is None and live_BN is None:
        raise ValueError("pass mask_id, or live_BN for a decoder without a mask token")
    if tuple(ids_BS.shape) != (batch, lead + window):
        raise ValueError(
            f"ids_BS has shape {tuple(ids_BS.shape)}: this block has {batch} sequences and a window of {window} "
            f"rows, so with lead={lead} expected [{batch}, {lead + window}]"
        )
    for name, mask, length in (
        ("valid_BS", valid_BS, lead + window), ("live_BN", live_BN, window), ("changed_BN", changed_BN, window),
    ):  # fmt: skip
        if mask is not None:
            tensor(name, mask, torch.bool, (batch, length))


def check_prefill(ids_BS: Tensor, valid_BS: Tensor | None) -> None:
    """The rows of a forward outside of blocks: token ids, or anything in their place."""
    tensor("ids_BS", ids_BS, (*WHOLE_DTYPES, *FLOAT_DTYPES), ("sequences", "rows"))
    if valid_BS is not None:
        tensor("valid_BS", valid_BS, torch.bool, ids_BS.shape)
