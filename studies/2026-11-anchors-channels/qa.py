"""OpenBookQA, zero-shot and with five demonstrations that a policy holds, untrained and trained.

    python studies/2026-11-anchors-channels/qa.py --wikitext wikitext2-test.raw --sotu sotu.txt \
        --openbookqa openbookqa-test.jsonl --work FOLDER [--count 495] [--only MODEL ...]

The first five questions of the file are the demonstrations, each "question answer." The answer with
the largest log-probability per character is the choice. Writes log-probabilities of all four
answers, in nats, to records/qa.json. Computed in float32, which is faster in short calls. Models
that FOLDER lacks are left out; rows that are there are extended to `count` questions.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from anchors import ANCHORED, policy
from setting import FULL, keep, kept, loaded, options

from kvsearch.cache import PolicyCache
from kvsearch.cache.model.anchors import new_token
from kvsearch.models.head import Head
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy

SHOTS, AT_ONCE = 5, 25  # questions between two writes
SHARED = ("_config", "shape", "policy")  # of a cache: what its copies have in common


def main() -> None:
    ask = options(__doc__)
    ask.add_argument("--openbookqa", type=Path, required=True)
    ask.add_argument("--count", type=int, default=495)
    ask.add_argument("--only", nargs="+", default=[])
    o = ask.parse_args()
    items = [json.loads(line) for line in o.openbookqa.read_text().splitlines()]
    shown, asked = items[:SHOTS], items[SHOTS : SHOTS + o.count]
    keep("qa", "questions", [question(x) for x in items[SHOTS:]])
    for model in ("untrained", *ANCHORED, "window", "full"):
        if o.only and model not in o.only:
            continue
        if model != "untrained" and not (o.work / model).exists():
            continue
        on = loaded(*(() if model == "untrained" else (o.work / model,)), dtype="float32")
        for name in ("ep", "ac", "window", "full"):
            if model in ("untrained", name):
                for shots in (0, SHOTS) if name in ("full", "ep") else (SHOTS,):
                    row = f"{model}: {name}, {shots} shots"
                    answers(row, on, policies()[name], shown[:shots], asked)


def question(item: dict[str, Any]) -> dict[str, Any]:
    """What a table needs of one."""
    texts = item["choices"]["text"]
    return {
        "right": item["choices"]["label"].index(item["answerKey"]),
        "characters": [len(text) for text in texts],
    }


def policies() -> dict[str, Policy]:
    """By name; the window is as large as what endpoints hold at the end, see `answers`."""
    found = {"full": FULL, "ep": policy(ANCHORED["ep"])}
    # one after every demonstration, none in a question: without demonstrations it is the full cache
    found["ac"] = policy(ANCHORED["ac"].model_copy(update={"at": "given"}))
    ends = [row for name, row in kept("qa").items() if name.startswith("untrained: ep, 5")]
    if ends:
        slot = 23040
        found["window"] = policy(slots=round(ends[0]["bytes_end"] / slot))
    return found


def answers(name: str, on: LoadedModel, one: Policy, shown: list[Any], asked: list[Any]) -> None:
    """Log-probabilities of the answers `[n, 4]`, and bytes held after the right one."""
    row = kept("qa").get(name) or {"bytes_end": 0.0, "bytes_shown": 0, "logprobs": []}
    if len(row["logprobs"]) >= len(asked):
        return
    head, encode = Head(on.model, on.silent), on.tokenizer.encode
    start: list[int] = []
    anchors = one.anchors
    for item in shown:
        right = item["choices"]["text"][item["choices"]["label"].index(item["answerKey"])]
        start += encode(f"{item['question_stem']} {right}.")
        if anchors is not None and anchors.insert:
            start.append(new_token(anchors, on.model, on.tokenizer))
        start += encode("\n\n")
    with torch.inference_mode():
        before = PolicyCache(one, on.model, tokenizer=on.tokenizer)
        if start:
            head.hidden(torch.tensor([start]), before)
            row["bytes_shown"] = before.bytes_resident
        for item in asked[len(row["logprobs"]) :]:
            stemmed = copied(before)  # the question once, then each answer behind it
            last = head.hidden(torch.tensor([encode(item["question_stem"])]), stemmed)[:, -1:]
            right, found = item["choices"]["label"].index(item["answerKey"]), []
            for i, text in enumerate(item["choices"]["text"]):
                answer = encode(f" {text}")
                more = answer if i == right else answer[:-1]
                hidden = last
                if more:
                    cache = copied(stemmed)
                    hidden = torch.cat([last, head.hidden(torch.tensor([more]), cache)], 1)
                log = head.logits(hidden[:, : len(answer)])[0].log_softmax(-1)
                found.append(round(float(log.gather(-1, torch.tensor(answer)[:, None]).sum()), 3))
                if i == right:
                    n = len(row["logprobs"])
                    row["bytes_end"] = (row["bytes_end"] * n + cache.bytes_resident) / (n + 1)
            row["logprobs"].append(found)
            if len(row["logprobs"]) % AT_ONCE == 0 or len(row["logprobs"]) == len(asked):
                keep("qa", name, row)


def copied(cache: PolicyCache) -> PolicyCache:
    """One that goes on by itself."""
    memo: dict[int, Any] = {}
    for name in SHARED:
        memo[id(getattr(cache, name))] = getattr(cache, name)
    for group in cache.groups:
        memo[id(group.layout)] = group.layout
    return deepcopy(cache, memo)


if __name__ == "__main__":
    main()
