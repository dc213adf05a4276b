"""The check: references against each other, captures against each other, replays against references."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from segue import _source_lines, _torch
from segue.check import trial_calls as tried
from segue.check.blame import Place, first_break, first_op
from segue.check.compare import Rows
from segue.check.frozen import Recorded, frozen_values
from segue.check.oplog import OpLog
from segue.check.origin import origin
from segue.check.outcome import Outcome, Padded, differing
from segue.check.report import Finding, Report
from segue.check.sandbox import FINITE, NAN, Environment, Sandbox
from segue.check.trial_calls import AS_GIVEN, Case
from segue.errors import NoBucketError, SegueError, UsageError
from segue.runner.calls import Call
from segue.runner.runner import GraphRunner

_PADDING = "Move it into a break point that trims its arguments, break_point(trim=...), or keep padded rows out of it"
_UNTRACED = "No single op shows where it begins"
Group = tuple[str, int]  # variant, bucket


def check_runner(runner: GraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any = None) -> Report:
    """See :meth:`GraphRunner.check`."""
    if runner.disabled:
        raise UsageError("SEGUE=off was set when this runner was made, so it has no graphs to check")
    device = runner._ready(args, kwargs).recorder.device
    if ctx is None and runner.capture_ctx is not None:
        ctx = runner.capture_ctx
    with _generators_kept(device.torch_device):
        checker = _Checker(runner, args, kwargs, ctx)
        try:
            return checker.run()
        finally:
            checker.close()


class _Checker:
    def __init__(self, runner: GraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any) -> None:
        self.runner, self.args, self.kwargs = runner, args, kwargs
        self.device = runner._ready(args, kwargs).recorder.device
        self.start = time.perf_counter()
        self.findings: dict[tuple[str, str], Finding] = {}
        self.notes: dict[str, None] = {}
        self.blamed: set[Group] = set()  # differences of these have a finding already
        self.comparisons = self.replays = 0
        self._labs: list[Sandbox] = []
        self.world = Environment(runner.fn, ctx, runner.state, self.device.torch_device)
        self.first = self._lab()
        if not (args or kwargs):
            self.notes["no example was given, so all rows are the same: give one for a sharper check"] = None
        base = self.first.example(args, kwargs)
        self.world = self.first.world
        self.original = self.world._plain
        self.example = Case(
            AS_GIVEN, tried.resized(base, self.first.binder, min(base.tokens, runner.ladder.max)), 0, None, 0
        )
        self.groups = self._groups(base)
        pads = (leaf.declared.pad for leaf in self.first.binder.leaves)
        self.trash = [p for p in pads if isinstance(p, int) and not isinstance(p, bool) and p >= 0]

    def run(self) -> Report:
        self._settle()
        one = self._capture_all(self.first, list(self.groups))
        second = self._lab()
        second.reference(
            self._any_case(), OpLog()
        )  # a number of forwards that is odd: a flag that toggles is the other way now
        two = self._capture_all(second, list(self.groups)[::-1])
        for group, recorded in one.items():
            if group in two:
                for finding in frozen_values(recorded, two[group], group[1]):
                    self._add(finding, group)
        self._note_breaks(one)
        for group, chosen in self.groups.items():
            for case, want in self._references(group, chosen):
                for lab in (self.first, second):
                    self._replay(lab, group, case, want)
        return self._report()

    def close(self) -> None:
        self.world.restore()
        self.original.restore()
        for lab in self._labs:
            lab.close()

    def _lab(self) -> Sandbox:
        lab = Sandbox(self.runner, self.world, self.device.new_pool(), self.args, self.kwargs)
        if self._labs:
            lab.learn([leaf.spec for leaf in self.first.binder.leaves])
        self._labs.append(lab)
        return lab

    def _groups(self, base: Call) -> dict[Group, list[Case]]:
        """The calls to try, by variant and bucket, the largest bucket first."""
        runner, binder = self.runner, self.first.binder
        fixed = runner.request_ladder is not None or (base.ctx is not None and not self.world.varied)
        if fixed and base.ctx is not None and not self.world.varied:
            text = "the context is one object, so only its own number of tokens was tried, and no other context: give a"
            self.notes[f"{text} function from the number of tokens to a context for more"] = None
        ladder = [b for b in runner.ladder if b not in runner.admission.left_out and (not fixed or b >= base.tokens)]
        decision = runner.admit(base.tokens, base.requests)
        if not ladder or (fixed and decision.bucket is None):
            raise NoBucketError(f"check: {runner.admission.explain(base.tokens, base.requests)}")
        buckets = tried.chosen_buckets(ladder, base.tokens)
        own = next((b for b in buckets if b >= base.tokens), buckets[-1])
        chosen, left = tried.variants(base, binder)
        self.notes.update(dict.fromkeys(left))
        groups: dict[Group, list[Case]] = {}
        for bucket in reversed(buckets):
            for name, call in chosen.items():
                if name == AS_GIVEN or bucket == own:
                    lengths = [base.tokens] if fixed else tried.lengths_of(bucket)
                    groups[name, bucket] = _cases(name, call, bucket, decision.requests, lengths, self.first)
        return groups

    def _any_case(self) -> Case:
        return next(iter(self.groups.values()))[0]

    def _settle(self) -> None:
        """Run eagerly once, so that what the forward builds on first use is there."""
        case = self.example
        outcome = self.first.unpadded(case, OpLog())
        if outcome.error is not None:
            outcome.error.add_note("segue check: the forward itself raised this, run eagerly at the call's own shape")
            raise outcome.error
        self.world.settle()

    def _capture_all(self, lab: Sandbox, order: Sequence[Group]) -> dict[Group, Recorded]:
        """Capture every bucket: the first lab on the longest call, the other one on the shortest with other values."""
        done: dict[Group, Recorded] = {}
        for group in order:
            case = self.groups[group][0 if lab is self.first else -1]
            try:
                done[group] = lab.capture(case)
            except Exception as e:
                self._failed(e, f"capturing {case.label}", group)
        return done

    def _references(self, group: Group, chosen: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
        """What each call must give, once it is known not to depend on padded rows or uninitialised memory."""
        lab = self.first
        for i, case in enumerate(chosen):
            want = lab.reference(case, OpLog())  # before eager, as it may write tensors that eager doesn't
            plain = lab.unpadded(case, OpLog())
            if plain.error is not None:
                e = plain.error
                self.notes[f"{case.label}: left out, as eager itself raises {type(e).__name__}: {e}"] = None
                continue
            self.comparisons += 1
            if want.error is not None:
                self._failed(want.error, f"the reference of {case.label}", group)
                continue
            if i == 0 and not self._repeatable(lab, case, want, group):
                return
            if case.tokens < case.bucket:
                self._against_unpadded(lab, case, want, plain, group)
            self._against_perturbed(lab, case, want, group)
            yield case, want

    def _padded(self, case: Case) -> Padded:
        return Padded(self.trash, case.bucket, case.tokens)

    def _repeatable(self, lab: Sandbox, case: Case, want: Outcome, group: Group) -> bool:
        again = lab.reference(case, OpLog())
        self.comparisons += 1
        if again.error is None and not differing(again, want, True, self._padded(case))[0]:
            return True
        if again.error is not None or differing(again, want, False, self._padded(case))[0]:
            rows = Rows(case.bucket, case.bucket, case.tokens, exact=True)
            x, y = (lab.reference(case, OpLog("values")) for _ in range(2))
            where, text = self._traced(x, y, rows)
            why = f"{case.label}: two eager forwards of the same call differ: {text}"
            mend = "Keep what changes in the context or in tensors, so that replay and reference can start alike"
            self._add(Finding("unrepeatable", where, f"{why}. {mend}."), group)
        else:
            self.notes[f"{case.label}: not repeatable bit for bit (atomic adds?), so replays were not compared"] = None
        return False

    def _against_unpadded(self, lab: Sandbox, case: Case, want: Outcome, plain: Outcome, group: Group) -> None:
        self.comparisons += 1
        wrong, harmless = differing(plain, want, False, self._padded(case))
        self.notes.update(dict.fromkeys(harmless))
        if not wrong:
            return
        rows = Rows(case.bucket, case.tokens, case.tokens, exact=False)
        where, text = self._traced(lab.unpadded(case, OpLog("values")), lab.reference(case, OpLog("values")), rows)
        why = f"{case.label}: the padded forward isn't what eager gives ({next(iter(wrong))}). {text}"
        self._add(Finding("padding", where, f"{why}. {_PADDING}."), group)

    def _against_perturbed(self, lab: Sandbox, case: Case, want: Outcome, group: Group) -> None:
        """Over other padding, and with uninitialised memory full of NaN. Which of the two it is comes afterwards."""
        self.comparisons += 1
        other = lab.reference(case, OpLog(), perturbed=True, fill=NAN)
        if other.error is None and not differing(other, want, True, self._padded(case))[0]:
            return
        for kind, perturbed, fill, cause, mend in (
            ("padding", True, FINITE, "real rows depend on what padded rows hold", _PADDING),
            (
                "uninitialised",
                False,
                NAN,
                "real rows depend on memory that nobody wrote",
                "Write all rows, or allocate zeros",
            ),
        ):
            other = lab.reference(case, OpLog("values"), perturbed, fill)
            if other.error is not None:
                self._failed(other.error, f"the reference of {case.label} over other padding", group)
                continue
            wrong, _ = differing(other, want, True, self._padded(case))
            if wrong:
                rows = Rows(case.bucket, case.bucket, case.tokens, exact=True)
                where, text = self._traced(other, lab.reference(case, OpLog("values")), rows)
                if text == _UNTRACED and group in self.blamed:
                    continue  # more of what was found already
                right = ", right only while padding is as declared" if perturbed and group not in self.blamed else ""
                why = f"{case.label}: {cause}{right} ({next(iter(wrong))}). {text}"
                self._add(Finding(kind, where, f"{why}. {mend}."), group)

    def _replay(self, lab: Sandbox, group: Group, case: Case, want: Outcome) -> None:
        if not lab.has(case):
            return
        self.comparisons += 1
        self.replays += 1
        got = lab.replay(case, perturbed=True)
        if got.error is not None:
            self._failed(got.error, f"replaying {case.label}", group)
            return
        wrong, _ = differing(got, want, True, self._padded(case))
        if not wrong or group in self.blamed:
            return
        place = self._first_in_replay(lab, case)
        where, text = (place.where, place.text) if place else (_source_lines.of(self.runner.fn), "no single op shows it")
        order = "largest bucket captured first" if lab is self.first else "smallest bucket captured first"
        self._add(
            Finding(
                "replay",
                where,
                f"{case.label}, {order}: the replay isn't what the reference gives ({next(iter(wrong))}): {text}. "
                "Something was decided at capture, or is read from memory that others use: hand it in as an input, or "
                "read it in a break.",
            ),
            group,
        )

    def _first_in_replay(self, lab: Sandbox, case: Case) -> Place | None:
        cases = [chosen[0] for chosen in self.groups.values()]
        order = cases if lab is self.first else cases[::-1]
        specs = [step.spec for step in lab.breaks(case)]
        for find in (first_op, first_break):
            fresh = self._lab()
            try:
                if (place := find(fresh, order, case, specs)) is not None:
                    return place
            except Exception as e:
                if _torch.device_is_lost(e):
                    raise
                self.notes[f"{case.label}: the difference could not be traced: {type(e).__name__}: {e}"] = None
            finally:
                self._labs.remove(fresh)
                fresh.close()
        return None

    def _traced(self, got: Outcome, want: Outcome, rows: Rows) -> tuple[str, str]:
        """Where two references part, and in what words. ``rows``: of ``want``, then of ``got``."""
        wrong, _ = differing(got, want, rows.exact, Padded(self.trash, rows.a, rows.real))
        found = origin(want.log, got.log, wrong.values(), rows)
        if found is None:
            return _source_lines.of(self.runner.fn), _UNTRACED
        op = found.op
        inside = ", in a break," if op.inside else ""
        sources = f" (it reads what {'; '.join(found.from_)} made)" if found.from_ else ""
        text = f"It begins at {op.name}{inside} at {op.where}{sources}, whose result {found.how}"
        if found.allocated:
            text += f"; part of it comes from memory that {found.allocated} allocated"
        if found.path:
            text = f"It begins at {op.name}{inside} at {op.where}, which only one of the two runs"
        return op.where, text

    def _failed(self, error: Exception, doing: str, group: Group) -> None:
        if _torch.device_is_lost(error):
            raise error
        kind = "refused" if isinstance(error, SegueError) else "error"
        said = str(error) if kind == "refused" else f"{type(error).__name__}: {error}"
        self._add(Finding(kind, _source_lines.raised(error), f"{doing}: {said}"), group)

    def _add(self, finding: Finding, group: Group) -> None:
        """Once for each kind and line: other buckets show the same."""
        self.blamed.add(group)
        self.findings.setdefault((finding.kind, finding.where), finding)

    def _note_breaks(self, recorded: dict[Group, Recorded]) -> None:
        if recorded and not any(r.breaks for r in recorded.values()):
            text = "no break point was met: everything, attention included, is captured and runs on the padded rows"
            self.notes[f"{text}. That is right only for a forward that treats each row by itself"] = None

    def _report(self) -> Report:
        chosen = [case for cases in self.groups.values() for case in cases]
        return Report(
            forward=self.first.binder.label,
            device=self.device.name,
            findings=tuple(self.findings.values()),
            notes=tuple(self.notes),
            buckets=tuple(sorted({c.bucket for c in chosen})),
            lengths=tuple(sorted({c.tokens for c in chosen}, reverse=True)),
            variants=tuple(dict.fromkeys(c.variant for c in chosen)),
            comparisons=self.comparisons,
            replays=self.replays,
            seconds=time.perf_counter() - self.start,
        )


def _cases(name: str, call: Call, bucket: int, requests: int | None, lengths: Sequence[int], lab: Sandbox) -> list[Case]:
    """One call of each length, the last with other values; of a single length one with each."""
    found = [Case(name, tried.resized(call, lab.binder, n), bucket, requests, 0) for n in lengths]
    other = tried.other_values(found[-1].call, lab.binder)
    last = Case(name, other, bucket, requests, 1)
    return [*found[:-1], last] if len(found) > 1 else [found[0], last]


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    cuda = device.type != "cpu"
    before = random.getstate()
    with torch.random.fork_rng([device] if cuda else [], device_type=device.type if cuda else "cuda"):
        try:
            yield
        finally:
            random.setstate(before)
