"""Requirements, state machine and planted bugs of offload. Empty until the component lands: nothing is collected here."""
