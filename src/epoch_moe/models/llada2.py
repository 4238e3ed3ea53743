"""LLaDA2.0, 2.1 and 2.2 (`model_type: llada2_moe`) for transformers, without remote code.

Module tree and state-dict keys are the released ones, so official checkpoints load and `save_pretrained` writes
official checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor, nn

from epoch_moe.decoding.block_diffusion import generate
from epoch_moe.models.decoder import DiffusionDecoder, DiffusionLM, DiffusionPreTrainedModel
from epoch_moe.models.generation import one_prompt, released_arguments
from epoch_moe.models.layers import RMSNorm, rope_tables
from epoch_moe.models.llada2_config import LLaDA2MoeConfig
from epoch_moe.models.llada2_layers import (
    LLaDA2MoeAttention,
    LLaDA2MoeDecoderLayer,
    LLaDA2MoeGate,
    LLaDA2MoeSparseMoeBlock,
)

__all__ = [
    "LLaDA2MoeAttention",
    "LLaDA2MoeConfig",
    "LLaDA2MoeDecoderLayer",
    "LLaDA2MoeGate",
    "LLaDA2MoeModel",
    "LLaDA2MoeModelLM",
    "LLaDA2MoePreTrainedModel",
    "LLaDA2MoeSparseMoeBlock",
]


class LLaDA2MoePreTrainedModel(DiffusionPreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = LLaDA2MoeConfig
    _no_split_modules = ["LLaDA2MoeDecoderLayer"]
    # 4.57 leaves buffers in their own dtype and refuses names that are no modules; 5.x casts buffers unless told not.
    _keep_in_fp32_modules_strict = ["expert_bias"] if int(transformers.__version__.split(".")[0]) >= 5 else None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LLaDA2MoeGate):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            nn.init.zeros_(module.expert_bias)
        else:
            super()._init_weights(module)


class LLaDA2MoeModel(LLaDA2MoePreTrainedModel, DiffusionDecoder):
    """The decoder without its LM head."""

    embedding_name = "word_embeddings"

    def __init__(self, config: LLaDA2MoeConfig):
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LLaDA2MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def rotary_tables(self, position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin ``[B,S,R]`` for absolute positions."""
        rotary_dim = int(self.config.head_dim * self.config.partial_rotary_factor)
        return rope_tables(position_ids_BS, rotary_dim, self.config.rope_theta, dtype)


class LLaDA2MoeModelLM(LLaDA2MoePreTrainedModel, DiffusionLM):
    """LLaDA2 with its LM head. Logits belong to the position they are at (no shift): it is a masked predictor."""

    # transformers 5 wants {tied key: source key} for save_pretrained, 4.57 iterates over the keys: a dict serves both.
    _tied_weights_keys = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: LLaDA2MoeConfig):
        super().__init__(config)
        self.model = LLaDA2MoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @released_arguments
    def generate(
        self,
        inputs: Tensor | None = None,
        temperature: float = 0.0,
        block_length: int = 32,
        steps: int = 32,
        gen_length: int = 2048,
        top_p: float | None = None,
        top_k: int | None = None,
        eos_early_stop: bool = False,
        minimal_topk: int = 1,
        threshold: float = 0.95,
        *,
        editing_threshold: float | None = None,
        max_post_steps: int = 16,
        eos_id: int | Sequence[int] | None = None,
        mask_id: int | None = None,
        num_to_transfer: int = 1,
    ) -> Tensor:
        """An answer, with the arguments of the released files (2.0 and 2.1) and by `epoch_moe.generate`.

        A patched model decodes under its plan. Arguments not listed here are those of `epoch_moe.generate`.

        Args:
            inputs: one prompt ``[1,P]``.
            editing_threshold: None decodes as LLaDA2.0. The files of 2.1 and 2.2 edit by default (at 0.9 and 0.0), and
                no config tells 2.0 from 2.1: name it for these models, as their cards do.
            max_post_steps, num_to_transfer: only with `editing_threshold`.
            eos_id, mask_id: None: the model's own (released files: the numbers of released checkpoints).

        Returns:
            ``[1,A]`` int64: the answer without the prompt, up to and including its first end id.

        Raises:
            TypeError, ValueError: as `epoch_moe.generate`, for an argument that is unknown or would have no effect, and
                for several prompts.
        """
        if editing_threshold is None and (max_post_steps, num_to_transfer) != (16, 1):
            raise ValueError(
                f"max_post_steps={max_post_steps} and num_to_transfer={num_to_transfer} belong to editing: pass "
                "editing_threshold too (LLaDA2.1's file has 0.9), or leave them out"
            )
        return generate(
            self,
            one_prompt("inputs", inputs),
            temperature=temperature,
            block_length=block_length,
            steps=steps,
            gen_length=gen_length,
            top_p=top_p,
            top_k=top_k,
            eos_early_stop=eos_early_stop,
            minimal_topk=minimal_topk,
            threshold=threshold,
            editing_threshold=editing_threshold,
            max_post_steps=max_post_steps,
            num_to_transfer=num_to_transfer,
            eos_token_id=eos_id,
            mask_token_id=mask_id,
        ).sequences
