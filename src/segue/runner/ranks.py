"""Lock-step: the ranks of a group run each call alike. They agree on strategy, bucket, and whether graphs serve it."""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from segue.errors import RankError
from segue.runner.admission import EAGER, FITS, Admission, Decision
from segue.runner.buckets import Buckets, Slot, strategy_of
from segue.runner.calls import Call, Key
from segue.runner.rank_group import RankGroup
from segue.runner.reasons import OUT_OF_STEP, UNLIKE_RANKS
from segue.runner.strategy import Declined

log = logging.getLogger("segue")
SlotId = tuple[int, str, int | None, int | None]  # number of the variant, the same on all ranks; strategy; bucket; requests
State = int | str  # of a slot: how often it was warmed up, _GRAPHS, or why it gets no graphs

_GRAPHS = -1
_NO_MATTER = -(2**62)  # to the largest value over all ranks
_NOTHING = -1
_REASON, _ERROR = 1, 2  # what a rank has against graphs


@dataclass
class Proposal:
    """What one rank has found out about its part of a call, before the ranks agree.

    ``strategy``: that takes the call here. ``reason``: why no graph may serve it; None if one may. ``checked``: a number for the
    slot whose graphs were seen to be fit for the call; _NOTHING if there are none.
    """

    call: Call
    strategy: str
    reason: str | None
    buckets: Buckets
    checked: int = _NOTHING


@dataclass
class _Known:
    """What the ranks have told each other about their slots and buckets so far."""

    states: list[dict[SlotId, State]]
    failed: dict[tuple[str, int | None, int | None], str] = field(default_factory=dict)  # on any rank, for any variant
    told: tuple[weakref.ref[Buckets], int] | None = None  # this rank's own, as of which change of them
    warned: set[tuple[int, str]] = field(default_factory=set)


