"""Which records IIF keeps, by sorting in Python and exact fractions."""

import math
from fractions import Fraction


def drop_count(negatives, p, room):
    """floor(p * negatives) with p as it is written in decimal, and never more than `room`."""
    return min(math.floor(Fraction(str(p)) * negatives), room)


def iif_mask(scores, p, valid=None, min_keep=0):
    """Keep all valid records but the lowest floor(p * negatives); of equal ones the first goes first."""
    scores = [float(s) for s in scores]
    rows = [i for i in range(len(scores)) if valid is None or valid[i]]
    negative = sorted((scores[i], i) for i in rows if scores[i] < 0)
    gone = {i for _, i in negative[: drop_count(len(negative), p, max(len(rows) - min_keep, 0))]}
    return [i in rows and i not in gone for i in range(len(scores))]
