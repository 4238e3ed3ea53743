"""Which tiles are fastest on this GPU? Prints the table for `epoch_moe/kernels/tuning.py`.

One entry of the table per number of rows per expert: from the entry that is there now, one field after another is
changed to the value that is fastest with all others as they are, until none helps. What is made small is the geometric
mean, over the released models' shapes, of a layer's time over its time with the entry that is there now, so that no
shape counts for more. Configurations that need more shared memory than there is are left out, and so is what the
compiler refuses. Inputs rotate, and `triton.testing.do_bench` clears the L2 cache between calls.

It needs a GPU. Without one, --list shows what would be searched.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from parts.kernel_layers import RELEASED, LayerShape, Weights, make_rows, make_weights
from parts.kernel_times import rotating

from epoch_moe.kernels.grouped_mlp import grouped_mlp
from epoch_moe.kernels.launch import supports_triton
from epoch_moe.kernels.route import route
from epoch_moe.kernels.tuning import GROUPED_MLP, GemmConfig, GroupedMlpConfig
from epoch_moe.kernels.worklist import device_worklist
from epoch_moe.outputs import output_file, write_json
from epoch_moe.routing import RouterSpec

SPACE: dict[str, tuple[Any, ...]] = {
    "block_m": (16, 32, 64, 128),
    "block_n": (32, 64, 128, 256),
    "block_k": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "swap": (False, True),
    "group_m": (1, 4, 8),
}
DTYPES = {"half": torch.bfloat16, "float": torch.float32}
UNALIGNED = (LayerShape("prime sizes", 2039, 509, RouterSpec(kind="softmax", num_experts=61, top_k=7)),)
ROWS_PER_EXPERT = {16: 8, 48: 32, 160: 100, math.inf: 512}
"""What an entry is searched at, by the rows per expert up to which it is used; see `typical`."""

Cost = Callable[[GroupedMlpConfig], float]


def typical(limit: float) -> int:
    """Rows per expert that an entry up to ``limit`` is searched at."""
    return ROWS_PER_EXPERT.get(limit, 512 if limit == math.inf else max(1, int(limit * 2 // 3)))


def field_names() -> list[str]:
    """Everything that is searched: ``block_m``, then ``gate_up.block_n`` and so on."""
    gemm = [field.name for field in fields(GemmConfig)]
    return ["block_m", *(f"{part}.{name}" for part in ("gate_up", "down") for name in gemm)]


def changed(config: GroupedMlpConfig, name: str, value: Any) -> GroupedMlpConfig:
    """The configuration with one field of `field_names` set."""
    part, _, field = name.rpartition(".")
    if not part:
        return replace(config, **{field: value})
    return replace(config, **{part: replace(getattr(config, part), **{field: value})})


def alternatives(config: GroupedMlpConfig, name: str) -> Iterator[GroupedMlpConfig]:
    """The configuration with every other value of one field."""
    for value in SPACE[name.rpartition(".")[2]]:
        other = changed(config, name, value)
        if other != config:
            yield other


@dataclass(frozen=True)
class Found:
    """What a search came to: costs are relative to the configuration that it began with."""

    config: GroupedMlpConfig
    cost: float
    tried: int
    finished: bool


def descend(start: GroupedMlpConfig, cost: Cost, out_of_time: Callable[[], bool] = lambda: False) -> Found:
    """One field after another to its best value, until a whole round changes nothing or the time is over.

    Each configuration is timed once. A change must gain more than 1 %: less is noise.
    """
    known = {start: cost(start)}
    best, better = start, True
    while better:
        better = False
        for name in field_names():
            for other in alternatives(best, name):
                if other not in known:
                    if out_of_time():
                        return Found(best, known[best] / known[start], len(known), False)
                    known[other] = cost(other)
            candidate = min((best, *alternatives(best, name)), key=known.__getitem__)
            if known[candidate] < 0.99 * known[best]:
                best, better = candidate, True
    return Found(best, known[best] / known[start], len(known), True)


def geometric_mean(costs: list[float]) -> float:
    """Of positive numbers; infinite where one is."""
    return math.exp(sum(map(math.log, costs)) / len(costs)) if all(map(math.isfinite, costs)) else math.inf


class Bench:
    """Cost of a configuration on this GPU, at so many rows per expert."""

    def __init__(self, layers: list[tuple[LayerShape, Weights]], rows_per_expert: int, limit: int, seed: int):
        self.layers, self.rows_per_expert, self.limit = layers, rows_per_expert, limit
        self.generator = torch.Generator(layers[0][1].down_EHF.device).manual_seed(seed)
        self.inputs = []
        for shape, weights in layers:
            # Of 8 rows 5 are fresh; each has K pairs.
            rows = max(8, rows_per_expert * shape.experts // shape.top_k * 8 // 5)
            made = [make_rows(shape, rows, weights.down_EHF.dtype, self.generator, spread=1.0) for _ in range(3)]
            ids = [route(m.logits_RE, None, shape.router, dtype=weights.down_EHF.dtype)[0] for m in made]
            self.inputs.append(list(zip(made, ids, strict=True)))

    def __call__(self, config: GroupedMlpConfig) -> float:
        """Geometric mean of microseconds over the shapes; infinite where it cannot run."""
        if config.shared_bytes(self.layers[0][1].down_EHF.element_size()) > self.limit:
            return math.inf
        try:
            return geometric_mean([self.one(number, config) for number in range(len(self.layers))])
        except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError, RuntimeError) as error:
            if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError) or "CUDA error" in str(error):
                raise  # nothing that is timed after this would mean anything
            print(f"    left out: {type(error).__name__} {config}", flush=True)
            return math.inf

    def one(self, number: int, config: GroupedMlpConfig) -> float:
        """Median microseconds of both products of one shape."""
        shape, weights = self.layers[number]
        calls = []
        for rows, ids_RK in self.inputs[number]:
            worklist = device_worklist(ids_RK, shape.experts, config.block_m)

            def call(rows: Any = rows, worklist: Any = worklist) -> object:
                return grouped_mlp(rows.x_TH, rows.rows_R, worklist, *weights.parts, shape.top_k, config)

            calls.append(call)
        return 1e3 * float(triton.testing.do_bench(rotating(calls), warmup=5, rep=25, return_mode="median"))


def entry_text(limit: float, config: GroupedMlpConfig) -> str:
    """A line of the table as `tuning.py` has it."""

    def gemm(of: GemmConfig) -> str:
        return f"GemmConfig({', '.join(str(getattr(of, field.name)) for field in fields(of))})"

    shown = 'float("inf")' if limit == math.inf else str(limit)
    return f"        ({shown}, GroupedMlpConfig({config.block_m}, {gemm(config.gate_up)}, {gemm(config.down)})),"


def list_space(chosen: list[tuple[str, bool]]) -> None:
    """What would be searched."""
    print("fields and values:")
    for name in field_names():
        print(f"  {name}: {', '.join(map(str, SPACE[name.rpartition('.')[2]]))}")
    table = GROUPED_MLP
    for key in chosen:
        shapes = ", ".join(shape.name for shape in (RELEASED.values() if key[1] else UNALIGNED))
        print(f"{key}: over {shapes}; begins with")
        for limit, config in table[key]:
            of_round = sum(1 for name in field_names() for _ in alternatives(config, name))
            print(f"{entry_text(limit, config)}  # at {typical(limit)} rows per expert, {of_round} changes per round")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the search space and end; needs no GPU")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["half"])
    parser.add_argument("--unaligned", action="store_true", help="sizes that are no multiples of 16, too")
    parser.add_argument("--budget", type=float, default=500.0, metavar="SECONDS", help="for all entries (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    arguments = parser.parse_args()
    alignments = (True, False) if arguments.unaligned else (True,)
    chosen = [(dtype, aligned) for dtype in arguments.dtype for aligned in alignments]
    if arguments.list:
        list_space(chosen)
        return 0
    if not torch.cuda.is_available():
        raise SystemExit(
            "tune_kernels.py times kernels and needs a CUDA GPU, torch sees none; --list shows the search space"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    fits, reason = supports_triton(device)
    if not fits:
        raise SystemExit(f"tune_kernels.py cannot run here: {reason}")
    limit = int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
    end = time.monotonic() + arguments.budget
    table = GROUPED_MLP
    entries = [(key, limit_rows, config) for key in chosen for limit_rows, config in table[key]]
    records, lines = [], []
    for number, (key, limit_rows, start) in enumerate(entries):
        # An even share of what is left for each entry that is left.
        until = time.monotonic() + (end - time.monotonic()) / (len(entries) - number)
        generator = torch.Generator(device).manual_seed(arguments.seed)
        shapes = RELEASED.values() if key[1] else UNALIGNED
        layers = [(shape, make_weights(shape, DTYPES[key[0]], generator)) for shape in shapes]
        bench = Bench(layers, typical(limit_rows), limit, arguments.seed)

        def out_of_time(until: float = until) -> bool:
            return time.monotonic() > until

        print(f"{key}, up to {limit_rows} rows per expert", flush=True)
        found = descend(start, bench, out_of_time)
        lines.append((key, entry_text(limit_rows, found.config)))
        note = "" if found.finished else ", time was over before a round changed nothing"
        print(f"{lines[-1][1]}  # {found.cost:.3f} of the time, {found.tried} tried{note}", flush=True)
        upper = None if limit_rows == math.inf else limit_rows
        records.append({"dtype": key[0], "aligned": key[1], "rows_per_expert_up_to": upper, **asdict(found)})
        del bench, layers
    print(f"\nfor epoch_moe/kernels/tuning.py, measured on {torch.cuda.get_device_name(device)}:")
    for key in chosen:
        print(f'    ("{key[0]}", {key[1]}): (')
        print("\n".join(line for of, line in lines if of == key))
        print("    ),")
    if arguments.json is not None:
        result = {"device": torch.cuda.get_device_name(device), "triton": triton.__version__, "entries": records}
        write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
