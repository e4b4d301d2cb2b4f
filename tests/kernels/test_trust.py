"""`auto` takes a compiled implementation only where it has passed the probe of its op."""

import re
import sys
import warnings
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from types import ModuleType

import pytest
import torch
from test_references import OPS, TRITON, call

from kvsearch_kernels import trust
from kvsearch_kernels.op import Op

CPU, F16, F32 = torch.device("cpu"), torch.float16, torch.float32
DTYPES = [F16, torch.bfloat16, F32]
PROVEN = [(op, dtype) for op in OPS for dtype in DTYPES]
IN_PLACE = ("decode_step", "evict_in_place")  # whose result is not all that they do
BYTES = ("dequantize_kv",)  # that are asked for codes
PROVEN += [(op, torch.uint8) for op in OPS if op.name in BYTES]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(trust, "_verdicts", {})
    monkeypatch.delenv("KVSEARCH_TRITON", raising=False)


@pytest.fixture
def made(monkeypatch):
    """Makes modules; `made(name, f=...)` can be imported as `name` during the test."""

    def make(name, **content):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        return name

    return make


def doubling(made, forward, **more):
    """An op that doubles, whose `triton` is `forward`, and the list of what was probed."""
    probed = []

    def cases(device, dtype):
        probed.append((device, dtype))
        yield (torch.arange(3.0, device=device).to(dtype),), {}

    def differs(got, x):
        return None if torch.equal(got, x * 2) else "the output is not twice the input"

    impl = made("fake_impl", forward=forward, why_not=lambda x: None, **more)
    probe = made("fake_probe", cases=cases, differs=differs)
    return Op("doubling", lambda x: x * 2, {"triton": impl}, probe), probed


