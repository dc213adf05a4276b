"""The calls that a check tries: several lengths, other values, other padding, optional inputs given and left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.check.oplog import FLOATS
from segue.runner.bucket_recorder import example_rows
from segue.runner.calls import Binder, Call
from segue.runner.inputs import Leaf

AS_GIVEN = "as given"  # the variant of the example itself
_MOST_VARIANTS = 4


@dataclass(frozen=True)
class TrialCall:
    """One call in one bucket.

    ``variant``: which optional inputs it gives, in words. ``requests``: the request bucket, None without a request axis.
    ``values``: 0 if the call has the example's values, 1 if it has others; also the seed of the generators.
    """

    variant: str
    call: Call
    bucket: int
    requests: int | None
    values: int

    @property
    def tokens(self) -> int:
        """How many tokens the call has; the rest of the bucket is padding."""
        return self.call.tokens

    @property
    def label(self) -> str:
        """The call in words: ``bucket 16, 5 tokens``."""
        variant = "" if self.variant == AS_GIVEN else f", {self.variant}"
        return f"bucket {self.bucket}, {self.tokens} tokens{variant}"


def chosen_buckets(ladder: Sequence[int], tokens: int) -> list[int]:
    """The buckets to try, ascending: the smallest above 1, the largest, and the one that ``tokens`` tokens need."""
    own = next((b for b in ladder if b >= tokens), ladder[-1])
    small = next((b for b in ladder if b > 1), ladder[0])
    return sorted({small, own, ladder[-1]})


def lengths_of(bucket: int) -> list[int]:
    """The token counts to try in a bucket, long before short: all rows real, one of them padded, half of them padded."""
    return list(dict.fromkeys(n for n in (bucket, bucket - 1, (bucket + 1) // 2) if n > 0))


def variants(base: Call, binder: Binder) -> tuple[dict[str, Call], list[str]]:
    """The example as it is and with each optional input added or left out, by name; and what can't be tried, with reasons."""
    found, not_tried = {AS_GIVEN: base}, []
    for i, leaf in enumerate(binder.leaves):
        if not leaf.optional:
            continue
        tensors = list(base.tensors)
        if tensors[i] is not None:
            tensors[i], name = None, f"without {leaf.name}"
            if not any(t is not None and other.token for t, other in zip(tensors, binder.leaves, strict=True)):
                continue  # then the call has no token count
        else:
            name, made = f"with {leaf.name}", _made_up(leaf, base)
            if made is None:
                not_tried.append(
                    f"{name} was not tried: its shape isn't known. Give an example with it, or shape= and dtype="
                )
                continue
            tensors[i] = made
        if len(found) < _MOST_VARIANTS:
            found[name] = binder.with_tensors(base, tensors)
    return found, not_tried


def resized(call: Call, binder: Binder, tokens: int) -> Call:
    """The call with ``tokens`` tokens: its rows are cut or repeated."""
    return call if tokens == call.tokens else example_rows(call, binder, tokens)


def other_values(call: Call, binder: Binder) -> Call:
    """The call with other numbers in its floating-point inputs. Integers and masks have a meaning, so they stay."""
    tensors = [
        t if t is None or not _is_free(leaf, t) else t.mul(0.75).add_(0.125)
        for leaf, t in zip(binder.leaves, call.tensors, strict=True)
    ]
    return binder.with_tensors(call, tensors)


def perturb_tails(tensors: Sequence[Tensor | None], trial: TrialCall, binder: Binder) -> None:
    """Overwrite the padded rows of floating-point inputs in place: with finite values of both signs, larger than any real one.

    Integer inputs keep their padding, because another index could be out of range. Masks keep theirs, because it has a
    meaning.

    Args:
        tensors: one for each declared input, at the bucket's shape.
    """
    for leaf, t in zip(binder.leaves, tensors, strict=True):
        spec = leaf.spec
        if t is None or spec is None or spec.dim is None:
            continue
        real = (trial.tokens if leaf.token else trial.call.requests) + leaf.extra
        rows = t.shape[spec.dim]
        head = t.narrow(spec.dim, 0, real)
        if real < rows and head.numel() and _is_free(leaf, head):
            tail = t.narrow(spec.dim, real, rows - real)
            top = 4 * head.abs().nan_to_num(0.0, 0.0, 0.0).max().float() + 4
            ramp = torch.linspace(1, 2, tail.numel(), device=t.device).mul_(top)
            ramp[1::2].neg_()
            tail.copy_(ramp.view(tail.shape))


def _is_free(leaf: Leaf, t: Tensor) -> bool:
    """Whether an input's numbers may be replaced: they are floating-point numbers, and not a column of mask values."""
    if t.dtype not in FLOATS:
        return False
    dim = leaf.declared.dim
    if dim is None or not t.numel() or t.numel() != t.shape[dim]:
        return True
    lowest = torch.finfo(t.dtype).min
    is_mask = ((t == 0) | (t == 1)).all() | ((t == 0) | (t <= lowest)).all()
    return not bool(is_mask)


def _made_up(leaf: Leaf, base: Call) -> Tensor | None:
    """A tensor for an optional input that the example lacks; None where its shape isn't known."""
    spec = leaf.spec
    if spec is None:
        return None
    rows = (base.tokens if leaf.token else base.requests) + leaf.extra
    sizes = spec.sizes(rows)
    with torch.inference_mode(False):
        if not spec.dtype.is_floating_point:
            pad = leaf.declared.pad
            fill = 0 if pad is None or isinstance(pad, str) or pad < 0 else pad
            return torch.full(sizes, fill, dtype=spec.dtype, device=spec.device)
        count = torch.Size(sizes).numel()
        return torch.linspace(-1, 1, max(1, count), device=spec.device)[:count].view(sizes).to(spec.dtype)
