"""Preparation: cleaning, caching, every kind of source; batches as a pure function of (seed, step)."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from tapernorm.config.options import Config
from tapernorm.config.resolve import build
from tapernorm.config.schema import ConfigError
from tapernorm.data import cache, files, toy
from tapernorm.data import prepare as data
from tapernorm.data.batches import Batches, TokenFile, token_dtype, validation_windows
from tapernorm.data.prepare import Prepared, prepare
from tapernorm.data.sources import clean
from tapernorm.data.tokenizer import Tokenizer

SHARED = Path(__file__).parents[2] / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")
SEPARATOR = "<|endoftext|>"
TINYSTORIES = {"kind": "hub", "path": "roneneldan/TinyStories"}


def config_for(cache: Path, dataset: dict[str, Any] | None = None, tokenizer: dict[str, Any] | None = None) -> Config:
    dataset = dataset or {"kind": "toy", "stories": 60, "valid_stories": 20}
    return build({"cache_dir": str(cache), "dataset": dataset, "tokenizer": tokenizer or {"kind": "bytes"}})


def text_config(cache: Path, train: Path | list[Path], **more: Any) -> Config:
    value = [str(path) for path in train] if isinstance(train, list) else str(train)
    return config_for(cache, {"kind": "text", "train": value, **more})


def stories_of(file: TokenFile, tokenizer: Tokenizer) -> list[str]:
    ids = file.tokens.tolist()
    ends = [place for place, index in enumerate(ids) if index == tokenizer.eot]
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(ids[start + 1 : end]) for start, end in zip([-1, *ends], ends, strict=False)]


def both_splits(prepared: Prepared) -> list[str]:
    return stories_of(prepared.train, prepared.tokenizer) + (
        stories_of(prepared.valid, prepared.tokenizer) if prepared.valid.n_documents else []
    )


# --------------------------------------------------------------------------------------------------------- preparation


def test_toy_stories_come_back_each_with_an_end(tmp_path: Path) -> None:
    prepared = prepare(config_for(tmp_path))
    expected = list(itertools.islice(toy.stories(0), 60))
    assert stories_of(prepared.train, prepared.tokenizer) == expected
    assert prepared.train.n_documents == 60 and prepared.valid.n_documents == 20
    assert prepared.train.n_bytes == sum(len(story.encode()) for story in expected)
    assert prepared.train.n_tokens == len(prepared.train.tokens) == prepared.train.n_bytes + 60
    assert prepared.train.vocab_size == prepared.tokenizer.n_vocab == 257
    assert prepared.report["train"]["documents"] == 60


def test_the_same_request_is_reused_and_a_change_is_not(tmp_path: Path, said: list[str]) -> None:
    first = prepare(config_for(tmp_path))
    again = prepare(config_for(tmp_path))
    assert first.train.path == again.train.path and first.report == again.report
    assert ["prepared" in line for line in said] == [True, False] and "reused 60 documents" in said[1]
    changes: list[dict[str, Any]] = [
        {"dataset": {"kind": "toy", "stories": 61, "valid_stories": 20}},
        {"dataset": {"kind": "toy", "stories": 60, "valid_stories": 20, "seed": 1}},
        {"tokenizer": {"kind": "bpe", "vocab_size": 300}},
        {"tokenizer": {"kind": "bpe", "vocab_size": 301}},
    ]
    paths = {prepare(config_for(tmp_path, **change)).train.path for change in changes}
    assert len(paths | {first.train.path}) == 5


def test_a_label_does_not_prepare_anew(tmp_path: Path) -> None:
    plain = prepare(config_for(tmp_path))
    dataset = {"kind": "toy", "stories": 60, "valid_stories": 20, "vocab_size": 999}
    assert prepare(config_for(tmp_path, dataset)).train.path == plain.train.path


def test_changed_file_contents_are_noticed_and_a_moved_file_is_not(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("a\nb\nc\n")
    two.write_text("a\nb\nc\n")
    cache = tmp_path / "cache"
    first = prepare(text_config(cache, one, held_out=0.4))
    assert prepare(text_config(cache, two, held_out=0.4)).train.path == first.train.path
    one.write_text("a\nb\nd\n")
    assert prepare(text_config(cache, one, held_out=0.4)).train.path != first.train.path


@pytest.mark.parametrize("file", ["train.bin", "valid.json", "tokenizer.tiktoken", "report.json"])
@pytest.mark.parametrize("fate", ["cut", "gone"])
def test_damaged_entries_are_built_again(tmp_path: Path, file: str, fate: str, said: list[str]) -> None:
    first = prepare(config_for(tmp_path))
    tokens = np.array(first.train.tokens)
    path = first.train.path.with_name(file)
    if fate == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    second = prepare(config_for(tmp_path))
    assert "is damaged" in said[1] and "prepared" in said[2]
    assert np.array_equal(second.train.tokens, tokens)


def test_a_failing_preparation_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\nno json\n')
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match=r"bad\.jsonl line 2"):
        prepare(text_config(cache, tmp_path / "bad.jsonl"))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build({"dataset": {"kind": "toy", "stories": 5, "valid_stories": 2}, "tokenizer": {"kind": "bytes"}})
    monkeypatch.setenv("TAPERNORM_CACHE", str(tmp_path / "from_environment"))
    assert cache.root(config) == tmp_path / "from_environment"
    monkeypatch.delenv("TAPERNORM_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.root(config) == tmp_path / ".cache/tapernorm"


def test_an_unwritable_cache_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cache_dir=") as caught:
        prepare(config_for(tmp_path / "file"))
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
def test_P19_threads_do_not_change_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = {"kind": "toy", "stories": 200, "valid_stories": 20, "vocab_size": 400}
    files = []
    for threads in (1, 4):
        config = config_for(tmp_path / str(threads), dataset, {"kind": "bpe"})
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        prepared = prepare(config)
        files.append([path.read_bytes() for path in sorted(prepared.train.path.parent.iterdir())])
    assert files[0] == files[1]


@pytest.mark.timeout(60)
def test_two_processes_prepare_the_same_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from tapernorm.config.resolve import build; from tapernorm.data.prepare import prepare; "
        "from tapernorm.runtime.log import to_console; to_console(); "
        "p = prepare(build({'cache_dir': sys.argv[1], 'dataset': {'kind': 'toy', 'stories': 3000}, "
        "'tokenizer': {'kind': 'bytes'}})); print(p.train.n_documents, int(p.train.tokens.astype('int64').sum()))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].splitlines() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1] and outputs[0][-1].startswith("3000 ")
    assert sorted("prepared" in lines[-2] for lines in outputs) == [False, True]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_preparation_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": toy.story(0, index)}) + "\n" for index in range(4_000)))
    read, encoded, ahead = 0, 0, [0]

    def counted_read(*args: Any) -> Iterator[files.Raw]:
        nonlocal read
        for raw in read_jsonl(*args):
            read += 1
            yield raw

    def counted_encode(self: Tokenizer, texts: list[str], threads: int) -> list[list[int]]:
        nonlocal encoded
        ahead.append(read - encoded)
        encoded += len(texts)
        return encode_batch(self, texts, threads)

    read_jsonl, encode_batch = files._read_jsonl, Tokenizer.encode_batch
    monkeypatch.setattr(files, "_read_jsonl", counted_read)
    monkeypatch.setattr(Tokenizer, "encode_batch", counted_encode)
    (tmp_path / "valid.txt").write_text("one\n")
    dataset = {"kind": "text", "train": str(path), "valid": str(tmp_path / "valid.txt")}
    tokenizer = {"kind": "bpe", "vocab_size": 300, "train_bytes": 100_000}
    prepared = prepare(config_for(tmp_path / "c", dataset, tokenizer))
    assert prepared.train.n_documents == read == 4_000  # the tokenizer's stories are not read twice
    assert 100 < max(ahead) <= 1_024 + 200  # never more than a batch, beside what the BPE was trained on


@pytest.mark.parametrize("style", ["bar", "lines"])
def test_long_preparations_show_their_progress(
    tmp_path: Path, style: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: list[str]
) -> None:
    monkeypatch.setattr(data, "PROGRESS_SECONDS", 0.0)
    config = config_for(tmp_path)
    prepare(dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, progress=style)))
    assert capsys.readouterr().out == ""
    assert len([line for line in said if "so far" in line]) == (2 if style == "lines" else 0)
    assert "prepared 60 documents" in said[-1]


def test_P23_the_type_follows_the_vocabulary(tmp_path: Path) -> None:
    assert token_dtype(65_536) == np.uint16 and token_dtype(65_537) == np.uint32
    with pytest.raises(OverflowError):
        np.array([70_000], dtype=token_dtype(65_536))
    path = tmp_path / "ranks.tiktoken"
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {f" {number}x".encode(): 256 + number for number in range(70_000)}
    Tokenizer("large", ranks).save(tmp_path)
    (tmp_path / "tokenizer.tiktoken").rename(path)
    (tmp_path / "one.txt").write_text("a\xff 1\n" * 3 + "b\n", encoding="utf-8")
    dataset = {"kind": "text", "train": str(tmp_path / "one.txt"), "valid": str(tmp_path / "one.txt")}
    prepared = prepare(config_for(tmp_path / "c", dataset, {"kind": "bpe", "ranks": str(path)}))
    assert prepared.train.tokens.dtype == np.uint32
    assert int(prepared.train.tokens.max()) == prepared.tokenizer.eot == 70_256
    assert json.loads(prepared.train.path.with_suffix(".json").read_text())["dtype"] == "uint32"


def test_a_small_text_says_that_the_vocabulary_is_smaller(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "one.txt").write_text("the cat\nthe dog\nthe cow\n")
    dataset = {"kind": "text", "train": str(tmp_path / "one.txt"), "held_out": 0.01}
    prepared = prepare(config_for(tmp_path / "c", dataset, {"kind": "bpe", "vocab_size": 1000}))
    assert "tokenizer.vocab_size=1,000" in said[-1] and f"{prepared.tokenizer.n_vocab} ids" in said[-1]


# ------------------------------------------------------------------------------------------------------------ cleaning


def test_P18_what_was_wrong_is_counted_and_located(tmp_path: Path, said: list[str]) -> None:
    lines = [b"A good story.", b"", b"   ", b"A caf\xe9 by the sea.", "I donâ€™t know.".encode(), b"A good story."]
    path = tmp_path / "five.txt"
    path.write_bytes(b"\n".join(lines))
    prepared = prepare(text_config(tmp_path / "c", path, held_out=1e-9))
    assert stories_of(prepared.train, prepared.tokenizer) == ["A good story.", "A café by the sea.", "I don’t know."]
    report = prepared.report["train"]
    assert (report["dropped_empty"], report["repaired"], report["duplicates"]) == (2, 2, 1)
    assert report["bad_bytes"] == [{"file": str(path), "line": 4}]
    assert "2 empty and dropped, 2 repaired, 1 duplicates dropped" in said[1] and f"{path} line 4" in said[1]


def test_P18_bytes_are_located_within_a_longer_story(tmp_path: Path) -> None:
    path = tmp_path / "separated.txt"
    path.write_bytes("One.\nTwo.\n<|endoftext|>\nThrée.\n".encode() + b"Fo\xfcr.\nFive.\n<|endoftext|>\n")
    prepared = prepare(text_config(tmp_path / "c", path, held_out=1e-9))
    assert stories_of(prepared.train, prepared.tokenizer) == ["One.\nTwo.", "Thrée.\nFoür.\nFive."]
    assert prepared.report["train"]["bad_bytes"] == [{"file": str(path), "line": 5}]


@pytest.mark.parametrize(
    ("text", "expected", "repaired"),
    [
        ("  plain \n", "plain", False),
        ("one\r\ntwo\rthree", "one\ntwo\nthree", False),
        ("cafe\u0301", "café", False),
        ("â€œHi,â€\x9d he said", "“Hi,” he said", True),
        ("Ã©tÃ©", "été", True),
        ("un gâteau à Âge, “naïve” 🙂", "un gâteau à Âge, “naïve” 🙂", False),
        ("zero\u200bwidth\x00", "zerowidth", True),
        ("half \ud83d", "half", True),
        (" \n\t ", "", False),
    ],
)
def test_clean(text: str, expected: str, repaired: bool) -> None:
    assert clean(text) == (expected, repaired)


def test_validation_stories_that_are_in_train_are_kept_out(tmp_path: Path) -> None:
    train, valid = tmp_path / "a.txt", tmp_path / "b.txt"
    train.write_text("one\ntwo\nthree\n")
    valid.write_text("four\ntwo\nfour\nfive\n")
    prepared = prepare(text_config(tmp_path / "c", train, valid=str(valid)))
    assert stories_of(prepared.valid, prepared.tokenizer) == ["four", "five"]
    report = prepared.report["valid"]
    assert (report["in_train"], report["duplicates"], report["documents"]) == (1, 1, 2)


# ------------------------------------------------------------------------------------------------------------- sources


def write_parquet(path: Path, stories: list[str | None], column: str = "text") -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"number": list(range(len(stories))), column: stories}), path)


def write_any(path: Path, stories: list[str]) -> None:
    if path.suffix == ".parquet":
        write_parquet(path, list(stories))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    else:
        path.write_text("".join(f"{story}\n{SEPARATOR}\n" for story in stories))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_every_format_reads_the_same(tmp_path: Path, suffix: str) -> None:
    inside = "mark" if suffix == ".txt" else SEPARATOR  # which ends a document in plain text alone
    stories = [f"Story {number}.\nIt has two lines and a {inside} in it." for number in range(40)]
    path = tmp_path / f"stories{suffix}"
    write_any(path, stories)
    prepared = prepare(text_config(tmp_path / "c", path, held_out=0.25))
    assert sorted(both_splits(prepared)) == sorted(stories)
    assert 2 <= prepared.valid.n_documents <= 20


@pytest.mark.parametrize(
    "mark",
    [f"{before}{SEPARATOR}{after}" for before in ("", "\n", "\n\u00a0", "\n\ufeff") for after in ("", "\n", " \r\n")],
)
def test_P37_a_mark_ends_a_document_wherever_it_stands(tmp_path: Path, mark: str) -> None:
    stories = [f"Tom had {number} balls.\nThey were red." for number in range(200)]
    path = tmp_path / "stories.txt"
    for last in ("", mark):
        path.write_text(mark.join(stories) + last, encoding="utf-8")
        prepared = prepare(text_config(tmp_path / f"c{len(last)}", path, held_out=0.1))
        assert sorted(both_splits(prepared)) == sorted(stories)
        assert prepared.report["train"]["dropped_empty"] == 0


def test_P37_lines_of_damage_are_right_beside_marks(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_bytes(f"One.{SEPARATOR}Two.\n".encode() + b"Fo\xfcr.\n" + f"{SEPARATOR}\n".encode() + b"\nSi\xe9.\n")
    prepared = prepare(text_config(tmp_path / "c", path, held_out=1e-9))
    assert [bad["line"] for bad in prepared.report["train"]["bad_bytes"]] == [2, 5]


@pytest.mark.parametrize("suffix", [".txt.gz", ".jsonl.gz", ".csv", ".csv.gz", ".jsonl.zst", ".txt.zst"])
def test_P38_packed_files_and_tables_are_read(tmp_path: Path, suffix: str) -> None:
    stories = [f'Story "{number}",\nover two lines.' for number in range(40)]
    kind, packed = suffix.removesuffix(".gz").removesuffix(".zst"), suffix.rpartition(".")[2]
    text = io.StringIO()
    if kind == ".csv":
        csv.writer(text).writerows([("id", "text"), *enumerate(stories)])
    elif kind == ".jsonl":
        text.write("".join(json.dumps({"text": story}) + "\n" for story in stories))
    else:
        text.write(SEPARATOR.join(stories))
    raw = text.getvalue().encode()
    path = tmp_path / f"stories{suffix}"
    path.write_bytes({"gz": gzip.compress, "zst": zstandard.compress}.get(packed, bytes)(raw))
    assert sorted(both_splits(prepare(text_config(tmp_path / "c", path, held_out=0.25)))) == sorted(stories)
    with (
        pytest.raises(ConfigError, match=r"no column 'story', it has (id, )?text") if kind != ".txt" else nullcontext()
    ):
        prepare(text_config(tmp_path / "d", path, field="story"))
    if packed == "gz":
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ConfigError, match=r"stories.*\.gz cannot be read: .*ended before") as caught:
            prepare(text_config(tmp_path / "e", path))
        assert "\n" not in str(caught.value)


def test_P38_what_is_no_document_of_a_folder_is_left_out_and_said(tmp_path: Path, said: list[str]) -> None:
    folder, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    for name in ("stories.txt", "._stories.txt", "__MACOSX/a.txt", ".ipynb_checkpoints/b.txt", "LICENSE.txt", "x.doc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"from {name}\n")
    elsewhere.mkdir()
    (elsewhere / "c.txt").write_text("from a linked folder\n")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "linked" / "round").symlink_to(folder)
    prepared = prepare(text_config(tmp_path / "c", folder, held_out=1e-9))
    assert sorted(both_splits(prepared)) == ["from a linked folder", "from stories.txt"]
    assert any(line.endswith(": 2 other files are not read: LICENSE.txt, x.doc") for line in said), said
    (folder / "stories.txt").unlink()
    for kind in ("text", "hub"):
        keys = {"train": str(folder)} if kind == "text" else {"path": str(folder)}
        assert prepare(config_for(tmp_path / kind, {"kind": kind, **keys, "held_out": 0.5})).train is not None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", gzip.compress(b"text"), r"a\.txt is gzip; give it the name that says so"),
        ("a.jsonl", zstandard.compress(b"{}"), r"a\.jsonl is zstandard"),
        ("a.txt", b"PK\x03\x04rest", r"a\.txt is a zip archive"),
        ("a.txt", "one".encode("utf-32"), r"a\.txt is UTF-32; save it as UTF-8"),
        ("a.txt.gz", gzip.compress("one".encode("utf-16")), r"a\.txt\.gz is UTF-16; save it as UTF-8"),
        ("a.txt.gz", b"plain", r"a\.txt\.gz cannot be read: Not a gzipped file"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl line 1 is not a JSON object"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl line 1 is not a JSON object with a field 'text'"),
        ("a.jsonl", b'{"body": 1, "id": 2}\n', r"a\.jsonl line 1 has no column 'text', it has body, id"),
        ("a.csv", b"", r"a\.csv has no column 'text', it has ; see dataset\.field|a\.csv has no column"),
    ],
)
def test_P39_what_a_file_is_not_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(text_config(tmp_path / "c", tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["train.bin", "valid.bin", "tokenizer.json"])
@pytest.mark.parametrize("fault", ["zeros", "one bit", "swapped"])
def test_P41_prepared_data_damaged_at_the_right_size_are_made_anew(
    tmp_path: Path, file: str, fault: str, said: list[str]
) -> None:
    first = prepare(config_for(tmp_path, tokenizer={"kind": "bpe", "vocab_size": 300}))
    good = (first.entry / file).read_bytes()
    middle = len(good) // 2
    (first.entry / file).write_bytes(
        {
            "zeros": good[: middle - 200] + bytes(200) + good[middle:],
            "one bit": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "swapped": good[middle:] + good[:middle],
        }[fault]
    )
    prepare(config_for(tmp_path, tokenizer={"kind": "bpe", "vocab_size": 300}))
    reason = f"({file} is not as it was written)" if file.endswith(".bin") else ""  # JSON may not even be read
    assert "is damaged (" in said[-2] and reason in said[-2] and said[-2].endswith("preparing it again")
    assert (first.entry / file).read_bytes() == good


def test_P41_large_files_are_checked_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK", 1 << 10)
    path = tmp_path / "train.bin"
    path.write_bytes(os.urandom(cache.BLOCKS * cache.BLOCK * 4))
    before = cache.checksum(path)
    assert cache.checksum(path) == before
    with path.open("r+b") as stream:  # 8,000 bytes span more than the gap between two samples
        stream.seek(123_456)
        stream.write(bytes(8_000))
    assert cache.checksum(path) != before


@pytest.mark.timeout(20)
def test_P39_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ConfigError, match=r"dataset\.train=.*pipe\.txt is neither a file nor a folder"):
        prepare(text_config(tmp_path / "c", tmp_path / "pipe.txt"))
    with pytest.raises(ConfigError, match="the folder has no"):
        prepare(text_config(tmp_path / "c", tmp_path))


def test_held_out_stories_stay_the_same_when_others_are_added(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_text("".join(f"Story {number}.\n" for number in range(100)))
    few = prepare(text_config(tmp_path / "c", path, held_out=0.2))
    path.write_text("".join(f"Story {number}.\n" for number in range(200)))
    more = prepare(text_config(tmp_path / "c", path, held_out=0.2))
    held_out = [set(stories_of(prepared.valid, prepared.tokenizer)) for prepared in (few, more)]
    assert held_out[0] < held_out[1] and not held_out[1] & set(stories_of(more.train, more.tokenizer))


def test_folders_globs_and_lists(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    write_any(folder / "a.txt", ["from a"])
    write_any(folder / "deep/b.jsonl", ["from b"])
    write_any(folder / "c.parquet", ["from c"])
    (folder / "notes.md").write_text("not a story")

    def read(train: Path | list[Path]) -> list[str]:
        return sorted(both_splits(prepare(text_config(tmp_path / "c", train))))

    assert read(folder) == ["from a", "from b", "from c"]
    assert read(folder / "*.[tp]*") == ["from a", "from c"]
    assert read(folder / "**/*.jsonl") == ["from b"]
    assert read([folder / "a.txt", folder / "deep", folder / "a.txt"]) == ["from a", "from b"]


@pytest.mark.parametrize("key", ["train", "valid"])
def test_missing_paths_name_key_and_path(tmp_path: Path, key: str) -> None:
    (tmp_path / "here.txt").write_text("here\n")
    dataset = {"kind": "text", "train": str(tmp_path / "here.txt"), key: str(tmp_path / "nowhere.txt")}
    with pytest.raises(ConfigError, match=rf"dataset\.{key}=.*nowhere\.txt") as caught:
        prepare(config_for(tmp_path / "c", dataset))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_wrong_columns_and_suffixes_are_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["story"], column="story")
    (tmp_path / "b.jsonl").write_text('{"story": "x"}\n')
    (tmp_path / "c.doc").write_text("x\n")
    (tmp_path / "d.parquet").write_text("no parquet")
    expected = {
        "a.parquet": r"no column 'text', it has number, story; see dataset\.field",
        "b.jsonl": r"b\.jsonl line 1 has no column 'text', it has story; see dataset\.field",
        "c.doc": r"dataset\.train: .*c\.doc is none of",
        "d.parquet": r"d\.parquet is not a readable parquet file",
    }
    for name, message in expected.items():
        with pytest.raises(ConfigError, match=message):
            prepare(text_config(tmp_path / "cache", tmp_path / name))
    prepared = prepare(text_config(tmp_path / "cache", tmp_path / "b.jsonl", field="story"))
    assert both_splits(prepared) == ["x"]
    with pytest.raises(ConfigError, match="'number' is int64, not text"):
        prepare(text_config(tmp_path / "cache", tmp_path / "a.parquet", field="number"))


def test_byte_order_marks(tmp_path: Path) -> None:
    (tmp_path / "eight.txt").write_text("one\ntwo\n", encoding="utf-8-sig")
    (tmp_path / "sixteen.txt").write_text("one\n", encoding="utf-16")
    prepared = prepare(text_config(tmp_path / "c", tmp_path / "eight.txt", held_out=1e-9))
    assert stories_of(prepared.train, prepared.tokenizer) == ["one", "two"]
    with pytest.raises(ConfigError, match=r"sixteen\.txt is UTF-16"):
        prepare(text_config(tmp_path / "c", tmp_path / "sixteen.txt"))


def test_empty_training_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ConfigError, match=r"dataset\.train=.*no document"):
        prepare(text_config(tmp_path / "c", tmp_path / "empty.txt"))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_P17_tinystories_from_a_local_folder(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requests.head", None)  # no network is needed
    folder = tmp_path / "copy/data"
    folder.mkdir(parents=True)
    write_any(folder / f"train-00000-of-00002-ab{suffix}", ["one", "two"])
    write_any(folder / f"train-00001-of-00002-cd{suffix}", ["three", "four"])
    write_any(folder / f"validation-00000-of-00001-ef{suffix}", ["five"])
    write_any(folder / "TinyStories-train.txt", ["one", "two", "three", "four"])
    write_any(folder / "TinyStories-valid.txt", ["five"])
    dataset: dict[str, Any] = {"kind": "hub", "path": str(tmp_path / "copy")}
    prepared = prepare(config_for(tmp_path / "c", dataset))
    assert sorted(stories_of(prepared.train, prepared.tokenizer)) == ["four", "one", "three", "two"]
    assert stories_of(prepared.valid, prepared.tokenizer) == ["five"]
    first = prepare(config_for(tmp_path / "c", {**dataset, "max_stories": 2}))
    assert first.train.n_documents == 2 and first.valid.n_documents == 1


def test_P17_an_unusable_folder_is_described(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("no text")
    for path, message in (
        (tmp_path / "none", "there is no file or folder"),
        (tmp_path, r"needs files named .*; the folder has notes\.md"),
        (tmp_path / "notes.md", r"is none of \.parquet"),
    ):
        with pytest.raises(ConfigError, match=rf"dataset\.path={path}.*{message}"):
            prepare(config_for(tmp_path / "c", {"kind": "hub", "path": str(path)}))


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub out of reach, and an empty cache of the datasets library."""
    import datasets
    import huggingface_hub.constants as hub
    import requests

    def blocked(*args: object, **kwargs: object) -> None:
        raise requests.ConnectionError

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    monkeypatch.setattr(requests, "head", blocked)
    return tmp_path / "hf_cache"


