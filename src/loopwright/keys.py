"""Keyed seeds: every random number of a run follows from a purpose and a position.

A key is a 64-bit hash of (seed, purpose, parts). Different tuples give unrelated keys; the same tuple gives the same
key on every machine, forever (golden vectors in the tests pin it).
"""

from __future__ import annotations

from hashlib import blake2b


def key(seed: int, purpose: str, *parts: int) -> int:
    """Return the 64-bit key of a purpose ("order", "fetch", ...) at a position, usually (epoch, index).

    The seed is taken modulo 2**64. Different purposes never share a stream.
    """
    *first, last = (seed, *parts)
    return KeyStream(*first, purpose=purpose).at(last)


class KeyStream:
    """The keys of a purpose that differ only in their last part: `key(seed, purpose, epoch, i)` for every i."""

    def __init__(self, *parts: int, purpose: str) -> None:
        person = purpose.encode()
        if len(person) > 16:
            raise ValueError(f"a key's purpose has at most 16 bytes, got {purpose!r}")
        # blake2b's personalisation field separates purposes without lengthening the message.
        words = b"".join((part & _MASK).to_bytes(8, "little") for part in parts)
        self._prefix = blake2b(words, digest_size=8, person=person)

    def at(self, index: int) -> int:
        """Return the key whose last part is this index."""
        digest = self._prefix.copy()
        digest.update((index & _MASK).to_bytes(8, "little"))
        return int.from_bytes(digest.digest(), "little")


def forward_key(fetch_key: int) -> int:
    """Return the key of a micro-batch's forward pass, from the key of its fetch."""
    return fetch_key ^ _FORWARD


_MASK = 0xFFFFFFFFFFFFFFFF
_FORWARD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: differs from 0 in many bits
