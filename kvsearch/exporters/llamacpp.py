"""llama.cpp through llama-cpp-python: block formats for keys and values, sinks and a window.

The script drives the cache through llama.cpp's memory calls, so it holds what the policy says.
llama.cpp rotates a quantised cache by itself where the head size is a multiple of 64; with
`LLAMA_ATTN_ROT_DISABLE=1` it does not.
"""

from itertools import product
from typing import Any

from kvsearch.exporters.capability import Capability, Eviction, Format, Sizes
from kvsearch.exporters.target import Artefact, Environment, Job, Target

VERSION = "0.3.36"

# ggml's numbers of the cache types; those of a policy, by levels and bits
TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6,
    "q5_1": 7,
}  # fmt: skip
NAMES = {
    "ggml-0": {16: "f16", 8: "q8_0", 5: "q5_0", 4: "q4_0"},
    "ggml-1": {16: "f16", 5: "q5_1", 4: "q4_1"},
}
BLOCK = 64  # channels of a value that rotate together


def formats(value_block: int | None) -> tuple[Format, ...]:
    """Every pair of types of one kind, rotated first; `value_block` as in `Format`."""
    return tuple(
        Format(
            word=f"{names[k]},{names[v]}",
            key_bits=k,
            value_bits=v,
            levels=levels,
            group=32,
            rotate=rotate,
            value_block=value_block if rotate else None,
            divides=64 if rotate else 32,
        )
        for rotate, (levels, names) in product((True, False), NAMES.items())
        for k, v in product(names, repeat=2)
        if (k, v) != (16, 16)
    )


_SCRIPT = '''"""Generate with llama-cpp-python and this KV-cache policy, or score token ids with it.

    python run.py MODEL.gguf "once upon a time"
    python run.py MODEL.gguf --score ids.json --out nll.json

Needs: pip install llama-cpp-python=={version}
"""

import argparse
import codecs
import json
import os
import sys

SLOTS = {slots}  # most tokens held at any step; None keeps all
SINKS = {sinks}  # first tokens, never evicted
INTERVAL = {interval}  # tokens between evictions
REINDEX = {reindex}  # shift the positions of what stays
TYPE_K, TYPE_V = {type_k}, {type_v}  # {words}
BATCH = 512
os.environ["LLAMA_ATTN_ROT_DISABLE"] = "{no_rotation}"

import llama_cpp as lib  # noqa: E402
import numpy as np  # noqa: E402


@lib.llama_log_callback
def errors_only(level, text, data):
    if level == 4:
        sys.stderr.write(text.decode(errors="replace"))


lib.llama_log_set(errors_only, lib.ctypes.c_void_p(0))


class Cache:
    """A model and one sequence in its cache."""

    def __init__(self, path, tokens, threads):
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(
            path.encode(), lib.llama_model_default_params()
        )
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {{path}}")
        p = lib.llama_context_default_params()
        p.n_ctx = tokens if SLOTS is None else min(SLOTS, tokens)
        p.n_batch = p.n_ubatch = BATCH
        p.n_threads = p.n_threads_batch = threads
        p.type_k, p.type_v = TYPE_K, TYPE_V
        p.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = lib.llama_init_from_model(self.model, p)
        if not self.context:
            raise SystemExit("llama.cpp cannot make this cache")
        self.memory = lib.llama_get_memory(self.context)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.words = lib.llama_vocab_n_tokens(self.vocab)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.seen = self.held = 0
        self.oldest = SINKS  # position of the oldest token that is no sink

    def next_stop(self):
        """Tokens that may come before the next eviction."""
        if SLOTS is None:
            return BATCH
        n = INTERVAL - self.seen % INTERVAL
        room = SLOTS - INTERVAL - self.held - n
        return min(BATCH, n + max(0, room) // INTERVAL * INTERVAL)

    def feed(self, ids):
        """Log-probabilities `[len(ids), words]` after each token."""
        out = []
        while len(ids):
            now, ids = ids[: self.next_stop()], ids[self.next_stop() :]
            first = self.held if REINDEX else self.seen
            for i, token in enumerate(now):
                self.batch.token[i], self.batch.pos[i] = int(token), first + i
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
                self.batch.logits[i] = 1
            self.batch.n_tokens = len(now)
            if code := lib.llama_decode(self.context, self.batch):
                raise SystemExit(f"llama_decode failed with {{code}}")
            found = lib.llama_get_logits(self.context)
            x = np.ctypeslib.as_array(found, (len(now), self.words)).astype(np.float64)
            x -= x.max(-1, keepdims=True)
            out.append(x - np.log(np.exp(x).sum(-1, keepdims=True)))
            self.seen += len(now)
            self.held += len(now)
            self.evict()
        return np.concatenate(out)

    def evict(self):
        """Drop the oldest tokens behind the sinks, where an eviction is due."""
        if SLOTS is None or self.seen % INTERVAL or self.held <= SLOTS - INTERVAL:
            return
        n = self.held - (SLOTS - INTERVAL)
        lib.llama_memory_seq_rm(self.memory, 0, self.oldest, self.oldest + n)
        if REINDEX:
            lib.llama_memory_seq_add(self.memory, 0, self.oldest + n, -1, -n)
        else:
            self.oldest += n
        self.held -= n

    def tokenize(self, text):
        raw = text.encode()
        ids = (lib.llama_token * (len(raw) + 8))()
        n = lib.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), True, True)
        return list(ids[:n])

    def piece(self, token):
        """Bytes of a token, which may end within a character."""
        room = 64
        while True:
            space = (lib.ctypes.c_char * room)()
            n = lib.llama_token_to_piece(self.vocab, token, space, room, 0, True)
            if n >= 0:
                return bytes(space[:n])
            room = -n


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--score", help="JSON list of lists of token ids")
    parser.add_argument("--out", help="file for the losses")
    args = parser.parse_args()
    if args.score:
        with open(args.score, encoding="utf-8") as f:
            windows = json.load(f)
        nll = []
        for ids in windows:
            cache = Cache(args.model, len(ids), args.threads)
            losses, logs = [], None
            for start in range(0, len(ids) - 1, BATCH):
                logs = cache.feed(ids[start : start + BATCH])
                told = ids[start + 1 : start + 1 + BATCH]
                losses += [-float(logs[i, t]) for i, t in enumerate(told)]
            nll.append(losses)
        cells = lib.llama_n_ctx(cache.context)
        held = lib.llama_state_seq_get_size(cache.context, 0)
        with open(args.out, "wb") as f:
            f.write(json.dumps({{"nll": nll, "cells": cells, "state_bytes": held}}).encode())
        return
    most = len(args.prompt.encode()) + 8 + args.tokens  # a token is a byte or more
    cache = Cache(args.model, most, args.threads)
    logs = cache.feed(cache.tokenize(args.prompt))
    if hasattr(sys.stdout, "reconfigure"):  # its encoding may lack what the model says
        sys.stdout.reconfigure(errors="backslashreplace")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print(args.prompt, end="", flush=True)
    for _ in range(args.tokens):
        token = int(logs[-1].argmax())
        if lib.llama_vocab_is_eog(cache.vocab, token):
            break
        print(decoder.decode(cache.piece(token)), end="", flush=True)
        logs = cache.feed([token])
    print(decoder.decode(b"", True))


if __name__ == "__main__":
    main()
'''


