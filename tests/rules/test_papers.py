"""Which tokens the published methods keep, by their papers' formulas in plain NumPy.

A model of one layer: its queries, keys and values do not depend on what is evicted. The definitions
below look at everything that has happened so far; they hold no running sums.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from kvsearch.cache import PolicyCache
from kvsearch.cache.call import Call
from kvsearch.cache.head_group import HeadGroup
from kvsearch.policy import Budgets, HeadLosses, ModelShape, Policy, layout
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch.rules import Random, Segment
from tests.cache_cases import sharp

Array = NDArray[np.float64]
SHAPE = ModelShape(layers=1, kv_heads=2, head_dim=16, heads=4)
GROUP, D, T, THETA = 2, 16, 240, 1e4
SETTING = Setting(SHAPE, SHAPE.budget_bytes(104), T)


def rotation(position: int) -> Array:
    """The matrix that turns a vector to a position, `[D, D]`."""
    angle = position * THETA ** (-np.arange(D // 2) / (D // 2))
    c, s = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[c, -s], [s, c]])


TURNS = [rotation(t) for t in range(T + 512)]


@dataclass
class Past:
    """One KV head so far.

    Attributes:
        k, v: of every token, `[T, D]`; keys rotated.
        plain: queries without their rotation, `[group, T, D]`.
        held: tokens, oldest first.
        rows: per query of the group, what each token received from it; 0 where it was not held.
        saw: how many tokens each query saw.
        head: its number.
        each: the same of every query of the group, `[group, T]`.
        out: L1 norm of what each value becomes in the layer's output, mean over the group `[T]`.
        stay: how many tokens a compaction leaves.
    """

    k: Array
    v: Array
    q: Array
    plain: Array
    held: list[int] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)
    saw: list[int] = field(default_factory=list)
    each: list[Array] = field(default_factory=list)
    head: int = 0
    out: Array = field(default_factory=lambda: np.zeros(T))
    stay: int = 0

    def attend(self) -> None:
        """The next token comes, and its queries attend to what is held."""
        t = len(self.rows)
        self.held.append(t)
        e = np.exp(self.q[:, t] @ self.k[self.held].T / D**0.5)
        each = np.zeros((len(e), T))
        each[:, self.held] = e / e.sum(1, keepdims=True)
        self.each.append(each)
        self.rows.append(each.mean(0))
        self.saw.append(len(self.held))


def summed(past: Past) -> Array:
    """H2O: attention received from all queries so far."""
    return np.asarray(np.sum(past.rows, 0))


def last_row(past: Past) -> Array:
    """TOVA: attention of the last query."""
    return past.rows[-1]


def observed(past: Past) -> Array:
    """SnapKV: attention of the last 32 queries, averaged over 5 neighbours outside their window."""
    total, old = np.sum(past.rows[-32:], 0)[past.held], len(past.held) - 32
    padded = np.concatenate([np.zeros(2), total[:old], np.zeros(2)])
    out = np.zeros(T)
    out[past.held[:old]] = [padded[i : i + 5].mean() for i in range(old)]
    return out


def corrected(past: Past) -> Array:
    """XMU: attention times the keys that a query sees, over the queries that could attend."""
    now, out = len(past.rows), np.zeros(T)
    weights = (1 - 1 / 512) ** np.arange(now - 1, -1, -1)
    gave = np.array(past.saw)[:, None] * np.array(past.rows)
    for j in past.held:
        out[j] = weights[j:] @ gave[j:, j] / weights[j:].sum()
    return out


def summed_values(past: Past) -> Array:
    """VATP: H2O's score times the L1 norm of the value."""
    return np.asarray(summed(past) * np.abs(past.v).sum(1))


def small_keys(past: Past) -> Array:
    """Devoto et al.: minus the L2 norm of the key."""
    return np.asarray(-np.linalg.norm(past.k, axis=1))


def unlike(past: Past) -> Array:
    """KeyDiff: minus the cosine between a key and the mean of the normalised keys."""
    unit = past.k / np.linalg.norm(past.k, axis=1)[:, None]
    mean = unit[past.held].mean(0)
    return np.asarray(-(unit @ mean) / np.linalg.norm(mean))


def lagging(past: Past) -> Array:
    """LagKV: the place in a block of 32, by the spread of what the next block's range scales."""
    out, held = np.ones(T), past.held[4:]
    blocks = [held[i : i + 32] for i in range(0, len(held) - 31, 32)]
    for block, following in pairwise(blocks):
        spread = np.zeros(32)
        for x in (past.k, past.v):
            low, high = x[following].min(0), x[following].max(0)
            e = np.exp(((x[block] - low) / (high - low)).std(1, ddof=1))
            spread += e / e.sum()
        for place, i in enumerate(np.argsort(spread)):
            out[block[i]] = place / 32
    return out


