"""Blocks of attention: what the table gives for a shape, what a plan may ask for, and what does not fit."""

import pytest

from xform.errors import Decline, PlanError
from xform.kernels.blocks import CHIPS, Blocks, Shape, Sizes, backward_sizes, forward_sizes, needed

CHIP = pytest.mark.parametrize("chip", CHIPS)
LENGTHS = (1, 7, 100, 128, 197, 600, 1500, 2048, 2049, 5000, 32768)


def shape(rows: int, keys: int, d: int = 128, itemsize: int = 2, segments: bool = False) -> Shape:
    return Shape(rows, keys, d, d, itemsize, segments)


@CHIP
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("d, itemsize", [(64, 2), (128, 4), (256, 4), (576, 2)])
def test_blocks_divide_padded_lengths_and_fit_the_chip(chip: str, length: int, d: int, itemsize: int) -> None:
    of = shape(length, length, d, itemsize, segments=True)
    for kind, sizes in (("forward", forward_sizes), ("dkv", backward_sizes)):
        made = sizes(of, chip, Blocks())
        assert length <= made.rows < length + made.q and length <= made.keys < length + made.kv
        assert made.rows % made.q == made.keys % made.kv == made.kv % made.kv_compute == 0
        assert needed(kind, made.q, made.kv, made.kv_compute, of) <= CHIPS[chip].vmem
        if kind == "dkv" and not made.fused:
            assert made.rows % made.q_dq == made.keys % made.kv_dq == 0
            assert needed("dq", made.q_dq, made.kv_dq, 0, of) <= CHIPS[chip].vmem


@CHIP
def test_padding_is_less_than_an_eighth_of_long_lengths(chip: str) -> None:
    for length in range(1024, 9000, 97):
        for sizes in (forward_sizes, backward_sizes):
            made = sizes(shape(length, length), chip, Blocks())
            assert max(made.rows, made.keys) <= length * 9 / 8 + 128


def test_few_queries_are_one_small_block() -> None:
    made = forward_sizes(shape(3, 1000), "v5e", Blocks())
    assert (made.rows, made.q) == (16, 16)


def test_the_backward_pass_is_one_kernel_as_long_as_keys_are_few_blocks() -> None:
    fused = {s: backward_sizes(shape(s, s), "v5e", Blocks()).fused for s in (7, 512, 2048, 2049, 32768)}
    assert fused == {7: True, 512: True, 2048: True, 2049: False, 32768: False}
    assert not backward_sizes(shape(7, 7), "v5e", Blocks(use_fused_bwd_kernel=False)).fused
    assert not backward_sizes(shape(7, 7), "v5e", Blocks(block_q_dq=128)).fused
    assert backward_sizes(shape(4096, 4096), "v5e", Blocks(use_fused_bwd_kernel=True)).fused


def test_a_plan_overrides_the_table_and_lengths_are_padded_for_it() -> None:
    assert forward_sizes(shape(600, 700), "v5e", Blocks(128, 384, 128)) == Sizes(640, 768, 128, 384, 128)
    two = Blocks(
        block_q_dkv=256, block_kv_dkv=512, block_q_dq=384, block_kv_dq=128, use_fused_bwd_kernel=False
    )
    assert backward_sizes(shape(600, 700), "v5e", two) == Sizes(768, 1024, 256, 512, 512, 384, 128)


def test_blocks_are_no_larger_than_what_there_is() -> None:
    assert forward_sizes(shape(100, 200), "v5e", Blocks(2048, 2048)) == Sizes(112, 256, 112, 256, 256)


@pytest.mark.parametrize(
    "blocks, said",
    [
        (Blocks(block_q=100), "block_q = 100 is no positive multiple of 128"),
        (Blocks(block_kv=0), "block_kv = 0 is no"),
        (Blocks(block_kv=512, block_kv_compute=384), "block_kv_compute = 384 does not divide block_kv = 512"),
        (
            Blocks(block_q=2048, block_kv=2048),
            r"block_q = 2048 and block_kv = 2048 need .* of which v5e has 16",
        ),
    ],
)
def test_an_option_that_cannot_be_honoured_is_named(blocks: Blocks, said: str) -> None:
    with pytest.raises(PlanError, match=f"kernels.blocks: attention: {said}"):
        forward_sizes(shape(4096, 4096), "v5e", blocks)


def test_what_does_not_fit_one_chip_fits_a_larger_one() -> None:
    assert forward_sizes(shape(4096, 4096), "v6e", Blocks(2048, 2048)).q == 2048


def test_heads_that_fit_in_no_blocks_are_declined() -> None:
    with pytest.raises(Decline, match=r"heads of 16384 need .* with the smallest blocks"):
        forward_sizes(shape(4096, 4096, 16384), "v5e", Blocks())
