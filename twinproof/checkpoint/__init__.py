"""HF-format checkpoints through torch's distributed checkpoint: what both implementations share.

``format``: headers, names, bytes. ``catalog``: what a folder holds. ``checksums``: whether its bytes are
those that were saved. ``publish``: how a checkpoint appears.
``plan``: which tensor lies where. ``planners``: what is taken from a state dict. ``shards``: files of one process, and
consolidation. ``dcp``: the storage writer and reader. ``quantized``: the reader of block-quantized weights. ``native``:
torch's own format, published whole. ``manager``: a trainer's policy over both formats. Each module imports only
modules before it in this list.

Tensor data moves in engines, which an implementation binds: ``plan.SaveEngine``, ``catalog.LoadEngine``,
``shards.Merge``, ``shards.FileBytes`` and ``quantized.Dequantize``.
"""
