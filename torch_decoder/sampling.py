"""Token selection on the device: greedy, and Gumbel-max over filtered logits.

A sampled token depends on (seed, row id, position) and the logits alone. Random bits are
Threefry-2x32 (Salmon et al., SC 2011) with key (seed, row id) and counter (position, i), whose
two words serve vocabulary entries i and i + ceil(V / 2). Nothing here waits for the device, and
no shape depends on a value.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# A mass that equals p up to the rounding of the sum counts as having reached p.
_MASS_TOLERANCE = 2.0**-20
_SMALLEST_KEY = -2139095041  # of -inf; see _ordered_keys
_KEY_BITS = 31  # from there on up to 0


def threefry_2x32(key: tuple[Int[Tensor, "..."], Int[Tensor, "..."]], counter: tuple[Int[Tensor, "..."], Int[Tensor, "..."]]) -> tuple[Int[Tensor, "..."], Int[Tensor, "..."]]:
    """Twenty rounds of Threefry-2x32 on int32 tensors (bit patterns of uint32; addition wraps)."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = x + y
            # >> is arithmetic on int32: the mask makes it a logical shift
            y = (y << rotation) | ((y >> (32 - rotation)) & ((1 << rotation) - 1))
            y = x ^ y
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + (block + 1)
    return x, y


def exponential_noise(draws: Int[Tensor, "B 3"], positions: Int[Tensor, " B"], vocab_size: int) -> Float[Tensor, "B V"]:
    """Unit exponential variables, float32; minus their logarithm is Gumbel noise."""
    half = -(-vocab_size // 2)
    entries = torch.arange(half, dtype=torch.int32, device=draws.device)[None]
    counter = torch.broadcast_tensors(positions[:, None], entries)
    words = threefry_2x32((draws[:, 1:2], draws[:, 2:3]), counter)
    bits = torch.cat(words, dim=1)[:, :vocab_size]
    # All 32 bits: small values keep full precision, and small values are what wins. uint32 from
    # int32 without a 64-bit detour: high and low halves are exact in float32.
    high, low = ((bits >> 16) & 0xFFFF).float(), (bits & 0xFFFF).float()
    uniform = (high * 65536.0 + (low + 0.5)) * 2.0**-32
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))


def _ordered_keys(x: Float[Tensor, "B V"]) -> Int[Tensor, "B V"]:
    """int32 keys that order like the floats they come from."""
    bits = x.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _largest_key(keys: Int[Tensor, "B V"], weights: Shaped[Tensor, "B V"] | None, needed: Shaped[Tensor, "B 1"]) -> Int[Tensor, "B 1"]:
    """The largest key from which on (upwards) the weights, or without them the keys' number, still come to ``needed``; keys are at most 0.

    A search by digits of the key, all values of a digit at once: on a GPU fewer kernels are worth
    more work in each, as far as their results [B, values, V] stay small.
    """
    rows = keys.shape[0]
    bits = 1 if not keys.is_cuda or rows > 16 else 2 if rows > 4 else 4
    low = torch.full_like(needed, _SMALLEST_KEY, dtype=torch.int32)
    left = _KEY_BITS
    while left:
        digit = (left - 1) % bits + 1  # the first one takes what does not divide
        left -= digit
        steps = torch.arange(1, 2**digit, dtype=torch.int32, device=keys.device) << left
        reached = _mass_from(keys, weights, low + steps) >= needed
        low = low + (reached.sum(1, keepdim=True, dtype=torch.int32) << left)
    return low.clamp(max=0)  # nothing needed is reached above every key, too


def _mass_from(keys: Int[Tensor, "B V"], weights: Shaped[Tensor, "B V"] | None, bounds: Int[Tensor, "B N"]) -> Shaped[Tensor, "B N"]:
    """Sums of the weights whose keys reach each bound; without weights their number."""
    if bounds.shape[1] == 1:  # on a CPU two axes take half the time of three
        reach = keys >= bounds
        return (reach if weights is None else torch.where(reach, weights, 0.0)).sum(1, keepdim=True)
    reach = keys[:, None] >= bounds[:, :, None]
    return (reach if weights is None else torch.where(reach, weights[:, None], 0.0)).sum(2)


def kept_tokens(logits: Float[Tensor, "B V"], filters: Float[Tensor, "B 3"], top_k: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B V"], Bool[Tensor, "B V"]]:
    """Logits divided by temperature and shifted to a maximum of 0, and which tokens remain.

    ``filters`` holds temperature, top_p and min_p of each row.
    """
    temperature, top_p, min_p = (filters[:, i : i + 1] for i in range(3))
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)
    scaled = scaled - scaled.amax(dim=1, keepdim=True)
    keys = _ordered_keys(scaled)
    count = torch.where(top_k[:, None] > 0, top_k[:, None], logits.shape[1]).clamp(max=logits.shape[1])
    kth = _largest_key(keys, None, count)
    weights = torch.where(keys >= kth, torch.exp(scaled), 0.0)
    keep = (keys >= kth) & _top_p(keys, weights, top_p) & (weights >= min_p)
    return scaled, keep


def _top_p(keys: Int[Tensor, "B V"], weights: Float[Tensor, "B V"], top_p: Float[Tensor, "B 1"]) -> Bool[Tensor, "B V"]:
    """The smallest set whose mass reaches top_p, without a sort; ties in ascending id order."""
    needed = top_p * (1 - _MASS_TOLERANCE) * weights.sum(1, keepdim=True)
    key = _largest_key(keys, weights, needed)
    tied = keys == key
    tied_weight = torch.where(tied, weights, 0.0).amax(1, keepdim=True)
    missing = torch.ceil((needed - _mass_from(keys, weights, key + 1)) / tied_weight).clamp(min=1.0)
    rank = tied.cumsum(1)
    return (keys > key) | (tied & (rank <= missing)) | (top_p >= 1)


def select_greedy(logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
    """The largest logit's id, the first of equals; int32."""
    return logits.argmax(dim=1).int()


def select_sampled(logits: Float[Tensor, "B V"], positions: Int[Tensor, " B"], filters: Float[Tensor, "B 3"], draws: Int[Tensor, "B 3"]) -> Int[Tensor, " B"]:
    """Draw one token a row; rows with temperature 0 take the greedy one.

    ``positions`` are those of the tokens to be drawn; ``draws`` holds top_k, seed and row id.
    """
    scaled, keep = kept_tokens(logits, filters, draws[:, 0])
    noise = exponential_noise(draws, positions, logits.shape[1])
    drawn = torch.where(keep, scaled - torch.log(noise), float("-inf")).argmax(dim=1)
    return torch.where(filters[:, 0] > 0, drawn.int(), select_greedy(logits))
