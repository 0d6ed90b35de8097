"""How often a Llama's weights are gathered and its gradients scattered; traced, not run."""

from collections import Counter

import pytest

from xform import Plan, Shard, parallelize
from xform.higher_order import equations
from xform.models import llama
from xform.passes.chunkedloss import ChunkedLoss
from xform.spmd.ledger import ledger
from xform.spmd.values import WEIGHT

BATCH = 512  # rows enough that weights are less to move than activations


def traced(mesh, *passes, scan=False, **options):
    fn, args = llama.train_step(size="tiny", batch=BATCH, length=64, scan=scan)
    plan = Plan(mesh, [Shard(strict=False, collectives="explicit", **options), *passes])
    program = parallelize(fn, plan).trace(*args)
    return program, ledger(program.jaxpr, mesh)


def gathers(sent, name):
    return [s for s in sent if s.kind == "all-gather" and WEIGHT in s.where and name in s.where]


def test_of_unrolled_layers_the_backward_pass_gathers_anew_after_it_has_begun():
    """Else the compiler makes one gather of both, and all weights stay together in between."""
    program, sent = traced({"fsdp": 8})
    passes = Counter("transpose(" in s.where for s in gathers(sent, "layers.0.mlp.up.kernel"))
    assert passes == {False: 1, True: 1}
    barriers = [e for e in equations(program.jaxpr) if e.primitive.name == "optimization_barrier"]
    assert len(barriers) >= len({s.where for s in gathers(sent, "layers.") if "transpose(" in s.where})
    # The head's backward pass follows its forward pass at once: one gather does for both.
    assert len(gathers(sent, "head.kernel")) == 1


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_gradients_of_one_residual_are_summed_before_they_are_scattered(scan):
    """Those that come of q, k and v are one scatter over the tensor axis, those of gate and up another."""
    _, sent = traced({"fsdp": 2, "tensor": 4}, scan=scan)
    scattered = [
        s
        for s in sent
        if s.kind == "reduce-scatter" and s.axes == ("tensor",) and "transpose(" in s.where
        if s.shape[-1] == llama.SIZES["tiny"].embed
    ]
    layers = llama.SIZES["tiny"].layers
    assert sum(s.times for s in scattered) == 2 * layers + 1  # and the head's


def test_a_loop_over_chunks_gathers_the_head_before_it():
    program, sent = traced({"fsdp": 8}, ChunkedLoss(4, gather="each"), scan=True)
    assert {s.times for s in gathers(sent, "head.kernel")} == {1}
    # The length, in chunks, is two factors: layers are laid out all the same.
    assert "activation [batch x length·length x mlp]" in str(program.report)
