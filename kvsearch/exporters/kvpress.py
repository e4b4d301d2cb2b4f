"""kvpress: presses that prune after a prompt and while decoding, in 16 bits."""

from kvsearch.exporters.capability import ONE, Capability, Eviction, Ranking, Sizes
from kvsearch.exporters.target import Artefact, Environment, Job, Target
from kvsearch.rules import Attention, KeyDiff, KeyNorm, Rule
from kvsearch.rules.lagkv import LagKV

VERSION = "0.5.5"
NONE = Sizes(only=(0,))
SKIP = 4  # sinks that a press sees to by itself

WINDOW = 32  # queries that SnapKV looks at
SNAPKV = Attention(horizon=WINDOW, pool=5)
TOVA = Attention(horizon=1, share="layer")

_SCRIPT = '''"""Generate with kvpress and this KV-cache policy, or score token ids with it.

    python run.py MODEL "once upon a time"
    python run.py MODEL --score ids.json --prompt 512 --out nll.json

MODEL is a folder or a name that transformers loads.
Needs: pip install kvpress=={version}
"""

import argparse
import json

import torch
from kvpress import {presses}
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

TARGET = {target}  # tokens that a compaction leaves; None prunes nothing
INTERVAL = {interval}  # tokens between compactions while decoding; None prunes the prompt only
BATCH = 4  # windows scored at once


class Press({base}):
    """Leaves pairs in order of time, and of equal scores the newer ones.

    As it comes, a press leaves them in order of score, so a later compaction takes no sink for a
    sink; and it turns all queries that it looks back on by the position of the newest.
    """

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        if self.compression_ratio == 0:
            return keys, values
        last = int(kwargs["position_ids"][0, -1]) + 1
        at = torch.arange(last - hidden_states.shape[1], last, device=keys.device)[None]
        turns = module.rotary_emb(hidden_states, at)
        kwargs = {{**kwargs, "position_embeddings": turns}}
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        n = keys.shape[2]
        best = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
        kept = (n - 1 - best[..., : int(n * (1 - self.compression_ratio))]).sort(-1).values
        kept = kept.unsqueeze(-1).expand(-1, -1, -1, module.head_dim)
        return keys.gather(2, kept).contiguous(), values.gather(2, kept).contiguous()


class Halves(DynamicCache):
    """For comparisons: fp16 numbers, which a policy's cache holds where weights are in fp32."""

    def update(self, keys, values, *rest, **options):
        return super().update(keys.half().float(), values.half().float(), *rest, **options)


def press_for(length):
    """For a prompt of that many tokens."""
    ratio = max(0.0, 1 - (TARGET + 0.5) / length)
    press = Press(compression_ratio=ratio{given})
    if INTERVAL is None:
        return press
    base = Press(compression_ratio=0.0{given})
    decoding = DecodingPress(base_press=base, compression_interval=INTERVAL, target_size=TARGET)
    return PrefillDecodingPress(prefilling_press=press, decoding_press=decoding)


@torch.no_grad()
def score(model, ids, prompt):
    """Losses [W, T - 1] of token windows [W, T] whose first tokens come in one call.

    Positions are told, and `cache_position` is not: with a pruned cache it would let tokens see
    those that come after them.
    """
    cache, losses, start = Halves(), [], 0
    last = ids.shape[1] - 1
    alone = TARGET is None or INTERVAL is None  # nothing is pruned after the prompt
    while start < last:
        stop = prompt if start == 0 else min(last, start + (128 if alone else 1))
        at = torch.arange(start, stop)[None].expand(len(ids), -1)
        x = model(ids[:, start:stop], position_ids=at, past_key_values=cache).logits
        told = ids[:, start + 1 : stop + 1, None]
        losses.append(-x.float().log_softmax(-1).gather(-1, told)[..., 0])
        start = stop
    return torch.cat(losses, 1), cache


def pressed(model, length, run):
    """What `run` returns, with the presses in place for a prompt of that many tokens."""
    if TARGET is None:
        return run()
    with press_for(length)(model):
        return run()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text", nargs="?", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: as PyTorch has it")
    parser.add_argument("--score", help="JSON list of lists of token ids")
    parser.add_argument("--prompt", type=int, default=1, help="tokens that come in one call")
    parser.add_argument("--out", help="file for the losses")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    if args.score:
        with open(args.score, encoding="utf-8") as f:
            windows = torch.tensor(json.load(f))
        nll, held = [], 0
        for ids in windows.split(BATCH):
            found, cache = pressed(
                model, args.prompt, lambda ids=ids: score(model, ids, args.prompt)
            )
            nll += found.double().tolist()
            sizes = [t.numel() for x in cache.layers for t in (x.keys, x.values)]
            held = 2 * sum(sizes) // len(ids)
        with open(args.out, "wb") as f:
            f.write(json.dumps({{"nll": nll, "bytes_held": held}}).encode())
        return
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(args.text, return_tensors="pt")
    out = pressed(
        model,
        ids["input_ids"].shape[1],
        lambda: model.generate(**ids, max_new_tokens=args.tokens, do_sample=False),
    )
    print(tokenizer.decode(out[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
'''


