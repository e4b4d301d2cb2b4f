"""Where the text comes from, and how it is cut into search, select and report parts."""

from kvsearch.text.hub import DATASETS, read_dataset
from kvsearch.text.parts import Parts, Tokens, beside, cut, split, tokenize, windows
from kvsearch.text.source import Source, Text
from kvsearch.text.sources import TextLike, builtin, read_file, read_files, read_text

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
