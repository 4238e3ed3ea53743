"""What does a rank hold, and what does it take at most, while it loads its share of a checkpoint?

Writes a checkpoint with random bf16 weights in the layout of LLaDA2's releases (one tensor per projection and expert,
several safetensors shards, an index) to a temporary folder, and loads it with `epoch_moe.load_model`: in one process
that keeps everything, and in gloo ranks that keep their experts (`ep_group`). Each is a process of its own, and each
reports

  parameters   bytes of parameters and buffers that exist afterwards, each storage once
  peak         growth of anonymous memory (RssAnon, sampled every 2 ms) from before the load to its maximum: what the
               process itself took
  resident     growth of all resident memory to its high-water mark (VmHWM). It also counts pages of the files that are
               mapped while they are read (RssFile): these belong to the page cache, and go when memory is short. In the
               process that keeps everything the parameters may be such pages, read when they are first used

A rank's parameters must be exactly everything but the experts plus its share of these, and its peak no more than 1.1
times that and 64 MiB (interpreter, buffers of gloo). Else nothing is reported.

The same arithmetic gives what LLaDA2.0-flash needs on 8 ranks, from its configuration.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import platform
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts.process_memory import AnonymousPeak, status
from safetensors.torch import save_file

import epoch_moe
from epoch_moe.experts.layouts import is_expert
from epoch_moe.models import load_model
from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from epoch_moe.outputs import output_file, write_json

MIB, GB = 2**20, 1e9
SLACK = 64 * MIB
FLASH = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "intermediate_size": 9216,
    "first_k_dense_replace": 1, "num_shared_experts": 1, "vocab_size": 157184,
}  # fmt: skip
"""LLaDA2.0-flash's configuration, as released."""


def sizes_of(config: Any) -> dict[str, int]:
    """Bytes of everything but the routed experts, and of these: bf16, expert biases fp32, as released."""
    with torch.device("meta"):
        model = LLaDA2MoeModelLM(config)
    found = {"rest": 0, "experts": 0}
    for key, tensor in model.state_dict().items():
        found["experts" if is_expert(key) else "rest"] += tensor.numel() * (4 if key.endswith("expert_bias") else 2)
    return found


