"""Streams, events, copies and staging memory behind one interface: see ``twinproof.engine``."""

from twinproof.engine import CudaEngine, Engine, InlineEngine, engine_for

__all__ = ["CudaEngine", "Engine", "InlineEngine", "engine_for"]