@pytest.mark.timeout(30)
def test_P17_without_hub_and_cache_one_line_names_the_way_out(tmp_path: Path, offline_hub: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(config_for(tmp_path / "c", TINYSTORIES))
    message = str(caught.value)
    assert all(hint in message for hint in ("roneneldan/TinyStories", str(offline_hub), "dataset.path=<folder>"))
    assert "\n" not in message


@pytest.mark.timeout(30)
def test_P17_without_hub_the_copy_of_the_datasets_library_is_read(tmp_path: Path, offline_hub: Path) -> None:
    import datasets

    write_parquet(tmp_path / "hub/train.parquet", ["one", None, "two"])
    write_parquet(tmp_path / "hub/validation.parquet", ["three"])
    files = {split: str(tmp_path / f"hub/{split}.parquet") for split in ("train", "validation")}
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "made"))
    made = next((tmp_path / "made/parquet").glob("*/*/*/dataset_info.json")).parent
    copy = offline_hub / "roneneldan___tiny_stories/default/0.0.0/0123"
    copy.mkdir(parents=True)
    for file in made.iterdir():
        name = file.name.replace("parquet-", "tiny_stories-")
        (copy / name).write_bytes(file.read_bytes())
    info = json.loads((copy / "dataset_info.json").read_text())
    info |= {"config_name": "default", "dataset_name": "tiny_stories"}
    (copy / "dataset_info.json").write_text(json.dumps(info))
    prepared = prepare(config_for(tmp_path / "c", TINYSTORIES))
    assert both_splits(prepared) == ["one", "two", "three"]
    assert prepared.report["train"]["dropped_empty"] == 1


