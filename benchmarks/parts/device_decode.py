"""A block's decode on a device: dense and with a plan, experts in torch, in Triton, and captured as CUDA graphs.

A model of LLaDA2.0-mini's layers (one dense, two MoE layers), random weights; a prompt of 128 tokens in the K/V cache,
then one block of 32 rows per sequence, 4 more decoded before each of its forwards. Only hidden states are computed: the
vocabulary is small, so that an LM head would say nothing.

Shape suffixes: B sequences, S rows, N rows of the block, H hidden.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from block_decode import BLOCK, MASK, PER_FORWARD, PROMPT, Trajectory, block_causal, build_model, shape_inputs
from torch import Tensor

from epoch_moe import EpochConfig, patch, unpatch
from epoch_moe.decoding.kv_cache import BlockKVCache
from epoch_moe.plan.context import open_context

CALIBRATED = Path(__file__).resolve().parent.parent / "results" / "block_decode.json"
RELEASED_SIZES, TINY_SIZES = (2048, 256, 512), (128, 16, 32)


@dataclass(frozen=True)
class Way:
    """How the block is decoded.

    Attributes:
        name: for the report.
        backend: of the routed experts.
        plan: with the default plan, or dense.
        captured: iterations replayed as graphs.
    """

    name: str
    backend: str
    plan: bool
    captured: bool = False


WAYS = (
    Way("dense, grouped_mm", "grouped", False),
    Way("dense, triton", "triton", False),
    Way("plan, grouped_mm", "grouped", True),
    Way("plan, triton", "triton", True),
)
GRAPH = Way("plan, triton, graph", "triton", True, captured=True)


def make_model(device: torch.device, dry: bool, seed: int) -> Any:
    """The model on the device, in the regime that `block_decode.py` found for the released layers on a CPU."""
    with torch.device(device):
        model = build_model(*(TINY_SIZES if dry else RELEASED_SIZES), seed=seed)
    found = json.loads(CALIBRATED.read_text())["regime"]
    shape_inputs(model, found["spread"], found["sharpness"], seed)
    # The interpreter's bf16 is not a device's.
    return model.float() if dry else model


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Decode:
    """One batch's block, decoded again and again over the same K/V cache.

    Args:
        model: of `make_model`, not patched.
        batch: B.
        forwards: of the block; 8 decode it all.
        seed: of the tokens.
    """

    def __init__(self, model: Any, batch: int, seed: int, forwards: int = BLOCK // PER_FORWARD):
        self.model, self.batch = model, batch
        self.device = model.lm_head.weight.device
        begin, states = next(Trajectory(batch, seed).blocks())
        assert begin == PROMPT
        self.states = [ids_BS.to(self.device) for ids_BS in states[:: len(states) // forwards][:forwards]]
        self.cache = BlockKVCache(model.config.num_hidden_layers, PROMPT + BLOCK)
        self.positions_1N = torch.arange(PROMPT, PROMPT + BLOCK, device=self.device).unsqueeze(0)
        prompt_BS = self.states[0][:, :PROMPT]
        model.model(
            input_ids=prompt_BS, attention_mask=block_causal(0, PROMPT).to(self.device), past_key_values=self.cache,
            position_ids=torch.arange(PROMPT, device=self.device).unsqueeze(0), use_cache=True,
        )  # fmt: skip
        self.cache.commit(PROMPT)
        self.windows = [ids_BS[:, PROMPT:].contiguous() for ids_BS in self.states]

    def forward(self, ids_BN: Tensor) -> Tensor:
        """Hidden states of the block's rows ``[B,N,H]``; reads no value on the host."""
        out = self.model.model(
            input_ids=ids_BN, attention_mask=None, position_ids=self.positions_1N, past_key_values=self.cache,
            use_cache=True,
        )  # fmt: skip
        return out.last_hidden_state

    def runner(self, way: Way, config: EpochConfig, graph: Any = None) -> Callable[[], list[Tensor]]:
        """A call that decodes the block in one way; the model must be patched with its backend."""
        context = open_context(self.model, config if way.plan else None)
        capture = None
        if way.captured:
            capture = context.capture(self.forward, graph)  # type: ignore[union-attr]

        def decode() -> list[Tensor]:
            out = []
            with context.block(batch=self.batch, window=BLOCK):
                for ids_BN in self.windows:
                    if capture is not None:
                        # A replay writes to the recording's own memory.
                        out.append(capture(ids_BN, mask_id=MASK).clone())
                        continue
                    with context.iteration(ids_BN, mask_id=MASK):
                        out.append(self.forward(ids_BN))
            return out

        return decode

    def live(self, out: list[Tensor]) -> Tensor:
        """Rows whose logits a decoder would read, of all forwards."""
        return torch.cat([hidden[ids == MASK] for hidden, ids in zip(out, self.windows, strict=True)]).double()


