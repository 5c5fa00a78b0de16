"""Planted bugs of offload; many of them shipped upstream."""
