"""LLaDA2.0, 2.1 and 2.2 (`model_type: llada2_moe`) for transformers, without remote code.

Module tree and state-dict keys are the released ones, so official checkpoints load and `save_pretrained` writes
official checkpoints.
"""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from epoch_moe.models.decoder import DiffusionDecoder, DiffusionLM, DiffusionPreTrainedModel
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
