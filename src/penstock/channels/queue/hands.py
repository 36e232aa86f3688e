"""Shuffle sharding: the few streams that a tenant's messages are stored in.

A hand is the beginning of a permutation of the streams that the tenant's name alone decides:

1. Number ``i`` is the ``i``-th unsigned 32-bit big-endian integer of SHA-256(name, 0), SHA-256(name, 1) …: the name in UTF-8
   followed by the number of the block as four big-endian bytes; each block gives eight numbers.
2. Starting with an empty list, for ``i`` from 0 to ``streams`` - 1: let ``j`` be number ``i`` modulo ``i + 1``; append the
   element at ``j`` (or ``i``, if ``j`` is ``i``), and put ``i`` in its place.
3. The hand is the first ``size`` elements.

Number ``i`` does not depend on the number of streams, so one stream more changes at most one position of a hand.
"""

from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from itertools import count, islice
from math import comb


@lru_cache(maxsize=16_384)
def choose_hand(tenant: str, streams: int, size: int) -> tuple[int, ...]:
    """The streams of a tenant, in the order of preference.

    Args:
        tenant: The tenant's name.
        streams: Number of streams.
        size: Number of streams in a hand; all of them, if there are no more.
    """
    permutation: list[int] = []
    for i, number in enumerate(islice(_numbers(tenant), streams)):
        j = number % (i + 1)
        permutation.append(permutation[j] if j < i else i)
        permutation[j] = i
    return tuple(permutation[:size])


def _numbers(tenant: str) -> Iterator[int]:
    name = tenant.encode()
    for block in count():
        digest = sha256(name + block.to_bytes(4)).digest()
        for at in range(0, len(digest), 4):
            yield int.from_bytes(digest[at : at + 4])


def odds_of_sharing(streams: int, size: int, others: int) -> float:
    """The probability that every stream of a tenant's hand is also in the hand of one of ``others`` given tenants.

    By inclusion and exclusion over the streams of the hand that none of the others has.
    """
    hands = comb(streams, size)
    return float(
        sum(
            (-1) ** missed * comb(size, missed) * (comb(streams - missed, size) / hands) ** others
            for missed in range(size + 1)
        )
    )
