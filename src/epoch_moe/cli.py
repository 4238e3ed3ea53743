"""`epoch-moe`: generate, inspect and compare from a terminal."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from epoch_moe.checks import MOST, whole
from epoch_moe.config import LAYERED, EpochConfig
from epoch_moe.outputs import check_output, write_json, write_output
from epoch_moe.problems import HARDER, KINDS, Judge, Problem, check, generate_problems
from epoch_moe.prompts import make_judge, read_prompts

PRESETS = ("default", "exact", "paper")
DEFAULT_MODEL = "tiny-llada2"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (2: the input cannot be used, said in one line)."""
    arguments = build_parser().parse_args(argv)
    try:
        for option in ("json", "figure", "output"):
            if (path := getattr(arguments, option, None)) is not None:
                check_output(path, f"--{option}")  # before the work
        return int(arguments.run(arguments))
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        if arguments.traceback:
            raise
        print(f"epoch-moe {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(
        prog="epoch-moe",
        description="Serve mixture-of-experts diffusion language models with block plans.",
    )
    import epoch_moe

    parser.add_argument("--version", action="version", version=f"epoch-moe {epoch_moe.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer one prompt", formatter_class=_Formatter)
    generate.add_argument("prompt", help="the prompt's text; - reads it from standard input")
    _model_options(generate)
    _plan_options(generate, ("dense", *PRESETS))
    _decoding_options(generate)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    generate.add_argument("--top-k", type=int, default=None, help="sample among this many tokens")
    generate.add_argument("--top-p", type=float, default=None, help="sample inside this probability mass")
    generate.add_argument("--seed", type=int, default=None, help="of sampling")
    generate.add_argument("--chat", action="store_true", help="apply the tokenizer's chat template to the prompt")
    generate.add_argument("--stream", action="store_true", help="print each block as it is committed")
    generate.add_argument("--report", action="store_true", help="print forwards and work counters to standard error")
    generate.set_defaults(run=_generate)

    inspect = commands.add_parser(
        "inspect", help="what a checkpoint is and what patch() would do", formatter_class=_Formatter
    )
    inspect.add_argument("model", help="name inside the package, folder, or Hub id")
    inspect.add_argument("--residency", action="store_true", help="what budgets of expert residency mean for it")
    inspect.add_argument(
        "--budget", action="append", default=[], metavar="B", help="with --residency, beside the usual: 40%%, 2GB"
    )
    inspect.add_argument("--card", default=None, metavar="SIZE", help="with --residency: what fits it, such as 24GB")
    inspect.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write it as JSON")
    inspect.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    inspect.set_defaults(run=_inspect)

    compare = commands.add_parser(
        "compare", help="answer the same prompts dense and with a plan, side by side", formatter_class=_Formatter
    )
    _model_options(compare)
    _problem_options(compare, problems=100, batch_size=1)
    _plan_options(compare)
    _decoding_options(compare)
    compare.add_argument("--show", type=int, default=2, metavar="N", help="print the answers to the first N problems")
    compare.add_argument("--output", type=Path, metavar="FILE", help="write both answers to every prompt as JSON lines")
    compare.set_defaults(run=_compare)

    calibrate = commands.add_parser(
        "calibrate",
        help="choose a plan for a model by prompts of one's own",
        description="Choose drift bounds and coverages, per MoE layer, that save most at an accuracy that prompts of "
        "one's own certify. Two fifths of the prompts propose settings; the others decide, from tight to loose, by a "
        "95 % bound on the accuracy lost against dense (without answers: on the share of changed ones).",
        formatter_class=_Formatter,
    )
    _model_options(calibrate)
    _problem_options(calibrate, problems=600, batch_size=8)
    calibrate.add_argument(
        "--tolerance", type=float, default=0.01, metavar="T", help="accuracy that may be lost; .01 takes 500 prompts"
    )
    calibrate.add_argument(
        "--objective",
        choices=("bytes", "rows", "time"),
        default="bytes",
        help="what to save: expert weights read (GPUs at small batches), rows through experts (CPUs), or seconds",
    )
    calibrate.add_argument("--output", type=Path, default=Path("plan.json"), metavar="FILE", help="the plan as JSON")
    calibrate.add_argument("--figure", type=Path, metavar="FILE", help="a picture of the settings (.png, .svg, .pdf)")
    _plan_options(calibrate, (), LAYERED)
    _decoding_options(calibrate)
    calibrate.set_defaults(run=_calibrate)

    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults in the help, except where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name inside the package, folder, or Hub id")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--device", default=None, help="such as cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")


