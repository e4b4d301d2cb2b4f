"""Generate with a policy: transformers' own `generate()`, and a cache that holds fewer bytes.

python docs/examples/generate.py [POLICY.json]    # SmolLM2-135M
python docs/examples/generate.py --smoke          # a tiny random model, seconds
"""

import sys

from tiny import SMOKE, text, tiny

import kvsearch

files = [a for a in sys.argv[1:] if a.endswith(".json")]
policy = (
    kvsearch.Policy.from_json(files[0])
    if files
    else kvsearch.Policy(slots=64, sinks=4, interval=16, name="sinks and a window")
)
loaded = tiny() if SMOKE else kvsearch.load_model("smollm2-135m")
prompt = text().text[:400] if SMOKE else "The lighthouse keeper climbed the stairs. " * 20
ids = loaded.tokenizer(prompt, return_tensors="pt").to(loaded.device)

full = kvsearch.PolicyCache(kvsearch.Policy(), loaded.model)  # keeps every token in 16 bits
cache = kvsearch.PolicyCache(policy, loaded.model)
for name, held in (("full cache", full), (policy.name, cache)):
    out = loaded.model.generate(**ids, past_key_values=held, max_new_tokens=24, do_sample=False)
    new = loaded.tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    print(f"{name}: {held.bytes_resident:,} bytes after {held.get_seq_length()} tokens: {new!r}")