def raising(x):
    raise RuntimeError("no kernel image\nand a long trace")


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda x: x * 3, r"doubling\[triton\] on cpu in torch.float32: case 0: .* not twice"),
        (lambda x: x * float("nan"), "case 0: the output is not twice"),
        (raising, r"doubling\[triton\] on cpu in torch.float32: RuntimeError: no kernel image$"),
    ],
)
def test_what_fails_its_probe_is_passed_over_with_one_warning(made, forward, said):
    op, probed = doubling(made, forward)
    ran = {}
    with pytest.warns(RuntimeWarning, match=said) as caught:
        got = op.record(ran, torch.ones(2))
    assert len(caught) == 1
    assert torch.equal(got, torch.full((2,), 2.0))
    assert ran == {"doubling": "reference"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op.pick(torch.ones(5)) == "reference"
    assert len(probed) == 1


LACKS = [
    torch.OutOfMemoryError("CUDA out of memory."),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", LACKS, ids=str)
@pytest.mark.parametrize("times", [1, 2])
def test_a_lack_of_memory_is_no_verdict(made, monkeypatch, error, times):
    """It is tried again with an emptied cache, then raised, so that a caller makes room."""
    left, emptied = [error] * times, []

    def forward(x):
        if left:
            raise left.pop()
        return x * 2

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    op, probed = doubling(made, forward)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if times == 2:
            with pytest.raises(type(error), match=re.escape(str(error))):
                op.pick(torch.ones(2))
            assert trust._verdicts == {}
        assert op.pick(torch.ones(2)) == "triton"
        assert op.pick(torch.ones(2)) == "triton"
    assert emptied == [True] and len(probed) == times + 1


def test_auto_goes_on_to_the_next_implementation(made):
    op, _ = doubling(made, raising)
    other = made("fake_torch", forward=lambda x: x + x, why_not=lambda x: None)
    with pytest.warns(RuntimeWarning):
        assert replace(op, impls={**op.impls, "torch": other}).pick(torch.ones(2)) == "torch"


def test_what_passes_is_used_and_proven_once_for_each_type(made):
    calls = []
    op, probed = doubling(made, lambda x: calls.append(x) or x * 2)
    ran = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            op.record(ran, torch.ones(2))
        op(torch.ones(2).half())
        op.pick(torch.ones(2).half())
    assert ran == {"doubling": "triton"}
    assert probed == [(CPU, F32), (CPU, F16)]
    assert len(calls) == 3 + 1 + len(probed)


def test_a_warning_that_raises_leaves_the_verdict(made):
    op, probed = doubling(made, raising)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            op.pick(torch.ones(2))
        assert op.pick(torch.ones(2)) == "reference"
    assert len(probed) == 1


def test_the_environment_says_never_or_without_proof(made, monkeypatch):
    op, probed = doubling(made, raising)
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    assert op.pick(torch.ones(2)) == "reference"
    monkeypatch.setenv("KVSEARCH_TRITON", "1")
    assert op.pick(torch.ones(2)) == "triton"
    assert probed == []


def test_a_named_implementation_is_not_probed(made, monkeypatch):
    op, probed = doubling(made, raising)
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    with pytest.raises(RuntimeError, match="no kernel image"):
        op.run("triton", torch.ones(2))
    assert probed == []


def test_what_cannot_run_here_is_not_probed(made):
    op, probed = doubling(made, lambda x: x * 2, emulated=lambda: True)
    assert op.pick(torch.ones(2)) == "reference"
    import_module("fake_impl").emulated = lambda: False
    import_module("fake_impl").why_not = lambda x: "not here"
    assert op.pick(torch.ones(2)) == "reference"
    assert probed == []


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_on_a_cpu_nothing_is_even_asked(op, interpreted, monkeypatch):
    args, kwargs = call(op)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.delattr(trust, "trusted")
    assert op.pick(*args, **kwargs) != "triton"


def test_an_op_without_a_probe_never_gets_triton(made):
    op, _ = doubling(made, lambda x: x * 2)
    with pytest.warns(RuntimeWarning, match="no probe"):
        assert replace(op, probe=None).pick(torch.ones(2)) == "reference"


def test_during_a_capture_nothing_is_proven_and_nothing_remembered(made, monkeypatch):
    op, probed = doubling(made, lambda x: x * 2)
    asked = []
    monkeypatch.setattr(trust, "on", lambda device: asked.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked != [])
    with pytest.warns(RuntimeWarning, match="CUDA graph is captured"):
        assert trust.trusted(op, "triton", torch.device("cuda", 0), F16) is not None
    assert probed == []
    assert trust._verdicts == {}


@pytest.mark.parametrize(("op", "dtype"), PROVEN, ids=lambda x: getattr(x, "name", str(x)))
def test_the_reference_passes_every_probe_and_the_callers_random_state_stays(op, dtype):
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert trust.prove(op, "reference", CPU, dtype) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("op", TRITON, ids=lambda op: op.name)
def test_triton_takes_every_case_of_its_probe(op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as if this were a device that it runs on
    count = 0
    for dtype in (F16, F32):
        for args, kwargs in import_module(op.probe).cases(CPU, dtype):
            count += 1
            assert op._why_not("triton", *args, **kwargs) is None
            assert trust.subject(*args, **kwargs)[0] == CPU
    assert count >= 8


def spoilt(x):
    """A result that is a little wrong: floats are 1 % more, and of integers a bit is another."""
    if isinstance(x, torch.Tensor):
        return x * 1.01 if x.is_floating_point() else x ^ 1
    if isinstance(x, list | tuple):
        return type(x)(map(spoilt, x))
    if is_dataclass(x):
        return replace(x, **{f.name: spoilt(getattr(x, f.name)) for f in fields(x)})
    return x


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_probe_finds_a_wrong_result(op, made):
    def forward(*args, **kwargs):
        return spoilt(op.reference(*args, **kwargs))

    assert mutant(op, forward, made, F16) is not None


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_probe_finds_what_was_not_written(name, made):
    (op,) = (op for op in OPS if op.name == name)

    def forward(*args, **kwargs):
        return op.reference(*deepcopy(args), **kwargs)

    assert mutant(op, forward, made, F16) is not None


def mutant(op, forward, made, dtype):
    impl = made("mutant", forward=forward, why_not=lambda *args, **kwargs: None)
    return trust.prove(Op(op.name, op.reference, {"mutant": impl}, op.probe), "mutant", CPU, dtype)


@pytest.mark.parametrize(
    "op", [op for op in OPS if "attention" in op.name or "score" in op.name], ids=lambda o: o.name
)
def test_fp32_with_the_mantissa_of_tf32_is_not_enough(op, made):
    def forward(q, *args, **kwargs):
        return op.reference(q.half().float(), *args, **kwargs)

    assert mutant(op, forward, made, F32) is not None
