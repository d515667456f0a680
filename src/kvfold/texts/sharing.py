"""How many windows each of several texts gets."""

from collections.abc import Sequence
from fractions import Fraction


def share_windows(windows: int, weights: Sequence[float]) -> list[int]:
    """Shares of `windows`, at least as many as there are weights, proportional to the weights; none is empty.

    Rounded by largest remainder, the first of equals first; what would get nothing takes one from the largest share.
    """
    assert windows >= len(weights)
    exact = [Fraction(weight) for weight in weights]
    quotas = [windows * weight / sum(exact) for weight in exact]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda index: shares[index] - quotas[index])
    for index in by_remainder[: windows - sum(shares)]:
        shares[index] += 1
    for index in by_remainder:
        if not shares[index]:
            shares[shares.index(max(shares))] -= 1
            shares[index] = 1
    return shares
