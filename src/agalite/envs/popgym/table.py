"""The names and difficulties of the POPGym environments."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

DIFFICULTIES = ("easy", "medium", "hard")


class Family(NamedTuple):
    """A family of tasks: where its class is and what makes it easy, medium and hard."""

    entry_point: str
    summary: str
    difficulties: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]


def _each(name: str, *values: Any, **others: Any) -> tuple[Any, Any, Any]:
    easy, medium, hard = ({name: value, **others} for value in values)
    return easy, medium, hard


FAMILIES: dict[str, Family] = {
    "Autoencode": Family(
        "autoencode:Autoencode", "name cards in reverse order", _each("decks", 1, 2, 3)
    ),
    "Battleship": Family(
        "battleship:Battleship", "sink ships on an unseen board", _each("board", 8, 10, 12)
    ),
    "Concentration": Family(
        "concentration:Concentration",
        "find pairs of cards",
        (
            {"decks": 1, "match": "colours"},
            {"decks": 2, "match": "colours"},
            {"decks": 1, "match": "ranks"},
        ),
    ),
    "CountRecall": Family(
        "count_recall:CountRecall",
        "count the cards of a kind",
        (
            {"decks": 1, "match": "colours"},
            {"decks": 2, "match": "suits"},
            {"decks": 4, "match": "ranks"},
        ),
    ),
    "HigherLower": Family(
        "higher_lower:HigherLower", "guess the next card", _each("decks", 1, 2, 3)
    ),
    "LabyrinthEscape": Family(
        "labyrinth:LabyrinthEscape", "find the way out of a maze", _each("size", 5, 7, 9)
    ),
    "LabyrinthExplore": Family(
        "labyrinth:LabyrinthExplore", "see all of a maze", _each("size", 5, 7, 9)
    ),
    "MineSweeper": Family(
        "minesweeper:MineSweeper",
        "uncover an unseen board without its mines",
        ({"board": 4, "mines": 2}, {"board": 6, "mines": 6}, {"board": 8, "mines": 10}),
    ),
    "MultiarmedBandit": Family(
        "bandit:MultiarmedBandit",
        "find the arm that pays most",
        ({"arms": 10, "steps": 200}, {"arms": 20, "steps": 400}, {"arms": 30, "steps": 600}),
    ),
    "NoisyPositionOnlyCartPole": Family(
        "cartpole:NoisyPositionOnlyCartPole",
        "CartPole, noisy positions",
        _each("noise", 0.1, 0.2, 0.3),
    ),
    "NoisyPositionOnlyPendulum": Family(
        "pendulum:NoisyPositionOnlyPendulum",
        "Pendulum, noisy position",
        _each("noise", 0.1, 0.2, 0.3),
    ),
    "PositionOnlyCartPole": Family(
        "cartpole:PositionOnlyCartPole", "CartPole, positions", _each("max_steps", 200, 400, 600)
    ),
    "PositionOnlyPendulum": Family(
        "pendulum:PositionOnlyPendulum", "Pendulum, position", _each("max_steps", 200, 150, 100)
    ),
    "VelocityOnlyCartPole": Family(
        "cartpole:VelocityOnlyCartPole", "CartPole, velocities", _each("max_steps", 200, 400, 600)
    ),
    "RepeatFirst": Family(
        "repeat:RepeatFirst", "name the suit of the first card", _each("decks", 1, 8, 16)
    ),
    "RepeatPrevious": Family(
        "repeat:RepeatPrevious",
        "name the suit of a card seen before",
        ({"k": 4, "decks": 1}, {"k": 32, "decks": 2}, {"k": 64, "decks": 3}),
    ),
}


class Task(NamedTuple):
    """One environment: "popgym-repeat-first-easy" is the package's RepeatFirstEasy."""

    name: str
    package_class: str
    entry_point: str
    kwargs: Mapping[str, Any]
    summary: str


def tasks() -> Iterator[Task]:
    """All environments, family by family."""
    for name, family in FAMILIES.items():
        entry_point = f"agalite.envs.popgym.{family.entry_point}"
        for difficulty, kwargs in zip(DIFFICULTIES, family.difficulties, strict=True):
            yield Task(
                f"popgym-{_dashed(name)}-{difficulty}",
                f"{name}{difficulty.capitalize()}",
                entry_point,
                kwargs,
                family.summary,
            )


def _dashed(name: str) -> str:
    """RepeatFirst -> repeat-first; CartPole is one word, as in the other names."""
    words = name.replace("CartPole", "Cartpole").replace("MineSweeper", "Minesweeper")
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in words).lstrip("-")
