"""Continuous batching over a LLaDA2 model, on the functional API: requests join and leave between forwards.

    python examples/engine_loop.py --model tiny-llada2 --requests 12 --slots 4 --max-batch 3

What a serving engine does, without its schedulers and kernels. Every forward holds rows of some of the running
requests; each is at its own iteration of its own block. Requests beyond --max-batch pause for a forward, and a slot
goes to the next request when one is done; still each request gets the tokens that it would get alone.

The model's attention, norms and head are used as they are. Its MoE layers are replaced by `PlannedMoE`, which calls
`epoch_moe.functional` on plain tensors.

Shape suffixes: B requests of a forward, S rows per request (committed rows, then the block; padded on the left),
N block length, T = B x S rows, K keys per slot, A attention heads, D head dimension, R fresh rows, H hidden.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from epoch_moe import EpochConfig, load_model
from epoch_moe.decoding import choose_rows, sample_tokens, transfer_schedule
from epoch_moe.decoding.output import AnswerLog
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.functional import (
    NO_SLOT,
    NO_STATE,
    FreshRows,
    RowKeys,
    RowStore,
    expert_views,
    fresh_rows,
    moe_forward,
    restore_rows,
    route_rows,
    router_logits,
    router_spec,
    supports,
)


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine."""

    number: int
    prompt: list[int]
    gen_length: int
    arrival: int = 0
    canvas: list[int] = field(default_factory=list)  # prompt, decoded tokens, masks; whole blocks
    committed: int = 0  # rows whose K/V are final
    begin: int = 0  # first row of the current block
    iteration: int = 0  # of the current block
    slot: int = NO_SLOT
    generation: int = 0
    tokens: list[int] = field(default_factory=list)
    forwards: int = 0


