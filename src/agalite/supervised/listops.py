"""ListOps: expressions of digits under MIN, MAX, MED and SM, and their values.

[MAX 2 9 [MIN 4 7 ] 0 ] has the value 9. MED is the median, rounded down between two middle values;
SM is the sum modulo ten. A token is a digit, an operator with its opening bracket, or the closing
bracket: 15 in total. The benchmark's files also have round brackets around every pair, which carry
no information and are left out, as in most later work. (The benchmark's own first pipeline split
the text at everything but letters and digits, and so lost the closing brackets too.)

`evaluate` checks and evaluates one expression, `generate` draws random ones, `read_tsv` and
`write_tsv` handle the benchmark's files.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8

from agalite import files, validation
from agalite.supervised.examples import Examples

OPERATORS = ("MIN", "MAX", "MED", "SM")
MIN, MAX, MED, SM, CLOSE = range(10, 15)
VOCABULARY, CLASSES = 15, 10
FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}

WORDS = [*"0123456789", *(f"[{name}" for name in OPERATORS), "]"]
_TOKENS = {word.encode(): i for i, word in enumerate(WORDS)}
_HEADER = b"Source\tTarget"

VERSION = 1
"""The version of what `generate` makes of a seed; part of the name of a cached set."""
_BLOCK = 512  # trees that are grown at once
_OPERATOR_PROBABILITY = 0.25
_MAX_FRUITLESS = 200  # blocks without a new tree before `generate` gives up


def to_text(tokens: UInt8[np.ndarray, " T"]) -> str:
    """Tokens (T,) as the text of an expression."""
    return " ".join(WORDS[i] for i in tokens)


def from_text(text: str | bytes) -> UInt8[np.ndarray, " T"]:
    """The tokens (T,) of an expression; round brackets are ignored."""
    raw = text.encode() if isinstance(text, str) else text
    words = raw.translate(None, b"()").split()
    try:
        return np.array([_TOKENS[word] for word in words], np.uint8)
    except KeyError as error:
        word = error.args[0].decode(errors="replace")
        raise ValueError(f"{word!r} is not a token; expected one of: {' '.join(WORDS)}") from None


def evaluate(tokens: UInt8[np.ndarray, " T"]) -> int:
    """The value of an expression (T,); ValueError if it is malformed."""
    # The operators and the values of the lists that are open, the outermost first.
    operators: list[int] = []
    lists: list[list[int]] = [[]]
    for i, token in enumerate(np.asarray(tokens).tolist()):
        if token < 10:
            lists[-1].append(token)
        elif token < CLOSE:
            operators.append(token)
            lists.append([])
        elif token > CLOSE:
            raise ValueError(f"token {token} at position {i} must be from 0 to {CLOSE}")
        elif not operators:
            raise ValueError(f"the bracket at position {i} closes nothing")
        else:
            values = lists.pop()
            operator = operators.pop()
            if not values:
                raise ValueError(f"the list that ends at position {i} is empty")
            lists[-1].append(_apply(operator, values))
    if operators:
        raise ValueError(f"{len(operators)} lists are never closed")
    if len(lists[0]) != 1:
        raise ValueError(f"there are {len(lists[0])} expressions side by side; expected one")
    return lists[0][0]


def _apply(operator: int, values: list[int]) -> int:
    match operator:
        case 10:
            return min(values)
        case 11:
            return max(values)
        case 12:
            values.sort()
            return (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2
        case _:
            return sum(values) % 10


@dataclass(frozen=True)
class Grammar:
    """The grammar of random expressions; the defaults are the benchmark's.

    **Arguments:**

    - `longer_than`, `shorter_than`: exclusive bounds on the number of tokens.
    - `max_depth`: the depth of the deepest digits.
    - `max_arguments`: of an operator; the least number is two.
    """

    longer_than: int = 500
    shorter_than: int = 2000
    max_depth: int = 10
    max_arguments: int = 10

    def __post_init__(self) -> None:
        validation.check_integer("longer_than", self.longer_than, minimum=0)
        validation.check_integer("shorter_than", self.shorter_than, minimum=self.longer_than + 2)
        validation.check_integer_between("max_depth", self.max_depth, 2, 20)
        validation.check_integer_between("max_arguments", self.max_arguments, 2, 100)
        # The shortest tree is a root with two digits, the longest branches everywhere.
        longest = _longest(self.max_depth, self.max_arguments)
        if self.longer_than >= longest or self.shorter_than <= 4:
            raise ValueError(
                f"longer_than={self.longer_than}, shorter_than={self.shorter_than}: trees of depth "
                f"{self.max_depth} with up to {self.max_arguments} arguments have 4 to {longest} "
                "tokens"
            )


def generate(count: int, seed: int, grammar: Grammar | None = None) -> Examples:
    """Draws different random expressions.

    **Arguments:**

    - `count`: how many. A larger set begins with the smaller one.
    - `seed`: decides the set.
    - `grammar`: the benchmark's if not given.
    """
    validation.check_integer("count", count, minimum=1)
    validation.check_integer("seed", seed, minimum=0, maximum=validation.LARGEST_COUNT)
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
        if fruitless == _MAX_FRUITLESS:
            break
        new = block if len(fresh) == len(block) else block.take(np.array(fresh, np.int64))
        parts.append(new.slice(0, min(len(new), count - found)))
        found += len(parts[-1])
        if found == count:
            return Examples.join(parts)
    raise ValueError(
        f"count={count}: only {found} different expressions are found with {grammar}; ask for "
        "fewer, or for longer ones"
    )


class _Level(NamedTuple):
    """The nodes of one depth of all trees; those of one list are neighbours."""

    is_operator: Bool[np.ndarray, " nodes"]
    token: UInt8[np.ndarray, " nodes"]
    arguments: Int[np.ndarray, " operators"]
    """The number of arguments of each operator: the nodes of the next level, in this order."""


def _block(rng: np.random.Generator, grammar: Grammar) -> Examples:
    """Those of `_BLOCK` random trees that have an allowed length."""
    levels = _grow(rng, grammar)
    lengths, values = _measure(levels)
    sizes = lengths[0]
    starts = np.cumsum(sizes) - sizes
    text = _write(levels, lengths, starts)
    keep = (sizes > grammar.longer_than) & (sizes < grammar.shorter_than)
    bounds = np.concatenate([[0], np.cumsum(sizes[keep])])
    return Examples(text[np.repeat(keep, sizes)], bounds, values[keep])


def _grow(rng: np.random.Generator, grammar: Grammar) -> list[_Level]:
    """`_BLOCK` random trees, level by level from the roots."""
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
        deepest = depth + 1 == grammar.max_depth
        is_operator = (
            np.zeros(children, bool) if deepest else rng.random(children) < _OPERATOR_PROBABILITY
        )
    return levels


def _measure(levels: list[_Level]) -> tuple[list[np.ndarray], UInt8[np.ndarray, " trees"]]:
    """The number of tokens of every node, by level, and the value of every tree."""
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
    """The value of each operator on its list: the `count` values from `first` on."""
    # Sorted within each list: the index of the list is the more significant part of the key.
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
    """The tokens of all trees, one after another."""
    text = np.empty(int(lengths[0].sum()), np.uint8)
    position = starts  # of every node of the level
    for depth, (level, length) in enumerate(zip(levels, lengths, strict=True)):
        text[position] = level.token
        own, size = position[level.is_operator], length[level.is_operator]
        text[own + size - 1] = CLOSE
        if len(level.arguments):
            before = np.cumsum(lengths[depth + 1]) - lengths[depth + 1]
            before -= np.repeat(before[_firsts(level.arguments)], level.arguments)
            position = np.repeat(own, level.arguments) + 1 + before
    return text


def _firsts(counts: np.ndarray) -> np.ndarray:
    """Where groups of these sizes start."""
    return np.cumsum(counts) - counts


def _longest(depth: int, arguments: int) -> int:
    """The tokens of a tree that branches everywhere."""
    length = 1
    for _ in range(depth - 1):
        length = 2 + arguments * length
    return length


def read_tsv(path: Path, *, max_length: int = 2000) -> Examples:
    """Reads a file of the benchmark.

    **Arguments:**

    - `path`: the file: a line `Source<tab>Target`, then an expression and its value on each line.
    - `max_length`: the largest number of tokens.

    **Returns:**

    The examples. Every row is checked, its value too; ValueError names the line of a bad one.
    """
    validation.check_integer("max_length", max_length, minimum=1)
    sequences, labels = [], []
    for number, line in _lines(path):
        try:
            tokens, label = _row(line, max_length)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        sequences.append(tokens)
        labels.append(label)
    if not sequences:
        raise ValueError(f"{path} has no rows")
    return Examples.from_sequences(sequences, labels)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            header = file.readline().rstrip(b"\r\n")
            if header != _HEADER:
                raise ValueError(
                    f"{path}, line 1: {header[:60]!r}; expected the column names {_HEADER!r}"
                )
            for number, line in enumerate(file, 2):
                yield number, line.rstrip(b"\r\n")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file") from None


def _row(line: bytes, max_length: int) -> tuple[UInt8[np.ndarray, " T"], int]:
    columns = line.split(b"\t")
    if len(columns) != 2:
        raise ValueError(f"{len(columns)} columns; expected 2, an expression and its value")
    source, target = columns
    if not re.fullmatch(rb"[0-9]", target):
        raise ValueError(f"the value {target[:20]!r} must be a digit")
    tokens = from_text(source)
    if len(tokens) > max_length:
        raise ValueError(
            f"{len(tokens)} tokens; the limit is max_length={max_length} (cut short, an "
            "expression would have another value)"
        )
    value = evaluate(tokens)
    if value != int(target):
        raise ValueError(f"the value is given as {target.decode()}, but it is {value}")
    return tokens, value


def write_tsv(path: Path, examples: Examples) -> None:
    """Writes a file that `read_tsv` and programs for the benchmark can read."""
    rows = [_HEADER]
    rows += [f"{to_text(examples[i])}\t{examples.labels[i]}".encode() for i in range(len(examples))]
    files.write(path, b"\n".join(rows) + b"\n")
