"""Where the text comes from, and how it is cut into search, select and report parts."""

from kvsearch.workloads.text.datasets import DATASETS, read_dataset
from kvsearch.workloads.text.read import TextLike, builtin, read_file, read_files, read_text
from kvsearch.workloads.text.source import Source, Text
from kvsearch.workloads.text.windows import Parts, Tokens, beside, cut, split, tokenize, windows

__all__ = [
    "DATASETS",
    "Parts",
    "Source",
    "Text",
    "TextLike",
    "Tokens",
    "beside",
    "builtin",
    "cut",
    "read_dataset",
    "read_file",
    "read_files",
    "read_text",
    "split",
    "tokenize",
    "windows",
]
