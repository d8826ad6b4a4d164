"""``python -m flowpool`` is the command ``flowpool``."""

from flowpool.cli import main

if __name__ == "__main__":  # worker processes import this module under another name
    main()
