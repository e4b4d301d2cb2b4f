import pytest
import torch
from kernel_tools import arena, close, poisoned

from kvsearch_kernels.lifetime_attention import lifetime_attention, probe
from kvsearch_kernels.lifetime_attention.triton_impl import plan
from kvsearch_kernels.op import UnsupportedError
from kvsearch_kernels.scored_attention import scored_attention

NEVER = 1 << 40
F16, F32 = torch.float16, torch.float32
#        M    E    D    G dtype first softcap
CASES = [
    (1, 1, 64, 1, F16, 0, None),
    (63, 64, 64, 3, F16, 40, None),
    (64, 65, 128, 4, F16, 20, None),
    (65, 63, 128, 8, F32, 0, 5.0),
    (130, 400, 64, 3, F16, 300, 30.0),
    (1, 300, 256, 8, F16, 299, None),
    (100, 65, 256, 1, F16, 3, None),
    (63, 1, 64, 4, F32, 0, None),
    (40, 65, 256, 1, F32, 30, None),
]


def inputs(M, E, D, G, dtype, H=2, B=1, seed=0):
    torch.manual_seed(seed)
    shapes = [(B, G * H, M, D), (B, H, E, D), (B, H, E, D)]
    return [arena(torch.randn(s).to(dtype)) for s in shapes]


