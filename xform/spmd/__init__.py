"""A program from the view of one shard, in one manual region, with its collectives written out.

`written` is the way in: `partition` makes the region, in which `walk` goes over the program, and `ledger` and
`traffic` count what it sends. `layout` says how a value lies, `moves` how it gets from one layout to another,
`forms` what operations do to dimensions, `choice` in which layout one runs. The other modules are operations
that take more: bodies (`loops`, `calls`), indices (`lookups`), prefixes, random bits, blocks.
"""
