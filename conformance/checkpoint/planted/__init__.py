"""Planted bugs of checkpoint: small faults, many of which shipped in torch, torchtitan or safetensors."""
