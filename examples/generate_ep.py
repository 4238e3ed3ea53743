"""Answer prompts with a model whose experts are split over several processes.

    torchrun --nproc-per-node 4 examples/generate_ep.py --prompts prompts.txt --output answers.jsonl
    torchrun --nproc-per-node 8 examples/generate_ep.py --model inclusionAI/LLaDA2.0-flash --prompts prompts.txt

Every process holds the whole model but the experts, and an equal share of these. With `--layout sharded` every process
decodes its own part of the prompts; with `--layout replicated` all decode the same prompts together, one batch after
the other. The answers come out in the order of the prompts. With `replicated` they are the same for 1, 2, 4 and 8
processes; with `sharded` to rounding, as batches have other sizes (docs/expert_parallel.md).

On GPUs the processes talk over NCCL, one GPU each; on CPUs over gloo. Nothing else differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # first imported later, it would keep the group's threads for good

import epoch_moe
from epoch_moe.decoding import is_canvas_model, loop_of
from epoch_moe.freshlane.expert_parallel import world_group
from epoch_moe.outputs import check_output, write_output

SAME = ("model", "layout", "preset", "dtype", "batch_size", "gen_length", "block_length", "threshold", "chat")
"""Arguments that all processes must agree about, beside the prompts themselves."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-llada2", help="name inside the package, folder, or Hub id")
    parser.add_argument("--prompts", type=Path, required=True, help="text file, one prompt a line")
    parser.add_argument("--output", type=Path, help="JSONL file for the answers (default: standard output)")
    parser.add_argument("--layout", choices=("sharded", "replicated"), default="sharded", help="of rows over processes")
    parser.add_argument("--preset", choices=("default", "exact", "paper", "dense"), default="default", help="plan")
    parser.add_argument("--device", default=None, help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts that a process decodes together")
    parser.add_argument("--gen-length", type=int, default=None, help="tokens at most (default 96; 32 on a canvas)")
    parser.add_argument("--block-length", type=int, default=None, help="rows of a block (default 32; 16 on a canvas)")
    parser.add_argument("--threshold", type=float, default=0.95, help="commit every token above this probability")
    parser.add_argument("--chat", action="store_true", help="apply the tokenizer's chat template to each prompt")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a silent process is given up")
    parser.add_argument("--report", action="store_true", help="print each process's work and traffic to standard error")
    args = parser.parse_args()
    if not 0 < args.timeout < threading.TIMEOUT_MAX:
        parser.error(f"--timeout {args.timeout}: expected a number of seconds above 0")
    if args.batch_size < 1:
        parser.error(f"--batch-size {args.batch_size}: expected at least 1")
    return args


def read_prompts(path: Path) -> list[str]:
    """Lines of a file; empty ones are refused, because answers go by line number."""
    if not path.is_file():
        raise SystemExit(f"--prompts {path}: no such file")
    prompts = path.read_text(encoding="utf-8").splitlines()
    empty = [number for number, prompt in enumerate(prompts, 1) if not prompt.strip()]
    if not prompts or empty:
        raise SystemExit(f"--prompts {path}: {'no lines' if not prompts else f'line {empty[0]} is empty'}")
    return prompts


def share(count: int, rank: int, world: int) -> range:
    """The prompts of one process: contiguous, and at most one more than any other's."""
    return range(count * rank // world, count * (rank + 1) // world)


def tokenize(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt."""
    if not chat:
        ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids
    encoded = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)


def join(backend: str, timeout: float) -> None:
    """Meet the other processes, or end this one: where another program has the port, torch waits for ever."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"

    def give_up() -> None:
        print(f"no other process met at {where} within {timeout:g} s: is the port taken?", file=sys.stderr, flush=True)
        os._exit(1)

    watch = threading.Timer(timeout, give_up)
    watch.daemon = True
    watch.start()
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    finally:
        watch.cancel()


def check_same(prompts: list[str], args: argparse.Namespace) -> None:
    """Refuse processes that were given different work, before any of it is done."""
    own = {name: value for name, value in vars(args).items() if name in SAME}
    own["prompts"] = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for name, value in everyone[0].items():
        others = [rank for rank, other in enumerate(everyone) if other[name] != value]
        if others:
            dist.destroy_process_group()
            option = f"--{name.replace('_', '-')}"
            raise SystemExit(f"{option}: ranks {others} have another one than rank 0: give all processes the same")


def decode(model: Any, tokenizer: Any, prompts: list[str], args: argparse.Namespace, progress: bool) -> list[Any]:
    """One record per prompt: text, tokens, and why it ended."""
    from tqdm.auto import tqdm

    canvas = is_canvas_model(model.config)
    gen_length = (32 if canvas else 96) if args.gen_length is None else args.gen_length
    options: dict[str, Any] = {"gen_length": gen_length, "block_length": args.block_length}
    if args.block_length is None:
        options["block_length"] = 16 if canvas else 32
    options |= {"steps": gen_length} if canvas else {"threshold": args.threshold}
    records = []
    starts = range(0, len(prompts), args.batch_size)
    for start in tqdm(starts, unit="batch", desc="rank 0", disable=not progress):
        batch = [tokenize(tokenizer, prompt, args.chat) for prompt in prompts[start : start + args.batch_size]]
        out = loop_of(model)(model, batch, **options)
        for answer, reason in zip(out.answers, out.finish_reasons, strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            records.append({"text": text, "tokens": answer.tolist(), "finish_reason": reason})
    return records


def main() -> int:
    """Load, decode, collect."""
    args = parse()
    prompts = read_prompts(args.prompts)
    if args.output is not None and os.environ.get("RANK", "0") == "0":  # other hosts may have no such folder
        try:
            check_output(args.output, "--output")  # before the work, and before others are waited for
        except (ValueError, OSError) as error:
            raise SystemExit(str(error)) from error
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    join(backend, args.timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    check_same(prompts, args)
    try:
        model, tokenizer = epoch_moe.load_model(
            args.model, dtype=args.dtype, device=device, ep_group=world_group(), ep_layout=args.layout
        )
        report = epoch_moe.patch(model, args.preset)
        if rank == 0:
            print(report, file=sys.stderr)
        mine = share(len(prompts), rank, world) if args.layout == "sharded" else range(len(prompts))
        start = time.perf_counter()
        with epoch_moe.in_step(model):
            records = decode(model, tokenizer, [prompts[i] for i in mine], args, progress=rank == 0)
        seconds = time.perf_counter() - start
        if args.report:
            traffic = model._epoch_moe.ep.dispatcher.traffic
            print(f"rank {rank}: {len(records)} prompts in {seconds:.1f} s, {traffic}", file=sys.stderr)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, records)
        if rank == 0:
            parts = everyone if args.layout == "sharded" else everyone[:1]
            answers = [record for part in parts for record in part]
            lines = [
                json.dumps({"prompt": prompt, **record}, ensure_ascii=False)
                for prompt, record in zip(prompts, answers, strict=True)
            ]
            if args.output is None:
                print("\n".join(lines))
            else:
                write_output(args.output, "\n".join(lines) + "\n")
                print(f"{len(lines)} answers written to {args.output}", file=sys.stderr)
        dist.destroy_process_group()
    except KeyboardInterrupt:
        # The other processes see a closed connection and end with an error that names what they waited for.
        print(f"rank {rank}: interrupted", file=sys.stderr)
        os._exit(130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
