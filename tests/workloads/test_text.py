"""Texts: files and ranges, datasets, the built-in corpus, parts and windows."""

import hashlib
import os
import re
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pytest

from kvsearch.errors import TextError
from kvsearch.files import write_parquet
from kvsearch.options.run_config import RunConfig
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement
from kvsearch.session.make_windows import report_windows, search_windows, text
from kvsearch.workloads.prompts.files import read_all
from kvsearch.workloads.text import (
    DATASETS,
    Parts,
    Source,
    Text,
    builtin,
    read_dataset,
    read_file,
    read_files,
    read_text,
    split,
    tokenize,
    windows,
)


def test_a_file_keeps_every_byte_and_its_hash(tmp_path):
    raw = "Dünner Text\r\nzweite Zeile".encode()
    (tmp_path / "a.txt").write_bytes(raw)
    source = read_file(str(tmp_path / "a.txt"))
    assert source.text.encode() == raw
    assert source.sha256 == hashlib.sha256(raw).hexdigest()
    assert source.name == "a.txt"


def test_ranges_that_share_an_end_tile_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}é\n" for i in range(200)) + "no end")
    for a, b in [(0, 10), (500, 900), (9, 18), (1, 2000)]:
        specs = [f"{path}:{r}" for r in (f"0-{a}", f"{a}-{b}", f"{b}-")]
        texts = [read_file(spec).text for spec in specs if not spec.endswith(":0-0")]
        assert "".join(texts) == path.read_text()
        assert all(t.startswith(("line", "no end")) for t in texts)
    again = read_file(f"{path}:500-900").name.rpartition(":")[2]
    assert read_file(f"{path}:{again}").text == read_file(f"{path}:500-900").text


def test_several_files_are_one_text(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name * 3)
    source = read_files([str(tmp_path / "a"), str(tmp_path / "b")])
    assert (source.name, source.text) == ("a+b", "aaa\n\nbbb")


@pytest.mark.parametrize(
    ("content", "spec", "words"),
    [
        (b"a\xff12", "{}", "is not UTF-8 text (byte 1 is 0xff)"),
        (b"\xff\xfe1\0", "{}", "is not UTF-8 text but text in UTF-16; write"),
        (b"PAR1\0\0", "{}", "is not UTF-8 text but a Parquet file; write its text into"),
        (b"%PDF-1.7\n", "{}", "is not UTF-8 text but a PDF file"),
        (b"ok\0", "{}", "zero bytes"),
        (b" \n\n", "{}", "holds no text"),
        (b"a\nb\n", "{}:9-", "is empty: the file has 4 bytes"),
        (b"a\nb\n", "{}:3-1", "is empty"),
        (None, "{}", "there is no text file"),
        (
            None,
            "a text, not a file " * 99,
            "(1,881 characters); name one, or in Python give a text",
        ),
        (
            None,
            "a text\nof lines",
            "'a text\\nof lines'; name one, or in Python give a text itself",
        ),
        (None, "wikitext2", "the dataset of that name is --dataset wikitext2"),
        (None, ".", "is a folder"),
        (None, "~no-such-user/a.txt", "there is no text file"),
        (None, "~no-such-user/a.txt:0-9", "there is no text file"),
        (b"a\n", "{}:_-_", "there is no text file"),
        (b"a\n", "{}:1__0-2_0", "is empty: the file has 2 bytes"),
    ],
)
def test_a_bad_file_gets_one_sentence(tmp_path, content, spec, words):
    path = tmp_path / "f.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError) as caught:
        read_file(spec.format(path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="pipes have no names here")
def test_a_pipe_is_one_sentence():
    read, write = os.pipe()
    try:
        with pytest.raises(TextError, match="it is a pipe; save"):
            read_file(f"/dev/fd/{read}")
    finally:
        os.close(read)
        os.close(write)


def test_the_built_in_corpus_says_so_and_repeats_nothing_long():
    source = builtin()
    assert "no text given" in source.announcement and "--text FILE" in source.announcement
    assert len(source.text) > 300_000
    assert builtin() == source
    long = [p.strip() for p in source.text.split("\n\n") if len(p.strip()) >= 60]
    assert len(long) == len(set(long))


def test_a_dataset_is_joined_and_limited(monkeypatch):
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *a, **k: None)
    rows = iter([{"text": " = A = \n"}, {"text": ""}, {"text": " b c \n"}, {"text": "z" * 99}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: rows)
    source = read_dataset("wikitext2", limit=16)
    assert source.text == " = A = \n b c \nzz"
    assert source.name == "wikitext2/test"
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: [{"text": "x" * 50}] * 2)
    assert read_dataset("pg19", limit=60).text == "x" * 50 + "\n\n" + "x" * 8


