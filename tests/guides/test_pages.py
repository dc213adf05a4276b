"""What README and docs show works: code runs, commands have these options, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import segue
from guides.pages import GUIDES, PAGES, ROOT, Block, anchors, blocks, links
from segue.cli import app

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="tests run outside a checkout")
_MODEL, _SENTENCES = "HuggingFaceTB/SmolLM2-135M-Instruct", "sentence-transformers/all-MiniLM-L6-v2"
_TEXT = "The tide tables say that low water is at noon"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in the pages' code for models that would have to be downloaded, and for a GPU."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    folders = {name: str(tmp_path_factory.mktemp("model")) for name in (_MODEL, _SENTENCES)}
    words = ["[UNK]", "[PAD]", *_TEXT.split()]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for folder in folders.values():
        named = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **named).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(vocabulary), "max_position_embeddings": 4096}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 1}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ends)).save_pretrained(folders[_MODEL])
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folders[_SENTENCES])
    return {**folders, '"cuda"': '"cpu"'}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_code_on_a_page_runs(page: Path, stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The blocks of a page run one after the other, as one module."""
    if "from sentence_transformers" in page.read_text("utf-8"):
        pytest.importorskip("sentence_transformers")
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"guide_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
    for block in blocks(page):
        if block.language == "python" and not block.mark.startswith("not run"):
            code = block.code
            for shown, stand_in in stand_ins.items():
                code = code.replace(shown, stand_in)
            with warnings.catch_warnings(), torch.random.fork_rng([]):
                warnings.simplefilter("ignore")
                _run(compile("\n" * (block.line - 1) + code, page.name, "exec"), vars(module), block)


def _run(code: Any, namespace: dict[str, Any], block: Block) -> None:
    if not block.mark:
        exec(code, namespace)
        return
    _, error = block.mark.split()
    with pytest.raises(getattr(segue, error.removeprefix("segue."))):
        exec(code, namespace)


def test_code_that_does_not_run_says_why() -> None:
    for page in GUIDES:
        for block in blocks(page):
            assert not block.mark.startswith("not run") or len(block.mark.removeprefix("not run:").split()) > 2, page


def commands() -> list[str]:
    shown = [block.code for page in GUIDES for block in blocks(page) if block.language in ("", "sh", "text")]
    lines = [line.strip().removeprefix("$ ") for code in shown for line in code.splitlines()]
    return sorted({line for line in lines if line.startswith("segue ")})


def test_the_commands_on_the_pages_exist_and_have_these_options() -> None:
    assert len(commands()) >= 8
    for line in commands():
        words = shlex.split(line, comments=True)[1:]
        command: Any = typer.main.get_command(app)
        while hasattr(command, "commands") and words[0] in command.commands:
            command, words = command.commands[words[0]], words[1:]
        command.make_context("segue", words, resilient_parsing=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: os.path.relpath(page, ROOT))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        place, _, anchor = link.partition("#")
        if "://" in place:
            continue
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{page.name}: {link}"
        if page.parent == ROOT / "docs":
            assert target.is_relative_to(ROOT / "docs"), f"{page.name}: {link} is not on the site"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_bench_is_run_and_described() -> None:
    command: Any = typer.main.get_command(app)
    benches = {*command.commands["bench"].commands, "engine"} - {"plots"}  # plots draws what is there
    (script,) = re.findall(r"^ +set -- (.+)$", (ROOT / "benchmarks" / "run.sh").read_text(), re.MULTILINE)
    described = re.findall(r"^\| `(\w+)` \|", (ROOT / "benchmarks" / "README.md").read_text("utf-8"), re.MULTILINE)
    assert set(script.split()) == benches == set(described)
