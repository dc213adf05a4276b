"""A handle's report says what was replayed, what ran eager, and what to change about each reason."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from segue.capture.comparisons import Change
from segue.devices import Device
from segue.integrations.transformers import reasons as of_models
from segue.runner import reasons as of_runners
from segue.runner.reasons import Reason, remedy_of

Make = Callable[..., Any]

EXAMPLES = {  # of arguments of what makes a reason, by annotation
    "str": "layers.0",
    "int": 3,
    "bool": False,
    "object": object(),
    "Any": torch.nn.Linear(1, 1),
    "Change": Change("value", "layers.0.eps", "1", "2"),
}


def _made(make: Callable[..., Reason]) -> Reason:
    return make(*(EXAMPLES[p.annotation] for p in inspect.signature(make).parameters.values()))


@pytest.mark.parametrize("module", [of_models, of_runners])
def test_no_reason_lacks_its_remedy(module: Any) -> None:
    constants = {name: value for name, value in vars(module).items() if isinstance(value, str) and name.isupper()}
    constants = {name: value for name, value in constants.items() if not name.startswith("_")}
    assert constants and all(isinstance(value, Reason) and value.remedy for value in constants.values())
    own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
    made = {f.__name__: _made(f) for f in own if inspect.signature(f).return_annotation == "Reason"}
    assert all(isinstance(reason, Reason) and reason.remedy for reason in made.values())
    assert not any(reason.remedy.endswith(".") for reason in [*made.values(), *constants.values()])


def test_a_reason_is_text_that_can_be_pickled_with_its_remedy() -> None:
    reason = pickle.loads(pickle.dumps(of_runners.NO_BUCKET))
    assert reason == "no bucket fits" and remedy_of(reason) == of_runners.NO_BUCKET.remedy
    assert {reason: 1} == {"no bucket fits": 1} and remedy_of("a caller's own") == ""


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "Leave out output_attentions"),
}


@pytest.mark.parametrize("what", list(CALLS))
def test_what_ran_eager_stands_beside_what_to_change(what: str, make: Make, graphed: Make, ids: Make) -> None:
    handle = graphed(make(attn_implementation="eager"))
    given, remedy = CALLS[what]
    handle.generate(ids(1, 9), max_new_tokens=4, do_sample=False, **given)
    ((reason, count),) = handle.stats.reasons.items()
    assert f"| {reason} | {count} | {remedy}" in handle.report()


def test_a_long_prompt_is_told_the_option_that_serves_it(make: Make, graphed: Make, ids: Make) -> None:
    handle = graphed(make(), max_tokens=16)
    with torch.inference_mode():
        handle(ids(1, 30))
    assert "| no bucket fits | 1 | Give a larger bucket: max_tokens= of segue.accelerate()" in handle.report()


def test_the_report_says_the_share_the_buckets_and_what_is_live(make: Make, graphed: Make, ids: Make) -> None:
    handle = graphed(make())
    assert "no forward yet." in handle.report() and "| buckets with a graph | none |" in handle.report()
    with torch.inference_mode():
        for _ in range(4):
            handle(ids(2, 3))
    report = handle.report()
    assert report.startswith("# LlamaForCausalLM, accelerated\n\n50.0% of 4 forwards were replayed.\n\n|  |  |\n| --- | --- |\n")
    assert "| live, outside the graphs | embedding, attention and cache in 3 LlamaAttention, head |" in report
    assert "| buckets with a graph | 8 |" in report and "| graph memory | " in report
    assert "because" not in report


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("llama", {"strategy": "breakable"}, '| prime | strategy="breakable" was asked for |'),
        ("mistral, sliding", {}, "| prime | MistralForCausalLM has layers whose cache is a DynamicSlidingWindowLayer"),
    ],
)
def test_it_says_why_prime_does_not_serve_a_model(
    family: str, options: dict[str, Any], why: str, make: Make, graphed: Make
) -> None:
    report = graphed(make(family), **options).report()
    assert why in report and "| first token | it takes prime graphs" in report and "| strategies | breakable" in report


def test_modules_that_are_live_as_a_whole_are_named(graphed: Make, device: Device) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    report = graphed(BloomForCausalLM(config).eval().to(device.torch_device)).report()
    assert "| live, outside the graphs | the forward around the layers, 2 BloomAttention |" in report
    assert "| prime | its forward runs live around its layers, and a prime graph holds a whole one |" in report


def test_a_head_of_its_own_is_why_first_tokens_have_no_graph(make: Make, graphed: Make) -> None:
    model = make()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert "| first token | its head does more with the last hidden state than a linear layer |" in graphed(model.eval()).report()


def test_why_steps_went_breakable_stands_beside_what_to_change(make: Make, graphed: Make, ids: Make) -> None:
    handle = graphed(make(), max_context=6)
    with torch.no_grad():
        handle.generate(ids(1, 5), max_new_tokens=5, do_sample=False)
    ((reason, count),) = handle.stats.declined.items()
    head = "| left to breakable graphs because of | forwards | what to change |\n| --- | --- | --- |\n"
    assert f"{head}| {reason} | {count} | {of_models.FULL_CONTEXT.remedy} |" in handle.report()
