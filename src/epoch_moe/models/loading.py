"""`load_model`: a checkpoint of the package, of a local folder or of the Hugging Face Hub, without remote code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from epoch_moe.checks import choice, flag, instance, whole
from epoch_moe.experts.layouts import LayoutName, is_expert, layout_of
from epoch_moe.freshlane.collectives import Ranks
from epoch_moe.freshlane.dispatch_kinds import GROUP_KINDS, ExpertRange, KindName
from epoch_moe.models.checkpoint import (
    CHECKPOINTS,
    CONFIG_NAME,
    builtin_checkpoints,
    check_keys,
    check_sizes,
    locate,
    quoted,
    read_config,
    tokenizer_files,
)
from epoch_moe.models.config import own_fields
from epoch_moe.models.generation import read_generation_config
from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModel, LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAConfig, LLaDAMoEConfig, LLaDAMoEModel, LLaDAMoEModelLM
from epoch_moe.models.placement import find_device, find_device_map
from epoch_moe.models.stacked_checkpoint import fill_model, stored_shapes
from epoch_moe.patching.apply import patch
from epoch_moe.residency.attach import ORIGIN, Origin
from epoch_moe.residency.config import ResidencyConfig
from epoch_moe.tensor_files import STORED_DTYPES, TensorHeader, read_headers

__all__ = ["CHECKPOINTS", "Checkpoint", "builtin_checkpoints", "load_model", "read_checkpoint", "register_auto_classes"]

_FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], type[PreTrainedModel]]] = {
    "llada2_moe": (LLaDA2MoeConfig, LLaDA2MoeModel, LLaDA2MoeModelLM),
    "lladamoe": (LLaDAMoEConfig, LLaDAMoEModel, LLaDAMoEModelLM),
    "llada": (LLaDAConfig, LLaDAMoEModel, LLaDAMoEModelLM),
}
_ALIASES: dict[Any, str] = {"llada2_moe_veomni": "llada2_moe"}
"""Names that training code gives to a model whose experts it stacks."""
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
try:
    from transformers.initialization import no_init_weights
except ImportError:  # transformers 4
    from transformers.modeling_utils import no_init_weights

_STORED_DTYPES = {name: dtype for name, dtype in STORED_DTYPES.items() if dtype != torch.float64}
_ATTENTION = ("sdpa", "eager")


def register_auto_classes() -> None:
    """Make `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` of transformers know the models of this package.

    Calling it again changes nothing. `load_model` calls it; importing this package does not.
    """
    for model_type, (config_class, base_class, lm_class) in _FAMILIES.items():
        AutoConfig.register(model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, base_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, lm_class, exist_ok=True)


def load_model(
    path_or_id: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    ep_group: Any = None,
    ep_layout: KindName = "sharded",
    ep_capacity: int | None = None,
    residency: ResidencyConfig | None = None,
) -> tuple[Any, Any]:
    """Load a model in eval mode, and its tokenizer.

    The checkpoint is checked before anything is built: every shard present and complete, every key, dtype and shape
    as the model expects. No code from the checkpoint runs, and nothing that its files name is fetched: the class
    follows from `model_type` in its config.json, of which only the keys of that class are read.
    Experts may be stored one by one, stacked by projection or fused (docs/patching.md).

    Args:
        path_or_id: a name from `builtin_checkpoints`, a local folder, or a Hugging Face Hub id ``"owner/name"``, in
            this order.
        dtype: of the weights: ``"auto"`` (as the checkpoint stores them), ``"bfloat16"``, ``"float16"``,
            ``"float32"`` or the torch.dtype. The router's expert bias stays fp32 always.
        device: where the model goes; None means the CPU.
        device_map: spread the layers over several devices instead: module path -> device, or ``"auto"`` for what
            accelerate thinks best for the GPUs' memory. Nothing is offloaded: each layer computes where it lies. Such a
            model may be patched, but takes no plan.
        attn_implementation: ``"sdpa"`` or ``"eager"``; None lets transformers choose (sdpa).
        revision: of a Hub checkpoint: branch, tag or commit.
        local_files_only: use a Hub checkpoint from the local cache only.
        ep_group: split the experts over the ranks of this group, as `epoch_moe.patch` does. Only this rank's are read;
            the model comes patched with the default plan, which another `patch` changes.
        ep_layout, ep_capacity: see `epoch_moe.patch`.
        residency: keep a part of the experts in fast memory; the others stay in the checkpoint's files, which must not
            change while the model lives. Never are all of them in memory. The model comes patched, as with
            ``ep_group`` (docs/residency.md).

    Returns:
        ``(model, tokenizer)``. A checkpoint without tokenizer files gives None and a warning.

    Raises:
        FileNotFoundError: for an unknown name or folder, missing files, or a Hub checkpoint that cannot be had.
        ValueError: for a model type, dtype, device, layout, adapter or damaged file; the message quotes it.
        TypeError: for a ``residency`` that is no `ResidencyConfig`.

    Example:
        >>> import epoch_moe
        >>> model, tokenizer = epoch_moe.load_model("tiny-llada2")
        >>> model.training, tokenizer.decode(tokenizer("3+6=9")["input_ids"])
        (False, '3+6=9')
    """
    instance("path_or_id", path_or_id, (str, Path), "a name, a folder or a Hub id")
    requested_dtype = _dtype(dtype)
    target_device = find_device(device)
    instance("revision", revision, (str, type(None)), "a branch, tag or commit, or None")
    flag("local_files_only", local_files_only)
    choice("ep_layout", ep_layout, GROUP_KINDS)
    if ep_capacity is not None:
        whole("ep_capacity", ep_capacity, "rows", least=1)
    instance("residency", residency, (ResidencyConfig, type(None)), "a ResidencyConfig or None")
    if residency is not None and residency.source is not None:
        raise ValueError(
            f"ResidencyConfig.source={str(residency.source)!r}: load_model reads experts from the checkpoint itself; "
            "leave it out"
        )
    others = {"device": device, "ep_group": ep_group, "residency": residency}
    conflicts = [name for name, value in others.items() if device_map is not None and value is not None]
    if conflicts:
        raise ValueError(f"device_map and {conflicts[0]} both say where weights lie: pass one of them")
    if not isinstance(attn_implementation, (str, type(None))) or attn_implementation not in (None, *_ATTENTION):
        raise ValueError(
            f"attn_implementation={attn_implementation!r}: expected one of {quoted(_ATTENTION)} or None (block-causal "
            "masks are 4-D, which the flash kernels do not take)"
        )
    register_auto_classes()
    found = _read(locate(path_or_id, revision, local_files_only), requested_dtype, attn_implementation)
    model = found.model
    places = {"": target_device} if device_map is None else find_device_map(device_map, model)
    share = None if ep_group is None else ExpertRange.of(model.config.sizes().experts, Ranks(ep_group)).numbers
    fill_model(model, found.folder, found.headers, found.layout, places, share, experts_too=residency is None)
    model.generation_config = found.generation_config
    if device_map is not None:
        from accelerate import dispatch_model

        first = next(iter(places.values()))
        dispatch_model(model, places, main_device=first, skip_keys=model._skip_keys_device_placement)
    if residency is not None:
        object.__setattr__(model, ORIGIN, Origin(found.folder, found.headers, target_device))
    if ep_group is not None or residency is not None:
        patch(model, ep_group=ep_group, ep_layout=ep_layout, ep_capacity=ep_capacity, residency=residency)
    return model, _tokenizer(found.folder, model.config, found.tokenizer_files)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself, without its weights.

    Attributes:
        folder: that its files lie in.
        generation_config: its generation_config.json; empty where it has none.
        tokenizer_files: names of its tokenizer's files.
        model: the model on the meta device, of the dtype of its weights.
        headers: every tensor's header, by name.
        layout: how the files hold the experts, see `epoch_moe.experts.layouts`.
        stored: whether headers were read from files; False: they are what the configuration implies, in bf16 with an
            fp32 expert bias as released.
    """

    folder: Path
    generation_config: GenerationConfig
    tokenizer_files: list[str]
    model: Any
    headers: dict[str, TensorHeader]
    layout: LayoutName
    stored: bool


