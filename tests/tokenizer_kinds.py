"""Small tokenizers in the manner of the families in `ALIASES`, trained here on a few lines."""

import json
from collections.abc import Callable
from functools import cache
from string import printable

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast

LINES = (
    "The code of the lamp of Ann is 10007.\nQuestion: what is the special number of the amber "
    "canyon museum? Answer: The special number of the amber canyon is 1234567.\n\n",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # (3)\n",
    '{"city": "Paris", "country": "France"}\nShe said: "Hello there", and left.\n',
    "日本の首都は東京です。法国的首都是巴黎。\n",
    "Name: otter, lantern, violet, copper, meadow, falcon, granite, cedar.\nA list of rooms.\n",
)
GPT4 = (  # of Llama 3; Qwen's differs in single digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def _bpe() -> BPE:
    return BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def _pieces(core: Tokenizer, learn: pre_tokenizers.PreTokenizer | None = None) -> Tokenizer:
    """Trained as SentencePiece trains, within words and with bytes for rare letters."""
    own = json.loads(core.to_str())["pre_tokenizer"]
    words = pre_tokenizers.Split("▁", "merged_with_next")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([learn] if learn else []),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r"[\n\"():,.{}#]"), "isolated"),
            words,
        ]
    )
    special = ["<unk>", "<s>", "</s>"]
    if isinstance(core.model, Unigram):
        trainer = trainers.UnigramTrainer(
            vocab_size=300,
            special_tokens=special,
            unk_token="<unk>",
            show_progress=False,
            initial_alphabet=[*printable[:95].replace(" ", "▁"), "\n"],
        )
    else:
        trainer = trainers.BpeTrainer(
            vocab_size=640, special_tokens=[*special, *BYTES], show_progress=False,
            limit_alphabet=100,
        )  # fmt: skip
    core.train_from_iterator([*LINES * 4], trainer)
    state = json.loads(core.to_str())
    state["pre_tokenizer"] = own
    for token in state["added_tokens"]:  # bytes are pieces of the vocabulary, not special ones
        token["drop"] = token["content"] in BYTES
    state["added_tokens"] = [
        {k: v for k, v in t.items() if k != "drop"} for t in state["added_tokens"] if not t["drop"]
    ]
    return Tokenizer.from_str(json.dumps(state))


def _sentencepiece(core: Tokenizer, strip: int) -> PreTrainedTokenizerFast:
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         *([decoders.Strip(" ", strip, 0)] if strip else [])]
    )  # fmt: skip
    return _finished(core, ["<s>"])


def _finished(core: Tokenizer, start: list[str]) -> PreTrainedTokenizerFast:
    if start:
        core.add_special_tokens([*start])
        core.post_processor = processors.TemplateProcessing(
            single=[*start, "$A"], special_tokens=[(t, core.token_to_id(t)) for t in start]
        )
    bos = start[0] if len(start) == 1 else None
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token="</s>")


def _legacy() -> PreTrainedTokenizerFast:
    """Llama 2, TinyLlama, Vicuna: a space before every text and after every special token."""
    core = Tokenizer(_bpe())
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return _sentencepiece(_pieces(core), 1)


def _metaspace(scheme: str, model: Callable[[], BPE | Unigram] = _bpe) -> PreTrainedTokenizerFast:
    """As transformers loads Llama 2 and Mistral 7B (first), or with words apart (always)."""
    core = Tokenizer(model())
    split = scheme == "always"
    core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=split)
    core = _pieces(core, pre_tokenizers.Metaspace("▁", prepend_scheme=scheme))
    return _sentencepiece(core, 1)


def _gemma() -> PreTrainedTokenizerFast:
    """A token that begins a text, and no space before it."""
    core = Tokenizer(_bpe())
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return _sentencepiece(_pieces(core), 0)


def _bytes(
    start: list[str], pattern: str | None = None, space: bool = False, digits: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level: GPT-2's words, or those of `pattern`."""
    core = Tokenizer(BPE())
    parts: list[pre_tokenizers.PreTokenizer] = []
    if digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=pattern is None))
    core.pre_tokenizer = pre_tokenizers.Sequence(parts)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [*LINES * 4],
        trainers.BpeTrainer(
            vocab_size=560, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["</s>"], show_progress=False,
        ),
    )  # fmt: skip
    return _finished(core, start)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "llama 2, legacy": _legacy,
    "llama 2, mistral": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "unigram": lambda: _metaspace("always", Unigram),
    "gemma": _gemma,
    "gpt2": lambda: _bytes([]),
    "smollm2": lambda: _bytes([], digits=True),
    "gpt2, space": lambda: _bytes([], space=True),
    "llama 3": lambda: _bytes(["<|begin_of_text|>"], GPT4),
    "qwen": lambda: _bytes([], GPT4.replace("{1,3}", "")),
    "glm": lambda: _bytes(["[gMASK]", "<sop>"], GPT4),
}


@cache
def kind(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer by its kind, trained once."""
    return KINDS[name]()
