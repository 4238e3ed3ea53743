"""How many kernels does a forward launch, how often does it wait for the device, and what does it cost the host?

Launches and waits are counted on fake CUDA tensors of the released models' layer shapes: no GPU is needed and nothing
is computed. A wait would raise there, so a forward that is counted has none. The launches of one MoE decoder layer are
the difference of two model depths. Host time is measured on this CPU with kernels that do nothing: a lower bound of an
eager GPU forward's, to compare with other rows of the same table only.

Beside them stand floors by arithmetic, not measured: the bytes of the experts that the forward touches at an H100's
3.35 TB/s, its floating-point operations at 800 TFLOP/s, and its launches at 2 us captured and 5 us eager.

    python benchmarks/launches.py --json launches.json
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # kernels that do nothing need no compiler

import torch
from parts.device_reference import use_references
from parts.fake_cuda import Replacements, fake_device
from parts.launch_counter import LaunchCounter
from torch import Tensor

import epoch_moe
import epoch_moe.patching.refuse
from epoch_moe.block import EpochMoEBlock
from epoch_moe.config import EpochConfig
from epoch_moe.decoding.kv_cache import BlockKVCache
from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEConfig, LLaDAMoEModelLM
from epoch_moe.outputs import output_file, write_json
from epoch_moe.plan.context import BlockPlanContext

BLOCK, PROMPT = 32, 128
KINDS = ("cold", "warm", "refresh", "commit")
"""Of forwards: a block's first over a cached prompt; one behind it; one where every row is due; the next block's first,
which carries the finished block in front of it."""
EAGER_US, CAPTURED_US = 5.0, 2.0
BYTES_PER_SECOND, FLOPS_PER_SECOND = 3.35e12, 800e12


@dataclass(frozen=True)
class Shape:
    """A released model's layer, and how many of them it has."""

    family: str
    layers: int
    hidden: int
    inner: int
    dense_inner: int
    heads: int
    kv_heads: int
    experts: int
    shared: int

    def model(self, layers: int) -> torch.nn.Module:
        """The model with ``layers`` decoder layers, in bf16 on the default device."""
        sizes = {
            "hidden_size": self.hidden, "num_hidden_layers": layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "num_experts": self.experts, "num_experts_per_tok": 8,
        }  # fmt: skip
        torch.set_default_dtype(torch.bfloat16)
        try:
            if self.family == "llada2":
                config = LLaDA2MoeConfig(
                    vocab_size=157184, intermediate_size=self.dense_inner, moe_intermediate_size=self.inner,
                    head_dim=self.hidden // self.heads, first_k_dense_replace=1, n_group=8, topk_group=4,
                    num_shared_experts=self.shared, mask_token_id=156895, eos_token_id=156892, pad_token_id=156892,
                    **sizes,
                )  # fmt: skip
                model = LLaDA2MoeModelLM(config).eval()
                for layer in model.model.layers[1:]:
                    layer.mlp.gate.expert_bias = layer.mlp.gate.expert_bias.float()
                return model
            config = LLaDAMoEConfig(vocab_size=157184, expert_intermediate_size=self.inner, **sizes)
            return LLaDAMoEModelLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


SHAPES = {
    "llada2-mini": Shape("llada2", 20, 2048, 512, 5120, 16, 4, 256, 1),
    "llada2-flash": Shape("llada2", 32, 4096, 1024, 9216, 32, 4, 256, 1),
    "llada-moe": Shape("llada_moe", 16, 2048, 1024, 8192, 16, 16, 64, 0),
}
HOST_CHECKS = ("_check_ids",)
"""Functions that look at values on a CPU only."""
PLANS: dict[str, EpochConfig | None] = {"dense": None, "exact": EpochConfig.exact(), "default": EpochConfig()}


def forwards(
    model: torch.nn.Module, plan: EpochConfig | None, batch: int, cached: bool, wanted: Sequence[str] = KINDS
) -> dict[str, LaunchCounter]:
    """What each kind of forward launches.

    Args:
        model: patched, on a fake device.
        plan: of the decode.
        batch: sequences.
        cached: the prompt's K/V are cached, as by `generate`; else the whole canvas is in every forward.
        wanted: kinds.
    """
    context, counted = BlockPlanContext(model, plan), {}
    interval = None if plan is None else plan.refresh_interval
    last = max(2, interval or 0)
    kinds = {number: kind for number, kind in ((0, "cold"), (1, "warm"), (last, "refresh")) if kind in wanted}
    cache = None
    if cached:
        cache = BlockKVCache(model.config.num_hidden_layers, PROMPT + 2 * BLOCK)
        ids_BS = torch.zeros(batch, PROMPT, dtype=torch.int64)
        with context.prefill(ids_BS):
            model.model(ids_BS, position_ids=torch.arange(PROMPT).unsqueeze(0), past_key_values=cache, use_cache=True)
        cache.commit(PROMPT)

    def run(lead: int, kind: str) -> None:
        rows = lead + BLOCK if cached else PROMPT + 2 * BLOCK
        first = cache.length if cache is not None else 0
        inputs = {"position_ids": torch.arange(first, first + rows).unsqueeze(0)}
        if cache is not None:
            inputs |= {"past_key_values": cache, "use_cache": True}
        if lead:
            inputs["attention_mask"] = torch.zeros(1, 1, rows, first + rows, dtype=torch.bfloat16)
        ids_BS = torch.zeros(batch, rows, dtype=torch.int64)
        with LaunchCounter() as counter, context.iteration(ids_BS, mask_id=5, lead=lead):
            model.model(ids_BS, **inputs)
        if kind:
            counted[kind] = counter

    shape = {"window": BLOCK} if cached else {"window": PROMPT + 2 * BLOCK, "prefix": PROMPT, "future": BLOCK}
    with context.block(batch=batch, **shape):
        for number in range(max(kinds) + 1):
            run(0, kinds.get(number, ""))
    if cached and "commit" in wanted:
        with context.block(batch=batch, **shape):
            run(BLOCK, "commit")
    return counted


