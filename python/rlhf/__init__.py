"""RLHF for language models: the program `rlhf`, its libtorch, and this small package, which starts it.

The command is `rlhf`; `python -m rlhf` is the same.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
