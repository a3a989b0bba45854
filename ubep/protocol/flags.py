"""The flag word and the epoch. The one place where either is packed, unpacked or advanced."""

from __future__ import annotations

FIRST_EPOCH = 1
EPOCHS = 1 << 32
PARITIES = 2
PAYLOAD_MASK = (1 << 32) - 1


def pack_word(epoch: int, payload: int) -> int:
    """`epoch << 32 | payload` as the signed 64-bit integer that torch's int64 holds."""
    word = (epoch << 32) | payload
    return word - (1 << 64) if word >= 1 << 63 else word


def unpack_word(word: int) -> tuple[int, int]:
    """(epoch, payload) of a signed or unsigned 64-bit word."""
    return (word >> 32) & PAYLOAD_MASK, word & PAYLOAD_MASK


AFTER_WRAP = 2


def next_epoch(epoch: int) -> int:
    """The epoch after this one. Wraps at 2^32 to 2, not to 0.

    So parity (epoch mod 2) goes on alternating, and memory that was never written (zero) never
    matches. Receivers compare epochs for equality, never for order.
    """
    return epoch + 1 if epoch + 1 < EPOCHS else AFTER_WRAP


def clears_other_parity(epoch: int) -> bool:
    """Whether a rank must clear the other parity of its window before it announces this epoch.

    A word that not every operation writes (a chunk's) could otherwise hold this very epoch from one
    wrap ago. Just before its announcement nobody writes there: peers' puts of the epoch before have
    been consumed, and they reach the epoch after only once they have heard it. (They may still read
    rows there, so only what tells epochs is cleared.) Once around the wrap for each parity is enough,
    and does no harm in the second operation of all.
    """
    return epoch in (EPOCHS - 1, AFTER_WRAP)


def parity(epoch: int) -> int:
    """Which of the two copies of the window this epoch uses."""
    return epoch % PARITIES
