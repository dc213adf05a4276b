"""What a command's TARGET may be, and what is said of one that is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from segue.cli import locate, main, target
from segue.cli.target import ModelOptions
from segue.errors import UsageError

HERE = Path(__file__).parent
_OPTIONS = ModelOptions(max_tokens=4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of each test, with modules that it imports forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What goes to stderr when the command refuses; nothing may go to stdout."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["segue", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        said = capsys.readouterr()
        assert stopped.value.code == 2 and said.out == ""
        return said.err

    return run


def test_a_file_is_named_by_any_path_to_it(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "beside.py").write_text("value = (3,)")
    (folder / "sub" / "f2.py").write_text("import beside\nclass box: value = beside.value\n")
    for path in ("sub/f2.py", "./sub/f2.py", str(folder / "sub" / "f2.py")):
        assert target.made_by(f"{path}:box.value") == (3,)


def test_a_file_in_a_package_may_import_from_its_package(folder: Path) -> None:
    package = folder / "outer" / "inner"
    package.mkdir(parents=True)
    for name in ("outer/__init__.py", "outer/inner/__init__.py"):
        (folder / name).touch()
    (folder / "outer" / "values.py").write_text("value = (4,)")
    (package / "f.py").write_text("from ..values import value\ndef make(): return value\n")
    assert target.made_by("outer/inner/f.py:make") == (4,) == target.made_by("outer.inner.f:make")
    assert sys.modules["outer.inner.f"].value == (4,)


def test_a_file_with_the_name_of_a_module_leaves_that_module_alone(folder: Path) -> None:
    import json

    (folder / "json.py").write_text("value = (5,)")
    assert locate.named("json.py:value") == (5,) and sys.modules["json"] is json


def test_objects_serve_as_well_as_functions() -> None:
    import accelerable

    accelerable.ready = accelerable.model()
    found = target.find("accelerable:ready", _OPTIONS)
    assert found.value.runner.ladder.max == 4 and found.call is None
    accelerable.ready = found.value
    assert target.find("accelerable:ready", ModelOptions()).value is found.value
    found.value.restore()


def test_a_saved_model_is_loaded_as_the_class_that_was_saved(folder: Path) -> None:
    import accelerable
    import torch
    from transformers import LlamaModel

    accelerable.model(torch.bfloat16).save_pretrained(folder / "saved")
    with target.find("saved", _OPTIONS).value as handle:
        assert handle.dtype is (torch.bfloat16 if torch.cuda.is_available() else torch.float32) and not handle.training
    with target.find("./saved", ModelOptions(4, dtype=target.Precision.FLOAT16)).value as handle:
        assert handle.dtype is torch.float16 and handle.config.architectures == ["LlamaForCausalLM"]
    LlamaModel(accelerable.model().config).save_pretrained(folder / "bare")
    with target.find(str(folder / "bare"), _OPTIONS).value as handle:
        assert not hasattr(handle, "lm_head")


@pytest.mark.parametrize(
    "name, text",
    [
        ("accelerable", "accelerable names a whole module: say what in it, as in accelerable:make_model"),
        ("here.py", "here.py names a whole file: say what in it, as in here.py:make_model"),
        ("here.py:", "'here.py:' isn't package.module:NAME or file.py:NAME"),
        ("absent.py:model", "there is no file absent.py, seen from "),
        ("./here:model", "there is no file ./here, seen from "),
        ("./here:model", "./here.py is one"),
        ("accelerable.more:model", "there is no module 'accelerable.more', here or among the installed ones"),
        ("accelerable:modle", "accelerable has no 'modle'; did you mean model"),
        ("accelerable:zzz", "accelerable has no 'zzz'; it has model, with_call, with_wrong_call, "),
        ("accelerable:model.zzz", "accelerable:model has no 'zzz'"),
        ("accelerable:needy", "accelerable:needy needs arguments path, size, and is called without any"),
        ("accelerable:forgetful", "accelerable:forgetful returned None (is a return missing?); it must return"),
        ("accelerable:not_ready", "accelerable:not_ready is no function but None"),
        ("accelerable:_SIZE", "accelerable:_SIZE is no function but dict; it must be, or return, a segue.GraphRunner"),
        ("accelerable:untidy", "accelerable:untidy returned (LlamaForCausalLM, tuple); it must return"),
        ("accelerable:leaving", "accelerable:leaving called sys.exit(0), so it gives nothing to work on"),
        ("accelerable:trained", "LlamaForCausalLM is in training mode"),
        ("accelerable:refused", "raised while accelerable:refused ran: "),
        ("here.py:model", "here.py, line 2: SyntaxError: invalid syntax: def model(:"),
        ("leaves.py:model", "leaves.py called sys.exit(3), so it gives nothing to work on"),
        ("empty", "empty is a folder without a config.json: give one that save_pretrained() wrote"),
        ("broken", "broken: transformers can't load the model: "),
        ("./nowhere", "'./nowhere' is no folder, seen from "),
        ("someone/model", "transformers has no model of that name in its cache. Fetch it first: hf download someone/model"),
    ],
)
def test_what_is_wrong_with_a_target_is_one_line(folder: Path, refused: Callable[..., str], name: str, text: str) -> None:
    (folder / "here.py").write_text("import os\ndef model(:\n    pass\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "empty").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"model_type": "nothing of that kind"}')
    for command in ("check", "inspect"):
        said = refused(command, name)
        assert text in said and "Traceback" not in said
        assert said.startswith("segue: ") and said.count("\n") == (2 if "raised while" in text else 1)


@pytest.mark.parametrize(
    "name, last, first",
    [
        ("accelerable:raising", "segue: ValueError: no weights here", "in raising"),
        ("accelerable:raising_from", "segue: RuntimeError: can't build it", "in raising_from"),
        ("accelerable:torch_raising", "segue: RuntimeError: ", "in torch_raising"),
        ("imports.py:model", "segue: ModuleNotFoundError: No module named 'not_installed'", "in <module>"),
        ("divides.py:model", "segue: ZeroDivisionError: division by zero", "in <module>"),
    ],
)
def test_the_users_own_error_is_told_from_their_first_frame_on(
    folder: Path, refused: Callable[..., str], name: str, last: str, first: str
) -> None:
    (folder / "imports.py").write_text("import not_installed\n")
    (folder / "divides.py").write_text("x = 1 / 0\n")
    said = refused("check", name)
    lines = said.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[1].endswith(first) and lines[-1].startswith(last)
    for machinery in ("segue/cli", "typer", "importlib", "runpy"):
        assert machinery not in said


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["check", "accelerable:handle", "--compile"], "gives a Accelerated, which is made already: leave out --compile"),
        (["check", "checkable:right", "--strategy", "prime", "--max-tokens", "8"], "leave out --max-tokens and --strategy"),
        (["check", "accelerable:model", "--dtype", "float16"], "is no saved model, and makes what it gives itself: leave out --"),
        (["check", "accelerable:model", "--bucket", "8"], "--bucket, --requests and --text are for trunks"),
        (["check", "accelerable:model", "--strategy", "fast"], "strategy='fast' is not one that segue.accelerate() knows"),
        (["check", "prime", "--compile"], "the gate of a prime graph takes a trunk and no model: leave out --compile"),
        (["inspect", "checkable:trunk"], "gives a Dense; segue inspect takes runners and models apart"),
    ],
)
def test_an_option_that_does_not_fit_the_target_is_refused(refused: Callable[..., str], arguments: list[str], text: str) -> None:
    assert text in refused(*arguments)


def test_a_target_that_is_half_of_a_pair_is_no_target() -> None:
    with pytest.raises(UsageError, match=r"isn't package\.module:NAME"):
        locate.named(":model")