class SlotKV(Cache):  # type: ignore[misc]
    """Keys and values of all slots, ``[slots, A, K, D]`` per layer, with one more place that padding rows write to.

    The model sees the slots of a forward side by side; its attention mask says which keys belong to whom.
    """

    is_compileable = False

    def __init__(self, slots: int, length: int):
        super().__init__(layers=[])
        self.num_slots, self.length = slots, length
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.slot_B = self.place_BS = torch.empty(0, dtype=torch.long)

    def at(self, slot_B: Tensor, place_BS: Tensor) -> None:
        """The next forward's slots, and where in them each of its rows lies."""
        self.slot_B, self.place_BS = slot_B, place_BS

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """So many keys that the forward's own rows make it K in all."""
        return self.length - self.place_BS.shape[1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write ``[B,A,S,D]`` and return ``[B,A,K,D]``."""
        if layer_idx not in self.stored:
            _, heads, _, dim = key_states.shape
            shape = (self.num_slots, heads, self.length + 1, dim)
            self.stored[layer_idx] = (key_states.new_zeros(shape), value_states.new_zeros(shape))
        at = (self.slot_B[:, None], slice(None), self.place_BS)
        for stored, new in zip(self.stored[layer_idx], (key_states, value_states), strict=True):
            stored[at] = new.transpose(1, 2)
        keys, values = (stored[self.slot_B, :, :-1] for stored in self.stored[layer_idx])
        return keys, values


class PlannedMoE(nn.Module):
    """An MoE layer of the engine: gate, experts and shared expert of the model, rows as the plan says."""

    def __init__(self, block: nn.Module, engine: Engine, index: int):
        super().__init__()
        self.gate, self.shared_experts, self.experts = block.gate, block.shared_experts, block.experts
        stacked = ExpertWeights(block.experts).ensure()  # the model's parameters become views of one storage
        self.views = expert_views(stacked.gate_up_E2FH, stacked.down_EHF)
        self.engine, self.index = [engine], index  # in a list: the engine is no child of its own layer

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """``[B,S,H] -> [B,S,H]``."""
        engine = self.engine[0]
        store, fresh = engine.store, engine.fresh
        assert fresh is not None
        x_RH = fresh.pick(hidden_BSH.flatten(0, 1))
        logits_RE = router_logits(x_RH, self.gate.weight, store.router)
        routing = route_rows(store, self.index, fresh, logits_RE, self.gate.expert_bias)
        y_RH = moe_forward(x_RH, routing.ids_TK, routing.weights_TK, self.views)
        routed_TH = restore_rows(store, self.index, fresh, y_RH)
        return routed_TH.view_as(hidden_BSH) + self.shared_experts(hidden_BSH)


class Engine:
    """Decodes requests block by block; `step` is one forward for at most `max_batch` of those that run.

    Args:
        model: a LLaDA2 model in eval mode. Its MoE layers are replaced for good: load one for the engine.
        config: the plan.
        slots: requests that may run at one time.
        max_batch: requests in one forward.
        max_length: rows that a slot holds, prompt and answer in whole blocks.
        block_length, steps, threshold: as in `epoch_moe.generate`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EpochConfig,
        *,
        slots: int,
        max_batch: int,
        max_length: int,
        block_length: int = 32,
        steps: int = 32,
        threshold: float = 0.95,
    ):
        for given in (model.config, config):
            able, reason = supports(given)
            if not able:
                raise ValueError(f"the engine cannot serve this: {reason}")
        self.model, self.mask_id, self.eos_id = model, model.config.mask_token_id, model.config.eos_token_id
        self.block_length, self.max_batch, self.threshold = block_length, max_batch, threshold
        self.schedule = transfer_schedule(block_length, steps)
        moe_layers = [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self.store = RowStore(
            config,
            router_spec(model.config),
            num_layers=len(moe_layers),
            max_slots=slots,
            window=block_length,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            device=model.device,
        )
        for index, layer in enumerate(moe_layers):
            layer.mlp = PlannedMoE(layer.mlp, self, index)
        self.kv = SlotKV(slots, max_length)
        self.fresh: FreshRows | None = None
        self.free = list(range(slots))
        self.generations = [0] * slots
        self.running: deque[Request] = deque()
        self.forwards = 0

    def admit(self, request: Request) -> bool:
        """Give the request a slot; False where none is free."""
        if not self.free:
            return False
        block = self.block_length
        rows = -(-(len(request.prompt) + request.gen_length) // block) * block
        if rows > self.kv.length:
            raise ValueError(f"request {request.number} needs {rows} rows, a slot holds {self.kv.length}")
        request.slot = self.free.pop(0)
        self.generations[request.slot] += 1  # whatever the slot's last owner left there is of another generation
        request.generation = self.generations[request.slot]
        request.canvas = request.prompt + [self.mask_id] * (rows - len(request.prompt))
        request.begin = len(request.prompt) // block * block
        self.running.append(request)
        return True

    def cancel(self, request: Request) -> None:
        """Take a request out between two forwards, wherever it is."""
        self.running.remove(request)
        self.free.append(request.slot)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """One forward; returns the requests that it finished."""
        batch = [self.running[i] for i in range(min(self.max_batch, len(self.running)))]
        self.running.rotate(-len(batch))  # who pauses now comes first next time
        if not batch:
            return []
        hidden_BSH, live_BN = self.forward(batch)
        finished = []
        for request, hidden_NH, live_N in zip(batch, hidden_BSH[:, -self.block_length :], live_BN, strict=True):
            self.commit(request, hidden_NH, live_N)
            if self.close_block(request):
                finished.append(request)
                self.cancel(request)
        return finished

    def forward(self, batch: list[Request]) -> tuple[Tensor, Tensor]:
        """Hidden states ``[B,S,H]`` of the requests' rows, and which rows of their blocks are live ``[B,N]``."""
        block, device = self.block_length, self.store.device
        lead = max(request.begin - request.committed for request in batch)
        count, rows = len(batch), lead + block
        ids_BS = torch.full((count, rows), self.mask_id)
        place_BS = torch.full((count, rows), self.kv.length)  # padding rows: the place that nobody reads
        slot_B1 = torch.tensor([[request.slot] for request in batch])
        generation_B1 = torch.tensor([[request.generation] for request in batch])
        block_B1 = torch.tensor([[request.begin // block] for request in batch])
        for row, request in enumerate(batch):
            end = request.begin + block
            own = end - request.committed
            ids_BS[row, rows - own :] = torch.tensor(request.canvas[request.committed : end])
            place_BS[row, rows - own :] = torch.arange(request.committed, end)
        real_BS = place_BS < self.kv.length
        # Rows in front of the block write K/V for good: no state, always computed.
        position_S = (torch.arange(rows) - lead).clamp_min(NO_STATE)
        live_BS = (ids_BS == self.mask_id) & real_BS & (position_S >= 0)
        keys = RowKeys(
            slot_T=torch.where(real_BS, slot_B1, NO_SLOT).flatten().to(device),
            generation_T=generation_B1.expand(count, rows).flatten().to(device),
            block_T=block_B1.expand(count, rows).flatten().to(device),
            position_T=position_S.expand(count, rows).flatten().to(device),
        )
        self.fresh = fresh_rows(self.store, keys, ids_BS.flatten().to(device), live_BS.flatten().to(device))

        positions_BS = place_BS.masked_fill(~real_BS, 0)
        # A row sees its own block and those before it; what lies behind in the slot is old or empty.
        seen_BSK = torch.arange(self.kv.length) // block <= (positions_BS // block).unsqueeze(-1)
        self.kv.at(slot_B1.flatten().to(device), place_BS.to(device))
        hidden_BSH = self.model.model(
            input_ids=ids_BS.to(device),
            attention_mask=seen_BSK.unsqueeze(1).to(device),
            position_ids=positions_BS.to(device),
            past_key_values=self.kv,
            use_cache=True,
        ).last_hidden_state
        self.store.complete(self.fresh)
        self.forwards += 1
        for request in batch:
            request.committed = request.begin
        return hidden_BSH, live_BS[:, -block:].to(device)

    def commit(self, request: Request, hidden_NH: Tensor, live_N: Tensor) -> None:
        """Sample the live rows and keep the confident ones, as `epoch_moe.generate` does."""
        tokens_R, confidence_R = sample_tokens(self.model.lm_head(hidden_NH[live_N]).float())
        confidence_N = torch.ones(self.block_length, device=live_N.device)
        confidence_N[live_N] = confidence_R
        need = self.schedule[request.iteration]
        chosen_N = choose_rows(confidence_N[None], live_N[None], need, self.threshold)[0]
        tokens_N = torch.full_like(chosen_N, self.mask_id, dtype=torch.long)
        tokens_N[live_N] = tokens_R
        for row, (chosen, token) in enumerate(zip(chosen_N.tolist(), tokens_N.tolist(), strict=True)):
            if chosen:
                request.canvas[request.begin + row] = token
        request.iteration += 1
        request.forwards += 1

    def close_block(self, request: Request) -> bool:
        """Move on where the block is decoded; True where the answer is complete."""
        end = request.begin + self.block_length
        if self.mask_id in request.canvas[request.begin : end]:
            return False
        log = AnswerLog(1, request.gen_length, (self.eos_id,))
        log.add(0, request.canvas[len(request.prompt) : end])
        request.begin, request.iteration, request.tokens = end, 0, log.answers[0]
        return log.finished(0)


def serve(engine: Engine, requests: Iterable[Request]) -> Iterator[tuple[str, Request]]:
    """Run all requests, each from its arrival on; yields ``("joins", request)`` and ``("leaves", request)``."""
    waiting = deque(sorted(requests, key=lambda request: request.arrival))
    clock = 0
    while waiting or engine.running:
        while waiting and waiting[0].arrival <= clock and engine.admit(waiting[0]):
            yield "joins", waiting.popleft()
        for request in engine.step():
            yield "leaves", request
        clock += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-llada2", help="a name or folder that epoch_moe.load_model takes")
    parser.add_argument("--plan", default="default", choices=("default", "exact"), help="preset of the block plan")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--slots", type=int, default=4, help="requests that run at one time")
    parser.add_argument("--max-batch", type=int, default=3, help="requests in one forward; the others pause")
    parser.add_argument("--arrival-gap", type=int, default=3, help="forwards between two arrivals")
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    args = parser.parse_args()

    from epoch_moe.problems import check, generate_problems

    model, tokenizer = load_model(args.model)
    problems = generate_problems(args.requests, args.seed)
    config = EpochConfig.preset(args.plan)
    assert config is not None
    requests = [
        Request(number, tokenizer(problem.prompt)["input_ids"], args.gen_length, arrival=number * args.arrival_gap)
        for number, problem in enumerate(problems)
    ]
    block = 32
    longest = max(-(-(len(r.prompt) + r.gen_length) // block) * block for r in requests)
    engine = Engine(model, config, slots=args.slots, max_batch=args.max_batch, max_length=longest, block_length=block)
    right, began = 0, time.perf_counter()
    for event, request in serve(engine, requests):
        line = f"forward {engine.forwards:4d}  request {request.number:3d} {event} slot {request.slot}"
        if event == "leaves":
            text = tokenizer.decode(request.tokens, skip_special_tokens=True)
            solved = check(problems[request.number], text)
            right += solved
            line += f" after {request.forwards} forwards: {text} ({'right' if solved else 'wrong'})"
        print(line, flush=True)
    work, seconds = engine.store.counters.read(), time.perf_counter() - began
    alone = sum(request.forwards for request in requests)
    print(
        f"{right} of {len(requests)} right; {engine.forwards} forwards in place of {alone} one by one; "
        f"{work.rows} of {work.dense_rows} rows through the experts ({work.rows / work.dense_rows:.0%}); "
        f"{sum(len(r.tokens) for r in requests) / seconds:.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