def launch_table(shape: Shape, batches: list[int], kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """Launches of one MoE decoder layer by part, and of a whole forward."""
    rows, counted = [], {}
    with fake_device():
        for layers in (2, 3):
            model = shape.model(layers)
            epoch_moe.patch(model, EpochConfig())
            for batch in batches:
                for name, plan in PLANS.items():
                    counted[layers, batch, name] = forwards(model, plan, batch, shape.family == "llada2", kinds)
    for batch in batches:
        for name in PLANS:
            two, three = counted[2, batch, name], counted[3, batch, name]
            for kind in three:
                parts = Counter(three[kind].parts)
                parts.subtract(two[kind].parts)
                layer = sum(parts.values())
                whole = two[kind].total + layer * (shape.layers - 2)
                rows.append(
                    {
                        "plan": name, "batch": batch, "forward": kind, "layer": layer, "whole": whole,
                        "parts": {part: count for part, count in sorted(parts.items()) if count},
                        "eager_ms": whole * EAGER_US / 1e3, "captured_ms": whole * CAPTURED_US / 1e3,
                    }
                )  # fmt: skip
    return rows


def floors(shape: Shape, batches: list[int]) -> list[dict[str, Any]]:
    """Arithmetic of one forward over a block of each sequence: milliseconds of weights and of products.

    Every expert is touched as often as random routing of the rows would: an upper bound of the distinct experts.
    """
    rows = []
    expert = 3 * shape.hidden * shape.inner
    head = shape.hidden // shape.heads
    attention = shape.hidden * head * (2 * shape.heads + 2 * shape.kv_heads)
    for batch in batches:
        count = batch * BLOCK
        touched = shape.experts * (1 - (1 - 8 / shape.experts) ** count)
        layer_bytes = 2 * (expert * (touched + shape.shared) + attention)
        layer_flops = 2 * count * (expert * (8 + shape.shared) + attention)
        rows.append(
            {
                "batch": batch, "experts_touched": round(touched, 1),
                "weights_ms": shape.layers * layer_bytes / BYTES_PER_SECOND * 1e3,
                "products_ms": shape.layers * layer_flops / FLOPS_PER_SECOND * 1e3,
            }
        )  # fmt: skip
    return rows


class WaitCounter(Replacements):
    """Counts, within its ``with`` block, what would wait for a device: values read by the host."""

    READS = ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero", "cpu", "numpy")

    def __enter__(self) -> WaitCounter:
        self.places: Counter[str] = Counter()
        for name in self.READS:
            self.setattr(Tensor, name, self._counting(getattr(Tensor, name)))
        return super().__enter__()

    def _counting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            frames = traceback.extract_stack()[:-1]
            stack = [frame for frame in frames if "/epoch_moe/" in frame.filename]
            # Reads inside a reference that stands for a kernel are none of the library's.
            inside = any(frame.filename.endswith("_reference.py") for frame in frames)
            checks = any(f.name in HOST_CHECKS for f in stack[-2:])
            if stack and not inside and not checks:
                self.places[f"{stack[-1].filename.rsplit('/epoch_moe/', 1)[1]}:{stack[-1].name}"] += 1
            return read(tensor, *args, **kwargs)

        return counted


def generate_waits(plan: EpochConfig | None) -> dict[str, Any]:
    """What `generate` would wait for on a GPU, per forward, on the tiny checkpoint (kernels by their references)."""
    with Replacements() as replace:
        use_references(replace)
        model, tokenizer = epoch_moe.load_model("tiny-llada2", dtype="float32")
        epoch_moe.patch(model, EpochConfig(backend="triton"))
        prompts = [tokenizer(text)["input_ids"] for text in ("sum 3 6 5 4 2:", "work out 3+8+2-3+4-9-1+7:")]
        if plan is not None:
            plan = dataclasses.replace(plan, backend="triton")
        with WaitCounter() as waits:
            out = epoch_moe.generate(model, prompts, gen_length=64, plan=plan)
    return {
        "forwards": out.forwards, "per_forward": sum(waits.places.values()) / out.forwards,
        "places": dict(waits.places.most_common()),
    }  # fmt: skip


def rank_waits() -> dict[str, Any]:
    """What one warm MoE layer launches and waits for with experts on ranks (gloo, one process, rows as lists)."""
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            for layout in ("sharded", "replicated"):
                model, _ = epoch_moe.load_model("tiny-llada2", dtype="float32")
                epoch_moe.patch(model, EpochConfig(), ep_group=torch.distributed.group.WORLD, ep_layout=layout)
                layers = sum(isinstance(m, EpochMoEBlock) for m in model.modules())
                ids_BS = torch.full((1, BLOCK), model.config.mask_token_id)
                context = BlockPlanContext(model, EpochConfig())
                with torch.no_grad(), context, context.block(batch=1, window=BLOCK):
                    for _ in range(2):
                        waits, launches = WaitCounter(), LaunchCounter()
                        with context.iteration(ids_BS, mask_id=model.config.mask_token_id), waits, launches:
                            model.model(ids_BS)
                counts[layout] = {
                    "waits_per_layer": sum(waits.places.values()) / layers, "places": dict(waits.places),
                    "launches_in_the_lane_per_layer": launches.parts["experts"] / layers,
                }  # fmt: skip
        finally:
            torch.distributed.destroy_process_group()
    return counts


def host_microseconds() -> dict[str, float]:
    """CPU time of one MoE decoder layer's Python and torch calls, by kernels that do nothing on rows of 16 numbers."""
    from triton.runtime.interpreter import InterpretedFunction

    def build(layers: int) -> torch.nn.Module:
        torch.manual_seed(0)
        config = LLaDA2MoeConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=1,
            num_key_value_heads=1, head_dim=16, moe_intermediate_size=16, num_experts=16, num_experts_per_tok=8,
            first_k_dense_replace=1, n_group=4, topk_group=4, mask_token_id=63, eos_token_id=62, pad_token_id=62,
        )  # fmt: skip
        model = LLaDA2MoeModelLM(config).eval()
        epoch_moe.patch(model, EpochConfig(backend="triton"))
        return model

    def best(model: torch.nn.Module, plan: EpochConfig | None) -> float:
        ids_BS, positions, least = torch.full((1, 8), 63), torch.arange(8).unsqueeze(0), float("inf")
        context = BlockPlanContext(model, plan and dataclasses.replace(plan, backend="triton"))
        for _ in range(8):
            with context.block(batch=1, window=8):
                for number in range(4):
                    start = time.process_time()
                    with context.iteration(ids_BS, mask_id=63):
                        model.model(ids_BS, position_ids=positions)
                    if number:
                        least = min(least, time.process_time() - start)
        return least

    empty, new_empty = torch.empty, Tensor.new_empty
    with torch.no_grad(), Replacements() as replace:
        replace.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)
        # What a kernel that does nothing leaves are indices in range.
        replace.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).zero_())
        replace.setattr(Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).zero_())
        few, many = build(2), build(8)
        return {name: (best(many, plan) - best(few, plan)) / 6 * 1e6 for name, plan in PLANS.items()}


