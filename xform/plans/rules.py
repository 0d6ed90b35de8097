"""MaxText's logical axis rules: which mesh axes each logical axis may be laid over.

From MaxText 0.2.5, `configs/base.yml` (80 rules, 73 names) and the seven files of
`configs/custom_mesh_and_rule`. The rules of a name are tried in order; the first whose mesh axes are all
unused in that array wins. An axis that the mesh lacks counts as one of size 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from xform.registry import unknown

MESH_AXES: tuple[str, ...] = (
    "diloco",
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_sequence",
    "expert",
    "autoregressive",
)
"""The axes of MaxText's mesh, outermost first."""

Rule = tuple[str, tuple[str, ...]]
Rules = dict[str, tuple[tuple[str, ...], ...]]

_BATCH = ("data", "fsdp", "fsdp_transpose", "expert")
_LENGTH = ("context", "context_usp_ulysses")
_TENSOR = ("tensor", "tensor_sequence")
_EMBED = ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses")

MAXTEXT_RULES: tuple[Rule, ...] = (
    ("circular_repeats", ()),
    # the vocabulary: activations, then weights
    ("activation_embed_and_logits_batch", ("data", "stage", "fsdp", "fsdp_transpose", "expert")),
    ("activation_embed_and_logits_batch_sequence", ("data", "stage", *_EMBED, "expert")),
    ("activation_vocab", _TENSOR),
    ("activation_vocab", ("tensor",)),
    ("activation_vocab", ("tensor_sequence",)),
    ("vocab", (*_TENSOR, "autoregressive")),
    ("embed_vocab", (*_EMBED, "expert")),
    # attention: activations, then weights
    ("activation_batch_attn", _BATCH),
    ("activation_input_length_attn", ("tensor_sequence", "context")),
    ("activation_heads", (*_TENSOR, "autoregressive")),
    ("activation_kv_heads", _TENSOR),
    ("activation_length_attn", _LENGTH),
    ("activation_q_length", _LENGTH),
    ("activation_kv_length", ()),
    ("activation_embed_attn", ("tensor",)),
    ("activation_kv", _TENSOR),
    ("activation_kv_batch", _BATCH),
    ("activation_kv_head_dim", _TENSOR),
    ("heads", (*_TENSOR, "autoregressive")),
    ("q_heads", (*_TENSOR, "autoregressive")),
    ("kv_heads", (*_TENSOR, "autoregressive")),
    ("qkv", ()),
    ("kv", ()),
    ("kv_head_dim", ()),
    ("q_lora", (*_EMBED, "expert")),
    ("q_lora", ("fsdp", *_LENGTH, "expert")),
    ("q_lora_up_proj", ()),
    ("kv_lora", (*_EMBED, "expert")),
    ("kv_lora", ("fsdp", *_LENGTH, "expert")),
    ("kv_lora_up_proj", ()),
    ("embed_attn", (*_EMBED, "expert")),
    # mixture of experts: activations, then weights
    ("activation_batch_moe", _BATCH),
    ("activation_length_moe", _LENGTH),
    ("activation_norm_length_moe", ("tensor_sequence", *_LENGTH)),
    ("activation_embed_moe", ("tensor",)),
    ("activation_mlp_moe", _TENSOR),
    ("activation_exp", ("expert",)),
    ("exp", ("expert",)),
    ("mlp_moe", ("fsdp_transpose", *_TENSOR, "autoregressive")),
    ("embed_moe", _EMBED),
    ("embed_moe", ("fsdp", *_LENGTH)),
    ("embed_router", _EMBED),
    ("embed_router", ("fsdp", *_LENGTH)),
    # dense layers and the residual stream: activations, then weights
    ("segment_ids_batch", _BATCH),
    ("activation_mlp", _TENSOR),
    ("activation_batch", _BATCH),
    ("activation_length", _LENGTH),
    ("activation_norm_length", ("tensor_sequence", *_LENGTH)),
    ("activation_embed", ("tensor",)),
    ("activation_stage", ("stage",)),
    ("mlp", ("fsdp_transpose", *_TENSOR, "autoregressive")),
    ("gdn_head", ("fsdp_transpose", *_TENSOR, "autoregressive")),
    ("embed", (*_EMBED, "expert")),
    ("embed", ("fsdp", *_LENGTH, "expert")),
    ("norm", ("tensor",)),
    ("layers", ("stage",)),
    ("diloco", ("diloco",)),
    ("engram_dim", ("tensor",)),
    ("dense_layers", ()),
    ("moe_layers", ()),
    ("local_layers", ()),
    ("mhc", ()),
    # inference: prefill, decode, cache
    ("prefill_activation_length", _LENGTH),
    ("prefill_activation_norm_length", ("tensor_sequence", *_LENGTH)),
    ("activation_prefill_kv_batch", _BATCH),
    ("decode_batch", _BATCH),
    ("decode_length", ()),
    ("cache_heads", ("autoregressive", *_TENSOR)),
    ("paged_kv_heads", ("tensor",)),
    ("cache_batch_prefill", ()),
    ("cache_batch", ()),
    ("cache_heads_none", ()),
    ("cache_kv", ()),
    ("cache_sequence", ()),
    ("num_pages", ()),
    ("tokens_per_page", ()),
    ("paged_kv_head_dim_size", ()),
    # deprecated there
    ("mlp_no_fsdp", (*_TENSOR, "autoregressive")),
    ("exp_with_fsdp", ("fsdp",)),
)
"""The base rules, in MaxText's order."""


