"""`Retention`: keep the experts that the next forwards will probably use, judged by rows and the decoder's confidence.

The value of an expert is about the chance that some row uses it in the next forwards. Per layer it comes from:

* **Rows.** What each row of the window was routed to lately, times the chance that it is routed there again. That
  chance depends on what the row will be by then: a live row stays live, or is committed and becomes new, which changes
  its experts; the decoder's confidence tells how likely that is. New and stable rows come back at the refresh, and are
  discounted until then. Rows that are not seen again in the block count for nothing.
* **Turnover.** The branches that rows are expected to change go to other experts, in proportion to how often rows of
  that kind used each of them.
* **The block's end.** When no row is left live, all rows change at once. The share of blocks' first forwards that used
  an expert takes the rows' place then, discounted by how many forwards the end is away.
* **History.** The share of recent forwards that used the expert, for all that lies farther ahead.

How often rows keep their branches is counted as the decode goes on, by what the row is now, by how many of its forwards
ago it used the expert, and by the place of the branch in the row's order of routing weights: heavy branches last
longer, and the count says by how much. How confidence and commits go together is counted too, so no threshold need be
known. The counts start from what was measured on released models.

The four numbers that `Retention` takes were tried by hand on a few short traces (both tiny checkpoints, 40 problems of
a seed of their own, and made-up ones of LLaDA2.0-mini's shapes), of which none is among the reported ones. Twice or
half of each changes hit rates by about a hundredth.

Shape suffixes: L layers, E experts, R rows of a demand, M rows of the window of all sequences, D remembered forwards of
a row, K top-k, C row classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epoch_moe.residency.costs import run_length
from epoch_moe.residency.demand import Demand, RowClass

KEPT = {
    RowClass.LIVE: 0.619,
    RowClass.NEW: 0.279,
    RowClass.STABLE: 0.664,
    RowClass.COMMIT: 0.0,
    RowClass.OTHER: 0.755,
}
"""Share of its branches that a row keeps from one forward to the next, before anything was counted: measured on
LLaDA-MoE (a public audit); OTHER is its number for all rows together."""
COMMITTED = 0.16
"""Share of live rows that a forward commits, before anything was counted: 2.55 tokens per forward, as measured for
blocks of 32 rows, of which half are live on average."""
PRIOR_ROWS = 16.0
"""How many counted rows the numbers above weigh as much as: about one forward's."""
BINS = 10


@dataclass
class _Layer:
    """What is remembered of one layer.

    Attributes:
        ids_MDK: int64, experts of each row in its last D forwards, the latest first, each expert once; -1 = none.
        class_M: int64, `RowClass` of each row when it was seen last; -1 = not in this block.
        kept_CDK, tried_CDK: branches used again, of all that could have been.
        popular_CE: pairs of each expert from rows of each class, old ones fading.
        used_E, forwards: forwards that used each expert and how many there were, old ones fading.
        cold_E, colds: the same of forwards that began a block.
        window: rows of the window per sequence.
        to_refresh: of the last demand.
    """

    ids_MDK: Tensor
    class_M: Tensor
    kept_CDK: Tensor
    tried_CDK: Tensor
    popular_CE: Tensor
    used_E: Tensor
    cold_E: Tensor
    forwards: float = 0.0
    colds: float = 0.0
    window: int = -1
    to_refresh: int | None = None
    value_E: Tensor | None = None


