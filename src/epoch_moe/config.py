"""`EpochConfig`: the one place where a block plan's choices are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from epoch_moe.checks import ArgumentError, choice, flag, instance, real, whole, wrong
from epoch_moe.experts.run import BACKENDS, Backend

OnMiss = Literal["reselect", "drop", "expand"]
Recompile = Literal["shortfall", "refresh"]
SupportScope = Literal["sequence", "batch"]
Commit = Literal["full", "drift"]
FutureRows = Literal["fresh", "dormant"]
PerLayer = float | tuple[float | None, ...] | None
LAYERED = ("coverage", "drift", "live_drift")
"""Fields that may hold a value for each MoE layer."""
FORMAT = 1
"""Of the files that `EpochConfig.save` writes."""
_OF_A_MODEL = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "expert_intermediate_size", "intermediate_size",
    "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EpochConfig:
    """How a block plan saves work, and what it may change.

    `coverage`, `drift` and `live_drift` are one value for all MoE layers, or a tuple with one for each.

    Attributes:
        coverage: share of the live rows' natural routing weight (that of their natural top-k) that lies inside a
            layer's expert support when it is compiled in a block's cold pass (ATLAS). None = all experts, no support;
            1.0 = the union of the rows' natural top-k. LLaDA2.2's router brings its own pools of experts: there this
            and the other fields about supports change nothing.
        least_saving: a support that would leave out less than this share of the experts that these rows use is not
            kept: its layer runs without one, and it is counted (`Work.unpaid`). No effect where ``coverage`` is 1.
        candidate_factor: a row's candidates for the support are its best ``candidate_factor * K`` experts.
        on_miss: what a restricted row does with natural top-k experts outside the support: ``"reselect"`` its top-k
            inside the support, ``"drop"`` those pairs, or ``"expand"`` the support by them (lossless).
        max_support: most experts of a support: where ``coverage`` asks for more it holds the heaviest ones, is kept
            whatever it saves, and is not watched. Not with ``join``, ``on_miss="expand"`` or ``coverage_floor``, which
            would grow or undo it. At least top-k. None = no limit.
        restrict_new: False lets rows whose output will be cached (newly decoded or refreshed) route without
            restriction, and tokens that the decoder may still edit. True restricts them too.
        join: the experts of rows that are newly decoded join the support. It grows by them (from 31 to 82 experts in
            mini's shapes), and nothing gets better.
        support_scope: ``"sequence"`` (a request never depends on its batch mates) or ``"batch"`` (one support per
            layer for the whole batch).
        coverage_floor: a sequence's live rows fall back to natural routing where less than this share of their
            natural weight lies inside the support. None = ``0.75 * coverage``; none with ``max_support``.
        recompile: when a support is compiled anew within a block: ``"shortfall"``, in the forward after one in which
            it fell below the floor; ``"refresh"``, in every forward that recomputes all rows.
        refresh_interval: every M-th forward of a block recomputes all of its rows (LSP); 1 = every forward, None =
            only the cold pass. With `drift` an upper bound on the age of what is reused within a block.
        drift: a decoded row is recomputed in a layer where its input has moved since its cached output was computed:
            where the cosine between the two inputs is not above this. Each layer decides for itself. 1.0 = always.
            None = by `refresh_interval` alone.
        live_drift: the same for rows that hold a MASK (or an editable token), whose output is then kept from forward to
            forward too, until the row is decoded. None = they are computed on every forward.
        commit: how rows in front of a block, or behind it, are computed in the block's first forward, which writes the
            K/V of a finished block for good: ``"full"``, all of them, so that these K/V are exact given earlier ones;
            or ``"drift"``, as in any other forward, from what was kept of them in the block before. Needs `drift`.
        future_rows: on a fixed canvas (LLaDA-MoE), what MASK rows of later blocks do between refreshes: ``"fresh"``
            go through the experts on every forward, ``"dormant"`` reuse their output as stable rows do.
        backend: how routed experts are computed, see `epoch_moe.experts.run`.
        checkpoint: what `fingerprint` says of the model that these choices were made for; with another one they are
            refused (where a model is known: a `RowStore` has none). None = for any.

    Example:
        >>> from epoch_moe import EpochConfig
        >>> config = EpochConfig(coverage=0.9, refresh_interval=4).replace(on_miss="expand")
        >>> config.coverage, config.on_miss
        (0.9, 'expand')
        >>> EpochConfig.exact().refresh_interval
        1
    """

    coverage: PerLayer = 0.95
    candidate_factor: int = 4
    least_saving: float = 0.15
    max_support: int | None = None
    on_miss: OnMiss = "reselect"
    restrict_new: bool = False
    join: bool = False
    support_scope: SupportScope = "sequence"
    coverage_floor: float | None = None
    recompile: Recompile = "shortfall"
    refresh_interval: int | None = 5
    drift: PerLayer = None
    live_drift: PerLayer = None
    commit: Commit = "full"
    future_rows: FutureRows = "fresh"
    backend: Backend = "auto"
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        def own(name: str) -> tuple[str, Any]:
            return f"EpochConfig.{name}", getattr(self, name)

        most = 1.0
        for value in self.values("coverage"):
            if value is not None:
                share = "None (all experts) or a share in (0, 1]"
                most = min(most, real("EpochConfig.coverage", value, share, most=1.0, above=True))
        if self.coverage_floor is not None:
            real(*own("coverage_floor"), f"None or a share in [0, coverage={self.coverage}]", most=most)
        whole(*own("candidate_factor"), "times top-k experts", least=1)
        choice(*own("on_miss"), ("reselect", "drop", "expand"))
        flag(*own("restrict_new"))
        flag(*own("join"))
        real(*own("least_saving"), "a share of experts in [0, 1]", most=1.0)
        choice(*own("recompile"), ("shortfall", "refresh"))
        if self.max_support is not None:
            whole(*own("max_support"), "None or a number of experts", least=1)
            for name, value in (("join", True), ("on_miss", "expand"), ("coverage", None)):
                if value in self.values(name):
                    raise ArgumentError(
                        f"max_support={self.max_support} with {name}={value!r}: there is no size to keep to; leave "
                        "out one of the two"
                    )
            if self.coverage_floor is not None:
                raise ArgumentError(
                    f"max_support={self.max_support} with coverage_floor={self.coverage_floor}: a support of that size "
                    "may hold less from the start, so it is not watched; leave out one of the two"
                )
        choice(*own("support_scope"), ("sequence", "batch"))
        if self.refresh_interval is not None:
            whole(*own("refresh_interval"), "a number of forwards, or None: never", least=1)
        for name in ("drift", "live_drift"):
            given = getattr(self, name)
            for layer, value in enumerate(() if given is None else self.values(name)):
                where, wanted = f"EpochConfig.{name}", "None, a cosine in (0, 1], or a tuple of one per MoE layer"
                if isinstance(given, tuple):
                    where, wanted = f"{where}[{layer}]", "a cosine in (0, 1]; 1.0 = always computed"
                real(where, value, wanted, most=1.0, above=True)
        choice(*own("commit"), ("full", "drift"))
        if self.commit == "drift" and self.drift is None:
            raise ArgumentError("commit='drift' with drift=None: there is no bound to go by; set drift (.95, say)")
        choice(*own("future_rows"), ("fresh", "dormant"))
        choice(*own("backend"), BACKENDS)
        instance(*own("checkpoint"), (str, type(None)), "what fingerprint(model.config) returns, or None")

    @classmethod
    def exact(cls, **changes: Any) -> EpochConfig:
        """All experts and a refresh on every forward: the same greedy tokens as without a plan.

        The same pairs too, but for rows of the last layer that nobody reads.
        """
        return cls(**{"coverage": None, "refresh_interval": 1, **changes})

    @classmethod
    def paper(cls, **changes: Any) -> EpochConfig:
        """Epoch's own setting (arXiv 2609.09748): reselection, new rows restricted, one support per batch, M = 5.

        New rows inside the support cost accuracy: on the tiny checkpoint right answers fall from 97.0 to 85.5 %, all
        of it through them, because their outputs are reused. The default lets them route freely.
        """
        settings = {
            "coverage": 0.95,
            "refresh_interval": 5,
            "on_miss": "reselect",
            "restrict_new": True,
            "support_scope": "batch",
            "recompile": "refresh",
        }
        return cls(**{**settings, **changes})

    @classmethod
    def preset(cls, name: str, **changes: Any) -> EpochConfig | None:
        """The configuration called ``"default"``, ``"exact"`` or ``"paper"``; None for ``"dense"`` (no plan)."""
        makers: dict[str, Callable[..., EpochConfig]] = {"default": cls, "exact": cls.exact, "paper": cls.paper}
        if name == "dense":
            if changes:
                raise ValueError(f"preset 'dense' has no plan to change: got {changes}")
            return None
        if not isinstance(name, str) or name not in makers:
            raise ArgumentError(f"preset {name!r}: expected one of 'dense', {', '.join(map(repr, makers))}")
        return makers[name](**changes)

    def replace(self, **changes: Any) -> EpochConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def save(self, path: str | Path, **about: Any) -> None:
        """Write a JSON file that `load` and the command line's ``--plan`` read; ``about``: what else it is to say."""
        content = {"format": FORMAT, "plan": asdict(self), **about}
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> EpochConfig:
        """The configuration in a file of `save`, or of ``epoch-moe calibrate``.

        Raises:
            ValueError: the file is none, or holds something that this version does not know.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        plan = content.get("plan") if isinstance(content, dict) else None
        if not isinstance(plan, dict):
            raise ValueError(f'{path} is no plan: expected an object with "format" and "plan", as calibrate writes it')
        if content.get("format") != FORMAT:
            raise ValueError(f"{path} has format {content.get('format')!r}: this version reads {FORMAT}")
        if unknown := sorted(set(plan) - {f.name for f in fields(cls)}):
            raise ValueError(f"{path} has {', '.join(map(repr, unknown))}: an EpochConfig has no such fields")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plan.items()}
        return cls(**values)

    def values(self, name: str) -> tuple[Any, ...]:
        """The values of a field: one, or one per MoE layer."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,)

    def of_layer(self, layer: int) -> EpochConfig:
        """The configuration of one MoE layer, where it has values of its own."""
        given = {name: getattr(self, name) for name in LAYERED}
        own = {name: value[layer] for name, value in given.items() if isinstance(value, tuple)}
        return self.replace(**own) if own else self

    def check_model(self, layers: int, model_config: Any = None) -> None:
        """Refuse a model that these choices were not made for.

        Args:
            layers: its MoE layers.
            model_config: its configuration; None: there is none to look at.
        """
        for name in LAYERED:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != layers:
                raise wrong(f"EpochConfig.{name}", value, f"one value, or one for each of {layers} MoE layers")
        found = self.checkpoint if model_config is None else fingerprint(model_config)
        if self.checkpoint not in (None, found):
            raise ArgumentError(
                f"this plan was made for another model (for {self.checkpoint}; this one is {found}): calibrate it for "
                "this one, or use it as it is with replace(checkpoint=None)"
            )

    @property
    def watches_drift(self) -> bool:
        """Whether layers compare their inputs with those of their cached outputs."""
        return self.drift is not None or self.live_drift is not None

    @property
    def floor(self) -> float:
        """`coverage_floor` with its default filled in; 0 where no support is watched."""
        if self.coverage is None or self.max_support is not None:
            return 0.0
        assert not isinstance(self.coverage, tuple)  # of one layer, see `of_layer`
        return 0.75 * self.coverage if self.coverage_floor is None else self.coverage_floor


def fingerprint(model_config: Any) -> str:
    """What a model's configuration says of its architecture, in one line; ``""`` where it says nothing."""
    values = ((name, getattr(model_config, name, None)) for name in _OF_A_MODEL)
    return " ".join(f"{name}={value}" for name, value in values if value is not None)
