"""Why a call runs eager, in the words that ``stats.reasons`` counts, each with what its caller can change."""

from __future__ import annotations

from typing import Any


class Reason(str):
    """A reason as text. ``remedy``: what to change, as a sentence without its full stop; empty where nobody needs to."""

    remedy: str

    def __new__(cls, text: str, remedy: str = "") -> Reason:
        reason = super().__new__(cls, text)
        reason.remedy = remedy
        return reason


def remedy_of(reason: str) -> str:
    """What to change about a counted reason. A decision that a caller made by hand may bring one of its own, without a remedy."""
    remedy: Any = getattr(reason, "remedy", "")
    return str(remedy)


DISABLED = Reason("SEGUE=off in the environment", "Unset SEGUE and start again")
NO_BUCKET = Reason("no bucket fits", "Give a larger bucket: max_tokens= of segue.accelerate(), or buckets=")
NO_REQUEST_BUCKET = Reason("no request bucket fits", "Give a larger bucket in request_buckets=")
UNEVEN = Reason("requests of unequal length", "Full graphs take the same number of tokens of each request")
PADDING = Reason("max_padding", "Give more buckets, or a larger max_padding=")
OTHER_SIZE = Reason(
    "an input of another size than in the first call",
    "Keep all sizes but tokens and requests as in the first call, or make a second runner",
)
TRACED = Reason(
    "inside torch.jit.trace, which would record one replay's numbers", "Trace it before it is given to segue, or leave it so"
)
INSIDE = Reason(
    "inside another forward, where nothing can be captured", "Capture it ahead with capture(), or call it twice outside first"
)
FAILED = Reason("a failed capture", 'See the warning in the log, or raise it with on_failure="raise"')
OUT_OF_MEMORY = Reason("a failed capture: out of memory", "Give fewer or smaller buckets, or free memory and recapture()")
NOT_TAKEN = Reason("takes= says that graphs don't serve it", "Let takes= give True for such calls, if graphs can serve them")
ASLEEP = Reason("asleep", "Call wake(), which captures anew")
UNLIKE_REFERENCE = Reason(
    "a trial replay that differs from the reference", "See the warning in the log; runner.check() names the op and line"
)
VARIANTS = Reason("too many variants", "Raise max_variants=, or call with fewer combinations of flags and optional inputs")
OVER_BUDGET = Reason("memory_budget", "Raise memory_budget=, or give fewer or smaller buckets")
UNLIKE_RANKS = Reason(
    "the ranks' calls are of different variants",
    "Give the same flags and optional inputs on all ranks, to the same runner with the same buckets and strategies",
)
OUT_OF_STEP = Reason(
    "the ranks' graphs of this bucket are not at the same stage",
    "Call capture(), recapture(), sleep() and wake() on all ranks alike",
)
