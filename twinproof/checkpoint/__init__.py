"""HF-format checkpoints through torch's distributed checkpoint: format, plan, publication and readers."""
