"""All spellings of attention, and all of its look-alikes."""

from tests.spellings import (
    attention_heads,
    attention_layouts,
    attention_masks,
    attention_models,
    attention_near,
    attention_others,
    attention_softmax,
    attention_used,
)

SPELLINGS = {
    **attention_layouts.SPELLINGS,
    **attention_softmax.SPELLINGS,
    **attention_masks.SPELLINGS,
    **attention_heads.SPELLINGS,
    **attention_models.SPELLINGS,
}
LOOKALIKES = {**attention_near.LOOKALIKES, **attention_used.LOOKALIKES, **attention_others.LOOKALIKES}