class Retention:
    """Retention by predicted reuse; see the top of this file.

    Args:
        num_layers, num_experts: L and E.
        depth: D, forwards of a row that are remembered.
        discount: what a refresh or the block's end counts less for every forward that it is farther away.
        history: what the share of recent forwards that used an expert counts.
        memory: forwards after which a use has faded to 1/e.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        depth: int = 2,
        discount: float = 0.3,
        history: float = 0.25,
        memory: float = 100.0,
    ):
        self.num_experts = num_experts
        self.depth, self.discount, self.history = depth, discount, history
        self.fade = 1.0 - 1.0 / memory
        self._layers: list[_Layer | None] = [None] * num_layers
        self._commits = _CommitChance()
        self._forward = -1
        self._geometry: tuple[int | None, int] = (None, 0)

    def observe(self, demand: Demand) -> None:
        """See `Observer.observe`."""
        if demand.forward != self._forward:
            self._forward, self._geometry = demand.forward, (demand.seq_len, demand.lead)
            self._commits.observe(demand)
        state = self._layers[demand.layer] or self._new_layer(demand.ids_RK.shape[1])
        self._layers[demand.layer] = state
        window = -1 if demand.seq_len is None else demand.seq_len - demand.lead
        if demand.cold or state.window != window:
            state.ids_MDK.fill_(-1)
            state.class_M.fill_(-1)
        state.window, state.to_refresh = window, demand.to_refresh
        state.used_E.mul_(self.fade).add_(demand.counts_E > 0)
        state.forwards = state.forwards * self.fade + 1.0
        if demand.cold:
            state.cold_E.mul_(self.fade).add_(demand.counts_E > 0)
            state.colds = state.colds * self.fade + 1.0
        there_RK, class_RK = demand.ids_RK >= 0, demand.class_R.long().unsqueeze(1).expand_as(demand.ids_RK)
        pairs = class_RK[there_RK], demand.ids_RK[there_RK]
        one = torch.ones((), dtype=torch.float64)
        state.popular_CE.mul_(self.fade).index_put_(pairs, one, accumulate=True)
        self._remember(state, demand)
        state.value_E = None

    def _new_layer(self, top_k: int) -> _Layer:
        classes = len(RowClass)
        shape = (classes, self.depth, top_k)
        kept_C = torch.tensor([KEPT[row] for row in RowClass], dtype=torch.float64)
        # Older branches: the row has left them, and returns to a few. A guess, soon counted away.
        lag_D = 0.5 ** torch.arange(self.depth, dtype=torch.float64)
        lag_D[1:] *= 0.5
        return _Layer(
            ids_MDK=torch.empty(0, self.depth, top_k, dtype=torch.int64),
            class_M=torch.empty(0, dtype=torch.int64),
            kept_CDK=(PRIOR_ROWS * kept_C[:, None, None] * lag_D[:, None]).expand(shape).clone(),
            tried_CDK=torch.full(shape, PRIOR_ROWS, dtype=torch.float64),
            popular_CE=torch.full((classes, self.num_experts), 1.0 / self.num_experts, dtype=torch.float64),
            used_E=torch.zeros(self.num_experts, dtype=torch.float64),
            cold_E=torch.zeros(self.num_experts, dtype=torch.float64),
        )

    def _remember(self, state: _Layer, demand: Demand) -> None:
        """Count which remembered branches the rows used again, and remember this forward's."""
        window_R, class_R = demand.window_R, demand.class_R.long()
        rows = ((window_R >= 0) & (class_R != RowClass.COMMIT)).nonzero().squeeze(1)
        if not rows.numel():
            return
        window_R, class_R = window_R[rows], class_R[rows]
        order_RK = demand.weights_RK[rows].argsort(dim=1, descending=True, stable=True)
        ids_RK = demand.ids_RK[rows].gather(1, order_RK)
        grow = int(window_R.max()) + 1 - state.class_M.numel()
        if grow > 0:
            state.ids_MDK = F.pad(state.ids_MDK, (0, 0, 0, 0, 0, grow), value=-1)
            state.class_M = F.pad(state.class_M, (0, grow), value=-1)
        old_RDK = state.ids_MDK[window_R]
        again_RDK = (old_RDK.unsqueeze(-1) == ids_RK[:, None, None, :]).any(-1) & (old_RDK >= 0)
        state.kept_CDK.index_add_(0, class_R, again_RDK.double())
        state.tried_CDK.index_add_(0, class_R, (old_RDK >= 0).double())
        left_RDK = old_RDK.masked_fill(again_RDK, -1)
        state.ids_MDK[window_R] = torch.cat([ids_RK.unsqueeze(1), left_RDK[:, :-1]], dim=1)
        state.class_M[window_R] = class_R

    def value_E(self, layer: int) -> Tensor:
        """See the top of this file. A sum of chances, so it may be above 1."""
        state = self._layers[layer]
        if state is None:
            return torch.zeros(self.num_experts, dtype=torch.float64)
        if state.value_E is None:
            share_E = state.used_E / max(state.forwards, 1.0)
            uses_E, left = self._uses_E(state)
            ends_now, ends = self._block_ends(state.class_M, left)
            within_E = 1.0 - torch.exp(-uses_E)
            cold_E = state.cold_E / max(state.colds, 1.0)
            state.value_E = (1.0 - ends_now) * within_E + ends * cold_E + self.history * share_E
        return state.value_E

    def _block_ends(self, class_M: Tensor, left: float) -> tuple[float, float]:
        """Chance that the next forward begins a block, and what its demand counts now.

        The forward ends the block when it leaves no row live, of ``left`` expected ones; if commits go on at this rate,
        that takes ``live / (live - left)`` forwards.
        """
        live = int((class_M == RowClass.LIVE).sum())
        if not live:
            ends = 0.0 if bool((class_M == RowClass.OTHER).any()) else 1.0
            return ends, ends
        now = math.exp(-left)
        forwards = live / max(live - left, 1e-6)
        return now, max(now, self.discount ** (forwards - 1.0))

    def _uses_E(self, state: _Layer) -> tuple[Tensor, float]:
        """Expected pairs of each expert within the block, and how many rows will still be live after this forward.

        Pairs of the next forward count in full, those of a later refresh discounted.
        """
        class_M = state.class_M
        due_MC = torch.zeros(class_M.numel(), len(RowClass), dtype=torch.float64)
        commit_M = self._commits.chance(class_M.numel())
        live_M = class_M == RowClass.LIVE
        due_MC[:, RowClass.LIVE] = live_M * (1.0 - commit_M)
        due_MC[:, RowClass.NEW] = live_M * commit_M
        if state.to_refresh is not None:
            decoded_M = (class_M == RowClass.NEW) | (class_M == RowClass.STABLE)
            due_MC[:, RowClass.STABLE] = decoded_M * self.discount ** (state.to_refresh - 1)
        due_MC[:, RowClass.OTHER] = class_M == RowClass.OTHER
        chance_CDK = state.kept_CDK / state.tried_CDK
        chance_MDK = torch.einsum("mc,cdk->mdk", due_MC, chance_CDK)
        there = state.ids_MDK >= 0
        uses_E = torch.zeros(self.num_experts, dtype=torch.float64)
        uses_E.index_add_(0, state.ids_MDK[there], chance_MDK[there])
        # All branches of the rows that are due, less those that were just counted.
        branches_C = due_MC.sum(dim=0) * chance_CDK.shape[2]
        kept_C = torch.einsum("mc,mdk,cdk->c", due_MC, there.double(), chance_CDK)
        changed_C = (branches_C - kept_C).clamp_min(0.0)
        popular_CE = state.popular_CE / state.popular_CE.sum(dim=1, keepdim=True)
        return uses_E + changed_C @ popular_CE, float(due_MC[:, RowClass.LIVE].sum())

    def admit(self, layer: int, expert: int, victim: int | None) -> bool:
        """The more valuable of the two stays."""
        if victim is None:
            return True
        value_E = self.value_E(layer)
        return bool(value_E[expert] > value_E[victim])

    def reuse(self, layer: int, expert: int) -> float:
        """Forwards in a row that use the expert, if each does so with the chance of the next."""
        state = self._layers[layer]
        if state is None:
            return 0.0
        share = float(state.used_E[expert]) / max(state.forwards, 1.0)
        chance = float(self.value_E(layer)[expert]) - self.history * share
        return run_length(chance)

    def end_forward(self, confidence_T: Tensor | None = None, live_T: Tensor | None = None) -> None:
        """See `Observer.end_forward`. Without confidences live rows are committed at the rate seen so far."""
        seq_len, lead = self._geometry
        if confidence_T is None:
            self._commits.confidences(None)
            return
        confidence_T = confidence_T.detach().to("cpu", torch.float32).reshape(-1)
        if live_T is not None:
            # A committed row's confidence says nothing about its future.
            confidence_T = confidence_T.masked_fill(~live_T.cpu().reshape(-1), float("nan"))
        if seq_len is not None:
            confidence_T = confidence_T.view(-1, seq_len)[:, lead:].reshape(-1)
        self._commits.confidences(confidence_T)


