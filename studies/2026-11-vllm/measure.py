"""Concurrent requests in vLLM with the plugin, beside the same requests in our own cache.

    kvsearch targets --install vllm
    python measure.py --text wikitext2-test.raw
    python measure.py --text wikitext2-test.raw --python ENV/bin/python

Records, with date and versions: `records/`, a folder for each minor version of vLLM, in it one per
policy. `--python` names another environment of vLLM, of any version that the plugin serves.
`--kept FOLDER` keeps what was measured so far and goes on from it, and the next version is compared
with the same losses of ours.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from kvsearch.cache import PolicyCache
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.exporters import find
from kvsearch.exporters.environments import require
from kvsearch.exporters.proof import TOLERANCE, ours
from kvsearch.files import write_atomic
from kvsearch.models import LoadedModel, load_model
from kvsearch.models.head import Head
from kvsearch.models.load import folder_of
from kvsearch.policy import ModelShape, Policy, layout
from kvsearch.results.intervals import paired
from kvsearch.serving.account import account

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
ZOO = json.loads((HERE / "zoo-b256.json").read_text())  # docs/zoo's until 24 November 2026
CHARACTERS = 20_000  # of the text
STARTS = (0, 1000)  # of the requests in the text
LENGTHS = (300, 200)
LONGER = {"scored": (600, 350), "scored-per-layer": (500, 300)}
NEW = 16  # tokens generated after each
LATER = 64  # the same, where losses are theirs
PIECE = 256  # tokens of a prompt that vLLM takes in at once
LONGEST = 1024  # tokens that a request may have, in vLLM's account
ROOM = 256 << 20  # bytes that vLLM may give to the cache
EXACT = 1e-3  # nats, of policies in 16 bits
SLOTS = {"slots": 128, "interval": 16, "sinks": 4, "recent_window": 32}
RULE = {"name": "attention", "alpha": 1.0, "beta": 1.0}
FOUR = {"tiers": [{"key_bits": 4, "value_bits": 4}], "quantizer": {"rotate": True}}
POLICIES: dict[str, dict[str, Any]] = {
    "scored": SLOTS
    | {"recent_window": 16, "rule": RULE, "budgets": {"kind": "pyramid", "beta": 2}},
    "scored-per-layer": SLOTS | {"rule": RULE, "budgets": ZOO["budgets"], "ladder": ZOO["ladder"]},
    "zoo-b256": {k: v for k, v in ZOO.items() if k not in ("schema", "name", "about")},
    "four-bit-preempted": FOUR | {"interval": 16},
    "re-indexed": SLOTS | {"positions": "cache"},
    "none": {},  # vLLM's own cache, without the plugin
}
# Compacted after the prompt: losses are those of generated tokens, since no others change
RECENT = {"name": "attention", "horizon": 16}
PROMPTED: dict[str, dict[str, Any]] = {
    "prompt": SLOTS | {"trigger": "prompt", "rule": RECENT},
    "prompt-adakv": SLOTS | {"trigger": "prompt", "rule": RULE, "budgets": {"kind": "adakv"}},
    "prompt-preempted": SLOTS | {"slots": 200, "trigger": "prompt", "rule": RECENT},
    "generation": SLOTS | {"slots": 32, "recent_window": 8, "trigger": "generation", "rule": RULE},
    "generation-four-bit": FOUR | {"interval": 16, "trigger": "generation"},
}


def in_our_cache(loaded: LoadedModel, policy: Policy, requests: list[list[int]]) -> dict[str, Any]:
    """Losses, tokens and bytes, one request after the other."""
    found: dict[str, Any] = {"nll": [], "generated": [], "bytes": []}
    for ids in requests:
        nll = Evaluator(loaded).quality(policy, np.array([ids]), resident=False).nll[0]
        cache = PolicyCache(policy, loaded.model)
        out = loaded.model.generate(
            torch.tensor([ids]), past_key_values=cache, max_new_tokens=NEW, min_new_tokens=NEW,
            do_sample=False,
        )  # fmt: skip
        found["nll"].append(nll.tolist())
        found["generated"].append(out[0, len(ids) :].tolist())
        found["bytes"].append(cache.bytes_resident)
    return found


def after_the_prompt(
    loaded: LoadedModel, policy: Policy, requests: list[list[int]]
) -> dict[str, Any]:
    """Losses of the tokens that are generated, those tokens, and bytes."""
    found: dict[str, Any] = {"nll": [], "generated": [], "bytes": []}
    for ids in requests:
        cache = PolicyCache(policy, loaded.model)
        out = loaded.model.generate(
            torch.tensor([ids]), past_key_values=cache, max_new_tokens=LATER, min_new_tokens=LATER,
            do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        new = out.sequences[0, len(ids) :]
        told = torch.cat(out.logits).float().log_softmax(-1)
        found["nll"].append((-told.gather(1, new[:, None])[:, 0]).tolist())
        found["generated"].append(new.tolist())
        found["bytes"].append(cache.bytes_resident)
    return found


def in_pieces(loaded: LoadedModel, policy: Policy, requests: list[list[int]]) -> list[list[float]]:
    """The same losses with each prompt cut as vLLM cuts it."""
    head, out = Head(loaded.model, loaded.silent), []
    for ids in requests:
        x, cache = torch.tensor([ids]), PolicyCache(policy, loaded.model)
        with torch.inference_mode():
            hidden = torch.cat([head.hidden(part, cache) for part in x.split(PIECE, 1)], 1)
            out.append(head.nll(hidden[:, :-1], x)[0].tolist())
    return out


def requests_of(name: str, ids: NDArray[np.int64]) -> list[list[int]]:
    """Token ids of the requests that a policy is measured on."""
    lengths = LONGER.get(name, LENGTHS)
    return [ids[a : a + n].tolist() for a, n in zip(STARTS, lengths, strict=True)]


def jobs_for(
    policies: dict[str, Policy], shape: ModelShape, ids: NDArray[np.int64], folder: Path
) -> list[dict[str, Any]]:
    """What serve.py is told."""
    jobs = []
    for name, policy in policies.items():
        file, requests = folder / f"{name}.json", requests_of(name, ids)
        options = {
            "max_model_len": LONGEST, "kv_cache_memory_bytes": ROOM, "max_num_seqs": 4,
            "max_num_batched_tokens": PIECE, "block_size": 128,
        }  # fmt: skip
        file.write_text(policy.to_json())
        if name.endswith("preempted"):
            # as many as the prompts fill, the one that vLLM keeps for nobody, and one more
            longest = max(LENGTHS) + (LATER + 1 if name in PROMPTED else 140)
            counted = account(policy, shape, longest, 16)
            few = sum(counted.blocks(len(x) + 1, len(x)) for x in requests) + 2
            options |= {"max_model_len": longest, "block_size": 16}
            options |= {"num_gpu_blocks_override": max(few, counted.most + 1)}
        named = None if name == "none" else str(file)
        jobs.append({
            "name": name, "policy": named, "requests": requests, "options": options,
            "new": LATER if name in PROMPTED else NEW,
        })  # fmt: skip
    return jobs


def in_vllm(python: Path, jobs: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Run serve.py in vLLM's environment; what it found, by policy."""
    packages = folder / "packages"
    env = {**os.environ, "PYTHONPATH": str(packages if packages.exists() else ours(packages))}
    asked = "from kvsearch.serving.vllm.plugin import installed; print(installed())"
    told = subprocess.run(
        [python, "-c", asked], env=env, check=True, capture_output=True, text=True
    )
    results = folder / f"results-{told.stdout.strip()}.jsonl"
    results.touch()
    lines = map(json.loads, results.read_text().splitlines())
    kept = {x["name"] for x in lines if "error" not in x}
    (folder / "jobs.json").write_text(json.dumps([j for j in jobs if j["name"] not in kept]))
    command = [python, HERE / "serve.py", folder_of(MODEL), folder / "jobs.json", results]
    subprocess.run(command, env=env, check=True)
    return {x["name"]: x for x in map(json.loads, results.read_text().splitlines())}


