"""Training mode and gradients to record are refused by name, and both are read anew at every look."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from segue.capture.module_checks import ModuleChecks
from segue.errors import InputError, UsageError


def _checks(module: nn.Module, **options: type[InputError]) -> ModuleChecks:
    return ModuleChecks(module.named_modules(), module.named_parameters(), "graph of 8 rows", **options)


def test_a_module_in_training_mode_is_named_and_the_root_by_its_class() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    checks = _checks(module)
    checks.check_modes()
    module[1].train()
    with pytest.raises(UsageError, match=r"graph of 8 rows: Dropout '1' is in training mode.*Call .eval\(\)"):
        checks.check_modes()
    module.train()
    with pytest.raises(UsageError, match=r"graph of 8 rows: Sequential is in training mode"):
        checks.check_modes()


def test_gradients_are_refused_only_where_they_would_be_recorded() -> None:
    module = nn.Sequential(nn.Linear(2, 2)).eval().requires_grad_(False)
    checks = _checks(module)
    checks.check_gradients()
    module[0].bias.requires_grad_(True)
    with torch.no_grad():
        checks.check_gradients()
    with torch.inference_mode():
        checks.check_gradients()
    with pytest.raises(UsageError, match=r"graph of 8 rows was run with gradients required: 0\.bias requires grad while"):
        checks.check_gradients()
    with pytest.raises(InputError, match=r"torch.inference_mode\(\)"):
        _checks(module, gradient_error=InputError).check_gradients()
