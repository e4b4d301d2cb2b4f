"""Products by oneDNN are those of torch, and nothing else of a model changes."""

import copy
import platform

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from kvsearch.models.products import LONG, ROWS, SIZE, OneDnnLinear, by_onednn, suits

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8, bias=False))


@pytest.mark.parametrize("shape", [(ROWS, 256), (2, 300, 256), (1, 1, 256)])
def test_the_same_products(shape: tuple[int, ...]) -> None:
    plain = model()
    fast = copy.deepcopy(plain)
    by_onednn(fast)
    assert [type(m) for m in fast] == [OneDnnLinear, nn.Linear]  # the second is below SIZE
    assert plain[0].weight.numel() >= SIZE
    x = torch.randn(shape)
    with torch.inference_mode():
        assert torch.allclose(fast(x), plain(x), rtol=1e-5, atol=1e-5)
        strided = torch.randn(shape[-1], *shape[:-1]).movedim(0, -1)
        assert torch.allclose(fast(strided), plain(strided), rtol=1e-5, atol=1e-5)
    assert fast.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize(("rows", "runs"), [(ROWS, True), (ROWS - 1, False)])
def test_it_runs_from_so_many_tokens_on(rows: int, runs: bool) -> None:
    fast = model()
    by_onednn(fast)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as seen:
        fast(torch.randn(rows, 256))
    names = {event.key for event in seen.key_averages()}
    assert ("mkldnn::_linear_pointwise" in names) is runs


def test_other_types_go_to_torch() -> None:
    plain = model().double()
    fast = copy.deepcopy(plain)
    by_onednn(fast)
    x = torch.randn(ROWS, 256, dtype=torch.float64)
    with torch.inference_mode():
        assert torch.equal(fast(x), plain(x))


def test_it_learns_as_before() -> None:
    fast = model()
    by_onednn(fast)
    fast(torch.randn(ROWS, 256)).sum().backward()
    assert fast[0].weight.grad is not None and fast[0].weight.grad.abs().max() > 0


def test_processors() -> None:
    assert suits("Intel(R) Xeon(R)") is None and suits("") is None
    here = platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkl.is_available()
    assert suits("AMD EPYC 9R14", avx512=True) == (0 if here else None)
    assert suits("AMD EPYC", avx512=False) == (LONG if here else None)


def test_only_output_layers_where_the_others_are_as_fast() -> None:
    layers = nn.Sequential(nn.Linear(256, LONG * 256 - 1), nn.Linear(256, LONG * 256))
    by_onednn(layers, LONG)
    assert [type(m) for m in layers] == [nn.Linear, OneDnnLinear]
