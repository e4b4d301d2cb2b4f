"""Other ways to measure what a KV head loses, as the literature has them.

Each is read with the same estimate (`kvsearch.model_analysis.price_by_gradient`),
at the tokens that return; but for `direct`, one pass a head, in which that head alone keeps few
slots.
"""

import random
from dataclasses import replace

import numpy as np

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.model_analysis import head_losses
from kvsearch.model_analysis.price_by_gradient import SINKS, price
from kvsearch.policy import Budgets, HeadLosses, Policy, Quantizer

TOKENS = 900  # as many as a text of `kvsearch heads` has
WORDS = (
    "amber anchor basket bishop branch bridge candle carbon castle cherry copper desert dragon "
    "engine falcon forest garden ginger hammer harbor island jacket jungle kettle ladder lemon "
    "magnet marble meadow mirror needle orchid oyster pepper pillow planet pocket rabbit ribbon "
    "saddle silver spider temple ticket turtle valley velvet violin walnut window winter zipper"
).split()
NAMES = "Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Karen Louis".split()
PLACES = "museum station library market school theatre bakery airport harbour tower".split()


def on_text(evaluator: Evaluator, ids: np.ndarray, first: int = 0) -> HeadLosses:
    """Losses estimated on any text; the loss counts from `first` on."""
    T = len(ids)
    if first:
        return head_losses.measure(evaluator, [head_losses.Recall(ids, first)])
    sizes = sorted({max(SINKS + 4, int(share * T)) for share in head_losses.SIZES})
    found = price(evaluator, ids, sizes=sizes, quantizer=Quantizer(group=None, rotate=True))
    rows = [
        tuple(map(tuple, x.reshape(-1, x.shape[-1]).tolist()))
        for x in (found.slots, found.keys, found.values)
    ]
    starved = max(SINKS + 4, int(head_losses.STARVED * T))
    heads_of = evaluator.loaded.shape.kv_heads
    return HeadLosses(heads_of, found.sizes, rows[0], found.bits, rows[1], rows[2], starved)


def twice(evaluator: Evaluator, prose: np.ndarray) -> HeadLosses:
    """On a text that comes twice."""
    return on_text(evaluator, np.tile(prose[: TOKENS // 2], 2), TOKENS // 2)


def random_twice(evaluator: Evaluator, prose: np.ndarray) -> HeadLosses:
    """On random tokens that come twice, as RazorAttention (arXiv:2407.15891) finds its heads."""
    size = len(evaluator.loaded.tokenizer)
    ids = np.random.default_rng(0).integers(100, size - 100, TOKENS // 2)
    return on_text(evaluator, np.tile(ids, 2), TOKENS // 2)


def passkeys(evaluator: Evaluator, prose: np.ndarray) -> HeadLosses:
    """On ten passkeys of eight words in prose, all asked for at the end (DuoAttention's data)."""
    rng = random.Random(0)
    order = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
    keys = {n: " ".join(rng.choices(WORDS, k=8)) for n in order}
    said = [f"\nRemember this: the {n} passkey is {key}.\n" for n, key in keys.items()]
    end = "".join(f"\nThe {n} passkey is {key}." for n, key in keys.items())
    return _returning(evaluator, prose, said, end)


def reasoned(evaluator: Evaluator, prose: np.ndarray) -> HeadLosses:
    """On needles of which an answer takes two (HeadKV, arXiv:2410.19258): who lives where."""
    rng = random.Random(0)
    where = dict(zip(NAMES, rng.choices(PLACES, k=len(NAMES)), strict=True))
    number = {place: rng.randrange(10**3, 10**4) for place in PLACES}
    said = [f"\n{name} lives next to the {place}.\n" for name, place in where.items()]
    said += [f"\nThe number of the {place} is {n}.\n" for place, n in number.items()]
    rng.shuffle(said)
    end = "".join(
        f"\nQuestion: what is the number of the place that {name} lives next to? Answer: {name} "
        f"lives next to the {place}, and the number of the {place} is {number[place]}."
        for name, place in where.items()
    )
    return _returning(evaluator, prose, said, end)


def _returning(evaluator: Evaluator, prose: np.ndarray, said: list[str], end: str) -> HeadLosses:
    """On prose with sentences spread over it, and what returns at the end."""
    tokenizer = evaluator.loaded.tokenizer
    parts = [tokenizer(x, add_special_tokens=False).input_ids for x in (*said, end)]
    room = max(TOKENS - sum(map(len, parts)), 20 * len(said)) // len(said)
    ids: list[int] = []
    for i, sentence in enumerate(parts[:-1]):
        ids += [*prose[i * room : (i + 1) * room].tolist(), *sentence]
    return on_text(evaluator, np.array([*ids, *parts[-1]], dtype=np.int64), len(ids))


def direct(evaluator: Evaluator, prose: np.ndarray, first: int = 1) -> HeadLosses:
    """One pass a head: what tokens from `first` on lose when it alone keeps 1/30 of the text."""
    shape, tokens = evaluator.loaded.shape, len(prose)
    heads, window = shape.layers * shape.kv_heads, prose[None]
    few = max(SINKS + 4, int(head_losses.STARVED * tokens))

    def nll(policy: Policy) -> float:
        return float(evaluator.quality(policy, window, resident=False).nll[:, first - 1 :].mean())

    full, lost = nll(Policy(name="full")), []
    for head in range(heads):
        weights = np.full(heads, float(tokens))
        weights[head] = few
        rows = tuple(map(tuple, weights.reshape(shape.layers, -1).tolist()))
        slots = -(-(tokens * (heads - 1) + few) // heads)
        policy = Policy(
            slots=slots,
            sinks=SINKS,
            budgets=Budgets(kind="sensitivity", weights=rows, exponent=1.0),
        )
        lost.append(nll(policy) - full)
    flat = on_text(evaluator, prose)  # of bits
    return HeadLosses(
        flat.heads, (few,), tuple((x,) for x in lost), flat.bits, flat.keys, flat.values, few
    )


def returning_facts(evaluator: Evaluator, prose: np.ndarray) -> HeadLosses:
    """One pass a head on the texts of `kvsearch heads`, on the tokens that return."""
    found = [
        direct(evaluator, text.ids, text.first)
        for text in head_losses.recall_texts(evaluator.loaded)
    ]
    means = np.mean([x.slots for x in found], axis=0)
    return replace(found[0], slots=tuple((float(x),) for (x,) in means))


KINDS = {
    "text, 512 tokens": lambda e, prose: on_text(e, prose[:512]),
    "text, 1024 tokens": lambda e, prose: on_text(e, prose[:1024]),
    "text, 512 tokens, direct passes": lambda e, prose: direct(e, prose[:512]),
    "facts that return, direct passes": returning_facts,
    "text twice, 450 tokens": twice,
    "random tokens twice (RazorAttention)": random_twice,
    "passkeys (DuoAttention)": passkeys,
    "needles with reasoning (HeadKV)": reasoned,
}