def _problem_options(parser: argparse.ArgumentParser, *, problems: int, batch_size: int) -> None:
    group = parser.add_argument_group("prompts", "held-out arithmetic of epoch_moe.problems, or a file")
    group.add_argument("--problems", type=int, default=problems, metavar="N", help="how many held-out problems")
    group.add_argument("--seed", type=int, default=0, help="of the problems")
    group.add_argument("--kinds", metavar="A,B", help=f"kinds of problems: {', '.join((*KINDS, *HARDER))}")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='instead: JSON lines, each with "prompt" or "messages", and "answer" where one is known',
    )
    group.add_argument(
        "--judge",
        metavar="HOW",
        help="of --prompts: exact (default where there are answers), regex (the answer is a pattern to be found), "
        "regex:PATTERN (its group, last match, is the answer), or FILE.py with judge(line, text) -> bool",
    )
    group.add_argument("--chat", action="store_true", help="of --prompts: apply the tokenizer's chat template")
    group.add_argument("--batch-size", type=int, default=batch_size, help="prompts decoded together")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the whole result as JSON")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def _plan_options(
    parser: argparse.ArgumentParser, presets: Sequence[str] = PRESETS, without: Sequence[str] = ()
) -> None:
    """``--preset``, ``--plan``, and an option for each field of `EpochConfig`, explained by its docstring.

    Args:
        presets: to choose from; none: neither of these two options.
        without: fields that have no option.
    """
    if presets:
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--preset", choices=presets, default="default", help="block plan")
        which.add_argument("--plan", type=Path, metavar="FILE", help="of EpochConfig.save, or of calibrate")
    group = parser.add_argument_group(
        "plan",
        "fields of EpochConfig; X may be 'none', and of coverage and drift bounds one per MoE layer: 0.9,0.95,none",
    )
    said = dict(re.findall(r"^    (\w+): (.*?)(?=\n    \w|\n\n)", inspect.getdoc(EpochConfig) or "", re.S | re.M))
    hints = get_type_hints(EpochConfig)
    for name, hint in ((f.name, hints[f.name]) for f in fields(EpochConfig)):
        if name in ("checkpoint", *without):
            continue
        words = " ".join(said.get(name, "").replace("`", "").split()).replace("%", "%%")
        how: dict[str, Any] = {"help": words}
        if hint is bool:
            how["action"] = argparse.BooleanOptionalAction
        elif get_origin(hint) is Literal:
            how["choices"] = get_args(hint)
        else:
            how |= {"type": partial(_value, float if float in (hint, *get_args(hint)) else int), "metavar": "X"}
        # Absent unless given, so that the preset decides.
        group.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **how)


def _decoding_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding")
    group.add_argument("--gen-length", type=int, metavar="N", help="tokens at most (default: 96; LLaDA-MoE: 32)")
    group.add_argument("--block-length", type=int, metavar="N", help="rows of a block (default: 32; LLaDA-MoE: 16)")
    group.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="forwards per block at most (default: 32); LLaDA-MoE: forwards for the whole answer (default: gen-length)",
    )
    group.add_argument(
        "--threshold",
        type=float,
        default=None,
        metavar="P",
        help="fill every mask whose token is above this probability (default: 0.95, and 0.5 for LLaDA2.2 with editing)",
    )
    group.add_argument(
        "--editing-threshold",
        type=float,
        default=None,
        metavar="P",
        help="replace a committed token where another one is above this probability, as LLaDA2.1 (0.9, or 0.5 and 0.0 "
        "with lower thresholds) and LLaDA2.2 (0.0) decode; whole blocks are live then, so a plan saves less (default: "
        "committed tokens stay)",
    )
    group.add_argument(
        "--max-post-steps",
        type=int,
        metavar="N",
        help="with editing, forwards that may follow when the last mask of a block is filled (default: 16)",
    )
    group.add_argument("--no-cache", action="store_true", help="whole window on every forward, no K/V cache")
    group.add_argument("--cfg-scale", type=float, metavar="S", help="LLaDA-MoE: classifier-free guidance (default: 0)")
    group.add_argument(
        "--remasking",
        choices=("low_confidence", "random"),
        help="LLaDA-MoE: which rows are committed first (default: low_confidence, the surest)",
    )


