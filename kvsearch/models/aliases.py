"""Short names of models and the hub repositories they stand for; one line a model."""

from collections.abc import Mapping
from types import MappingProxyType

DEFAULT = "smollm2-135m"

# Base models unless the name says otherwise; SmolLM2 and TinyLlama are the exceptions, because the
# default model is the Instruct one and its siblings should be comparable with it.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "gemma-2b": "google/gemma-2b",
        "gemma-7b": "google/gemma-7b",
        "gemma2-2b": "google/gemma-2-2b",
        "gemma2-9b": "google/gemma-2-9b",
        "gemma3-270m": "google/gemma-3-270m",
        "gemma3-1b": "google/gemma-3-1b-pt",
        "gpt2": "openai-community/gpt2",
        "granite3.3-2b": "ibm-granite/granite-3.3-2b-base",
        "granite3.3-8b": "ibm-granite/granite-3.3-8b-base",
        "llama2-7b": "meta-llama/Llama-2-7b-hf",
        "llama2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
        "llama2-13b": "meta-llama/Llama-2-13b-hf",
        "llama2-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
        "llama2-70b": "meta-llama/Llama-2-70b-hf",
        "llama3-8b": "meta-llama/Meta-Llama-3-8B",
        "llama3-8b-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
        "llama3-70b": "meta-llama/Meta-Llama-3-70B",
        "llama3.1-8b": "meta-llama/Llama-3.1-8B",
        "llama3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
        "llama3.1-70b": "meta-llama/Llama-3.1-70B",
        "llama3.2-1b": "meta-llama/Llama-3.2-1B",
        "llama3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
        "llama3.2-3b": "meta-llama/Llama-3.2-3B",
        "llama3.2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
        "llama3.3-70b-instruct": "meta-llama/Llama-3.3-70B-Instruct",
        "longchat-7b": "lmsys/longchat-7b-v1.5-32k",
        "mistral-7b": "mistralai/Mistral-7B-v0.3",
        "mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.3",
        "mistral-nemo-12b": "mistralai/Mistral-Nemo-Base-2407",
        "olmo2-1b": "allenai/OLMo-2-0425-1B",
        "olmo2-7b": "allenai/OLMo-2-1124-7B",
        "qwen2-0.5b": "Qwen/Qwen2-0.5B",
        "qwen2-1.5b": "Qwen/Qwen2-1.5B",
        "qwen2-7b": "Qwen/Qwen2-7B",
        "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
        "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
        "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
        "qwen2.5-3b": "Qwen/Qwen2.5-3B",
        "qwen2.5-7b": "Qwen/Qwen2.5-7B",
        "qwen2.5-7b-instruct": "Qwen/Qwen2.5-7B-Instruct",
        "qwen2.5-14b": "Qwen/Qwen2.5-14B",
        "qwen2.5-32b": "Qwen/Qwen2.5-32B",
        "qwen3-0.6b": "Qwen/Qwen3-0.6B",
        "qwen3-1.7b": "Qwen/Qwen3-1.7B",
        "qwen3-4b": "Qwen/Qwen3-4B",
        "qwen3-8b": "Qwen/Qwen3-8B",
        "qwen3-14b": "Qwen/Qwen3-14B",
        "qwen3-32b": "Qwen/Qwen3-32B",
        "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
        "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "smollm2-135m-base": "HuggingFaceTB/SmolLM2-135M",
        "smollm2-360m-base": "HuggingFaceTB/SmolLM2-360M",
        "smollm2-1.7b-base": "HuggingFaceTB/SmolLM2-1.7B",
        "smollm3-3b": "HuggingFaceTB/SmolLM3-3B-Base",
        "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "vicuna-7b": "lmsys/vicuna-7b-v1.5",
    }
)


def hub_id(model: str) -> str:
    """What an alias stands for; any other name as it is."""
    return ALIASES.get(model.lower(), model)
