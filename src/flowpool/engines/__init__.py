"""Who finds the pooled points: the interface, two engines, and the choice between them."""
