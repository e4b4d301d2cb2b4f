"""How much of the keys' energy is a fixed vector, and what low bits lose with and without it.

    python studies/2026-11-key-offsets/measure.py MODEL --name NAME --tokens 640 2000 --contexts 3

One forward pass over a context of facts and its questions, in which every key and value is read
back from its codes (one Lloyd scale a head, rotated) and nothing is evicted. A question sees the
context and itself, as if it were the only one. Appends to `records/NAME.jsonl`: a row per layer of
what the mean holds, and a row per context, bits and way of losses of its text and its answers.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvsearch.cache.huggingface import Watching, _seen, watched
from kvsearch.cache.model.rotary import Rotary, rotaries
from kvsearch.model_analysis.head_losses import recall_texts
from kvsearch.models import LoadedModel, load_model
from kvsearch.models.head import Head
from kvsearch.session.make_workloads import from_tasks
from kvsearch.workloads import parse
from kvsearch.workloads.items import Item
from kvsearch.workloads.text import tokenize
from kvsearch.workloads.text.read import builtin
from kvsearch_kernels.quantize_kv import Format, fake_quantize

HERE = Path(__file__).parent
BITS = ((5, 4), (4, 3), (3, 3))
WAYS = ("full", "as they are", "after", "after, balanced", "before")
SKIP = 4  # first tokens, whose keys are like no other's


class Keys:
    """What the fixed texts tell of one layer: offsets `[H, 1, D]`, and sizes of its pairs."""

    def __init__(self, rotary: Rotary, q: Tensor, k: Tensor) -> None:
        self.rotary = rotary
        at = torch.arange(k.shape[2])
        self.before = rotary.undo(at, k)[0][0, :, SKIP:].mean(1, keepdim=True)
        self.q = _pairs(q[0].unflatten(0, (k.shape[1], -1)).square().mean((1, 2)))
        self.k = k[0, :, SKIP:]

    def turned(self, tokens: int) -> Tensor:
        """The offset at every position `[H, T, D]`."""
        each = self.before.expand(-1, tokens, -1)
        return self.rotary.turn(each, torch.arange(tokens)).float()

    def scales(self, offset: Tensor | float) -> Tensor:
        """By what each channel is divided, that errors matter alike in all pairs `[H, 1, D]`."""
        k = _pairs((self.k - offset).square().mean(1))
        s = (k / self.q).sqrt().sqrt()  # of squares
        s = s / s.log().mean(-1, keepdim=True).exp()
        return torch.cat([s, s], -1).unsqueeze(1)


def _pairs(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return a + b + 1e-9


class Read(Watching):
    """A layer whose keys and values are read back from codes."""

    def __init__(self, keys: Keys | None, way: str, bits: tuple[int, int], mask: Tensor, span: int):
        super().__init__()
        self.keys, self.way, self.bits, self.mask, self.span = keys, way, bits, mask, span

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None):
        """Attend as the mask says."""
        assert softcap is None
        if self.bits[0] < 16:
            k, v = self._back(k), _rounded(v, self.bits[1])
        key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return scaled_dot_product_attention(q, key, value, attn_mask=self.mask, scale=scale)

    def _back(self, k: Tensor) -> Tensor:
        keys, offset, s = self.keys, torch.zeros(1), torch.ones(1)
        if "after" in self.way:
            offset = keys.turned(self.span).mean(1, keepdim=True)
        if self.way == "before":
            offset = keys.turned(int(self.at.max()) + 1)[:, self.at]
        if "balanced" in self.way:
            s = keys.scales(offset)
        return _rounded((k - offset) / s, self.bits[0]) * s + offset


def _rounded(x: Tensor, bits: int) -> Tensor:
    return fake_quantize(x.contiguous(), Format(bits, x.shape[-1], "lloyd", True))


class Noted(Watching):
    """A layer that attends as the model would, and keeps what it was given."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None):
        self.q, self.k = q, k
        key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return scaled_dot_product_attention(q, key, value, is_causal=True, scale=scale)


def noted(loaded: LoadedModel, ids: np.ndarray) -> list[Noted]:
    layers = [Noted() for _ in range(loaded.shape.layers)]
    Head(loaded.model, loaded.silent).hidden(
        torch.from_numpy(ids)[None], watched(loaded.model, layers)
    )
    return layers


def share(k: Tensor) -> float:
    """Of the energy of keys `[H, T, D]`, what their means hold; the mean over heads."""
    return float((k.mean(1).square().sum(-1) / k.square().sum(-1).mean(1)).mean())