def expected(past: Past) -> Array:
    """Expected attention of the next 512 queries, which are Gaussian, times the value's L2 norm."""
    now, out = len(past.rows), np.full(T, np.inf)
    turn = np.mean(TURNS[now : now + 512], 0)
    held, total = past.held[4:], np.zeros(len(past.held) - 4)
    for q in past.plain[:, 4:now]:
        mean, spread = turn @ q.mean(0), turn @ np.cov(q.T, bias=True) @ turn.T
        k = past.k[held]
        e = np.exp(k @ mean / D**0.5 + np.einsum("nd,de,ne->n", k, spread, k) / D / 2)
        total += e / e.sum() / GROUP
    out[held] = total * np.linalg.norm(past.v[held], axis=1)
    return out


def critical(past: Past) -> Array:
    """CriticalKV: half by SnapKV's score, the rest by its product with the norm of W_o v."""
    score, old = observed(past), past.held[:-32]
    out = (score + 32 * 1e-4) * past.out
    first = sorted(old, key=lambda j: -score[j])[: (past.stay - 32) // 2]
    out[first] += 1e6
    return np.asarray(out)


def defensive(past: Past) -> Array:
    """DefensiveKV: the largest of the last 32 queries, each smoothed, raised to the mean of all.

    It is multiplied by the norm of W_o v; before those come tokens with 90 % of the attention.
    """
    held, old, best = past.held, past.held[:-32], np.zeros(T)
    for each in past.each[-32:]:
        for row in each:
            padded = np.concatenate([np.zeros(2), row[held], np.zeros(2)])
            seen = [padded[i : i + 5].mean() * (row[j] > 0) for i, j in enumerate(held)]
            best[held] = np.maximum(best[held], seen)
    out = np.maximum(best, best[old].mean()) * past.out
    total, covered = np.sum(past.rows[-32:], 0), 0.0
    for j in sorted(old, key=lambda j: -total[j])[: past.stay - 32]:
        if covered >= 0.9 * total[old].sum():
            break
        covered += total[j]
        out[j] += 1e6
    return np.asarray(out)


def chunked(past: Past) -> Array:
    """ChunkKV: attention of the last 32 queries, added up over chunks of 10 tokens."""
    total, old, out = np.sum(past.rows[-32:], 0), past.held[:-32], np.zeros(T)
    for j in old:
        out[j] = sum(total[i] for i in old if i // 10 == j // 10)
    return out


def less_redundancy(past: Past) -> Array:
    """R-KV: a tenth of the attention of the last 8 queries, less nine of the keys' likeness."""
    held, out = past.held, np.zeros(T)
    total, old = np.sum(past.rows[-8:], 0)[held] / 8, len(held) - 8
    unit = past.k[held] / np.linalg.norm(past.k[held], axis=1)[:, None]
    near = unit @ unit.T - np.eye(len(held))
    for i, row in enumerate(near):
        similar = [j for j in range(len(held)) if j != i and row[j] > 0.5]
        row[i] = 0
        row[similar[-1:]] = 0
    e = np.exp(near.mean(0))
    pooled = [total[max(0, i - 3) : min(old, i + 4)].max() for i in range(old)]
    out[held[:old]] = 0.1 * np.array(pooled) - 0.9 * (e / e.sum())[:old]
    return out


def drawn(past: Past, seed: int = 0, layer: int = 0) -> Array:
    """A hash of seed, layer, head and token: MurmurHash3's finalizer in words of 32 bits."""

    def mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    word = np.array([0x9E3779B9 + seed], np.uint32)
    for part in (layer, past.head, np.arange(T)):
        word = mixed(word) ^ np.asarray(part, np.uint32)
    return np.asarray((mixed(word) >> np.uint32(8)) / 2**24)


# name: sinks, recent window (None: half), tokens between compactions, score, heads vote together
PAPERS: dict[str, tuple[int, int | None, int, Callable[[Past], Array], bool]] = {
    "h2o": (0, None, 1, summed, False),
    "tova": (0, 0, 1, last_row, True),
    "snapkv": (0, 32, 32, observed, False),
    "xmu-evict": (0, 1, 1, corrected, False),
    "value-attention": (4, None, 16, summed_values, False),
    "key-norm": (0, 32, 32, small_keys, False),
    "keydiff": (0, 32, 32, unlike, False),
    "lagkv": (4, 32, 32, lagging, False),
    "expected-attention": (4, 32, 32, expected, False),
    "random": (4, 32, 32, drawn, False),
    "criticalkv": (0, 32, 32, critical, False),
    "defensivekv": (0, 32, 32, defensive, False),
    "chunkkv": (0, 32, 32, chunked, True),
    "rkv": (0, 8, 32, less_redundancy, False),
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=T, hidden_size=48, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=SHAPE.heads, num_key_value_heads=SHAPE.kv_heads, head_dim=D,
        max_position_embeddings=2048, rope_theta=THETA,
    )  # fmt: skip
    made = sharp(LlamaForCausalLM(config).double(), 6)
    for p in (made.model.embed_tokens.weight, made.model.layers[0].self_attn.v_proj.weight):
        p.pow_(3)  # norms of values are not in proportion
    return made


def projected(model: LlamaForCausalLM, ids: torch.Tensor) -> list[Array]:
    """Queries `[Hq, T, D]`, keys and values `[H, T, D]` of the layer, without rotation."""
    layer = model.model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(ids))[0]
    made = [getattr(layer.self_attn, f"{name}_proj")(x) for name in "qkv"]
    return [y.unflatten(-1, (-1, D)).transpose(0, 1).numpy() for y in made]


def tokens_of(cache: PolicyCache, heads: list[Past]) -> list[list[int]]:
    """Which tokens each head holds; no two have the same value."""
    held = [v for group in cache.groups for v in group.store.read()[1][0].numpy()]
    return [
        [int(np.abs(past.v - x).sum(-1).argmin()) for x in values]
        for past, values in zip(heads, held, strict=True)
    ]


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randperm(T, generator=torch.Generator().manual_seed(1))[None]


@pytest.fixture
def heads(model: LlamaForCausalLM, ids: torch.Tensor) -> list[Past]:
    plain, k, v = projected(model, ids)
    q, k = (np.stack([[TURNS[t] @ x[t] for t in range(T)] for x in y]) for y in (plain, k))
    groups = [slice(h * GROUP, (h + 1) * GROUP) for h in range(SHAPE.kv_heads)]
    wo = model.model.layers[0].self_attn.o_proj.weight.numpy().reshape(-1, SHAPE.heads, D)
    out = [
        np.abs(np.einsum("td,chd->htc", v[h], wo[:, g])).sum(-1).mean(0)
        for h, g in enumerate(groups)
    ]
    return [Past(k[h], v[h], q[g], plain[g], head=h, out=out[h]) for h, g in enumerate(groups)]


def worst(free: list[int], score: Array, n: int) -> set[int]:
    """The `n` of the tokens `free` with the lowest score; of equals the oldest."""
    return {free[i] for i in np.argsort(score[free], kind="stable")[:n]}


@pytest.mark.parametrize("name", PAPERS)
def test_a_method_keeps_what_its_paper_says(
    name: str, model: LlamaForCausalLM, ids: torch.Tensor, heads: list[Past]
) -> None:
    sinks, recent, interval, score, together = PAPERS[name]
    policy = at(name, SETTING)
    assert policy.slots is not None
    stay = int(policy.slots) - interval
    recent = int(policy.slots) // 2 if recent is None else recent
    for past in heads:
        past.stay = stay
    cache, evictions = PolicyCache(policy, model, native=torch.float64), 0
    with torch.inference_mode():
        for t in range(T):
            model(ids[:, t : t + 1], past_key_values=cache)
            for past in heads:
                past.attend()
            excess = len(heads[0].held) - stay
            if (t + 1) % interval or excess <= 0:
                continue
            scores = [score(past) for past in heads]
            for past, own in zip(heads, scores, strict=True):
                free = past.held[sinks : len(past.held) - recent]
                gone = worst(free, np.mean(scores, 0) if together else own, excess)
                past.held = [j for j in past.held if j not in gone]
            evictions += 1
            assert tokens_of(cache, heads) == [past.held for past in heads], t
    assert evictions > 3
    assert heads[0].held != [*range(sinks), *range(T - stay + sinks, T)]  # not by age alone


def test_rkv_as_published_evicts_no_token_of_the_prompt(
    model: LlamaForCausalLM, ids: torch.Tensor, heads: list[Past]
) -> None:
    prompt, slots = 50, 70
    policy = at("rkv-generation", replace(SETTING, prompt=prompt))
    policy = policy.model_copy(update={"slots": slots})
    cache, stay, seen = PolicyCache(policy, model, native=torch.float64), prompt + slots - 32, 0
    with torch.inference_mode():
        for count in (prompt, *[1] * (T - prompt)):
            model(ids[:, seen : seen + count], past_key_values=cache)
            seen += count
            for past in heads:
                for _ in range(count):
                    past.attend()
                if (seen - prompt) % 32 == 0 and (excess := len(past.held) - stay) > 0:
                    gone = worst(past.held[prompt:-8], less_redundancy(past), excess)
                    past.held = [j for j in past.held if j not in gone]
    assert tokens_of(cache, heads) == [past.held for past in heads]
    for past in heads:
        later = past.held[prompt:]
        assert past.held[:prompt] == [*range(prompt)] and later != [*range(T - len(later), T)]


def test_duoattention_keeps_all_in_the_head_that_loses_most(
    model: LlamaForCausalLM, ids: torch.Tensor, heads: list[Past]
) -> None:
    """The other head has 4 sinks and the newest tokens."""
    lost = HeadLosses(
        heads=2, sizes=(8, 32), slots=((2, 1), (4, 2)), bits=(8, 4), keys=((0, 1), (0, 1)),
        values=((0, 1), (0, 1)), starved=8,
    )  # fmt: skip
    setting = replace(SETTING, budget_bytes=SHAPE.budget_bytes(160), heads=lost)
    policy = at("duoattention", setting)
    cache = PolicyCache(policy, model, native=torch.float64)
    with torch.inference_mode():
        for t in range(T):
            model(ids[:, t : t + 1], past_key_values=cache)
    left = 2 * 160 - (T + 1) - 1  # each head has a slot for the token to come
    want = [[*range(4), *range(T - left + 4, T)], [*range(T)]]
    assert tokens_of(cache, heads) == want


def test_adakv_keeps_the_best_of_all_heads_together(
    model: LlamaForCausalLM, ids: torch.Tensor, heads: list[Past]
) -> None:
    """SnapKV's score and no floor: which tokens, not only how many."""
    policy = at("snapkv", SETTING).model_copy(update={"budgets": Budgets(kind="adakv", floor=0)})
    assert policy.slots is not None
    stay, sizes = int(policy.slots) - 32, set()
    cache = PolicyCache(policy, model, native=torch.float64)
    with torch.inference_mode():
        for t in range(T):
            model(ids[:, t : t + 1], past_key_values=cache)
            for past in heads:
                past.attend()
            excess = sum(len(past.held) - stay for past in heads)
            if (t + 1) % 32 or excess <= 0:
                continue
            scores = [observed(past) for past in heads]
            free = [(s[j], h, j) for h, s in enumerate(scores) for j in heads[h].held[:-32]]
            gone = {(h, j) for _, h, j in sorted(free)[:excess]}
            for h, past in enumerate(heads):
                past.held = [j for j in past.held if (h, j) not in gone]
            sizes.add(len(heads[0].held))
            assert tokens_of(cache, heads) == [past.held for past in heads], t
    assert len(sizes) > 2


def test_pyramidkv_has_its_codes_slots_but_for_the_mean() -> None:
    """Behind the observation window: from 2 - 1/20 of the mean down to 1/20, in even steps."""
    shape = ModelShape(layers=30, kv_heads=3, head_dim=64, heads=9)
    policy = at("pyramidkv", Setting(shape, shape.budget_bytes(256), 2048))
    assert policy.slots is not None
    mean = policy.slots - 32 - 32  # less what comes between compactions, and the window
    published = np.linspace(mean * (2 - 1 / 20), mean / 20, 30)
    built = [(part.target or 0) - 32 for part in layout(policy, shape).layers]
    assert sum(built) == round(mean * 30)
    assert np.abs(np.array(built) - published).max() < 1


def test_every_head_of_every_layer_draws_random_scores_of_its_own() -> None:
    """Whichever heads share a store; the slots that stay are a uniform sample of all tokens."""
    shape, sets = ModelShape(layers=2, kv_heads=3, head_dim=16, heads=3), list[set[int]]()
    weights = ((1.0, 2.0, 2.0), (1.0, 1.0, 1.0))
    policy = Policy(
        slots=60, rule=Random(seed=5), budgets=Budgets(kind="sensitivity", weights=weights)
    )
    for part in layout(policy, shape).layers:
        group = HeadGroup(part, {}, packed=False, native=torch.float16)
        group.begin(Call(*3 * [torch.zeros(1, len(part.heads), 1, 16)], 1.0, None), 0)
        assert group.scorer is not None
        for seen in range(0, T, 40):
            group.scorer.observe(Segment(seen, 40))
        for head, ranks in zip(part.heads, group.scorer.ranks(None)[0].numpy(), strict=True):  # type: ignore[arg-type]
            none = np.zeros((0, 0))
            want = drawn(Past(none, none, none, none, head=head), 5, part.layer)
            assert np.array_equal(ranks, want.astype(np.float32))
            sets.append({int(i) for i in np.argsort(want)[-60:]})
    common = [len(a & b) for i, a in enumerate(sets) for b in sets[:i]]
    assert len(sets) == 6 and min(common) > 3 and max(common) < 30  # 15 expected
    old = sum(i < T // 2 for kept in sets for i in kept)
    assert abs(old - 180) < 30
