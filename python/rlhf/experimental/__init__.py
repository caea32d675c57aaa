"""Modules by the names that TRL has for what it tries out."""
