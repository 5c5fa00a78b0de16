"""The meaning: each component once more, in plain PyTorch, short and obvious.

An implementation of twinproof's contract is any package with some of the submodules ``kvstore``, ``pipeline``,
``offload`` and ``checkpoint``, each with the same public names as here.
"""
