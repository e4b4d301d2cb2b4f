"""Search policies for a model and a text, look at the front, and keep the best policy.

python docs/examples/search.py            # SmolLM2-135M, a few minutes
python docs/examples/search.py --smoke    # a tiny random model, seconds
"""

from pathlib import Path
from tempfile import mkdtemp

from tiny import SMOKE, text, tiny

import kvsearch

if SMOKE:
    found = kvsearch.search(
        tiny(), text(), budget_slots=48, context=192, trials=2, warm_start=False, bench=False,
        out=mkdtemp(prefix="kvsearch-"),
    )  # fmt: skip
else:
    found = kvsearch.search("smollm2-135m", budget_slots=256, progress=True)

print(found)
for row in found.front:
    print(f"{row.name:<22}{row.bytes_peak:>10} bytes  dNLL {row.dnll_full.mean:+.4f} nats/token")
trials = found.to_frame()  # pandas: every trial, every field
print(trials[["name", "state", "dnll", "bytes_peak"]].to_string(index=False))
if found.best is not None:
    file = Path(found.folder, "mine.json")
    file.write_text(found.best.to_json())
    print(f"python docs/examples/generate.py {file}")
