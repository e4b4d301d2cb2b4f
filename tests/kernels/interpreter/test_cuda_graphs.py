"""Tokens of a model as CUDA graphs, with a stand-in for those: torch's ops and Triton's kernels are
noted while a token is recorded, and carried out, on the same memory, when it is repeated."""

from contextlib import contextmanager, nullcontext
from functools import cache, partial

import pytest
import torch
from step_policies import POLICIES
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from triton.runtime import interpreter

from kvsearch.cache import PolicyCache, wrappers
from kvsearch.cache.cuda import graphs
from kvsearch.cache.cuda.captures import NotCaptured
from kvsearch.commands import check
from kvsearch.policy import Budgets, Policy
from kvsearch_kernels.op import Op
from tests.cache_cases import sharp
from tests.tagged import COMPOSITE, WAITS

SIZES = dict(
    vocab_size=97, hidden_size=48, intermediate_size=32, num_hidden_layers=2, head_dim=64,
    num_attention_heads=3, num_key_value_heads=3, max_position_embeddings=512,
)  # fmt: skip
PROMPT, NEW = 26, 8


class Graph(TorchDispatchMode):
    """Notes what would be launched, and launches it again; what waits is refused."""

    recording = None  # the graph that is recorded now

    def __init__(self):
        super().__init__()
        self.nodes, self.mine = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.has_kernel_for_dispatch_key(COMPOSITE):
            with self:
                return func.decompose(*args, **kwargs)
        if func in WAITS:
            raise RuntimeError(f"{func} waits for the device")
        if func._schema.is_mutable:
            target = args[0] if isinstance(args[0], torch.Tensor) else kwargs["out"]
            again = partial(func, *args, **kwargs)
            self.nodes.append(again)
            # what was there before must be as it was after a recording
            return again() if target.untyped_storage().data_ptr() in self.mine else target
        out = func(*args, **kwargs)
        every = [x for x in (out if isinstance(out, tuple | list) else [out])]
        if not any(r.alias_info is not None for r in func._schema.returns):
            self.mine |= {x.untyped_storage().data_ptr() for x in every}
            if "empty" not in func._schema.name:  # memory alone
                self.nodes.append(partial(self._over, every, func, args, kwargs))
        return out

    @staticmethod
    def _over(places, func, args, kwargs):
        out = func(*args, **kwargs)
        for place, x in zip(places, out if isinstance(out, tuple | list) else [out], strict=True):
            place.copy_(x)

    def replay(self):
        for node in self.nodes:
            node()


