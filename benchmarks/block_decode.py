"""How much does a K/V cache save over the released loop, and a block plan over that? At real layer sizes, on a CPU.

LLaDA2.0-mini's layer shapes (hidden 2048, 256 experts of 512, top-8 in 4 of 8 groups, a shared expert; 1 dense and 2
MoE layers, small vocabulary), random bf16 weights, a prompt of 128 tokens and two blocks of 32, unmasked in a fixed
random order, about 4 tokens per forward. Three ways to run the same forwards:

  a  the full window without cache, over a plain per-expert MoE as the released code computes it
  b  K/V cache, dense MoE (all rows of the block through their top-8)
  c  K/V cache and a block plan (default configuration)

Random weights route like nothing in nature, so two scales are searched first: how much tokens differ from each other
(distinct experts per layer in a dense forward of one block: 70 to 84, as dMoE and DES measured on LLaDA2.0-mini), and
how sharp attention is (cosine of adjacent forwards' expert loads: .985, as TIDE measured). The JSON says what was
reached.

The numbers are ratios on the same work in one process, alternating; results are checked against each other first.

Shape suffixes: B sequences, S rows, N rows of a block, H hidden.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import epoch_moe.block
import epoch_moe.experts.weights
import epoch_moe.freshlane.lane
from epoch_moe import BlockPlanContext, EpochConfig, patch, unpatch
from epoch_moe.decoding.kv_cache import BlockKVCache
from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from epoch_moe.outputs import output_file, write_json
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.context import open_context

BLOCK, PROMPT, BLOCKS, PER_FORWARD = 32, 128, 2, 4
MASK = 511
MISSING = object()
COUNTED = ("rows", "pairs", "active_experts", "weight_bytes", "lm_head_rows")


def build_model(hidden: int, experts: int, inner: int, seed: int) -> LLaDA2MoeModelLM:
    """One dense and two MoE layers of the released shapes, random bf16 weights."""
    config = LLaDA2MoeConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=3,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(hidden // 512, 1),
        head_dim=128,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        max_position_embeddings=4096,
        mask_token_id=MASK,
        eos_token_id=MASK - 1,
        pad_token_id=MASK - 1,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LLaDA2MoeModelLM(config)
    finally:
        torch.set_default_dtype(before)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.expert_bias = layer.mlp.gate.expert_bias.float()
    return model.eval()


def shape_inputs(model: LLaDA2MoeModelLM, spread: float, sharpness: float, seed: int) -> None:
    """Make tokens share a common direction (``spread`` is the rest) and attention ``sharpness`` times sharper."""
    generator = torch.Generator().manual_seed(seed)
    table = model.model.word_embeddings.weight
    with torch.no_grad():
        common = torch.randn(1, table.shape[1], generator=generator)
        own = torch.randn(table.shape, generator=generator)
        table.copy_(common + spread * own)
        for layer in model.model.layers:
            layer.attention.query_layernorm.weight.fill_(sharpness)


class Trajectory:
    """Token ids, and which rows of a block are decoded before each forward."""

    def __init__(self, batch: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.final_BS = torch.randint(0, MASK - 1, (batch, PROMPT + BLOCKS * BLOCK), generator=generator)
        self.orders = [
            torch.stack([torch.randperm(BLOCK, generator=generator) for _ in range(batch)]) for _ in range(BLOCKS)
        ]

    def blocks(self) -> Iterator[tuple[int, list[Tensor]]]:
        """(first row of the block, ids ``[B, end]`` before each of its forwards)."""
        for number, order_BN in enumerate(self.orders):
            begin = PROMPT + number * BLOCK
            states = []
            for done in range(0, BLOCK, PER_FORWARD):
                ids_BS = self.final_BS[:, : begin + BLOCK].clone()
                ids_BS[:, begin:] = MASK
                decoded_BN = order_BN[:, :done] + begin
                ids_BS.scatter_(1, decoded_BN, self.final_BS.gather(1, decoded_BN))
                states.append(ids_BS)
            yield begin, states


def block_causal(first: int, end: int) -> Tensor:
    """Bool mask ``[1,1,end-first,end]``: a row sees its own and earlier blocks."""
    blocks = torch.arange(end) // BLOCK
    return (blocks[first:, None] >= blocks[None, :])[None, None]


class ReleasedMoE(nn.Module):
    """Routed experts the way the released inference code runs them: counts to the host, one expert after another."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, None]:
        """``[B,S,H] -> [B,S,H]``."""
        block: Any = self.block
        ids_TK, weights_TK, _ = block.gate(x_BSH)
        x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
        order_P = ids_TK.flatten().argsort(stable=True)
        sorted_PH = x_TH[order_P // ids_TK.shape[1]]
        outputs, start = [], 0
        counts = ids_TK.flatten().bincount(minlength=len(block.experts)).tolist()
        for expert, count in zip(block.experts, counts, strict=True):
            if count:
                outputs.append(expert(sorted_PH[start : start + count]))
                start += count
        pairs_PH = torch.empty_like(sorted_PH)
        pairs_PH[order_P] = torch.cat(outputs)
        mixed_TH = (pairs_PH.view(*ids_TK.shape, -1).float() * weights_TK.unsqueeze(-1)).sum(dim=1)
        return mixed_TH.to(x_BSH.dtype).view_as(x_BSH) + block.shared_experts(x_BSH), None


@contextmanager
def released_layers(model: LLaDA2MoeModelLM) -> Iterator[None]:
    """The model with its MoE blocks computed as released, on the same weights."""
    layers = [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    before = [layer.mlp for layer in layers]
    for layer in layers:
        layer.mlp = ReleasedMoE(layer.mlp)
    try:
        yield
    finally:
        for layer, mlp in zip(layers, before, strict=True):
            layer.mlp = mlp


@torch.no_grad()
def run_full(model: LLaDA2MoeModelLM, trajectory: Trajectory) -> list[Tensor]:
    """(a): the whole window on every forward, LM head on all of it. Returns the block's hidden logits per forward."""
    logits = []
    for begin, states in trajectory.blocks():
        mask = block_causal(0, begin + BLOCK)
        for ids_BS in states:
            logits.append(model(ids_BS, attention_mask=mask).logits[:, begin:])
    return logits


@torch.no_grad()
def run_cached(model: LLaDA2MoeModelLM, trajectory: Trajectory, plan: EpochConfig | None) -> tuple[list[Tensor], Any]:
    """(b) and (c): K/V cache, commit rides with the next cold pass. Returns logits of live rows and the context."""
    context = open_context(model, plan)
    cache = BlockKVCache(model.config.num_hidden_layers, PROMPT + BLOCKS * BLOCK)
    batch = trajectory.final_BS.shape[0]
    logits = []
    for begin, states in trajectory.blocks():
        end = begin + BLOCK
        with context.block(batch=batch, window=BLOCK):
            for ids_BW in states:
                first = cache.length
                ids_BS = ids_BW[:, first:]
                mask = block_causal(first, end) if first < begin else None
                with context.iteration(ids_BS, mask_id=MASK, lead=begin - first):
                    out = model.model(
                        input_ids=ids_BS,
                        attention_mask=mask,
                        position_ids=torch.arange(first, end).unsqueeze(0),
                        past_key_values=cache,
                        use_cache=True,
                    )
                if first < begin:
                    cache.commit(begin - first)
                hidden_BNH = out.last_hidden_state[:, -BLOCK:]
                live_BN = ids_BS[:, -BLOCK:] == MASK
                rows_RH = hidden_BNH[live_BN] if context.lm_head_rows == "live" else hidden_BNH.flatten(0, 1)
                head_RV = model.lm_head(rows_RH).float()
                logits.append(head_RV if context.lm_head_rows == "live" else head_RV[live_BN.flatten()])
                context.count_lm_head(rows_RH.shape[0])
                context.count_attention(ids_BS.numel() * end)
    return logits, context


@torch.no_grad()
def regime(model: LLaDA2MoeModelLM, trajectory: Trajectory) -> dict[str, float]:
    """Distinct experts per layer of one sequence's block in a dense forward, and cosine of adjacent expert loads."""
    experts = model.config.num_experts
    loads: dict[int, list[Tensor]] = defaultdict(list)
    hooks = []
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):

            def record(module: nn.Module, args: Any, out: Any, number: int = number) -> None:
                loads[number].append(out[0][-BLOCK:].flatten().bincount(minlength=experts).float())

            hooks.append(layer.mlp.gate.register_forward_hook(record))
    one = Trajectory(1, 0)
    one.final_BS, one.orders = trajectory.final_BS[:1], [order[:1] for order in trajectory.orders]
    for _, states in one.blocks():
        for ids_BS in states:
            model.model(ids_BS, attention_mask=block_causal(0, ids_BS.shape[1]))
    for hook in hooks:
        hook.remove()
    steps = BLOCK // PER_FORWARD
    distinct = [float((load > 0).sum()) for layer in loads.values() for load in layer]
    cosines = [
        float(torch.cosine_similarity(layer[i], layer[i + 1], dim=0))
        for layer in loads.values()
        for i in range(len(layer) - 1)
        if (i + 1) % steps
    ]
    return {"distinct_experts": statistics.mean(distinct), "adjacent_load_cosine": statistics.mean(cosines)}


def calibrate(model: LLaDA2MoeModelLM, trajectory: Trajectory, seed: int) -> dict[str, float]:
    """Search the two scales for the released model's regime; the best point found."""
    best: dict[str, float] = {}
    for sharpness in (1.0, 2.0, 4.0):
        low, high = 0.02, 4.0
        for _ in range(7):
            spread = (low * high) ** 0.5
            shape_inputs(model, spread, sharpness, seed)
            point = {"spread": spread, "sharpness": sharpness, **regime(model, trajectory)}
            off_experts, off_cosine = point["distinct_experts"] - 77, point["adjacent_load_cosine"] - 0.985
            point["distance"] = abs(off_experts) / 7 + abs(off_cosine) / 0.015
            if not best or point["distance"] < best["distance"]:
                best = point
            if point["distinct_experts"] < 77:
                low = spread
            else:
                high = spread
    shape_inputs(model, best["spread"], best["sharpness"], seed)
    return best


@contextmanager
def timers(model: LLaDA2MoeModelLM, seconds: dict[str, float]) -> Iterator[None]:
    """Time the parts of a planned forward, each without what is nested in it, by wrapping their functions."""
    stack: list[float] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            stack.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                seconds[name] += spent - stack.pop()
                if stack:
                    stack[-1] += spent

        return wrapper

    shared = [layer.mlp.shared_experts for layer in model.model.layers if hasattr(layer.mlp, "shared_experts")]
    places: list[tuple[Any, str, str]] = [
        (epoch_moe.freshlane.lane, "router_logits", "gate"),
        (epoch_moe.experts.weights, "run_experts", "experts"),
        *((module, "forward", "shared expert") for module in shared),
        # What is left of these, without what is nested in them, is there for the plan alone.
        (epoch_moe.block.EpochMoEBlock, "forward", "plan: in the MoE layers"),
        (BlockPlanContext, "begin_block", "plan: per block"),
        (BlockPlanContext, "_check_rows", "plan: per forward"),
        (BlockPlan, "next_forward", "plan: per forward"),
        (BlockPlan, "complete", "plan: per forward"),
    ]
    before = [(owner, name, owner.__dict__.get(name, MISSING)) for owner, name, _ in places]
    for owner, name, label in places:
        setattr(owner, name, timed(label, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in before:
            if function is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, function)


def relative_rms(value: Tensor, reference: Tensor) -> float:
    """Root mean square difference over the reference's."""
    return float((value.float() - reference.float()).pow(2).mean().sqrt() / reference.float().pow(2).mean().sqrt())


def check(model: LLaDA2MoeModelLM, trajectory: Trajectory) -> dict[str, float]:
    """(a), (b) and the exact plan compute the same logits, up to bf16 rounding and the near-ties that it flips.

    Returns largest relative RMS differences over the forwards; (c)'s to (b) with them.
    """
    with released_layers(model):
        full = run_full(model, trajectory)
    patch(model, None)
    dense, _ = run_cached(model, trajectory, None)
    exact, _ = run_cached(model, trajectory, EpochConfig.exact())
    default, _ = run_cached(model, trajectory, EpochConfig())
    unpatch(model)
    live = [ids[:, begin:] == MASK for begin, states in trajectory.blocks() for ids in states]
    errors = {
        "b_against_a": max(relative_rms(d, f[m]) for d, f, m in zip(dense, full, live, strict=True)),
        "exact_plan_against_b": max(relative_rms(e, d) for e, d in zip(exact, dense, strict=True)),
    }
    for name, error in errors.items():
        if not error < 0.05:
            raise SystemExit(f"results disagree, nothing is timed: {name} relative RMS {error:.4f}, expected < 0.05")
    # Not a gate: the default plan is approximate, and random weights say nothing about what that costs in quality.
    return {**errors, "c_against_b": max(relative_rms(c, d) for c, d in zip(default, dense, strict=True))}


def measure(model: LLaDA2MoeModelLM, trajectory: Trajectory, repeats: int, plan: EpochConfig) -> dict[str, Any]:
    """Seconds of (a), (b), (c), alternating; medians, counters and where (c)'s time goes."""
    seconds: dict[str, list[float]] = defaultdict(list)
    work: dict[str, Any] = {}
    for repeat in range(repeats + 1):
        with released_layers(model):
            start = time.perf_counter()
            run_full(model, trajectory)
            spent = {"a": time.perf_counter() - start}
        patch(model, plan)
        for name, config in (("b", None), ("c", plan)):
            start = time.perf_counter()
            _, context = run_cached(model, trajectory, config)
            spent[name] = time.perf_counter() - start
            work[name] = context.counters.read().as_dict()
        unpatch(model)
        shown = ", ".join(f"{k} {v:.2f} s" for k, v in spent.items())
        print(f"  {shown}{'' if repeat else ' (warm-up)'}", flush=True)
        if repeat:
            for name, value in spent.items():
                seconds[name].append(value)
    parts: dict[str, float] = defaultdict(float)
    patch(model, plan)
    with timers(model, parts):
        start = time.perf_counter()
        run_cached(model, trajectory, plan)
        total = time.perf_counter() - start
    unpatch(model)
    overhead = sum(value for name, value in parts.items() if name.startswith("plan:"))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": median,
        "seconds_all": dict(seconds),
        "ratios": {"a_over_b": median["a"] / median["b"], "b_over_c": median["b"] / median["c"]},
        "work": work,
        "work_ratios": {name: work["c"][name] / work["b"][name] for name in COUNTED},
        "plan_overhead_share": overhead / total,
        "parts_of_c": {name: value / total for name, value in sorted(parts.items())},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes (default: 1 8)")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats after one warm-up (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small layers (hidden 512, 64 experts): does it run?")
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    arguments = parser.parse_args()
    shape = (512, 64, 128) if arguments.quick else (2048, 256, 512)
    plan = EpochConfig()
    print(f"building layers: hidden {shape[0]}, {shape[1]} experts of {shape[2]}", flush=True)
    model = build_model(*shape, seed=arguments.seed)
    point = calibrate(model, Trajectory(1, arguments.seed), arguments.seed)
    print("regime: " + ", ".join(f"{k} {v:.4g}" for k, v in point.items()), flush=True)
    if not arguments.quick and not 70 <= point["distinct_experts"] <= 84:
        raise SystemExit(
            f"regime not reached, nothing is timed: {point['distinct_experts']:.1f} distinct experts, not 70 to 84"
        )
    result: dict[str, Any] = {
        "shape": {"hidden": shape[0], "experts": shape[1], "expert_inner": shape[2], "moe_layers": 2},
        "regime": point,
        "regime_of_the_released_model": {"distinct_experts": "70 to 84", "adjacent_load_cosine": 0.985},
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "config": vars(plan),
        "batches": {},
    }
    for batch in arguments.batch:
        trajectory = Trajectory(batch, arguments.seed)
        print(f"batch {batch}: checking", flush=True)
        errors = check(model, trajectory)
        numbers = measure(model, trajectory, arguments.repeats, plan)
        result["batches"][str(batch)] = {"relative_rms": errors, **numbers}
        print(
            f"batch {batch} (CPU): a/b {numbers['ratios']['a_over_b']:.2f}, b/c {numbers['ratios']['b_over_c']:.2f}, "
            f"plan overhead {numbers['plan_overhead_share']:.1%} of c, "
            + ", ".join(f"{k} {v:.2f}" for k, v in numbers["work_ratios"].items()),
            flush=True,
        )
    write_json(arguments.json, result)


if __name__ == "__main__":
    sys.exit(main())
