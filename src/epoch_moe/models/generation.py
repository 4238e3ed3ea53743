"""`generate` on the model classes: arguments and return values of the released code, around this library's loops."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from epoch_moe.tensor_files import is_file, read_json

NAME = "generation_config.json"


def read_generation_config(folder: Path, vocab_size: int) -> GenerationConfig:
    """`generation_config.json` of a checkpoint folder; an empty configuration where it has none.

    Raises:
        ValueError: the file is damaged, or names end ids that are no ids of the model.
    """
    path = folder / NAME
    if not is_file(path):
        return GenerationConfig()
    written = read_json(path)
    eos = written.get("eos_token_id")
    for token in eos if isinstance(eos, list) else [] if eos is None else [eos]:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{path} has eos_token_id={eos!r}: expected an id in 0..{vocab_size - 1} (vocab_size={vocab_size}), a "
                "list of them, or null"
            )
    try:
        return GenerationConfig.from_dict(written)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no generation configuration: {error}") from error


def released_arguments(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Refuse, by name, what the released `generate` does not take: transformers' own arguments, several prompts."""
    signature = inspect.signature(method)
    _, prompt_name, *_ = names = tuple(signature.parameters)

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        unknown = [name for name in kwargs if name not in names[1:]]
        if unknown:
            raise TypeError(
                f"{type(self).__name__}.generate does not take {', '.join(unknown)}: expected the released arguments, "
                f"{', '.join(names[1:])} (gen_length is transformers' max_new_tokens). Padded batches, streamers and "
                "plans of a call: epoch_moe.generate and epoch_moe.generate_semi_autoregressive"
            )
        prompt = signature.bind_partial(self, *args, **kwargs).arguments.get(prompt_name)
        if not isinstance(prompt, Tensor):
            hint = "; pass its 'input_ids'" if hasattr(prompt, "keys") else ""
            raise TypeError(
                f"{prompt_name} is a {type(prompt).__name__}: expected a tensor [1, positions] of token ids{hint}"
            )
        if prompt.dim() != 2 or prompt.shape[0] != 1:
            raise ValueError(
                f"{prompt_name} has shape {tuple(prompt.shape)}: expected [1, positions], one prompt, as the released "
                "loop does. epoch_moe.generate and epoch_moe.generate_semi_autoregressive take batches"
            )
        return method(self, *args, **kwargs)

    return checked


def rest_of(arguments: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """The arguments of a method, from its ``locals()``, without itself and ``others``."""
    return {name: value for name, value in arguments.items() if name not in ("self", "__class__", *others)}


class Generates:
    """What transformers and peft ask of a model that generates, for a model that does so in its own way."""

    config: Any
    generation_config: GenerationConfig

    @classmethod
    def can_generate(cls) -> bool:
        """Yes: `generation_config` is loaded from and saved with checkpoints."""
        return True

    def adjust_generation_fn(
        self, generation_config: GenerationConfig | None, from_auto: Any, from_pipeline: Any, path: Any, **where: Any
    ) -> None:
        """How `from_pretrained` of transformers 5 hands over a checkpoint's generation configuration."""
        where = {name: value for name, value in where.items() if name != "trust_remote_code"}
        try:
            self.generation_config = generation_config or GenerationConfig.from_pretrained(path, **where)
        except OSError:
            self.generation_config = GenerationConfig()  # there is none

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Not for a block diffusion model; peft asks for the method when it wraps a causal language model."""
        raise TypeError(
            f"{type(self).__name__} does not decode token by token: call its generate, or epoch_moe.generate"
        )
