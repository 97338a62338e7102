"""Private updates: every silo's update is clipped and noised, and its privacy cost is computed.

A silo's model θ_k leaves it as θ + clip(θ_k − θ) + N(0, σ²) with σ = multiplier × clip. Replacing all of a
silo's data moves the clipped update by at most 2 × clip, so one update is 2/multiplier²-zCDP, whatever is
done with it afterwards. If the server adds the noise, it adds the same amount to the sum of the updates, and
the silo must trust it to do so. The costs of a silo's updates add up over the rounds in which it is asked; no
privacy amplification by sampling is claimed. Example counts, numbers of steps and feature sums leave a silo
without noise.

The noise comes from the operating system's entropy, in floating point.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from isthmus.federation.messages import Arrays, update_length
from isthmus.federation.settings import PrivateUpdates
from isthmus.private import PrivacyLoss
from isthmus.private.ledger import NO_GUARANTEE

Entropy = Callable[[int], bytes]


def gaussian(count: int, entropy: Entropy = os.urandom) -> NDArray[np.float64]:
    """Draw standard normal numbers by inverting uniform ones of 52 random bits: with 53, one could be 1."""
    from scipy.special import ndtri

    bits = np.frombuffer(entropy(8 * count), np.uint64) >> np.uint64(12)
    drawn: NDArray[np.float64] = ndtri((bits.astype(np.float64) + 0.5) / 2.0**52)
    return drawn


def clipped(model: Arrays, start: Arrays, clip: float) -> Arrays:
    """Clip an update: θ + (θ_k − θ) · min(1, clip / ‖θ_k − θ‖)."""
    length = update_length(model, start)
    if length <= clip:
        return model
    share = clip / length
    return {key: (start[key] + share * (model[key] - start[key])).astype(start[key].dtype) for key in start}


def noised(model: Arrays, sigma: float, entropy: Entropy = os.urandom) -> Arrays:
    """Return the model with independent N(0, σ²) added to every number."""
    drawn = gaussian(sum(array.size for array in model.values()), entropy)
    result, at = {}, 0
    for key, array in model.items():
        noise = drawn[at : at + array.size].reshape(array.shape)
        result[key] = (array + sigma * noise).astype(array.dtype)
        at += array.size
    return result


def private(model: Arrays, start: Arrays, options: PrivateUpdates, *, sharers: int = 1) -> Arrays:
    """Clip a model's update and add noise; `sharers` updates to be summed share the noise."""
    sigma = options.multiplier * options.clip / np.sqrt(sharers)
    return noised(clipped(model, start, options.clip), float(sigma))


def spent(participants: Iterable[Iterable[str]], options: PrivateUpdates) -> float:
    """Return the largest ε of any silo after the rounds with these participants."""
    times = Counter(name for silos in participants for name in silos)
    once = PrivacyLoss.gaussian(2 * options.clip, options.multiplier * options.clip)
    return (once * max(times.values(), default=0)).at(delta=options.delta, rule="zcdp")


def statement(participants: Iterable[Iterable[str]], options: PrivateUpdates | None) -> str:
    """Return the privacy statement about the updates so far, for a record."""
    if options is None:
        return NO_GUARANTEE
    epsilon = spent(participants, options)
    return (
        f"updates: ε ≤ {epsilon:.3g} at δ = {options.delta:g} for all data of a silo replaced, "
        f"noise added by the {options.where}; example counts, steps and feature sums: {NO_GUARANTEE}"
    )