def test_half_of_a_character_is_one_sentence(monkeypatch, tmp_path):
    """A lone surrogate, which JSON, `errors="surrogateescape"` and cut UTF-16 leave in a text."""
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *a, **k: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: [{"text": "ab\ude00c"}])
    path = tmp_path / "wtf8.txt"
    path.write_bytes("ab\ud83dc".encode("utf-8", "surrogatepass"))
    for read, what in (
        (lambda: read_text(Text("ab\udcff", "mine")), "'mine' has half of a character"),
        (lambda: read_files([Text("a"), Text("b\ud800\ud800")]), "'text' has half of a"),
        (lambda: read_dataset("pg19"), "'pg19/test' has half of a character"),
        (lambda: read_file(str(path)), "not UTF-8 text (byte 2 is 0xed)"),
    ):
        with pytest.raises(TextError, match=re.escape(what)):
            read()
    assert read_text(Text("a \U0001f525")).text[-1] == "\U0001f525"


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text there")
def test_a_name_that_is_no_text_has_escapes_in_records(tmp_path):
    for name in ("half\udcff.txt", "half\udcff.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a"}' if name.endswith("l") else "a b")
    assert read_file(str(tmp_path / "half\udcff.txt")).name == r"half\udcff.txt"
    assert list(read_all([tmp_path / "half\udcff.jsonl"])) == [r"half\udcff.jsonl"]


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text there")
def test_parquet_lies_in_folders_of_any_name(tmp_path):
    folder = RunFolder(tmp_path / "half\udcff")
    folder.save_nll("search", "1", Measurement(np.ones((1, 3), np.float32)))
    assert folder.load_nll("search", "1").nll.tolist() == [[1, 1, 1]]
    folder.shrink(1)
    assert folder.losses("search", "1", 1).tokens.tolist() == [2]
    write_parquet(folder.path / "a.parquet", pa.Table.from_pylist([{"prompt": "a"}]))
    (prompts,) = read_all([folder.path / "a.parquet"]).values()
    assert [r.context for r in prompts] == ["a"]


def test_an_unreachable_or_unknown_dataset_gets_one_sentence(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "nowhere")
    for name in DATASETS:
        with pytest.raises(TextError, match=r"cannot be fetched: no route; give .*--text FILE"):
            read_dataset(name)
    with pytest.raises(TextError, match="did you mean 'wikitext2'"):
        read_dataset("wikitext-2")


@pytest.fixture
def tokens(tiny_tokenizer):
    text = "".join(f"{i:06d}" for i in range(2000))
    return tokenize(tiny_tokenizer, Source.of("digits", text, ""))


def test_tokens_carry_hashes(tokens, tiny_tokenizer):
    assert tokens.ids.dtype == np.int32 and tokens.ids.shape == (12000,)
    assert tokens.token_sha256 == hashlib.sha256(tokens.ids.astype("<i4").tobytes()).hexdigest()
    with pytest.raises(TextError, match="has no tokens"):
        tokenize(tiny_tokenizer, Source.of("nothing", "", ""))


def test_parts_are_disjoint_contiguous_and_whole(tokens):
    parts = split(tokens)
    three = (parts.search, parts.select, parts.report)
    assert [p.name for p in three] == ["digits/search", "digits/select", "digits/report"]
    assert [p.ids.size for p in three] == [6000, 1800, 4200]
    assert np.array_equal(np.concatenate([p.ids for p in three]), tokens.ids)
    assert len({p.token_sha256 for p in three}) == 3
    own_report = split(tokens, parts.report)
    assert own_report.search.ids.size == 8400 and own_report.report is parts.report
    with pytest.raises(TextError, match="are the same text"):
        Parts(parts.search, parts.report, parts.search, tokens)
    with pytest.raises(TextError, match="only 1 tokens, too few for a "):
        split(tokens.part(0, 1, "x"))


