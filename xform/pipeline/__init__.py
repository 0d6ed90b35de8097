"""A stack of layers over the stages of a mesh axis: a microbatch's program cut at its stack, a schedule's
table as what a program runs, and the loops over its ticks.

`cutting` takes a microbatch's program apart, `layer` has the programs of one layer and of its gradients,
`ticks` says for each tick where a stage takes from and puts, `chunks` runs a chunk on a stage, and `loop`
puts it together, in the place of the scan over microbatches.
"""

from xform.pipeline.loop import Pipelined
from xform.pipeline.setting import Shape

__all__ = ["Pipelined", "Shape"]