def _press(rule: Rule | None, sinks: int) -> tuple[str, dict[str, object]]:
    """Class of a press and its arguments, the ratio aside."""
    if rule is None:
        return "StreamingLLMPress", {"n_sink": sinks}
    if rule.name == "key-norm":
        return "KnormPress", {}
    if rule.name == "keydiff":
        return "KeyDiffPress", {}
    if rule.name == "lagkv":
        lag = rule.model_dump()["lag"]
        return "LagKVPress", {"n_sink": SKIP, "lag_size": lag}
    assert isinstance(rule, Attention)
    if rule.horizon == 1:
        return "TOVAPress", {}
    return "SnapKVPress", {"window_size": rule.horizon, "kernel_size": rule.pool}


def write(job: Job) -> Artefact:
    """`run.py`."""
    p = job.policy
    name, arguments = _press(p.rule if p.evicts else None, p.sinks)
    target = None if p.slots is None else p.slots - p.interval
    interval = p.interval if p.trigger == "prompt+stream" else None
    given = "".join(f", {k}={v}" for k, v in arguments.items())
    text = _SCRIPT.format(
        version=VERSION,
        presses=", ".join(sorted({"DecodingPress", "PrefillDecodingPress", name})),
        target=target,
        interval=interval,
        base=name,
        given=given,
    )
    options: dict[str, object] = {}
    if target is not None:
        options = {**arguments, "press": name}
        if interval is not None:
            options |= {"compression_interval": interval, "target_size": target}
    return Artefact({"run.py": text}, options)


TARGET = Target(
    name="kvpress",
    runtime="kvpress",
    version=VERSION,
    knobs="sinks and a window, key-norm, keydiff, lagkv, snapkv or tova, after a prompt and every "
    "so many tokens",
    executes=Capability(
        eviction=Eviction(
            rankings=(
                Ranking(None, Sizes(), Sizes()),
                Ranking(KeyNorm()),
                Ranking(KeyDiff()),
                Ranking(LagKV(), sinks=Sizes(only=(SKIP,))),
                Ranking(LagKV(lag=32), sinks=Sizes(only=(SKIP,))),
                Ranking(
                    SNAPKV,
                    recent_window=Sizes(only=(WINDOW,)),
                    interval=Sizes(low=WINDOW + 1),  # its press refuses as few queries
                ),
                Ranking(TOVA, recent_window=ONE),
            ),
            triggers=("prompt+stream", "prompt"),
            sinks=NONE,
            recent_window=NONE,
        ),
    ),
    options={
        "press": (
            "StreamingLLMPress", "KnormPress", "KeyDiffPress", "LagKVPress", "SnapKVPress",
            "TOVAPress", "DecodingPress", "PrefillDecodingPress",
        ),
        "n_sink": int,
        "lag_size": int,
        "window_size": int,
        "kernel_size": int,
        "compression_interval": int,
        "target_size": int,
    },
    write=write,
    proof="nll",
    notes=(
        "kvpress needs transformers below 5.3, so an environment of its own.",
        "run.py keeps pairs in order of time, where kvpress has them in order of score: as it "
        "comes, compactions while decoding take other tokens for sinks, blocks and neighbours.",
    ),
    distribution="kvpress",
    environment=Environment(
        requirements=(f"kvpress=={VERSION}", "transformers==5.2.0", "torch==2.13.0"),
        about="torch again, and about 300 MB of wheels beside it",
        weights="folder",
        takes_prompt=True,
    ),
)  # fmt: skip
