"""CPU seconds of one thread: a trial with channels as a view, and the sensitivity of all layers.

    python studies/2026-11-anchors-channels/cost.py --wikitext wikitext2-test.raw \
        --sotu sotu.txt --work FOLDER

Writes records/sensitivity.json (rise in perplexity without each layer's attention, on four windows
of 512 tokens of WikiText-2's search text) and records/cost.json. Parts that are there are kept.
"""

import time

from setting import FULL, cut, keep, kept, loaded, options

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.model_analysis import layer_ppl_rise
from kvsearch.model_analysis.channel_importance import orders
from kvsearch.models.shape import decoder_layers
from kvsearch.policy.pruning import Importance
from kvsearch.policy_space import Setting, build

PAIRS, REPEATS = 6, 3


def main() -> None:
    o = options(__doc__).parse_args()
    model = loaded()
    evaluator = Evaluator(model)
    ids = cut(model, o.wikitext, "0-600000", 4, 512)
    if "rise" not in kept("sensitivity"):
        sensitivity(evaluator, ids)
    if "layers" not in kept("cost"):
        passes(evaluator, ids[:1, :32])
    if "view" not in kept("cost"):
        view(evaluator, ids)


def sensitivity(evaluator: Evaluator, ids) -> None:
    """Of all layers, and plain passes over the same tokens."""
    seconds(evaluator, FULL, ids[:1])
    plain = [seconds(evaluator, FULL, ids)]
    start = time.process_time()
    rise = layer_ppl_rise.measure(evaluator, ids)
    spent = time.process_time() - start
    plain += [seconds(evaluator, FULL, ids) for _ in range(REPEATS - 1)]
    keep("sensitivity", "rise", rise)
    keep("cost", "sensitivity", {"tokens": int(ids.size), "seconds": spent, "plain": plain})


def passes(evaluator: Evaluator, ids) -> None:
    """Layers that run, counted at their MLP, while all layers are measured on a short window."""
    layers, ran = decoder_layers(evaluator.loaded.model), 0

    def count(*_: object) -> None:
        nonlocal ran
        ran += 1

    hooks = [layer.mlp.register_forward_hook(count) for layer in layers]
    layer_ppl_rise.measure(evaluator, ids)
    for hook in hooks:
        hook.remove()
    keep("cost", "layers", {"ran": ran, "layers": len(layers)})


def view(evaluator: Evaluator, ids) -> None:
    """Trials in pairs: full cache and a window, with channels as a view and without."""
    shape = evaluator.loaded.shape
    scored = {"l2": orders(evaluator.loaded, "l2", ids, None)}
    importance = Importance(tuple(kept("sensitivity")["rise"]), scored)
    setting = Setting(shape, shape.budget_bytes(128), 512, importance=importance)
    less = {"channels": "eq1", "channels.ratio": 0.2, "channels.score": "l2"}
    spent = {}
    for name, knobs in {
        "full cache": {"evict": False},
        "window": {"sinks": 4},
        "H2O": {"rule": "h2o", "recent_window": "half", "interval": 16},
    }.items():
        pair = [build(knobs, setting), build({**knobs, **less}, setting)]
        for policy in pair:
            seconds(evaluator, policy, ids[:1])
        times = []
        for i in range(PAIRS):
            order = pair if i % 2 else pair[::-1]
            each = [seconds(evaluator, policy, ids[:1]) for policy in order]
            times.append(each if i % 2 else each[::-1])
        spent[name] = times
    keep("cost", "view", spent)


def seconds(evaluator: Evaluator, policy, ids) -> float:
    """CPU seconds of a trial."""
    start = time.process_time()
    evaluator.quality(policy, ids, resident=False)
    return round(time.process_time() - start, 3)


if __name__ == "__main__":
    main()
