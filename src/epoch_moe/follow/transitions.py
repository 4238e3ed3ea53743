"""What a forward of somebody else's loop is, told from its inputs: next iteration, next block, new request, or unknown.

`Tracker.observe` looks at token ids, attention mask, positions and cache of one forward, compares them with the forward
before, and says where the current block lies and which of its rows are live. It knows nothing of models. Whatever it
does not understand it calls dense, with a reason from `epoch_moe.follow.report.REASONS`.

Shape suffixes: B sequences, S rows of a forward, Q query rows of a mask (S or 1), K keys, N rows of a block.
"""

from __future__ import annotations

import weakref
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal, NamedTuple

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
        cache: weak reference to the K/V cache object, or None.
        past: rows in it.
        additive: the model is known to read a 4-D mask as additive (or bool, True = attend).
        changed: the model is not what it was at the forward before.
    """

    ids_BS: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None
    cache: weakref.ref[Any] | None = None
    past: int = 0
    additive: bool = False
    changed: bool = False


@dataclass(frozen=True)
class Taken:
    """What a forward is taken for, and so what is done with it.

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
        versioned = tensor is not None and not tensor.is_inference()
        # Tensors of inference mode do not say when they are written to.
        self._tensor = tensor if versioned or tensor is None else tensor.clone()
        self._version = tensor._version if versioned and tensor is not None else None

    def equals(self, other: Tensor | None) -> bool:
        """Whether ``other`` holds what the kept tensor held (a device sync where it is another object)."""
        kept = self._tensor
        if kept is None or other is None:
            return kept is other
        if self._version is not None and kept._version != self._version:
            return False
        like = kept.shape == other.shape and kept.dtype == other.dtype and kept.device == other.device
        return kept is other or (like and bool(torch.equal(kept, other)))


class _Place(NamedTuple):
    """Where a block lies: its rows, and from where the blocks of a fixed canvas are counted."""

    begin: int = 0
    end: int = 0
    origin: int = 0
    canvas: bool = False
    constant: bool = False


@dataclass(frozen=True)
class _Forward:
    """A forward, its rows to be decoded, and MASK rows that stay: the masked prompt of classifier-free guidance."""

    seen: Seen
    masked_BS: Tensor
    fixed_BS: Tensor