def write(job: Job) -> Artefact:
    """`run.py`; and `server.sh` where the policy keeps every token, which llama-server can do."""
    p = job.policy
    names = NAMES.get(p.quantizer.levels, NAMES["ggml-0"])
    (tier,) = p.tiers
    k, v = names[tier.key_bits], names[tier.value_bits]
    no_rotation = "1" if p.quantizes and not p.quantizer.rotate else "0"
    options: dict[str, Any] = {
        "type_k": k, "type_v": v, "LLAMA_ATTN_ROT_DISABLE": no_rotation,
    }  # fmt: skip
    files = {
        "policy.json": p.to_json(),
        "run.py": _SCRIPT.format(
            version=VERSION,
            slots=p.slots,
            sinks=p.sinks,
            interval=p.interval if p.evicts else 1,
            reindex=p.evicts and p.positions == "cache",
            type_k=TYPES[k],
            type_v=TYPES[v],
            words=f"{k}, {v}",
            no_rotation=no_rotation,
        ),
    }
    if not p.evicts:
        options |= {"--cache-type-k": k, "--cache-type-v": v, "--flash-attn": "on"}
        files["server.sh"] = (
            f"#!/bin/sh\nLLAMA_ATTN_ROT_DISABLE={no_rotation} exec llama-server \\\n"
            f'  --flash-attn on --cache-type-k {k} --cache-type-v {v} --model "$@"\n'
        )
    return Artefact(files, options)


TARGET = Target(
    name="llamacpp",
    runtime="llama-cpp-python",
    version=VERSION,
    knobs="q8_0, q5_0, q5_1, q4_0, q4_1 or f16 for keys and for values, with or without rotation; "
    "sinks and a window, positions kept or shifted",
    executes=Capability(
        formats=formats(BLOCK),
        eviction=Eviction(
            positions=("original", "cache"),
            sinks=Sizes(),
            quantised=True,
        ),
    ),
    options={
        "type_k": tuple(TYPES),
        "type_v": tuple(TYPES),
        "--cache-type-k": tuple(TYPES),
        "--cache-type-v": tuple(TYPES),
        "--flash-attn": ("on", "off", "auto"),
        "LLAMA_ATTN_ROT_DISABLE": ("0", "1"),
    },
    write=write,
    proof="nll",
    notes=(
        "llama.cpp rounds a token when it comes, a policy after the token's own step.",
        "The cache is allocated in cells of all layers, their number rounded up to 256.",
        "Shifting positions rounds quantised keys again and again, so they keep theirs.",
    ),
    distribution="llama-cpp-python",
    environment=Environment(
        requirements=(f"llama-cpp-python=={VERSION}", "numpy"),
        about="built from source, about 6 minutes on two idle cores",
        options=("--no-binary", "llama-cpp-python"),
        # not for this machine's processor alone: a virtual one may name units that it cannot use
        variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF "
            "-DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAVA_BUILD=OFF",
        },
    ),
)
