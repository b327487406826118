"""Mutations of command lines, JSON, tables and bytes, decided by a random generator alone."""

import copy
import json
import random
from typing import Any

# What programs stumble over: limits of numbers, other digits, control characters, paths, nothing.
_WORDS = (
    *("", " ", "-", "--", "-1", "0", "-0", "1", "00", "1.5", "1e400", "-1e400", "nan", "inf"),
    *("99999999999999999999", "2147483648", "1_0", "0x10", "\u0663", "1,2", "1 2", "None", "null"),
    *("true", "False", "[]", "{}", "()", "'", '"', "`id`", "$(id)", ";id", "|id", "%s%n", "{0}"),
    *("../../x", "/", "/dev/null/x", "/proc/self/mem", "~", "~nobody/x", ".", "..", "con", "a=b"),
    *("\n", "\t", "\x00", "\x1b[31m", "\u202e", "\ud83d\ude00", "\udcff", "\ufeff", "x" * 5000),
    *("--help", "-h", "--version", "--out", "--model.", "--model.x", "--=", "gym:"),
    *("gym:x:y-v0", "gym:../x", "tmaze", "runs/NAME", "--seed=-1", "--seeds=0", "--steps=1e3"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "\x00", "../../x", "/dev/zero", "1", "nan", "None"),
    *("<script>alert(1)</script>", "\ud800", "x" * 5000),
    *([], {}, [1], [[]], {"x": 1}, [None] * 3, {"": {}}),
)
_CELLS = (
    *(b"", b" ", b"0", b"1", b"9", b"-1", b"1.5", b"1e400", b"nan", b"inf", b"9" * 30, b"\xff"),
    *(b"\x00", b'"', b'""', b'"x', b"[MAX", b"]", b"[MAX 1 2", b"[SM ]", b"(", b"\xd9\xa3", b"1_0"),
    b"x" * 5000,
)


def mutate_words(rng: random.Random, words: list[str], options: list[str]) -> list[str]:
    """A command line with one to four changes.

    **Arguments:**

    - `words`: a valid one.
    - `options`: of this and other commands, to be mixed in.
    """
    words = list(words)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(words) + 1)
        match rng.randrange(8):
            case 0 if words:
                del words[min(at, len(words) - 1)]
            case 1:
                words.insert(at, rng.choice(_WORDS))
            case 2:
                words[at:at] = [rng.choice(options), rng.choice(_WORDS)]
            case 3 if words:
                words[min(at, len(words) - 1)] = rng.choice(_WORDS)
            case 4 if len(words) > 1:
                i, j = rng.sample(range(len(words)), 2)
                words[i], words[j] = words[j], words[i]
            case 5 if words:
                words[min(at, len(words) - 1)] += rng.choice(_WORDS)
            case 6 if words:
                words.insert(at, rng.choice(words))
            case _ if words:
                i = min(at, len(words) - 1)
                words[i] = _mutate_text(rng, words[i])
    return words


def _mutate_text(rng: random.Random, text: str) -> str:
    if not text:
        return rng.choice(_WORDS)
    at = rng.randrange(len(text))
    return rng.choice(
        (
            text[:at] + text[at + 1 :],
            text[:at] + chr(rng.choice((0, 10, 45, 61, 127, 233, 0x4E2D))) + text[at:],
            text[:at] + text[at].swapcase() + text[at + 1 :],
            text * 2,
            text[:at],
        )
    )


def mutate_json(rng: random.Random, data: bytes, *, valid: bool = False) -> bytes:
    """JSON with one to four values replaced, keys removed, renamed or added.

    **Arguments:**

    - `data`: JSON.
    - `valid`: the result is always JSON of the same type at the top.
    """
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_containers(value))
        inside = rng.choice(places)
        new = copy.deepcopy(rng.choice(_VALUES))
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        if not keys:
            continue
        key = rng.choice(keys)
        match rng.randrange(6):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, dict):
                inside[rng.choice(("", "x", "format", f"{key} ", "__class__", "\x00"))] = new
            case 2 if isinstance(inside, dict):
                inside[f"{key}x"] = inside.pop(key)
            case 3 if isinstance(inside[key], int | float) and not isinstance(inside[key], bool):
                inside[key] = inside[key] * rng.choice((-1, 2, 10**6, 0.5))
            case _:
                inside[key] = new
    if not valid and rng.random() < 0.05:
        value = copy.deepcopy(rng.choice(_VALUES))
    text = json.dumps(value)
    if not valid and rng.random() < 0.05:
        text = "[" * 100_000 + text  # deeper than a parser's stack
    return text.encode()


def _containers(value: Any) -> list[Any]:
    """The dictionaries and lists in a JSON value."""
    found = [value] if isinstance(value, dict | list) else []
    for one in found:
        items = one.values() if isinstance(one, dict) else one
        found += [x for x in items if isinstance(x, dict | list)]
    return found


def mutate_rows(rng: random.Random, data: bytes, separator: bytes) -> bytes:
    """A table with changed cells, rows, separators or bytes."""
    lines = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        i = rng.randrange(len(lines))
        cells = lines[i].split(separator)
        match rng.randrange(7):
            case 0 | 1:
                cells[rng.randrange(len(cells))] = rng.choice(_CELLS)
                lines[i] = separator.join(cells)
            case 2:
                del cells[rng.randrange(len(cells))]
                lines[i] = separator.join(cells)
            case 3:
                cells.insert(rng.randrange(len(cells) + 1), rng.choice(_CELLS))
                lines[i] = separator.join(cells)
            case 4:
                lines.insert(i, rng.choice(lines))
            case 5:
                lines[i] = mutate_bytes(rng, lines[i])
            case _ if len(lines) > 1:
                del lines[i]
    return b"\n".join(lines) if rng.random() < 0.9 else mutate_bytes(rng, b"\n".join(lines))


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Other bytes: flipped, cut, repeated, emptied or replaced."""
    if not data:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 20)))
    new = bytearray(data)
    at = rng.randrange(len(new))
    match rng.randrange(7):
        case 0:
            new[at] ^= 1 << rng.randrange(8)
        case 1:
            for _ in range(20):
                new[rng.randrange(len(new))] = rng.randrange(256)
        case 2:
            del new[at:]
        case 3:
            del new[at : at + rng.randrange(1, 50)]
        case 4:
            new[at:at] = new[: rng.randrange(1, 100)]
        case 5:
            new[at:] = bytes(len(new) - at)
        case _:
            new = bytearray(rng.randrange(256) for _ in range(rng.randrange(300)))
    return bytes(new)
