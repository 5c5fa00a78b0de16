"""The best plain-torch formulation of each job, and bridges to installed peers."""
