"""KVPruner's Tables III and IV on SmolLM2-135M: what is left of it before and after LoRA.

    python studies/2026-11-anchors-channels/channels.py --wikitext wikitext2-test.raw \
        --sotu sotu.txt --work FOLDER [--only NAME ...] [--before]

Needs records/sensitivity.json of cost.py. Rows that records/channels.json has are kept.
"""

import shutil

from setting import DTYPE, FULL, REPORT, cut, keep, kept, loaded, measured, options

from kvsearch.commands.adapt import adapt
from kvsearch.model_analysis.channel_importance import orders
from kvsearch.models import load_model
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy, layout
from kvsearch.policy.pruning import SCORES, Importance
from kvsearch.policy_space import Setting, build

SEARCH, SELECT = "0-600000", "600000-900000"  # bytes of WikiText-2: trained on; never reported
CONTEXT, WINDOWS = 128, 12  # tokens of a window, as in the baseline of the paper
RECIPE = dict(steps=24, batch=2, accumulate=1, lr=1e-3, warmup=2)  # of 2 windows each
LAWS = {"ppl": ("eq1", "01"), "uniform": ("uniform", "01-even")}  # of channels, of whole layers


def policies(importance: Importance, shape) -> dict[str, Policy]:
    """Every cell of the tables, the paper's own method first."""
    setting, found = Setting(shape, None, 512, importance=importance), {"full": FULL}
    for percent in (20, 50):
        for spread, (some, whole) in LAWS.items():
            for score in ("01", *SCORES):
                knobs = {
                    "evict": False,
                    "channels": whole if score == "01" else some,
                    "channels.ratio": percent / 100,
                    **({} if score == "01" else {"channels.score": score}),
                }
                name = f"{spread}-{score}-{percent}"
                found[name] = build(knobs, setting, name=name)
    return found


def main() -> None:
    ask = options(__doc__)
    ask.add_argument("--only", nargs="+", default=[])
    ask.add_argument("--before", action="store_true", help="without LoRA")
    o = ask.parse_args()
    model, exact = loaded(), load_model()
    calibration = cut(model, o.wikitext, SEARCH, 4, 512)
    importance = Importance(
        tuple(kept("sensitivity")["rise"]),
        {score: orders(exact, score, calibration, exact_step) for score in SCORES},
    )
    texts = {
        text: cut(model, getattr(o, text), part, WINDOWS, CONTEXT) for text, part in REPORT.items()
    }
    made = policies(importance, exact.shape)
    for name in o.only or made:
        policy = made[name]
        row = kept("channels").get(name) or {
            "token_bytes": layout(policy, exact.shape).bytes_at(4096) // 4096,
            "layers_gone": sum(policy.channels.removed(i) for i in range(exact.shape.layers)),
        }
        if "before" not in row:
            row["before"] = sums(model, policy, texts)
            keep("channels", name, row)
        if "after" in row or o.before:
            continue
        folder = o.work / f"lora-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        done = adapt(
            policy, text=f"{o.wikitext}:{SEARCH}", held_out=f"{o.wikitext}:{SELECT}",
            context=CONTEXT, windows=1, out=folder, **RECIPE, lora=True, dtype=DTYPE,
        )  # fmt: skip
        trained = loaded(folder)
        row["after"] = sums(trained, FULL, texts)
        row |= {"steps": done.steps, "seconds": round(done.seconds)}
        keep("channels", name, row)
        shutil.rmtree(folder)


def sums(on: LoadedModel, policy: Policy, texts) -> dict[str, list[float]]:
    """NLL summed over each window."""
    return {text: measured(on, policy, ids, batch=12)["sums"] for text, ids in texts.items()}


class exact_step:
    """Progress of a measurement, not shown."""

    def __init__(self, title: str, total: float) -> None:
        pass

    def __enter__(self) -> "exact_step":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    main()
