"""Shows the roles of docstrings, such as :class:`Ladder`, as the code they name."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod|exc):<code>~?(?:[\w.]+\.)?")


def on_page_content(html: str, **_: Any) -> str:
    """The page without the names of roles, and names without their modules."""
    return _ROLE.sub("<code>", html)
