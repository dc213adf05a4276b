"""Random forwards as data: instructions over typed registers, resolved once, run by one interpreter in every mode.

An instruction names its operands by number, taken modulo the registers of the type it wants, so that any numbers mean
something and hypothesis can shrink them. What a register holds is known beforehand, by type: ``rows`` [R, 3]
float32, ``half`` [R, 2], ``cols`` [3, R], ``low`` [R, 3] bfloat16, ``ints`` [R, 3] int64, ``wide`` an expanded [R, 3]
that is read only, ``vec`` [3], ``scal`` [], ``void`` [0, 3].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from property.breaks import Break, run_break
from property.ops import OPS, Op
from property.world import World

Registers = dict[int, Tensor]


@dataclass(frozen=True)
class Instr:
    """An op and what picks its operands."""

    op: str
    picks: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Line:
    """A resolved instruction: registers read, registers made with their types, and how to say it."""

    what: Instr | Break
    reads: tuple[int, ...]
    makes: tuple[tuple[int, str], ...]
    text: str


@dataclass(frozen=True, repr=False)
class Program:
    """A forward. ``results``: what picks the registers that it returns."""

    steps: tuple[Instr | Break, ...]
    results: tuple[int, ...] = (0,)
    lines: tuple[Line, ...] = field(init=False, compare=False)
    returned: tuple[tuple[int, str], ...] = field(init=False, compare=False)
    kills: tuple[tuple[int, ...], ...] = field(init=False, compare=False)  # registers that die after each line

    def __post_init__(self) -> None:
        types: dict[int, str] = {0: "rows", 1: "rows", 2: "vec"}
        lines = [self._resolve(step, types) for step in self.steps]
        lines = [line for line in lines if line is not None]
        givable = [r for r in types if types[r] in ("rows", "half", "low", "ints", "wide", "vec", "scal")]
        returned = tuple((r, types[r]) for r in (givable[-1 - p % len(givable)] for p in self.results))
        last = {r: -1 for r in types}
        for at, line in enumerate(lines):
            last.update(dict.fromkeys((*line.reads, *(r for r, _ in line.makes)), at))
        for r, _ in returned:
            last[r] = len(lines)
        kills = tuple(tuple(r for r, at in last.items() if at == i) for i in range(len(lines)))
        object.__setattr__(self, "lines", tuple(lines))
        object.__setattr__(self, "returned", returned)
        object.__setattr__(self, "kills", kills)

    @staticmethod
    def _resolve(step: Instr | Break, types: dict[int, str]) -> Line | None:
        def pick(kinds: tuple[str, ...], number: int) -> int | None:
            able = [r for r in types if types[r] in kinds]
            return able[-1 - number % len(able)] if able else None

        if isinstance(step, Break):
            step, reads, made, text = step.resolve(pick, types)
        else:
            op = OPS[step.op]
            picked = [pick((kind,), number) for kind, number in zip(op.takes, step.picks, strict=False)]
            if None in picked:
                return None
            reads, made = tuple(r for r in picked if r is not None), [op.gives] if op.gives else []
            text = op.text.format(*(f"r{r}" for r in reads))
        first = max(types) + 1
        makes = tuple((first + i, kind) for i, kind in enumerate(made))
        types.update(makes)
        left = ", ".join(f"r{r}" for r, _ in makes)
        return Line(step, reads, makes, f"{left} = {text}" if left else text)

    @property
    def token_wise(self) -> bool:
        """Whether a padded row can't show in a real one, so that plain eager on unpadded input must agree."""
        return not self._loses_alias and not any(
            line.what.sees_padding if isinstance(line.what, Break) else OPS[line.what.op].mixes for line in self.lines
        )

    @property
    def _loses_alias(self) -> bool:
        """Whether something may be written in place after a break returned memory that it doesn't own, or twice.

        Hand-offs are copies: of the valid rows of an argument, of the context's tensors, of each view of one result. In
        eager a write to one shows in the other; in the reference and in replays it doesn't.
        """
        returned = False
        for what in (line.what for line in self.lines):
            writes = what.writes if isinstance(what, Break) else what.op.endswith("_")
            if returned and writes:
                return True
            returned = returned or (isinstance(what, Break) and what.aliases)
        return False

    @property
    def cuts(self) -> bool:
        """Whether some break gets or takes the valid rows only."""
        return any(isinstance(line.what, Break) and line.what.cuts for line in self.lines)

    @property
    def smooth(self) -> bool:
        """Whether rounding stays rounding, and no random number is drawn in a shape that padding changes."""
        return not any(
            line.what.random if isinstance(line.what, Break) else OPS[line.what.op].jumpy for line in self.lines
        )

    def without_breaks(self) -> Program:
        """The same with its ops alone."""
        return Program(tuple(s for s in self.steps if not isinstance(s, Break)), self.results)

    def run(self, x: Tensor, world: World, between: Callable[[int], None] = lambda i: None) -> list[Tensor]:
        """The forward of ``x`` [R, 3], the same in eager, in the reference and while it is captured.

        ``between``: called before each line with its number.
        """
        registers: Registers = {0: x, 1: world.rows[: x.shape[0]], 2: world.vec}
        for i, (line, dead) in enumerate(zip(self.lines, self.kills, strict=True)):
            between(i)
            operands = [registers[r] for r in line.reads]
            if isinstance(line.what, Break):
                made = run_break(line.what, operands, world)
            else:
                op: Op = OPS[line.what.op]
                result = op.run(world, *operands)
                made = [result] if op.gives else []
                del result
            registers.update(zip((r for r, _ in line.makes), made, strict=True))
            del operands, made
            for r in dead:
                del registers[r]
        return [registers[r] for r, _ in self.returned]

    def __repr__(self) -> str:
        head = "r0 = x; r1 = world.rows[:R]; r2 = world.vec"
        end = f"return {', '.join(f'r{r}' for r, _ in self.returned)}"
        return "\n    ".join(["forward:", head, *(line.text for line in self.lines), end]) + "\n"

    def code(self) -> str:
        """An expression that makes this program again."""
        return f"Program({self.steps!r}, {self.results!r})"


def outputs_as(kinds: str, tensors: list[Tensor]) -> Any:
    """The structure in which a forward returns its tensors."""
    if kinds == "one":
        return tensors[0]
    if kinds == "dict":
        return {"first": tensors[0], "rest": [*tensors[1:], None], "flag": True}
    return tuple(tensors)
