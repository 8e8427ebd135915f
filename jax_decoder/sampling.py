"""Token selection on the device: greedy, and Gumbel-max over filtered logits.

A sampled token depends on (seed, row id, position) and the logits alone. Random bits are
Threefry-2x32 (Salmon et al., SC 2011) with key (seed, row id) and counter (position, i), whose
two words serve vocabulary entries i and i + ceil(V / 2). Nothing here waits for the device, and
no shape depends on a value.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# A mass that equals p up to the rounding of the sum counts as having reached p.
_MASS_TOLERANCE = 2.0**-20
_SMALLEST_KEY = -2139095041  # of -inf; see _ordered_keys
_KEY_BITS = 31  # from there on up to 0


def threefry_2x32(key: tuple[UInt[Array, "..."], UInt[Array, "..."]], counter: tuple[UInt[Array, "..."], UInt[Array, "..."]]) -> tuple[UInt[Array, "..."], UInt[Array, "..."]]:
    """Twenty rounds of Threefry-2x32 on uint32 arrays.

    Written out, not called from jax.random: both decoders must draw the same bits whatever the
    installed version of JAX makes of a key.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y


def exponential_noise(draws: Int[Array, "B 3"], positions: Int[Array, " B"], vocab_size: int) -> Float[Array, "B V"]:
    """Unit exponential variables, float32; minus their logarithm is Gumbel noise."""
    half = -(-vocab_size // 2)
    entries = jnp.arange(half, dtype=jnp.uint32)[None]
    counter = jnp.broadcast_arrays(positions[:, None].astype(jnp.uint32), entries)
    key = jax.lax.bitcast_convert_type(draws, jnp.uint32)
    words = threefry_2x32((key[:, 1:2], key[:, 2:3]), (counter[0], counter[1]))
    bits = jnp.concatenate(words, axis=1)[:, :vocab_size]
    # All 32 bits: small values keep full precision, and small values are what wins.
    high, low = (bits >> 16).astype(jnp.float32), (bits & 0xFFFF).astype(jnp.float32)
    uniform = (high * 65536.0 + (low + 0.5)) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))


def _ordered_keys(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """int32 keys that order like the floats they come from."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _largest_key(keys: Int[Array, "B V"], weights: Shaped[Array, "B V"], needed: Shaped[Array, "B 1"]) -> Int[Array, "B 1"]:
    """The largest key from which on (upwards) the weights still add up to ``needed``; keys are at most 0.

    A search by digits of the key, all values of a digit at once: on a GPU fewer kernels are worth
    more work in each.
    """
    return jax.lax.platform_dependent(keys, weights, needed, cpu=partial(_search, bits=1), default=partial(_search, bits=5))


def _search(keys: Int[Array, "B V"], weights: Shaped[Array, "B V"], needed: Shaped[Array, "B 1"], bits: int) -> Int[Array, "B 1"]:
    """``_largest_key`` by digits of ``bits``. Unrolled: a loop on the device would not become part of a command buffer."""
    low = jnp.full((keys.shape[0], 1), _SMALLEST_KEY, jnp.int32)
    left = _KEY_BITS
    while left:
        digit = (left - 1) % bits + 1  # the first one takes what does not divide
        left -= digit
        steps = jnp.arange(1, 2**digit, dtype=jnp.int32)[None] << left
        reached = _mass_from(keys, weights, low + steps) >= needed
        low = low + (reached.sum(1, keepdims=True, dtype=jnp.int32) << left)
    return jnp.minimum(low, 0)  # nothing needed is reached above every key, too


def _mass_from(keys: Int[Array, "B V"], weights: Shaped[Array, "B V"], bounds: Int[Array, "B N"]) -> Shaped[Array, "B N"]:
    """Sums of the weights whose keys reach each bound."""
    return jnp.where(keys[:, None] >= bounds[:, :, None], weights[:, None], 0).sum(2)


def kept_tokens(logits: Float[Array, "B V"], filters: Float[Array, "B 3"], top_k: Int[Array, " B"]) -> tuple[Float[Array, "B V"], Bool[Array, "B V"]]:
    """Logits divided by temperature and shifted to a maximum of 0, and which tokens remain.

    ``filters`` holds temperature, top_p and min_p of each row.
    """
    vocab_size = logits.shape[1]
    temperature, top_p, min_p = (filters[:, i : i + 1] for i in range(3))
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    scaled = scaled - scaled.max(axis=1, keepdims=True)
    keys = _ordered_keys(scaled)
    count = jnp.minimum(jnp.where(top_k[:, None] > 0, top_k[:, None], vocab_size), vocab_size)
    kth = _largest_key(keys, jnp.ones_like(keys), count)
    weights = jnp.where(keys >= kth, jnp.exp(scaled), 0.0)
    keep = (keys >= kth) & _top_p(keys, weights, top_p) & (weights >= min_p)
    return scaled, keep


def _top_p(keys: Int[Array, "B V"], weights: Float[Array, "B V"], top_p: Float[Array, "B 1"]) -> Bool[Array, "B V"]:
    """The smallest set whose mass reaches top_p, without a sort; ties in ascending id order."""
    needed = top_p * (1 - _MASS_TOLERANCE) * weights.sum(1, keepdims=True)
    key = _largest_key(keys, weights, needed)
    tied = keys == key
    tied_weight = jnp.where(tied, weights, 0.0).max(1, keepdims=True)
    missing = jnp.maximum(jnp.ceil((needed - _mass_from(keys, weights, key + 1)) / tied_weight), 1.0)
    rank = jnp.cumsum(tied, axis=1, dtype=jnp.int32)
    return (keys > key) | (tied & (rank <= missing)) | (top_p >= 1)


def select_greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The largest logit's id, the first of equals; int32."""
    return jnp.argmax(logits, axis=1).astype(jnp.int32)


def select_sampled(logits: Float[Array, "B V"], positions: Int[Array, " B"], filters: Float[Array, "B 3"], draws: Int[Array, "B 3"]) -> Int[Array, " B"]:
    """Draw one token a row; rows with temperature 0 take the greedy one.

    ``positions`` are those of the tokens to be drawn; ``draws`` holds top_k, seed and row id.
    """
    scaled, keep = kept_tokens(logits, filters, draws[:, 0])
    noise = exponential_noise(draws, positions, logits.shape[1])
    drawn = jnp.argmax(jnp.where(keep, scaled - jnp.log(noise), -jnp.inf), axis=1).astype(jnp.int32)
    return jnp.where(filters[:, 0] > 0, drawn, select_greedy(logits))
