"""What the end of a step needs of all logits, in two kernels (Pallas): the largest one, its id, and the normaliser."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from .tiles import interpreted, let_next_start

CHUNK = 4096  # logits of one program


def _chunks(logits_ref, highest_ref, total_ref, first_ref, *, vocabulary: int, early: bool) -> None:
    """Of one chunk of a row: its largest logit, that one's lowest id, and the sum of exponentials below it."""
    zero = let_next_start(early)
    row, chunk = pl.program_id(0), pl.program_id(1)
    ids = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    value = triton.load(logits_ref.at[row, pl.ds(chunk * CHUNK, CHUNK)], mask=ids < vocabulary, other=-jnp.inf)
    highest = value.max()
    highest_ref[row, chunk] = highest
    first_ref[row, chunk] = jnp.where(value == highest, ids, vocabulary - 1).min()
    # A chunk of nothing but minus infinity adds nothing; its difference to itself would be NaN.
    total_ref[row, chunk] = (jnp.exp(value - jnp.where(highest == -jnp.inf, 0.0, highest)) + zero).sum()


def _rows(highest_ref, total_ref, first_ref, token_ref, normaliser_ref, *, vocabulary: int, width: int, early: bool) -> None:
    """The same of a whole row, from its chunks."""
    zero = let_next_start(early)
    row, (_, chunks) = pl.program_id(0), highest_ref.shape
    inside = jnp.arange(width) < chunks
    highest = triton.load(highest_ref.at[row, pl.ds(0, width)], mask=inside, other=-jnp.inf)
    total = triton.load(total_ref.at[row, pl.ds(0, width)], mask=inside, other=0.0)
    first = triton.load(first_ref.at[row, pl.ds(0, width)], mask=inside, other=vocabulary - 1)
    peak = highest.max()
    token_ref[row] = jnp.where(highest == peak, first, vocabulary - 1).min()
    normaliser_ref[row] = peak + jnp.log((total * jnp.exp(highest - peak) + zero).sum())


def summarise(logits: Float[Array, "B V"], early: bool = False) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The first of the largest logits' ids, and ``logsumexp``, of each row; NaN or infinite where a logit is.

    ``early`` as in ``tiles.let_next_start``.
    """
    rows, vocabulary = logits.shape
    chunks = pl.cdiv(vocabulary, CHUNK)
    numbers, ids = (jax.ShapeDtypeStruct((rows, chunks), dtype) for dtype in (jnp.float32, jnp.int32))
    how = {"vocabulary": vocabulary, "early": early}
    options = {"interpret": interpreted(), "name": "summarise"}
    of_chunks = pl.pallas_call(partial(_chunks, **how), out_shape=(numbers, numbers, ids), grid=(rows, chunks), compiler_params=triton.CompilerParams(num_warps=8), **options)(
        logits
    )
    token, normaliser = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32))
    width = 1 << (chunks - 1).bit_length()
    return pl.pallas_call(partial(_rows, width=width, **how), out_shape=(token, normaliser), grid=(rows,), compiler_params=triton.CompilerParams(num_warps=1), **options)(
        *of_chunks
    )
