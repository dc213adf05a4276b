"""Checking a runner: compare replays with references over poisoned memory and other padding, and name the line to blame."""

from segue.check.checker import check_runner
from segue.runner.check_report import Finding, Report

__all__ = ["Finding", "Report", "check_runner"]