@pytest.fixture
def replays(monkeypatch):
    """Graphs can be recorded; of each, how often it was replayed."""
    launch, counts = interpreter.GridExecutor.__call__, []

    def noted(self, *args, **kwargs):
        if Graph.recording is None:
            return launch(self, *args, **kwargs)
        Graph.recording.nodes.append(partial(launch, self, *args, **kwargs))

    def record(step):
        graph, mine = Graph(), len(counts)
        Graph.recording = graph
        try:
            with graph:
                step()
        except RuntimeError as fault:
            raise NotCaptured(str(fault)) from fault
        finally:
            Graph.recording = None
        counts.append(0)

        def replay():
            counts[mine] += 1
            graph.replay()

        return replay

    @contextmanager
    def aside():
        yield record

    def pick(op, *args, **kwargs):  # a compaction is not recorded, and slow in the interpreter
        if op.name != "decode_step":
            return "reference"
        assert op._why_not("triton", *args, **kwargs) is None
        return "triton"

    monkeypatch.setattr(Op, "pick", pick)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    monkeypatch.setattr(graphs, "aside", aside)
    monkeypatch.setattr(graphs, "serves", lambda model: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(wrappers, "_refuse", lambda *_: None)  # looks at positions on a CPU
    return counts


def made(**sizes):
    torch.manual_seed(0)
    return sharp(LlamaForCausalLM(LlamaConfig(**SIZES | sizes)))


@pytest.fixture(scope="module")
def model():
    """Of two layers, which share memory; `one_layer` is as good for what a layer does."""
    return made()


@pytest.fixture(scope="module")
def one_layer():
    return made(num_hidden_layers=1)


@pytest.fixture(scope="module")
def small():
    return made(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)


def decode(model, policy, prompt=PROMPT, new=NEW, mode=torch.no_grad):
    """Logits of every token after a prompt, and the cache."""
    ids = torch.randint(3, 97, (1, prompt + new), generator=torch.Generator().manual_seed(0))
    cache = PolicyCache(policy, model)
    with mode():
        model(ids[:, :prompt], past_key_values=cache, use_cache=True)
        outs = [
            model(x, past_key_values=cache, use_cache=True).logits
            for x in ids[:, prompt:].split(1, 1)
        ]
    return torch.cat(outs, 1), cache


OWN = Budgets(kind="sensitivity", weights=((0.5, 1.0, 2.0),))
CASES = ("as the tool recommends", "full", "positions of the cache, by votes")


@pytest.mark.parametrize("name", CASES)
def test_repeated_tokens_are_what_the_model_computes(name, replays, request, recwarn):
    """One recording serves across compactions, after three tokens that are computed."""
    policy, layers = POLICIES[name], "model" if name == "full" else "one_layer"
    model = request.getfixturevalue(layers)
    if policy.slots is not None:
        policy = policy.model_copy(update={"budgets": OWN})
    want, plain = decode(model, policy, new=6)
    with graphs.cuda_graphs(model) as tokens:
        got, cache = decode(model, policy, new=6)
    assert "forward" not in model.__dict__
    assert not said(recwarn)
    assert replays == [3] and (tokens.repeated, tokens.computed) == (3, 3)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for a, b in zip(cache.held, plain.held, strict=True):
        assert (a.seen, a.nbytes, a.peak_bytes) == (b.seen, b.nbytes, b.peak_bytes)
    for a, b in zip(cache.groups, plain.groups, strict=True):
        assert getattr(a.scorer, "count", 0) == getattr(b.scorer, "count", 0)


def said(recwarn):
    return [str(w.message) for w in recwarn if "CUDA graphs" in str(w.message)]


def test_generate_needs_nothing_more(replays, small):
    """It gives a mask and positions with every token."""
    ids, outs = torch.arange(3, 33).view(1, -1), []
    for context in (nullcontext(), graphs.cuda_graphs(small)):
        with context as tokens:
            outs.append(small.generate(
                ids, past_key_values=PolicyCache(WINDOW, small), attention_mask=ids > 0,
                max_new_tokens=10, min_new_tokens=10, do_sample=False, pad_token_id=0,
            ))  # fmt: skip
    assert torch.equal(*outs)
    assert (tokens.repeated, tokens.computed) == (6, 3)  # the first one is of the prompt


WINDOW = Policy(slots=16, interval=4)


@cache
def computed(model):
    """Logits of the usual tokens under `WINDOW`, none of them replayed."""
    return decode(model, WINDOW)[0]


def test_a_cache_that_fills_up_is_recorded_anew(replays, small, recwarn):
    """Two tokens after each compaction are computed; from the first full interval on none is."""
    want, _ = decode(small, WINDOW, 7, 23)
    with graphs.cuda_graphs(small):
        got, cache = decode(small, WINDOW, 7, 23, torch.inference_mode)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert cache.held[0].seen == 30 and not said(recwarn)
    assert replays == [2, 16]


def test_tokens_in_another_mode_than_those_before(replays, small, recwarn):
    """Tensors of inference mode may not be written to outside of it."""
    want, _ = decode(small, WINDOW, new=15)
    ids = torch.randint(3, 97, (1, PROMPT + 15), generator=torch.Generator().manual_seed(0))
    cache, got = PolicyCache(WINDOW, small), []
    with graphs.cuda_graphs(small) as tokens:
        with torch.inference_mode():
            small(ids[:, :PROMPT], past_key_values=cache, use_cache=True)
        for i, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode)):
            with mode():
                for x in ids[:, PROMPT + 5 * i : PROMPT + 5 * (i + 1)].split(1, 1):
                    got.append(small(x, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=0, atol=0)
    assert not said(recwarn) and tokens.repeated == sum(replays) and len(replays) == 3


def test_tokens_on_another_stream_are_recorded_anew(replays, small, monkeypatch):
    """What recordings compute lies in memory that those of a stream share."""
    streams = iter([0] * 6 + [1] * (NEW - 5))
    monkeypatch.setattr(graphs, "_stream", lambda _: next(streams))
    want = computed(small)
    with graphs.cuda_graphs(small):
        got, _ = decode(small, WINDOW)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert replays == [3, 0]


def test_what_cannot_be_recorded_is_computed(replays, small, recwarn):
    """For instance where a model looks at its own numbers, which waits for the device."""
    want = computed(small)
    looks = small.model.norm.register_forward_hook(lambda _, __, out: float(out.sum()) and None)
    with graphs.cuda_graphs(small):
        got, cache = decode(small, WINDOW)
    looks.remove()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not replays and cache.held[0].seen == PROMPT + NEW
    assert ["waits for the device" in x for x in said(recwarn)] == [True]


@pytest.mark.parametrize("first", [0, 3])
def test_a_repeated_token_that_is_wrong_is_found(first, replays, small, recwarn, monkeypatch):
    """At once, or after slots have moved; the cache goes on with what is right."""
    want = computed(small)
    real = Graph.replay

    def replay(self):
        real(self)
        if sum(replays) > first:
            logits = [x.args[0] for x in self.nodes if x.func is Graph._over][-1][0]
            logits.add_(1)

    monkeypatch.setattr(Graph, "replay", replay)
    with graphs.cuda_graphs(small):
        got, cache = decode(small, WINDOW)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert cache.held[0].seen == PROMPT + NEW
    assert ["differs" in x for x in said(recwarn)] == [True]


def test_the_check_of_a_machine_replays_tokens(replays, monkeypatch):
    monkeypatch.setattr(check, "TOKENS", 7)
    monkeypatch.setattr(check, "PROMPT", 16)
    sentence, right = check._graphs(torch.device("cpu"), torch.float32)
    assert right and replays == [4]
    assert sentence.startswith("4 of 7 tokens") and "off by 0 of" in sentence


def test_calls_of_another_kind_run_as_ever(replays, small):
    """Several tokens at once, another cache, and tokens with gradients."""
    ids = torch.arange(3, 33).view(1, -1)

    def outs(size, cache):
        calls = [small(x, past_key_values=cache).logits for x in ids.split(size, 1)]
        return torch.cat(calls, 1)

    want = outs(3, PolicyCache(WINDOW, small)), outs(1, DynamicCache())
    with graphs.cuda_graphs(small):
        with torch.no_grad():
            got = outs(3, PolicyCache(WINDOW, small)), outs(1, DynamicCache())
        outs(1, PolicyCache(WINDOW, small))
    assert not replays
    torch.testing.assert_close(got, want, rtol=0, atol=0)