def lives(E, first, M):
    """Keys born at random, some before all queries, some for ever, some dead from the start."""
    birth = torch.randint(max(first - E // 2, 0), first + M, (E,))
    birth[: E // 3] = 0
    death = birth + torch.randint(0, 2 * M + 2, (E,))
    death[::5] = NEVER
    return arena(birth), arena(death)


@pytest.mark.parametrize(("M", "E", "D", "G", "dtype", "first", "softcap"), CASES)
def test_attention_stays_in_the_error_budget(M, E, D, G, dtype, first, softcap):
    q, k, v = inputs(M, E, D, G, dtype, H=1 if D == 256 else 2)
    birth, death = lives(E, first, M)
    args = {"first_query": first, "scale": D**-0.5, "softcap": softcap}
    with poisoned():
        out, lse = lifetime_attention.run("triton", q, k, v, birth, death, **args)
    exact = lifetime_attention.reference(q.double(), k.double(), v.double(), birth, death, **args)
    eager = probe.eager(q, k, v, birth, death, **args)
    eager32 = lifetime_attention.reference(q.float(), k.float(), v.float(), birth, death, **args)
    assert out.dtype is dtype
    assert lse.dtype is F32
    close(out, eager, exact[0])
    close(lse, eager32[1], exact[1])  # held to fp32 also where the output is fp16


def test_death_never_is_causal_attention():
    q, k, v = inputs(130, 130, 64, 3, F16)
    birth, death = torch.arange(130), torch.full((130,), NEVER)
    with poisoned():
        out, _ = lifetime_attention.run("triton", q, k, v, birth, death, first_query=0, scale=0.125)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wide = [k.double().repeat_interleave(3, 1), v.double().repeat_interleave(3, 1)]
    exact = sdpa(q.double(), *wide, is_causal=True, scale=0.125)
    eager = probe.eager(q, k, v, birth, death, first_query=0, scale=0.125)
    close(out, eager, exact)


def test_dead_key_blocks_are_never_read():
    q, k, v = inputs(128, 512, 64, 1, F16)
    birth = torch.zeros(512, dtype=torch.int64)
    death = torch.full((512,), NEVER)
    death[128:384] = 100  # queries start at 200
    args = {"first_query": 200, "scale": 0.1}
    want = lifetime_attention.run("triton", q, k, v, birth, death, **args)
    k[:, :, 128:384] = float("nan")
    v[:, :, 128:384] = float("nan")
    got = lifetime_attention.run("triton", q, k, v, birth, death, **args)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def anllm(T, marks):
    """Lives and anchors of a text whose sequences end at `marks`."""
    birth, death = torch.arange(T), torch.full((T,), NEVER)
    anchors = torch.full((T,), -1)
    anchors[list(marks)] = torch.tensor(marks)
    for j in range(T):
        ends = [a for a in marks if a >= j]
        if ends and ends[0] != j:
            death[j] = ends[0] + 1
    return birth, death, anchors


@pytest.mark.parametrize(("first", "M"), [(0, 300), (150, 30), (299, 1)])
def test_an_anchor_sees_its_own_sequence_alone(first, M):
    q, k, v = inputs(M, 300, 64, 3, F16)
    marks = (5, 6, 70, 130, 199, 299)  # two in a row; a stretch of rows without any
    birth, death, anchors = (arena(x) for x in anllm(300, marks))
    args = {"first_query": first, "scale": 0.125, "anchors": anchors}
    with poisoned():
        out, lse = lifetime_attention.run("triton", q, k, v, birth, death, **args)
    exact = lifetime_attention.reference(q.double(), k.double(), v.double(), birth, death, **args)
    close(out, probe.eager(q, k, v, birth, death, **args), exact[0])
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-6, atol=1e-5)


def test_the_plan_lists_whole_blocks_first():
    birth = torch.arange(100, dtype=torch.int32)
    death = torch.full_like(birth, 1000)
    table, counts = plan(birth, death, first_query=0, rows=100, tile=(32, 16))
    assert counts.tolist() == [[0, 2], [2, 4], [4, 6], [6, 7]]
    assert table[1, :4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("M", "E"), [(0, 5), (5, 0), (5, 7)])
def test_empty_and_fully_masked(M, E):
    q, k, v = inputs(M, E, 64, 2, F16)
    birth, death = torch.zeros(E, dtype=torch.int64), torch.zeros(E, dtype=torch.int64)
    args = {"first_query": 3, "scale": 1.0}
    with poisoned():
        out, lse = lifetime_attention.run("triton", q, k, v, birth, death, **args)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_strided_inputs_and_batches():
    torch.manual_seed(1)
    q = torch.randn(2, 70, 4, 64).half().transpose(1, 2)
    k, v = (torch.randn(2, 70, 2, 64).half().transpose(1, 2) for _ in range(2))
    birth, death = torch.arange(70), torch.arange(70) + 20
    args = {"first_query": 0, "scale": 0.125}
    with poisoned():
        got = lifetime_attention.run("triton", q, k, v, birth, death, **args)[0]
    exact = lifetime_attention.reference(q.double(), k.double(), v.double(), birth, death, **args)[
        0
    ]
    close(got, probe.eager(q, k, v, birth, death, **args), exact)


@pytest.mark.parametrize(("M", "N", "softcap"), [(1, 65, None), (64, 64, None), (63, 200, 20.0)])
def test_scored_attention(M, N, softcap):
    q, k, v = inputs(M, N, 64, 3, F16)
    weights = torch.rand(M)
    args = {"scale": 0.125, "softcap": softcap}
    with poisoned():
        out, received = scored_attention.run("triton", q, k, v, weights, **args)
    exact = scored_attention.reference(q.double(), k.double(), v.double(), weights.double(), **args)
    every = torch.arange(N)
    eager = probe.eager(q, k, v, every, every + NEVER, first_query=N - M, **args)
    eager32 = scored_attention.reference(q.float(), k.float(), v.float(), weights, **args)
    close(out, eager, exact[0])
    drift = 10 * torch.finfo(F32).eps  # of an lse below 10
    close(received, eager32[1], exact[1], room=float(drift * exact[1].max()))
    torch.testing.assert_close(received.sum(-1), weights.sum().expand(1, 2), rtol=1e-5, atol=0)


def test_auto_never_picks_the_interpreter():
    q, k, v = inputs(4, 4, 64, 1, F16)
    birth, death = torch.arange(4), torch.full((4,), NEVER)
    assert lifetime_attention.pick(q, k, v, birth, death, first_query=0, scale=1.0) != "triton"


def test_bf16_is_refused_by_name():
    q, k, v = inputs(4, 4, 64, 1, torch.bfloat16)
    birth, death = torch.arange(4), torch.full((4,), NEVER)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        lifetime_attention.run("triton", q, k, v, birth, death, first_query=0, scale=1.0)
