"""Who writes a head's position: shares of the sources of queries and keys, and hooks that remove a source."""

from tl_posgen.sources.sources import Sources

__all__ = ["Sources"]
