"""A random two-layer Llama and a text for it: with `--smoke` the examples run in seconds."""

import sys

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import kvsearch

SMOKE = "--smoke" in sys.argv[1:]


def tiny() -> kvsearch.LoadedModel:
    """A model in memory that has learnt nothing; its tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return kvsearch.LoadedModel.of(model, PreTrainedTokenizerFast(tokenizer_object=core), "tiny")


def text() -> kvsearch.Text:
    """Squares in words: enough for a search, of no other use."""
    return kvsearch.Text(" ".join(f"{i} times {i} is {i * i}." for i in range(300)), "squares")