def read_checkpoint(
    path_or_id: str | Path, *, revision: str | None = None, local_files_only: bool = False
) -> Checkpoint:
    """Read a checkpoint's configuration and file headers; of a Hub checkpoint only its JSON files are downloaded.

    Raises:
        FileNotFoundError, ValueError: as `load_model`.
    """
    folder = locate(path_or_id, revision, local_files_only, patterns=("*.json",))
    return _read(folder, stored=any(folder.glob("*.safetensors")) or Path(path_or_id).expanduser().is_dir())


def _read(
    folder: Path, dtype: torch.dtype | None = None, attn_implementation: str | None = None, stored: bool = True
) -> Checkpoint:
    """A checkpoint, checked; ``dtype`` and ``attn_implementation`` are those of its model, as `load_model` has them."""
    config, lm_class = _classes(folder)
    tokenizer, generation_config = tokenizer_files(folder), read_generation_config(folder, config.vocab_size)
    headers = read_headers(folder) if stored else {}
    sizes, layout = config.sizes(), layout_of(headers)
    if stored:
        check_sizes(folder, headers, sizes, config.mask_token_id)
        dtype = dtype or _stored_dtype(folder, headers)
    config.name_or_path = str(folder)
    with torch.device("meta"), no_init_weights():  # a released model has thousands of tensors
        model = lm_class._from_config(config, dtype=dtype, attn_implementation=attn_implementation).eval()
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items() if not is_expert(key)}
    shapes |= stored_shapes(sizes, layout)
    if stored:
        optional = ["lm_head.weight"] if config.tie_word_embeddings else []
        if not getattr(config, "moe_router_enable_expert_bias", True):
            optional += [key for key in shapes if key.endswith("expert_bias")]
        check_keys(folder, headers, shapes, optional)
    else:
        headers = {
            key: TensorHeader("F32" if key.endswith("expert_bias") else "BF16", shape, "", 0, 0)
            for key, shape in shapes.items()
        }
    return Checkpoint(folder, generation_config, tokenizer, model, headers, layout, stored)