def energy(
    loaded: LoadedModel, turns: list[Rotary], known: list[Keys], item: Item
) -> Iterator[dict]:
    """What the means of a context's keys hold, and what the fixed text's offset takes away."""
    for i, (layer, turn, keys) in enumerate(
        zip(noted(loaded, item.context), turns, known, strict=True)
    ):
        k, T = layer.k[0, :, SKIP:], layer.k.shape[2]
        before = turn.undo(torch.arange(T), layer.k)[0][0, :, SKIP:]
        own, all_ = keys.turned(T)[:, SKIP:], k.square().sum((1, 2))
        left = {
            "after": k - own.mean(1, keepdim=True), "before": k - own,
            "of 640": k - keys.turned(640).mean(1, keepdim=True),
        }  # fmt: skip
        yield {
            "kind": "energy", "layer": i, "tokens": T, "largest": float(layer.k.abs().max()),
            "mean_after": share(k), "mean_before": share(before),
            **{f"left_{n}": float((x.square().sum((1, 2)) / all_).mean()) for n, x in left.items()},
        }  # fmt: skip


def loss(
    loaded: LoadedModel, known: list[Keys], item: Item, way: str, bits: tuple[int, int]
) -> dict:
    """Losses of one context: its text and its answers."""
    parts, at, ends = [item.context], [np.arange(item.context.size)], []
    for ask in item.asks:
        more = np.concatenate([ask.question, ask.answer])
        parts.append(more)
        at.append(item.context.size + np.arange(more.size))
        ends.append((sum(p.size for p in parts), ask.answer.size))
    of = torch.from_numpy(np.repeat(np.arange(len(parts)), [p.size for p in parts]))
    ids, at = (torch.from_numpy(np.concatenate(x)) for x in (parts, at))
    mask = ((of[:, None] == of) | (of == 0)) & torch.ones(len(of), len(of), dtype=torch.bool).tril()
    layers = [Read(k, way, bits, mask, item.context.size) for k in known]
    for layer in layers:
        layer.at = at
    head = Head(loaded.model, loaded.silent)
    cache = watched(loaded.model, layers)
    hidden = loaded.model.model(
        input_ids=ids[None], position_ids=at[None], past_key_values=cache, use_cache=True
    )[0]
    text, nlls, exact = item.context.size, [], 0
    for stop, size in ends:
        log = head.logits(hidden[:, stop - size - 1 : stop - 1])[0].log_softmax(-1)
        own = ids[stop - size : stop]
        nlls.append(float(-log.gather(1, own[:, None]).mean()))
        exact += bool((log.argmax(-1) == own).all())
    nll = head.nll(hidden[:, :text], ids[None, :text])[0, 64:]
    return {
        "kind": "loss", "context": item.name, "tokens": text, "way": way, "keys": bits[0],
        "values": bits[1], "text": float(nll.double().mean()), "answers": nlls, "exact": exact,
    }  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--name", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[640, 2000])
    parser.add_argument("--contexts", type=int, default=3)
    parser.add_argument("--bits", nargs="+", default=[f"{k}/{v}" for k, v in BITS])
    parser.add_argument("--ways", nargs="+", default=WAYS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(*([given.model] if given.model else []))
    turns = rotaries(loaded.model, _seen, "this", "")
    notes = [noted(loaded, text.ids) for text in recall_texts(loaded)]
    known = [
        Keys(t, *(torch.cat([getattr(n[i], w)[:, :, :512] for n in notes[:1]], 2) for w in "qk"))
        for i, t in enumerate(turns)
    ]
    text = tokenize(loaded.tokenizer, builtin())
    file = HERE / "records" / f"{given.name}.jsonl"

    def write(row: dict) -> None:
        with file.open("a") as out:
            out.write(json.dumps({"model": given.name, **row}) + "\n")

    for tokens in given.tokens:
        items = from_tasks(
            loaded,
            [parse(f"needle:4,asks=4,tokens={tokens}")],
            text,
            "agnostic",
            given.contexts,
            0,
        )[0].items
        if "full" in given.ways:
            for row in energy(loaded, turns, known, items[0]):
                write(row)
        for item in items:
            if "full" in given.ways:
                write(loss(loaded, known, item, "full", (16, 16)))
            for bits in given.bits:
                for way in (x for x in given.ways if x != "full"):
                    k, v = map(int, bits.split("/"))
                    write(loss(loaded, known, item, way, (k, v)))


if __name__ == "__main__":
    main()