@needs_shared
def test_real_stories(tmp_path: Path) -> None:
    ranks = str(SHARED / "gpt2.tiktoken")
    path = SHARED / "tinystories_valid.txt"
    config = config_for(
        tmp_path, {"kind": "text", "train": str(path), "held_out": 0.1}, {"kind": "gpt2", "ranks": ranks}
    )
    prepared = prepare(config)
    assert prepared.train.n_documents + prepared.valid.n_documents == 691
    assert prepared.train.n_tokens + prepared.valid.n_tokens == pytest.approx(140_606, rel=0.02)
    originals = {story.strip() for story in path.read_text(encoding="utf-8").split(f"\n{SEPARATOR}\n")}
    assert set(both_splits(prepared)) == originals - {""}
    assert all(prepared.report[split]["repaired"] == 0 for split in ("train", "valid"))


# ------------------------------------------------------------------------------------------------------------- batches


def test_rows_are_windows_and_targets_are_shifted() -> None:
    tokens = np.arange(101, dtype=np.uint16)
    batches = Batches(tokens, n_ctx=10, batch_size=4, seed=0)
    assert (batches.n_windows, batches.tokens_per_epoch) == (10, 100)
    inputs, targets = batches.batch(1)
    assert inputs.shape == targets.shape == (4, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert all(int(row[0]) % 10 == 0 for row in inputs)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 25])