def _classes(folder: Path) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    """Configuration and class. Only keys of our own are taken: those of transformers name code, kernels and files."""
    written = read_config(folder)
    model_type = written.get("model_type")
    name = _ALIASES.get(model_type, model_type) if isinstance(model_type, str) else None
    if name not in _FAMILIES:
        raise ValueError(
            f"{folder / CONFIG_NAME} has model_type={repr(model_type)[:100]}: expected one of {quoted(_FAMILIES)}"
        )
    config_class, _, lm_class = _FAMILIES[name]
    names = own_fields(config_class)
    try:
        config = config_class(**{key: value for key, value in written.items() if key in names})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG_NAME}: {error}") from error
    config.architectures = [lm_class.__name__]
    return config, lm_class


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The requested dtype; None for the checkpoint's."""
    if dtype == "auto":
        return None
    found = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        found = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(found, torch.dtype) or found not in _STORED_DTYPES.values():
        raise ValueError(
            f"dtype={dtype!r}: expected 'auto', 'bfloat16', 'float16' or 'float32', or one of these as torch.dtype"
        )
    return found


def _stored_dtype(folder: Path, headers: dict[str, TensorHeader]) -> torch.dtype:
    # From a tensor that every family stores in the model's dtype; config.json may say something else.
    names = ("word_embeddings.weight", "embed_tokens.weight")
    key = next((key for key in sorted(headers) if key.endswith(names)), None)
    if key is None:
        return torch.float32  # `check_keys` is going to miss it
    stored = headers[key].dtype
    if stored not in _STORED_DTYPES:
        raise ValueError(f"{folder} stores {key} as {stored}: expected {quoted(_STORED_DTYPES)}")
    return _STORED_DTYPES[stored]


def _tokenizer(folder: Path, config: PretrainedConfig, files: list[str]) -> Any:
    if not files:
        warnings.warn(f"{folder} has no tokenizer files: load_model returns None for it", stacklevel=3)
        return None
    try:
        # With its configuration, so that config.json is not read by others.
        return AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers library panics with an error that is no Exception
        raise ValueError(
            f"{folder}: no tokenizer can be made of {', '.join(files)} without code from the checkpoint "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        ) from error
