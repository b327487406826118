import hashlib
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agalite.supervised import listops
from agalite.supervised.examples import Examples, cached
from agalite.supervised.listops import (
    Grammar,
    evaluate,
    from_text,
    generate,
    read_tsv,
    to_text,
    write_tsv,
)

SHORT = Grammar(longer_than=10, shorter_than=60)

# An expression as nested Python: a digit, or (operator, [expressions]).
expressions = st.recursive(
    st.integers(0, 9),
    lambda inner: st.tuples(
        st.sampled_from(["MIN", "MAX", "MED", "SM"]), st.lists(inner, min_size=1, max_size=10)
    ),
    max_leaves=40,
)


def value(tree):
    """Independent of the library: on the tree, with the operators of Python's own libraries."""
    if isinstance(tree, int):
        return tree
    operator, arguments = tree
    values = list(map(value, arguments))
    return {
        "MIN": min(values),
        "MAX": max(values),
        "MED": int(statistics.median(values)),
        "SM": sum(values) % 10,
    }[operator]


def text(tree, rounded):
    if isinstance(tree, int):
        return str(tree)
    operator, arguments = tree
    words = [f"[{operator}", *(text(x, rounded) for x in arguments), "]"]
    if not rounded:
        return " ".join(words)
    # As the benchmark writes it: every pair in round brackets, from the left.
    out = words[0]
    for word in words[1:]:
        out = f"( {out} {word} )"
    return out


@given(expressions, st.booleans())
@settings(deadline=None, max_examples=300)
def test_evaluator_agrees_with_an_independent_one(tree, rounded):
    tokens = from_text(text(tree, rounded))
    assert evaluate(tokens) == value(tree)
    assert to_text(tokens) == text(tree, rounded=False)


def test_median_is_rounded_down_and_sum_wraps():
    assert evaluate(from_text("[MED 3 8 ]")) == 5
    assert evaluate(from_text("[SM 9 9 [MAX 2 4 ] ]")) == 2


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("[MAX 1 2", "never closed"),
        ("1 ]", "closes nothing"),
        ("[MIN ]", "is empty"),
        ("1 2", "2 expressions side by side"),
        ("", "0 expressions side by side"),
        ("[SUM 1 ]", "'\\[SUM' is not a token"),
    ],
)
def test_malformed_expressions_are_refused(expression, message):
    with pytest.raises(ValueError, match=message):
        evaluate(from_text(expression))


def test_generated_values_are_those_of_the_evaluator():
    examples = generate(300, seed=1)
    assert [evaluate(examples[i]) for i in range(300)] == examples.labels.tolist()
    assert examples.lengths.min() > 500
    assert examples.lengths.max() < 2000


def test_generated_trees_keep_to_the_grammar():
    examples = generate(200, seed=2)
    depths, arguments = [], []
    for i in range(len(examples)):
        open_lists = []
        for token in examples[i]:
            if token == listops.CLOSE:
                arguments.append(open_lists.pop())
            else:
                if open_lists:
                    open_lists[-1] += 1
                if token >= 10:
                    open_lists.append(0)
            depths.append(len(open_lists))
    assert max(depths) == 9  # operators from depth 1 to 9, digits down to 10
    assert min(arguments) == 2
    assert max(arguments) == 10


def naive(rng, depth):
    """The benchmark's recursion, as its paper and its code describe it: one tree's token counts."""
    if depth == 10 or rng.random() >= 0.25:
        return np.array([1, 0])
    total = np.array([2, 1])
    for _ in range(rng.randint(2, 10)):
        total += naive(rng, depth + 1)
    return total


def test_lengths_and_operators_are_distributed_as_by_the_plain_recursion():
    rng, plain = random.Random(0), []
    while len(plain) < 400:
        length, operators = naive(rng, 1)
        if 500 < length < 2000:
            plain.append((length, operators / length))
    examples = generate(2000, seed=3)
    shares = [float((examples[i] >= 10).mean()) for i in range(2000)]
    shares = np.array(shares) / 2  # an operator and its bracket
    for ours, theirs in zip((examples.lengths, shares), np.array(plain).T, strict=True):
        error = np.hypot(np.std(ours) / len(ours) ** 0.5, np.std(theirs) / len(theirs) ** 0.5)
        assert abs(np.mean(ours) - np.mean(theirs)) < 4 * error
        assert np.std(ours) == pytest.approx(np.std(theirs), rel=0.2)


