"""A whole fresh-prompt forward out of one graph per bucket, on a scratch cache, copied out into the session's."""

from segue.prime.cuts import cut_here
from segue.prime.graph import PrimeGraph, PrimeResult
from segue.prime.reference import Reference
from segue.prime.trunk import Rows, Trunk, Whole

__all__ = ["PrimeGraph", "PrimeResult", "Reference", "Rows", "Trunk", "Whole", "cut_here"]
