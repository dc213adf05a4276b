"""What a forward returned: which tensors have one row a token, and the caller's own copy of the real rows."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterator
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from segue.capture import weak_ref_tensor
from segue.capture.nested import Tree, take_apart
from segue.capture.wrappers import refuse_wrapper, with_collectives_done
from segue.devices import Pool
from segue.errors import CaptureError, ReplayError, UsageError, no_copy

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
_NUMBERS = (bool, int, float, complex)
_MOST_VIEWS = 1024
_HOLE: Any = object()  # where a tensor goes


class Lease:
    """A zero-copy output. ``value`` is a view of graph memory, and raises once another replay may have written it."""

    __slots__ = ("_at", "_gone", "_pool", "_value")

    def __init__(self, value: Any, pool: Pool | None, gone: Callable[[], bool] | None = None) -> None:
        self._value, self._pool, self._gone = value, pool, gone  # `gone` keeps the graph alive, and with it the memory
        self._at = None if pool is None else pool.replays

    @property
    def value(self) -> Any:
        """The output, real rows only.

        Raises:
            ReplayError: the pool has replayed or captured since, or the graph is gone.
        """
        if self._pool is not None and self._pool.replays != self._at:
            raise ReplayError(
                "this lease has ended: its pool has replayed or captured since, and the memory may hold other numbers. "
                'Read lease.value (or clone it) before the next call, or use outputs="copy"'
            )
        if self._gone is not None and self._gone():
            raise ReplayError(
                "this lease has ended: its graph was dropped by close(), recapture() or the memory budget, and the memory "
                'is gone. Read lease.value (or clone it) before that, or use outputs="copy"'
            )
        return self._value

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy would go on when the memory has been written again."""
        raise no_copy("a lease", 'Copy lease.value, which is a tensor, or use outputs="copy".')