def ways(names: Sequence[str], sizes: Mapping[str, int], taken: Sequence[str] = ()) -> int:
    """Over how many devices of a mesh, given as sizes by axis, an array with dimensions of these names lies
    by the base rules, the first of each name. taken: names that have taken their axes before.
    """
    first = dict(reversed(MAXTEXT_RULES))
    axes, before = ({axis for name in given for axis in first.get(name, ())} for given in (names, taken))
    return math.prod(sizes.get(axis, 1) for axis in axes - before)


@dataclasses.dataclass(frozen=True)
class RuleFile:
    """One of MaxText's preset rule files: the axes of its mesh, and where it departs from the base rules.

    A name that is not among the departures keeps its base rules, less the axes that the mesh lacks. The files
    leave out some names, which MaxText then does not shard: the batch of segment ids, of decoding and of
    prefill, lengths of prefill, `gdn_head`, `activation_input_length_attn`. They are departures here only
    where the base rule would contradict the file; elsewhere they go with their kind.
    """

    mesh: tuple[str, ...]
    departures: Mapping[str, tuple[tuple[str, ...], ...]]


_DATA_FSDP = (("data", "fsdp"),)
_FSDP = (("fsdp",),)

RULE_FILES: dict[str, RuleFile] = {
    # Every axis of the batch and every weight on one axis.
    "pure_fsdp": RuleFile(("fsdp",), {}),
    # Context carries activations only: a large model's weights are not gathered over it.
    "pipeline_large_moe": RuleFile(
        ("data", "stage", "fsdp", "context", "tensor", "expert"),
        {
            "embed": (("fsdp", "expert"),),
            "embed_attn": (("fsdp", "expert"),),
            "embed_vocab": (("fsdp", "expert"),),
            "embed_moe": _FSDP,
            "embed_router": _FSDP,
            "q_lora": _FSDP,
            "kv_lora": _FSDP,
            "activation_batch_moe": _DATA_FSDP,
            "activation_length_moe": (),
        },
    ),
    # The context axis carries experts as well where there are experts, so the tokens' length is whole there.
    "cp_as_ep": RuleFile(
        ("data", "stage", "fsdp", "context", "expert"),
        {
            "activation_embed_and_logits_batch_sequence": (("data", "stage", "fsdp", "expert"),),
            "activation_batch_moe": _DATA_FSDP,
            "activation_length_moe": (),
            "activation_norm_length_moe": (),
            "activation_exp": (("context", "expert"),),
            "exp": (("context", "expert"),),
            "embed_moe": _FSDP,
            "embed_router": _FSDP,
        },
    ),
    # The expert axis carries the length outside the experts.
    "ep_as_cp": RuleFile(
        ("data", "stage", "fsdp", "expert"),
        {
            "activation_embed_and_logits_batch": (("data", "stage", "fsdp"),),
            "activation_batch": _DATA_FSDP,
            "activation_batch_attn": _DATA_FSDP,
            "activation_batch_moe": _DATA_FSDP,
            "activation_kv_batch": _DATA_FSDP,
            "activation_prefill_kv_batch": _DATA_FSDP,
            "decode_batch": _DATA_FSDP,
            "segment_ids_batch": _DATA_FSDP,
            "activation_length": (("expert",),),
            "activation_length_attn": (("expert",),),
            "activation_norm_length": (("expert",),),
            "activation_q_length": (("expert",),),
            "q_lora": _FSDP,
            "kv_lora": _FSDP,
        },
    ),
    # The expert axis carries batch outside the experts, and no weight but theirs.
    "ep_as_dp": RuleFile(
        ("data", "fsdp", "fsdp_transpose", "expert"),
        {
            "embed": (("fsdp", "fsdp_transpose"), ("fsdp",)),
            "embed_attn": (("fsdp", "fsdp_transpose"),),
            "embed_vocab": (("fsdp", "fsdp_transpose"),),
            "embed_moe": _FSDP,
            "embed_router": _FSDP,
            "q_lora": _FSDP,
            "kv_lora": _FSDP,
        },
    ),
    # As ep_as_dp, but attention's weights lie on the expert axis: for them fsdp is data parallelism.
    "fsdp_as_dp_for_attn": RuleFile(
        ("data", "fsdp", "fsdp_transpose", "expert"),
        {
            "embed": (("fsdp", "fsdp_transpose"), ("fsdp",)),
            "embed_attn": (("expert",),),
            "embed_vocab": (("fsdp", "fsdp_transpose"),),
            "embed_moe": _FSDP,
            "embed_router": (),
            "q_lora": (("expert",),),
            "kv_lora": (("expert",),),
        },
    ),
    # fsdp divides the experts, not their embed side.
    "shard_exp_on_fsdp": RuleFile(
        ("data", "stage", "fsdp", "fsdp_transpose", "context", "expert"),
        {
            "exp": (("expert", "fsdp"),),
            "embed_moe": (("context",),),
            "embed_router": (("context",),),
            "activation_batch_moe": (("data", "fsdp", "fsdp_transpose"),),
            "embed": (("fsdp", "context", "expert"),),
            "embed_attn": (("fsdp", "context", "expert"),),
            "q_lora": (("fsdp", "fsdp_transpose", "expert"),),
            "kv_lora": (("fsdp", "fsdp_transpose", "expert"),),
        },
    ),
}
"""MaxText's preset rule files by name."""


def table(rules: Sequence[Rule] = MAXTEXT_RULES) -> Rules:
    """Rules as a mapping: each name to its alternatives in order. No alternative at all: never sharded."""
    names: Rules = {}
    for name, axes in rules:
        names[name] = (*names.get(name, ()), *((axes,) if axes else ()))
    return names


def restrict(rules: Mapping[str, Sequence[Sequence[str]]], mesh: Collection[str]) -> Rules:
    """The rules that are left on a mesh of these axes; what then says the same twice is said once."""
    kept: Rules = {}
    for name, alternatives in rules.items():
        on_mesh = (tuple(axis for axis in axes if axis in mesh) for axes in alternatives)
        kept[name] = tuple(dict.fromkeys(axes for axes in on_mesh if axes))
    return kept


def base_rules(name: str = "maxtext") -> Rules:
    """A whole set of rules by name: MaxText's base rules, or one of its rule files on the axes of its mesh.

    Raises `PlanError` for another name.
    """
    if name == "maxtext":
        return table()
    if name not in RULE_FILES:
        raise unknown("set of rules", name, ("maxtext", *RULE_FILES))
    return restrict(table(), RULE_FILES[name].mesh) | dict(RULE_FILES[name].departures)
