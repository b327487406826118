"""ListOps: nested lists of digits under MIN, MAX, MED and SM, and the digit each comes to.

[MAX 2 9 [MIN 4 7 ] 0 ] is 9. A token is a digit, an operator with its opening bracket, or the
closing bracket: 15 in all. The benchmark's files also have round brackets around every pair, which
say nothing new; they are left out, as in most later work. (Its own first pipeline split the text
at everything that is no letter or digit, and so lost the closing brackets with them.)

MED is the median, rounded down between two middle values; SM is the sum modulo ten.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from agalite import errors, files
from agalite.supervised.examples import Examples

OPERATORS = ("MIN", "MAX", "MED", "SM")
MIN, MAX, MED, SM, CLOSE = range(10, 15)
VOCABULARY, CLASSES = 15, 10
FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}

WORDS = [*"0123456789", *(f"[{name}" for name in OPERATORS), "]"]
_TOKENS = {word.encode(): i for i, word in enumerate(WORDS)}
_HEADER = b"Source\tTarget"


def to_text(tokens: UInt8[np.ndarray, " T"]) -> str:
    return " ".join(WORDS[i] for i in tokens)


def from_text(text: str | bytes) -> UInt8[np.ndarray, " T"]:
    """Tokens (T,) of an expression; round brackets are passed over."""
    raw = text.encode() if isinstance(text, str) else text
    words = raw.translate(None, b"()").split()
    try:
        return np.array([_TOKENS[word] for word in words], np.uint8)
    except KeyError as error:
        word = error.args[0].decode(errors="replace")
        raise ValueError(f"{word!r} is no token; expected one of: {' '.join(WORDS)}") from None


def evaluate(tokens: UInt8[np.ndarray, " T"]) -> int:
    """The digit that an expression comes to; a malformed one is an error."""
    # The operator and the values of each list that is open, the outermost first.
    operators: list[int] = []
    lists: list[list[int]] = [[]]
    for i, token in enumerate(np.asarray(tokens).tolist()):
        if token < 10:
            lists[-1].append(token)
        elif token < CLOSE:
            operators.append(token)
            lists.append([])
        elif token > CLOSE:
            raise ValueError(f"token {token} at place {i} must be from 0 to {CLOSE}")
        elif not operators:
            raise ValueError(f"the bracket at place {i} closes nothing")
        else:
            values = lists.pop()
            operator = operators.pop()
            if not values:
                raise ValueError(f"the list that ends at place {i} is empty")
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


def read_tsv(path: Path, *, max_length: int = 2000) -> Examples:
    """The benchmark's file: a line `Source<tab>Target`, then an expression and its value on each.

    Every row is checked; the first bad one is an error that names its line.
    """
    errors.integer("max_length", max_length, minimum=1)
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
    return Examples.of(sequences, labels)


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
    """A file that `read_tsv`, and programs made for the benchmark, can read."""
    rows = [_HEADER]
    rows += [f"{to_text(examples[i])}\t{examples.labels[i]}".encode() for i in range(len(examples))]
    files.write(path, b"\n".join(rows) + b"\n")
