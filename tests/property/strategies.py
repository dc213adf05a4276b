"""How hypothesis draws programs and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from property import breaks
from property.breaks import Break
from property.ops import OPS
from property.programs import Instr, Program

BUCKETS = (1, 4, 5, 8, 16)  # 2 and 3 are sizes of other dimensions
_FAVOURED = (
    "add",
    "mul",
    "linear",
    "sum0",
    "slice",
    "add_",
    "part_",
    "half_",
    "addv",
    "widen",
)  # others are drawn as well
_CALM = tuple(name for name, op in OPS.items() if not op.mixes and not op.jumpy)
_number = st.integers(0, 5)
_picks = st.tuples(_number, _number, _number)


def _breaks(how: tuple[str, ...], body: tuple[str, ...], gives: tuple[str, ...]) -> st.SearchStrategy[Break]:
    said = {
        "how": st.sampled_from(how),
        "second": st.sampled_from(breaks.SECOND),
        "picks": _picks,
        "passed": st.sampled_from(breaks.CONTEXTS),
        "body": st.lists(st.sampled_from(body), max_size=3).map(tuple),
    }
    returning = st.builds(
        Break,
        gives=st.lists(st.sampled_from(gives), min_size=1, max_size=3).map(tuple),
        wrap=st.sampled_from(breaks.WRAPS),
        exact=st.booleans(),
        keywords=st.booleans(),
        closure=st.integers(0, 7).map(lambda i: i == 7),
        **said,
    )
    filling = st.builds(
        Break,
        exact=st.booleans(),
        into=st.sampled_from(("out", "here")),
        target=st.sampled_from(breaks.TARGETS),
        fills=st.booleans(),
        **said,
    )
    return st.integers(0, 2).flatmap(lambda i: filling if i == 2 else returning)


def _programs(ops: tuple[str, ...], some_break: st.SearchStrategy[Break]) -> st.SearchStrategy[Program]:
    instr = st.builds(Instr, st.sampled_from(ops), _picks)
    steps = st.lists(st.integers(0, 2).flatmap(lambda i: some_break if i == 2 else instr), max_size=12)
    return st.builds(
        lambda a, b, results: Program((*a, *b), results),
        steps,
        steps,
        st.lists(_number, min_size=1, max_size=3).map(tuple),
    )


programs = st.one_of(
    _programs((*_FAVOURED, *OPS), _breaks(breaks.HOW, breaks.BODY, breaks.GIVES)),
    # Whatever these do, plain eager on unpadded rows agrees.
    _programs(
        _CALM,
        _breaks(
            breaks.HOW[1:],
            tuple(b for b in breaks.BODY if b != "noise"),
            tuple(g for g in breaks.GIVES if g not in ("low", "ints")),
        ),
    ),
)


@dataclass(frozen=True)
class Call:
    """One replay: which bucket, how many rows are real, and what its values come from."""

    bucket: int
    valid: int
    seed: int


@dataclass(frozen=True)
class BareCase:
    """Bare captures, in this order, with replays after each. ``apart``, ``cut``: bits that put a bucket into a second pool, and
    that capture it without breaks, in several segments."""

    program: Program
    buckets: tuple[int, ...]
    at_capture: tuple[int, ...]
    calls: tuple[tuple[Call, ...], ...]  # after each capture
    apart: int = 0
    rows: bool = True
    weak: bool = True
    tail: str = "random"
    closes: bool = False
    cut: int = 0


@dataclass(frozen=True)
class RunnerCase:
    """Calls of a GraphRunner. ``explicit``: the rows of the example that the whole ladder is captured from, or None."""

    program: Program
    buckets: tuple[int, ...]
    lengths: tuple[int, ...]
    explicit: int | None = None
    capture_ctx: bool = True
    pad: float = 0.0
    outputs: str = "one"
    lease: bool = False
    takes_ctx: bool = False
    biased: int = 0  # bits: calls that give the optional input
    twins: bool = False  # two runners on one pool take turns
    recaptures: int = -1  # before this call


def _valid(bucket: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from((0, 1, bucket - 1, bucket)), st.integers(0, bucket))


@st.composite
def bare_cases(draw: st.DrawFn) -> BareCase:
    buckets = draw(st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=3, unique=True))
    at_capture = tuple(draw(st.one_of(st.just(b), _valid(b))) for b in buckets)
    calls = []
    for i in range(len(buckets)):
        here = draw(st.lists(st.sampled_from(buckets[: i + 1]).flatmap(_call), min_size=1, max_size=4))
        calls.append(tuple(here))
    return BareCase(
        draw(programs),
        tuple(buckets),
        at_capture,
        tuple(calls),
        draw(st.sampled_from((0, 0, 1, 2))),
        draw(st.sampled_from((True, True, False))),
        draw(st.booleans()),
        draw(st.sampled_from(("random", "zero", "nan"))),
        draw(st.booleans()),
        draw(st.sampled_from((7, 0, 1, 2))),
    )


def _call(bucket: int) -> st.SearchStrategy[Call]:
    return st.builds(Call, st.just(bucket), _valid(bucket), st.integers(0, 9))


@st.composite
def runner_cases(draw: st.DrawFn) -> RunnerCase:
    buckets = tuple(draw(st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=3, unique=True)))
    top = max(buckets)
    edges = sorted({0, 1, *buckets, *(b - 1 for b in buckets)})
    lengths = draw(st.lists(st.one_of(st.sampled_from(edges), st.integers(0, top)), min_size=2, max_size=9))
    return RunnerCase(
        draw(programs),
        buckets,
        tuple(lengths),
        draw(st.one_of(st.none(), st.integers(0, top))),
        draw(st.booleans()),
        draw(st.sampled_from((0.0, 1.0, float("nan")))),
        draw(st.sampled_from(("one", "dict", "tuple"))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from((0, 0, 5, 6, 511))),
        draw(st.booleans()),
        draw(st.integers(-1, 6)),
    )
