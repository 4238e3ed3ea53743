"""What a forward of somebody else's loop is, told from its inputs: next iteration, next block, new request, or unknown.

`Tracker.observe` looks at token ids, attention mask, positions and cache of one forward, compares them with the forward
before, and says where the current block lies and which of its rows are live. It knows nothing of models. Whatever it
does not understand it calls dense, with a reason from `epoch_moe.follow.report.REASONS`.

Shape suffixes: B sequences, S rows of a forward, Q query rows of a mask (S or 1), K keys, N rows of a block.
"""

from __future__ import annotations

import weakref
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from epoch_moe.checks import MOST, flag, in_vocabulary, module, whole

Kind = Literal["request", "block", "iteration", "edit", "remask", "inputs", "repeat", "model", "dense"]


@dataclass(frozen=True)
class Hints:
    """What a user told about a loop, or (to `epoch_moe.patch`) about all.

    Attributes:
        mask_token_id: id of undecoded positions; None: the model's config says.
        block_length: positions of a block; None: the model's config says, or it is seen from the masks and from how
            the window grows.
        editing: the loop may replace decoded tokens. None: assumed until the loop shows that it does not. False: it
            does not, so another token is another request.
    """

    mask_token_id: int | None = None
    block_length: int | None = None
    editing: bool | None = None

    @classmethod
    def checked(cls, model: Any, mask_token_id: Any, block_length: Any, editing: Any) -> Hints:
        """What a user says of a loop, refused where the model has no such token, or no room for such a block."""
        config = getattr(module("model", model), "config", None)
        if mask_token_id is not None:
            in_vocabulary("mask_token_id", mask_token_id, getattr(config, "vocab_size", MOST))
        if block_length is not None:
            context = getattr(config, "max_position_embeddings", MOST)
            whole("block_length", block_length, "positions of a block, in the model's context", least=1, most=context)
        if editing is not None:
            flag("editing", editing)
        return cls(mask_token_id, block_length, editing)

    def or_else(self, other: Hints) -> Hints:
        """These, and where nothing was said ``other``."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Hints(*(b if a is None else a for a, b in pairs))


@dataclass(frozen=True)
class Seen:
    """One forward's inputs.

    Attributes:
        ids_BS: int64, on the CPU.
        mask: the attention mask, whatever it is.
        positions: position ids, or None.
        cache: the K/V cache object, or None.
        past: rows in it.
        additive: the model is known to read a 4-D mask as additive (or bool, True = attend).
        changed: the model is not what it was at the forward before.
    """

    ids_BS: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None
    cache: Any = None
    past: int = 0
    additive: bool = False
    changed: bool = False


@dataclass(frozen=True)
class Decision:
    """What to do with a forward.

    Attributes:
        kind: what it is. ``"inputs"``: the block goes on, but its attention mask or positions changed. ``"repeat"``:
            the ids are those of the forward before. ``"model"``: the block goes on with another model.
        reason: for ``"dense"``, a key of `epoch_moe.follow.report.REASONS`.
        cold: the block's plan begins anew with this forward.
        begin, end: the current block's rows. Those behind it are later blocks of a fixed canvas.
        constant: rows before it cannot change within the block.
        live_BS: bool, rows whose logits may change a decision, on the CPU.
    """

    kind: Kind
    reason: str = ""
    cold: bool = False
    begin: int = 0
    end: int = 0
    constant: bool = False
    live_BS: Tensor | None = None


class _Kept:
    """A tensor that later forwards are compared with, without reading it again where it is the same object."""

    def __init__(self, tensor: Tensor | None):
        self._tensor, self._version = tensor, None
        if tensor is None:
            return
        if tensor.is_inference():
            self._copy: Tensor | None = tensor.clone()  # such tensors do not say when they are written to
        else:
            self._copy, self._version = None, tensor._version

    def equals(self, other: Tensor | None) -> bool:
        """Whether ``other`` holds what the kept tensor held (a device sync where it is another object)."""
        if self._tensor is None or other is None:
            return self._tensor is None and other is None
        kept = self._copy
        if kept is None:
            if self._tensor._version != self._version:
                return False
            if other is self._tensor:
                return True
            kept = self._tensor
        same = kept.shape == other.shape and kept.dtype == other.dtype and kept.device == other.device
        return same and bool(torch.equal(kept, other))


@dataclass
class _Block:
    """The block that the last forward belonged to."""

    ids_BS: Tensor
    masked_BS: Tensor
    begin: int
    end: int
    origin: int  # where the blocks of a fixed canvas are counted from
    canvas: bool
    planned: bool  # False: nothing but ids is known, because the forward ran dense
    constant: bool
    given_BS: Tensor  # rows that were decoded when the block began
    fixed_BS: Tensor  # MASK rows that stay: the masked prompt of classifier-free guidance
    cache: Any
    past: int
    mask: _Kept
    positions: _Kept

    def same_cache(self, seen: Seen) -> bool:
        """Whether both forwards use the same cache object, or none."""
        if self.cache is None or seen.cache is None:
            return self.cache is None and seen.cache is None
        return self.cache() is seen.cache

    def given_changed(self, seen: Seen) -> bool:
        """Whether a row of the block's beginning holds another token: a prompt is not edited, so it is another one."""
        return bool(((seen.ids_BS != self.ids_BS) & self.given_BS).any())