class _CommitChance:
    """How likely a live row is to be committed after this forward, by the confidence that the last one gave it.

    Counted in `BINS` bins of confidence, and one for rows whose confidence is not known. The decoder's threshold need
    not be known: rows above it are never seen live again, and the bins below it show what happens there.
    """

    def __init__(self) -> None:
        self.committed = torch.full((BINS + 1,), PRIOR_ROWS * COMMITTED, dtype=torch.float64)
        self.seen = torch.full((BINS + 1,), PRIOR_ROWS, dtype=torch.float64)
        none = torch.empty(0, dtype=torch.int64)
        self._known = self._before = none  # bin of each row by its latest confidence, now and before the latest forward
        self._live = none.bool()  # rows that were live in the latest forward

    def observe(self, demand: Demand) -> None:
        """The first layer of a forward tells what became of the rows that were live in the one before."""
        there = demand.window_R >= 0
        window_R, class_R = demand.window_R[there], demand.class_R[there]
        if demand.cold:
            self._known, self._live = self._known[:0], self._live[:0]
        known = window_R < self._live.numel()
        seen_R, now_R = window_R[known], class_R[known]
        fate = self._live[seen_R] & ((now_R == RowClass.LIVE) | (now_R == RowClass.NEW))
        bins_R = _fit(self._before, self._live.numel())[seen_R[fate]]
        self.seen.index_add_(0, bins_R, torch.ones(bins_R.numel(), dtype=torch.float64))
        self.committed.index_add_(0, bins_R, (now_R[fate] == RowClass.NEW).double())
        self._live = torch.zeros(int(window_R.max()) + 1 if window_R.numel() else 0, dtype=torch.bool)
        self._live[window_R] = class_R == RowClass.LIVE
        self._before = self._known

    def confidences(self, confidence_M: Tensor | None) -> None:
        """What the forward that has just ended gave the rows of the window."""
        if confidence_M is None:
            self._known = self._known[:0]
            return
        bins_M = (confidence_M.nan_to_num(0.0) * BINS).long().clamp_(0, BINS - 1)
        self._known = bins_M.masked_fill(confidence_M.isnan(), BINS)

    def chance(self, rows: int) -> Tensor:
        """fp64 ``[rows]``, for each row of the window."""
        return (self.committed / self.seen)[_fit(self._known, rows)]


def _fit(bins: Tensor, rows: int) -> Tensor:
    """As many bins as rows; what is missing is not known."""
    return F.pad(bins[:rows], (0, max(rows - bins.numel(), 0)), value=BINS)
