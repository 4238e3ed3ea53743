"""What the model families share as transformers models: a decoder of MoE layers, and its LM head.

Attention is bidirectional unless a mask says otherwise; see `attention_bias`. Shape suffixes: B sequences, S positions,
V vocabulary, H hidden, E experts, N heads.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from epoch_moe.models.config import DiffusionConfig
from epoch_moe.models.generation import Generates
from epoch_moe.models.layers import DecoderLayer, RMSNorm, attention_bias, rope_tables


class DiffusionPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Loading, saving and initialisation."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    # Its kernels take no 4-D mask, and a block-causal mask is one: refused rather than ignored.
    _supports_flash_attn = False
    # Some converted checkpoints carry rotary tables; they are computed here.
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq$"]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers looks for a code pattern in the source file of the class; the attention lies in another file.
        return True


# transformers 5 renamed the outputs' field and warns about the old name.
_CACHE_FIELD = "cache" if "cache" in {f.name for f in dataclasses.fields(MoeModelOutputWithPast)} else "past_key_values"


def _one_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache that a caller passed under either name, checked."""
    if past_key_values is not None and cache is not None:
        raise ValueError("pass past_key_values or cache, not both: they are two names of one argument")
    given = past_key_values if cache is None else cache
    if given is not None and (not isinstance(given, Cache) or given.is_compileable):
        raise TypeError(
            f"past_key_values is a {type(given).__name__}: expected a transformers Cache that grows, and hands out "
            "written positions only, such as DynamicCache()"
        )
    return given


def _check_ids(input_ids_BS: Tensor, vocab_size: int) -> None:
    if input_ids_BS.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids_BS.shape)}: expected [batch, positions]")
    if input_ids_BS.is_floating_point() or input_ids_BS.dtype == torch.bool:
        raise ValueError(f"input_ids has dtype {input_ids_BS.dtype}: expected int64 token ids")
    # On a GPU this would wait for the device on every forward; there the embedding's own assertion speaks.
    if input_ids_BS.device.type != "cpu" or not input_ids_BS.numel() or torch.compiler.is_compiling():
        return
    low, high = (int(value) for value in input_ids_BS.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"input_ids holds {low if low < 0 else high}: expected ids in 0..{vocab_size - 1} (vocab_size="
            f"{vocab_size}); check that the tokenizer belongs to this model"
        )


