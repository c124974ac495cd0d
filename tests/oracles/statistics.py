"""Standardisation one chunk and one number at a time."""

import math

import numpy as np


def standardize(x, ddof=1, mask=None):
    """(x - mean) / (std + 1e-8) over the entries that count; the others, and a lone one, become 0."""
    chosen = [float(v) for i, v in enumerate(x) if mask is None or mask[i]]
    if len(chosen) < 2:
        return np.zeros(len(x))
    mean = sum(chosen) / len(chosen)
    std = math.sqrt(sum((v - mean) ** 2 for v in chosen) / (len(chosen) - ddof))
    return np.array([(float(v) - mean) / (std + 1e-8) if mask is None or mask[i] else 0.0 for i, v in enumerate(x)])


def standardize_chunks(x, chunk, ddof=1, mask=None):
    """Chunks from the front; a lone last entry joins the chunk before it."""
    starts = list(range(0, len(x), chunk))
    if len(starts) > 1 and len(x) - starts[-1] == 1:
        starts.pop()
    ends = [*starts[1:], len(x)]
    parts = [standardize(x[a:b], ddof, None if mask is None else mask[a:b]) for a, b in zip(starts, ends, strict=True)]
    return np.concatenate(parts)