def differ(
    a: list[list[float]], b: list[list[float]]
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Losses of all requests, and how far `b` is from `a`."""
    x, y = (np.concatenate(losses) for losses in (a, b))
    d = paired(y[None], x[None])
    largest = float(np.abs(y - x).max())
    return y, {"mean": d.mean, "lo": d.lo, "hi": d.hi, "largest": largest}


def record(
    name: str, policy: Policy, shape: ModelShape, here: dict[str, Any], there: dict[str, Any]
) -> None:
    theirs = there["nll"]
    if name in PROMPTED:  # as far as both generate the same
        theirs = there["nll_generated"]
        alike = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
            for x, y in zip(here["generated"], there["generated"], strict=True)
        ]
        here["nll"] = [x[:n] for x, n in zip(here["nll"], alike, strict=True)]
        theirs = [x[:n] for x, n in zip(theirs, alike, strict=True)]
    given = np.concatenate(here["nll"])
    found, off = differ(here["nll"], theirs)
    largest = off.pop("largest")
    bound = TOLERANCE if policy.quantizes else EXACT
    other = {"in_pieces": differ(here["nll"], here["pieces"])[1]} if "pieces" in here else {}
    longest = (max(LENGTHS) + LATER, max(LENGTHS)) if name in PROMPTED else (LONGEST, 0)
    data_of = ("nll", "nll_generated", "generated")
    data = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {"python": platform.python_version(),
                     **{n: version(n) for n in ("torch", "transformers", "numpy")}},
        "model": f"{MODEL}, weights in fp32",
        "target": "vllm",
        "version": there["versions_there"]["vllm"],
        "policy": policy.plain(),
        "requests": LENGTHS if name in PROMPTED else [len(x) + 1 for x in here["nll"]],
        "losses_of": "generated tokens" if name in PROMPTED else "prompts",
        "loss": {
            "tokens": len(given), "given": float(given.mean()), "runtime": float(found.mean()),
            "off": off, "largest": largest, "agrees": bool(abs(off["mean"]) <= bound),
        },
        **other,
        "same_tokens": here["generated"] == there["generated"],
        "generated": there["generated"],
        "bytes_peak": layout(policy, shape).bytes_peak(*longest),
        "bytes_ours": here["bytes"],
        **{k: v for k, v in there.items() if k not in ("name", *data_of)},
    }  # fmt: skip
    place = HERE / "records" / ".".join(data["version"].split(".")[:2])
    place.mkdir(parents=True, exist_ok=True)
    write_atomic(place / f"{name}.json", json.dumps(data, indent=1) + "\n")
    print(data["version"], name, data["loss"], data["same_tokens"], data["blocks"], flush=True)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--text", type=Path, required=True)
    ask.add_argument("--python", type=Path, help="the interpreter of another environment of vLLM")
    ask.add_argument("--kept", type=Path, help="folder for what was measured so far")
    ask.add_argument("--only", nargs="+", help="some of the policies")
    o = ask.parse_args()
    python = o.python or require(find("vllm"))
    with tempfile.TemporaryDirectory() as place:
        folder = o.kept or Path(place)
        folder.mkdir(exist_ok=True)
        loaded = load_model(MODEL)
        # as vLLM reads a prompt
        tokens = AutoTokenizer.from_pretrained(folder_of(MODEL))(o.text.read_text()[:CHARACTERS])
        ids = np.array(tokens["input_ids"])
        named = POLICIES | PROMPTED
        policies = {n: Policy.build(named[n]) for n in o.only or named}
        file = folder / "ours.json"
        here = json.loads(file.read_text()) if file.exists() else {}
        for name, policy in policies.items():
            found, requests = here.setdefault(name, {}), requests_of(name, ids)
            how = after_the_prompt if name in PROMPTED else in_our_cache
            if "nll" not in found:
                found |= how(loaded, policy, requests)
            if policy.quantizes and name not in PROMPTED and "pieces" not in found:
                found["pieces"] = in_pieces(loaded, policy, requests)
            file.write_text(json.dumps(here))
        there = in_vllm(python, jobs_for(policies, loaded.shape, ids, folder), folder)
    for name, policy in policies.items():
        record(name, policy, loaded.shape, here[name], there[name])


if __name__ == "__main__":
    main()