class Outputs:
    """The declared token and request dimensions of a forward's results, and what its buckets have shown of them.

    A whole number applies to every tensor that has the bucket's size there; a structure says it of each exactly.
    """

    def __init__(self, token_dim: Any, request_dim: Any, label: str) -> None:
        self._token_dim, self._request_dim, self._label = token_dim, request_dim, label
        self._seen: dict[Any, tuple[int, Any, dict[str, Any]]] = {}

    def undecided(self, variant: Any, tokens: int, requests: int) -> bool:
        """Whether sizes decide which outputs are token-shaped, and no other bucket has shown yet which sizes follow the
        bucket.
        """
        other = self._seen.get((variant, requests), (tokens,))[0] != tokens
        return isinstance(self._token_dim, int) and tokens > 1 and not other

    def layout(
        self, raw: Any, variant: Any, tokens: int, requests: int, constants: Container[Tensor] = ()
    ) -> Layout:
        """Take apart what the forward returned at a bucket's shape. ``constants``: tensors whose shape no call changes.

        Raises:
            UsageError: the declared structure doesn't fit, or an output can't be told to be token-shaped or not.
            CaptureError: an output is neither a plain value nor a tensor with memory of its own.
        """
        where = f"{self._label}, bucket {tokens}"
        try:
            tree = take_apart(raw, self._token_dim)
            request_dims = [dim for _, _, dim in take_apart(raw, self._request_dim).leaves]
        except ValueError as e:
            raise UsageError(f"{where}: output_token_dim doesn't fit what the forward returned: {e}") from None
        loose = self._token_dim is None or isinstance(self._token_dim, int)
        parts: list[Part] = []
        for (path, value, dim), request_dim in zip(tree.leaves, request_dims, strict=True):
            value = with_collectives_done(value, lambda t: True)
            if not isinstance(value, Tensor):
                _check_plain(path, value, where, tokens if loose and self._token_dim is not None else None)
                parts.append((path, value, None, True))
                continue
            refuse_wrapper(value, f"{where}: {path}")
            if request_dim is not None:
                parts.append((path, value, _exact(path, value, request_dim, requests, "request", where), False))
            else:
                parts.append((path, value, _token_shaped(path, value, dim, tokens, loose, where), True))
        if self.undecided(variant, tokens, requests):
            for path, value, dim, of_tokens in parts:
                if isinstance(value, Tensor) and of_tokens:
                    _check_chance(path, value, dim, tokens, self._token_dim, dim is not None and value in constants, where)
        self._compare(parts, variant, tokens, requests, where)
        return Layout(tree, parts, where)

    def check_rows(self, layout: Layout, raw: Any, variant: Any, tokens: int, requests: int, rows: int) -> None:
        """Compare a bucket's layout with what the forward returned for ``rows`` rows instead: that shows which sizes follow them.

        Raises:
            UsageError: an output has the bucket's size by chance, or a size or number that follows it without equalling it.
        """
        try:
            self._compare_rows(layout, raw, tokens, rows)
        except UsageError:
            self._seen.pop((variant, requests))  # so that the next bucket is run at other rows too
            raise

    def _compare_rows(self, layout: Layout, raw: Any, tokens: int, rows: int) -> None:
        where = f"{self._label}, bucket {tokens}"
        other = {path: value for path, value, _ in take_apart(raw).leaves}
        for path, value in layout.plain:
            now = other.get(path)
            if isinstance(value, _NUMBERS) and isinstance(now, _NUMBERS) and now != value:
                raise _plain_follows(path, (value, tokens), (now, rows), where)
        for path, shape, dim in layout.of_tokens():
            found = other.get(path)
            if not isinstance(found, Tensor) or found.dim() != len(shape):
                continue
            there = tuple(found.shape)
            for d, (a, b) in enumerate(zip(shape, there, strict=True)):
                if d == dim and a == b:
                    raise UsageError(
                        f"{where}: {path} is ambiguous: its shape {list(shape)} has the bucket's size along dimension {d} by "
                        f"chance, for with {rows} rows it is {list(there)}, so cutting it to the real rows would be wrong. Give "
                        f"output_token_dim as a structure, with None for {path}"
                    )
                if b != (rows if d == dim else a):
                    raise _follows(path, d, (a, tokens), (b, rows), where)

    def _compare(self, parts: list[Any], variant: Any, tokens: int, requests: int, where: str) -> None:
        """Compare two buckets. That shows a size that equals the bucket by chance, or one that follows it without equalling
        it.
        """
        now = {path: (tuple(v.shape), dim) if isinstance(v, Tensor) else v for path, v, dim, _ in parts}
        before = self._seen.setdefault((variant, requests), (tokens, None, now))
        if before[0] == tokens:
            return
        for path, value, _, _ in parts:
            then = before[2].get(path)
            if isinstance(value, Tensor) and isinstance(then, tuple):
                _compare_shapes(path, now[path], then, tokens, before[0], where)
            elif not isinstance(value, Tensor) and path in before[2] and then != value:
                raise _plain_follows(path, (value, tokens), (then, before[0]), where)


Part = tuple[str, Any, int | None, bool]  # path, value, growing dimension, whether it grows with tokens
Signature = tuple[Any, tuple[Any, ...], tuple[Any, ...]]