def write_checkpoint(folder: Path, config: Any, shards: int, seed: int) -> int:
    """Random weights, layer after layer; bytes of the shards."""
    with torch.device("meta"):
        shapes = {key: tuple(tensor.shape) for key, tensor in LLaDA2MoeModelLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    keys, index, total = list(shapes), {}, 0
    per_shard = -(-len(keys) // shards)
    for number in range(shards):
        tensors = {}
        for key in keys[number * per_shard : (number + 1) * per_shard]:
            dtype = torch.float32 if key.endswith("expert_bias") else torch.bfloat16
            tensors[key] = torch.empty(shapes[key], dtype=dtype).normal_(0.0, 0.02, generator=generator)
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        total += (folder / name).stat().st_size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.architectures = ["LLaDA2MoeModelLM"]
    config.save_pretrained(folder)
    return total


def measure(rank: int, world: int, folder: str, rendezvous: str, results: Any) -> None:
    """Load in this process and say what it took."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*has no tokenizer files")
    group = None
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=300)
        )
        group = dist.group.WORLD
    # transformers and the model's class are imported by now; only what the load itself takes is counted.
    before, start = status("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")
    with AnonymousPeak() as anonymous:
        model, _ = load_model(folder, ep_group=group)
    seconds = time.perf_counter() - start
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    results.put(
        {
            "rank": rank,
            "parameter_bytes": sum(storages.values()),
            "peak_anonymous_bytes": anonymous.peak - anonymous.before,
            "peak_resident_bytes": status("VmHWM") - before,
            "file_bytes_resident_at_end": status("RssFile"),
            "seconds": seconds,
        }
    )
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


def load_on(world: int, folder: Path) -> list[dict[str, Any]]:
    """What every rank of so many says, each in a process of its own."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (world, str(folder), f"file://{meeting}/ranks", results)
        processes = [context.Process(target=measure, args=(rank, *arguments), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"ranks ended with {[process.exitcode for process in processes]}: nothing is reported")
    return sorted((results.get() for _ in processes), key=lambda result: int(result["rank"]))


def check(ranks: list[dict[str, Any]], parts: dict[str, int]) -> None:
    """Refuse a rank that holds or takes more than its share."""
    share = parts["rest"] + parts["experts"] // len(ranks)
    for result in ranks:
        if result["parameter_bytes"] != share:
            raise SystemExit(f"{result}: holds other than {share} bytes, nothing is reported")
        result["promised_bytes"] = int(1.1 * share) + SLACK
        if len(ranks) > 1 and result["peak_anonymous_bytes"] > result["promised_bytes"]:
            raise SystemExit(f"{result}: took more than promised, nothing is reported")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shards", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a checkpoint of 130 MB instead of 2.4 GB: does it run?")
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    arguments = parser.parse_args()
    if not Path("/proc/self/clear_refs").exists():
        raise SystemExit("resident memory is read from Linux's /proc: run this there")
    layers, inner = (3, 64) if arguments.quick else (6, 256)
    hidden, experts, vocab = (512, 256, 8192) if arguments.quick else (2048, 128, 32768)
    config = LLaDA2MoeConfig(
        **FLASH | {
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
            "num_key_value_heads": 4, "num_experts": experts, "moe_intermediate_size": inner,
            "intermediate_size": 4 * inner, "vocab_size": vocab, "pad_token_id": 0, "eos_token_id": 0,
            "mask_token_id": 1,
        }
    )  # fmt: skip
    parts = sizes_of(config)
    with tempfile.TemporaryDirectory() as name:
        size = write_checkpoint(Path(name), config, arguments.shards, arguments.seed)
        print(f"{size / GB:.2f} GB in {arguments.shards} shards, {parts['experts'] / GB:.2f} of it experts", flush=True)
        ways = {world: load_on(world, Path(name)) for world in (1, arguments.ranks)}
    for world, ranks in ways.items():
        check(ranks, parts)
        for r in ranks:
            print(
                f"  {world} ranks, rank {r['rank']}: parameters {r['parameter_bytes'] / MIB:6.0f} MiB, peak "
                f"{r['peak_anonymous_bytes'] / MIB:6.0f} MiB (may take {r['promised_bytes'] / MIB:.0f}), with file "
                f"pages {r['peak_resident_bytes'] / MIB:6.0f} MiB, {r['seconds']:.1f} s"
            )
    flash = sizes_of(LLaDA2MoeConfig(**FLASH))
    per_rank = {ranks: flash["rest"] + flash["experts"] // ranks for ranks in (1, 2, 4, 8)}
    promised = int(1.1 * per_rank[8]) + SLACK
    if promised > 80 * GB:
        raise SystemExit("LLaDA2.0-flash does not fit 8 x 80 GB")
    print(
        f"LLaDA2.0-flash, by arithmetic: {sum(flash.values()) / GB:.1f} GB, per rank "
        + ", ".join(f"{bytes_ / GB:.1f} GB of {ranks}" for ranks, bytes_ in per_rank.items())
        + f"; the gate above would allow {promised / GB:.1f} GB on each of 8"
    )
    result = {
        "checkpoint_bytes": size,
        "shards": arguments.shards,
        "parts": parts,
        "one_process": ways[1][0],
        "ranks": ways[arguments.ranks],
        "slack_bytes": SLACK,
        "llada2_flash": {"parts": flash, "bytes_per_rank": per_rank, "promised_on_8": promised},
        "torch": torch.__version__,
        "epoch_moe": epoch_moe.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "seed": arguments.seed,
    }
    write_json(arguments.json, result)


if __name__ == "__main__":
    sys.exit(main())
