"""Who finds the pooled points: the seam between the core and what computes with it."""