class Layout:
    """One result of a forward, taken apart. :meth:`give` copies the caller's rows out of it.

    ``tensors``: those of the result, at the bucket's shape. ``plain``: its other values, with their paths.
    """

    def __init__(self, tree: Tree, parts: list[Part], where: str) -> None:
        self._where = where
        self.tensors = [value for _, value, _, _ in parts if isinstance(value, Tensor)]
        self._parts = [(path, dim, of_tokens) for path, value, dim, of_tokens in parts if isinstance(value, Tensor)]
        self.plain = [(path, value) for path, value, _, _ in parts if not isinstance(value, Tensor)]
        self._outline, self._put_together = tree.outline, tree.build
        self._single = tree.outline is True
        self._items = [_HOLE if isinstance(value, Tensor) else value for _, value, _, _ in parts]
        self._cut: dict[tuple[int, int], list[Tensor]] = {}

    def weaken(self, pool: Pool) -> None:
        """Let go of the outputs that lie in the pool. Later captures use their blocks too, and replays take turns."""
        with torch.inference_mode(False):
            self.tensors = [weak_ref_tensor(t) if pool.owns(t) else t.detach() for t in self.tensors]
        self._cut.clear()

    def give(self, tokens: int, requests: int) -> Any:
        """Copies of the real rows, in the structure of the forward's result. ``requests``: -1 without a request axis."""
        views = self._cut.get((tokens, requests))
        if views is None:
            views = self._narrow(tokens, requests)
        if self._single:
            return views[0].clone()
        return self._build([v.clone() for v in views])

    def lend(self, tokens: int, requests: int) -> Any:
        """Views of the real rows, in the structure of the forward's result. They hold until the pool replays again."""
        views = self._cut.get((tokens, requests))
        if views is None:
            views = self._narrow(tokens, requests)
        return views[0] if self._single else self._build(views)

    def kept(self) -> Layout:
        """Replace the tensors by copies, which outlive the memory that the forward used, and return this layout."""
        self.tensors = [t.clone() for t in self.tensors]
        self._cut.clear()
        return self

    def of_tokens(self) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
        """Path, shape and token dimension of each tensor that has no request dimension."""
        for (path, dim, of_tokens), t in zip(self._parts, self.tensors, strict=True):
            if of_tokens:
                yield path, tuple(t.shape), dim

    def signature(self) -> Signature:
        """Structure, plain values, shapes and dtypes: what a warm-up and its capture must have in common."""
        shapes = tuple(
            (path, t.dtype, tuple(t.shape)) for (path, _, _), t in zip(self._parts, self.tensors, strict=True)
        )
        return self._outline, tuple(self.plain), shapes

    def check_same(self, warmed: Signature) -> None:
        """Check that the warm-up returned the same structure, shapes and plain values.

        Raises:
            CaptureError: it returned others, so Python decided something that the graph would freeze.
        """
        now = self.signature()
        for what, a, b in zip(("structure", "plain values", "tensors"), warmed, now, strict=True):
            if a != b:
                if what != "structure":
                    a, b = next((x, y) for x, y in zip(a, b, strict=True) if x != y)
                raise CaptureError(
                    f"{self._where}: the forward's output changed between the warm-up and the capture ({what}: {a}, "
                    f"then {b}). A graph "
                    "freezes what Python decides: return it as a tensor, or keep it out of the forward"
                )

    def difference(self, other: Layout, tokens: int, requests: int) -> str:
        """Say where the real rows differ from those of ``other`` bit for bit; NaN equals NaN. The text is empty if nowhere."""
        mine, theirs = self._narrow(tokens, requests), other._narrow(tokens, requests)
        for (path, _, _), a, b in zip(self._parts, mine, theirs, strict=True):
            if not torch.equal(a, b):
                wrong = (a != b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a != b
                if count := int(wrong.sum()):
                    worst = (a.double() - b.double()).abs().nan_to_num(float("inf")).max().item()
                    return f"{path} differs in {count} of {a.numel()} elements, by at most {worst:.3g}"
        return ""

    def _build(self, tensors: list[Tensor]) -> Any:
        values = iter(tensors)
        return self._put_together(iter([next(values) if item is _HOLE else item for item in self._items]))

    def _narrow(self, tokens: int, requests: int) -> list[Tensor]:
        if len(self._cut) >= _MOST_VIEWS:
            self._cut.clear()
        views = []
        with torch.inference_mode(False):
            for t, (_, dim, of_tokens) in zip(self.tensors, self._parts, strict=True):
                rows = tokens if of_tokens else requests
                views.append(t if dim is None or t.shape[dim] == rows else t.narrow(dim, 0, rows))
        self._cut[tokens, requests] = views
        return views


def owned(raw: Any) -> Any:
    """Copies of all tensors in what an eager forward returned."""
    if isinstance(raw, Tensor):
        return raw.clone()
    tree = take_apart(raw)
    return tree.build(iter([v.clone() if isinstance(v, Tensor) else v for _, v, _ in tree.leaves]))


def _token_shaped(path: str, t: Tensor, dim: int | None, tokens: int, loose: bool, where: str) -> int | None:
    if dim is None:
        return None
    if not loose:
        return _exact(path, t, dim, tokens, "token", where)
    if not -t.dim() <= dim < t.dim():
        return None
    return dim % t.dim() if t.shape[dim] == tokens else None


def _exact(path: str, t: Tensor, dim: int, rows: int, what: str, where: str) -> int:
    if not -t.dim() <= dim < t.dim() or t.shape[dim] != rows:
        raise UsageError(
            f"{where}: {path} is declared to have its {what}s along dimension {dim}, and has shape {list(t.shape)}, "
            f"where the bucket has {rows}. Declare None for an output without {what} rows"
        )
    return dim % t.dim()


def _check_plain(path: str, value: Any, where: str, tokens: int | None) -> None:
    if value is not None and not isinstance(value, _PLAIN):
        raise CaptureError(
            f"{where}: {path} is a {type(value).__qualname__}, neither a tensor nor a plain value, so a replay can't "
            "make it anew. "
            "Return tensors, plain values and containers of them; let breaks keep other objects in the live context"
        )
    if tokens is not None and type(value) is int and value == tokens:
        raise UsageError(
            f"{where}: {path} is the int {value}, ambiguous: the padded size, or a constant? A replay returns it "
            "frozen. "
            "Leave it out, return it as a tensor, or give output_token_dim as a structure with None for it"
        )


def _check_chance(path: str, t: Tensor, dim: int | None, tokens: int, declared: int, constant: bool, where: str) -> None:
    if constant:
        raise UsageError(
            f"{where}: {path} is ambiguous: its shape {list(t.shape)} has the bucket's size along dimension {dim}, and comes "
            "from tensors alone whose shape no call changes, so cutting it to the real rows would be wrong. Give "
            f"output_token_dim as a structure, with None for {path}"
        )
    if dim is None and tokens in t.shape:
        at = list(t.shape).index(tokens)
        raise UsageError(
            f"{where}: {path} is ambiguous: of its shape {list(t.shape)} dimension {at} has the bucket's size, and dimension "
            f"{declared}, where output_token_dim={declared} says tokens are, has not: tokens, or chance? Give "
            f"output_token_dim as a structure, with {at} or None for {path}"
        )


def _compare_shapes(path: str, now: Any, then: Any, tokens: int, before: int, where: str) -> None:
    (shape, dim), (old_shape, old_dim) = now, then
    if dim != old_dim:
        odd, other = (tokens, before) if dim is not None else (before, tokens)
        raise UsageError(
            f"{where}: {path} is ambiguous: it has the bucket's size in bucket {odd} and not in bucket {other} "
            f"({list(shape)} against "
            f"{list(old_shape)}), so whether its rows are tokens can't be told. Give output_token_dim as a structure, "
            f"None for {path}"
        )
    if len(shape) != len(old_shape):
        return
    for d, (a, b) in enumerate(zip(shape, old_shape, strict=True)):
        if d != dim and a != b and (a - b == tokens - before or a * before == b * tokens):
            raise _follows(path, d, (a, tokens), (b, before), where)


def _plain_follows(path: str, one: tuple[Any, int], other: tuple[Any, int], where: str) -> UsageError:
    """``one``, ``other``: a plain output, and the rows that the forward had then."""
    return UsageError(
        f"{where}: {path} is the plain value {one[0]!r}, and in bucket {other[1]} it was {other[0]!r}: it follows the padded "
        "size, not the call. Return it as a tensor, or leave it to the caller"
    )


def _follows(path: str, dim: int, one: tuple[int, int], other: tuple[int, int], where: str) -> UsageError:
    """``one``, ``other``: a size of the output's, and the rows that it had then."""
    sizes = ", ".join(f"{size} in bucket {rows}" for size, rows in sorted((one, other), key=lambda seen: seen[1]))
    return UsageError(
        f"{where}: dimension {dim} of {path} follows the bucket ({sizes}) and isn't its token dimension, so a replay would "
        "return padded rows. Name it in output_token_dim, or cut it in a break; with None for it in output_token_dim it comes "
        "back whole"
    )
