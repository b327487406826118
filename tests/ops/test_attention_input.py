"""What the attentions refuse, and their messages."""

import numpy as np
import pytest

from agalite.ops import (
    MatrixState,
    Outer,
    agalite_attention,
    galite_attention,
    linear_attention,
    softmax_attention,
    xl_attention,
)
from attention_cases import KEY, OPS, cast, dense, make


def good():
    x, resets = cast(make(OPS["paper"], 6), np.float32)
    return dict(dense(x)._asdict(), resets=resets)


def nan_at(a):
    a = np.array(a)
    a[2, 1, 0] = np.nan
    return a


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": zeros(6, 2)}, r"v has shape \(6, 2\); expected \(T, H, V\)"),
        ({"k": zeros(6, 2, 7)}, r"k has shape \(6, 2, 7\); expected \(6, 2, 8\)"),
        ({"k": zeros(5, 2, 8)}, r"k has shape \(5, 2, 8\); expected \(6, 2, 8\)"),
        ({"q": zeros(6, 3, 8)}, r"q has shape \(6, 3, 8\); expected \(6, 2, 8\)"),
        ({"q": zeros(5, 2, 8)}, r"q has shape \(5, 2, 8\)|expected \(5"),
        ({"beta": zeros(6, 2, 8)}, r"beta has shape \(6, 2, 8\); expected \(6, 2, 3\)"),
        ({"gamma": zeros(6, 2, 3)}, r"gamma has shape \(6, 2, 3\); expected \(6, 2, 8\)"),
        ({"resets": np.zeros(7, bool)}, r"resets has shape \(7,\); expected \(6,\)"),
        ({"k": Outer(zeros(6, 2, 2), zeros(6, 2, 4))}, "k and q must both be"),
        ({"beta": None}, "beta=None but the other gate is given"),
        ({"gamma": None}, "gamma=None but the other gate is given"),
        ({"method": "fast"}, "method='fast' is unknown.*associative, auto, chunked, sequential"),
        ({"q": nan_at(zeros(6, 2, 8))}, r"q\[2, 1, 0\] is nan"),
        ({"v": nan_at(zeros(6, 2, 3))}, r"v\[2, 1, 0\] is nan"),
        ({"beta": nan_at(zeros(6, 2, 3))}, r"beta\[2, 1, 0\] is nan"),
        ({"gamma": np.full((6, 2, 8), np.inf, np.float32)}, r"gamma\[0, 0, 0\] is inf"),
        ({"state": MatrixState(zeros(2, 3, 7), zeros(2, 7))}, r"state does not belong.*expected"),
    ],
)
@pytest.mark.parametrize("function", [galite_attention, agalite_attention])
def test_bad_input_is_named(function, change, message):
    with pytest.raises(ValueError, match=message):
        function(**(good() | change))


@pytest.mark.parametrize("function", [linear_attention, galite_attention, agalite_attention])
def test_no_steps(function):
    arguments = {name: a[:0] for name, a in good().items()}
    if function is linear_attention:
        del arguments["beta"], arguments["gamma"]
    with pytest.raises(ValueError, match="v has length 0 along time"):
        function(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 0}, "r=0 must be a whole number >= 1"),
        ({"r": 1.5}, r"r=1\.5 must be a whole number >= 1"),
        ({"basis": "fourier"}, "basis='fourier' is unknown; choose one of: paper, "),
    ],
)
def test_bad_basis_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        agalite_attention(**(good() | change))


def test_state_of_another_basis_is_refused():
    state, _ = agalite_attention(**good(), r=7)
    with pytest.raises(
        ValueError, match=r"state does not belong.*keys\(2, 4, 8\).*keys\(2, 1, 8\)"
    ):
        agalite_attention(**good(), state=state, r=1)
    with pytest.raises(ValueError, match=r"rank1.*key"):
        agalite_attention(**good(), state=state, r=3, basis="rank1")
    with_signs = state._replace(signs=KEY)
    with pytest.raises(ValueError, match="state does not belong"):
        agalite_attention(**good(), state=with_signs, r=7)
    with pytest.raises(ValueError, match="state does not belong"):
        galite_attention(**good(), state=state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": zeros(6, 2, 4)}, r"k has shape \(6, 2, 4\)"),
        ({"v": zeros(5, 2, 3)}, r"expected \(5, 2, 3\)|v has shape \(5, 2, 3\)"),
        ({"window": -1}, "window=-1 must be a whole number >= 0"),
        ({"window": 2.5}, r"window=2\.5 must be a whole number >= 0"),
        ({"resets": np.zeros(2, bool)}, r"resets has shape \(2,\); expected \(6,\)"),
        ({"q": nan_at(zeros(6, 2, 3))}, r"q\[2, 1, 0\] is nan"),
        ({"q": zeros(0, 2, 3), "k": zeros(0, 2, 3), "v": zeros(0, 2, 3)}, "v has length 0"),
    ],
)
def test_bad_input_of_softmax_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        softmax_attention(**({name: zeros(6, 2, 3) for name in "qkv"} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": zeros(9, 2, 3)}, r"v has shape \(9, 2, 3\)|expected \(9, 2, 3\)"),
        ({"q": zeros(11, 2, 3), "starts": np.zeros(11, np.int32)}, "k has 10 steps, fewer than"),
        ({"relative": zeros(5, 2, 4)}, r"relative has shape \(5, 2, 4\); expected \(M\+1, 2, 3\)"),
        ({"starts": np.zeros(5, np.int32)}, r"starts has shape \(5,\); expected \(6,\)"),
        ({"content_bias": zeros(2, 4)}, r"content_bias has shape \(2, 4\); expected \(2, 3\)"),
        ({"position_bias": zeros(3)}, r"position_bias has shape \(3,\); expected \(2, 3\)"),
        ({"relative": nan_at(zeros(5, 2, 3))}, r"relative\[2, 1, 0\] is nan"),
        ({"q": zeros(0, 2, 3), "starts": np.zeros(0, np.int32)}, "q has length 0"),
    ],
)
def test_bad_input_of_xl_is_named(change, message):
    inputs = {
        "q": zeros(6, 2, 3),
        "k": zeros(10, 2, 3),
        "v": zeros(10, 2, 3),
        "relative": zeros(5, 2, 3),
        "content_bias": zeros(2, 3),
        "position_bias": zeros(2, 3),
        "starts": np.zeros(6, np.int32),
    }
    with pytest.raises(ValueError, match=message):
        xl_attention(**(inputs | change))
