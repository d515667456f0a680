"""Windows shared among texts by weight."""

import pytest

from kvfold.texts import share_windows


@pytest.mark.parametrize(
    ("windows", "weights", "shares"),
    [
        (10, [1.0, 1.0], [5, 5]),
        (3, [1.0, 1.0], [2, 1]),
        (10, [3.0, 1.0], [8, 2]),
        (10, [0.1, 0.2], [3, 7]),
        (4, [1000.0, 1.0, 1.0], [2, 1, 1]),
        (3, [1e308, 1e308, 1e-300], [1, 1, 1]),
        (7, [2.0, 3.0, 2.0], [2, 3, 2]),
    ],
)
def test_shares_are_whole_and_none_is_empty(windows, weights, shares):
    assert share_windows(windows, weights) == shares
