"""Planted bugs of the row store; many of them shipped in FBGEMM."""
