"""Writes docs/refusals.md: each error with what it means, code that raises it, and what it then says; and why calls run eager.

``python -m guides.refusals docs/refusals.md``, or ``make refusals``.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import segue
from segue.integrations.transformers import reasons as handle_reasons
from segue.runner import reasons as runner_reasons
from segue.runner.reasons import Reason

_TOP = """\
# When segue refuses

A replay gives what eager gives, or an error says by name why it can't. This page is written by `make refusals` from the error
classes and from code that raises them. The texts are what that code says on the emulator; on CUDA they are the same, but for the
device's name. All of them are `segue.SegueError`s. The code shares these lines:

"""
SETUP = """\
import torch
from torch import nn

import segue


def runner_of(forward, **options):
    return segue.GraphRunner(forward, {"x": segue.Input(token_dim=0, pad=0.0)}, buckets=[8], device="emulator", **options)


def call(runner, tokens=5, **arguments):
    with torch.inference_mode():
        return runner(torch.randn(tokens, 4), **arguments)


def call_three_times(runner):
    for _ in range(3):  # warm-up, capture, replay
        call(runner)
"""
EXAMPLES: dict[type[segue.SegueError], dict[str, str]] = {
    segue.UsageError: {
        "An option without a default": """\
segue.GraphRunner(lambda x: x, {"x": segue.Input(token_dim=0)}, buckets=[8])
""",
    },
    segue.InputError: {
        "Another dtype than before": """\
runner = runner_of(lambda x: x * 2)
call_three_times(runner)
runner(torch.randn(5, 4, dtype=torch.float64))
""",
    },
    segue.NoBucketError: {
        "A call that is too long": """\
call(runner_of(lambda x: x * 2, strict=True), tokens=9)
""",
    },
    segue.CaptureError: {
        "A number read on the host": """\
def forward(x):
    return x / x.max().item()

call_three_times(runner_of(forward))
""",
        "A shape that depends on values": """\
def forward(x):
    return x[x.sum(1) > 0].sum(0)

call_three_times(runner_of(forward))
""",
        "A tensor made on the host": """\
def forward(x):
    return x + torch.ones(4)

call_three_times(runner_of(forward))
""",
        "A tensor kept from an earlier call": """\
class Masked(nn.Module):
    mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = x > 0
        return x * self.mask

call_three_times(runner_of(Masked().eval()))
""",
    },
    segue.GraphMemoryError: {},
    segue.LeftBehindError: {
        "A counter in Python": """\
class Counting(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 2

call_three_times(runner_of(Counting().eval()))
""",
    },
    segue.ReplayError: {
        "A break that returns something else": """\
@segue.break_point
def halved(x):
    return x.half() if segue.current_forward_ctx()["half"] else x

runner = runner_of(lambda x: halved(x * 2) + 1)
for half in (False, False, True):
    call(runner, ctx={"half": half})
""",
        "Another mode than at the capture": """\
weight = torch.randn(4, 4)
runner = runner_of(lambda x: x @ weight)
call_three_times(runner)
with torch.autocast("cpu"):
    call(runner)
""",
        "A result that was only lent": """\
runner = runner_of(lambda x: x * 2, outputs="lease")
for _ in range(3):
    lease = call(runner)
call(runner)
lease.value
""",
    },
    segue.StateChangedError: {
        "A module that was replaced": """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.act(self.up(x))

model = Model().eval()
runner = runner_of(model)
call_three_times(runner)
model.act = nn.Identity()
call(runner)
""",
        "A weight with other memory": """\
runner.recapture()
call_three_times(runner)
model.up.weight = nn.Parameter(torch.ones(4, 4))
call(runner)
""",
    },
    segue.RankError: {},
    segue.UnsupportedTorchError: {},
}
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def error_of(code: str, namespace: dict[str, Any]) -> segue.SegueError:
    """What the code raises. Its lines are those of ``forward.py``."""
    try:
        exec(compile(code, "forward.py", "exec"), namespace)
    except segue.SegueError as e:
        return e
    raise AssertionError(f"raised nothing:\n{code}")


def page() -> str:
    """The page as Markdown."""
    namespace: dict[str, Any] = {"__name__": "forward"}
    exec(compile(SETUP, "setup.py", "exec"), namespace)
    parts = [_TOP + _fenced("python", SETUP)]
    for error, examples in EXAMPLES.items():
        parts.append(f"## {error.__name__}\n\n{_meaning(error)}")
        for title, code in examples.items():
            raised = error_of(code, namespace)
            assert type(raised) is error, f"{title}: {raised!r}"
            marker = f"<!-- raises segue.{error.__name__} -->"
            parts.append(f"### {title}\n\n{marker}\n{_fenced('python', code)}\n\n> {str(raised).replace('<', '&lt;')}")
    parts.append(_eager())
    return "\n\n".join(parts) + "\n"


def _meaning(error: type[segue.SegueError]) -> str:
    text = _ROLE.sub(r"`\1`", inspect.getdoc(error) or "").replace("``", "`")
    means, _, todo = (" ".join(part.split()) for part in text.partition("What to do:"))
    base = error.__bases__[0]
    kind = "" if base is segue.SegueError else f" It is a `{base.__name__}`."
    return f"{means}{kind}\n\n**What to do:** {todo}"


def _eager() -> str:
    found = [r for module in (runner_reasons, handle_reasons) for r in vars(module).values() if isinstance(r, Reason)]
    rows = "\n".join(f"| {reason} | {reason.remedy} |" for reason in dict.fromkeys(found))
    return (
        "## Calls that run eager\n\nA call that no graph can serve, and that eager serves rightly, runs eager and is counted: in "
        "`runner.stats.reasons`, and in a handle's `report()`, which says what to change. What has changed in an accelerated "
        "model since its capture is such a reason too, and names the module, hook or weight. The others:\n\n"
        f"| reason | what to change |\n| --- | --- |\n{rows}"
    )


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8")
