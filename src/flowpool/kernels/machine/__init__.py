"""What the kernels stand on: how they are compiled, their rows, lanes, memory and threads."""
