"""Random ListOps expressions, with the benchmark's grammar and probabilities, a block at a time.

A tree is grown level by level: an argument is an operator with probability 1/4, down to depth 9, or
else a digit; an operator is one of four and has two to ten arguments; all evenly. Trees are kept if
their length is strictly between 500 and 2000 tokens. (The benchmark also lets the root be a digit;
such a tree is far too short to be kept.) Many trees grow at once, each level an array of nodes;
lengths and values are then summed from the leaves up, and places in the text from the root down.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8

from agalite import errors
from agalite.supervised.examples import Examples
from agalite.supervised.listops import CLOSE, MAX, MED, MIN, SM

VERSION = 1  # of what a seed stands for; part of the name under which a set is stored
_BLOCK = 512  # trees grown at once
_OPERATOR = 0.25
_PATIENCE = 200  # blocks without a new tree before it is clear that there are no more


@dataclass(frozen=True)
class Grammar:
    """The defaults are the benchmark's."""

    longer_than: int = 500
    shorter_than: int = 2000
    max_depth: int = 10
    max_arguments: int = 10

    def __post_init__(self) -> None:
        errors.integer("longer_than", self.longer_than, minimum=0)
        errors.integer("shorter_than", self.shorter_than, minimum=self.longer_than + 2)
        errors.integer_between("max_depth", self.max_depth, 2, 20)
        errors.integer_between("max_arguments", self.max_arguments, 2, 100)
        # A root of digits alone is the shortest, a tree that branches everywhere the longest.
        longest = _longest(self.max_depth, self.max_arguments)
        if self.longer_than >= longest or self.shorter_than <= 4:
            raise ValueError(
                f"longer_than={self.longer_than}, shorter_than={self.shorter_than}: trees of depth "
                f"{self.max_depth} with up to {self.max_arguments} arguments have 4 to {longest} "
                "tokens"
            )


def generate(count: int, seed: int, grammar: Grammar | None = None) -> Examples:
    """`count` different expressions; the first of them are the same whatever the count."""
    errors.integer("count", count, minimum=1)
    errors.integer("seed", seed, minimum=0)
    grammar = grammar or Grammar()
    parts, seen, found, fruitless = [], set[bytes](), 0, 0
    for number in range(2**31):
        block = _block(np.random.default_rng([seed, number]), grammar)
        fresh = []
        for i in range(len(block)):
            digest = hashlib.blake2b(block[i].tobytes(), digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                fresh.append(i)
        fruitless = 0 if fresh else fruitless + 1
        if fruitless == _PATIENCE:
            break
        new = block if len(fresh) == len(block) else block.take(np.array(fresh, np.int64))
        parts.append(new.slice(0, min(len(new), count - found)))
        found += len(parts[-1])
        if found == count:
            return Examples.join(parts)
    raise ValueError(
        f"count={count}: only {found} different expressions turn up with {grammar}; ask for fewer, "
        "or for longer ones"
    )


class _Level(NamedTuple):
    """The nodes of one depth, those of one list side by side."""

    is_operator: Bool[np.ndarray, " nodes"]
    token: UInt8[np.ndarray, " nodes"]
    arguments: Int[np.ndarray, " operators"]
    """How many; theirs are the nodes of the next level, in this order."""


def _block(rng: np.random.Generator, grammar: Grammar) -> Examples:
    """The trees among `_BLOCK` that have a length asked for."""
    levels = _grow(rng, grammar)
    lengths, values = _measure(levels)
    sizes = lengths[0]
    starts = np.cumsum(sizes) - sizes
    text = _write(levels, lengths, starts)
    keep = (sizes > grammar.longer_than) & (sizes < grammar.shorter_than)
    bounds = np.concatenate([[0], np.cumsum(sizes[keep])])
    return Examples(text[np.repeat(keep, sizes)], bounds, values[keep])


def _grow(rng: np.random.Generator, grammar: Grammar) -> list[_Level]:
    levels = []
    is_operator = np.ones(_BLOCK, bool)
    for depth in range(1, grammar.max_depth + 1):
        digits = rng.integers(0, 10, len(is_operator), np.uint8)
        operators = rng.integers(MIN, CLOSE, len(is_operator), np.uint8)
        token = np.where(is_operator, operators, digits)
        arguments = rng.integers(2, grammar.max_arguments + 1, int(is_operator.sum()))
        levels.append(_Level(is_operator, token, arguments))
        children = int(arguments.sum())
        if not children:
            break
        deep = depth + 1 == grammar.max_depth
        is_operator = np.zeros(children, bool) if deep else rng.random(children) < _OPERATOR
    return levels


def _measure(levels: list[_Level]) -> tuple[list[np.ndarray], UInt8[np.ndarray, " trees"]]:
    """The length of every node's text, by level, and the value of every tree."""
    lengths: list[np.ndarray] = []
    below = np.zeros(0, np.uint8)  # the values of the level below
    for level in reversed(levels):
        length = np.ones(len(level.token), np.int64)
        value = level.token.copy()
        if len(level.arguments):
            first = _firsts(level.arguments)
            length[level.is_operator] = 2 + np.add.reduceat(lengths[-1], first)
            operators = level.token[level.is_operator]
            value[level.is_operator] = _values(operators, below, first, level.arguments)
        lengths.append(length)
        below = value
    return lengths[::-1], below


def _values(
    operators: np.ndarray, values: np.ndarray, first: np.ndarray, count: np.ndarray
) -> UInt8[np.ndarray, " operators"]:
    """Each operator applied to its list: `count` values from `first` on."""
    # In order inside each list: the list's number is the more significant part of the key.
    lists = np.repeat(np.arange(len(count)), count)
    ordered = np.sort(lists * 16 + values) & 15
    smallest, largest = ordered[first], ordered[first + count - 1]
    median = (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) // 2
    total = np.add.reduceat(values.astype(np.int64), first) % 10
    cases = [operators == MIN, operators == MAX, operators == MED, operators == SM]
    return np.select(cases, [smallest, largest, median, total]).astype(np.uint8)


def _write(
    levels: list[_Level], lengths: list[np.ndarray], starts: Int[np.ndarray, " trees"]
) -> UInt8[np.ndarray, " tokens"]:
    """All trees as tokens, one after the other."""
    text = np.empty(int(lengths[0].sum()), np.uint8)
    place = starts
    for depth, (level, length) in enumerate(zip(levels, lengths, strict=True)):
        text[place] = level.token
        own, size = place[level.is_operator], length[level.is_operator]
        text[own + size - 1] = CLOSE
        if len(level.arguments):
            before = np.cumsum(lengths[depth + 1]) - lengths[depth + 1]
            before -= np.repeat(before[_firsts(level.arguments)], level.arguments)
            place = np.repeat(own, level.arguments) + 1 + before
    return text


def _firsts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _longest(depth: int, arguments: int) -> int:
    length = 1
    for _ in range(depth - 1):
        length = 2 + arguments * length
    return length
