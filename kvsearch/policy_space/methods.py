"""The published methods, and their textbook combinations, as named points of the space.

A new method is one line here, or a line of its rule (`kvsearch.rules`). `single` marks published
methods that use one axis (eviction or bits); `combined` marks combinations made by hand, which a
search must beat to be worth its time; `earlier` marks what we measured best.
"""

from dataclasses import dataclass
from typing import Literal

from kvsearch.errors import PolicyError, nearest, quoted
from kvsearch.policy import Policy
from kvsearch.policy_space.axes import Value
from kvsearch.policy_space.sizing import build
from kvsearch.policy_space.to_policy import Setting
from kvsearch.rules import RULES


@dataclass(frozen=True)
class Method:
    """A named point.

    Attributes:
        knobs: what differs from the defaults.
        kind: `full`, `single`, `combined` or `earlier`.
        about: one line, with the paper.
        baseline: whether runs compare with it by default.
    """

    knobs: dict[str, Value]
    kind: Literal["full", "single", "combined", "earlier"]
    about: str
    baseline: bool = True


# Never the best of their kind in `studies/2026-11-first-command` and `studies/2026-11-outcome`: a
# run compares with them where all methods are asked for.
SELDOM = ("lacache", "pyramidkv", "xmu-evict", "h2o+int4", "h2o+k4v2")

_LA: dict[str, Value] = dict(sinks=4, recent_window="layers", positions="cache")
_SNAP: dict[str, Value] = dict(rule="snapkv", recent_window=32, interval=32)
_KEEP: dict[str, Value] = dict(evict=False, interval=64)
_XMU: dict[str, Value] = dict(_KEEP, rule="xmu-forget", recent_window=1)
_BY_HAND: dict[str, Value] = dict(interval=64, tiers="k4v4")

_DESIGNED: dict[str, Value] = dict(
    rule="xmu", interval=16, tiers="k4v4", sinks=4, rotate=True, levels="lloyd", fp16_sinks=True
)

_KVZIP: dict[str, Value] = dict(rule="kvzip", sinks=4, budgets="global", trigger="prompt")
_KVZIP_LOW: dict[str, Value] = dict(_KVZIP, tiers="k5v4", rotate=True, levels="lloyd", group="head")

_KVPRUNER: list[tuple[str, str, dict[str, Value], str]] = [
    ("01", "01", {}, "whole layers with the least rise in perplexity"),
    ("l1", "eq1", {"channels.score": "l1"}, "fewer in sensitive layers, by L1"),
    ("l2", "eq1", {"channels.score": "l2"}, "fewer in sensitive layers, by L2"),
    ("taylor", "eq1", {"channels.score": "taylor"}, "fewer in sensitive layers, by Taylor"),
]

_TURBO: dict[str, Value] = dict(
    levels="turboquant-k", value_levels="turboquant-v", rotate=True, value_block=1
)
_VLLM: dict[str, dict[str, Value]] = {
    "int8_per_token_head": dict(tiers="k8v8", levels="vllm-int"),
    "fp8_per_token_head": dict(tiers="k8v8", levels="vllm-fp8"),
    "int4_per_token_head": dict(tiers="k4v4", levels="vllm-int"),
    "turboquant_k8v4": dict(tiers="k8v4", levels="e4m3", value_levels="turboquant-v"),
    "turboquant_4bit_nc": dict(_TURBO, tiers="k4v4"),
    "turboquant_k3v4_nc": dict(_TURBO, tiers="k3v4"),
    "turboquant_3bit_nc": dict(_TURBO, tiers="k3v3"),
    "nvfp4": dict(tiers="k4v4", levels="nvfp4", group=32),
}