def test_a_seed_is_a_set_and_a_smaller_set_is_its_beginning():
    few, many = generate(20, 5, SHORT), generate(700, 5, SHORT)
    assert few.tokens.tobytes() == many.slice(0, 20).tokens.tobytes()
    assert few.labels.tolist() == many.labels[:20].tolist()
    assert generate(20, 6, SHORT).tokens.tobytes() != few.tokens.tobytes()
    assert len({many[i].tobytes() for i in range(700)}) == 700
    # If this changes, the stored sets are no longer the ones of their seeds: raise VERSION.
    assert hashlib.sha256(few.tokens.tobytes()).hexdigest()[:16] == "58919a8409c60a57"


def test_asking_for_more_than_there_are_is_an_error():
    # [OP a b ] alone: 400 expressions.
    tiny = Grammar(longer_than=3, shorter_than=5, max_depth=2, max_arguments=2)
    assert len(generate(350, 0, tiny)) == 350
    with pytest.raises(ValueError, match="count=500: only 400 different"):
        generate(500, 0, tiny)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shorter_than": 501}, "shorter_than=501 must be a whole number >= 502"),
        ({"max_depth": 1}, "max_depth=1 must be"),
        ({"max_depth": 2}, "have 4 to 12 tokens"),
    ],
)
def test_impossible_grammars_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Grammar(**options)


def test_tsv_files_come_back_the_same(tmp_path):
    examples = generate(50, 0, SHORT)
    write_tsv(tmp_path / "a.tsv", examples)
    again = read_tsv(tmp_path / "a.tsv")
    for name in ("tokens", "starts", "labels"):
        np.testing.assert_array_equal(getattr(again, name), getattr(examples, name))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[MAX 1 2 ]", "line 3: 1 columns"),
        ("[MAX 1 2 ]\t2\t3", "line 3: 3 columns"),
        ("[MAX 1 2 ]\t12", "line 3: the value b'12' must be a digit"),
        ("[MAX 1 2 ]\t1", "line 3: the value is given as 1, but it is 2"),
        ("[MAX 1 x ]\t1", "line 3: 'x' is not a token"),
        ("( [MAX 1 )\t1", "line 3: 1 lists are never closed"),
        ("", "line 3: 1 columns"),
        (f"[MAX {'1 ' * 30}]\t1", "line 3: 32 tokens; the limit is max_length=20"),
        ("[MAX 1 \xff ]\t1", "line 3: .* is not a token"),
    ],
)
def test_bad_rows_are_named_by_their_line(tmp_path, row, message):
    path = tmp_path / "bad.tsv"
    rows = f"Source\tTarget\r\n( ( [MIN 4 ) ] )\t4\r\n{row}\r\n1\t1\r\n"
    path.write_bytes(rows.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as caught:
        read_tsv(path, max_length=20)
    assert str(path) in str(caught.value)


def test_files_that_are_no_listops_are_refused(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("a,b\n")
    with pytest.raises(ValueError, match="line 1: b'a,b'; expected the column names"):
        read_tsv(path)
    path.write_text("Source\tTarget\n")
    with pytest.raises(ValueError, match="has no rows"):
        read_tsv(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_tsv(tmp_path / "nothing.tsv")


def test_a_stored_set_is_not_made_twice_and_a_damaged_one_is_made_again(tmp_path):
    made = []

    def make():
        made.append(1)
        return generate(10, 0, SHORT)

    path = tmp_path / "deep" / "set.npz"
    first = cached(path, make)
    second = cached(path, make)
    assert len(made) == 1
    assert second.tokens.tobytes() == first.tokens.tobytes()
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 255
    path.write_bytes(data)
    assert cached(path, make).tokens.tobytes() == first.tokens.tobytes()
    path.write_bytes(data[:100])
    assert cached(path, make).tokens.tobytes() == first.tokens.tobytes()
    assert len(made) == 3
    assert len(list(path.parent.iterdir())) == 1


def test_examples_can_be_cut_taken_and_checked():
    examples = Examples.from_sequences(
        [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])], [0, 1, 1]
    )
    cut, longer = examples.truncate(2)
    assert longer == 1
    assert [cut[i].tolist() for i in range(3)] == [[1, 2], [4], [5, 6]]
    some = examples.take(np.array([2, 0]))
    assert [some[0].tolist(), some[1].tolist(), some.labels.tolist()] == [[5, 6], [1, 2, 3], [1, 0]]
    with pytest.raises(ValueError, match="token 6 of example 2 must be from 0 to 5"):
        examples.check(vocabulary=6, classes=2)
    with pytest.raises(ValueError, match="label 1 of example 1 must be from 0 to 0"):
        examples.check(vocabulary=7, classes=1)
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        Examples.from_sequences([np.array([1]), np.array([])], [0, 0])
