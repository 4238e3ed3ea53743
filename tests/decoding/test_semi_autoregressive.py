"""The fixed-canvas loop against the plain reference loop, with and without plans, batches, guidance and bad input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import load_golden
from reference_canvas import decode_canvas
from torch import Tensor

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.decoding import generate_semi_autoregressive
from epoch_moe.decoding.sampling import add_gumbel_noise
from epoch_moe.models import load_model
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.plan.block_plan import BlockPlan

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
NAMES = ("llada_moe", "llada_moe_shared_bias")
MASK_ID = 125
UNUSED = 1  # an id that these models do not write here, so that no answer ends early
PROMPTS = ([5, 9, 2, 77, 31], [8, 1, 1, 40, 3, 99, 12, 7], [60])
SHAPES = ((16, 16, 16), (16, 4, 16), (16, 8, 4), (15, 5, 6), (12, 6, 24))  # gen_length, block_length, steps


def model_of(name: str = "llada_moe", config: EpochConfig | str | None = None) -> LLaDAMoEModelLM:
    model, _ = load_model(load_golden(name).folder)
    if config != "unpatched":
        epoch_moe.patch(model, config)
    return model


@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_reference_loops(name: str, cfg_scale: float) -> None:
    reference = model_of(name, "unpatched")
    models = [reference, model_of(name, None), model_of(name, EpochConfig.exact())]
    for gen_length, block_length, steps in SHAPES:
        options = {"gen_length": gen_length, "block_length": block_length, "steps": steps, "cfg_scale": cfg_scale}
        for prompt in PROMPTS:
            trace: list[list[int]] = []
            want = decode_canvas(reference, prompt, mask_id=MASK_ID, trace=trace, **options)  # type: ignore[arg-type]
            assert UNUSED not in want
            for model in models:
                out = generate_semi_autoregressive(model, [prompt], eos_token_id=UNUSED, **options)  # type: ignore[arg-type]
                assert out.sequences[0].tolist() == want
                assert out.forwards == len(trace)


@pytest.mark.parametrize("future_rows", ["fresh", "dormant"])
def test_a_batch_of_unequal_prompts_gives_what_each_gives_alone(future_rows: str) -> None:
    config = EpochConfig(refresh_interval=3, future_rows=future_rows)  # type: ignore[arg-type]
    model = model_of(config=config)
    options = {"gen_length": 16, "block_length": 8, "steps": 16, "eos_token_id": UNUSED}
    together = generate_semi_autoregressive(model, list(PROMPTS), **options)  # type: ignore[arg-type]
    padded = torch.full((3, 8), 124)
    mask = torch.zeros(3, 8)
    for row, prompt in enumerate(PROMPTS):
        padded[row, 8 - len(prompt) :], mask[row, 8 - len(prompt) :] = torch.tensor(prompt), 1
    as_tensor = generate_semi_autoregressive(model, padded, attention_mask=mask, **options)  # type: ignore[arg-type]
    assert torch.equal(together.sequences, as_tensor.sequences)
    for row, prompt in enumerate(PROMPTS):
        alone = generate_semi_autoregressive(model, [prompt], **options)  # type: ignore[arg-type]
        assert torch.equal(together.sequences[row], alone.sequences[0])


def fresh_rows(model: LLaDAMoEModelLM, config: EpochConfig, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The fresh canvas positions of every forward."""
    seen: list[list[int]] = []
    original = BlockPlan.complete

    def spy(self: BlockPlan, forward: object) -> None:
        seen.append(forward.rows.fresh_R.tolist())  # type: ignore[attr-defined]
        original(self, forward)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(BlockPlan, "complete", spy)
        generate_semi_autoregressive(
            model, [PROMPTS[0]], gen_length=12, block_length=4, steps=12, eos_token_id=UNUSED, plan=config
        )
    return seen


def test_which_rows_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(config=EpochConfig())
    config = EpochConfig(coverage=None, refresh_interval=None)
    everything = list(range(5 + 12))
    for future_rows in ("fresh", "dormant"):
        forwards = fresh_rows(model, config.replace(future_rows=future_rows), monkeypatch)
        assert len(forwards) == 12
        for number, fresh in enumerate(forwards):
            block, step = divmod(number, 4)
            if step == 0:  # a block's cold pass
                assert fresh == everything
                continue
            begin, end = 5 + 4 * block, 9 + 4 * block
            inside = [row for row in fresh if begin <= row < end]
            # Step s has 4 - s masks left, and the row that the step before it committed is new.
            assert len(inside) == 4 - step + 1
            behind = everything[end:] if future_rows == "fresh" else []
            assert [row for row in fresh if not begin <= row < end] == behind
    refreshed = fresh_rows(model, EpochConfig(coverage=None, refresh_interval=2), monkeypatch)
    assert [len(fresh) == 17 for fresh in refreshed] == [True, False] * 6