def _value(kind: type[int] | type[float], text: str) -> Any:
    """A number, or none of it; for one value per MoE layer, several with commas between them."""
    try:
        values = [None if part in ("none", "all", "never") else kind(part) for part in text.lower().split(",")]
    except ValueError:
        example = "0.95 or 0.9,0.95" if kind is float else "5"
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number such as {example}, or 'none'") from None
    return values[0] if len(values) == 1 else tuple(values)


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `EpochConfig` that were given as options."""
    return {f.name: getattr(arguments, f.name) for f in fields(EpochConfig) if hasattr(arguments, f.name)}


def _plan(arguments: argparse.Namespace) -> EpochConfig | None:
    changes = _changes(arguments)
    if arguments.plan is None:
        return EpochConfig.preset(arguments.preset, **changes)
    return EpochConfig.load(arguments.plan).replace(**changes)


def _decoding(arguments: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Arguments of the loop that decodes such a model; those of another loop are refused."""
    from epoch_moe.decoding import is_canvas_model

    blocks = {
        "threshold": arguments.threshold,
        "editing_threshold": arguments.editing_threshold,
        "max_post_steps": arguments.max_post_steps,
        "use_cache": False if arguments.no_cache else None,
        **{name: getattr(arguments, name, None) for name in ("top_k", "top_p")},
    }
    canvas = {"cfg_scale": arguments.cfg_scale, "remasking": arguments.remasking}
    own, foreign = (canvas, blocks) if is_canvas_model(config) else (blocks, canvas)
    for name, value in foreign.items():
        if value is not None:
            flag = "--no-cache" if name == "use_cache" else f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} does nothing for model_type={config.model_type!r}: leave it out")
    gen_length = arguments.gen_length
    if gen_length is None:
        gen_length = 32 if own is canvas else 96
    defaults = {
        "gen_length": gen_length,
        "block_length": 16 if own is canvas else 32,
        "steps": gen_length if own is canvas else 32,
    }
    given = {name: getattr(arguments, name) for name in defaults}
    options = {**defaults, **{name: value for name, value in (given | own).items() if value is not None}}
    made = None if getattr(arguments, "plan", None) is None else json.loads(arguments.plan.read_text()).get("options")
    for name in ("threshold", "block_length", "steps", "editing_threshold"):
        if made and made.get(name) != options.get(name):
            pair = f"{name}={made.get(name)}, not {options.get(name)}"
            print(f"{arguments.plan} was calibrated with {pair}: its bound does not hold here", file=sys.stderr)
    return options


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    from epoch_moe.models import load_model

    device = arguments.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device=device)
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer: add its tokenizer files to the checkpoint folder")
    return model, tokenizer


def _generate(arguments: argparse.Namespace) -> int:
    import torch

    from epoch_moe.decoding import loop_of
    from epoch_moe.patching.apply import patch

    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    plan = _plan(arguments)
    model, tokenizer = _load(arguments)
    if arguments.chat and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(f"the tokenizer of {arguments.model} has no chat template: leave out --chat")
    if arguments.chat:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        ids = ids["input_ids"] if hasattr(ids, "keys") else ids
    else:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if unknown := unknown_parts(tokenizer, text):
        parts = ", ".join(map(repr, unknown[:5])) + (" and more" if len(unknown) > 5 else "")
        print(f"epoch-moe generate: the tokenizer does not know {parts}: the model sees none of it", file=sys.stderr)
    report = patch(model, plan)
    generator = None
    if arguments.seed is not None:
        seed = whole("--seed", arguments.seed, least=-MOST)
        generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    streamer = None
    if arguments.stream:
        from transformers import TextStreamer

        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    start = time.perf_counter()
    out = loop_of(model)(
        model,
        torch.tensor([ids]),
        temperature=arguments.temperature,
        eos_early_stop=True,
        generator=generator,
        streamer=streamer,
        **_decoding(arguments, model.config),
    )
    seconds = time.perf_counter() - start
    answer = tokenizer.decode(out.answers[0], skip_special_tokens=True)
    if streamer is None:
        print(answer)
    if not answer.strip():
        tokens = f"{out.lengths[0]} tokens, finish reason {out.finish_reasons[0]!r}"
        print(f"epoch-moe generate: the answer holds no text ({tokens})", file=sys.stderr)
    if arguments.report:
        work = out.counters.read().as_dict()
        del work["per_layer"]
        print(report, file=sys.stderr)
        print(
            f"{out.lengths[0]} tokens in {out.forwards} forwards ({out.tokens_per_forward:.2f} tokens per forward), "
            f"{seconds:.2f} s, {out.finish_reasons[0]}",
            file=sys.stderr,
        )
        print("\n".join(f"  {name}: {value}" for name, value in work.items()), file=sys.stderr)
    return 0


