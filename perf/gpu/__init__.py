"""What a GPU machine is asked for: steps of evidence, each component's in a module of its stem.

This package and the modules with ``STEPS`` import nothing but the standard library and ``perf.harness.steps``: a step
that fails to import torch must not take the others with it. ``operators``, ``bandwidth``, ``launch``, ``library`` and
``facts`` are programs that steps run.
"""
