"""What policies at 1/6 of 1536 tokens lose of six texts, and of facts hidden in them.

    python measure.py --wikitext wikitext2-test.raw --sotu sotu.txt [--part search] [--items 1]
    python measure.py --wikitext FILE --sotu FILE --model qwen.gguf --context 768 --budget 128

An item is a window of the text in which four facts are hidden, all asked for at its end, as in
`kvsearch run`: its prose gives the NLL of the text, its answers that of the facts. Records that are
there are kept. `--only` names policies of `candidates.policies()` or `candidates.others()`;
`--records` is where records go, `records` beside this file if it is absent.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from candidates import others, policies

from kvsearch.commands.heads import heads
from kvsearch.errors import KvsearchError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.evaluation.part import losses
from kvsearch.options.budget import sized_for
from kvsearch.options.run_config import RunConfig
from kvsearch.policy import layout
from kvsearch.policy_space import build
from kvsearch.session import key_offsets, load, make_windows, make_workloads
from kvsearch.session.progress import Shown
from kvsearch.workloads.measured_parts import Part

HERE = Path(__file__).parent


def texts(wikitext: Path, sotu: Path) -> dict[str, tuple[str, ...]]:
    """The six texts of `studies/2026-11-first-command`."""
    parts = {
        "wikitext-1": f"{wikitext}:0-430000",
        "wikitext-2": f"{wikitext}:430000-860000",
        "wikitext-3": f"{wikitext}:860000-",
        "sotu-1": f"{sotu}:0-1500000",
        "sotu-2": f"{sotu}:1500000-",
    }
    return {"built-in": (), **{name: (part,) for name, part in parts.items()}}


def on_text(o: argparse.Namespace, name: str, files: tuple[str, ...]) -> None:
    """Every policy on the first items of a part of one text."""
    config, shown = RunConfig(
        model=o.model, text=files, context=o.context, budget_slots=o.budget, bench=False
    ), Shown(quiet=True)  # fmt: skip
    loaded = load.model(config, context=config.longest, say=print)
    texts = make_windows.parts(loaded, config, print)
    prompts = make_workloads.asked(loaded, config, {}, texts, shown)
    windows = make_windows.text(loaded, config, print, 1, texts)
    found = make_workloads.joined(loaded, config, prompts, windows, int(o.budget), shown)
    part = found.parts[o.part].cut(0, 2 * o.items)
    means, _ = key_offsets.known(loaded, shown)
    setting = replace(
        sized_for(loaded.shape, config.budget(loaded.shape), o.context),
        heads=heads(loaded).losses, offset=means.offset(loaded.model, o.context),
    )  # fmt: skip
    file = o.records / f"{loaded.name.removesuffix('.gguf').rpartition('/')[2]}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(x) for x in file.read_text().splitlines()] if file.exists() else []
    there = {tuple(x["key"]) for x in lines if len(x["text"]) >= o.items}
    evaluator = Evaluator(loaded)
    known = {"full": {"evict": False}, **policies(), **others()}
    for policy in o.only or ["full", *policies()]:
        key, knobs = (name, o.part, policy), known[policy]
        if key in there:
            continue
        if means.large and knobs.get("tiers", "16") != "16":
            knobs = {"offset": key_offsets.WANTED, **knobs}
        prompt = part.items[0].context.size if knobs.get("trigger") == "prompt" else 0
        mine = replace(setting, prompt=prompt, tokens=part.longest if prompt else o.context)
        try:
            built = build(knobs, mine, name=policy)
            got = losses(evaluator, built, part).answers
        except KvsearchError as e:
            print(*key, e)
            continue
        row = {
            "key": key,
            "text": [round(a.nll, 4) for a in got if not a.exact],
            "facts": [round(a.nll, 4) for a in got if a.exact],
            "exact": [sum(a.exact) for a in got if a.exact],
            "asks": [len(a.exact) for a in got if a.exact],
            "worth": [round(x, 4) for x in worths(found, o.part)],
            "bytes": layout(built, loaded.shape).bytes_peak(part.longest, prompt),
            "ask_tokens": round(tokens_of_asks(part), 1),
        }
        with open(file, "a", newline="\n") as f:
            f.write(json.dumps(row) + "\n")
        print(*key, row["text"], row["facts"], row["exact"], flush=True)


def tokens_of_asks(part: Part) -> float:
    """Tokens of a question and its answer, on the mean."""
    sizes = [a.question.size + a.answer.size for item in part.items for a in item.asks]
    return sum(sizes) / len(sizes)


def worths(found: make_windows.MeasuredOn, part: str) -> list[float]:
    """Nats that the context is worth: of the text, of the facts."""
    worth = found.described[part]["worth"]
    assert isinstance(worth, dict)
    return [worth["text"], worth["facts"]]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--wikitext", type=Path, required=True)
    ask.add_argument("--sotu", type=Path, required=True)
    ask.add_argument("--model", default="smollm2-135m")
    ask.add_argument("--part", choices=("search", "report"), default="search")
    ask.add_argument("--items", type=int, default=1)
    ask.add_argument("--texts", nargs="*", default=[])
    ask.add_argument("--only", nargs="*", default=[])
    ask.add_argument("--context", type=int, default=1536)
    ask.add_argument("--budget", type=float, default=256)
    ask.add_argument("--records", type=Path, default=HERE / "records")
    o = ask.parse_args()
    for name, given in texts(o.wikitext, o.sotu).items():
        if not o.texts or name in o.texts:
            on_text(o, name, given)


if __name__ == "__main__":
    main()
