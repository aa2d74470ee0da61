"""Text to token ids and back, always through tiktoken: bpe (trained on the data set), gpt2 (stock) and bytes.

Every kind is a table `ranks` (bytes of a token -> id) plus GPT-2's split pattern, so that one class and one file
format serve all of them. The end-of-text id is one above the highest rank. It is never produced by `encode`: text
that contains the string `<|endoftext|>` is plain text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tapernorm.config.options import TokenizerConfig
from tapernorm.config.schema import ConfigError

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
MOST_IDS = 1 << 24  # more would only fill the memory
LONGEST = 1000  # characters of a word that a BPE is trained on
LONG = re.compile(rf"\S{{{LONGEST + 1},}}|\s{{{LONGEST + 1},}}")
# GPT-2's split pattern in the possessive form that tiktoken uses; the same pieces as the original, without backtracking
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
GPT2_VOCAB = 50257
GPT2_URLS = tuple(
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}" for name in ("vocab.bpe", "encoder.json")
)
RANKS_FILE = "tokenizer.tiktoken"
META_FILE = "tokenizer.json"
# Texts that two implementations of a tokenizer must agree on.
PROBES = (
    "Once upon a time, there was a little girl who couldn't find her dog's ball.",
    "A café, naïve 数字 🙂\n\n  two  spaces\tand it's 1,234.50 done...\r\n   ",
    "MiXeD caSe_and_snake, (brackets) [3] {x: 'y'} -- don't, they'LL; ünïcödé ½ ²",
    "".join(map(chr, range(256))),
)


class Tokenizer:
    """A tiktoken encoding with one special token.

    ranks: bytes of a token -> id; all 256 single bytes must be there, so that every text can be encoded.
    `n_vocab` counts the end-of-text id `eot`, which is the highest. Raises ValueError for an unusable table.
    """

    def __init__(self, name: str, ranks: dict[bytes, int], pattern: str = GPT2_PATTERN) -> None:
        import tiktoken

        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise ValueError(f"{len(missing)} of the 256 single bytes have no rank, the first is byte {missing[0]}")
        if len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
            raise ValueError("two tokens share a rank, or a rank is negative")
        if max(ranks.values()) >= MOST_IDS:
            raise ValueError(f"rank {max(ranks.values())} is beyond {MOST_IDS:,} ids")
        self.name = name
        self.pattern = pattern
        self.eot = max(ranks.values()) + 1
        self.n_vocab = self.eot + 1
        self._ranks = ranks
        self._tokens = {rank: token for token, rank in ranks.items()}
        self._lengths = np.zeros(self.n_vocab, dtype=np.int64)  # UTF-8 bytes per id; 0 for eot and unused ids
        self._lengths[list(self._tokens)] = [len(token) for token in self._tokens.values()]
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.eot}
        )
        digest = hashlib.blake2b(pattern.encode(), digest_size=16)
        for rank in sorted(self._tokens):
            digest.update(b"%d %s\n" % (rank, base64.b64encode(self._tokens[rank])))
        self.fingerprint = digest.hexdigest()

    def __repr__(self) -> str:
        return f"Tokenizer({self.name}, {self.n_vocab} ids, {self.fingerprint[:8]})"

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-text id, also where the text spells it out."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        """`encode` of every text, on `threads` threads of this process (tiktoken releases the lock; nothing forks)."""
        return self._encoding.encode_ordinary_batch(texts, num_threads=threads)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of any ids: end-of-text and ids outside the vocabulary are left out, broken UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of any ids, which may begin or end inside a character; the same ones are left out as in `decode`."""
        return b"".join(self._tokens.get(int(index), b"") for index in ids)

    def n_bytes(self, ids: Sequence[int] | np.ndarray | Any) -> int:
        """Sum of the ids' UTF-8 bytes (end-of-text counts 0): bits per byte = nats / ln 2 / n_bytes.

        ids: an integer sequence, array or CPU tensor of any shape, all in [0, n_vocab).
        """
        return int(self.byte_lengths(ids).sum())

    def byte_lengths(self, ids: Sequence[int] | np.ndarray | Any) -> np.ndarray:
        """UTF-8 bytes of each id, in the shape of `ids`; see `n_bytes`."""
        return self._lengths[np.asarray(ids, dtype=np.int64)]

    def to_fast(self) -> Any | None:
        """The same tokenizer as the tokenizers library's, None if some of PROBES come out differently there.

        Merges are every pair of tokens whose bytes are a third one, in that one's order. The end-of-text string is a
        special token there: text that spells it out becomes its id, which `encode` here never does.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        character = {byte: char for char, byte in _byte_of_character().items()}
        words = {token: "".join(character[byte] for byte in token) for token in self._ranks}
        merges = [
            (words[token[:cut]], words[token[cut:]])
            for _, token in sorted(self._tokens.items())
            for cut in range(1, len(token))
            if token[:cut] in words and token[cut:] in words
        ]
        vocabulary = {words[token]: rank for token, rank in self._ranks.items()}
        fast = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        same = self.pattern == GPT2_PATTERN and self._agrees(fast)
        return fast if same and all(fast.decode(self.encode(text)) == text for text in PROBES) else None

    @classmethod
    def from_fast(cls, file: Path) -> Tokenizer | None:
        """The tokenizer of a tokenizer.json of the tokenizers library, GPT-2's or one that `to_fast` made.

        None if there is no such file, if it does anything but split as GPT-2 does and merge in the order of its ids, or
        if its ids for some of PROBES are others.
        """
        from tokenizers import Tokenizer as Fast

        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if not _is_plain_bpe(content):
                return None
            to_byte = _byte_of_character()
            words = {word: rank for word, rank in content["model"]["vocab"].items() if word != END_OF_TEXT}
            ranks = {bytes(to_byte[char] for char in word): rank for word, rank in words.items()}
            tokenizer = cls("gpt2" if len(ranks) == GPT2_VOCAB - 1 else "exported", ranks)
            fast = Fast.from_file(str(file))
        except Exception:  # the library raises plain Exceptions
            return None
        return tokenizer if tokenizer._agrees(fast) else None

    def same_as_fast(self, file: Path) -> bool | None:
        """Whether a tokenizer.json of the tokenizers library is this tokenizer; None if it cannot be read."""
        try:
            plain = _is_plain_bpe(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        other = self.from_fast(file) if plain else None
        return other is not None and other.fingerprint == self.fingerprint

    def _agrees(self, fast: Any) -> bool:
        return fast.token_to_id(END_OF_TEXT) == self.eot and self._same_ids(fast, add_special_tokens=True)

    def _same_ids(self, fast: Any, add_special_tokens: bool) -> bool:
        return all(fast.encode(text, add_special_tokens=add_special_tokens).ids == self.encode(text) for text in PROBES)

    def save(self, directory: str | Path) -> None:
        """Write the ranks in tiktoken's text format and the rest as JSON into an existing directory."""
        lines = (b"%s %d\n" % (base64.b64encode(self._tokens[rank]), rank) for rank in sorted(self._tokens))
        (Path(directory) / RANKS_FILE).write_bytes(b"".join(lines))
        meta = {key: getattr(self, key) for key in ("name", "pattern", "eot", "n_vocab", "fingerprint")}
        (Path(directory) / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read what `save` wrote. Raises ConfigError when a file is missing or is not what was saved."""
        folder = Path(directory)
        try:
            meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
            tokenizer = cls(meta["name"], read_ranks(folder / RANKS_FILE), meta["pattern"])
            same = tokenizer.fingerprint == meta["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            lacks = isinstance(error, (KeyError, TypeError))
            problem = f"{META_FILE} lacks a name, pattern or fingerprint" if lacks else error
            raise ConfigError(f"no tokenizer can be read from {folder}: {problem}") from None
        if not same:
            raise ConfigError(f"{folder / RANKS_FILE} is not the file that {META_FILE} beside it describes")
        return tokenizer


def _is_plain_bpe(content: dict[str, Any]) -> bool:
    """Whether a tokenizer.json holds nothing but GPT-2's splitting and merges in the order of their ids.

    That is all that ranks can say: samples would not show a normalizer, or two ids that were exchanged.
    """
    model, split, after = content["model"], content["pre_tokenizer"] or {}, content["post_processor"] or {}
    vocabulary = model["vocab"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merged = [vocabulary["".join(pair)] for pair in pairs]
    made = {rank for word, rank in vocabulary.items() if len(word) > 1 and word != END_OF_TEXT}
    bare = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    plain = all((model.get(key) or None) == value for key, value in bare.items()) and not model.get("byte_fallback")
    splits = (split.get("type"), split.get("add_prefix_space"), split.get("use_regex")) == ("ByteLevel", False, True)
    alone = [token["content"] for token in content["added_tokens"]] == [END_OF_TEXT]
    idle = content["normalizer"] is None and after.get("type", "ByteLevel") == "ByteLevel"
    return plain and splits and alone and idle and merged == sorted(merged) and set(merged) == made


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str] | None) -> Tokenizer:
    """The configured tokenizer; only a bpe without `ranks` looks at `texts`, and only at the first train_bytes.

    config.vocab_size must be a number when a bpe is trained. Raises ConfigError, one line: an unreadable ranks file,
    no text to train on, or GPT-2's files neither cached nor reachable.
    """
    if config.kind == "bytes":
        return Tokenizer("bytes", {bytes([byte]): byte for byte in range(256)})
    if config.ranks is not None:
        path = Path(config.ranks).expanduser()
        if path.suffix == ".json":
            if found := Tokenizer.from_fast(path):
                return Tokenizer(config.kind, found._ranks)
            raise ConfigError(
                f"tokenizer.ranks={config.ranks} is not a usable tokenizer.json: it takes a byte-level BPE that splits "
                f"text as GPT-2's does and has {END_OF_TEXT} as its last id"
            )
        try:
            return Tokenizer(config.kind, read_ranks(path))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"tokenizer.ranks={config.ranks} is not a usable tiktoken ranks file: {reason}") from None
    if config.kind == "gpt2":
        return Tokenizer("gpt2", _stock_gpt2_ranks())
    if config.vocab_size is None:
        raise ConfigError("tokenizer.vocab_size is missing: a bpe needs it to be trained")
    sample = list(_first_bytes(_cut(texts or ()), config.train_bytes))
    if not sample:
        raise ConfigError("tokenizer=bpe has no text to be trained on: the training stories are empty")
    return Tokenizer("bpe", train_bpe(sample, config.vocab_size))


def train_bpe(texts: list[str], vocab_size: int) -> dict[bytes, int]:
    """Ranks of a byte-level BPE: 256 bytes, then merges of pairs seen at least twice, most frequent first.

    Holds vocab_size - 1 tokens (one id is left for end-of-text), or fewer when the text has no more pairs to merge.
    """
    from tokenizers import Tokenizer as Trainable
    from tokenizers import models, pre_tokenizers, trainers

    model = Trainable(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's pattern
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    to_byte = _byte_of_character()
    return {bytes(to_byte[char] for char in token): rank for token, rank in model.get_vocab().items()}


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 is itself, the rest follow from U+0100 on."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def read_ranks(path: Path) -> dict[bytes, int]:
    """A tiktoken ranks file: one `base64(token) rank` per line. Raises OSError, or ValueError naming the line."""
    ranks: dict[bytes, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:
                raise ValueError(f"line {number} is not 'base64 rank'") from None
    return ranks


def gpt2_cache() -> tuple[Path, bool]:
    """tiktoken's cache directory, and whether GPT-2's files are in it."""
    chosen = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    cache = Path(tempfile.gettempdir(), "data-gym-cache") if chosen is None else Path(chosen)
    return cache, all((cache / hashlib.sha1(url.encode()).hexdigest()).is_file() for url in GPT2_URLS)


def _stock_gpt2_ranks() -> dict[bytes, int]:
    """GPT-2's ranks from tiktoken's cache, or downloaded into it."""
    import requests
    import tiktoken

    cache, cached = gpt2_cache()
    try:
        if not cached:
            # tiktoken downloads without a time limit; asking first, with one, keeps a blocked network from hanging us
            requests.head(GPT2_URLS[0], timeout=10).raise_for_status()
        return dict(tiktoken.get_encoding("gpt2")._mergeable_ranks)
    except Exception as error:  # whatever the network, the proxy or the cache raise, the way out is the same
        raise ConfigError(
            f"tokenizer=gpt2: GPT-2's files are not in {cache} and cannot be downloaded ({type(error).__name__}); set "
            "TIKTOKEN_CACHE_DIR to a folder that has them, or tokenizer.ranks=<gpt2.tiktoken>, or use tokenizer=bpe"
        ) from None


def _cut(texts: Iterable[str]) -> Iterator[str]:
    """Texts without a word of more than LONGEST characters: training a BPE takes time by the square of it."""
    told = False
    for text in texts:
        pieces = LONG.sub(lambda word: "\0".join(re.findall(f"(?s).{{1,{LONGEST}}}", word[0])), text).split("\0")
        if len(pieces) > 1 and not told:
            told = True
            log.info(f"tokenizer: words of more than {LONGEST:,} characters are cut there to train it")
        yield from pieces


def _first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Texts until `limit` UTF-8 bytes are reached; the last one may go beyond it."""
    total = 0
    for text in texts:
        yield text
        total += len(text.encode("utf-8", errors="replace"))
        if total >= limit:
            return