METHODS: dict[str, Method] = {
    "full": Method(dict(evict=False), "full", "every token in 16 bits"),
    "window": Method({}, "single", "newest tokens only", baseline=False),
    "streamingllm": Method(
        dict(sinks=4, positions="cache"), "single", "sinks + window (arXiv:2309.17453)"
    ),
    "lacache": Method(
        dict(_LA, ladder="quarter"), "single", "ladder (arXiv:2507.14204), its code's order"
    ),
    "lacache-contiguous": Method(
        dict(_LA, ladder="quarter-contiguous"),
        "single",
        "ladder, the order of its text",
        baseline=False,
    ),
    "lacache-half": Method(
        dict(_LA, ladder="half"), "single", "ladder, its command line's default", baseline=False
    ),
    "h2o": Method(
        dict(rule="h2o", recent_window="half"),
        "single",
        "heavy hitters + recent window (arXiv:2306.14048)",
    ),
    "h2o-cache": Method(
        dict(rule="h2o", recent_window="half", positions="cache"),
        "single",
        "h2o with re-indexed positions",
        baseline=False,
    ),
    "tova": Method(dict(rule="tova"), "single", "last row's attention (arXiv:2401.06104)"),
    "snapkv": Method(_SNAP, "single", "observation window, every 32 tokens (arXiv:2404.14469)"),
    "snapkv-prompt": Method(
        dict(_SNAP, trigger="prompt"),
        "single",
        "snapkv as published: once, after the prompt",
        baseline=False,
    ),
    "pyramidkv": Method(
        dict(_SNAP, budgets="pyramid"),
        "single",
        "snapkv with pyramid budgets (arXiv:2406.02069)",
    ),
    "pyramidkv-prompt": Method(
        dict(_SNAP, budgets="pyramid", trigger="prompt"),
        "single",
        "pyramidkv as published: once, after the prompt",
        baseline=False,
    ),
    "duoattention": Method(
        dict(sinks=4, recent_window=16, budgets="full-heads"),
        "single",
        "heads that retrieve keep all, others sinks + window (arXiv:2410.10819)",
        baseline=False,
    ),
    "xmu-evict": Method(
        dict(rule="xmu-forget", recent_window=1),
        "single",
        "XMU without tiers: corrected, forgetting",
    ),
    "xmu-evict-nowindow": Method(
        dict(rule="xmu", recent_window=1),
        "single",
        "XMU without tiers, nothing forgotten",
        baseline=False,
    ),
    "xmu": Method(
        dict(rule="xmu-forget", recent_window=1, interval=64, tiers="xmu-0.4"),
        "combined",
        "XMU within a budget: corrected, forgetting, 60 % in 8 bits, 40 % in 4",
    ),
    "xmu-uncorrected": Method(
        dict(rule="h2o", recent_window=1, interval=64, tiers="xmu-0.4"),
        "combined",
        "xmu without correction and window",
        baseline=False,
    ),
    "xmu-nowindow": Method(
        dict(rule="xmu", recent_window=1, interval=64, tiers="xmu-0.4"),
        "combined",
        "xmu, correction only",
        baseline=False,
    ),
    "xmu-nocorrection": Method(
        dict(rule="forget", recent_window=1, interval=64, tiers="xmu-0.4"),
        "combined",
        "xmu, window only",
        baseline=False,
    ),
    **{
        f"xmu-{row}": Method(
            dict(_XMU, tiers=f"xmu-{row}"),
            "single",
            f"XMU's Table 1, ratio {row}, nothing evicted",
            baseline=False,
        )
        for row in ("0.1", "0.2", "0.4", "0.6-printed", "0.6-fixed", "0.8")
    },
    **{
        f"int{bits}": Method(
            dict(_KEEP, tiers=tiers),
            "single",
            f"everything in {bits} bits, nothing evicted",
            baseline=False,
        )
        for bits, tiers in ((8, "k8v8"), (4, "k4v4"), (3, "k3v3"), (2, "k2v2"), (1, "k1v1"))
    },
    **{
        name: Method(dict(knobs), "single", about, baseline=False)
        for rule in RULES.values()
        for name, (knobs, about) in rule.methods.items()
    },
    **{
        f"kivi{bits}": Method(
            dict(
                evict=False,
                interval=32,
                recent_window=128,
                tiers=tiers,
                group=32,
                along="tokens",
                fp16_recent=True,
            ),
            "single",
            f"KIVI in {bits} bits: keys per channel, values per token, 128 recent in 16 bits "
            "(arXiv:2402.02750)",
            baseline=False,
        )
        for bits, tiers in ((4, "k4v4"), (2, "k2v2"))
    },
    **{
        f"fp8-{name}": Method(
            dict(evict=False, tiers="k8v8", levels=name),
            "single",
            f"vLLM's fp8_{name} with scales of 1: everything in 8-bit floating point",
            baseline=False,
        )
        for name in ("e4m3", "e5m2")
    },
    **{
        name: Method(
            {"evict": False, "group": "head", **knobs},
            "single",
            f"vLLM's --kv-cache-dtype {name}, in all layers",
            baseline=False,
        )
        for name, knobs in _VLLM.items()
    },
    **{
        name: Method(
            dict(evict=False, tiers=tiers, levels=levels, group=32),
            "single",
            f"llama.cpp's {words}, without its rotation",
            baseline=False,
        )
        for name, tiers, levels, words in (
            ("q8_0", "k8v8", "ggml-0", "q8_0"),
            ("q5_1", "k5v5", "ggml-1", "q5_1"),
            ("q5_0", "k5v5", "ggml-0", "q5_0"),
            ("q4_1", "k4v4", "ggml-1", "q4_1"),
            ("q4_0", "k4v4", "ggml-0", "q4_0"),
            ("q8_0-q4_0", "k8v4", "ggml-0", "q8_0 for keys and q4_0 for values"),
        )
    },
    "q4_0-rotated": Method(
        dict(evict=False, tiers="k4v4", levels="ggml-0", group=32, rotate=True, value_block=64),
        "single",
        "llama.cpp's q4_0 with its rotation, of values in blocks of 64",
        baseline=False,
    ),
    **{
        f"kvpruner-{name}-{percent}": Method(
            {"evict": False, "channels": law, "channels.ratio": percent / 100, **score},
            "single",
            f"KVPruner, {percent} % of the channels: {about} (arXiv:2409.11057)",
            baseline=False,
        )
        for name, law, score, about in _KVPRUNER
        for percent in (20, 50)
    },
    "anllm-ep": Method(
        dict(evict=False, anchors="ep"),
        "single",
        "AnLLM: full stops stand for their sentences, untrained (arXiv:2402.07616)",
        baseline=False,
    ),
    "anllm-ac": Method(
        dict(evict=False, anchors="ac"),
        "single",
        "AnLLM: new tokens between sentences stand for those, untrained (arXiv:2402.07616)",
        baseline=False,
    ),
    "attention-matching": Method(
        dict(_KVZIP, refit="values+bias"),
        "single",
        "slots of the most attention, biases and values fitted to the prompt (arXiv:2602.16284)",
        baseline=False,
    ),
    "window+int4": Method(dict(_BY_HAND, sinks=4), "combined", "sinks + window in 4 bits"),
    "h2o+int4": Method(
        dict(_BY_HAND, rule="h2o", recent_window=64), "combined", "H2O in 4 bits, textbook settings"
    ),
    "xmu+int4": Method(
        dict(_BY_HAND, rule="xmu", recent_window=64), "combined", "XMU's score in 4 bits"
    ),
    "h2o+k4v2": Method(
        dict(_BY_HAND, rule="h2o", recent_window=64, tiers="k4v2"),
        "combined",
        "H2O with 4-bit keys and 2-bit values",
    ),
    "h2o+int4-fine": Method(
        dict(rule="h2o", recent_window=128, interval=16, tiers="k4v4", group=32, sinks=4),
        "combined",
        "H2O in 4 bits, tuned by hand: short interval, small groups",
    ),
    "kvzip+k5v4": Method(
        _KVZIP_LOW, "combined", "KVzip with rotated 5-bit keys and 4-bit values", baseline=False
    ),
    "kvzip+k5v4+refit": Method(
        dict(_KVZIP_LOW, refit="values"),
        "combined",
        "KVzip with rotated 5-bit keys and 4-bit values, these fitted to the prompt",
        baseline=False,
    ),
    "kvzip+k5v4+refit+bias": Method(
        dict(_KVZIP_LOW, refit="values+bias"),
        "combined",
        "the same, biases of its slots in their keys",
        baseline=False,
    ),
    "rotated+sensitivity": Method(
        dict(_DESIGNED, recent_window=128, budgets="sensitivity"),
        "earlier",
        "a designed combination: rotated 4 bits, fp16 sinks, measured budgets per layer",
        baseline=False,
    ),
    "rotated+heads": Method(
        dict(_DESIGNED, tiers="k5v4", recent_window=64, budgets="heads"),
        "earlier",
        "a designed combination: rotated 5-bit keys and 4-bit values, fp16 sinks, measured budgets "
        "per KV head",
        baseline=False,
    ),
}


def find(name: str) -> Method:
    """The method called `name`; a misspelt name raises a `PolicyError` with the nearest ones."""
    if name not in METHODS:
        raise PolicyError(f"unknown method {quoted(name)}{nearest(name, METHODS)}")
    return METHODS[name]


def at(name: str, setting: Setting) -> Policy:
    """The method called `name`, sized to a setting.

    Raises:
        PolicyError: unknown name, or a budget too small for it.
    """
    return build(find(name).knobs, setting, name=name)
