"""Flag words and epochs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ubep.protocol.flags import EPOCHS, next_epoch, pack_word, parity, unpack_word

u32 = st.integers(0, EPOCHS - 1)


@given(u32, u32)
def test_a_word_holds_epoch_and_payload_and_fits_int64(epoch: int, payload: int) -> None:
    word = pack_word(epoch, payload)
    assert -(2**63) <= word < 2**63
    assert unpack_word(word) == (epoch, payload)


@given(u32)
def test_consecutive_epochs_alternate_parity_and_are_never_zero(epoch: int) -> None:
    following = next_epoch(epoch)
    assert 0 < following < EPOCHS
    assert parity(following) != parity(epoch)


def test_the_wrap_skips_the_value_of_untouched_memory() -> None:
    assert next_epoch(EPOCHS - 1) == 2
