"""Requests at once, tokens a second and time to first token in vLLM, at equal memory.

    VLLM_ENV/bin/python measure.py MODEL --text wikitext2-test.raw --memory 64 2048

Runs where vLLM and kvsearch are installed side by side. All requests come at once. Each row is a
process of its own, because vLLM makes one engine in a process; rounds alternate between policies,
so that what else runs on the machine meets all of them. Appends to results.csv.
"""

import argparse
import csv
import datetime
import json
import os
import resource
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
ZOO = HERE.parents[1] / "docs" / "zoo"
SCHEMA = {"schema": "kvsearch.policy/2"}
FOUR = {"tiers": [{"key_bits": 4, "value_bits": 4}], "quantizer": {"rotate": True}}
POLICIES: dict[str, Any] = {
    "vllm": None,  # its own cache
    "full": SCHEMA,  # the same in our plugin
    "bits": SCHEMA | FOUR | {"interval": 16},
    **{
        f"zoo-b{n}": json.loads((ZOO / f"smollm2-135m-b{n}" / "policy.json").read_text())
        for n in (64, 256)
    },
    "prompt-128": SCHEMA
    | {"slots": 128, "interval": 16, "sinks": 4, "recent_window": 32, "trigger": "prompt"}
    | {"rule": {"name": "attention", "horizon": 16}},
}
WARM = 8  # tokens generated before anything is timed, after a prompt of as many


def run(model: str, policy: str, prompts: list[list[int]], new: int, o: Any) -> dict[str, Any]:
    """One engine, all requests."""
    from vllm import LLM, SamplingParams

    asked = {} if POLICIES[policy] is None else {"kvsearch_policy": str(o.folder / policy)}
    longest = len(prompts[0]) + new + 1
    # under an fp32 model vLLM's own cache is in fp32: twice the memory holds as many tokens
    given = (o.mib << 20) * (1 + (policy == "vllm" and o.dtype == "float32"))
    llm = LLM(
        model, dtype=o.dtype, enforce_eager=True, max_model_len=longest, block_size=32,
        kv_cache_memory_bytes=given, max_num_seqs=len(prompts), max_num_batched_tokens=512,
        enable_prefix_caching=False, additional_config=asked,
    )  # fmt: skip
    engine, first = llm.llm_engine, dict[str, float]()
    scheduler = engine.engine_core.engine_core.scheduler
    warm = SamplingParams(temperature=0, max_tokens=WARM, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompts[0][: 2 * WARM]}], warm, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    start, cpu, most = time.perf_counter(), time.process_time(), 0
    for i, ids in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        outs = engine.step()
        most = max(most, len(scheduler.running))
        for out in outs:
            first.setdefault(out.request_id, time.perf_counter() - start)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    waits = sorted(first.values())
    return {
        "requests": len(prompts), "prompt": len(prompts[0]), "generated": new,
        "mib_given": given >> 20, "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "at_once": most, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1),
        "tokens_per_second": round(len(prompts) * new / seconds, 1),
        "tokens_per_cpu_second": round(len(prompts) * new / cpu, 1),
        "first_token_median": round(waits[len(waits) // 2], 1),
        "first_token_last": round(waits[-1], 1),
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("model", help="folder")
    ask.add_argument("--text", type=Path, required=True)
    ask.add_argument("--memory", type=int, nargs="+", default=[64, 128, 256], help="MiB")
    ask.add_argument("--only", nargs="+", default=list(POLICIES))
    ask.add_argument("--requests", type=int, default=64)
    ask.add_argument("--prompt", type=int, default=1000)
    ask.add_argument("--new", type=int, default=128)
    ask.add_argument("--rounds", type=int, default=1)
    ask.add_argument("--dtype", default="float32")
    ask.add_argument("--folder", type=Path, default=Path("/tmp/vllm-throughput"))
    ask.add_argument("--note", default="", help="what else ran")
    o = ask.parse_args()
    o.folder.mkdir(exist_ok=True)
    for name, policy in POLICIES.items():
        (o.folder / name).write_text(json.dumps(policy))
    import vllm.v1.worker.cpu_worker  # noqa: F401 - once, for all children
    from transformers import AutoTokenizer

    from kvsearch.serving.vllm.plugin import install

    install()
    text = o.text.read_text()[: 8 * o.requests * o.prompt]
    ids = AutoTokenizer.from_pretrained(o.model)(text)["input_ids"]
    prompts = [ids[i * o.prompt : (i + 1) * o.prompt] for i in range(o.requests)]
    assert len(prompts[-1]) == o.prompt, "the text is too short"
    for turn in range(o.rounds):
        for mib in o.memory:
            o.mib = mib
            for policy in o.only:
                if (child := os.fork()) != 0:
                    os.waitpid(child, 0)
                    continue
                try:
                    found = run(o.model, policy, prompts, o.new, o)
                    about = {"policy": policy, "mib": o.mib, "dtype": o.dtype, "round": turn}
                    date = datetime.date.today().isoformat()
                    write(about | found | {"date": date, "note": o.note})
                except BaseException:
                    traceback.print_exc()
                os._exit(0)


def write(row: dict[str, Any]) -> None:
    file = HERE / "results.csv"
    new = not file.exists()
    with open(file, "a", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(row, flush=True)


if __name__ == "__main__":
    main()
