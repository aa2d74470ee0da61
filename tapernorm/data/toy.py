"""Little stories without a network: any number of them, story i a pure function of (seed, i).

A story draws its own world first (a hero, a friend, an elder, an animal, a thing, a place, weather, numbers) and then
tells one of the plots about it. The world recurs: names, pronouns, colours, hiding places, sounds and sums agree from
the first paragraph to the last, so that a model gains from long context. Words and sentences are drawn with mildly
falling probabilities, as in real text. The text and the notation it is written in: toy.txt.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any

VERSION = 1  # of the stories; a change of any text or rule raises it, and prepared data is made anew
NOTATION = re.compile(r"\{(\w+)\}|\[([^\]]*)\]")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou]|honest)")
PRONOUNS = {
    "girl": ("she", "her", "her", "herself"),
    "boy": ("he", "him", "his", "himself"),
}  # a boy's are the slots' names
IRREGULAR = {"mouse": "mice", "goose": "geese", "deer": "deer"}


class Falling:
    """A list to draw from; the r-th item, from 0, has weight 1 / (r + 3)."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)
        self._bounds = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(self.items))))
        self._total = self._bounds[-1]

    def draw(self, rng: random.Random) -> Any:
        return self.items[bisect.bisect(self._bounds, rng.random() * self._total)]

    def draw_distinct(self, rng: random.Random, count: int) -> list[Any]:
        drawn: list[Any] = []
        while len(drawn) < count:
            item = self.draw(rng)
            if item not in drawn:
                drawn.append(item)
        return drawn


# -------------------------------------------------------------------------------------------------------------- toy.txt


def _read() -> tuple[dict[str, Falling], list[list[list[str]]]]:
    """(lists by name: of words, or of records as dicts by slot name; plots, each a list of paragraphs of lines)."""
    text = resources.files("tapernorm.data").joinpath("toy.txt").read_text(encoding="utf-8")
    lists: dict[str, Falling] = {}
    shared: dict[str, str] = {}
    plots = []
    for section in text.split("\n# ")[1:]:
        heading, body = section.strip().split("\n", 1)
        name, _, fields = heading.partition(": ")
        unwrapped = body.replace("\n    ", " ")  # an indented line goes on with the one above
        if name == "shared":
            shared = dict(line.split(": ", 1) for line in unwrapped.splitlines())
        elif name == "plot":
            for key, told in shared.items():
                unwrapped = re.sub(rf"@{key}\b", told, unwrapped)
            plots.append([paragraph.splitlines() for paragraph in unwrapped.split("\n\n")])
        elif fields:
            lists[name] = Falling(dict(zip(_words(fields), _words(line), strict=True)) for line in body.splitlines())
        else:
            lists[name] = Falling(_words(body))
    return lists, plots


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


LISTS, PLOTS = _read()

# -------------------------------------------------------------------------------------------------------------- telling


def _plural(noun: str) -> str:
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def _world(rng: random.Random) -> dict[str, str]:
    """Everything that stays the same within a story, by slot name."""
    world: dict[str, str] = {}
    for name, slots in itertools.groupby(LISTS["kept"].items, lambda slot: slot.rstrip("2")):
        kept = list(slots)
        world |= zip(kept, LISTS[name].draw_distinct(rng, len(kept)), strict=True)
    world["trait"], world["trait2"] = LISTS["good"].draw_distinct(rng, 2)

    hero, friend = rng.choice(("girl", "boy")), rng.choice(("girl", "boy"))
    names = {kind: LISTS[kind].draw_distinct(rng, 2) for kind in ("girl", "boy")}
    animal, hero_animal = LISTS["animal"].draw_distinct(rng, 2)
    world["hero"], world["friend"] = names[hero][0], names[friend][1]
    for suffix, kind in (("", hero), ("2", friend)):
        world |= {f"{slot}{suffix}": word for slot, word in zip(PRONOUNS["boy"], PRONOUNS[kind], strict=True)}
        world["kind" + suffix] = kind
    if rng.random() < 0.15:  # a fable; the pronouns stay those of the name
        world["kind"] = hero_animal["animal"]
    world |= animal | LISTS["elder"].draw(rng)
    world["pet"] = LISTS["pet"].draw(rng)
    thing, thing2 = LISTS["thing"].draw_distinct(rng, 2)
    world |= thing | LISTS["place"].draw(rng) | LISTS["weather"].draw(rng)
    food, food2 = LISTS["food"].draw_distinct(rng, 2)
    world |= food | LISTS["job"].draw(rng)
    world["spot"], world["spot2"], world["spot3"] = LISTS["spot"].draw_distinct(rng, 3)

    says = world["weather_says"]
    world |= {"weather_says_low": says[0].lower() + says[1:], "thing2": thing2["thing"], "foods2": food2["foods"]}
    for plural in ("thing", "animal", "plant"):
        world[plural + "s"] = _plural(world[plural])
    world["things2"] = _plural(world["thing2"])

    # the sums come out: sum = n + m, left = sum - few, few < n
    n, m = rng.randint(3, 8), rng.randint(2, 6)
    few = rng.randint(2, n - 1)
    for name, value in {"n": n, "m": m, "few": few, "sum": n + m, "left": n + m - few}.items():
        world[name] = LISTS["number"].items[value]
    world["times"] = LISTS["times"].items[m]
    return world


@functools.cache
def _options(text: str, separator: str) -> Falling:
    return Falling(text.split(separator))


def _tell(text: str, world: dict[str, str], rng: random.Random) -> str:
    def value(match: re.Match[str]) -> str:
        name, choice = match.groups()
        if choice is not None:
            return _tell(_options(choice, "/").draw(rng), world, rng)
        slot = name[0].lower() + name[1:]
        word = world[slot] if slot in world else LISTS[slot].draw(rng)
        return word if slot == name else word[0].upper() + word[1:]

    return NOTATION.sub(value, text)


def story(seed: int, index: int) -> str:
    """Story `index` of `seed`: paragraphs with a '\n' between them, about 100 to 200 words."""
    # hashed: two integers as seeds can give the same stream, as 257 and 257 + 256 * 2**32 do
    rng = random.Random(f"{seed} {index}")
    world = _world(rng)
    paragraphs = []
    for lines in rng.choice(PLOTS):
        told = []
        for line in lines:
            if line.startswith("? ") and rng.random() < 0.4:
                continue
            told.append(_tell(_options(line.removeprefix("? "), " | ").draw(rng), world, rng))
        if told:
            paragraphs.append(" ".join(told))
    return ARTICLE.sub(r"\1n ", "\n".join(paragraphs))


def stories(seed: int, start: int = 0) -> Iterator[str]:
    """story(seed, start), story(seed, start + 1), ... without end; ranges that do not overlap draw apart."""
    return (story(seed, index) for index in itertools.count(start))
