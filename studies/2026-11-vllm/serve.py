"""Requests in vLLM under several policies; runs in vLLM's environment.

    python serve.py MODEL jobs.json results.jsonl

Each policy has a process of its own, because vLLM makes one engine in a process. They run one after
the other, and each needs about 2 GB of memory.

A job names a policy file or none, the requests' token ids, how many tokens to generate, and options
of vLLM. What comes back: losses of the prompts and of the tokens generated, those tokens, vLLM's
blocks, the bytes that the requests' tensors had at their end, and versions.
"""

import json
import os
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def held(worker: Any) -> dict[str, Any]:
    """What the plugin holds in a worker."""
    table = worker.model_runner.attn_groups[0][0].get_metadata_builder(0).table
    return {
        "blocks_held": table.blocks,
        "bytes_held": [sum(layer.nbytes for layer in layers) for layers in table],
    }


def serve(model: str, job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from kvsearch.serving.vllm.plugin import installed

    start = time.perf_counter()
    named = {"kvsearch_policy": job["policy"]} if job["policy"] else {}
    llm = LLM(
        model, dtype="float32", enforce_eager=True, disable_log_stats=False,
        additional_config=named, **job["options"],
    )  # fmt: skip
    asked = SamplingParams(
        temperature=0, max_tokens=job["new"], prompt_logprobs=0, logprobs=0, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["requests"]]
    outs = llm.generate(prompts, asked, use_tqdm=False)
    told = llm.llm_engine.vllm_config.cache_config
    count = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    found = {
        "name": job["name"],
        "nll": [
            [-at[token].logprob for at, token in zip(o.prompt_logprobs[1:], ids[1:], strict=True)]
            for ids, o in zip(job["requests"], outs, strict=True)
        ],
        "nll_generated": [
            [-at[token].logprob for at, token in zip(out.logprobs, out.token_ids, strict=True)]
            for out in (o.outputs[0] for o in outs)
        ],
        "generated": [list(o.outputs[0].token_ids) for o in outs],
        "blocks": told.num_gpu_blocks,
        "cache_tokens": told.kv_cache_size_tokens,
        "concurrency": told.kv_cache_max_concurrency,
        "prefix_caching": told.enable_prefix_caching,
        "preemptions": int(count.get("vllm:num_preemptions", 0)),
        "versions_there": {
            "vllm": installed(),
            **{n: version(n) for n in ("torch", "transformers")},
        },
    }
    if named:
        found |= llm.collective_rpc(held)[0]
    found["seconds"] = round(time.perf_counter() - start, 1)
    return found


def main() -> None:
    import vllm.v1.worker.cpu_worker  # noqa: F401 - once, for all children

    from kvsearch.serving.vllm.plugin import install

    install()
    model, jobs, out = sys.argv[1:]
    for job in json.loads(Path(jobs).read_text()):
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        try:
            found = serve(model, job)
        except BaseException as e:
            traceback.print_exc()
            found = {"name": job["name"], "error": f"{type(e).__name__}: {e}"}
        with open(out, "a") as f:
            f.write(json.dumps(found) + "\n")
        os._exit(0)


if __name__ == "__main__":
    main()