@pytest.mark.parametrize("seed", [0, 7])
def test_windows_do_not_overlap_and_are_spread(tokens, seed):
    found = windows(tokens, count=7, length=600, seed=seed)
    assert found.dtype == np.int64 and found.shape == (7, 600)
    text = tokens.ids.tobytes()
    # Places count in bytes of int32; every window of digits occurs only once.
    starts = [text.find(row.astype(np.int32).tobytes()) // 4 for row in found]
    ordered = sorted(starts)
    assert all(b - a >= 600 for a, b in pairwise(ordered))
    assert [s * 7 // 12000 for s in ordered] == list(range(7))
    assert max(starts[:2]) - min(starts[:2]) > 12000 // 3  # the first few are spread too
    assert np.array_equal(found, windows(tokens, count=7, length=600, seed=seed))
    assert not np.array_equal(found, windows(tokens, count=7, length=600, seed=seed + 1))


def test_windows_may_fill_the_part(tokens):
    found = windows(tokens, count=8, length=1500)
    assert np.array_equal(np.sort(found.ravel()), np.sort(tokens.ids))


def test_a_part_too_short_says_the_numbers_and_what_to_do(tokens):
    with pytest.raises(TextError) as caught:
        windows(tokens, count=8, length=2048)
    assert "12,000 tokens and 8 windows of 2,048 need 16,384" in str(caught.value)
    assert "--windows 5 or --context 1500" in str(caught.value)
    assert windows(tokens, count=5, length=2048).shape == (5, 2048)
    assert windows(tokens, count=8, length=1500).shape == (8, 1500)


@pytest.mark.parametrize(
    ("asked", "found", "own"), [(3, 3, 1), (16, 4, 1)], ids=["enough", "too short"]
)
def test_a_short_text_gives_fewer_windows_and_says_so(tokens, asked, found, own):
    said: list[str] = []
    options = RunConfig(context=2048, windows=asked)
    assert search_windows(tokens, options, said.append) == (found, own)
    assert bool(said) is (found < asked)
    if said:
        assert "room for 4 of 16 windows of 2,048 tokens" in said[0]
        assert "2.0 times that of 16" in said[0]
    assert search_windows(tokens, replace(options, engine="tune"), said.append) == (asked, 0)


def test_a_short_report_text_has_fewer_windows_and_says_so(tokens):
    said: list[str] = []
    options = RunConfig(context=2048, report_windows=5)
    assert report_windows(tokens, options, said.append) == 5 and not said
    assert report_windows(tokens, replace(options, report_windows=8), said.append) == 5
    assert "room for 5 of 8 windows of 2,048 tokens" in said[0]


@pytest.mark.parametrize("own", [True, False], ids=["a part", "a text of its own"])
def test_a_part_without_a_window_says_once_what_would_do_for_all(own, tiny_tokenizer):
    def squares(begin, end):
        return Text(" ".join(str(i * i) for i in range(begin, end)), f"from {begin}")

    def windowed(context, search, report):
        given = dict(text=search, report_text=() if own else report)
        found = text(loaded, RunConfig(**given, context=context, budget_slots=1), said.append)
        return {name: len(rows) for name, rows in found.parts.items()}

    said, loaded = [], with_model(tiny_tokenizer)
    search, report = squares(0, 100 if own else 4000), squares(5000, 5040)
    with pytest.raises(TextError) as caught:
        windowed(1024, search, report)
    told = re.fullmatch(
        r"(.*) has [\d,]+ tokens, fewer than a window of 1,024; give a longer text, of about "
        r"([\d,]+) tokens, or --context (\d+)",
        str(caught.value),
    )
    assert told[1] == ("from 0/select" if own else "from 5000")
    assert not any("room for" in line for line in said)
    assert min(windowed(int(told[3]), search, report).values()) >= 1
    enough, base = int(told[2].replace(",", "")), 0 if own else 5000
    size = next(
        n for n in range(4000) if len(_ids(tiny_tokenizer, squares(base, base + n))) >= enough
    )
    longer = squares(base, base + size)
    assert min(windowed(1024, longer if own else search, longer).values()) >= 1


@pytest.mark.parametrize("option", ["report_text", "extra_text"])
def test_no_window_of_a_text_of_its_own_is_in_the_search_text(option, tiny_tokenizer):
    def squares(begin, end):
        return Text(" ".join(str(i * i) for i in range(begin, end)), f"from {begin}")

    loaded = with_model(tiny_tokenizer)
    for begin, end in ((0, 3000), (500, 900), (2500, 4000), (3000, 4000)):
        given = {"text": squares(0, 3000), option: squares(begin, end)}
        options = RunConfig(**given, context=256, budget_slots=1, windows=1, report_windows=4)
        if begin == 3000:
            assert len(text(loaded, options, lambda _: None).parts["report"]) == 4
            continue
        with pytest.raises(TextError, match=rf"^from {begin} and from 0 have text in common"):
            text(loaded, options, lambda _: None)


def with_model(tokenizer):
    """As much of a loaded model as windows of text need."""
    rows = SimpleNamespace(num_embeddings=len(tokenizer))
    model = SimpleNamespace(get_input_embeddings=lambda: rows, get_output_embeddings=lambda: None)
    return SimpleNamespace(tokenizer=tokenizer, model=model)


def _ids(tokenizer, given):
    return tokenizer(given.text)["input_ids"]


def test_windows_begin_with_the_start_token_of_the_tokenizer(tiny_tokenizer):
    class WithStart:
        bos_token_id = 256

        def __call__(self, text, add_special_tokens=True, **options):
            found = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": [256, *found] if add_special_tokens else found}

    tokens = tokenize(WithStart(), Source.of("x", "abcdefgh" * 10, ""))
    assert 256 not in tokens.ids
    found = windows(split(tokens).search, count=4, length=11)
    assert (found[:, 0] == 256).all() and (found[:, 1:] != 256).all()
