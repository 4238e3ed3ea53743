"""From sorted pairs to the dense shard: the kernels against plain torch, bit for bit, over poisoned memory.

Where no GPU is, kernels run in Triton's interpreter, whose bf16 is not the device's: fp32 and fp16 here.
"""

import pytest
import torch
from aot.combine_restore import aot_cases
from aot.compiler import compile_elsewhere

from epoch_moe.freshlane.restore import restore as torch_restore
from epoch_moe.kernels.combine_restore import combine, combine_restore, restore
from epoch_moe.kernels.combine_restore_reference import (
    combine_reference,
    combine_restore_reference,
    restore_reference,
)
from epoch_moe.plan.packed import ListedRows
from epoch_moe.plan.rules import RowPlaces
from epoch_moe.worklist import build_worklist
from epoch_moe.worklist import combine as torch_combine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


class Case:
    """A forward of `rows` rows: packed ones, reused ones and padding in random places, with poison wherever allowed."""

    def __init__(self, *, fresh, reused, padding, capacity, top_k, experts, hidden, dtype, seed=0, odd_entries=0):
        generator = torch.Generator().manual_seed(seed)
        rows, self.fresh = fresh + reused + padding, fresh
        places = torch.randperm(rows, generator=generator)
        entries = torch.randperm(rows + odd_entries, generator=generator)

        # Distinct experts per row; about a fifth of the slots are empty, and everything behind the fresh rows.
        ids_RK = torch.rand(capacity, experts, generator=generator).argsort(1)[:, :top_k]
        ids_RK[torch.rand(capacity, top_k, generator=generator) < 0.2] = -1
        ids_RK[fresh:] = -1
        self.worklist = build_worklist(ids_RK, experts)
        self.rank_RK = self.worklist.rank_RK.int()
        self.weights_RK = torch.rand(capacity, top_k, generator=generator)
        self.weights_RK[self.rank_RK < 0] = NAN
        self.pairs_PH = torch.randn(capacity * top_k, hidden, generator=generator).to(dtype)
        self.pairs_PH[int((self.rank_RK >= 0).sum()) :] = NAN

        self.source_T = torch.full((rows,), -1)
        packed = torch.randperm(fresh, generator=generator)
        self.source_T[places[:fresh]] = packed
        read = entries[fresh : fresh + reused]
        self.source_T[places[fresh : fresh + reused]] = -(read + 2)
        # Two of three fresh rows are kept. Ranks and entries of padding rows point out of every buffer.
        self.store_R = torch.full((capacity,), 2**40)
        self.store_R[:fresh] = torch.where(torch.arange(fresh) % 3 == 1, -1, entries[:fresh])
        self.cache_MH = torch.full((rows + odd_entries, hidden), NAN, dtype=dtype)
        self.cache_MH[read] = torch.randn(reused, hidden, generator=generator).to(dtype)
        self.out_TH = torch.full((rows, hidden), NAN, dtype=dtype)
        self.count = torch.tensor([fresh], dtype=torch.int32)

    def tensors(self):
        names = ("pairs_PH", "rank_RK", "weights_RK", "source_T", "store_R", "cache_MH", "out_TH")
        return [getattr(self, name).clone().to(DEVICE) for name in names]


def case(**changes):
    sizes = {"fresh": 7, "reused": 5, "padding": 3, "capacity": 16, "top_k": 3, "experts": 6, "hidden": 80}
    return Case(**{**sizes, "dtype": torch.float32, **changes})


CASES = {
    "usual": {},
    "full": {"fresh": 16, "reused": 0, "padding": 0},
    "no fresh row": {"fresh": 0, "capacity": 4},
    "no packed row at all": {"fresh": 0, "capacity": 0},
    "only padding": {"fresh": 0, "reused": 0, "capacity": 2},
    "no row": {"fresh": 0, "reused": 0, "padding": 0},
    "no reused row": {"reused": 0},
    "one expert per row": {"top_k": 1},
    "all experts": {"top_k": 6},
    "one expert": {"top_k": 1, "experts": 1},
    "prime": {"fresh": 11, "reused": 13, "padding": 2, "capacity": 17, "top_k": 5, "experts": 7, "hidden": 101},
    "as wide as torch keeps order": {"top_k": 8, "experts": 9, "hidden": 192},
    "one column": {"hidden": 1},
    "more columns than a tile": {"hidden": 1027},
    "capacity far larger": {"capacity": 64},
    "more entries than rows": {"odd_entries": 9},
}


