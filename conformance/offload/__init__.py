"""Requirements, state machine and planted bugs of offload: empty until the component lands."""