def unknown_parts(tokenizer: Any, text: str) -> list[str]:
    """Parts of a text that a tokenizer dropped, or replaced by its token for what it does not know."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if not getattr(tokenizer, "is_fast", False):  # it does not say which part of the text a token is of
        return [tokenizer.unk_token] if unknown in tokenizer(text, add_special_tokens=False)["input_ids"] else []
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    lost = [not character.isspace() for character in text]
    for token, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        lost[begin:end] = [token == unknown and gone for gone in lost[begin:end]]
    runs = groupby(zip(text, lost, strict=True), key=lambda pair: pair[1])
    return ["".join(character for character, _ in run) for gone, run in runs if gone]


def _inspect(arguments: argparse.Namespace) -> int:
    from epoch_moe.inspection import describe_checkpoint, inspection_text

    if (arguments.budget or arguments.card) and not arguments.residency:
        raise ValueError("--budget and --card say something about --residency: add it")
    result = describe_checkpoint(arguments.model)
    text = inspection_text(result)
    if arguments.residency:
        from epoch_moe.residency.sizing import residency_sizes, sizes_text

        result["residency"] = residency_sizes(result, arguments.budget, arguments.card)
        text = f"{text}\n{sizes_text(result['residency'])}"
    print(text)  # only now: an error is not to scroll away under what it does not concern
    write_json(arguments.json, result)
    return 0


def _problems(arguments: argparse.Namespace, tokenizer: Any) -> tuple[Sequence[Problem], Judge | None]:
    """The prompts that were asked for, and who judges the answers."""
    if arguments.prompts is not None:
        if arguments.kinds is not None:
            raise ValueError(f"--kinds {arguments.kinds}: of the held-out problems, which --prompts replaces")
        prompts = read_prompts(arguments.prompts, tokenizer, arguments.chat)
        lost = sum(bool(unknown_parts(tokenizer, prompt.prompt)) for prompt in prompts)
        if lost:
            print(f"{lost} of {len(prompts)} prompts have parts that the tokenizer does not know", file=sys.stderr)
        return prompts, make_judge(arguments.judge, prompts)
    if arguments.judge is not None or arguments.chat:
        raise ValueError("--judge and --chat say something about --prompts: add it")
    if arguments.problems < 1:
        raise ValueError(f"--problems {arguments.problems}: expected at least 1")
    kinds = None if arguments.kinds is None else arguments.kinds.split(",")
    return generate_problems(arguments.problems, arguments.seed, kinds, split="held_out"), check


def _compare(arguments: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    from epoch_moe.compare import compare
    from epoch_moe.report import comparison_table

    if arguments.show < 0:
        raise ValueError(f"--show {arguments.show}: expected 0 or more")
    plan = _plan(arguments)
    assert plan is not None  # the presets of this command all have a plan
    model, tokenizer = _load(arguments)
    problems, judge = _problems(arguments, tokenizer)
    with tqdm(total=len(problems), unit="problem", desc="compare", disable=arguments.no_progress) as bar:
        result = compare(
            model,
            tokenizer,
            problems,
            plan,
            batch_size=arguments.batch_size,
            judge=judge,
            progress=bar.update,
            samples=len(problems),
            **_decoding(arguments, model.config),
        )
    result["model"], result["seed"] = arguments.model, arguments.seed
    samples, result["samples"] = result["samples"], result["samples"][: arguments.show]
    for sample in result["samples"]:
        print(f"[{sample['kind']}] {sample['prompt']}")
        right = {} if sample["answer"] is None else {"right answer": sample["answer"]}
        for name, text in {**right, "dense": sample["dense"], "plan": sample["plan"]}.items():
            print(f"  {name:12s}  {text}")
    print(f"\n{comparison_table(result)}")
    write_json(arguments.json, result)
    if arguments.output is not None:
        write_output(arguments.output, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
        print(f"written to {arguments.output}")
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    from epoch_moe.calibrate import calibrate, calibration_table

    model, tokenizer = _load(arguments)
    problems, judge = _problems(arguments, tokenizer)
    options = _decoding(arguments, model.config)
    with tqdm(unit="prompt", disable=arguments.no_progress) as bar:

        def progress(what: str, done: int, total: int) -> None:
            if done == 0:
                bar.reset(total)
                bar.set_description(what)
            bar.update(done)

        found = calibrate(
            model,
            tokenizer,
            problems,
            tolerance=arguments.tolerance,
            objective=arguments.objective,
            base=EpochConfig(**{"refresh_interval": None, "drift": 1.0, **_changes(arguments)}),
            judge=judge,
            batch_size=arguments.batch_size,
            progress=progress,
            **options,
        )
    print(calibration_table(found.about))
    about = {**found.about, "model": arguments.model}
    found.config.save(arguments.output, **about)
    print(f"written to {arguments.output}")
    write_json(arguments.json, about)
    if arguments.figure is not None:
        from epoch_moe.report import frontier_figure

        frontier_figure(about).savefig(arguments.figure)
        print(f"written to {arguments.figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
