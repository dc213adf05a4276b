"""The switch that turns segue off from outside: ``SEGUE=off`` in the environment."""

from __future__ import annotations

import os

DISABLED = "SEGUE=off in the environment"


def disabled() -> bool:
    """Whether everything runs eager, now. Upper or lower case alike."""
    return os.environ.get("SEGUE", "").strip().lower() == "off"