# Halves take the paths of floats but for the rounding: where sums are long, tiles are cut, or nothing is summed.
IN_HALF = ("usual", "no fresh row", "prime", "as wide as torch keeps order", "more columns than a tile")
FORMS = pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        pytest.param(sizes, dtype, id=f"{name}-{dtype}")
        for name, sizes in CASES.items()
        for dtype in (torch.float32, torch.float16)
        if dtype == torch.float32 or name in IN_HALF
    ],
)


class InAnyOrder(ListedRows):
    """Packed rows that are all of the forward's, but not in their order."""

    @property
    def all_fresh(self):
        return False


def row_plan(this):
    """The same forward as the library's torch path is told of it."""
    fresh_T = torch.nonzero(this.source_T >= 0).flatten()
    reuse_dst = torch.nonzero(this.source_T <= -2).flatten()
    fresh_R = torch.empty_like(fresh_T)
    fresh_R[this.source_T[fresh_T]] = fresh_T
    store_src = torch.nonzero(this.store_R[: this.fresh] >= 0).flatten()
    none = fresh_R[:0]
    return InAnyOrder(
        places=RowPlaces(1, this.source_T.numel(), 0, none, this.source_T, none), fresh_R=fresh_R, restricted_R=none,
        joining_R=none, vote_R=none, group_R=none, entry_R=none, store_src=store_src, store_dst=this.store_R[store_src],
        reuse_src=-(this.source_T[reuse_dst] + 2), reuse_dst=reuse_dst, num_rows=this.source_T.numel(),
        num_restricted=0, num_voting=0,
    )  # fmt: skip


def same(a, b):
    """The same bits, NaN included."""
    torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)


@FORMS
def test_one_pass_is_the_reference_bit_for_bit(sizes, dtype):
    this = case(**sizes, dtype=dtype)
    got, expected = this.tensors(), this.tensors()
    before = got[5].clone()
    combine_restore(*got)
    combine_restore_reference(*expected)
    same(got[6], expected[6])
    same(got[5], expected[5])
    assert got[6].isfinite().all(), "poisoned memory was read"
    # The cache: exactly the stored entries, and every one of them.
    stored = torch.zeros(before.shape[0], dtype=torch.bool)
    stored[this.store_R[: this.fresh][this.store_R[: this.fresh] >= 0]] = True
    same(got[5][~stored], before[~stored])
    assert got[5][stored].isfinite().all()
    for name, tensor in zip(("pairs_PH", "rank_RK", "weights_RK", "source_T", "store_R"), got, strict=False):
        same(tensor, getattr(this, name))


@FORMS
def test_two_steps_are_one_pass_and_the_library_in_torch(sizes, dtype):
    this = case(**sizes, dtype=dtype)
    pairs, rank, weights, source, store, cache, out = this.tensors()
    y_RH = combine(pairs, rank, weights, this.count.to(DEVICE))
    same(y_RH, combine_reference(pairs, rank, weights, this.count.to(DEVICE)))
    assert not y_RH[this.fresh :].any(), "rows behind the count are zeros"
    # The library's torch path adds in the order of expert groups.
    library_RH = torch_combine(this.pairs_PH, this.weights_RK.nan_to_num(0.5), this.worklist, dtype)
    torch.testing.assert_close(y_RH.cpu(), library_RH, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5)

    poisoned = y_RH.clone()
    poisoned[this.fresh :] = NAN
    restore(poisoned, source, store, cache, out)
    expected = this.tensors()
    combine_restore(*expected)
    same(out, expected[6])
    same(cache, expected[5])
    other_cache, other_out = this.tensors()[5:]
    restore_reference(poisoned, source, store, other_cache, other_out)
    same(other_out, out)
    same(other_cache, cache)

    rows = row_plan(this)
    cache_MH = this.cache_MH.clone()
    same(out, torch_restore(y_RH[: this.fresh].cpu(), rows, cache_MH, torch.empty_like(this.out_TH)))
    same(cache, cache_MH)


def test_a_count_that_is_left_out_means_all_rows():
    this = case(fresh=16, reused=0, padding=0)
    pairs, rank, weights = this.tensors()[:3]
    same(combine(pairs, rank, weights), combine(pairs, rank, weights, this.count.to(DEVICE)))


def test_runs_are_bit_equal():
    this = case(**CASES["prime"], dtype=torch.float16)
    first, second = this.tensors(), this.tensors()
    combine_restore(*first)
    combine_restore(*second)
    same(first[5], second[5])
    same(first[6], second[6])


