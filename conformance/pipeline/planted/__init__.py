"""Planted bugs of embeddings and pipelines; many of them shipped in torchrec and FBGEMM."""
