"""Arrays in eight bits and fewer, and products of them: formats, scales, recipes."""