class Tracker:
    """Follows the forwards of one scope.

    Args:
        mask_id: id of undecoded positions.
        hints: what the user said.
    """

    def __init__(self, mask_id: int, hints: Hints):
        self.mask_id, self.hints = mask_id, hints
        self.learned_length: int | None = None
        self.editing: bool | None = hints.editing
        self._block: _Block | None = None

    def drop(self) -> None:
        """Forget the current block: the next forward begins a request."""
        self._block = None

    def observe(self, seen: Seen) -> Decision:
        """Say what this forward is, and remember it."""
        before, self._block = self._block, None
        masked_BS = seen.ids_BS == self.mask_id
        if seen.ids_BS.numel() == 0:
            return Decision("dense", "arguments")
        relation = self._relation(before, seen)
        fixed_BS = self._fixed_rows(before if relation != "request" else None, masked_BS)
        masked_BS = masked_BS & ~fixed_BS
        if not masked_BS.any():
            return self._without_masks(before, relation, seen, masked_BS, fixed_BS)
        if relation == "copied":
            assert before is not None and seen.cache is not None
            cache = weakref.ref(seen.cache)
            self._block = replace(before, ids_BS=seen.ids_BS, masked_BS=masked_BS, planned=False, cache=cache)
            return Decision("dense", "cache_copy")
        if relation == "same":
            assert before is not None
            return self._same_shape(before, seen, masked_BS, fixed_BS)
        if relation == "grown":
            assert before is not None
            self._learn_from_leaving(before)
            if seen.cache is None:
                self.learned_length = seen.ids_BS.shape[1] - before.ids_BS.shape[1]
            return self._begin("block", before, seen, masked_BS, fixed_BS)
        return self._begin("request", None, seen, masked_BS, fixed_BS)

    def _relation(self, before: _Block | None, seen: Seen) -> Literal["same", "grown", "copied", "request"]:
        """How a forward's rows relate to those of the one before."""
        if before is None or before.ids_BS.shape[0] != seen.ids_BS.shape[0]:
            return "request"
        rows, last = seen.ids_BS.shape[1], before.ids_BS.shape[1]
        if not before.same_cache(seen):
            there = None not in (before.cache, seen.cache) and (seen.past, rows) == (before.past, last)
            kept = there and not ((seen.ids_BS != before.ids_BS) & (before.ids_BS != self.mask_id)).any()
            return "copied" if kept and not torch.equal(seen.ids_BS, before.ids_BS) else "request"
        if before.cache is not None:
            if seen.past != before.past:
                return "grown" if seen.past > before.past else "request"
            return "same" if rows == last else "request"
        if rows < last or not torch.equal(seen.ids_BS[:, : before.begin], before.ids_BS[:, : before.begin]):
            return "request"
        if rows == last:
            return "same"
        # A window that grew by a block of masks, behind rows that are what they were but for decoding and edits.
        grew = not before.canvas and bool((seen.ids_BS[:, last:] == self.mask_id).all())
        was_token_BS = before.ids_BS != self.mask_id
        now_BS = seen.ids_BS[:, :last]
        lost_BS = was_token_BS & (now_BS == self.mask_id if before.planned else now_BS != before.ids_BS)
        return "grown" if grew and not lost_BS.any() else "request"

    def _fixed_rows(self, before: _Block | None, masked_BS: Tensor) -> Tensor:
        """MASK rows that are not to be decoded: the prompt of the unconditional half under classifier-free guidance.

        Seen at a request's start only: there that half is nothing but MASK, and no sequence of its own begins so.
        """
        fixed_BS = torch.zeros_like(masked_BS)
        batch, rows = masked_BS.shape
        if before is not None:
            shared = min(rows, before.fixed_BS.shape[1])
            fixed_BS[:, :shared] = before.fixed_BS[:, :shared]
            return fixed_BS & masked_BS
        if batch % 2 == 0:
            first, second = slice(0, batch // 2), slice(batch // 2, batch)
            for prompted, unprompted in ((first, second), (second, first)):
                if masked_BS[unprompted].all() and not masked_BS[prompted].all(dim=1).any():
                    fixed_BS[unprompted] = ~masked_BS[prompted]
        return fixed_BS

    def _without_masks(
        self, before: _Block | None, relation: str, seen: Seen, masked_BS: Tensor, fixed_BS: Tensor
    ) -> Decision:
        if seen.cache is not None:
            return Decision("dense", "commit")
        if before is None or relation != "same":
            return Decision("dense", "no_mask")
        if not before.planned:
            self._block = replace(before, ids_BS=seen.ids_BS, masked_BS=masked_BS)  # how the window grows still tells
            return Decision("dense", "no_mask")
        if before.given_changed(seen):
            return Decision("dense", "no_mask")
        # A finished block again: a loop that edits, or asks once more before it moves on. Its logits may all be read.
        if self.hints.editing is None and self.editing is False:
            self.editing = None
        return self._go_on(before, seen, masked_BS, fixed_BS)

    def _same_shape(self, before: _Block, seen: Seen, masked_BS: Tensor, fixed_BS: Tensor) -> Decision:
        if (masked_BS & ~before.masked_BS).any():
            # Masked again, or another request that looks like this one: a cold pass is right for both.
            return self._begin("remask", before, seen, masked_BS, fixed_BS)
        if not before.planned or before.given_changed(seen):
            return self._begin("request", before, seen, masked_BS, fixed_BS)
        if before.canvas and not masked_BS[:, : before.end].any():
            self._learn_from_leaving(before)
            return self._begin("block", before, seen, masked_BS, fixed_BS)
        return self._go_on(before, seen, masked_BS, fixed_BS)

    def _go_on(self, before: _Block, seen: Seen, masked_BS: Tensor, fixed_BS: Tensor) -> Decision:
        """The same block again."""
        if not torch.equal(seen.ids_BS[:, before.end :], before.ids_BS[:, before.end :]):
            return Decision("dense", "future")
        if not (before.mask.equals(seen.mask) and before.positions.equals(seen.positions)):
            return self._begin("inputs", before, seen, masked_BS, fixed_BS)
        edited_BS = (seen.ids_BS != before.ids_BS) & ~before.masked_BS
        kind: Kind = "model" if seen.changed else "edit" if edited_BS.any() else "iteration"
        if torch.equal(seen.ids_BS, before.ids_BS):
            kind = "repeat"
        elif kind == "edit" and self._is_another_request(before, masked_BS, edited_BS):
            kind = "request"
        elif kind == "edit":
            self.editing = True
        self._block = replace(before, ids_BS=seen.ids_BS, masked_BS=masked_BS, fixed_BS=fixed_BS)
        return self._decision(kind, cold=kind not in ("edit", "iteration"))

    def _is_another_request(self, before: _Block, masked_BS: Tensor, edited_BS: Tensor) -> bool:
        """Whether tokens that were replaced tell of another request with this prompt, rather than of a loop that edits.

        A loop that edits decodes a position as well, while there is one, and replaces the lesser part of its tokens.
        """
        if self.editing is False:
            self.editing = self.hints.editing
            return True
        most_B = 2 * edited_BS.sum(1) >= (~before.masked_BS & ~before.given_BS).sum(1)
        stuck_B = masked_BS.any(1) & (masked_BS == before.masked_BS).all(1)
        return bool((edited_BS.any(1) & (most_B | stuck_B)).any())

    def _begin(
        self, kind: Kind, before: _Block | None, seen: Seen, masked_BS: Tensor, fixed_BS: Tensor
    ) -> Decision:
        """A plan that begins with this forward; dense where the block's place is not known."""
        place = self._place(kind, before, seen, masked_BS)
        begin, end, origin, canvas, constant, reason = place
        given_BS = ~masked_BS
        if before is not None and before.planned and kind in ("remask", "inputs"):
            given_BS = given_BS & before.given_BS
        cache = None
        if seen.cache is not None:
            cache = weakref.ref(seen.cache)
        planned = reason == ""
        self._block = _Block(
            seen.ids_BS, masked_BS, begin, end, origin, canvas, planned, constant, given_BS, fixed_BS, cache, seen.past,
            _Kept(seen.mask if planned else None), _Kept(seen.positions if planned else None),
        )  # fmt: skip
        return self._decision(kind, cold=True) if planned else Decision("dense", reason)

    def _decision(self, kind: Kind, *, cold: bool) -> Decision:
        block = self._block
        assert block is not None
        live_BS = block.masked_BS.clone()
        live_BS[:, block.end :] = False
        if self.editing is not False:
            inside_BS = torch.zeros_like(live_BS)
            inside_BS[:, block.begin : block.end] = True
            live_BS = live_BS | (inside_BS & ~block.given_BS)
        return Decision(kind, "", cold, block.begin, block.end, block.constant, live_BS)

    def _learn_from_leaving(self, before: _Block) -> None:
        """A loop that leaves a block which still had masks when it was last looked at reads no decoded row's logits."""
        left = before.masked_BS[:, before.begin : before.end].any()
        if before.planned and before.cache is None and self.editing is None and left:
            self.editing = False

    def _place(
        self, kind: Kind, before: _Block | None, seen: Seen, masked_BS: Tensor
    ) -> tuple[int, int, int, bool, bool, str]:
        """(begin, end, origin, canvas, constant, reason) of the block that a forward decodes."""
        rows = masked_BS.shape[1]
        told = self.hints.block_length
        if seen.cache is not None:
            if told is not None and rows > told and not masked_BS[:, : rows - told].any():
                return 0, 0, 0, False, False, "lead"
            return 0, rows, 0, False, False, ""
        columns = masked_BS.any(dim=0)
        first = int(columns.to(torch.uint8).argmax())
        visible_SS = _visible(seen, rows)
        begin, end, origin, canvas = 0, 0, 0, False
        shown = _block_in_mask(visible_SS, first)
        length = told or self.learned_length
        if shown is not None and (told is None or told == shown[1] - shown[0]):
            begin, end = shown
            origin, canvas = begin, end < rows
        elif length is None and visible_SS is not None:
            begin, end = 0, rows  # a mask that hides nothing: all rows are one block
        elif length is None:
            return 0, 0, 0, False, False, "block_length"
        elif kind == "block" and before is not None and not before.canvas:
            begin = max(rows - length, 0) if told is not None else before.ids_BS.shape[1]
            end = rows
        elif first >= rows - length and not (before is not None and before.canvas):
            begin, end = max(rows - length, 0), rows
        elif told is None:
            return 0, 0, 0, False, False, "block_length"
        else:
            canvas = True
            starts = masked_BS.to(torch.uint8).argmax(dim=1)[masked_BS.any(dim=1)]
            if before is not None and before.canvas and first >= before.origin:
                origin = before.origin
            elif bool((starts != first).any()):
                return 0, 0, 0, False, False, "ragged"
            else:
                origin = first
            begin = origin + (first - origin) // told * told
            end = min(begin + told, rows)
        constant = visible_SS is not None and _hides(visible_SS, begin)
        return begin, end, origin, canvas, constant, ""


def _visible(seen: Seen, rows: int) -> Tensor | None:
    """Bool ``[S,S]`` on the mask's device: which keys any sequence and head may see; None where that is not known."""
    mask = seen.mask
    if not seen.additive or mask is None or mask.dim() != 4 or mask.shape[3] != rows or mask.shape[2] not in (1, rows):
        return None
    if mask.dtype == torch.bool:
        visible = mask
    elif mask.is_floating_point():
        # Forbidden is what a softmax turns into exactly 0: -inf, or a dtype's lowest value. Anything else, the 1 of a
        # 0/1 mask above all, weakens attention but lets it through.
        visible = mask > torch.finfo(mask.dtype).min / 2
    else:
        return None
    # A row that may see nothing sees everything (or is NaN): it is not hidden from anything.
    visible = visible | ~visible.any(dim=-1, keepdim=True)
    return visible.flatten(0, 1).any(dim=0).expand(rows, rows)


def _block_in_mask(visible_SS: Tensor | None, first: int) -> tuple[int, int] | None:
    """Begin and end of the block that row ``first`` lies in, where a block-causal mask shows it (one device sync)."""
    if visible_SS is None:
        return None
    keys = torch.arange(visible_SS.shape[0], device=visible_SS.device)
    last = torch.where(visible_SS[first], keys, -1).amax()
    sees_last = visible_SS.index_select(1, last.clamp_min(0).view(1)).squeeze(1)
    begin, last_key = (int(value) for value in torch.stack([sees_last.to(torch.uint8).argmax(), last]).tolist())
    if (begin == 0 and last_key == visible_SS.shape[0] - 1) or not begin <= first <= last_key:
        return None
    return begin, last_key + 1


def _hides(visible_SS: Tensor, begin: int) -> bool:
    """Whether no row before ``begin`` sees a row from there on (one device sync)."""
    return begin == 0 or not bool(visible_SS[:begin, begin:].any())