class LockStep:
    """The agreement of all ranks on the calls of one runner. It is for one thread.

    Everything that could refuse a replay on one rank is looked at before the ranks agree, so that nobody waits in a collective
    for a rank that doesn't come. In a call like the last ones, the agreement is one small exchange. It is two if the ranks' own
    lengths need different buckets, and more in calls that warm up, capture, or run eager.

    Args:
        group: the ranks.
        admission: of the runner. ``left_out``: its buckets without graphs, to which those of other ranks are added.
    """

    def __init__(self, group: RankGroup, admission: Admission, left_out: dict[int, str]) -> None:
        self.group, self._admission, self._left_out = group, admission, left_out
        self._names = list(admission.strategies)
        a = admission
        ladders = [None if ladder is None else [*ladder] for ladder in (a.ladder, a.requests, *a.own.values())]
        self._runner = repr((group.runners, ladders, a.max_padding, self._names))  # the same on all ranks
        group.runners += 1
        self._numbers: dict[Key, int] = {}
        self._known = _Known([{} for _ in range(group.size)])
        self._raised: Decision | None = None  # the last decision, if its bucket was larger than this rank's call needed

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of an error that is raised in this block, in the place of a proposal. They raise one too."""
        try:
            yield
        except BaseException as e:
            try:
                self.group.largest([*[_NO_MATTER] * 12, _ERROR])
                self._tell(None, None, e)
            except RankError as other:
                e.add_note(str(other))
            raise

    def propose(self, call: Call, strategy: str, reason: str | None, buckets: Buckets) -> Proposal:
        """Look at all that could refuse a replay of ``call`` in the bucket that it probably gets.

        Raises:
            what a replay would raise.
        """
        own = Proposal(call, strategy, reason, buckets)
        if reason is None:
            decision = self._admission.decide(call.tokens, call.requests, strategy)
            raised = self._raised
            like = raised is not None and (raised.strategy == strategy or not call.tokens)
            if raised is not None and like and (decision.bucket or 0) <= (raised.bucket or 0):
                decision = raised
            slot = self._slot(call.key, decision)
            try:
                if buckets.check_replay(call, slot):
                    own.checked = _number(self._id(slot))
            except Declined as e:
                if strategy == self._names[-1]:
                    own.reason = e.reason
                own.strategy = self._names[-1]
        return own

    def agree(self, own: Proposal) -> Decision:
        """What all ranks do with this call: a bucket, or eager with the reason. The call gets the key of the agreed strategy.

        Raises:
            RankError: a rank didn't come in time, or refused its part. Otherwise the rank's own error.
        """
        news = self._known.told != (weakref.ref(own.buckets), own.buckets.changes)
        found = self.group.largest(self._fields(own, news))
        tokens, fewest_, requests, variant, variant_, index, index_, each, each_, checked, checked_, any_news, objection = found
        reason = self._tell(own, own.reason, None) if any_news or objection else None
        if reason is None and variant != -variant_:
            reason = UNLIKE_RANKS
        if reason is not None:
            return Decision(None, EAGER, reason)
        strategy = self._names[index if _same(index, index_) and _same(each, each_) and index >= 0 else -1]
        if fewest_ == 0 and strategy not in self._admission.own:
            strategy = self._names[-1]
        decision, state = self._decide(tokens, requests, strategy, own.call)
        if decision.bucket is None:
            return decision
        key, call, buckets = own.call.key, own.call, own.buckets
        slot = self._slot(key, decision)
        if decision.strategy != self._names[-1]:
            call.key = slot[0]
        if state != _GRAPHS:
            reason = self._all_may(lambda: buckets.check_capture(call, decision))
            buckets.recorder.most_tokens = tokens
        elif not checked == -checked_ == _number(self._id(slot)):
            reason = self._all_may(lambda: buckets.check_replay(call, slot))
        if reason is not None:
            call.key = key
            return Decision(None, EAGER, reason)
        mine = self._admission.decide(call.tokens, call.requests, decision.strategy)
        self._raised = decision if mine != decision else None
        return decision

    def meet(self, error: BaseException | None) -> None:
        """Wait for the other ranks after a step that all take, such as the capture of a bucket ahead of traffic.

        Args:
            error: what this rank's step has raised.

        Raises:
            RankError: another rank's step has raised something, or it didn't come in time.
        """
        try:
            self.group.largest([0])  # it names a rank that doesn't come
            self._tell(None, None, error)
        except RankError as other:
            if error is None:
                raise
            error.add_note(str(other))

    def why_failed(self, d: Decision) -> str | None:
        """Why the bucket of a decision gets no graphs on some rank, for some variant; None if nobody is known to have failed."""
        return self._known.failed.get((d.strategy, d.bucket, d.requests))

    def _fields(self, own: Proposal, news: bool) -> Sequence[int]:
        call, strategy = own.call, own.strategy
        variant = self._number_of(call.key)
        index = self._names.index(strategy)
        opinion = [index, -index] if call.tokens else [_NO_MATTER, _NO_MATTER]  # an idle rank joins the others' if that pads
        each = [_NO_MATTER, _NO_MATTER]
        if call.tokens and strategy in self._admission.own and call.requests > 0:
            each = [call.tokens // call.requests, -(call.tokens // call.requests)]
        objection = 0 if own.reason is None else _REASON
        sizes = [call.tokens, -call.tokens, call.requests]
        return [*sizes, variant, -variant, *opinion, *each, own.checked, -own.checked, int(news), objection]

    def _decide(self, tokens: int, requests: int, strategy: str, call: Call) -> tuple[Decision, State]:
        """Where all ranks run a call of the most tokens and requests of any, from what all of them know."""
        decision = Decision(None, EAGER, "")
        for name in dict.fromkeys((strategy, self._names[-1])):
            decision = self._admission.decide(tokens, requests, name)
            if decision.bucket is None:
                continue
            slot = self._id(self._slot(call.key, decision))
            states = [known.get(slot, 0) for known in self._known.states]
            failed = next((s for s in states if isinstance(s, str)), None)
            if failed is None and len(set(states)) == 1:
                return Decision(decision.bucket, name, FITS, decision.requests), states[0]
            decision = Decision(None, EAGER, failed or OUT_OF_STEP)
        return decision, 0

    def _tell(self, own: Proposal | None, reason: str | None, error: BaseException | None) -> str | None:
        """Exchange what has changed. Returns why no graph may serve the call; None if one may.

        Raises:
            RankError: another rank refuses its part.
        """
        known, news = self._known, None
        if own is not None:  # what others have forgotten, as after recapture(), they are told again
            states = {self._id(slot): state for slot, state in own.buckets.states(_GRAPHS).items()}
            known.told = weakref.ref(own.buckets), own.buckets.changes
            news = states, dict(self._left_out)
        text = None if error is None else f"{type(error).__name__}: {error}"
        answers = self.group.all((news, reason, text))
        for rank, (theirs, _, _) in enumerate(answers):
            if theirs is not None:
                known.states[rank], left_out = theirs
                for bucket, why in left_out.items():
                    self._left_out.setdefault(bucket, why)
        self._note_failures()
        for rank, (_, _, refused) in enumerate(answers):
            if refused is not None and error is None:
                raise RankError(f"rank {rank} refused its part of this call, so no rank goes on: {refused}")
        return next((r for _, r, _ in answers if r is not None), None)

    def _all_may(self, check: Callable[[], object]) -> str | None:
        """Run a check on all ranks. Returns why one declined; None if none did.

        Raises:
            what the check raises here; RankError if it raises on another rank.
        """
        reason = error = None
        try:
            check()
        except Declined as e:
            reason = e.reason
        except Exception as e:
            error = e
        objection = 0 if reason is None and error is None else _REASON
        if self.group.largest([objection])[0]:
            reason = self._tell(None, reason, error)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
        return reason

    def _note_failures(self) -> None:
        """Note what ranks can't capture, and say once what others can't."""
        known = self._known
        known.failed.clear()
        for rank, states in enumerate(known.states):
            for (_, strategy, bucket, requests), why in states.items():
                if isinstance(why, str):
                    known.failed[strategy, bucket, requests] = why
                    if rank != self.group.rank and (said := (rank, f"{strategy} {bucket} {requests} {why}")) not in known.warned:
                        known.warned.add(said)
                        log.warning("segue: all ranks run bucket %s eager, because of rank %s: %s", bucket, rank, why)

    def _slot(self, key: Key, decision: Decision) -> Slot:
        if decision.strategy not in (EAGER, self._names[-1]):
            key = (*key, decision.strategy)
        return key, decision.bucket, decision.requests

    def _id(self, slot: Slot) -> SlotId:
        return self._number_of(slot[0]), strategy_of(slot[0], self._names), slot[1], slot[2]

    def _number_of(self, key: Key) -> int:
        """A number for a variant of this runner, the same on all ranks."""
        if (number := self._numbers.get(key)) is None:
            if len(self._numbers) >= 1024:
                self._numbers.clear()
            number = self._numbers[key] = zlib.crc32(repr((self._runner, key)).encode())
        return number


def _same(most: int, least: int) -> bool:
    """Whether all ranks that care gave the same value, of which the largest and the largest of its negatives are given."""
    return most == -least or most == least == _NO_MATTER


def _number(slot: SlotId) -> int:
    """A number for a slot, the same on all ranks."""
    variant, _, bucket, requests = slot
    return variant << 30 ^ (bucket or 0) << 12 ^ (0 if requests is None else requests + 1)
