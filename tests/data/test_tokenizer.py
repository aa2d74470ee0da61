"""Tokenizers: the same ids as tiktoken, plain-text separators, decoding that never fails, files that round-trip."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapernorm.config.options import TokenizerConfig
from tapernorm.config.schema import ConfigError
from tapernorm.data import tokenizer as tokenizer_module
from tapernorm.data import toy
from tapernorm.data.tokenizer import Tokenizer, build_tokenizer, train_bpe

SHARED = Path(__file__).parents[2] / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")
TRICKY = "A café, naïve 数字 🙂\n\n  two  spaces\tand it's <|endoftext|> done."


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return build_tokenizer(TokenizerConfig(vocab_size=600), [toy.story(0, index) for index in range(300)])


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return build_tokenizer(TokenizerConfig(kind="bytes"), None)


def test_bpe_has_the_vocabulary_asked_for_and_compresses(bpe: Tokenizer) -> None:
    text = toy.story(0, 1000)
    assert bpe.n_vocab == 600 and bpe.eot == 599
    assert bpe.decode(bpe.encode(text)) == text
    assert len(bpe.encode(text)) < 0.5 * len(text)


def test_bpe_is_deterministic(bpe: Tokenizer) -> None:
    again = build_tokenizer(TokenizerConfig(vocab_size=600), (toy.story(0, index) for index in range(300)))
    assert again.fingerprint == bpe.fingerprint


def test_bpe_of_a_tiny_text_comes_out_smaller() -> None:
    small = build_tokenizer(TokenizerConfig(vocab_size=5000), ["the cat and the dog", "the cat"])
    assert 257 < small.n_vocab < 300
    assert small.decode(small.encode(TRICKY)) == TRICKY


def test_bpe_reads_no_more_than_train_bytes() -> None:
    read = []
    texts = (read.append(index) or "hello world " * 10 for index in range(1000))  # type: ignore[func-returns-value]
    build_tokenizer(TokenizerConfig(vocab_size=300, train_bytes=1000), texts)
    assert len(read) == 9  # of 120 bytes each


def test_bpe_without_text_says_so() -> None:
    with pytest.raises(ConfigError, match="no text"):
        build_tokenizer(TokenizerConfig(vocab_size=300), [])


def test_bytes_are_utf8(byte_level: Tokenizer) -> None:
    assert byte_level.n_vocab == 257
    assert byte_level.encode(TRICKY) == list(TRICKY.encode())
    assert byte_level.decode(byte_level.encode(TRICKY)) == TRICKY


def test_P21_the_separator_in_a_text_is_plain_text(bpe: Tokenizer, byte_level: Tokenizer) -> None:
    for tokenizer in (bpe, byte_level):
        ids = tokenizer.encode(TRICKY)
        assert tokenizer.eot not in ids
        assert tokenizer.decode(ids) == TRICKY


def test_P22_decoding_never_fails(bpe: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(200):
        assert isinstance(bpe.decode([rng.randrange(-5, 50304) for _ in range(50)]), str)
    hello = bpe.encode("hello")
    assert bpe.decode([bpe.eot, *hello, 50303, bpe.eot]) == "hello"
    assert bpe.decode(np.array(hello, dtype=np.uint16)) == "hello"


def test_lone_surrogates_are_encoded(bpe: Tokenizer) -> None:
    assert bpe.decode(bpe.encode("a\ud83db")) == "a\ufffdb"


def test_batches_do_not_depend_on_threads(bpe: Tokenizer) -> None:
    texts = [toy.story(1, index) for index in range(50)]
    assert bpe.encode_batch(texts, 1) == bpe.encode_batch(texts, 4) == [bpe.encode(text) for text in texts]


def test_n_bytes_is_the_length_of_the_text(bpe: Tokenizer) -> None:
    ids = bpe.encode(TRICKY)
    assert bpe.n_bytes([*ids, bpe.eot]) == len(TRICKY.encode())
    assert bpe.n_bytes(np.array([ids, ids])) == 2 * len(TRICKY.encode())


def test_the_tokenizers_library_gets_the_same_one_or_none(bpe: Tokenizer, byte_level: Tokenizer) -> None:
    texts = [toy.story(2, index) for index in range(100)] + [TRICKY.replace("<|endoftext|>", "")]
    for tokenizer in (bpe, byte_level):
        fast = tokenizer.to_fast()
        assert fast is not None and fast.get_vocab_size() == tokenizer.n_vocab
        for text in texts:
            assert fast.encode(text).ids == tokenizer.encode(text)
            assert fast.decode(tokenizer.encode(text)) == text
        assert fast.encode("a<|endoftext|>b").ids == [*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode("b")]
    ranks = {bytes([byte]): byte for byte in range(256)}
    assert Tokenizer("other", ranks, pattern=r"\w+|\W").to_fast() is None
    assert Tokenizer("gap", ranks | {b"ab": 300}).to_fast() is None  # its ids have a gap before the end-of-text id


def test_save_and_load(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.name, loaded.n_vocab, loaded.fingerprint) == (bpe.name, bpe.n_vocab, bpe.fingerprint)
    assert loaded.encode(TRICKY) == bpe.encode(TRICKY)
    from_ranks = build_tokenizer(TokenizerConfig(ranks=str(tmp_path / "tokenizer.tiktoken")), None)
    assert from_ranks.fingerprint == bpe.fingerprint


def test_load_notices_other_ranks(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    lines = (tmp_path / "tokenizer.tiktoken").read_bytes().splitlines(keepends=True)
    (tmp_path / "tokenizer.tiktoken").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(ConfigError, match=r"tokenizer\.tiktoken is not the file"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer can be read from"):
        Tokenizer.load(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"no ranks", b"IQ== 0\n", b"IQ== 0\nIg== x\n", None])
def test_unusable_ranks_are_one_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.ranks=.*ranks\.tiktoken") as caught:
        build_tokenizer(TokenizerConfig(ranks=str(path)), None)
    assert "\n" not in str(caught.value)


def test_P20_gpt2_without_network_or_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import requests

    def blocked(*args: object, **kwargs: object) -> None:
        assert kwargs["timeout"]  # or a silent network would hang the run
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "head", blocked)
    monkeypatch.setattr(requests, "get", blocked)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(TokenizerConfig(kind="gpt2"), None)
    message = str(caught.value)
    assert all(hint in message for hint in ("TIKTOKEN_CACHE_DIR", "tokenizer.ranks", "tokenizer=bpe", str(tmp_path)))
    assert "\n" not in message


@needs_shared
def test_gpt2_from_a_file_and_from_the_cache_are_the_stock_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str((SHARED / "tiktoken_cache").resolve()))
    stock = tiktoken.get_encoding("gpt2")
    from_file = build_tokenizer(TokenizerConfig(kind="gpt2", ranks=str(SHARED / "gpt2.tiktoken")), None)
    from_cache = build_tokenizer(TokenizerConfig(kind="gpt2"), None)
    assert from_file.encode("Hello world") == [15496, 995]
    assert from_file.fingerprint == from_cache.fingerprint
    assert (from_cache.n_vocab, from_cache.eot) == (50257, 50256)
    text = TRICKY + (SHARED / "tinystories_valid.txt").read_text(encoding="utf-8")[:100_000]
    assert from_cache.encode(text) == stock.encode_ordinary(text)


def test_a_70k_vocabulary_keeps_its_ids() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {f" w{number}".encode(): 256 + number for number in range(70_000)}
    large = Tokenizer("large", ranks, pattern=r" ?\w+|\s+|[^\s\w]+")
    assert large.n_vocab == 70_257
    assert large.encode(" w69999") == [70_255]
    assert tokenizer_module.END_OF_TEXT == "<|endoftext|>"


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, dict[str, Any], Tokenizer]:
    """A trained tokenizer's tokenizer.json, what is in it, and the tokenizer."""
    texts = [toy.story(2, index) for index in range(100)]
    tokenizer = Tokenizer("bpe", train_bpe(texts, 400))
    fast = tokenizer.to_fast()
    assert fast is not None
    fast.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json", json.loads((tmp_path / "tokenizer.json").read_text()), tokenizer


