"""`vllm serve` with a policy named in its environment, asked over HTTP by two requests at once.

    python serve_http.py --text wikitext2-test.raw --python VLLM_ENV/bin/python

Where kvsearch is installed beside vLLM, as docs/vllm.md says, the server finds the plugin by its
entry point. Writes http.json: losses of the prompts, and tokens, beside those of our own cache.
"""

import argparse
import datetime
import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from measure import CHARACTERS, MODEL, NEW, PIECE, POLICIES, differ, in_our_cache, requests_of
from transformers import AutoTokenizer

from kvsearch.files import write_atomic
from kvsearch.models import load_model
from kvsearch.models.load import folder_of
from kvsearch.policy import Policy

HERE = Path(__file__).parent
NAME, PORT, PATIENCE = "scored", 8137, 300  # seconds until the server answers


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """What the server answers, as JSON if it is."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def completed(ids: list[int]) -> dict[str, Any]:
    """Losses of a prompt and the tokens that follow it."""
    wanted = {
        "model": "m", "prompt": ids, "temperature": 0, "max_tokens": NEW, "ignore_eos": True,
        "prompt_logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    choice = ask("/v1/completions", wanted)["choices"][0]
    logprobs = choice["prompt_logprobs"][1:]
    return {
        "nll": [-at[str(i)]["logprob"] for at, i in zip(logprobs, ids[1:], strict=True)],
        "generated": choice["token_ids"],
    }


def served(python: Path, policy: Path, requests: list[list[int]]) -> list[dict[str, Any]]:
    """Answers to all requests, sent at once to a server that this starts and stops."""
    env = {
        **os.environ, "KVSEARCH_POLICY": str(policy), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2",
    }  # fmt: skip
    env.pop("PYTHONPATH", None)  # the plugin is the one that is installed there
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder_of(MODEL),
        "--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--port", str(PORT),
        "--max-model-len", "1024", "--max-num-batched-tokens", str(PIECE), "--block-size", "128",
    ]  # fmt: skip
    with open(policy.with_suffix(".log"), "w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(PATIENCE):
            try:
                ask("/health")
                break
            except (urllib.error.URLError, ConnectionError):
                if server.poll() is not None:
                    break
                time.sleep(1)
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(completed, requests))
    except OSError as e:
        said = policy.with_suffix(".log").read_text()[-3000:]
        raise SystemExit(f"{said}\nthe server gave no answer: {e}") from e
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--text", type=Path, required=True)
    options.add_argument("--python", type=Path, required=True)
    o = options.parse_args()
    loaded, policy = load_model(MODEL), Policy.build(POLICIES[NAME])
    tokenizer = AutoTokenizer.from_pretrained(folder_of(MODEL))
    ids = np.array(tokenizer(o.text.read_text()[:CHARACTERS])["input_ids"])
    requests = requests_of(NAME, ids)
    here = in_our_cache(loaded, policy, requests)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "policy.json"
        file.write_text(policy.to_json())
        there = served(o.python, file, requests)
        log = file.with_suffix(".log").read_text()
    nll, off = differ(here["nll"], [x["nll"] for x in there])
    tokens = [x["generated"] for x in there]
    found = {
        "date": datetime.date.today().isoformat(),
        "policy": NAME,
        "tokens": len(nll),
        "off": off,
        "same_tokens": tokens == here["generated"],
        "generated": tokens,
        "log": [line[line.find("]") + 2 :] for line in log.splitlines()
                if "KV cache size" in line or "Maximum concurrency" in line],
    }  # fmt: skip
    write_atomic(HERE / "http.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
