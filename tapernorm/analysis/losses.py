"""From the loss of every predicted token to what is reported: means with errors, tails, worst documents, differences.

The unit of sampling is the document. Tokens of one document share its topic and its difficulty, so their losses
correlate and a standard error over tokens would be too small; windows cut the text where it happens to be cut. So
means are ratios of sums over documents, and their standard errors are over documents. They say how much the number
would change with another sample of text, not with another seed of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tapernorm.analysis.intervals import student
from tapernorm.data.tokenizer import Tokenizer
from tapernorm.runtime.record import perplexity

QUANTILES = {"median": 0.5, "p99": 0.99, "p99_9": 0.999}
EXCERPT_TOKENS, EXCERPT_CHARACTERS = 64, 80


@dataclass(frozen=True)
class Losses:
    """Losses of n predicted tokens, in the order of the text.

    nats (n,) float64: -ln p of each token, maybe not finite; targets (n,): the tokens; document (n,): which document
    of the split each belongs to, from 0 and ascending (see `document_of`). Where windows are left out, some documents
    may be missing. D is the number of those that have a token. best (n,): the losses at `temperature`, T*, None where
    that is.
    """

    nats: np.ndarray
    targets: np.ndarray
    document: np.ndarray
    tokenizer: Tokenizer
    temperature: float | None = None
    best: np.ndarray | None = None

    @property
    def at_best(self) -> Losses | None:
        """The same tokens at T*."""
        return None if self.best is None else replace(self, nats=self.best)

    @cached_property
    def places(self) -> np.ndarray:
        """The places in the split of the documents (D,) that have a token here."""
        return np.unique(self.document)

    @cached_property
    def _index(self) -> np.ndarray:
        return np.searchsorted(self.places, self.document)

    @cached_property
    def n_tokens(self) -> np.ndarray:
        """Predicted tokens of each document (D,), the end-of-text id included."""
        return np.bincount(self._index)

    @cached_property
    def n_bytes(self) -> np.ndarray:
        """UTF-8 bytes of the predicted tokens of each document (D,)."""
        return np.bincount(self._index, self.tokenizer.byte_lengths(self.targets))

    @cached_property
    def total(self) -> np.ndarray:
        """Sum of the losses of each document (D,), in nats."""
        return np.bincount(self._index, self.nats)

    def first(self, n: int) -> Losses:
        """The first n tokens alone."""
        return Losses(self.nats[:n], self.targets[:n], self.document[:n], self.tokenizer)

    def statistics(self) -> dict[str, Any]:
        """Plain numbers by the names of docs/metrics.md. Means over all tokens, so not finite when a loss is not.

        The median and the percentiles are losses that occur: the smallest that a share q of the tokens does not
        exceed. A loss that is not a number counts as infinite there.
        """
        loss, loss_se = clustered_mean(self.total, self.n_tokens)
        bits, bits_se = clustered_mean(self.total / math.log(2), self.n_bytes)
        ranked = np.where(np.isnan(self.nats), np.inf, self.nats)
        tails = np.quantile(ranked, list(QUANTILES.values()), method="inverted_cdf")
        return {
            "loss": loss,
            "loss_se": loss_se,
            "perplexity": perplexity(loss),
            "best_temperature": self.temperature,
            "loss_best_temperature": None if self.best is None else float(self.best.mean()),
            **dict(zip(QUANTILES, tails.tolist(), strict=True)),
            "max": ranked.max().item(),
            "bits_per_byte": bits,
            "bits_per_byte_se": bits_se,
            "tokens": len(self.nats),
            "documents": len(self.n_tokens),
            "bytes": int(self.n_bytes.sum()),
            "nonfinite": int((~np.isfinite(self.nats)).sum()),
        }

    def worst(self, count: int) -> dict[str, list[dict[str, Any]]]:
        """The `count` documents with the largest mean and with the largest total loss; not finite comes first."""
        orders = {"mean": self.total / self.n_tokens, "total": self.total}
        ranked = {name: -np.where(np.isnan(values), np.inf, values) for name, values in orders.items()}
        return {
            name: [self._describe(index) for index in np.argsort(values, kind="stable")[:count].tolist()]
            for name, values in ranked.items()
        }

    def whole_documents(self) -> Iterator[tuple[bytes, float, int]]:
        """(text, total loss, bytes) of every document of which no token is missing.

        Of one that lost a window in its middle, the text that is left, which another one's will hardly equal.
        """
        last = len(self.n_tokens) - (self.targets[-1] != self.tokenizer.eot)
        for index in range(1, last):  # the very first token of the split has nothing before it and is not predicted
            text = self.tokenizer.decode_bytes(self.targets[self._span(index)])
            yield text, float(self.total[index]), len(text)

    def _span(self, index: int) -> slice:
        return slice(*np.searchsorted(self._index, [index, index + 1]))

    def _describe(self, index: int) -> dict[str, Any]:
        nats, targets = self.nats[self._span(index)], self.targets[self._span(index)]
        text = " ".join(self.tokenizer.decode(targets[:EXCERPT_TOKENS]).split())
        cut = len(targets) > EXCERPT_TOKENS or len(text) > EXCERPT_CHARACTERS
        return {
            "document": int(self.places[index]),
            "tokens": len(targets),
            "loss": float(self.total[index] / len(targets)),
            "total": float(self.total[index]),
            "max": float(nats.max()),
            "excerpt": text[:EXCERPT_CHARACTERS] + "..." * cut,
        }


def document_of(
    tokens: np.ndarray, eot: int, n_ctx: int | None = None, windows: np.ndarray | None = None
) -> np.ndarray:
    """Document of each predicted token (n,), from the token before it: the number of end-of-text ids up to that.

    So the end-of-text id that ends a document is that document's. tokens (m,): the split from its start on, what
    precedes each predicted token. windows (W,): the indices of those of n_ctx tokens that are predicted, n = W n_ctx;
    None: all, n = m. The ids in the windows between count too: neighbours of a gap are not taken for one document.
    """
    document = np.cumsum(tokens == eot)
    if windows is None or n_ctx is None:
        return document
    return document[windows[:, None] * n_ctx + np.arange(n_ctx)].ravel()


def clustered_mean(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """m = sum_d s_d / sum_d w_d over D clusters of sizes w_d, and its standard error (a ratio's, by linearization):

        se^2 = D/(D-1) * sum_d (s_d - m w_d)^2 / (sum_d w_d)^2

    NaN for what is not defined: the error with one cluster, both where the sums are not finite or there is no size.
    """
    n, size = len(sums), sizes.sum()
    with np.errstate(all="ignore"):
        mean = np.float64(sums.sum()) / size
        squares = ((sums - mean * sizes) ** 2).sum()
        error = np.sqrt(np.float64(n) / (n - 1) * squares) / size if n > 1 else np.nan
    return float(mean), float(error)


def difference(losses: Losses, baseline: Losses) -> dict[str, Any] | str:
    """Mean paired difference losses - baseline with a 95 % interval over documents, or why there is none.

    With the same tokenizer and tokens: nats per token, over the tokens that both have. With different tokenizers: bits
    per byte, over the documents that both have as a whole, found by their text. The interval is Student's, with one
    degree of freedom less than documents.
    """
    if losses.tokenizer.fingerprint == baseline.tokenizer.fingerprint:
        n = min(len(losses.nats), len(baseline.nats))
        a, b = losses.first(n), baseline.first(n)
        if not (np.array_equal(a.targets, b.targets) and np.array_equal(a.document, b.document)):
            return "evaluated on other text"
        return _interval("nats/token", a.total - b.total, a.n_tokens)
    theirs = {text: total for text, total, _ in baseline.whole_documents()}
    both = [(total - theirs[text], size) for text, total, size in losses.whole_documents() if text in theirs]
    if len(both) < 2:
        return "another tokenizer and no two whole documents in common; tokens=... can take in more of it"
    sums, sizes = np.array(both).T
    return _interval("bits/byte", sums / math.log(2), sizes)


def _interval(unit: str, sums: np.ndarray, sizes: np.ndarray) -> dict[str, Any]:
    mean, error = clustered_mean(sums, sizes)
    low, high = student(mean, error, len(sums))
    return {"unit": unit, "mean": mean, "se": error, "low": low, "high": high, "documents": len(sums)}