def report(result: dict[str, Any]) -> str:
    """The tables in text."""
    lines = []
    for name, shape in result["shapes"].items():
        lines += ["", f"{name}: launches of a MoE decoder layer and of a whole forward (ms by arithmetic)"]
        lines.append("plan      batch  forward   layer   whole  eager  captured  parts")
        for row in shape["launches"]:
            parts = ", ".join(f"{part} {count}" for part, count in row["parts"].items())
            lines.append(
                f"{row['plan']:9} {row['batch']:5}  {row['forward']:8} {row['layer']:6} {row['whole']:7} "
                f"{row['eager_ms']:6.1f} {row['captured_ms']:9.1f}  {parts}"
            )
        for row in shape["floors"]:
            lines.append(
                f"floor, batch {row['batch']}: weights {row['weights_ms']:.2f} ms ({row['experts_touched']} experts), "
                f"products {row['products_ms']:.2f} ms"
            )
    lines += ["", "waits of generate per forward (tiny checkpoint, kernels by their references):"]
    lines += [f"  {name:8} {waits['per_forward']:.2f}  {waits['places']}" for name, waits in result["generate"].items()]
    lines += ["", "one layer with experts on ranks (rows as lists):"]
    lines += [
        f"  {layout:10} waits {row['waits_per_layer']:.2f}, "
        f"launches in the lane {row['launches_in_the_lane_per_layer']:.1f}"
        for layout, row in result["ranks"].items()
    ]
    lines += ["", "host CPU us per MoE decoder layer, kernels that do nothing, this CPU:"]
    lines.append("  " + ", ".join(f"{name} {us:.0f}" for name, us in result["host_us"].items()))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llada2-mini", "llada-moe"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 512])
    parser.add_argument("--json", type=output_file, help="JSON file for the numbers")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"torch": torch.__version__, "shapes": {}}
    for name in given.shapes:
        shape = SHAPES[name]
        result["shapes"][name] = {
            "launches": launch_table(shape, given.batches),
            "floors": floors(shape, given.batches),
        }
    result["generate"] = {name: generate_waits(plan) for name, plan in PLANS.items()}
    result["ranks"] = rank_waits()
    result["host_us"] = host_microseconds()
    print(report(result))
    write_json(given.json, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