def test_nan_of_a_real_pair_stays():
    """Skipping is for empty slots only: what an expert really gave out is never hidden."""
    this = case(padding=0, hidden=8)
    row = int((this.rank_RK >= 0).any(1).nonzero()[0])
    position = int(this.rank_RK[row].max())
    this.pairs_PH[position, 3] = NAN
    got = this.tensors()
    combine_restore(*got)
    assert got[6].isnan().nonzero().tolist() == [[int((this.source_T == row).nonzero()), 3]]


def test_rows_may_lie_apart():
    this = case(hidden=24)
    expected = this.tensors()
    combine_restore(*expected)
    pairs, rank, weights, source, store, cache, out = this.tensors()
    wide = [torch.full((t.shape[0], 40), 7.0, device=DEVICE) for t in (pairs, cache, out)]
    for buffer, tensor in zip(wide, (pairs, cache, out), strict=True):
        buffer[:, :24] = tensor
    combine_restore(wide[0][:, :24], rank, weights, source, store, wide[1][:, :24], wide[2][:, :24])
    same(wide[2][:, :24], expected[6])
    same(wide[1][:, :24], expected[5])
    assert all(bool((buffer[:, 24:] == 7).all()) for buffer in wide)


@pytest.mark.parametrize("op", [combine, restore, combine_restore], ids=["combine", "restore", "combine_restore"])
def test_opcheck(op):
    """Schema, fake implementation and mutated arguments, as torch.library checks them."""
    this = case(hidden=16)
    this.cache_MH.nan_to_num_(0.25)
    this.pairs_PH.nan_to_num_(0.25)
    this.weights_RK.nan_to_num_(0.25)
    this.out_TH.zero_()
    pairs, rank, weights, source, store, cache, out = this.tensors()
    arguments = {
        combine: (pairs, rank, weights, this.count.to(DEVICE)),
        restore: (pairs[: rank.shape[0]].contiguous(), source, store, cache, out),
        combine_restore: (pairs, rank, weights, source, store, cache, out),
    }[op]
    torch.library.opcheck(op, arguments)
    mutated = {a.name for a in op._opoverload._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert mutated == (set() if op is combine else {"cache_MH", "out_TH"})


@pytest.mark.parametrize(
    ("position", "wrong", "words"),
    [
        (0, lambda t: t.double(), r"pairs_PH is torch.float64"),
        (0, lambda t: t.t(), r"pairs_PH|cache_MH"),
        (1, lambda t: t.long(), r"rank_RK is torch.int64 .*expected torch.int32 \[rows, K\]"),
        (2, lambda t: t.half(), r"weights_RK is torch.float16 .*expected torch.float32 \[16, 3\]"),
        (2, lambda t: t[:, :2], r"weights_RK is torch.float32 \(16, 2\)"),
        (3, lambda t: t[:-1], r"source_T is torch.int64 \(14,\) .*expected torch.int64 \[15\]"),
        (4, lambda t: t.int(), r"store_R is torch.int32"),
        (5, lambda t: t.half(), r"cache_MH is torch.float16 .*expected torch.float32 \[rows, 80\]"),
        (6, lambda t: t[:, :-1], r"out_TH is torch.float32 \(15, 79\)"),
        (6, lambda t: t.t().contiguous().t(), r"out_TH has strides \(1, 15\)"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(position, wrong, words):
    tensors = case().tensors()
    tensors[position] = wrong(tensors[position])
    before = [t.clone() for t in tensors]
    with pytest.raises(ValueError, match=words):
        combine_restore(*tensors)
    for tensor, was in zip(tensors, before, strict=True):
        same(tensor, was)


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_compiles_without_spills_and_with_16_byte_loads(arch):
    compiled = compile_elsewhere("combine_restore", arch, match="llada2-mini bfloat16 32 rows")
    assert [entry["name"].split("[")[0] for entry in compiled] == ["combine", "combine_restore", "restore"]
    for entry in compiled:
        assert entry["spill_bytes"] == 0 and entry["shared_bytes"] == 0, entry
        pairs = 1 if entry["name"].startswith("restore") else 8
        assert entry["wide_loads"] >= pairs, f"a row is not read 16 bytes at once: {entry}"


def test_bytes_that_must_be_moved_are_those_of_the_tensors():
    """The floor of one case, from the tensors of such a forward in place of the formula."""
    (this,) = (c for c in aot_cases() if c.name == "combine_restore[llada2-mini bfloat16 32 rows]")
    size, hidden, top_k = 2, 2048, 8
    read = 20 * top_k * hidden * size + 20 * top_k * (4 + 4) + 12 * hidden * size + 32 * 8 + 20 * 8
    written = 32 * hidden * size + 4 * hidden * size
    assert (this.bytes_moved, this.flops) == (read + written, 2 * 20 * 8 * 2048)
