"""What does a block cost when the experts do not fit in memory? LLaDA2.0-mini's layers, 6 of them MoE, on a CPU.

A checkpoint with random weights is written to a folder (10 GB, removed afterwards): hidden 2048, 256 experts of 512
and top-8 per layer, bf16. A block of 32 rows is decoded in 8 forwards under the default plan, 4 rows per forward, the
surest first. Undecoded rows hold tokens drawn at random, not MASK: with random weights, equal tokens would route alike.
Their embeddings have a part in common, which brings the number of distinct experts per forward near that of the
released model (about 77); it is printed. Runs, each in a process of its own, the system's page cache of the files
emptied before:

  whole       all experts in memory (left out where there is not enough of it)
  retention   the budget, by predicted reuse
  lru         the budget, least recently used
  disk        no expert is kept: each is read when it is needed

What was read is dropped from the page cache at once (--keep-cache leaves it there), so that a miss costs a read, as on
a machine whose memory is full. First it is checked that tokens and the last hidden states are the same bits in all
runs; otherwise nothing is reported. Memory: the high-water mark of resident memory (Linux: VmHWM, file pages included)
must stay below 1.1 x (budget + the model without its routed experts) + what the process takes before it loads a model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from parts.process_memory import AnonymousPeak, status
from torch import Tensor

import epoch_moe
from epoch_moe import EpochConfig, ResidencyConfig
from epoch_moe.experts.layouts import is_expert
from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from epoch_moe.outputs import output_file, write_json

BLOCK, FORWARDS = 32, 8
COMMON = 0.1
"""Share of an embedding's variance that all tokens have in common."""
POOL = 16_000_003
"""Random numbers that experts are cut from: drawing five billion would take longer than all runs."""
QUICK_SLACK = 128 * 2**20
"""With --quick the process is fifty times as large as the model, and moves by more than the model takes."""
FULL: dict[str, Any] = {"num_hidden_layers": 7}
QUICK: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_experts": 64, "vocab_size": 1024, "mask_token_id": 1000, "eos_token_id": 1001, "pad_token_id": 1001,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def write_checkpoint(folder: Path, settings: dict[str, Any], seed: int) -> dict[str, int]:
    """Random weights, tensor by tensor; bytes of experts and of the others."""
    config = LLaDA2MoeConfig(**settings)
    with torch.device("meta"):
        model = LLaDA2MoeModelLM(config)
    shapes = {key: (tuple(t.shape), t.dtype) for key, t in model.state_dict().items()}
    header, place = {}, 0
    for key, (shape, _) in shapes.items():
        item = 4 if key.endswith("expert_bias") else 2
        end = place + item * torch.Size(shape).numel()
        header[key] = {"dtype": "F32" if item == 4 else "BF16", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    sizes = {"experts": 0, "others": 0}
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(POOL, generator=generator)
    config.architectures, config.dtype = ["LLaDA2MoeModelLM"], "bfloat16"
    config.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, (shape, _) in shapes.items():
            values = tensor_of(key, shape, generator, pool)
            sizes["experts" if is_expert(key) else "others"] += values.numel() * values.element_size()
            file.write(bytes(values.contiguous().view(torch.uint8).reshape(-1).numpy()))
        file.flush()
        os.fsync(file.fileno())
    return sizes


def tensor_of(key: str, shape: tuple[int, ...], generator: torch.Generator, pool: Tensor) -> Tensor:
    """One random tensor; an expert's is a piece of the pool that begins anywhere."""
    if key.endswith("expert_bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    if is_expert(key):
        size = torch.Size(shape).numel()
        start = int(torch.randint(0, POOL - size, (), generator=generator))
        return (pool[start : start + size] * shape[-1] ** -0.5).bfloat16().view(shape)
    values = torch.randn(shape, generator=generator)
    if key.endswith("word_embeddings.weight"):
        return (COMMON**0.5 * values[:1] + (1 - COMMON) ** 0.5 * values).bfloat16()
    return values.mul_(shape[-1] ** -0.5).bfloat16()


def forget(folder: Path) -> None:
    """Empty the system's page cache of a folder's files."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


@torch.no_grad()
def decode(model: Any, seed: int) -> tuple[Tensor, Tensor, list[float]]:
    """One block: its tokens, the hidden states of the last forward, and seconds of each forward."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, model.config.vocab_size // 2, (1, BLOCK), generator=generator)
    live_BN = torch.ones(1, BLOCK, dtype=torch.bool)
    context = epoch_moe.open_context(model, EpochConfig())
    seconds = []
    hidden = torch.empty(0)
    with context.block(batch=1, window=BLOCK):
        for _ in range(FORWARDS):
            start = time.perf_counter()
            with context.iteration(ids_BS, live_BN=live_BN):
                hidden = model.model(input_ids=ids_BS, use_cache=False, return_dict=True).last_hidden_state
            chance, token = model.lm_head(hidden).float().softmax(dim=-1).max(dim=-1)
            context.end_iteration(chance)
            chosen = chance.masked_fill(~live_BN, -1.0).topk(BLOCK // FORWARDS).indices
            ids_BS = ids_BS.scatter(1, chosen, token.gather(1, chosen))
            live_BN = live_BN.scatter(1, chosen, False)
            seconds.append(time.perf_counter() - start)
    return ids_BS, hidden, seconds


def child(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    warnings.filterwarnings("ignore", message=".*no tokenizer files")
    budget = {"retention": arguments.budget, "lru": arguments.budget, "disk": "1GB"}
    # What importing and a first forward load is no model's memory.
    tiny, _ = epoch_moe.load_model("tiny-llada2", residency=ResidencyConfig())
    decode(tiny, arguments.seed)
    del tiny
    before, start = status("VmRSS"), time.perf_counter()
    folder = Path(arguments.folder)
    with AnonymousPeak(every=0.02) as anonymous:
        if arguments.child == "whole":
            model, _ = epoch_moe.load_model(folder)
            epoch_moe.patch(model)
        else:
            wanted: Any = budget[arguments.child]
            if arguments.child == "disk":  # the buffers and nothing else
                experts = model_bytes_per_expert(folder)
                wanted = 2 * experts
            residency = ResidencyConfig(
                budget=wanted,
                policy="lru" if arguments.child == "disk" else arguments.child,
                drop_cache=not arguments.keep_cache,
            )
            model, _ = epoch_moe.load_model(folder, residency=residency)
        loading = time.perf_counter() - start
        tokens, hidden, seconds = decode(model, arguments.seed)
    digest = hashlib.sha256(bytes(hidden.contiguous().view(torch.uint8).reshape(-1).numpy())).hexdigest()
    result: dict[str, Any] = {
        "tokens": tokens.tolist(), "hidden": digest, "seconds": sum(seconds), "seconds_per_forward": seconds,
        "load_seconds": loading, "before_bytes": before, "peak_bytes": status("VmHWM"),
        "peak_anonymous_bytes": anonymous.peak,
    }  # fmt: skip
    if arguments.child != "whole":
        result["residency"] = epoch_moe.residency_report(model).as_dict()
        result["slots"] = result["residency"]["per_layer"][0]["slots"]
    return result


def model_bytes_per_expert(folder: Path) -> int:
    """In bf16."""
    config = json.loads((folder / "config.json").read_text())
    return int(3 * 2 * config["hidden_size"] * config["moe_intermediate_size"])


def run(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, in a process of its own."""
    forget(folder)
    output = folder / f"{name}.json"
    command = [
        sys.executable, __file__, "--child", name, "--folder", str(folder), "--budget", str(arguments.budget),
        "--seed", str(arguments.seed), "--json", str(output), *(["--keep-cache"] if arguments.keep_cache else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(output.read_text())
    rate = result["residency"]["hit_rate"] if "residency" in result else 1.0
    print(
        f"{name:10} {result['seconds']:7.2f} s for the block, hit rate {rate:.3f}, peak "
        f"{result['peak_bytes'] / 1e9:5.2f} GB resident ({result['peak_anonymous_bytes'] / 1e9:5.2f} GB anonymous), "
        f"{result['load_seconds']:.1f} s to load",
        flush=True,
    )
    return result


def available() -> int:
    """Main memory that is free."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found.group(1)) * 1024 if found else 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None, help="where to write the checkpoint (default: a temporary folder)")
    parser.add_argument("--budget", default=None, help="fast memory (default: 2GB; with --quick 6MB)")
    parser.add_argument("--keep-cache", action="store_true", help="leave what was read in the page cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2 MoE layers, 64 experts of 128: does it run?")
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        result = child(arguments)
        write_json(arguments.json, result)
        return
    arguments.budget = arguments.budget or ("6MB" if arguments.quick else "2GB")
    with tempfile.TemporaryDirectory(prefix="residency_at_scale_", dir=arguments.folder) as name:
        folder = Path(name)
        print("writing the checkpoint", flush=True)
        sizes = write_checkpoint(folder, QUICK if arguments.quick else FULL, arguments.seed)
        print(f"experts {sizes['experts'] / 1e9:.2f} GB, others {sizes['others'] / 1e9:.2f} GB", flush=True)
        names = ["retention", "lru", "disk"]
        if available() > 1.3 * sum(sizes.values()):
            names = ["whole", *names]
        else:
            print("whole      left out: not enough memory")
        runs = {one: run(one, folder, arguments) for one in names}
    report(runs, sizes, arguments)


def report(runs: dict[str, dict[str, Any]], sizes: dict[str, int], arguments: argparse.Namespace) -> None:
    """Check, and write."""
    from epoch_moe.residency.config import parse_budget

    first = next(iter(runs))
    for name, one in runs.items():
        if one["tokens"] != runs[first]["tokens"] or one["hidden"] != runs[first]["hidden"]:
            raise SystemExit(f"results differ, nothing is reported: {name} and {first} decode different tokens or bits")
    budget = parse_budget(arguments.budget)
    for name in ("retention", "lru"):
        one = runs[name]
        bound = 1.1 * (budget + sizes["others"]) + one["before_bytes"] + (QUICK_SLACK if arguments.quick else 0)
        one["bound_bytes"] = bound
        if one["peak_bytes"] > bound:
            raise SystemExit(f"{name}: peak {one['peak_bytes'] / 1e9:.2f} GB, promised {bound / 1e9:.2f} GB")
    demanded = runs["disk"]["residency"]["demanded"] / len(runs["disk"]["residency"]["per_layer"]) / FORWARDS
    ratios = {f"{name}_over_retention": runs[name]["seconds"] / runs["retention"]["seconds"] for name in runs}
    print(f"distinct experts per layer and forward: {demanded:.1f}; retention keeps {runs['retention']['slots']}")
    print(", ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    result = {
        "checkpoint_bytes": sizes,
        "budget_bytes": budget,
        "distinct_experts": demanded,
        "page_cache": "kept" if arguments.keep_cache else "dropped after each read",
        "runs": {name: {key: value for key, value in one.items() if key != "tokens"} for name, one in runs.items()},
        "ratios": ratios,
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "epoch_moe": epoch_moe.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "seed": arguments.seed,
    }
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