@pytest.mark.parametrize("cfg_scale", [0.0, 2.0])
@pytest.mark.parametrize("future_rows", ["fresh", "dormant"])
def test_entries_that_hold_nothing_are_never_read(
    future_rows: str, cfg_scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(config=EpochConfig())
    config = EpochConfig(refresh_interval=None, future_rows=future_rows)  # type: ignore[arg-type]
    options = {"gen_length": 12, "block_length": 4, "steps": 12, "eos_token_id": UNUSED, "cfg_scale": cfg_scale}
    clean = generate_semi_autoregressive(model, list(PROMPTS), plan=config, **options)  # type: ignore[arg-type]
    original = BlockPlan.complete

    def poison(self: BlockPlan, forward: object) -> None:
        original(self, forward)  # type: ignore[arg-type]
        assert self.stamps_M is not None
        for layer in self.layers:
            assert layer.cache_MH is not None
            layer.cache_MH[self.stamps_M < 0] = float("nan")

    monkeypatch.setattr(BlockPlan, "complete", poison)
    again = generate_semi_autoregressive(model, list(PROMPTS), plan=config, **options)  # type: ignore[arg-type]
    assert torch.equal(clean.sequences, again.sequences)


def test_less_work_under_a_plan() -> None:
    model = model_of(config=EpochConfig())
    options = {"gen_length": 16, "block_length": 4, "steps": 16, "eos_token_id": UNUSED}
    pairs = {}
    for name, plan in {
        "dense": None,
        "fresh": EpochConfig(),
        "dormant": EpochConfig(future_rows="dormant"),
        "exact": EpochConfig.exact(),
    }.items():
        out = generate_semi_autoregressive(model, [PROMPTS[1]], plan=plan, **options)  # type: ignore[arg-type]
        work = out.counters.read()
        pairs[name] = work.pairs
        rows = 16 * 4 if name == "dense" else 4 * (4 + 3 + 2 + 1)
        assert work.lm_head_rows == rows and work.forwards == 16
    assert pairs["dormant"] < pairs["fresh"] < pairs["exact"]
    # All that is not read of the last layer, and nothing else, is left out.
    layers, top_k = len(work.per_layer), model.config.num_experts_per_tok
    assert pairs["exact"] == pairs["dense"] // layers * (layers - 1) + work.lm_head_rows * top_k


def test_early_stop_ends_where_the_answer_does() -> None:
    """Any token that the model writes may be declared the end id."""
    model = model_of(config=EpochConfig.exact())
    options = {"gen_length": 16, "block_length": 4, "steps": 16}
    whole = [
        generate_semi_autoregressive(model, [p], eos_token_id=UNUSED, **options).sequences[0].tolist()  # type: ignore[arg-type]
        for p in PROMPTS
    ]
    end = whole[0][5]
    late = generate_semi_autoregressive(model, list(PROMPTS), eos_token_id=end, **options)  # type: ignore[arg-type]
    early = generate_semi_autoregressive(
        model, list(PROMPTS), eos_token_id=end, eos_early_stop=True, **options  # type: ignore[arg-type]
    )
    assert torch.equal(late.sequences, early.sequences) and late.lengths == early.lengths
    first = whole[0].index(end) + 1
    assert late.answers[0].tolist() == whole[0][:first] and late.finish_reasons[0] == "eos"
    assert late.forwards == 16
    alone = generate_semi_autoregressive(
        model, [PROMPTS[0]], eos_token_id=end, eos_early_stop=True, **options  # type: ignore[arg-type]
    )
    assert alone.forwards == 4 * -(-first // 4) < 16
    dense_rows, early_rows = late.counters.read().forward_rows, early.counters.read().forward_rows
    assert early_rows < dense_rows


def test_random_remasking_and_noise_follow_the_generator() -> None:
    model = model_of(config=EpochConfig.exact())

    def run(seed: int, **options: object) -> list[int]:
        out = generate_semi_autoregressive(
            model, [PROMPTS[0]], gen_length=16, block_length=8, steps=8, eos_token_id=UNUSED,
            generator=torch.Generator().manual_seed(seed), **options,  # type: ignore[arg-type]
        )
        return out.sequences[0].tolist()

    for options in ({"remasking": "random"}, {"temperature": 1.0}):
        assert run(0, **options) == run(0, **options)
        assert len({tuple(run(seed, **options)) for seed in range(4)}) > 1


def test_gumbel_noise_samples_the_softmax() -> None:
    logits_V = torch.tensor([1000.0, 999.0, 998.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.5, 1.0, 2.0):
        draws = add_gumbel_noise(logits_V.expand(20_000, -1), temperature, generator).argmax(-1)
        share = draws.bincount(minlength=4) / len(draws)
        # Noise is scaled by the temperature and the logits are not: softmax(logits / temperature).
        torch.testing.assert_close(share, (logits_V / temperature).softmax(-1), atol=0.015, rtol=0)
    assert torch.equal(add_gumbel_noise(logits_V, 0.0), logits_V)


class Streamer:
    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.pieces.append(value)

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def broken_model() -> Iterator[LLaDAMoEModelLM]:
    model = model_of(config=EpochConfig())

    def fail(*args: object) -> None:
        raise RuntimeError("no such luck")

    handle = model.model.norm.register_forward_hook(fail)
    yield model
    handle.remove()


def test_streamers_get_prompt_and_blocks_and_always_their_end(broken_model: LLaDAMoEModelLM) -> None:
    streamer, options = Streamer(), {"gen_length": 16, "block_length": 4, "steps": 16, "eos_token_id": UNUSED}
    out = generate_semi_autoregressive(model_of(), [PROMPTS[0]], streamer=streamer, **options)  # type: ignore[arg-type]
    assert streamer.pieces[0].tolist() == [PROMPTS[0]]
    assert torch.cat(streamer.pieces[1:]).tolist() == out.sequences[0].tolist()
    assert len(streamer.pieces) == 5 and streamer.ended == 1
    with pytest.raises(ValueError, match="input_ids holds 3"):
        generate_semi_autoregressive(model_of(), list(PROMPTS), streamer=streamer)
    streamer = Streamer()
    with pytest.raises(RuntimeError, match="no such luck"):
        generate_semi_autoregressive(broken_model, [PROMPTS[0]], streamer=streamer, **options)  # type: ignore[arg-type]
    assert streamer.ended == 1
    assert broken_model._epoch_moe.slot.active is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gen_length": 30}, "gen_length=30.*block_length=8"),
        ({"steps": 31}, "steps=31.*multiple of the number of blocks.*4"),
        ({"steps": 0}, "steps=0"),
        ({"block_length": 0}, "block_length=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"cfg_scale": float("nan")}, "cfg_scale=nan"),
        ({"remasking": "entropy"}, "remasking='entropy'"),
        ({"mask_token_id": 500}, "mask_token_id=500"),
        ({"eos_token_id": 125}, "other than the mask id"),
        ({"input_ids": [[5, 125]]}, "prompt 0 holds the mask id 125"),
        ({"input_ids": [[5, 300]]}, "prompt 0 holds id 300"),
        ({"input_ids": [[]]}, "prompt 0 is empty"),
        ({"gen_length": 512, "steps": 512}, "max_position_embeddings=512"),
    ],
)
def test_bad_input_is_refused_with_its_value(change: dict[str, object], message: str) -> None:
    arguments = {"input_ids": [PROMPTS[0]], "gen_length": 32, "block_length": 8, "steps": 32} | change
    with pytest.raises(ValueError, match=message):
        generate_semi_autoregressive(model_of(), **arguments)  # type: ignore[arg-type]


def test_block_causal_models_are_sent_to_their_own_loop() -> None:
    model, _ = load_model(load_golden("llada2").folder)
    with pytest.raises(ValueError, match=r"LLaDA2MoeModelLM decodes under a block-causal mask.*epoch_moe\.generate"):
        generate_semi_autoregressive(model, [PROMPTS[0]])


def test_the_other_loop_sends_canvas_models_here() -> None:
    with pytest.raises(ValueError, match=r"LLaDAMoEModelLM.*epoch_moe\.generate_semi_autoregressive"):
        epoch_moe.generate(model_of(), [PROMPTS[0]])


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="training mode"):
        generate_semi_autoregressive(model_of().train(), [PROMPTS[0]])
