"""`ResidencyConfig`: how many experts stay in fast memory, who decides which, and where the others lie."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from epoch_moe.checks import MOST, choice, flag, instance, wrong

Miss = Literal["auto", "load", "compute"]
Tier = Literal["auto", "host", "disk"]
POLICIES = ("retention", "lru")

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, kw_only=True)
class ResidencyConfig:
    """How a model runs with a part of its experts in fast memory. It changes where weights lie, never a result.

    Attributes:
        budget: fast memory for routed experts. A share in (0, 1] of each layer's experts (0.4, or ``"40%"``), rounded
            down to whole experts; or bytes for all layers together, as an integer or as text (``"2GB"``, ``"1.5GiB"``).
            Bytes include the scratch buffers that experts pass through which are not kept; a share does not.
        policy: who stays: ``"retention"`` (predicted reuse) or ``"lru"`` (used last).
        source: folder of a checkpoint that holds the same experts. None: the one that the model was loaded from, where
            it is known and its experts are the model's bit for bit; otherwise they are written to a temporary file.
        spill_dir: folder of that file; None: the system's folder for temporary files.
        miss: what happens to an expert that is not in fast memory: ``"load"``, ``"compute"`` it where it lies, or
            ``"auto"``: the cheaper one by measured speeds. On a CPU alone there is nothing to choose: both read it
            from the file.
        tier: where the other experts lie: ``"disk"``, ``"host"`` (main memory, pinned where the device is a GPU), or
            ``"auto"``: host beside a GPU if they fit into half of the free main memory, else disk.
        drop_cache: have the system forget file contents that were read, so that its page cache stays small too.

    Example:
        >>> import epoch_moe
        >>> residency = epoch_moe.ResidencyConfig(budget="40%", policy="lru")
        >>> model, _ = epoch_moe.load_model("tiny-llada2", residency=residency)
        >>> epoch_moe.residency_report(model).hit_rate is None  # no forward yet
        True
    """

    budget: float | int | str = 0.4
    policy: str = "retention"
    source: str | Path | None = None
    spill_dir: str | Path | None = None
    miss: Miss = "auto"
    tier: Tier = "auto"
    drop_cache: bool = False

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        choice("ResidencyConfig.policy", self.policy, POLICIES)
        choice("ResidencyConfig.miss", self.miss, ("auto", "load", "compute"))
        choice("ResidencyConfig.tier", self.tier, ("auto", "host", "disk"))
        flag("ResidencyConfig.drop_cache", self.drop_cache)
        for name in ("source", "spill_dir"):
            instance(f"ResidencyConfig.{name}", getattr(self, name), (str, Path, type(None)), "None or a folder")


def parse_budget(budget: Any) -> float | int:
    """A share of experts as float, or a number of bytes as int.

    Raises:
        ValueError: neither.
    """
    found: Any = budget
    if isinstance(budget, str) and (match := re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%|[a-zA-Z]*)\s*", budget)):
        number, unit = float(match[1]), match[2].upper()
        if unit in _UNITS:
            found = int(min(number * _UNITS[unit], 2.0 * MOST))
        elif unit in ("", "%"):
            found = number / (100.0 if unit else 1.0)
    if not isinstance(found, bool) and (
        (isinstance(found, int) and 1 <= found <= MOST) or (isinstance(found, float) and 0.0 < found <= 1.0)
    ):
        return found
    raise wrong(
        "ResidencyConfig.budget",
        budget,
        "a share in (0, 1] such as 0.4 or '40%', or bytes such as 2_000_000_000 or '2GB'",
    )


def slots_per_layer(
    budget: float | int | str, num_experts: int, bytes_L: Sequence[int], scratch_bytes: int
) -> list[int]:
    """How many experts of each layer a budget keeps in fast memory.

    Bytes are shared out evenly: the same share of every layer, and one more for the first layers while they last. No
    slot at all is possible with bytes: then every expert passes through the scratch buffers.

    Args:
        budget: see `ResidencyConfig`.
        num_experts: of each layer.
        bytes_L: bytes of one expert of each layer.
        scratch_bytes: what the buffers take that bytes have to hold too.

    Raises:
        ValueError: less than one expert; names the smallest budget.
    """
    amount = parse_budget(budget)
    if isinstance(amount, float):
        slots = math.floor(amount * num_experts + 1e-9)  # 0.07 * 100 is 7.000000000000001
        if slots < 1:
            raise ValueError(
                f"ResidencyConfig.budget={budget!r} keeps {amount * num_experts:.2f} of a layer's {num_experts} "
                f"experts: the smallest share is {1 / num_experts:.4g} (one expert); less is possible in bytes, from "
                f"{scratch_bytes} bytes on, where every expert is read anew whenever it is needed"
            )
        return [slots] * len(bytes_L)
    if amount < scratch_bytes:
        raise ValueError(
            f"ResidencyConfig.budget={budget!r} ({amount} bytes) is below the buffers that experts pass through: the "
            f"smallest budget is {scratch_bytes} bytes; one expert per layer more takes {sum(bytes_L)} bytes each"
        )
    everywhere = min((amount - scratch_bytes) // sum(bytes_L), num_experts)
    left = amount - scratch_bytes - everywhere * sum(bytes_L)
    slots_L = []
    for size in bytes_L:
        one_more = left >= size and everywhere < num_experts
        left -= size * one_more
        slots_L.append(everywhere + one_more)
    return slots_L
