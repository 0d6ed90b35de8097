"""Stacks of layers over the stages of a mesh axis: a microbatch's program cut at its stacks, a schedule's
table as what a program runs, and the loops over its ticks.

`cutting` takes a microbatch's program apart into `pieces`, by what values are made of (`origins`); `travel`
numbers what goes from stage to stage, `balance` says how many layers a block has, `layer` has the programs of
one layer and of its gradients. `ticks` says for each tick where a stage takes from and puts, `rounds` which
ticks are a loop. `setting` is what one pass over all microbatches is made of. Then what is done: `chunks`
runs a chunk on a stage, `stages` all of them and what they send, `ends` what is before and after the stacks,
`weights` what comes together and is summed; `loop` puts them in loops of ticks, in the place of the scan over
microbatches. `choice` tries schedules.
"""

from xform.pipeline.loop import Pipelined
from xform.pipeline.setting import Shape

__all__ = ["Pipelined", "Shape"]
