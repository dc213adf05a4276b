"""The strategy *full*: one graph for a whole forward, break points inside it, for calls whose metadata are inputs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sized
from itertools import islice
from typing import Any

from torch import Tensor, nn

from segue import _torch
from segue.capture.context_paths import DEEPEST, MOST, Path, children, getter, is_plain, show
from segue.capture.places import Places
from segue.capture.thread_state import current_forward_ctx
from segue.errors import CaptureError, UsageError
from segue.runner import options
from segue.runner.calls import Call
from segue.runner.ladder import Ladder
from segue.runner.reasons import Reason
from segue.runner.strategy import CapturedForward, CapturedProgram, Declined, Job, Takes, captured


class Full:
    """Captures a whole forward as one graph. Break points are recorded like everything else, so a replay runs no Python of them.

    It is for steps that look alike but for their numbers, as decode steps do. All that changes from call to call must be in
    declared inputs, whose buffers the runner refreshes in place: page tables, lengths, slots. Padded requests have what their
    inputs are padded with, such as a length of 0, and their break points must neither read nor write anything of others then.
    Break points get and give all rows, padded ones too, whatever they ask to be trimmed.

    A call is left to the strategies after this one, counted in ``stats.declined``, if its live context differs from that of the
    capture: in plain values whose names stand in the code of the break points, or in the memory of tensors that the graph uses.

    Args:
        takes: whether this strategy serves a call, from its arguments, keyword arguments and context. It is asked at every call.
        buckets: padded numbers of requests, or of tokens where the runner has no request axis. All requests of a call must have
            equally many tokens.

    Raises:
        UsageError: ``takes`` is no function, or ``buckets`` is no ladder.
    """

    name, whole, breaks_inside = "full", True, True

    def __init__(self, takes: Takes, buckets: Ladder | Iterable[int]) -> None:
        if not callable(takes):
            raise UsageError(f"Full: takes={takes!r} must be a function of a call's args, kwargs and ctx")
        self._takes, self.ladder = takes, options.ladder("Full: buckets", buckets)

    def takes(self, call: Call) -> bool:
        """Whether the call's requests are equally long, fit a bucket, and the user wants it served so."""
        count = call.tokens if call.requests < 0 else call.requests
        if not 0 < count <= self.ladder.max or call.tokens % count:
            return False
        args, kwargs = call.given
        return bool(self._takes(args, kwargs, call.ctx if call.ctx is not None else current_forward_ctx()))

    def capture(self, job: Job) -> CapturedForward:
        """Run the forward once for real while recording it, breaks and all.

        Raises:
            CaptureError: a graph can't hold what it does. Where that is in a break point, its name and line are said.
        """
        return self.record(job)

    def record(self, job: Job, own: Any = None) -> CapturedForward:
        """Do what :meth:`capture` does. ``own``: what holds tensors that only the caller uses, by default the inputs."""
        capture = captured(job, name=f"{job.name}, full", breaks_inside=True, **({} if own is None else {"own": own}))
        return _FullProgram(CapturedProgram(capture), _Frozen(job.ctx, job.root, [e.tensor for e in capture.externals]))


class _FullProgram:
    breaks = 0

    def __init__(self, program: CapturedProgram, frozen: _Frozen) -> None:
        self._replay, self._check, self._frozen = program.replay, program.check, frozen
        self.graphs, self.uses, self.writes = program.graphs, program.uses, program.writes
        self.close, self.changed = program.close, program.changed

    def check(self) -> None:
        self._frozen.check(current_forward_ctx())
        self._check()

    def replay(self, valid_rows: int | None = None) -> None:
        self._frozen.check(current_forward_ctx())
        self._replay(valid_rows)


class _Frozen:
    """What a full graph has taken from the context of its capture: plain values and lengths that its code may read, and tensors
    that it uses.

    Raises:
        CaptureError: the context holds more than is looked at.
    """

    def __init__(self, ctx: Any, places: Places, used: Iterable[Tensor]) -> None:
        memory, said = {_torch.storage_key(t) for t in used}, places.names | places.live_names
        self._plain: list[tuple[Path, Callable[[Any], Any], Any]] = []
        self._tensors: list[tuple[Path, Callable[[Any], Any], Any]] = []
        self._lengths: list[tuple[Path, Callable[[Any], Any], int]] = []
        for path, value in _held(ctx, said):
            if isinstance(value, Tensor):
                if _torch.storage_key(value) in memory:
                    self._tensors.append((path, getter(path), _layout(value)))
            elif is_plain(value):
                self._plain.append((path, getter(path), value))
            elif isinstance(value, Sized):
                self._lengths.append((path, getter(path), len(value)))

    def check(self, ctx: Any) -> None:
        """Raise Declined if the graph would do something else than the break points would do with ``ctx``."""
        for path, get, then in self._plain:
            now = _read(get, ctx)
            if now is not then and (type(now) is not type(then) or now != then):
                raise _has_changed(path)
        for path, get, then in self._lengths:
            now = _read(get, ctx)
            if not isinstance(now, Sized) or len(now) != then:
                raise _has_changed(path)
        for path, get, then in self._tensors:
            now = _read(get, ctx)
            if not isinstance(now, Tensor) or _layout(now) != then:
                raise _has_changed(path)


def _has_changed(path: Path) -> Declined:
    why = f"{show(path)} is not what it was at the capture"
    return Declined(Reason(why, "Make it an input, which is refreshed in place"))


def _held(ctx: Any, said: Container[str]) -> Iterator[tuple[Path, Any]]:
    """What code that says the names ``said`` may read of a context, near first, with the paths. Each object is entered once,
    and modules aren't: what they hold, the capture watches by itself.
    """
    level: list[tuple[Path, Any]] = [((), ctx)]
    entered: dict[int, Any] = {}
    for _ in range(DEEPEST):
        yield from level
        inner = [(p, v) for p, v in level if not is_plain(v) and not isinstance(v, Tensor | nn.Module) and id(v) not in entered]
        entered.update((id(v), v) for _, v in inner)
        steps = (((*path, step), child) for path, value in inner for step, child in children(value))
        level = list(islice((each for each in steps if each[0][-1][0] == "item" or each[0][-1][1] in said), MOST))
        if not level:
            return
        if len(level) == MOST:
            break
    raise CaptureError(
        f"the live context holds more than {MOST} values or {DEEPEST} levels, as at {show(level[0][0])}. A full graph goes on "
        "with what its break points read of them at the capture. Give them less, and make inputs of what changes."
    )


def _read(get: Callable[[Any], Any], ctx: Any) -> Any:
    try:
        return get(ctx)
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.shape, t.stride()