def exchanged(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[-9:-7]  # rare ones, which no probe has
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


P43 = {
    "two ids exchanged": exchanged,
    "two merges exchanged": lambda content: content["model"]["merges"].insert(0, content["model"]["merges"].pop()),
    "a merge less": lambda content: content["model"]["merges"].pop(),
    "a normalizer": lambda content: content.update(normalizer={"type": "Lowercase"}),
    "a prefix space": lambda content: content["pre_tokenizer"].update(add_prefix_space=True),
    "another split": lambda content: content.update(pre_tokenizer={"type": "Whitespace"}),
    "an added token": lambda content: content["added_tokens"].append(
        content["added_tokens"][0] | {"id": 999, "content": "X"}
    ),
    "a template": lambda content: content.update(
        post_processor={"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    ),
    "dropout": lambda content: content["model"].update(dropout=0.1),
    "a prefix": lambda content: content["model"].update(continuing_subword_prefix="##"),
}


@pytest.mark.parametrize("case", P43)
def test_P43_another_tokenizer_is_told_by_its_structure(
    exported: tuple[Path, dict[str, Any], Tokenizer], case: str
) -> None:
    file, content, tokenizer = exported
    before = Tokenizer.from_fast(file)
    assert before is not None and before.fingerprint == tokenizer.fingerprint and tokenizer.same_as_fast(file) is True
    P43[case](content)
    file.write_text(json.dumps(content))
    assert Tokenizer.from_fast(file) is None and tokenizer.same_as_fast(file) is not True
    with pytest.raises(ConfigError, match=r"is not a usable tokenizer\.json"):
        build_tokenizer(TokenizerConfig(kind="bpe", ranks=str(file)), None)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("word", ["acgt" * 50_000, " " * 200_000, "!?" * 100_000, "é" * 150_000])
def test_P40_a_long_word_is_cut_to_train_and_encoded_whole(word: str, said: list[str]) -> None:
    texts = [toy.story(2, index) for index in range(20)]
    tokenizer = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), [*texts, word])
    assert said == ["tokenizer: words of more than 1,000 characters are cut there to train it"]
    assert tokenizer.decode(tokenizer.encode(word)) == word


def test_P40_texts_without_long_words_train_the_same_tokenizer(said: list[str]) -> None:
    texts = [toy.story(2, index) for index in range(20)] + ["a" * 1000]
    assert build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), texts)._ranks == train_bpe(texts, 300)
    assert said == []
