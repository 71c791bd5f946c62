"""Who writes a head's position: shares of the sources of queries and keys."""
