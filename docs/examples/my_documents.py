# %% [markdown]
"""# Find a policy for my documents.

You have documents like those that your model will read, and a number of bytes for each sequence. A
search finds the policy that loses least on them; documents that it has not seen say what that
policy is worth.

    python docs/examples/my_documents.py            # SmolLM2-135M, minutes
    python docs/examples/my_documents.py --smoke    # a tiny random model, seconds
"""

# %% The documents: text files; here they are written first
from pathlib import Path
from tempfile import mkdtemp

from tiny import SMOKE, tiny

import kvsearch

folder = Path(mkdtemp(prefix="kvsearch-"))
for year in range(2020, 2026):
    lines = [f"In {year} we sold {n * year % 97} boats in town {n}." for n in range(400)]
    (folder / f"{year}.txt").write_text("\n".join(lines))
*seen, unseen = sorted(folder.glob("*.txt"))

# %% The search: the budget is memory, counted in tokens a layer that are kept in 16 bits
model = tiny() if SMOKE else kvsearch.load_model("smollm2-135m")
size = dict(budget_slots=48, context=192) if SMOKE else dict(budget_slots=128, context=1024)
how = dict(trials=2, warm_start=False, bench=False, text_only=True) if SMOKE else {}
found = kvsearch.search(model, seen, out=folder / "run", progress=not SMOKE, **size, **how)
print(found)

# %% The front: more memory, less loss
for row in found.front:
    print(f"{row.name:<22}{row.bytes_peak:>10} bytes  dNLL {row.dnll_full.mean:+.4f} nats/token")

# %% [markdown]
# `report.html` in the folder of the run has the same as a page, with what it was compared with.

# %% The check: on a document that the search has not seen, beside methods of the same size
best = found.best or found.front[0].policy
checked = kvsearch.evaluate([best, "h2o", "streamingllm"], model, unseen, windows=2, **size)
print(checked.to_frame()[["policy", "dnll_full", "dnll_full_lo", "dnll_full_hi", "bytes_peak"]])

# %% Use: `generate()` of transformers with the policy's cache
cache = kvsearch.PolicyCache(best, model.model)
prompt = model.tokenizer(unseen.read_text()[:300], return_tensors="pt").to(model.device)
out = model.model.generate(**prompt, past_key_values=cache, max_new_tokens=8, do_sample=False)
print(f"{cache.bytes_resident:,} bytes after {cache.get_seq_length()} tokens")
(folder / "mine.json").write_text(best.to_json())
