"""transformers: our cache in `generate()`, which runs every policy; its own for the full cache."""

from kvsearch.export.target import Artefact, Job, Target
from kvsearch.policy import Policy

VERSION = "5.23.0"

_SCRIPT = '''"""Generate with the KV-cache policy in policy.json. Needs: pip install kvsearch"""

import sys
from pathlib import Path

from kvsearch.cache import PolicyCache
from kvsearch.models import load_model

name, prompt = sys.argv[1], sys.argv[2]
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

name, prompt = sys.argv[1], sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
ids = tokenizer(prompt, return_tensors="pt")
out = model.generate(
    **ids, cache_implementation="dynamic", max_new_tokens=64, do_sample=False
)
print(tokenizer.decode(out[0], skip_special_tokens=True))
'''


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
    distribution="transformers",
)  # fmt: skip