def relative_rms(value: Tensor, reference: Tensor) -> float:
    """Root mean square difference over the reference's."""
    return float((value - reference).pow(2).mean().sqrt() / reference.pow(2).mean().sqrt())


def distinct_experts(model: Any, decode: Decode) -> float:
    """Mean number of experts per MoE layer that the first sequence's block uses; `model` unpatched."""
    loads: list[Tensor] = []

    def record(module: Any, args: Any, out: Any) -> None:
        loads.append(out[0].view(decode.batch, BLOCK, -1)[0].unique())

    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(record) for gate in gates]
    for ids_BN in decode.windows:
        decode.forward(ids_BN)
    for hook in hooks:
        hook.remove()
    return statistics.mean(load.numel() for load in loads)


def agree(decode: Decode, backends: tuple[str, ...], limit: float) -> dict[str, float]:
    """Dense and the exact plan in every backend against dense in the first one.

    Raises:
        SystemExit: where hidden states differ by more than the limit.
    """
    errors: dict[str, float] = {}
    reference = None
    for backend in backends:
        exact = EpochConfig.exact(backend=backend)
        patch(decode.model, exact)
        try:
            for way in (Way(f"dense, {backend}", backend, False), Way(f"exact plan, {backend}", backend, True)):
                rows = decode.live(decode.runner(way, exact)())
                if reference is None:
                    reference = rows
                errors[way.name] = relative_rms(rows, reference)
        finally:
            unpatch(decode.model)
    for name, error in errors.items():
        if not error <= limit:
            raise SystemExit(f"results differ, nothing is timed: {name}: relative RMS {error:.4f}, limit {limit}")
    return errors


def measure(decode: Decode, ways: tuple[Way, ...], repeats: int, graph: Any = None) -> dict[str, Any]:
    """Median seconds of a block's decode per way, after warm-ups that compile, record and fill buffers."""
    result: dict[str, Any] = {}
    for way in ways:
        config = EpochConfig(backend=way.backend)  # type: ignore[arg-type]
        patch(decode.model, config)
        try:
            run = decode.runner(way, config, graph)
            # The first iteration of a kind runs as usual, the second is recorded.
            for _ in range(3 if way.captured else 1):
                run()
            seconds = []
            for _ in range(repeats):
                synchronize(decode.device)
                start = time.perf_counter()
                run()
                synchronize(decode.device)
                seconds.append(time.perf_counter() - start)
            result[way.name] = {"seconds": statistics.median(seconds), "seconds_all": seconds}
        finally:
            unpatch(decode.model)
    return result


def same_as_uncaptured(decode: Decode, graph: Any = None) -> float:
    """Relative RMS difference that capturing makes, after iterations are replayed."""
    config = EpochConfig(backend="triton")
    patch(decode.model, config)
    try:
        plain = decode.live(decode.runner(WAYS[3], config)())
        run = decode.runner(GRAPH, config, graph)
        run(), run()
        return relative_rms(decode.live(run()), plain)
    finally:
        unpatch(decode.model)
