"""``python -m lightning_h5``."""

from .cli import main

if __name__ == "__main__":
    main()