class DiffusionDecoder(DiffusionPreTrainedModel):
    """The decoder without its LM head. A family names the class of its layers, and its token embedding."""

    layer_class: type[DecoderLayer]
    gradient_checkpointing = False

    def __init__(self, config: DiffusionConfig):
        super().__init__(config)
        setattr(self, self._input_embed_layer, nn.Embedding(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def rotary_tables(self, position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin ``[B,S,R]`` for absolute positions."""
        rotary_dim = int(self.config.sizes().head_dim * self.config.partial_rotary_factor)
        return rope_tables(position_ids_BS, rotary_dim, self.config.rope_theta, dtype)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        cache_position: Tensor | None = None,
    ) -> MoeModelOutputWithPast | tuple[Any, ...]:
        """Hidden states ``[B,S,H]`` of ``input_ids [B,S]`` or ``inputs_embeds [B,S,H]``.

        Args:
            input_ids: token ids ``[B,S]``.
            attention_mask: see `attention_bias`.
            position_ids: absolute positions ``[B|1,S]``; default: continue after the cache.
            past_key_values: a transformers `Cache` that grows, such as `DynamicCache`; the rows' K/V are appended.
            inputs_embeds: embeddings ``[B,S,H]`` in place of ``input_ids``.
            use_cache: make a `DynamicCache` where none is passed.
            output_attentions: attention weights ``[B,N,S,KV]`` of every layer; needs eager attention.
            output_hidden_states: the input ``[B,S,H]`` of every layer and the final output.
            output_router_logits: fp32 router logits ``[B,S,E]`` of every MoE layer.
            return_dict: False for a tuple.
            cache: the name of ``past_key_values`` in transformers 5.
            cache_position: ignored, as positions follow from the cache; some callers always pass it.

        Raises:
            ValueError: for ids out of range (checked on the CPU) and inputs whose shapes do not fit together.
            TypeError: for a cache that is no growing `Cache`.
        """
        config = self.config
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if input_ids is not None:
            _check_ids(input_ids, self.get_input_embeddings().num_embeddings)
            inputs_embeds = self.get_input_embeddings()(input_ids)
        assert inputs_embeds is not None
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != config.hidden_size:
            raise ValueError(
                f"inputs_embeds has shape {tuple(inputs_embeds.shape)}: expected [batch, positions, "
                f"hidden_size={config.hidden_size}]"
            )
        past_key_values = _one_cache(past_key_values, cache)
        recompute = self.gradient_checkpointing and self.training
        if recompute and past_key_values is not None:
            raise ValueError(
                "gradient checkpointing runs every layer twice and would append its K/V twice: train without a cache, "
                "or call model.gradient_checkpointing_disable()"
            )
        use_cache = config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not recompute:
            past_key_values = DynamicCache()
        batch, seq_len, _ = inputs_embeds.shape
        past_len = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        if position_ids is None:
            position_ids = torch.arange(past_len, past_len + seq_len, device=inputs_embeds.device).unsqueeze(0)
        elif position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != seq_len:
            raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}: expected [{batch} or 1, {seq_len}]")
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return_dict = config.return_dict if return_dict is None else return_dict
        if output_attentions and config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions=True needs eager attention, the model has {config._attn_implementation!r}: call "
                "model.set_attn_implementation('eager')"
            )
        want_router = config.output_router_logits if output_router_logits is None else output_router_logits
        mask = attention_bias(
            attention_mask, batch, seq_len, past_len + seq_len, inputs_embeds.dtype, config.num_attention_heads
        )
        attention = {
            "attention_mask": mask,
            "position_embeddings": self.rotary_tables(position_ids, inputs_embeds.dtype),
            "past_key_values": past_key_values,
        }
        seen_hidden: list[Tensor] = []
        seen_weights: list[Tensor] = []
        seen_router: list[Tensor] = []
        hidden_states = F.dropout(inputs_embeds, getattr(config, "embedding_dropout", 0.0), self.training)
        for layer in self.layers:
            if output_hidden_states:
                seen_hidden.append(hidden_states)
            if recompute:
                # Reentrant checkpointing, the default of transformers 4, takes no keyword arguments.
                hidden_states, weights, router = self._gradient_checkpointing_func(
                    partial(layer.__call__, **attention), hidden_states
                )
            else:
                hidden_states, weights, router = layer(hidden_states, **attention)
            if output_attentions and weights is not None:
                seen_weights.append(weights)
            if want_router and router is not None:
                seen_router.append(router)
        hidden_states = self.norm(hidden_states)
        if output_hidden_states:
            seen_hidden.append(hidden_states)
        out = MoeModelOutputWithPast(
            last_hidden_state=hidden_states,
            hidden_states=tuple(seen_hidden) or None,
            attentions=tuple(seen_weights) or None,
            router_logits=tuple(seen_router) or None,
            **{_CACHE_FIELD: past_key_values},
        )
        return out if return_dict else out.to_tuple()


class DiffusionLM(Generates, DiffusionPreTrainedModel):
    """A decoder with its LM head. Logits belong to the position they are at (no shift): it is a masked predictor."""

    decoder_class: type[DiffusionDecoder]

    def __init__(self, config: DiffusionConfig):
        super().__init__(config)
        self.generation_config = GenerationConfig()  # names nothing, so that the config's ids count
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        cache_position: Tensor | None = None,
    ) -> MoeCausalLMOutputWithPast | tuple[Any, ...]:
        """Logits ``[B,S,V]`` in fp32.

        Arguments and errors are those of `DiffusionDecoder.forward`, and:

        Args:
            labels: ``[B,S]``, -100 = ignored; the loss is the cross entropy *at* each position.
            logits_to_keep: compute logits of the last n positions (0 = all) or of the given positions (1-D tensor).
        """
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels need the logits of all positions: drop logits_to_keep")
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            output_router_logits=output_router_logits,
            return_dict=True,
            cache=cache,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        keep = logits_to_keep if isinstance(logits_to_keep, Tensor) else keep  # type: ignore[assignment]
        logits = self.lm_head(out.last_hidden_state[:, keep]).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100)
        result = MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            router_logits=out.router_logits,
            **{_CACHE_FIELD: out.get(_CACHE_FIELD)},
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return result if return_dict else result.to_tuple()