@dataclass(frozen=True)
class _Block:
    """The block that the last forward belonged to.

    Attributes:
        last: that forward.
        place: of the block.
        planned: False: nothing but ``last`` is known, because the forward ran dense.
        given_BS: rows that were decoded when the block began.
        mask, positions: that it began with.
    """

    last: _Forward
    place: _Place
    planned: bool
    given_BS: Tensor
    mask: _Kept
    positions: _Kept

    def given_changed(self, seen: Seen) -> bool:
        """Whether a row of the block's beginning holds another token: a prompt is not edited, so it is another one."""
        return bool(((seen.ids_BS != self.last.seen.ids_BS) & self.given_BS).any())


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

    def observe(self, seen: Seen) -> Taken:
        """Say what this forward is, and remember it."""
        before, self._block = self._block, None
        if seen.ids_BS.numel() == 0:
            return Taken("dense", "arguments")
        relation = self._relation(before, seen)
        before = None if relation == "request" else before
        masked_BS = seen.ids_BS == self.mask_id
        fixed_BS = _fixed_rows(before, masked_BS)
        now = _Forward(seen, masked_BS & ~fixed_BS, fixed_BS)
        if not now.masked_BS.any():
            return self._without_masks(before if relation == "same" else None, now)
        if before is None:
            return self._begin("request", None, now)
        if relation == "copied":
            self._block = replace(before, last=now, planned=False)
            return Taken("dense", "cache_copy")
        if relation == "grown":
            self._learn_from_leaving(before)
            if seen.cache is None:
                self.learned_length = seen.ids_BS.shape[1] - before.last.seen.ids_BS.shape[1]
            return self._begin("block", before, now)
        if (now.masked_BS & ~before.last.masked_BS).any():
            # Masked again, or another request that looks like this one: a cold pass is right for both.
            return self._begin("remask", before, now)
        if not before.planned or before.given_changed(seen):
            return self._begin("request", before, now)
        if before.place.canvas and not now.masked_BS[:, : before.place.end].any():
            self._learn_from_leaving(before)
            return self._begin("block", before, now)
        return self._go_on(before, now)

    def _relation(self, before: _Block | None, seen: Seen) -> Literal["same", "grown", "copied", "request"]:
        """How a forward's rows relate to those of the one before."""
        if before is None or before.last.seen.ids_BS.shape[0] != seen.ids_BS.shape[0]:
            return "request"
        last, ids_BS = before.last.seen, seen.ids_BS
        rows, width = ids_BS.shape[1], last.ids_BS.shape[1]
        was_token_BS = last.ids_BS != self.mask_id
        if last.cache is not seen.cache:  # one object has one weak reference
            alike = None not in (last.cache, seen.cache) and (seen.past, rows) == (last.past, width)
            changed_BS = ids_BS != last.ids_BS if alike else None
            decoded = changed_BS is not None and changed_BS.any() and not (changed_BS & was_token_BS).any()
            return "copied" if decoded else "request"
        if seen.past > last.past:
            return "grown"
        begin = before.place.begin
        if seen.past < last.past or rows < width or not torch.equal(ids_BS[:, :begin], last.ids_BS[:, :begin]):
            return "request"
        if rows == width:
            return "same"
        # A window that grew by a block of masks, behind rows that are what they were but for decoding and edits.
        grew = seen.cache is None and not before.place.canvas and (ids_BS[:, width:] == self.mask_id).all()
        now_BS = ids_BS[:, :width]
        lost_BS = was_token_BS & (now_BS == self.mask_id if before.planned else now_BS != last.ids_BS)
        return "grown" if grew and not lost_BS.any() else "request"

    def _without_masks(self, before: _Block | None, now: _Forward) -> Taken:
        """A forward without undecoded rows, of the shape of the one before; None: of another one."""
        if now.seen.cache is not None:
            return Taken("dense", "commit")
        if before is not None and not before.planned:
            self._block = replace(before, last=now)  # how the window grows still tells
        if before is None or not before.planned or before.given_changed(now.seen):
            return Taken("dense", "no_mask")
        # A finished block again: a loop that edits, or asks once more before it moves on. Its logits may all be read.
        if self.hints.editing is None and self.editing is False:
            self.editing = None
        return self._go_on(before, now)

    def _go_on(self, before: _Block, now: _Forward) -> Taken:
        """The same block again."""
        seen, last = now.seen, before.last
        if not torch.equal(seen.ids_BS[:, before.place.end :], last.seen.ids_BS[:, before.place.end :]):
            return Taken("dense", "future")
        if not (before.mask.equals(seen.mask) and before.positions.equals(seen.positions)):
            return self._begin("inputs", before, now)
        edited_BS = (seen.ids_BS != last.seen.ids_BS) & ~last.masked_BS
        kind: Kind = "model" if seen.changed else "edit" if edited_BS.any() else "iteration"
        if torch.equal(seen.ids_BS, last.seen.ids_BS):
            kind = "repeat"
        elif kind == "edit" and self._is_another_request(before, now.masked_BS, edited_BS):
            kind = "request"
            if self.editing is False:
                self.editing = self.hints.editing
        elif kind == "edit":
            self.editing = True
        self._block = replace(before, last=now)
        return self._planned(self._block, kind, cold=kind not in ("edit", "iteration"))

    def _is_another_request(self, before: _Block, masked_BS: Tensor, edited_BS: Tensor) -> bool:
        """Whether tokens that were replaced tell of another request with this prompt, rather than of a loop that edits.

        A loop that edits decodes a position as well, while there is one, and replaces the lesser part of its tokens.
        """
        was_masked_BS = before.last.masked_BS
        most_B = 2 * edited_BS.sum(1) >= (~was_masked_BS & ~before.given_BS).sum(1)
        stuck_B = masked_BS.any(1) & (masked_BS == was_masked_BS).all(1)
        return self.editing is False or bool((edited_BS.any(1) & (most_B | stuck_B)).any())

    def _begin(self, kind: Kind, before: _Block | None, now: _Forward) -> Taken:
        """A plan that begins with this forward; dense where the block's place is not known."""
        place, reason = self._place(kind, before, now)
        given_BS = ~now.masked_BS
        if before is not None and before.planned and kind in ("remask", "inputs"):
            given_BS = given_BS & before.given_BS
        mask, positions = (None, None) if reason else (now.seen.mask, now.seen.positions)
        self._block = _Block(now, place, not reason, given_BS, _Kept(mask), _Kept(positions))
        return Taken("dense", reason) if reason else self._planned(self._block, kind, cold=True)

    def _planned(self, block: _Block, kind: Kind, *, cold: bool) -> Taken:
        """A forward of this block, planned: undecoded rows are live, and decoded ones where they may change."""
        live_BS, (begin, end, *_) = block.last.masked_BS.clone(), block.place
        live_BS[:, end:] = False
        if self.editing is not False:
            live_BS[:, begin:end] |= ~block.given_BS[:, begin:end]
        return Taken(kind, "", cold, begin, end, block.place.constant, live_BS)

    def _learn_from_leaving(self, before: _Block) -> None:
        """A loop that leaves a block which still had masks when it was last looked at reads no decoded row's logits."""
        left = before.last.masked_BS[:, before.place.begin : before.place.end].any()
        if before.planned and before.last.seen.cache is None and self.editing is None and left:
            self.editing = False

    def _place(self, kind: Kind, before: _Block | None, now: _Forward) -> tuple[_Place, str]:
        """Where the block that a forward decodes lies; or a reason why that is not known."""
        masked_BS, told = now.masked_BS, self.hints.block_length
        rows = masked_BS.shape[1]
        if now.seen.cache is not None:
            lead = told is not None and rows > told and not masked_BS[:, : rows - told].any()
            return (_Place(), "lead") if lead else (_Place(0, rows), "")
        first = int(masked_BS.any(dim=0).to(torch.uint8).argmax())
        visible_SS = _visible(now.seen, rows)
        shown, length = _block_in_mask(visible_SS, first), told or self.learned_length
        canvas = before.place if before is not None and before.place.canvas else None
        if shown is not None and told in (None, shown[1] - shown[0]):
            place = _Place(*shown, origin=shown[0], canvas=shown[1] < rows)
        elif length is None and visible_SS is not None:
            place = _Place(0, rows)  # a mask that hides nothing: all rows are one block
        elif length is not None and canvas is None and (kind == "block" or first >= rows - length):
            place = _Place(max(rows - length, 0), rows)
        elif told is None:
            return _Place(), "block_length"
        else:
            origin = first if canvas is None else min(canvas.origin, first)
            starts = masked_BS.to(torch.uint8).argmax(dim=1)[masked_BS.any(dim=1)]
            if (canvas is None or first < canvas.origin) and (starts != first).any():
                return _Place(), "ragged"
            begin = origin + (first - origin) // told * told
            place = _Place(begin, min(begin + told, rows), origin, canvas=True)
        return place._replace(constant=visible_SS is not None and _hides(visible_SS, place.begin)), ""


def _fixed_rows(before: _Block | None, masked_BS: Tensor) -> Tensor:
    """MASK rows that are not to be decoded: the prompt of the unconditional half under classifier-free guidance.

    Seen at a request's start only: there that half is nothing but MASK, and no sequence of its own begins so.
    """
    fixed_BS = torch.zeros_like(masked_BS)
    batch, rows = masked_BS.shape
    if before is not None:
        shared = min(rows, before.last.fixed_BS.shape[1])
        fixed_BS[:, :shared] = before.last.fixed_BS[:, :shared]
    elif batch % 2 == 0:
        halves = slice(0, batch // 2), slice(batch // 2, batch)
        for prompted, unprompted in (halves, halves[::-1]):
            if masked_BS[unprompted].all() and not masked_BS[prompted].all(dim=1).any():
                fixed_BS[unprompted] = ~masked_BS[prompted]
    return fixed_BS & masked_BS


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
