"""PPL with keys rounded channel by channel over blocks of 32 tokens, as OpenVINO lays them out.

    python by_channel.py --text wikitext2-test.raw:0-600000

Every key is rounded with its whole block, also for the queries of that block, and every value with
its own token. No policy says this, so it is no record of a policy; the README has the figures.
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvsearch.models.load import load_model
from kvsearch.session import load
from kvsearch.workloads.text import tokenize, windows

CONTEXT, BLOCK = 1024, 32
FORMATS = ((8, 4, None), (8, 4, 32), (4, 4, None), (4, 4, 32))


def rounded(x: Tensor, dim: int, bits: int) -> Tensor:
    """Even steps between the least and the largest number along `dim`, of the same shape."""
    steps = 2**bits - 1
    low = x.amin(dim, keepdim=True)
    scale = (x.amax(dim, keepdim=True) - low) / steps
    scale = torch.where(scale == 0, 1e-4, scale)
    zero = -low / scale
    return ((x / scale + zero).round().clamp(0, steps) - zero) * scale


class ByChannel(DynamicCache):
    """One call fills it; keys and values `[B, H, T, D]`."""

    def __init__(self, key_bits: int, value_bits: int, group: int | None) -> None:
        super().__init__()
        self.bits, self.group = (key_bits, value_bits), group

    def update(self, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Round and keep."""
        tokens = k.shape[2]
        last = k[:, :, -1:].expand(-1, -1, -tokens % BLOCK, -1)
        blocks = torch.cat([k, last], 2).unflatten(2, (-1, BLOCK))
        k = rounded(blocks, 3, self.bits[0]).flatten(2, 3)[:, :, :tokens]
        v = rounded(v.unflatten(-1, (-1, self.group or v.shape[-1])), -1, self.bits[1]).flatten(-2)
        return super().update(k, v, *rest, **options)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--text", required=True)
    o = ask.parse_args()
    loaded = load_model("smollm2-135m")
    text = load.source(load.texts(o.text), None, print)
    ids = torch.from_numpy(windows(tokenize(loaded.tokenizer, text), count=1, length=CONTEXT))
    for formats in FORMATS:
        with torch.inference_mode():
            logits = loaded.model(ids[:, :-1], past_key_values=ByChannel(*formats)).logits
        nll = -logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])
        print(*formats, f"PPL {nll.mean().exp():.4f}", flush=True)


if __name__ == "__main__":
    main()
