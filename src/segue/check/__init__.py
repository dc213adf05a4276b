"""Checking a runner: replays against references over poisoned memory and other padding, and the line to blame."""

from segue.check.checker import check_runner
from segue.check.report import Finding, Report

__all__ = ["Finding", "Report", "check_runner"]
