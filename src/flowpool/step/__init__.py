"""The one-step embedding: what each point of a shared reference receives of a graph."""
