"""transformers: the policy file and a script that runs it through `generate()`. Nothing is lost."""

from pathlib import Path

from kvsearch.files import write_atomic
from kvsearch.policy import Policy

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


def write(policy: Policy, folder: Path) -> list[Path]:
    """Write `policy.json` and `generate.py`."""
    return [
        write_atomic(folder / "policy.json", policy.to_json()),
        write_atomic(folder / "generate.py", _SCRIPT),
    ]
