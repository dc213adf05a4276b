"""Each bad call is refused by name, and the next good one works."""

from __future__ import annotations

import pytest
import torch

from runner.rows import close
from segue.errors import InputError, SegueError, UsageError
from segue.runner import GraphRunner, Input, Ladder


def forward(x, bias=None, *, flag=False):
    y = x * 2 + 1
    return y if bias is None else y + bias


INPUTS = {"x": Input(0, 0.0), "bias": Input(0, 0.0, optional=True)}


def meta(*shape):
    return torch.empty(shape, device="meta")


BAD = {
    "missing": (lambda x: ((), {}), r"argument 'x' of forward .* is missing"),
    "extra": (lambda x: ((x,), {"y": 1}), r"has no argument 'y'; it has x, bias, flag"),
    "too many": (lambda x: ((x, None, 3), {}), r"takes 2 positional arguments; the call gives 3"),
    "twice": (lambda x: ((x,), {"x": x}), r"got argument 'x' twice"),
    "none": (lambda x: ((None,), {}), r"input 'x' is None; only an input declared optional=True may be"),
    "no tensor": (lambda x: (([1.0],), {}), r"input 'x' is declared as a tensor and is a list"),
    "dtype": (
        lambda x: ((x.double(),), {}),
        r"input 'x' has dtype torch.float64, and the runner's buffers hold torch.float32",
    ),
    "rank": (lambda x: ((x[0],), {}), r"input 'x' has 1 dimensions, \[4\]; the runner's buffers hold \[rows, 4\]"),
    "shape": (lambda x: ((x[:, :3],), {}), r"input 'x' has shape \[3, 3\]; the runner's buffers hold \[rows, 4\]"),
    "device": (lambda x: ((meta(3, 4),), {}), r"input 'x' is on meta, and the runner is on \S+ Move it: x.to\("),
    "gradients": (
        lambda x: ((x.clone().requires_grad_(),), {}),
        r"'x' requires grad while grad mode is on.*inference_mode",
    ),
    "counts": (lambda x: ((x, x[:2]), {}), r"input 'x' has 3 tokens and input 'bias' has 2; they must agree"),
    "sparse": (lambda x: ((x.to_sparse(),), {}), r"input 'x' has layout torch.sparse_coo"),
    "flag": (
        lambda x: ((x,), {"flag": object()}),
        r"argument 'flag' is a object: neither a declared input nor a plain flag",
    ),
    "tensor flag": (lambda x: ((x,), {"flag": x}), r"argument 'flag' is a tensor that inputs doesn't declare"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("calls_before", [0, 3])
def test_a_bad_call_is_refused_by_name_and_the_next_good_one_works(make, model, kind, calls_before):
    if calls_before == 0 and kind in ("dtype", "rank", "shape"):
        return  # nothing has shown yet what is right
    arguments, words = BAD[kind]
    runner = make(forward, INPUTS)
    x = model.x(3)
    for _ in range(calls_before):
        runner(x)
    args, kwargs = arguments(x)
    with pytest.raises(InputError, match=words):
        runner(*args, **kwargs)
    assert close(runner(x), forward(x)) and close(runner(x, x), forward(x, x))


def test_a_bad_first_call_teaches_the_runner_nothing(make, model):
    runner = make(lambda x: x @ model.weight, {"x": Input(0, 0.0)})
    for bad in (model.x(3).double(), model.x(3)[:, :3]):
        with pytest.raises(RuntimeError):
            runner(bad)
    for _ in range(3):
        assert close(runner(model.x(3)), model.x(3) @ model.weight)


def test_gradients_are_no_matter_where_grad_mode_is_off(make, model):
    runner = make(forward, INPUTS)
    x = model.x(3).requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            assert close(runner(x), forward(x)) and not runner(x).requires_grad


def test_a_module_in_training_mode_is_refused_and_works_after_eval(make, device):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()).to(device.torch_device).requires_grad_(False)
    runner = make(module, {"input": Input(0, 0.0)})
    x = torch.randn(3, 4, device=device.torch_device)
    with pytest.raises(UsageError, match=r"Sequential is in training mode.*\.eval\(\)"):
        runner(x)
    module.eval()
    for _ in range(3):
        assert close(runner(x), module(x))
    module[1].train()
    for n in (3, 3, 17):  # replays and eager calls too
        with pytest.raises(UsageError, match=r"Dropout 'Sequential\.1' is in training mode"):
            runner(torch.randn(n, 4, device=device.torch_device))
    with pytest.raises(UsageError, match=r"Dropout '1' is in training mode"):
        runner.capture(x)
    module.train()
    with pytest.raises(UsageError, match=r"training mode"):
        runner(x)


def test_a_method_of_a_module_in_training_mode_is_refused(make, device):
    module = torch.nn.Linear(4, 4).to(device.torch_device)
    with pytest.raises(UsageError, match=r"Linear is in training mode"):
        make(module.forward, {"input": Input(0, 0.0)})(torch.randn(3, 4, device=device.torch_device))


def test_a_module_on_another_device_is_refused_by_the_parameter(make):
    with pytest.raises(UsageError, match=r"weight is on meta, and the runner is on .* Move the module"):
        make(torch.nn.Linear(4, 4, device="meta").eval(), {"input": Input(0, 0.0)})


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: Input(0), r"pad= has no default"),
        (lambda: Input(0, 0.0, request_dim=0), r"a token_dim or a request_dim, not both"),
        (lambda: Input(pad=0.0), r"a fixed shape has no tail"),
        (lambda: Input(0, "left"), r'pad is a number or "edge"'),
        (lambda: Input(0, 0.0, shape=(8, 4)), r"with None at dimension 0"),
        (lambda: GraphRunner(forward, {}, [4]), r"no input of .* has a token_dim"),
        (lambda: GraphRunner(forward, {"bias": Input()}, [4]), r"no input of .* has a token_dim"),
        (
            lambda: GraphRunner(forward, {"y": Input(0, 0)}, [4]),
            r"declares 'y', and .* has no such parameter; it has x, bias",
        ),
        (lambda: GraphRunner(forward, {"x": 3}, [4]), r"inputs\['x'\] is a int; it must be a segue.Input"),
        (lambda: GraphRunner(forward, INPUTS, []), r"at least one bucket"),
        (lambda: GraphRunner(forward, INPUTS, [4], outputs="view"), r"neither \"copy\" nor \"lease\""),
        (lambda: GraphRunner(forward, INPUTS, [4], on_failure="ignore"), r"neither \"raise\" nor \"eager\""),
        (lambda: GraphRunner(forward, INPUTS, [4], max_padding=1.5), r"max_padding=1.5"),
        (lambda: GraphRunner(forward, INPUTS, [4], max_variants=0), r"max_variants=0"),
        (lambda: GraphRunner(forward, INPUTS, [4], request_buckets=[2]), r"request_buckets go together"),
        (lambda: GraphRunner(forward, INPUTS, None), r"buckets=None is neither a segue.Ladder nor a list"),
        (lambda: GraphRunner(forward, INPUTS, 8), r"buckets=8 is neither a segue.Ladder nor a list"),
        (lambda: GraphRunner(forward, 3, [4]), r"inputs=3 must be a mapping"),
        (lambda: GraphRunner(forward, INPUTS, [4], max_padding="x"), r"max_padding='x'"),
        (lambda: GraphRunner(forward, INPUTS, [4], max_variants="x"), r"max_variants='x' must be a whole number"),
        (lambda: GraphRunner(forward, INPUTS, [4], verify_every=-1), r"verify_every=-1 must be a whole number, at least 0"),
        (lambda: GraphRunner(forward, INPUTS, [4], memory_budget=-1), r"memory_budget=-1 must be a whole number of bytes"),
        (lambda: GraphRunner(forward, INPUTS, [4], memory_budget="1GB"), r"memory_budget='1GB' must be a whole number of bytes"),
        (lambda: GraphRunner(forward, INPUTS, [4], capture_ctx=3), r"capture_ctx=3 must be a function of a bucket"),
        (lambda: GraphRunner(forward, INPUTS, [4], state=3), r"state=3 must be a list of tensors"),
        (lambda: GraphRunner(forward, INPUTS, [4], state=("no",)), r"state=\('no',\) must be a list of tensors"),
        (lambda: GraphRunner(forward, INPUTS, [4], state=torch.ones(2)), r"state=.* must be a list of tensors"),
        (lambda: GraphRunner(forward, INPUTS, [4], strategies=[]), r"strategies=\[\] leaves no way to capture"),
        (lambda: GraphRunner(forward, INPUTS, [4], device="tpu"), r"device='tpu' names no device"),
        (lambda: GraphRunner(forward, INPUTS, [4], device=3.0), r"device=3.0 is a float"),
        (lambda: GraphRunner(forward, INPUTS, [4], device="cuda:99"), r"device='cuda:99': torch sees \d+ CUDA devices here"),
        (lambda: Input(0, [1]), r'pad is a number or "edge"'),
        (lambda: Input("0", 0.0), r"token_dim='0' is no whole number"),
        (lambda: Ladder.fit(None, 2), r"Ladder.fit's lengths are None"),
        (lambda: Ladder(8), r"a ladder's buckets are 8"),
        (lambda: Ladder.geometric(8, ratio="x"), r"ratio='x' doesn't grow"),
        (lambda: GraphRunner(lambda x, decision: x, INPUTS, [4]), r"'decision', which is the runner's own"),
        (lambda: GraphRunner(lambda x, ctx: x, {**INPUTS, "ctx": Input()}, [4]), r"inputs declares 'ctx'"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused_by_name(build, words):
    with pytest.raises(UsageError, match=words):
        build()


def test_a_pad_that_the_dtype_cannot_hold_is_refused_by_name(make, device):
    runner = make(lambda ids: ids + 1, {"ids": Input(0, 0.5)})
    with pytest.raises(InputError, match=r"input 'ids': pad=0.5 is no value of torch.int64"):
        runner(torch.arange(3, device=device.torch_device))


def test_a_call_without_any_token_shaped_input_is_refused(make, model):
    runner = make(lambda x=None, bias=None: x, {"x": Input(0, 0.0, optional=True), "bias": Input(optional=True)})
    with pytest.raises(SegueError, match=r"no token-shaped input was given"):
        runner()


@pytest.mark.parametrize("tokens, requests", [(-5, -1), ("a", -1), (2.0, -1), (3, -2), (3, "a")])
def test_counts_that_mean_nothing_are_refused_by_admit_and_explain(make, tokens, requests):
    runner = make(forward, INPUTS)
    for ask in (runner.admit, runner.explain):
        with pytest.raises(UsageError, match=r"(tokens|requests)=.* must be a whole number, at least 0"):
            ask(tokens, requests)


def test_a_decision_that_is_none_is_refused_by_its_type(make, model):
    runner = make(forward, INPUTS)
    for call in (runner, runner.reference):
        with pytest.raises(UsageError, match=r"decision=4 is a int; take decisions from runner.admit"):
            call(model.x(3), decision=4)
    assert close(runner(model.x(3), decision=runner.admit(3)), forward(model.x(3)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_refused_by_name():
    with pytest.raises(UsageError, match=r"device='cuda': torch sees 0 CUDA devices here.*\"emulator\""):
        GraphRunner(forward, INPUTS, [4], device="cuda")
