"""Anchors against sinks + window at equal bytes of keys and values, untrained and trained.

    python studies/2026-11-anchors-channels/anchors.py --wikitext wikitext2-test.raw \
        --sotu sotu.txt --work FOLDER [--train NAME ...]

Untrained policies first, then those named, each trained with `kvsearch adapt` (all weights, the
same windows in the same order) and kept in FOLDER for qa.py. Rows that records/anchors.json has are
kept.
"""

from pathlib import Path

import numpy as np
from setting import DTYPE, FULL, REPORT, cut, keep, kept, loaded, measured, options

from kvsearch.commands.adapt import adapt
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Anchors, ModelShape, Policy, layout

TRAINED_ON = "0-600000"  # bytes of each text
CONTEXT, WINDOWS = 512, 12
RECIPE = dict(steps=120, accumulate=1, lr=2e-4, warmup=10)  # of a window each
NEW = dict(at="sentences", insert=True)
ANCHORED = {"ep": Anchors(), "ac": Anchors(**NEW)}


def policy(anchors: Anchors | None = None, sinks: int = 4, **more) -> Policy:
    return Policy(anchors=anchors, sinks=sinks, **more)


UNTRAINED = {
    "full": FULL,
    "ep, 4 sinks": policy(Anchors()),
    "ac, 4 sinks": policy(Anchors(**NEW)),
    "ep": policy(Anchors(), sinks=0),
    "ac": policy(Anchors(**NEW), sinks=0),
}


def window(shape: ModelShape, size: float, what: str, tokens: int) -> Policy:
    """4 sinks and a window whose bytes over a text, `bytes_mean` or `bytes_peak`, are nearest."""
    made = [policy(slots=slots) for slots in range(8, 400)]
    return min(made, key=lambda p: abs(getattr(layout(p, shape), what)(tokens) - size))


def main() -> None:
    ask = options(__doc__)
    ask.add_argument("--train", nargs="+", default=[], choices=(*ANCHORED, "window", "full"))
    ask.add_argument("--dtype", default=DTYPE, help="of the forward passes of a training")
    o = ask.parse_args()
    model = loaded()
    texts = {
        text: cut(model, getattr(o, text), part, WINDOWS, CONTEXT) for text, part in REPORT.items()
    }
    for name, one in UNTRAINED.items():
        rows(name, model, dict.fromkeys(texts, one), texts)
    windows = at_equal_bytes(model)
    for name, sized in windows.items():
        rows(name, model, sized, texts)
    for name in o.train:
        slots = [windows["window, mean bytes of ep"][text].slots for text in texts]
        under = {
            "window": policy(slots=round(float(np.mean(slots)))),
            "full": FULL,
            **{k: policy(a) for k, a in ANCHORED.items()},
        }[name]
        folder = o.work / name
        if not folder.exists():
            done = adapt(
                under.model_copy(update={"name": name}),
                text=[f"{getattr(o, text)}:{TRAINED_ON}" for text in texts],
                held_out=f"{o.wikitext}:600000-900000", windows=1, context=CONTEXT, out=folder,
                **RECIPE, lora=False, dtype=o.dtype,
            )  # fmt: skip
            as_given = name if o.dtype == DTYPE else f"{name}, {o.dtype}"
            keep("training", as_given, {"steps": done.steps, "seconds": round(done.seconds),
                                    "slots": under.slots})  # fmt: skip
        after(name, folder, texts, windows)


def at_equal_bytes(model: LoadedModel) -> dict[str, dict[str, Policy]]:
    """Windows of the bytes that anchors took on each text."""
    found = {}
    for what in ("mean", "peak"):
        for name in ANCHORED if what == "mean" else ("ep",):
            each = kept("anchors")[f"{name}, 4 sinks"]
            found[f"window, {what} bytes of {name}"] = {
                text: window(model.shape, each[text][f"bytes_{what}"], f"bytes_{what}", CONTEXT)
                for text in REPORT
            }
    return found


def after(name: str, folder: Path, texts, windows) -> None:
    """Rows of a trained model."""
    model = loaded(folder)
    if name in ANCHORED:
        own = dict.fromkeys(texts, policy(ANCHORED[name]))
        rows(f"trained {name}, 4 sinks", model, own, texts)
    if name in ("window", "full"):
        for row, sized in windows.items():
            if name == "window" or row == "window, mean bytes of ep":
                rows(f"trained {name}: {row}", model, sized, texts)
    rows(f"trained {name}: full", model, dict.fromkeys(texts, FULL), texts)


def rows(name: str, model: LoadedModel, sized: dict[str, Policy], texts) -> None:
    """One row of all texts, unless it is there."""
    if name not in kept("anchors"):
        row = {
            text: {**measured(model, sized[text], ids), "slots": sized[text].slots}
            for text, ids in texts.items()
        }
        keep("anchors", name, row)


if __name__ == "__main__":
    main()
