"""Keyed seeds: every random number of a run follows from a purpose and a position.

A key is a 64-bit integer made by hashing (seed, purpose, parts). Two different tuples give
unrelated keys; the same tuple gives the same key on every machine, for ever (the golden vectors in
the tests pin it).
"""

from __future__ import annotations

import struct
from hashlib import blake2b


def key(seed: int, purpose: str, *parts: int) -> int:
    """Return the 64-bit key of a purpose ("order", "fetch", "forward", ...) at a position.

    Args:
        seed: the run's seed; any Python integer, taken modulo 2**64.
        purpose: what the random numbers are for; different purposes never share a stream.
        parts: the position, usually (epoch, index).
    """
    data = struct.pack(f"<{len(parts) + 1}Q", seed & _MASK, *[part & _MASK for part in parts])
    return int.from_bytes(blake2b(data, digest_size=8, person=_person(purpose)).digest(), "little")


_MASK = 0xFFFFFFFFFFFFFFFF
_PERSONS: dict[str, bytes] = {}


def _person(purpose: str) -> bytes:
    # blake2b's personalisation field keeps purposes apart without lengthening the message.
    person = _PERSONS.get(purpose)
    if person is None:
        person = purpose.encode()
        if len(person) > 16:
            raise ValueError(f"a key's purpose has at most 16 bytes, got {purpose!r}")
        _PERSONS[purpose] = person
    return person