def test_every_epoch_visits_every_window_once_in_a_new_order(batch_size: int) -> None:
    batches = Batches(np.arange(101, dtype=np.uint16), n_ctx=10, batch_size=batch_size, seed=3)
    seen = list(itertools.chain.from_iterable(batches.windows(step) for step in range(1, 61)))
    epochs = [seen[start : start + 10] for start in range(0, len(seen) - 9, 10)]
    assert all(Counter(epoch) == Counter(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    forward = Batches(tokens, 10, 8, seed=5)
    first = [forward.batch(step)[0] for step in range(1, 41)]
    other = Batches(tokens, 10, 8, seed=5)
    assert all(torch.equal(other.batch(step)[0], first[step - 1]) for step in (40, 7, 13, 1))
    assert not torch.equal(Batches(tokens, 10, 8, seed=6).batch(1)[0], first[0])
    # the stream of rows does not depend on how it is cut into batches
    pairs = Batches(tokens, 10, 2, seed=5)
    assert torch.equal(torch.cat([pairs.batch(step)[0] for step in range(5, 9)]), first[1])
    with pytest.raises(ValueError, match="count from 1"):
        forward.batch(0)


def test_P26_a_short_corpus_is_told_with_both_numbers() -> None:
    tokens = np.arange(20, dtype=np.uint16)
    with pytest.raises(ConfigError, match=r"training split has 20 tokens, .*n_ctx \+ 1 = 257"):
        Batches(tokens, 256, 8, seed=0)
    with pytest.raises(ConfigError, match=r"validation split has 20 tokens, .*n_ctx \+ 1 = 257"):
        validation_windows(tokens, 256, 65_536)
    assert Batches(tokens, 19, 2, seed=0).n_windows == 1


def test_P29_validation_windows_are_always_the_first() -> None:
    tokens = np.arange(101, dtype=np.uint16)
    inputs, targets = validation_windows(tokens, 10, 45)
    assert inputs.shape == (4, 10) and inputs.numel() <= 45
    assert torch.equal(inputs.flatten(), torch.arange(40)) and torch.equal(targets, inputs + 1)
    assert validation_windows(tokens, 10, 10_000)[0].shape == (10, 10)
    assert inputs.untyped_storage().data_ptr() == targets.untyped_storage().data_ptr()
    with pytest.raises(ConfigError, match=r"val_tokens=9 .* model\.n_ctx=10"):
        validation_windows(tokens, 10, 9)
