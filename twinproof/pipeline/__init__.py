"""Batches, sharded embeddings and training pipelines: types, plans, state dicts and policy."""
