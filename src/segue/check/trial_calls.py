"""The calls that a check tries: lengths, other values, other padding, optional inputs there and not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.check.oplog import FLOATS
from segue.runner.bucket_recorder import example_rows
from segue.runner.calls import Binder, Call
from segue.runner.inputs import Leaf

_MOST_BUCKETS = 3
_MOST_VARIANTS = 4


@dataclass(frozen=True)
class Case:
    """One call in one bucket. ``values``: 0 for the example's, 1 for others."""

    variant: str
    call: Call
    bucket: int
    requests: int | None
    values: int

    @property
    def tokens(self) -> int:
        return self.call.tokens

    @property
    def label(self) -> str:
        """For texts: ``bucket 16, 5 tokens``."""
        variant = "" if self.variant == AS_GIVEN else f", {self.variant}"
        return f"bucket {self.bucket}, {self.tokens} tokens{variant}"


AS_GIVEN = "as given"


def chosen_buckets(ladder: Sequence[int], tokens: int) -> list[int]:
    """The smallest bucket, the largest, and the one that ``tokens`` need: at most three, ascending."""
    own = next((b for b in ladder if b >= tokens), ladder[-1])
    small = next((b for b in ladder if b > 1), ladder[0])
    return sorted({small, own, ladder[-1]})[-_MOST_BUCKETS:]


def lengths_of(bucket: int) -> list[int]:
    """Long, then short: all rows real, one padded, half of them."""
    return list(dict.fromkeys(n for n in (bucket, bucket - 1, (bucket + 1) // 2) if n > 0))


def variants(base: Call, binder: Binder) -> tuple[dict[str, Call], list[str]]:
    """The example as it is and with each optional input toggled, and the toggles that can't be tried, with reasons."""
    found, left = {AS_GIVEN: base}, []
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
                left.append(
                    f"{name} was not tried: its shape isn't known. Give an example with it, or shape= and dtype="
                )
                continue
            tensors[i] = made
        if len(found) < _MOST_VARIANTS:
            found[name] = with_tensors(base, tensors, binder)
    return found, left


def resized(call: Call, binder: Binder, tokens: int) -> Call:
    """The call with ``tokens`` rows: its own cut, or repeated."""
    return call if tokens == call.tokens else example_rows(call, binder, tokens)


def other_values(call: Call, binder: Binder) -> Call:
    """The call with other numbers in its floating-point inputs. Integers and masks mean something, and stay."""
    tensors = [
        t if t is None or not _free(leaf, t) else t.mul(0.75).add_(0.125)
        for leaf, t in zip(binder.leaves, call.tensors, strict=True)
    ]
    return with_tensors(call, tensors, binder)


def with_tensors(call: Call, tensors: list[Tensor | None], binder: Binder) -> Call:
    """A call like ``call`` with other tensors, under its own key."""
    key = () if binder._plain_key else binder._key(call.values, tensors, call.ctx)
    return Call(call.values, call.ctx, tensors, key, call.tokens, call.requests, call.foreign)


def perturb_tails(tensors: Sequence[Tensor | None], case: Case, binder: Binder) -> None:
    """Overwrite the padded rows of floating-point inputs with values larger than any real one: finite, of both signs.

    Integer inputs keep their padding: an index may be out of range otherwise. So do masks, whose padding has a meaning.
    """
    for leaf, t in zip(binder.leaves, tensors, strict=True):
        spec = leaf.spec
        if t is None or spec is None or spec.dim is None:
            continue
        real = (case.tokens if leaf.token else case.call.requests) + leaf.extra
        rows = t.shape[spec.dim]
        head = t.narrow(spec.dim, 0, real)
        if real < rows and head.numel() and _free(leaf, head):
            tail = t.narrow(spec.dim, real, rows - real)
            top = 4 * head.abs().nan_to_num(0.0, 0.0, 0.0).max().float() + 4
            ramp = torch.linspace(1, 2, tail.numel(), device=t.device).mul_(top)
            ramp[1::2].neg_()
            tail.copy_(ramp.view(tail.shape))


def _free(leaf: Leaf, t: Tensor) -> bool:
    """Whether an input's numbers may be replaced: floating point, and not a column of mask values."""
    if t.dtype not in FLOATS:
        return False
    dim = leaf.declared.dim
    if dim is None or not t.numel() or t.numel() != t.shape[dim]:
        return True
    lowest = torch.finfo(t.dtype).min
    is_mask = ((t == 0) | (t == 1)).all() | ((t == 0) | (t <= lowest)).all()
    return not bool(is_mask)


def _made_up(leaf: Leaf, base: Call) -> Tensor | None:
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
        return (
            torch.linspace(-1, 1, max(1, _count(sizes)), device=spec.device)[: _count(sizes)].view(sizes).to(spec.dtype)
        )


def _count(sizes: Sequence[int]) -> int:
    return int(torch.Size(sizes).numel())
