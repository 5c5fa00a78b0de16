"""HF-format checkpoints through torch's distributed checkpoint: what both implementations share.

``format``: headers, names, bytes. ``catalog``: what a folder holds, and whether its bytes are those that were saved.
``publish``: how a checkpoint appears. ``plan``: what is taken from a state dict, and which tensor lies where.
``shards``: files of one process, and consolidation. ``dcp``: the storage writer and the readers. ``native``:
checkpoints of torch's own format. ``manager``: a trainer's policy over both formats. Each module imports only modules
before it in this list.

Tensor data moves in engines, which an implementation binds: ``plan.SaveEngine``, ``catalog.LoadEngine``,
``shards.Merge``, ``shards.FileBytes`` and ``dcp.Dequantize``.
"""
