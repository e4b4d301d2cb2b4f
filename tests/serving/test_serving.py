"""A policy in a server, without the server: blocks, who holds them, what is refused."""

import random
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from kvsearch.cache.layer import Layer, empty_layers
from kvsearch.cache.ways import advance, advance_together
from kvsearch.errors import KvsearchError, PolicyError, RunError
from kvsearch.policy import Anchors, ModelShape, Policy, Quantizer, Tier, layout
from kvsearch.rules import Attention, Critical, Reread
from kvsearch.serving.accepts import UNREAD, require_servable
from kvsearch.serving.account import Account, Row, account, waits
from kvsearch.serving.table import Table
from kvsearch.serving.vllm.counters import COUNTS, PLACE, Counts, counted, shared
from kvsearch.serving.vllm.plugin import fits, installed
from kvsearch.serving.vllm.served import Served, policy_file, require_config, served
from tests.random_policies import policy

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=16, heads=4)


def servable(seed: int, trigger: str = "stream") -> Policy:
    """A random policy without anchors; of another trigger one that can have it."""
    rng = random.Random(seed)
    while True:
        asked = policy(rng, SHAPE).model_copy(update={"anchors": None, "positions": "original"})
        asked = asked.model_copy(update={"trigger": "stream", "refit": "none"})
        if trigger == "stream":
            return asked
        with suppress(PolicyError):
            return Policy.build(asked.plain() | {"trigger": trigger})


AFTER = ("prompt", "prompt+stream", "generation")


