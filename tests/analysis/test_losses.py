"""Statistics of token losses against independent computations: errors over documents, tails, bytes, differences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tapernorm.analysis.losses import Losses, clustered_mean, difference, document_of
from tapernorm.config.options import TokenizerConfig
from tapernorm.data.tokenizer import Tokenizer, build_tokenizer

BYTES = build_tokenizer(TokenizerConfig(kind="bytes"), None)
STORIES = [f"The cat number {i} sat on the mat and looked at the moon{'!' * i}" for i in range(9)]


def encoded(stories: list[str], tokenizer: Tokenizer) -> np.ndarray:
    return np.array([token for story in stories for token in [*tokenizer.encode(story), tokenizer.eot]])


def losses_of(tokens: np.ndarray, nats: Any, tokenizer: Tokenizer = BYTES) -> Losses:
    inputs, targets = tokens[:-1], tokens[1:]
    nats = np.broadcast_to(np.asarray(nats, dtype=float), targets.shape)
    return Losses(nats, targets, document_of(inputs, tokenizer.eot), tokenizer)


def random_nats(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).exponential(2.0, n)


# -------------------------------------------------------------------------------------------------------------- errors


def test_the_error_is_the_one_over_documents() -> None:
    tokens = encoded(STORIES, BYTES)
    nats = random_nats(0, len(tokens) - 1)
    found = losses_of(tokens, nats).statistics()
    parts = [len(story) + 1 for story in STORIES]  # the first one is predicted from its second token on
    documents = np.split(nats, np.cumsum([parts[0] - 1, *parts[1:]])[:-1])
    mean = nats.sum() / len(nats)
    residuals = [sum(part) - mean * len(part) for part in documents]
    n = len(documents)
    assert found["documents"] == n == len(STORIES)
    assert found["loss"] == pytest.approx(mean, rel=1e-12)
    assert found["loss_se"] == pytest.approx(math.sqrt(n / (n - 1) * sum(r**2 for r in residuals)) / len(nats))
    assert found["perplexity"] == pytest.approx(math.exp(mean))


def test_with_documents_of_one_length_it_is_the_usual_error_of_their_means() -> None:
    values = random_nats(1, 12)
    mean, error = clustered_mean(7 * values, np.full(12, 7))
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / math.sqrt(12))


def test_the_error_is_honest_where_tokens_of_a_document_correlate() -> None:
    """Against the spread of the mean over fresh samples of text; an error over tokens is several times too small."""
    generator = np.random.default_rng(2)
    means, errors, naive = [], [], []
    for _ in range(300):
        sizes = generator.integers(20, 200, 60)
        levels = 3 + generator.normal(size=60)
        tokens = [level + generator.normal(size=size) for level, size in zip(levels, sizes, strict=True)]
        mean, error = clustered_mean(np.array([part.sum() for part in tokens]), sizes)
        means.append(mean)
        errors.append(error)
        naive.append(np.concatenate(tokens).std() / math.sqrt(sizes.sum()))
    spread = np.std(means)
    assert np.mean(errors) == pytest.approx(spread, rel=0.15)
    assert np.mean(naive) < 0.3 * spread


def test_one_document_has_no_error() -> None:
    found = losses_of(encoded(STORIES[:1], BYTES), 2.0).statistics()
    assert found["loss"] == 2.0 and math.isnan(found["loss_se"]) and found["documents"] == 1


# --------------------------------------------------------------------------------------------------- documents, bytes


def test_the_end_of_text_id_belongs_to_the_document_that_it_ends() -> None:
    eot = 9
    tokens = np.array([1, 2, eot, 3, eot, 4, 5, 6])
    assert document_of(tokens[:-1], eot).tolist() == [0, 0, 1, 1, 2, 2, 2]  # of 2, eot | 3, eot | 4, 5, 6


def test_bits_per_byte_by_hand() -> None:
    """With one token a byte, bits per byte = loss / ln 2 * tokens / bytes; an end-of-text id is a token without any."""
    tokens = encoded(["Zoë ran.", "So did I, 3 times."], BYTES)
    nats = random_nats(3, len(tokens) - 1)
    found = losses_of(tokens, nats).statistics()
    n_bytes = len("Zoë ran.".encode()) - 1 + len("So did I, 3 times.")
    assert (found["tokens"], found["bytes"]) == (n_bytes + 2, n_bytes)
    assert found["bits_per_byte"] == pytest.approx(nats.sum() / math.log(2) / n_bytes)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2) * found["tokens"] / found["bytes"])


# --------------------------------------------------------------------------------------------------------------- tails


def test_tails_are_losses_that_occur() -> None:
    tokens = np.full(10_001, ord("a"))
    found = losses_of(tokens, np.random.default_rng(4).permutation(np.arange(1, 10_001))).statistics()
    assert [found[name] for name in ("median", "p99", "p99_9", "max")] == [5000, 9900, 9990, 10_000]


def test_losses_that_are_not_finite_are_counted_and_come_last() -> None:
    tokens = encoded(STORIES, BYTES)
    nats = np.full(len(tokens) - 1, 2.0)
    nats[100:103] = math.nan, math.inf, math.nan
    losses = losses_of(tokens, nats)
    found = losses.statistics()
    assert found["nonfinite"] == 3 and found["median"] == 2.0 and found["p99_9"] == found["max"] == math.inf
    assert math.isnan(found["loss"]) and math.isnan(found["loss_se"]) and found["tokens"] == len(nats)
    (worst,) = losses.worst(1)["mean"]
    assert worst["document"] == losses.document[100]


def test_worst_documents_by_mean_and_by_total() -> None:
    stories = ["a" * 10, "b" * 500, "c" * 20]
    tokens = encoded(stories, BYTES)
    nats = np.where(tokens[1:] == ord("c"), 8.0, 1.0)
    worst = losses_of(tokens, nats).worst(2)
    assert [found["document"] for found in worst["mean"]] == [2, 0]
    assert [found["document"] for found in worst["total"]] == [1, 2]
    assert worst["mean"][0] == {
        "document": 2,
        "tokens": 21,
        "loss": pytest.approx(161 / 21),
        "total": 161.0,
        "max": 8.0,
        "excerpt": "c" * 20,
    }
    assert worst["total"][0]["excerpt"] == "b" * 64 + "..."
    assert losses_of(tokens, nats).worst(0) == {"mean": [], "total": []}


def test_losses_at_the_best_temperature_are_those_of_the_same_tokens() -> None:
    tokens = encoded(STORIES, BYTES)
    plain = losses_of(tokens, random_nats(6, len(tokens) - 1))
    assert plain.at_best is None
    assert plain.statistics()["best_temperature"] is plain.statistics()["loss_best_temperature"] is None
    both = replace(plain, temperature=0.9, best=0.5 * plain.nats)
    assert both.at_best is not None
    found = both.statistics()
    assert (found["best_temperature"], found["loss"]) == (0.9, plain.statistics()["loss"])
    assert found["loss_best_temperature"] == pytest.approx(both.at_best.statistics()["loss"], rel=1e-12)
    assert np.array_equal(both.at_best.total, losses_of(tokens, 0.5 * plain.nats).total)


# --------------------------------------------------------------------------------------------------------- differences


def test_differences_are_paired_by_document() -> None:
    tokens = encoded(STORIES, BYTES)
    base = losses_of(tokens, random_nats(5, len(tokens) - 1))
    base = losses_of(tokens, base.nats + base.document)  # documents differ far more than the two models
    steps = np.array([0.1, -0.2, 0.4, 0.0, 0.1, 0.1, 0.3, -0.1, 0.2])[base.document]
    found = difference(losses_of(tokens, base.nats + steps), base)
    assert isinstance(found, dict)
    _, error = clustered_mean(np.bincount(base.document, steps), base.n_tokens)
    assert found["mean"] == pytest.approx(steps.mean()) and found["se"] == pytest.approx(error)
    assert found["high"] - found["mean"] == pytest.approx(2.306004 * error)  # Student's t, 8 degrees of freedom
    assert found["mean"] - found["low"] == pytest.approx(2.306004 * error)
    assert (found["unit"], found["documents"]) == ("nats/token", 9)
    assert found["se"] < 0.5 * base.statistics()["loss_se"]  # what is common to both cancels
    # A shorter evaluation is compared on what both have.
    short = losses_of(tokens[:200], base.nats[:199] + 0.5)
    for pair, sign in (((short, base), 1), ((base, short), -1)):
        found = difference(*pair)
        assert isinstance(found, dict) and found["mean"] == pytest.approx(sign * 0.5)


def test_other_text_is_not_compared() -> None:
    a, b = (losses_of(encoded(stories, BYTES), 1.0) for stories in (STORIES, STORIES[::-1]))
    assert difference(a, b) == "evaluated on other text"
    # The same tokens at other places of the text, as a filter may leave them: three documents here and two there.
    nats, targets = np.ones(6), np.full(6, 7)
    three, two = (Losses(nats, targets, np.array(places), BYTES) for places in ([0, 0, 1, 1, 4, 4], [2, 2, 2, 3, 3, 3]))
    assert difference(three, two) == "evaluated on other text"


def test_other_tokenizers_are_compared_in_bits_per_byte_over_whole_documents() -> None:
    bpe = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), STORIES)
    ours, theirs = encoded(STORIES, bpe), encoded(STORIES, BYTES)[:-30]  # the last document is cut
    assert len(ours) < len(theirs)
    a, b = losses_of(ours, 2.0, bpe), losses_of(theirs, 1.0)
    found = difference(a, b)
    assert isinstance(found, dict)
    whole = STORIES[1:-1]  # nor is the first, whose first token is not predicted
    bits = sum(2.0 * (len(bpe.encode(story)) + 1) - (len(story) + 1) for story in whole) / math.log(2)
    assert found["mean"] == pytest.approx(bits / sum(map(len, whole)))
    assert (found["unit"], found["documents"]) == ("bits/byte", len(whole))
    nothing = losses_of(encoded([story[::-1] for story in STORIES], BYTES), 1.0)
    assert (
        difference(a, nothing)
        == "another tokenizer and no two whole documents in common; tokens=... can take in more of it"
    )
