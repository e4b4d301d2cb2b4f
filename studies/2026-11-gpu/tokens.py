"""How much of a decoded token's time the GPU is busy; `records/tokens.csv` was taken from it.

    python tokens.py      # on a GPU, in the root of a checkout

A 7B-shaped model with random weights after a prompt of 4096 tokens, one sequence; torch's profiler
sums the kernels of 16 tokens, after as many without it were timed.
"""

import sys
import time
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = ["kernels/bench", "kernels", "."]

import end_to_end  # noqa: E402

from kvsearch.cache.huggingface import PolicyCache, full_cache  # noqa: E402

TOKENS, SHOWN = 16, 12


@torch.inference_mode()
def main() -> None:
    model = end_to_end.built(end_to_end.LLAMA_7B, "cuda")
    ids = torch.randint(0, model.config.vocab_size, (1, 4096), device="cuda")
    for name, policy in end_to_end.CACHES.items():
        cache = full_cache(model) if policy is None else PolicyCache(policy, model, packed=True)

        def decode(tokens: torch.Tensor, steps: int, cache: object = cache) -> None:
            for _ in range(steps):
                model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)

        decode(ids, 1)
        decode(ids[:, :1], TOKENS + 3)
        torch.cuda.synchronize()
        start = time.perf_counter()
        decode(ids[:, :1], TOKENS)
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            decode(ids[:, :1], TOKENS)
            torch.cuda.synchronize()
        us, launches = Counter[str](), Counter[str]()
        for event in seen.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                us[event.name] += event.device_time
                launches[event.name] += 1
        print(
            f"{name}: {wall / TOKENS * 1e3:.2f} ms a token, host {host / TOKENS * 1e3:.2f}, "
            f"kernels {us.total() / TOKENS / 1e3:.2f} ms, {launches.total() / TOKENS:.0f} launches"
        )
        for kernel, took in us.most_common(SHOWN):
            print(f"{took / TOKENS:9.1f} us {launches[kernel] / TOKENS:7.1f}x  {kernel[:100]}")


if __name__ == "__main__":
    main()
