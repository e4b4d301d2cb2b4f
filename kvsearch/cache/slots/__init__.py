"""Where slots are held: dense for an evaluation, packed for a deployed cache."""
