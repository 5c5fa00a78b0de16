"""Programs that drive upstream's own stream code, as its users would; ``twinproof race`` runs them (docs/race.md)."""
