"""transformers: our cache in `generate()`, which runs every policy; its own for the full cache.

Its other caches hold no policy as it says: quantised ones store keys and values alike and round
the whole cache again at each flush, and its fp8 scales by what came first.
"""

import json
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvsearch.exporters.target import Artefact, Job, Scored, Target
from kvsearch.policy import Policy

if TYPE_CHECKING:
    from kvsearch.models.load import LoadedModel

VERSION = "5.23.0"

_SCRIPT = '''"""Generate with the KV-cache policy in policy.json. Needs: pip install kvsearch"""

import sys
from pathlib import Path

from kvsearch.cache import PolicyCache
from kvsearch.models import load_model

if len(sys.argv) != 3:
    sys.exit('usage: python generate.py MODEL "the prompt"')
name, prompt = sys.argv[1:]
loaded = load_model(name)
file = Path(__file__).with_name("policy.json")
cache = PolicyCache.from_json(file, loaded.model, tokenizer=loaded.tokenizer)
ids = loaded.tokenizer(prompt, return_tensors="pt").to(loaded.device)
out = loaded.model.generate(**ids, past_key_values=cache, max_new_tokens=64, do_sample=False)
print(loaded.tokenizer.decode(out[0], skip_special_tokens=True))
seen = cache.get_seq_length()
print(f"cache: {cache.bytes_resident:,} bytes after {seen} tokens", file=sys.stderr)
'''

_STOCK = '''"""Generate with the full KV cache, which transformers has itself."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

if len(sys.argv) != 3:
    sys.exit('usage: python generate.py MODEL "the prompt"')
name, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
ids = tokenizer(prompt, return_tensors="pt")
out = model.generate(
    **ids, cache_implementation="dynamic", max_new_tokens=64, do_sample=False
)
print(tokenizer.decode(out[0], skip_special_tokens=True))
'''

_CUSTOM = '''"""A policy for `model.generate(custom_generate=...)`, written by kvsearch."""

import json
from typing import Any

from kvsearch import Policy, PolicyCache

POLICY = Policy.build(json.loads(r"""
{policy}
"""))


def generate(model: Any, tokenizer: Any = None, **given: Any) -> Any:
    """Generate through the policy's cache, or a cache that is given.

    Args:
        model: the model.
        tokenizer: its own, where the policy has to read the text.
        given: what `model.generate` takes.
    """
    if given.get("past_key_values") is None:
        given["past_key_values"] = PolicyCache(POLICY, model, tokenizer=tokenizer)
    if tokenizer is not None:
        given["tokenizer"] = tokenizer
    return model.generate(**given)
'''


def custom_generate(policy: Policy) -> dict[str, str]:
    """Files, by name in a repository, from which `model.generate(custom_generate=...)` takes it."""
    return {
        "custom_generate/generate.py": _CUSTOM.format(policy=policy.to_json().strip()),
        "custom_generate/requirements.txt": "kvsearch\n",
    }


def stock(policy: Policy) -> bool:
    """Whether a cache of transformers itself does what the policy says."""
    return not (policy.drops or policy.quantizes or policy.anchors or policy.channels.active)


def write(job: Job) -> Artefact:
    """`policy.json` and `generate.py`."""
    plain = stock(job.policy)
    return Artefact(
        {"policy.json": job.policy.to_json(), "generate.py": _STOCK if plain else _SCRIPT},
        {"cache_implementation": "dynamic"} if plain else {},
    )


def score(made: Artefact, loaded: "LoadedModel", ids: NDArray[np.int64], prompt: int) -> Scored:
    """Fill the cache that the artefact uses token by token, after `prompt` tokens in one call.

    Args:
        made: the artefact.
        loaded: the model.
        ids: token windows `[W, T]`.
        prompt: tokens of the first call.
    """
    from kvsearch.evaluation.evaluator import stepwise

    if made.options:  # a cache of transformers itself
        return _score_stock(loaded, ids)
    policy = Policy.build(json.loads(made.files["policy.json"]))
    nll, cache = stepwise(loaded, policy, ids, prompt=max(1, prompt))
    return Scored(nll.astype(np.float64), {"bytes_resident": cache.bytes_resident})


def _score_stock(loaded: "LoadedModel", ids: NDArray[np.int64]) -> Scored:
    import torch

    from kvsearch.cache.huggingface import full_cache

    model = loaded.model
    x, cache, out = torch.from_numpy(ids).to(loaded.device), full_cache(model), []
    with torch.inference_mode():
        for t in range(x.shape[1] - 1):
            logits = model(x[:, t : t + 1], past_key_values=cache, use_cache=True).logits[:, 0]
            out.append(-logits.double().log_softmax(-1).gather(-1, x[:, t + 1 : t + 2]))
    held = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    size = sum(t.nbytes for t in held) // len(ids)
    return Scored(torch.cat(out, 1).cpu().numpy(), {"bytes_resident": size})


TARGET = Target(
    name="transformers",
    runtime="transformers",
    version=VERSION,
    knobs="every policy, through our cache",
    executes=None,
    options={
        "cache_implementation": (
            "dynamic", "static", "offloaded", "offloaded_static", "quantized", "paged",
        )
    },
    write=write,
    proof="nll",
    score=score,
    distribution="transformers",
)  # fmt: skip
