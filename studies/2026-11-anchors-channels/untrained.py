"""What anchors cost a model not trained with them: SmolLM2-135M on WikiText-2's report text.

    python studies/2026-11-anchors-channels/untrained.py --wikitext wikitext2-test.raw

Four windows of 512 tokens, every token scored from the second on. In float32. Writes untrained.csv.
"""

import argparse
import csv
from pathlib import Path

import kvsearch
from kvsearch.policy import Anchors, Policy

SINKS = dict(sinks=4)
POLICIES = {
    "full": Policy(),
    "window of 128 slots, 4 sinks": Policy(slots=128, **SINKS),
    "anllm-ep": Policy(anchors=Anchors()),
    "anllm-ep, anchors see each other": Policy(anchors=Anchors(isolate=False)),
    "anllm-ep, 4 sinks": Policy(anchors=Anchors(), **SINKS),
    "anllm-ep, 4 sinks, anchors see each other": Policy(anchors=Anchors(isolate=False), **SINKS),
    "anllm-ac, 4 sinks, embedding copied": Policy(
        anchors=Anchors(at="sentences", insert=True), **SINKS
    ),
    "anllm-ac, 4 sinks, mean embedding": Policy(
        anchors=Anchors(at="sentences", insert=True, embedding="mean"), **SINKS
    ),
    "every 32nd token, 4 sinks": Policy(anchors=Anchors(at=32), **SINKS),
    "anllm-ep, 4 sinks, 32 recent tokens, 128 slots": Policy(
        anchors=Anchors(), slots=128, recent_window=32, **SINKS
    ),
}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--wikitext", type=Path, required=True)
    text = f"{ask.parse_args().wikitext}:900000-1290547"
    named = [p.model_copy(update={"name": name}) for name, p in POLICIES.items()]
    loaded = kvsearch.load_model()
    found = kvsearch.evaluate(named, loaded, text, context=512, windows=4, score_from=1)
    slot = loaded.shape.budget_bytes(1)
    rows = [
        {
            "policy": r.policy, "n": found.workloads[0].scored, "ppl": f"{r.ppl:.1f}",
            "dnll_full": f"{r.dnll_full.mean:+.4f}", "lo": f"{r.dnll_full.lo:+.4f}",
            "hi": f"{r.dnll_full.hi:+.4f}", "mean_slots": f"{r.bytes_mean / slot:.1f}",
        }
        for r in found.rows
    ]  # fmt: skip
    with Path(__file__).with_name("untrained.csv").open("w", newline="") as f:
        out = csv.DictWriter(f, rows[0].keys(), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


if __name__ == "__main__":
    main()
