"""The check of a runner, which compares references with each other, captures with each other, and replays with references."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from segue import _source_lines, _torch
from segue.check import trial_calls
from segue.check.blame import BlamedLine, first_break, first_op
from segue.check.compare import RowCounts
from segue.check.frozen import CaptureRecord, frozen_values
from segue.check.oplog import OpLog
from segue.check.origin import origin
from segue.check.outcome import Outcome, PaddedWrites, differing
from segue.check.sandbox import FINITE, NAN, Environment, Sandbox
from segue.check.trial_calls import AS_GIVEN, TrialCall
from segue.devices import Device
from segue.errors import NoBucketError, SegueError, UsageError
from segue.runner.calls import Call
from segue.runner.check_report import Finding, Report
from segue.runner.runner import GraphRunner
from segue.runner.write_log import generators_kept

_PADDING = "Move it into a break point that trims its arguments, break_point(trim=...), or keep padded rows out of it"
_UNWRITTEN = "Write all rows, or allocate zeros"
_UNTRACED = "No single op shows where it begins"
Group = tuple[str, int]  # a variant and a bucket


def check_runner(runner: GraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any = None) -> Report:
    """Check a runner with an example call; see :meth:`GraphRunner.check`."""
    if runner.disabled:
        raise UsageError("SEGUE=off was set when this runner was made, so it has no graphs to check")
    device = runner.prepare(*args, **kwargs).recorder.device
    with _generators_kept(device.torch_device):
        checker = _Checker(runner, device, args, kwargs, runner.capture_ctx if ctx is None else ctx)
        try:
            return checker.run()
        finally:
            checker.close()


class _Checker:
    """One check. Its two sandboxes capture the same buckets in opposite orders and on different calls."""

    def __init__(
        self, runner: GraphRunner, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: Any
    ) -> None:
        self.runner, self.device = runner, device
        self.start = time.perf_counter()
        self.findings: dict[tuple[str, str], Finding] = {}  # by kind and line
        self.notes: dict[str, None] = {}
        self.blamed: set[Group] = set()  # groups in which a difference has a finding already
        self.comparisons = self.replays = 0
        self._sandboxes: list[Sandbox] = []
        self.environment = Environment(runner.fn, ctx, runner.state, device.torch_device)
        self.first = self._sandbox(runner)
        if not (args or kwargs):
            self.notes["no example was given, so all rows are the same: give one for a sharper check"] = None
        base = self.first.example(args, kwargs)
        self.environment = self.first.environment  # a new one where the context was given as an argument
        call = trial_calls.resized(base, self.first.binder, min(base.tokens, runner.ladder.max))
        self.example = TrialCall(AS_GIVEN, call, 0, None, 0)
        self.groups = self._groups(base)
        pads = (leaf.declared.pad for leaf in self.first.binder.leaves)
        self.trash = [p for p in pads if isinstance(p, int) and not isinstance(p, bool) and p >= 0]

    def run(self) -> Report:
        """Make all comparisons."""
        self._look_at_graphs()
        self._settle()
        one = self._capture_all(self.first, list(self.groups))
        second = self._sandbox(self.first.runner)
        # One forward makes the number between the captures odd: a flag that toggles at each forward now has its other value.
        second.reference(next(iter(self.groups.values()))[0], OpLog())
        two = self._capture_all(second, list(self.groups)[::-1])
        for group, record in one.items():
            if group in two:
                for finding in frozen_values(record, two[group], group[1]):
                    self._add(finding, group)
        for group, record in one.items():
            for text in record.left if group not in self.blamed else ():
                self._add(Finding("refused", _source_lines.of(self.runner.fn), text), group)
        self._note_breaks(one)
        for group, chosen in self.groups.items():
            for trial, want in self._references(group, chosen):
                for sandbox in (self.first, second):
                    self._replay(sandbox, group, trial, want)
        return self._report()

    def _look_at_graphs(self) -> None:
        """Find out whether the graphs that the runner has already were captured from what is there now."""
        for slot, captured in self.runner.prepare().graphs.items():
            look = getattr(captured.program, "changed", None)
            change = None if look is None else look()
            if change is not None:
                text = f"{change} since the capture of bucket {slot[1]}, whose replays are refused. Undo it, or call recapture()"
                self.findings["stale", change.path] = Finding("stale", change.path, text)

    def close(self) -> None:
        """Put back what forwards changed, and drop all graphs."""
        self.environment.close()
        for sandbox in self._sandboxes:
            sandbox.close()

    def _sandbox(self, runner: GraphRunner) -> Sandbox:
        sandbox = Sandbox(runner, self.environment, self.device.new_pool())
        self._sandboxes.append(sandbox)
        return sandbox

    def _groups(self, base: Call) -> dict[Group, list[TrialCall]]:
        """The calls to try, by variant and bucket, the largest bucket first."""
        runner, binder = self.runner, self.first.binder
        fixed = runner.request_ladder is not None or (base.ctx is not None and not self.environment.varied)
        if fixed and base.ctx is not None and not self.environment.varied:
            text = "the context is one object, so only its own number of tokens was tried, and no other context: give a"
            self.notes[f"{text} function from the number of tokens to a context for more"] = None
        ladder = [b for b in runner.ladder if b not in runner.admission.left_out and (not fixed or b >= base.tokens)]
        decision = runner.admit(base.tokens, base.requests)
        if not ladder or (fixed and decision.bucket is None):
            raise NoBucketError(f"check: {runner.admission.explain(base.tokens, base.requests)}")
        buckets = trial_calls.chosen_buckets(ladder, base.tokens)
        own = next((b for b in buckets if b >= base.tokens), buckets[-1])
        chosen, not_tried = trial_calls.variants(base, binder)
        self.notes.update(dict.fromkeys(not_tried))
        groups: dict[Group, list[TrialCall]] = {}
        for bucket in reversed(buckets):
            for name, call in chosen.items():
                if name == AS_GIVEN or bucket == own:
                    lengths = [base.tokens] if fixed else trial_calls.lengths_of(bucket)
                    groups[name, bucket] = _trials(name, call, bucket, decision.requests, lengths, self.first)
        return groups

    def _settle(self) -> None:
        """Run the forward eagerly once, so that it builds what it builds on first use."""
        outcome = self.first.unpadded(self.example, OpLog())
        if outcome.error is not None:
            outcome.error.add_note("segue check: the forward itself raised this, run eagerly at the call's own shape")
            raise outcome.error
        self.environment.settle()

    def _capture_all(self, sandbox: Sandbox, order: Sequence[Group]) -> dict[Group, CaptureRecord]:
        """Capture every bucket, the first sandbox on the longest call, the second on the shortest call with other values."""
        done: dict[Group, CaptureRecord] = {}
        for group in order:
            trial = self.groups[group][0 if sandbox is self.first else -1]
            try:
                done[group] = sandbox.capture(trial)
            except Exception as e:
                self._failed(e, f"capturing {trial.label}", group)
        return done

    def _references(self, group: Group, chosen: Sequence[TrialCall]) -> Iterator[tuple[TrialCall, Outcome]]:
        """Each call with the outcome that its replay must have, after looking for padding and uninitialised memory in it."""
        for i, trial in enumerate(chosen):
            want = self.first.reference(trial, OpLog())  # runs before eager, as it may write tensors that eager doesn't
            plain = self.first.unpadded(trial, OpLog())
            if plain.error is not None:
                e = plain.error
                self.notes[f"{trial.label}: left out, as eager itself raises {type(e).__name__}: {e}"] = None
                continue
            self.comparisons += 1
            if want.error is not None:
                self._failed(want.error, f"the reference of {trial.label}", group)
                continue
            if i == 0 and not self._repeatable(trial, want, group):
                return
            if trial.tokens < trial.bucket:
                self._against_unpadded(trial, want, plain, group)
            self._against_perturbed(trial, want, group)
            yield trial, want

    def _padded(self, trial: TrialCall) -> PaddedWrites:
        return PaddedWrites(self.trash, trial.bucket, trial.tokens)

    def _repeatable(self, trial: TrialCall, want: Outcome, group: Group) -> bool:
        """Whether two references of one call agree, without which replays can't be compared with them."""
        again = self.first.reference(trial, OpLog())
        self.comparisons += 1
        if again.error is None and not differing(again, want, True, self._padded(trial))[0]:
            return True
        if again.error is not None or differing(again, want, False, self._padded(trial))[0]:
            x, y = (self.first.reference(trial, OpLog("values")) for _ in range(2))
            where, text = self._traced(x, y, RowCounts(trial.bucket, trial.bucket, trial.tokens, exact=True))
            why = f"{trial.label}: two eager forwards of the same call differ: {text}"
            mend = "Keep what changes in the context or in tensors, so that replay and reference can start alike"
            self._add(Finding("unrepeatable", where, f"{why}. {mend}."), group)
        else:
            self.notes[f"{trial.label}: not repeatable bit for bit (atomic adds?), so replays were not compared"] = None
        return False

    def _against_unpadded(self, trial: TrialCall, want: Outcome, plain: Outcome, group: Group) -> None:
        self.comparisons += 1
        wrong, harmless = differing(plain, want, False, self._padded(trial))
        self.notes.update(dict.fromkeys(harmless))
        if not wrong:
            return
        plain, want = self.first.unpadded(trial, OpLog("values")), self.first.reference(trial, OpLog("values"))
        where, text = self._traced(plain, want, RowCounts(trial.bucket, trial.tokens, trial.tokens, exact=False))
        why = f"{trial.label}: the padded forward isn't what eager gives ({next(iter(wrong))}). {text}"
        self._add(Finding("padding", where, f"{why}. {_PADDING}."), group)

    def _against_perturbed(self, trial: TrialCall, want: Outcome, group: Group) -> None:
        """Compare with a reference over other padding and uninitialised memory full of NaN; on a difference try each alone."""
        self.comparisons += 1
        other = self.first.reference(trial, OpLog(), perturbed=True, fill=NAN)
        if other.error is None and not differing(other, want, True, self._padded(trial))[0]:
            return
        for kind, perturbed, fill, cause, remedy in (
            ("padding", True, FINITE, "real rows depend on what padded rows hold", _PADDING),
            ("uninitialised", False, NAN, "real rows depend on memory that nobody wrote", _UNWRITTEN),
        ):
            other = self.first.reference(trial, OpLog("values"), perturbed, fill)
            if other.error is not None:
                self._failed(other.error, f"the reference of {trial.label} over other padding", group)
                continue
            wrong, _ = differing(other, want, True, self._padded(trial))
            if wrong:
                rows = RowCounts(trial.bucket, trial.bucket, trial.tokens, exact=True)
                where, text = self._traced(other, self.first.reference(trial, OpLog("values")), rows)
                if text == _UNTRACED and group in self.blamed:
                    continue  # it repeats a difference that has a finding
                right = ", right only while padding is as declared" if perturbed and group not in self.blamed else ""
                why = f"{trial.label}: {cause}{right} ({next(iter(wrong))}). {text}"
                self._add(Finding(kind, where, f"{why}. {remedy}."), group)

    def _replay(self, sandbox: Sandbox, group: Group, trial: TrialCall, want: Outcome) -> None:
        """Compare a replay with the reference, unless the group has a finding already."""
        if not sandbox.has(trial):
            return
        self.comparisons += 1
        self.replays += 1
        got = sandbox.replay(trial, perturbed=True)
        if got.error is not None:
            self._failed(got.error, f"replaying {trial.label}", group)
            return
        wrong, _ = differing(got, want, True, self._padded(trial))
        if not wrong or group in self.blamed:
            return
        line = self._blamed(sandbox, trial) or BlamedLine(_source_lines.of(self.runner.fn), "no single op shows it")
        order = "largest bucket captured first" if sandbox is self.first else "smallest bucket captured first"
        self._add(
            Finding(
                "replay",
                line.where,
                f"{trial.label}, {order}: the replay isn't what the reference gives ({next(iter(wrong))}): {line.text}. "
                "Something was decided at capture, or is read from memory that others use: hand it in as an input, or "
                "read it in a break.",
            ),
            group,
        )

    def _blamed(self, sandbox: Sandbox, trial: TrialCall) -> BlamedLine | None:
        """Where the replay of a call first differs from its reference, found by captures in the sandbox's order."""
        trials = [chosen[0] for chosen in self.groups.values()]
        order = trials if sandbox is self.first else trials[::-1]
        specs = [step.spec for step in sandbox.breaks(trial)]
        for find in (first_op, first_break):
            fresh = self._sandbox(self.first.runner)
            try:
                if (line := find(fresh, order, trial, specs)) is not None:
                    return line
            except Exception as e:
                if _torch.device_is_lost(e):
                    raise
                self.notes[f"{trial.label}: the difference could not be traced: {type(e).__name__}: {e}"] = None
            finally:
                self._sandboxes.remove(fresh)
                fresh.close()
        return None

    def _traced(self, got: Outcome, want: Outcome, rows: RowCounts) -> tuple[str, str]:
        """The line at which two references begin to differ, and a sentence on it. ``rows``: of ``want``, then of ``got``."""
        wrong, _ = differing(got, want, rows.exact, PaddedWrites(self.trash, rows.a, rows.real))
        found = origin(want.log, got.log, wrong.values(), rows)
        if found is None:
            return _source_lines.of(self.runner.fn), _UNTRACED
        op = found.op
        inside = ", in a break," if op.inside else ""
        sources = f" (it reads what {'; '.join(found.sources)} made)" if found.sources else ""
        text = f"It begins at {op.name}{inside} at {op.where}{sources}, whose result {found.how}"
        if found.allocated:
            text += f"; part of it comes from memory that {found.allocated} allocated"
        if found.one_sided:
            text = f"It begins at {op.name}{inside} at {op.where}, which only one of the two runs"
        return op.where, text

    def _failed(self, error: Exception, doing: str, group: Group) -> None:
        """Make a finding of an error. A lost device ends the check."""
        if _torch.device_is_lost(error):
            raise error
        kind = "refused" if isinstance(error, SegueError) else "error"
        said = str(error) if kind == "refused" else f"{type(error).__name__}: {error}"
        self._add(Finding(kind, _source_lines.raised(error), f"{doing}: {said}"), group)

    def _add(self, finding: Finding, group: Group) -> None:
        """Keep one finding for each kind and line, because other buckets show the same."""
        self.blamed.add(group)
        self.findings.setdefault((finding.kind, finding.where), finding)

    def _note_breaks(self, records: dict[Group, CaptureRecord]) -> None:
        if records and not any(record.breaks for record in records.values()):
            text = "no break point was met: everything, attention included, is captured and runs on the padded rows"
            self.notes[f"{text}. That is right only for a forward that treats each row by itself"] = None

    def _report(self) -> Report:
        chosen = [trial for trials in self.groups.values() for trial in trials]
        return Report(
            forward=self.first.binder.label,
            device=self.device.name,
            findings=tuple(self.findings.values()),
            notes=tuple(self.notes),
            buckets=tuple(sorted({trial.bucket for trial in chosen})),
            lengths=tuple(sorted({trial.tokens for trial in chosen}, reverse=True)),
            variants=tuple(dict.fromkeys(trial.variant for trial in chosen)),
            comparisons=self.comparisons,
            replays=self.replays,
            seconds=time.perf_counter() - self.start,
        )


def _trials(
    name: str, call: Call, bucket: int, requests: int | None, lengths: Sequence[int], sandbox: Sandbox
) -> list[TrialCall]:
    """One call of each length, the last with other values. A single length gives two calls, one with other values."""
    found = [TrialCall(name, trial_calls.resized(call, sandbox.binder, n), bucket, requests, 0) for n in lengths]
    other = trial_calls.other_values(found[-1].call, sandbox.binder)
    last = TrialCall(name, other, bucket, requests, 1)
    return [*found[:-1], last] if len(found) > 1 else [found[0], last]


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Put back the state of the random generators of Python, the CPU and the device."""
    before = random.getstate()
    with generators_kept(device):
        try:
            yield
        finally:
            random.setstate(before)
