"""Buckets: the batch sizes that have a graph of their own."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ConfigError


def default_buckets(max_batch: int) -> tuple[int, ...]:
    """Powers of two below ``max_batch``, then ``max_batch`` itself."""
    powers = [1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch]
    return (*powers, max_batch)


def check_buckets(buckets: Sequence[int] | None, max_batch: int) -> tuple[int, ...]:
    """Buckets in ascending order up to at most max_batch; ConfigError else."""
    if buckets is None:
        return default_buckets(max_batch)
    whole = all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in buckets)
    if not buckets or not whole or list(buckets) != sorted(set(buckets)) or buckets[-1] > max_batch:
        raise ConfigError(f"buckets is {list(buckets)!r}, expected ascending batch sizes from 1 to max_batch {max_batch}")
    return tuple(buckets)


def bucket_for(buckets: Sequence[int], rows: int) -> int:
    """The smallest bucket that holds ``rows``, or the largest there is."""
    return next((b for b in buckets if b >= rows), buckets[-1])
