"""The summary of a run, made by hand, for tests of what reports show."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from kvsearch.policy import Budgets, Ladder, ModelShape, Policy, Quantizer, Tier, layout
from kvsearch.results.pareto import front
from kvsearch.results.records import Interval, Recheck, Row, Throughput, Trial
from kvsearch.results.study import Study
from kvsearch.results.summary import Summary
from kvsearch.rules import Attention

SHAPE = ModelShape(layers=30, kv_heads=3, head_dim=64, heads=9)
IMAGES = {
    "pareto": "wide",
    "pareto_narrow": "narrow",
    "slots": None,
    "needles": None,
    "tradeoff": None,
}
CONTEXT, TOKENS, FULL_NLL = 2048, 14_336, 2.79
K4 = (Tier(key_bits=4, value_bits=4),)
HALVES = (
    Tier(share=0.6, key_bits=4, value_bits=4), Tier(share=0.4, key_bits=2, value_bits=2),
)  # fmt: skip
H2O, XMU = Attention(), Attention(alpha=1, beta=1, horizon=64)
SCORED: dict[str, Any] = dict(interval=16, sinks=4, recent_window=128, tiers=K4)
FINE: dict[str, Any] = dict(
    **SCORED, rule=XMU, quantizer=Quantizer(group=64, rotate=True, levels="lloyd", fp16_sinks=True),
    budgets=Budgets(kind="sensitivity", weights=tuple(1.6 + math.sin(i) / 2 for i in range(30))),
)  # fmt: skip
# name, kind, policy and dNLL to the full cache on the report text
CANDIDATES: list[tuple[str, str, Policy, float]] = [
    ("full", "full", Policy(), 0.0),
    ("window 256", "method", Policy(slots=256), 1.9),
    ("streaming-llm 256", "method", Policy(slots=256, sinks=4), 0.338),
    ("lacache 256", "method", Policy(
        slots=256, sinks=4, recent_window=30, positions="cache",
        ladder=Ladder(span=0.25, overlap=0.5),
    ), 0.294),
    ("h2o 240", "method", Policy(slots=240, interval=16, recent_window=128, rule=H2O), 0.142),
    ("tova 256", "method", Policy(
        slots=256, rule=Attention(horizon=1, share="layer"), positions="cache"
    ), 0.171),
    ("xmu <60/40>", "method", Policy(interval=64, recent_window=1, rule=XMU, tiers=HALVES), 1.26),
    ("streaming-llm + K4V4", "combined", Policy(slots=800, interval=16, sinks=4, tiers=K4), 0.118),
    ("h2o + K4V4", "combined", Policy(
        slots=700, rule=H2O, quantizer=Quantizer(group=32), **SCORED
    ), 0.067),
    ("h2o + K4V4 half", "combined", Policy(slots=380, rule=H2O, **SCORED), 0.109),
    ("trial 31", "searched", Policy(slots=690, **FINE), 0.041),
    ("trial 17", "searched", Policy(slots=420, **FINE), 0.066),
    ("trial 9", "searched", Policy(
        slots=400, interval=8, sinks=4, recent_window=64, tiers=K4, quantizer=FINE["quantizer"],
        ladder=Ladder(span=0.5, overlap=0.2, order="contiguous"),
    ), 0.187),
]  # fmt: skip
POLICIES = {name: policy for name, _, policy, _ in CANDIDATES}


def asked(of: Summary, part: str, **changed: Any) -> Summary:
    """The summary of a run with other settings, or another text or model."""
    inner = getattr(of.study, part).model_copy(update=changed)
    return replace(of, study=of.study.model_copy(update={part: inner}))


def make_summary(*, recommended: str | None = "trial 31", sure: bool = True) -> Summary:
    """A summary; `sure=False` widens every interval across zero."""
    peaks = {n: layout(p, SHAPE).bytes_peak(CONTEXT) for n, p in POLICIES.items()}
    budget = SHAPE.budget_bytes(256)
    kept = {CANDIDATES[i][0] for i in front([(peaks[n], d) for n, _, _, d in CANDIDATES])}
    rows = []
    for name, kind, policy, d in CANDIDATES:
        half = (0.006 + 0.04 * d) if sure else 1.1 * d + 0.02
        peak, nll, limit = peaks[name], FULL_NLL + d, max(budget, peaks[name])
        loss, best = min(
            (e, n) for n, k, _, e in CANDIDATES if k == "method" and n != name and peaks[n] <= limit
        )
        wide = 0.011 if sure else abs(d - loss) + 0.01
        decode = Throughput(
            412.7, 301.2, 1.37, 1.31, 1.42, 12, 4096, "NVIDIA H200", peak, peaks["full"]
        )  # fmt: skip
        rows.append(Row(
            name=name, kind=kind, policy=policy, fingerprint=policy.fingerprint(), tokens=TOKENS,
            nll=nll, nll_se=0.031, blocks=8, ppl=math.exp(nll),
            dnll_full=Interval(d, d - half, d + half) if d else Interval(0.0, 0.0, 0.0),
            dnll_best=Interval(d - loss, d - loss - wide, d - loss + wide), best=best,
            search_dnll=d - 0.008 if kind == "searched" else None,
            bytes_peak=peak, bytes_mean=0.93 * peak, bytes_resident=peak,
            slots16=peak / SHAPE.slot_bytes / SHAPE.layers, on_front=name in kept,
            within_budget=peak <= budget, seconds=41.5, impls={"attention": "sdpa"},
            windows=8, decode=decode if name == "trial 31" else None,
        ))  # fmt: skip
    rng = np.random.default_rng(0)
    states = ["complete"] * 33 + ["rejected"] * 3 + ["duplicate"] * 2 + ["failed", "pruned"]
    trials = []
    for i, state in enumerate(states):
        slots = int(90 * 2 ** rng.uniform(0, 3.6))
        policy = Policy(slots=slots + 40, rule=H2O, **SCORED | {"recent_window": 16})
        d, done = 25 / slots + rng.gamma(1.5, 0.12), state == "complete"
        trials.append(Trial(
            number=i, name=f"trial {i}", kind="combined" if i < 4 else "searched", state=state,
            policy=policy, fingerprint=policy.fingerprint(), nll=2.9 + d if done else None,
            dnll=d if done else None, seconds=11.0,
            bytes_peak=layout(policy, SHAPE).bytes_peak(CONTEXT) if done else None,
            error=None if done else "field slots: too few",
        ))  # fmt: skip
    other = Interval(-0.019, -0.031, -0.007) if sure else Interval(-0.01, -0.03, 0.01)
    checks = [
        Recheck("sotu/report", "trial 31", "h2o + K4V4", other, 8192),
        Recheck("sotu/report", "trial 31", "h2o 240", Interval(-0.07, -0.15, 0.004), 8192),
    ]
    return Summary(
        study=Study.model_validate(dict(
            model={
                "name": "SmolLM2-135M-Instruct", "revision": "Q4_1", "digest": "9f2b7c41d0aa",
                "shape": {"layers": 30, "kv_heads": 3, "head_dim": 64, "heads": 9},
            },
            text={
                part: {"name": f"wikitext2/{part}", "tokens": n, "token_sha256": f"{n:x}4f3e42"}
                for part, n in (("search", 20_480), ("select", 16_384), ("report", 17_408))
            },
            settings={
                "budget_slots": 256, "budget_bytes": budget, "context": CONTEXT,
                "report_windows": 8, "score_from": 256, "seed": 7, "space": "default",
            },
            versions={"torch": "2.11.0"},
        )),
        rows=sorted(rows, key=lambda r: r.nll), trials=trials,
        recommended=recommended, counts={s: states.count(s) for s in dict.fromkeys(states)},
        rechecks=checks, seconds=1912.0,
    )  # fmt: skip
