"""Text continued by a checkpoint's model, printed as it is produced."""

from __future__ import annotations

import codecs
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tapernorm.config.programs import GenerateConfig
from tapernorm.config.schema import ConfigError
from tapernorm.data.tokenizer import Tokenizer
from tapernorm.model.generate import generate
from tapernorm.runtime.device import keep_freed_memory, pick_device
from tapernorm.runtime.log import printable
from tapernorm.training import checkpoint as checkpoints

log = logging.getLogger(__name__)


class Transcript:
    """Rows of ids that grow side by side, written one row after the other as text.

    A row's text is written as soon as the rows before it have ended, what came in the meantime at once. The bytes of
    an incomplete character wait for the rest of it, so that nothing is written which later ids would change; joined,
    the text of a row is `tokenizer.decode` of its ids.
    """

    def __init__(self, tokenizer: Tokenizer, heads: list[str], write: Callable[[str], object]) -> None:
        """`heads`: what is written at the beginning of each row."""
        self.tokenizer, self.write = tokenizer, write
        self.waiting = heads
        self.decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in heads]
        self.ended = [False] * len(heads)
        self.row = -1  # the one that is being written
        self._next_row()

    def hear(self, row: int, token: int | None) -> None:
        """Take a row's next id, or None for its end: an `on_token` for `generate`."""
        self.ended[row] = token is None
        more = b"" if token is None else self.tokenizer.decode_bytes([token])
        text = self.decoders[row].decode(more, final=token is None) + "\n" * (token is None)
        if row != self.row:
            self.waiting[row] += text
            return
        if text:
            self.write(text)
        if token is None:
            self._next_row()

    def _next_row(self) -> None:
        """Go on to the first row that still grows, writing whole those on the way."""
        self.row += 1
        while self.row < len(self.ended):
            self.write(self.waiting[self.row])
            if not self.ended[self.row]:
                return
            self.row += 1


def continue_text(config: GenerateConfig, write: Callable[[str], object] | None = None) -> list[str]:
    """Continuations of config.prompt by a checkpoint's model; returns the texts, without the prompt.

    A document begins after an end-of-text id, so every prompt does. `write` takes pieces of text (default: standard
    output, at once); remarks go to standard error. Raises ConfigError, one line, for a path without a valid
    checkpoint, and NotFinite for a model that computes no numbers.
    """
    device = pick_device(config.device, "device")
    keep_freed_memory()
    path = checkpoints.find(Path(config.checkpoint))
    model, trained, tokenizer = checkpoints.load_model(path, device)
    if model.embed.num_embeddings != tokenizer.n_vocab:
        raise ConfigError(
            f"checkpoint {path}: {model.embed.num_embeddings} ids, but its tokenizer has {tokenizer.n_vocab}"
        )
    prompt = [tokenizer.eot, *tokenizer.encode(config.prompt)]
    n_ctx = trained.model.n_ctx
    if len(prompt) + config.max_tokens > n_ctx:
        log.info(f"beyond {n_ctx} tokens, of which the prompt has {len(prompt)}, the model reads only the newest ones")
    numbered = [
        f"--- {number} of {config.samples}\n" if config.samples > 1 else "" for number in range(1, config.samples + 1)
    ]
    transcript = Transcript(tokenizer, [head + config.prompt for head in numbered], write or _print)
    start = time.perf_counter()
    rows = generate(
        model,
        [prompt] * config.samples,
        config.max_tokens,
        eot=tokenizer.eot,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
        on_token=transcript.hear if config.stream else None,
    )
    seconds = time.perf_counter() - start
    if not config.stream:
        for row, ids in enumerate(rows):
            for token in (*ids, None):
                transcript.hear(row, token)
    tokens = sum(map(len, rows))
    rate = f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.0f}/s)"
    log.info(f"{path.name}, norm {trained.norm.name}, {device}: {rate}")
    return [tokenizer.decode(ids) for ids in rows]


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # a terminal that lacks a character gets a question mark, not an error
    print(printable(text).encode(encoding, errors="replace").decode(encoding), end="", flush=True)
