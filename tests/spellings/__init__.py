"""Spellings of the operations that xform recognises, and look-alikes that it must leave alone.

One module an operation, each with two dicts by name: SPELLINGS, programs that are the operation, and
LOOKALIKES, each wrong in one place. No two spellings are the same program but for sizes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A program `fn(*args)`; `count` times the operation, whose entry in `xform.raised` has what `expect`
    says.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    expect: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    count: int = 1


@dataclasses.dataclass(frozen=True)
class LookAlike:
    """A program that is not the operation. why: what its reason has to speak of (a regular expression), where
    it is near enough that it has to be declined; "" where silence will do.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    why: str = ""


_MISSED = {
    "which of its products belong to one layer of experts is not told": "experts-batched",
    "its heads, or the dimension that is contracted, are split or joined where they are multiplied": """
        attention-head_dim_in_two_parts attention-blocks_of_their_own attention-groups_by_stack_and_reshape
        attention-product_and_sum_in_place_of_dots attention-pair_bias_and_gate_like_alphafold
        attention-decode_with_a_cursor_for_each_row attention-latent_keys_absorbed""",
    "its sum over the keys is a product with ones": """
        attention-sum_by_a_product_with_ones attention-sum_by_a_column_of_ones_beside_the_values""",
    "what is added to its logits is computed from its queries, or is made of the scores": """
        attention-bias_of_pairs attention-segment_anything_like attention-sink_of_a_logit_of_zero
        attention-causal_by_a_product_and_a_difference attention-decode_from_pages""",
    "its mask is read as arbitrary, or by another name": """
        attention-segments_counted_from_ends_of_text attention-segments_padding_and_causal_multiplied
        attention-padding_added_where_the_mask_is_set attention-padding_by_a_boolean_less_one
        attention-minimum_of_two_added_masks attention-sum_of_two_added_masks attention-bloom_like
        attention-t5x_like attention-dpa_with_lengths_of_keys""",
    "it is left alone, without the reason that it should have": """
        attention-sum_with_a_maximum_of_its_own attention-another_mask_above_than_below""",
}

MISSED: Mapping[str, str] = {name: why for why, names in _MISSED.items() for name in names.split()}
"""Spellings that are not recognised, or not as what they are, yet, and why: what is to be done."""
