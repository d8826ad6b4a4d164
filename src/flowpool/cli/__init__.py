"""The command ``flowpool``."""
