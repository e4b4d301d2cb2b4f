"""What answers lose when values are fitted, by who they are fitted to.

    python studies/2026-11-refit/measure.py MODEL --name NAME --parts 16 32

The cache of KVzip in rotated 5-bit keys and 4-bit values, in the package's own code: a context is
taken in and read again once for each share of the bytes, then every way of fitting starts from a
copy of what is kept. Appends to `records/NAME.jsonl`: a row per context, share and way.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsearch.cache import biases, refit
from kvsearch.cache.by_segment import eviction, segments
from kvsearch.cache.call import Call
from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.layer import Layer
from kvsearch.cache.references import Answers, References
from kvsearch.cache.refit import Whole
from kvsearch.evaluation.answers import _Replay, _row
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.model_analysis import key_offsets
from kvsearch.models import load_model
from kvsearch.policy import Policy
from kvsearch.policy_space import Setting, build
from kvsearch.policy_space.methods import METHODS
from kvsearch.session.make_workloads import from_tasks
from kvsearch.session.progress import Shown
from kvsearch.workloads import parse
from kvsearch.workloads.text import tokenize
from kvsearch.workloads.text.read import builtin, read_file

HERE = Path(__file__).parent
FIRST, RIDGE = refit.fitted, refit.RIDGE
PURSUED = 512  # slots of a head that matching pursuit chooses at most


class Noted:
    """What each layer's compaction meets, in place of fitting."""

    def __init__(self) -> None:
        self.own: list[References] = []
        self.whole: list[Whole] = []
        self.keep: list[list[Tensor | None]] = []
        self.biases: list[Tensor] = []  # of the slots of each layer [B, H, N], added to logits
        self.pursuit = False
        self.layer, self.head = -1, 0  # whose turn it is to attend with biases
        run, carry_out, attend = segments.run, eviction.carry_out, segments._attend
        shares = eviction.adakv.shares

        def noted_run(layer: Layer, call: Call) -> Tensor:
            self.layer, self.head = self.layer + 1, 0
            if not call.seen:
                self.own.append(References.of(call, call.end))
            return run(layer, call)

        def noted_carry_out(decisions: Any) -> Any:
            found = carry_out(decisions)
            self.keep.append([keep for keep, _ in found])
            return found

        def biased_attend(group: HeadGroup, call: Call, due: int | None) -> Tensor:
            out = attend(group, call, due)
            mine = slice(self.head, self.head + len(group.heads))
            self.head = mine.stop
            if not self.biases:
                return out
            keys, values = group.read()
            bias, old = self.biases[self.layer][:, mine], keys.shape[2] - call.count
            s = (call.q * call.scale).unflatten(1, (keys.shape[1], -1)) @ keys.mT[:, :, None]
            s[..., :old] += bias[:, :, None, None, :old]
            late = torch.ones(call.count, call.count, dtype=torch.bool).triu(1)
            s[..., old:].masked_fill_(late, float("-inf"))
            return (s.softmax(-1) @ values[:, :, None]).flatten(1, 2)

        def chosen(layers: Any, seen: int) -> Any:
            found = shares(layers, seen)
            for layer in layers if self.pursuit and found else ():
                keys = torch.cat([group.read()[0] for group in layer.groups], 1).float()
                for head, group in enumerate(layer.groups):
                    ranks, target = found[group]
                    found[group] = pursued(layer.references, keys, head, ranks, target), target
            return found

        segments.run, eviction.carry_out = noted_run, noted_carry_out
        segments._attend, eviction.adakv.shares = biased_attend, chosen
        eviction.refit = lambda _, whole, kept: self.whole.append(whole)

    def forget(self) -> None:
        """Before another prompt."""
        for each in (self.own, self.whole, self.keep, self.biases):
            each.clear()

    def fit(self, layer: Layer, i: int, way: str) -> None:
        """Fit layer `i`, which was compacted."""
        whole, own = self.whole[i], self.own[i]
        if way == "bias":  # as the paper has it
            return self.fit_biases(layer, whole)
        if way == "bias in keys":
            layer.policy = layer.policy.model_copy(update={"refit": "values+bias"})
            way = "second reading"
        way, _, ridge = way.partition(", ridge ")
        refit.RIDGE, refit.fitted = float(ridge or RIDGE), FIRST
        if way == "both":
            whole = replace(whole, references=[*whole.references, own])
        elif way.startswith("a "):  # as in "a 3rd"
            n = int(way[2])
            some = [
                References(replace(x.call, q=x.call.q[:, :, ::n]), n * x.step)
                for x in whole.references
            ]
            whole = replace(whole, references=some)
        elif way.startswith("own last"):
            last = own.call.q[:, :, -int(way.split()[2]) :]
            whole = replace(whole, references=[replace(own, call=replace(own.call, q=last))])
        elif way.startswith("own"):
            whole = replace(whole, references=[own])
        if way.endswith("alone"):
            some = [
                replace(x, call=replace(x.call, k=x.call.k[:, :, :0], v=x.call.v[:, :, :0]))
                for x in whole.references
            ]
            whole = replace(whole, references=some)
        if way.startswith("own causal"):
            refit.fitted = causal(whole, self._places(layer, i), own.step)
        refit.refit(layer, whole, self.keep[i])

    def off(self) -> list[float]:
        """Squared error of a bias in a key's logits, as a share of it: mean of each layer."""
        every = [Answers.of(x.references, x.keys, x.values) for x in self.whole]
        got = [x.rows @ biases.direction(x)[..., None] for x in every]
        return [round(float((x - 1).square().mean()), 5) for x in got]

    def fit_biases(self, layer: Layer, whole: Whole) -> None:
        """Fit biases, then values; keys and references have a component more for these."""

        def wider(x: Tensor, last: Tensor) -> Tensor:
            return torch.cat([x.float(), last.expand(x.shape[:-1])[..., None]], -1)

        def fitted(asked: Answers, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
            self.biases.append(bias := biases.biases(asked, keys, there))
            longer = replace(asked, rows=wider(asked.rows, torch.ones(())))
            return FIRST(longer, wider(keys, bias), values, there)

        plain = refit.much_worse_alone
        refit.RIDGE, refit.fitted = RIDGE, fitted
        refit.much_worse_alone = lambda *_: torch.zeros((), dtype=torch.bool)
        refit.refit(layer, whole, [])
        refit.much_worse_alone = plain

    def _places(self, layer: Layer, i: int) -> Tensor:
        """Token of every slot `[B, H, N]`."""
        most, N = max(g.store.n for g in layer.groups), self.whole[i].keys.shape[2]
        each = zip(self.keep[i], layer.groups, strict=True)
        rows = [(torch.arange(N) if k is None else k).expand(1, len(g.heads), -1) for k, g in each]
        return torch.cat([pad(x, (0, most - x.shape[-1]), value=1 << 40) for x in rows], 1)


def causal(whole: Whole, places: Tensor, step: int) -> Callable[..., Tensor]:
    """`refit.fitted` where every `step`-th query of the prompt sees what it saw when it came."""

    def fitted(_: Answers, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
        sides = (whole.keys, whole.values, keys, values)
        all_k, all_v, keys, values = (x.float() for x in sides)
        call = whole.references[0].call
        B, H, N = keys.shape[:3]
        gram, lacks = keys.new_zeros(B, H, N, N), torch.zeros_like(values)
        q = call.q.float().unflatten(1, (H, -1)) * call.scale
        at, slot = torch.arange(q.shape[3]) * step, torch.arange(all_k.shape[2])
        for start in range(0, q.shape[3], 128):
            rows = q[:, :, :, start : start + 128].flatten(2, 3)
            now = at[start : start + 128].repeat(q.shape[2])[:, None]
            full = (rows @ all_k.mT).masked_fill(slot > now, float("-inf")).softmax(-1) @ all_v
            hidden = (places[:, :, None] > now) | ~there[:, None]
            share = (rows @ keys.mT).masked_fill(hidden, float("-inf")).softmax(-1)
            sees = ~share.isnan().any(-1, keepdim=True)  # some slot
            share = share.nan_to_num(0)
            gram += share.mT @ share
            lacks += share.mT @ (full * sees - share @ values)
        given = gram.diagonal(dim1=-2, dim2=-1)
        given += RIDGE * given.sum(-1, keepdim=True) / there.sum(-1, keepdim=True)
        return values + torch.cholesky_solve(lacks, torch.linalg.cholesky(gram))

    return fitted


def pursued(
    references: list[References], keys: Tensor, head: int, ranks: Tensor, target: int
) -> Tensor:
    """Ranks by which a head's slots are those of orthogonal matching pursuit of the mass of
    attention (arXiv:2602.16284), four at a time; slots behind these keep their order."""
    asked = Answers.of(references, keys, keys)
    everywhere = torch.ones(keys.shape[1:3], dtype=torch.bool)
    total = torch.logaddexp(asked.prompt_mass, asked.near_mass)
    share = (asked.logits(keys, everywhere) - total).exp()[0, head]
    want = asked.share[0, head, :, 0]
    chosen, left = torch.empty(0, dtype=torch.long), want
    while len(chosen) < min(target, PURSUED):
        gains = left @ share
        gains[chosen] = float("-inf")
        chosen = torch.cat([chosen, gains.topk(4).indices])
        mine = share[None, None, :, chosen]
        few = torch.full((1, 1, 1), 1e-6)
        left = want - share[:, chosen] @ biases.bounded(mine, want[None, None], few)[0, 0]
    ranks = ranks.clone()
    ranks[..., chosen] += ranks.max() - ranks.min() + 1
    return ranks


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--name", required=True)
    parser.add_argument("--task", default="needle:4,asks=4")
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--contexts", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="contexts that were measured already")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--text", help="of prose; the built-in text if absent")
    parser.add_argument("--bits", default="k5v4")
    parser.add_argument("--offset", default="none")
    parser.add_argument("--pursuit", action="store_true", help="choose slots by matching pursuit")
    parser.add_argument("--ways", nargs="+", default=["evicted", "second reading"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(*([given.model] if given.model else []))
    evaluator, noted, shape = Evaluator(loaded), Noted(), loaded.shape
    spec = parse(f"{given.task},tokens={given.tokens}")
    text = tokenize(loaded.tokenizer, read_file(given.text) if given.text else builtin())
    items = from_tasks(loaded, [spec], text, "agnostic", given.contexts, 0)[0].items
    offset = None
    if given.offset != "none":
        means, _ = key_offsets.of_model(evaluator, Shown(quiet=True).step)
        offset = means.offset(loaded.model, given.tokens)
    knobs = {**METHODS["kvzip+k5v4+refit"].knobs, "offset": given.offset, "tiers": given.bits}
    full: dict[tuple[int, int], Tensor] = {}  # the full cache's log-probabilities
    for number, item in enumerate(items):
        for part in given.parts if number >= given.first else ():
            policy = Policy()
            if part > 1:
                held = int(shape.budget_bytes(given.tokens) / part)
                setting = Setting(shape, held, given.tokens, given.tokens, offset=offset)
                policy = build(knobs, setting, name=f"1/{part}")
            noted.forget()
            noted.pursuit = given.pursuit and part > 1
            start = time.perf_counter()
            node = _Replay(evaluator, policy, False, {})._prompt(item.context)
            prompt = time.perf_counter() - start
            for way in given.ways if part > 1 else ("full",):
                noted.biases.clear()
                cache, start = node.cache.fork(), time.perf_counter()
                for i, layer in enumerate(cache.held if way not in ("full", "evicted") else ()):
                    noted.fit(layer, i, way)
                row: dict[str, Any] = {
                    "model": given.name, "task": given.task, "tokens": given.tokens,
                    "context": number, "part": part,
                    "way": way + ", by pursuit" * noted.pursuit, "bits": given.bits,
                    "slots": policy.slots,
                    "fit": round(time.perf_counter() - start, 2), "prompt": round(prompt, 2),
                    "off": noted.off() if way == "bias in keys" else [], "unfitted": cache.unfitted,
                    "nll": [], "exact": [], "kl": [],
                }  # fmt: skip
                for i, ask in enumerate(item.asks):
                    noted.layer = -1
                    fed = np.concatenate([ask.question, ask.answer[:-1]])
                    more = evaluator.head.hidden(torch.from_numpy(fed)[None], cache.fork())
                    hidden = torch.cat([node.last, more], 1)[:, -ask.answer.size :]
                    log = evaluator.head.logits(hidden)[0].log_softmax(-1)
                    nll, _, exact, _ = _row(log, ask.answer)
                    if part == 1:
                        full[number, i] = log
                    if (first := full.get((number, i))) is not None:
                        kl = (first.exp() * (first - log)).sum(-1).mean()
                        row["kl"].append(round(float(kl), 6))
                    row["nll"].append(round(nll, 6))
                    row["exact"].append(int(exact))
                with (HERE / "records" / f"{given.name}.jsonl").open("a") as out:
                    out.write(json.dumps(row) + "\n")
                print(number, part, way, np.mean(row["nll"]), sum(row["exact"]), flush=True)


if __name__ == "__main__":
    main()