@given(st.integers(0, 1 << 30), st.integers(1, 700), st.sampled_from([1, 16, 128]))
@settings(max_examples=40, deadline=None)
def test_blocks_hold_what_a_request_holds_and_no_more(seed: int, longest: int, size: int) -> None:
    asked = servable(seed)
    found, peak = account(asked, SHAPE, longest, size), layout(asked, SHAPE).bytes_peak
    block = found.page * SHAPE.layers
    for tokens in {1, longest // 3 + 1, longest // 2 + 1, longest}:
        n = found.blocks(tokens)
        assert (n - 1) * block < peak(tokens) <= n * block
    assert found.blocks(0) == 0 and found.blocks(longest) == found.most
    slots = longest if asked.slots is None else min(longest, asked.slots)
    assert found.most <= -(-slots // size)


def test_a_request_never_holds_more_than_its_blocks() -> None:
    """In pieces of any size, as a server brings prompts; bytes of real tensors."""
    rng = random.Random(5)
    for seed in range(12):
        asked, cut = servable(seed), 0
        wants = frozenset() if asked.active_rule is None else asked.active_rule.needs
        if {"queries", "outputs", "rereading"} & wants:  # of a model
            continue
        counted = account(asked, SHAPE, 160, 8)
        layers = empty_layers(asked, SHAPE, packed=True, native=torch.float16)
        while cut < 160:
            m = min(160 - cut, rng.choice([1, 1, 2, 37]))
            for layer in layers:
                q, k, v = (torch.randn(1, h, m, 16) for h in (4, 2, 2))
                assert advance(layer, q, k, v, scale=0.25).isfinite().all()
            cut += m
            held = sum(layer.nbytes for layer in layers)
            assert 0 < held <= counted.blocks(cut) * counted.page * SHAPE.layers


@pytest.mark.parametrize("trigger", AFTER)
def test_a_prompt_in_pieces_is_held_as_one_in_a_call(trigger: str) -> None:
    """Outputs and bytes of real tensors, which never exceed what a scheduler counts for them."""
    rng, given_back = random.Random(3), 0
    for seed in range(9):
        asked, total = servable(seed, trigger), 70
        rule = asked.active_rule
        if rule is not None and not rule.needs.isdisjoint({"queries", *UNREAD}):  # of a model
            continue
        prompt = rng.randint(40, 60)
        tokens = [[torch.randn(1, h, total, 16) for h in (4, 2, 2)] for _ in range(SHAPE.layers)]

        def taken(cuts: list[int], expects: int | None) -> tuple[torch.Tensor, list[int]]:
            layers = empty_layers(asked, SHAPE, packed=True, native=torch.float16)  # noqa: B023
            outs, held = [], []
            for layer in layers:
                layer.expects = expects
            for a, b in pairwise([0, *cuts, total]):  # noqa: B023
                parts = ([x[:, :, a:b] for x in three] for three in tokens)  # noqa: B023
                each = zip(layers, parts, strict=True)
                outs.append(torch.stack([advance(x, *now, scale=0.25) for x, now in each]))
                held.append(sum(layer.nbytes for layer in layers))
            return torch.cat(outs, -2), held

        whole, end = taken([prompt], None)
        counted = account(asked, SHAPE, total, 8)
        block, row = counted.page * SHAPE.layers, Row(counted, prompt if waits(asked) else 0)
        # a request that was preempted comes again with what it has generated: past its prompt
        cuts = sorted(rng.sample(range(1, total), rng.choice([0, 1, 6])))
        found, held = taken(cuts, prompt)
        for b, bytes_held in zip([*cuts, total], held, strict=True):
            row.grow(b)
            assert 0 < bytes_held <= (row.length - len(row.gap)) * block
            assert row.length <= counted.entries
        given_back += len(row.gap)
        tight = dict(rtol=0, atol=2e-5 if not asked.quantizes else 0.05)
        torch.testing.assert_close(found, whole, **tight)
        assert held[-1] == end[-1]
    assert given_back


def test_tokens_of_several_requests_are_decoded_together_to_the_same_bits() -> None:
    """Also while some of them are compacted, end or begin; and where no op serves all of them."""
    joint, tier = 0, (Tier(key_bits=5, value_bits=4),)
    at_once = Policy(slots=40, tiers=tier, quantizer=Quantizer(group=16), rule=Attention(beta=1))
    drawn = (servable(seed, ("stream", *AFTER)[seed % 4]) for seed in range(14))
    for asked in (at_once, *drawn):
        rule = asked.active_rule
        if rule is not None and not rule.needs.isdisjoint({"queries", *UNREAD}):  # of a model
            continue
        alone, together = ([_begun(asked, n) for n in (31, 9, 50, 3)] for _ in range(2))
        memo: dict[str, Any] = {}
        for t in range(24):
            now = slice(t // 8, t // 8 + 2)
            q, k, v = (torch.randn(2, h, 1, 16) for h in (4, 2, 2))
            rows = zip(alone[now], *(x.split(1) for x in (q, k, v)), strict=True)
            want = torch.cat([advance(x, *row, scale=0.25) for x, *row in rows])
            got = advance_together(together[now], q, k, v, memo, scale=0.25)
            assert torch.equal(got, want)
        assert [x.nbytes for x in alone] == [x.nbytes for x in together]
        joint += "stores" in memo
    assert joint > 3


def _begun(asked: Policy, tokens: int) -> Layer:
    """The first layer of a request that has had so many tokens."""
    (layer, *_) = empty_layers(asked, SHAPE, packed=True, native=torch.float16)
    drawn = torch.Generator().manual_seed(tokens)
    advance(layer, *(torch.randn(1, h, tokens, 16, generator=drawn) for h in (4, 2, 2)), scale=0.25)
    return layer


BY_TOKEN = Account(1, tuple(range(1, 30)))  # a token a block


def claim(table: Table[Any], row: list[int], *, fresh: bool) -> Any:
    return table.claim(row, len(row), fresh=fresh)


class _Pool:
    """A scheduler: requests get blocks, grow, finish and are preempted."""

    def __init__(self, seed: int) -> None:
        self.rng, self.free = random.Random(seed), list(range(1, 20))
        self.rows: dict[int, list[int]] = {}

    def give(self, name: int, count: int) -> bool:
        while len(self.free) < count:
            others = [n for n in self.rows if n != name]
            if not others:
                return False
            self.take(self.rng.choice(others))
        self.rng.shuffle(self.free)
        mine = self.rows.setdefault(name, [])
        mine += [self.free.pop() for _ in range(count)]
        return True

    def take(self, name: int) -> None:
        self.free += self.rows.pop(name)


@given(st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_requests_are_told_apart_by_their_blocks(seed: int) -> None:
    made: list[dict[str, int]] = []
    table: Table[dict[str, int]] = Table(lambda _: made.append({}) or made[-1], BY_TOKEN)
    pool, holds = _Pool(seed), {}
    for name in range(40):
        if pool.give(name, pool.rng.randint(1, 4)):
            holds[name] = claim(table, pool.rows[name], fresh=True)
            assert holds[name] is made[-1]
        for other in list(pool.rows):
            if other not in pool.rows:
                continue  # preempted by one before it
            what = pool.rng.random()
            if what < 0.2:
                pool.take(other)
            elif what < 0.6 and pool.give(other, pool.rng.randint(0, 2)) and other in holds:
                assert claim(table, pool.rows[other], fresh=False) is holds[other]
        assert table.blocks <= 19 and len(table) <= 19
    alive = [claim(table, row, fresh=False) for name, row in pool.rows.items() if name in holds]
    assert len({id(x) for x in alive}) == len(alive)


def test_a_request_that_was_not_seen_from_its_start_is_refused() -> None:
    table: Table[object] = Table(lambda _: object(), BY_TOKEN)
    with pytest.raises(RunError, match="has not seen; turn off prefix caching"):
        claim(table, [4, 5], fresh=False)
    first = claim(table, [4, 5], fresh=True)
    second = claim(table, [7, 5], fresh=True)  # the first has lost a block: it has ended
    assert second is not first and len(table) == 1 and table.blocks == 2
    with pytest.raises(RunError):
        claim(table, [4], fresh=False)


def test_blocks_that_a_prompt_gave_back_are_no_longer_its_own() -> None:
    asked = Policy(slots=20, interval=4, trigger="prompt")
    table: Table[int] = Table(lambda prompt: prompt, account(asked, SHAPE, 200, 4))
    row = [*range(1, 200)]
    assert table.claim(row, 60, fresh=True, prompt=100) == 100
    before = table.blocks
    assert table.claim(row, 100, fresh=False, prompt=100) == 100
    assert before > 3 * table.blocks > 0
    given = [before, *range(300, 400)]  # the last of them
    table.claim(given, 8, fresh=True, prompt=40)
    assert len(table) == 2, "the first has not ended"
    grown = table.blocks
    table.claim(row, 140, fresh=False, prompt=100)  # its new ones come behind the gap
    assert table.blocks > grown
    table.claim([before + 1, *range(400, 500)], 8, fresh=True, prompt=40)
    assert len(table) == 2, "it has lost one of those"


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (Policy(anchors=Anchors()), "field anchors: the attention layers of a server"),
        (
            Policy(slots=64, trigger="prompt", rule=Reread()),
            "field rule: 'reread' reads a prompt twice, and a server reads it once",
        ),
        (
            Policy(slots=64, rule=Critical()),
            "field rule: 'critical' reads more than queries, keys and values",
        ),
    ],
)
def test_what_a_server_cannot_run_is_refused(asked: Policy, part: str) -> None:
    with pytest.raises(KvsearchError, match=part):
        require_servable(asked)
    for trigger in ("stream", *AFTER):
        require_servable(Policy(slots=64, trigger=trigger))


def config(**more: Any) -> Any:
    """As much of vLLM's configuration as is read."""
    kind = dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = SimpleNamespace(hf_config=LlamaConfig(**kind), dtype=torch.float32)
    plain = dict(
        additional_config={},
        model_config=model,
        parallel_config=SimpleNamespace(world_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        kv_transfer_config=None,
    )
    return SimpleNamespace(**{**plain, **more})


def test_a_policy_is_named_by_option_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSEARCH_POLICY", raising=False)
    assert policy_file(config()) is None and served(config()) is None
    for name, slots in (("a", 40), ("b", 50)):
        (tmp_path / name).write_text(Policy(slots=slots).to_json())
    monkeypatch.setenv("KVSEARCH_POLICY", str(tmp_path / "a"))
    found = served(config())
    assert found is not None and found.policy.slots == 40 and found.shape == SHAPE
    assert [type(x) for x in found.layers()] == [Layer] * 3
    named = config(additional_config={"kvsearch_policy": str(tmp_path / "b")})
    other = served(named)
    assert other is not None and other.policy.slots == 50
    weights = dict(kind="sensitivity", weights=[1, 2], exponent=1.0)
    (tmp_path / "c").write_text(Policy.build(dict(slots=40, budgets=weights)).to_json())
    with pytest.raises(KvsearchError, match="2"):
        served(config(additional_config={"kvsearch_policy": str(tmp_path / "c")}))


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (dict(parallel_config=SimpleNamespace(world_size=2)), "several workers"),
        (dict(speculative_config=object()), "speculative decoding"),
        (dict(kv_transfer_config=object()), "KV transfer"),
        (dict(cache_config=SimpleNamespace(cache_dtype="fp8")), "--kv-cache-dtype"),
    ],
)
def test_options_that_cannot_go_with_a_policy_are_refused(more: Any, part: str) -> None:
    require_config(config())
    with pytest.raises(RunError, match=f"a kvsearch policy cannot go with {part}"):
        require_config(config(**more))


@pytest.mark.parametrize(("trigger", "held"), [("stream", 24), ("prompt", 400)])
def test_a_memory_that_holds_not_one_request_is_refused_before_the_model(
    trigger: Any, held: int
) -> None:
    """A prompt that may come in pieces is held in 16 bits until it has ended."""
    asked = Served(Policy(slots=24, interval=4, trigger=trigger), SHAPE, torch.float32)
    token = 2 * 2 * 16 * 2 * SHAPE.layers
    for more, refused in ((0, True), (16, False)):
        memory = SimpleNamespace(kv_cache_memory_bytes=(held + more) * token, block_size=4)
        given = config(cache_config=memory)
        given.model_config.max_model_len = 400
        with pytest.raises(RunError, match="not one request") if refused else nullcontext():
            asked.require_room(given)
    memory.kv_cache_memory_bytes = None  # vLLM takes what there is
    asked.require_room(given)


def test_the_plugin_serves_some_minor_versions() -> None:
    assert fits("0.31.0") and fits("0.32.0") and fits("0.32.1+cpu") and fits("0.33.0")
    assert not fits("0.34.0") and not fits("0.3.2") and not fits("1.32.0")
    with pytest.raises(RunError, match="vLLM is not installed"):
        installed()


def test_counts_go_from_one_process_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Policy(slots=20, interval=4, trigger="prompt+stream")
    layers = Served(asked, SHAPE, torch.float16).layers(30)
    for layer in layers:
        advance(layer, *(torch.randn(1, h, 30, 16) for h in (4, 2, 2)), scale=0.25)
    (place := tmp_path / "counts").write_bytes(bytes(8 * len(COUNTS)))
    monkeypatch.setenv(PLACE, str(place))
    seen, mine = shared(), Counts()
    place.unlink()  # something clears the temporary folder while the server runs
    mine.note([layers], counted=7000, room=50_000, compactions=3)
    held = layout(asked, SHAPE).bytes_at(30, 30)
    assert counted(seen) == {
        "requests": 1, "counted_bytes": 7000, "resident_bytes": held,
        "memory_share": held / 50_000, "compactions": 3,
    }  # fmt: skip
    monkeypatch.delenv(PLACE)
    Counts().note([layers], counted=0, room=0, compactions=0)  # nobody asks
    assert counted(shared()) == {}


def test_compactions_of_a_request_are_counted_from_its_tokens() -> None:
    for trigger, many in (("stream", 11), ("prompt", 1), ("prompt+stream", 9), ("generation", 9)):
        asked = Served(Policy(slots=30, interval=4, trigger=trigger), SHAPE, torch.float16)
        cuts = pairwise([0, 7, 11, 12, 33, 44])
        assert sum(asked.compactions(a, b, 11) for a, b in cuts) == many
