"""MLX-LM: a rotating cache with sinks in 16 bits, or a quantised one, layer by layer."""

from kvsearch.exporters.capability import ONE, Capability, Eviction, Format
from kvsearch.exporters.layers import format_per_layer, slots_per_layer
from kvsearch.exporters.target import Artefact, Job, Target

VERSION = "0.32.2"
FORMATS = tuple(
    Format(f"{bits},{group}", bits, bits, "uniform", group=group, divides=group)
    for group in (64, 32, 128)
    for bits in (8, 4, 3, 2)
)

_SCRIPT = '''"""Generate with MLX-LM and this KV-cache policy.

    python run.py MODEL "once upon a time"

Needs: pip install mlx-lm=={version}
"""

import sys

from mlx_lm import generate, load
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

LAYERS = {layers}  # one for each layer, or a single one for all


def made(layer):
    if "max_size" in layer:
        return RotatingKVCache(max_size=layer["max_size"], keep=layer["keep"])
    if "bits" in layer:
        return QuantizedKVCache(group_size=layer["group_size"], bits=layer["bits"])
    return KVCache()


if len(sys.argv) != 3:
    sys.exit('usage: python run.py MODEL "the prompt"')
model, tokenizer = load(sys.argv[1])
count = len(model.layers)
layers = LAYERS * count if len(LAYERS) == 1 else LAYERS
if len(layers) != count:
    raise SystemExit(f"the policy is for {{len(layers)}} layers, the model has {{count}}")
cache = [made(layer) for layer in layers]
print(generate(model, tokenizer, prompt=sys.argv[2], max_tokens=64, prompt_cache=cache{given}))
'''


def write(job: Job) -> Artefact:
    """`run.py`."""
    assert TARGET.executes is not None
    given: dict[str, int] = {}
    if job.policy.evicts:
        sizes = slots_per_layer(job)
        layers = [dict(max_size=n, keep=job.policy.sinks) for n in sizes]
        given["prefill_step_size"] = 1
    else:
        formats = format_per_layer(job, TARGET.executes)
        layers = [
            {} if f is None else dict(bits=f.key_bits, group_size=f.group or 0) for f in formats
        ]
    options = {name: value for layer in layers for name, value in layer.items()}
    more = "".join(f", {k}={v}" for k, v in given.items())
    text = _SCRIPT.format(version=VERSION, layers=layers, given=more)
    return Artefact({"run.py": text}, options | given)


TARGET = Target(
    name="mlx",
    runtime="mlx-lm",
    version=VERSION,
    knobs="sinks and a window of 16 bits, or 8, 4, 3 or 2 bits in groups of 32, 64 or 128; either "
    "of them layer by layer",
    executes=Capability(
        formats=FORMATS, layers="free", eviction=Eviction(interval=ONE, budgets=True)
    ),
    options={
        "max_size": int,
        "keep": int,
        "prefill_step_size": int,
        "group_size": (32, 64, 128),
        "bits": (2, 3, 4, 5, 6, 8),
    },
    write=write,
    notes=(
        "Its steps are moved a little so that zero is one of the levels; ours are not.",
        "It rounds a token when it comes, a policy after the token's own step.",
        "run.py gives a rotating cache its prompt token by token: in a call of many, all layers "
        "see the first one's window without sinks, and fail where their sizes differ.",
    ),
    distribution="mlx-lm",
)
